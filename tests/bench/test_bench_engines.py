"""`python -m bench engines`: each engine that is installed reads all items and completes them."""

from __future__ import annotations

import pytest

from bench import engines


def test_engines_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["pyarrow", "polars", "duckdb", "pandas"]
    given = ["--engines", *names, "--items", "300", "--bytes", "10", "100", "--rounds", "1"]
    assert engines.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "300 items of 10 B: items/s, median of 1 rounds" in lines
    assert "30 items of 100 B: items/s, median of 1 rounds" in lines
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names] == names * 2
