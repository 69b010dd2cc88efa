"""A Spark driver that is killed, and goes on from its checkpoint. The campaign (`make test-spark`) does so at every point."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_campaign.kills import POINTS, History
from spark_campaign.rig import BATCH, Rig
from spark_world import server

pytestmark = [pytest.mark.spark, pytest.mark.crash]

KILLS = {"latest-end": 2, "batch-end": 3}


def test_a_driver_killed_in_mid_batch_reads_the_same_rows_again(tmp_path: Path) -> None:
    """Once before Spark has logged what was leased, and once when all is written and Spark does not know it."""
    with server(tmp_path) as world:
        kills = [(point, KILLS[point.name]) for point in POINTS if point.name in KILLS]
        told = History(Rig(tmp_path, world, 3 * BATCH), kills).run()
        assert not told.faults.lines
        assert told.compared > 0
        assert told.again > 0
