"""`python -m bench against REF`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import against
from bench.against import Turns


def pair(ours: int, theirs: int, cost: float) -> tuple[Turns, Turns]:
    """A second of each with so many items, and with the cost of ours as a multiple of theirs."""
    return Turns(ours, 1.0, cost * ours), Turns(theirs, 1.0, theirs)


@pytest.mark.parametrize(("count", "ranks"), [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15))])
def test_an_interval_is_the_one_of_the_sign_test(count: int, ranks: tuple[int, int]) -> None:
    # The ranks of the tables of order statistics.
    assert against.interval([float(rank) for rank in range(count, 0, -1)]) == ranks


def test_few_rounds_decide_nothing() -> None:
    assert against.interval([1.0] * 5) is None
    assert against.verdict(None) == "undecided"


@pytest.mark.parametrize(
    ("around", "said"), [((0.98, 1.0), "met"), ((0.9, 0.97), "slower"), ((0.97, 1.2), "undecided"), ((0.9, 0.98), "undecided")]
)
def test_only_a_whole_interval_decides(around: tuple[float, float], said: str) -> None:
    assert against.verdict(around) == said


def test_a_ratio_is_of_one_round() -> None:
    # The machine halved its speed after the third round.
    pairs = [pair(990, 1_000, 1.25)] * 3 + [pair(495, 500, 1.25)] * 3
    figures = against.figures_of(pairs)
    assert figures["ratio"] == 0.99
    assert figures["interval"] == [0.99, 0.99]
    assert figures["server_us_ratio"] == 1.25
    assert figures["verdict"] == "met"
    about = {"here": "a", "against": "b", "at": "2026-01-31T08:00:00Z", "machine": "x", "rounds": 6, "seconds": 1.5, "loads": [0.5, 2.0]}
    text = against.markdown({**about, "cases": {"single-cycle-c64": figures}})
    assert "| single-cycle-c64 | 742 | 750 | 0.990 × (0.990 to 0.990) | ≥ 0.98: met | 1.250 × (1.250 to 1.250) |" in text


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose `make setup` notes each run in its `.venv`."""
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    (tmp_path / "Makefile").write_text("setup:\n\t@mkdir -p .venv/bin && cat version >>.venv/bin/python\n")
    (tmp_path / "version").write_text("old\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "old")
    git(tmp_path, "tag", "before")
    (tmp_path / "version").write_text("new\n")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "new")
    return tmp_path


def test_the_older_commit_is_what_is_installed(checkout: Path) -> None:
    commit, python = against.installed("before")
    assert commit == against._git("rev-parse", "HEAD~1")
    assert python.read_text() == "old\n"
    assert against.installed("HEAD~1") == (commit, python)
    # Put there once, and set up each time, which does nothing when it is up to date.
    assert python.read_text() == "old\nold\n"
    assert [each.name for each in (checkout / against.CHECKOUTS).iterdir()] == [commit[:12]]


def test_a_ref_that_cannot_be_had_is_told_of(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["no-such-ref"]) == 2
    assert "no-such-ref cannot be had" in capsys.readouterr().err
    (checkout / "Makefile").write_text("setup:\n\t@false\n")
    git(checkout, "commit", "--quiet", "--all", "--message", "broken")
    assert against.main(["HEAD"]) == 2


@pytest.mark.slow
def test_both_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(against, "installed", lambda ref: ("0123456789abcdef", Path(sys.executable)))
    output = tmp_path / "against.json"
    cases = ["arrow-1000x100-c8", "single-cycle-c64"]
    assert against.main(["before", "--rounds", "2", "--seconds", "0.4", "--cases", *cases, "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert against.table(document) in capsys.readouterr().out
    assert list(document["cases"]) == cases
    for figures in document["cases"].values():
        assert figures["ratio"] > 0
        assert figures["server_us_ratio"] > 0
        assert figures["verdict"] == "undecided"
