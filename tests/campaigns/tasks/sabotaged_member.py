"""Tasks for control groups: a capture that does not do what it must. A campaign that finds nothing wrong with these finds nothing.

`SLUICEWAY_SABOTAGE` names what; otherwise as `tests.campaigns.tasks.member`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from simulation.bugs_tasks import ABLATIONS
from simulation.planting import planted
from sluiceway.capture.capture_sink import QueueSink, to_items
from sluiceway.capture.partition_reader import _Reading
from sluiceway.capture.streams.kinesis import KinesisStream
from sluiceway.ports.change_stream import Batch
from tests.campaigns.tasks.member import main

_for_good = ExitStack()


def write_without_keys() -> None:
    """What is handed on again is there again."""

    async def write(self: Any, partition: str, batch: int, records: pa.RecordBatch) -> None:
        await self._client.produce_arrow(self._queue_name, to_items(records))

    QueueSink.write = write  # type: ignore[method-assign]


def commit_before_writing() -> None:
    """A batch counts as handed on when it is planned."""

    async def plan(self: Any, batch: Batch) -> None:
        await self._commit(replace(self._done, position=batch.upto, batch=self._done.batch + 1))
        # So that somebody may die in between.
        await asyncio.sleep(0.3)

    _Reading._plan = plan  # type: ignore[method-assign]


def pass_over_parents() -> None:
    """A child is read as soon as it is known; and half of the shards are slow."""
    honest = KinesisStream.read

    async def read(self: KinesisStream, partition: str, *more: Any, **named: Any) -> Batch:
        if int(partition.rpartition("-")[2]) % 2:
            await asyncio.sleep(2)
        return await honest(self, partition, *more, **named)

    KinesisStream.read = read  # type: ignore[method-assign]
    bug = next(each for each in ABLATIONS if each.name == "no_parent_gate")
    _for_good.enter_context(planted(bug))


SABOTAGES: dict[str, Callable[[], None]] = {
    "doubled": write_without_keys,
    "lost": commit_before_writing,
    "out of order": pass_over_parents,
}
"""By what they are to be found guilty of."""


if __name__ == "__main__":
    SABOTAGES[os.environ["SLUICEWAY_SABOTAGE"]]()
    main()
