"""A Spark driver that is killed, and goes on from its checkpoint. The campaign (`make test-spark`) does so at every point."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_campaign.kills import POINTS, History
from spark_campaign.rig import BATCH, Rig
from spark_world import server

pytestmark = [pytest.mark.spark, pytest.mark.crash]

KILL, IN_BATCH = "batch-end", 1


def test_a_driver_killed_in_mid_batch_reads_the_same_rows_again(tmp_path: Path) -> None:
    """When all of the batch is written, and Spark does not know it."""
    with server(tmp_path) as world:
        kills = [(point, IN_BATCH) for point in POINTS if point.name == KILL]
        told = History(Rig(tmp_path, world, 2 * BATCH), kills).run()
        assert not told.faults.lines
        assert told.compared > 0
        assert told.again > 0
