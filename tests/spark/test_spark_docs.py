"""The pages that teach Spark with Sluiceway: all of their code runs, in order, and prints what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.page_check import check
from tests.pages.test_pages import SPARK
from tests.spark.spark_world import server


@pytest.mark.spark
@pytest.mark.slow
def test_the_pages_run_and_print_what_they_show(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a user's server is, not as those of other tests are.
    monkeypatch.delenv("SLUICEWAY_SERVER__NEW_QUEUES")
    work = tmp_path / "work"
    work.mkdir()
    with server(tmp_path) as running:
        check([repository / "docs" / name for name in SPARK], running.url, work)
