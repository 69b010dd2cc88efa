"""Small rounds of the campaign on honest tasks, and on some that are not, which must be found out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.campaigns.kit.report import Report
from tests.campaigns.tasks.processes import Config, PlainTasks
from tests.campaigns.tasks.sabotaged_member import SABOTAGES
from tests.campaigns.tasks.shards import run_shards

pytestmark = [pytest.mark.crash, pytest.mark.slow]


def test_honest_tasks_are_found_honest(tmp_path: Path) -> None:
    report = Report("control")
    run_shards(report, tmp_path, PlainTasks, seconds=25, every=4, seed=1)
    assert not report.wrong


@pytest.mark.parametrize("guilt", SABOTAGES)
def test_others_are_found_guilty(guilt: str, tmp_path: Path) -> None:
    def make(folder: Path, config: Config, count: int, environment: Mapping[str, str]) -> PlainTasks:
        return PlainTasks(folder, config, count, {**environment, "SLUICEWAY_SABOTAGE": guilt}, "sabotaged_member")

    tally = run_shards(Report("control"), tmp_path, make, seconds=25, every=4, seed=1, patience=30)
    assert tally.counts[guilt]
