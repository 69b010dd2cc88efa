"""A Spark driver that is killed, and goes on from its checkpoint. The campaign (`make test-spark`) does so at every point."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.kit.report import Report
from tests.campaigns.spark.driver_kills import POINTS, History
from tests.campaigns.spark.rig import BATCH, Rig
from tests.campaigns.spark.shared import run_late, run_shared
from tests.spark.spark_world import server

pytestmark = [pytest.mark.spark, pytest.mark.crash]

KILL, IN_BATCH = "batch-end", 1


@pytest.mark.slow
def test_a_driver_killed_in_mid_batch_reads_the_same_rows_again(tmp_path: Path) -> None:
    """When all of the batch is written, and Spark does not know it."""
    with server(tmp_path) as world:
        kills = [(point, IN_BATCH) for point in POINTS if point.name == KILL]
        told = History(Rig(tmp_path, world, 2 * BATCH), kills).run()
        assert not told.faults.lines
        assert told.compared > 0
        assert told.again > 0


@pytest.mark.slow
def test_two_queries_of_a_queue_lose_nothing_and_do_nothing_twice(tmp_path: Path) -> None:
    report = Report("shared")
    run_shared(report, tmp_path, kills=3, strikes=1)
    assert not report.wrong


@pytest.mark.slow
def test_a_driver_that_comes_back_too_late_is_refused_and_goes_on_if_it_may(tmp_path: Path) -> None:
    report = Report("late")
    run_late(report, tmp_path, ["closing"])
    assert not report.wrong
