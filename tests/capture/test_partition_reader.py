"""The reader of one partition by itself: what it commits, and in which order, at barriers and after a batch that cannot be repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.capture.partition_reader import Claim, Habits, PartitionReader
from sluiceway.model.task_records import CHANGES, AnnouncedPartition, PositionRecord
from sluiceway.ports.change_stream import Barrier, Batch, End, PlanLostError, SeedsUpto
from sluiceway.ports.position_store import Opening
from sluiceway.testing.drive import driven

HABITS = Habits(limit=2, pause=1, settle=1, heartbeat=10**9)


def records(*names: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"position": name, "payload": name.encode()} for name in names], schema=CHANGES)


class Parts:
    """A stream that has these batches by position, the positions and the sink; `said` has what happens, in order."""

    def __init__(self, batches: Mapping[str, Batch], kept: PositionRecord) -> None:
        self.batches = batches
        self.said: list[Any] = []
        self.told = asyncio.Event()
        opening = Opening("p", 1, 1)
        self.claim = Claim(opening, kept, kept.position or "begin", lambda children: None, self._tell_barrier)

    def _tell_barrier(self, barrier: Barrier) -> None:
        self.said.append(("barrier", barrier.mark))
        self.told.set()

    async def read_all(self) -> End | None:
        parts: Any = self
        return await PartitionReader(parts, parts, parts, HABITS).read(self.claim)

    # As a stream.

    async def read(self, partition: str, position: str, upto: str | None = None, limit: int = 0) -> Batch:
        if upto is not None:
            raise PlanLostError("it has gone")
        self.said.append(("read", position))
        return self.batches[position]

    async def kept(self, partition: str, position: str) -> None:
        """It keeps everything."""

    async def seeds(self, after: str) -> SeedsUpto:
        raise NotImplementedError

    def left(self, partition: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    # As a position store and a sink.

    async def commit(self, opening: Opening, kept: PositionRecord) -> None:
        self.said.append(("commit", kept.position, kept.plan, kept.batch))

    async def write(self, partition: str, batch: int, records: pa.RecordBatch) -> None:
        self.said.append(("write", batch, b" ".join(records.column("payload").to_pylist()).decode()))

    async def open(self, token: str, grant: int) -> tuple[Opening, PositionRecord]:
        raise NotImplementedError

    async def forget(self, tokens: Any) -> None:
        raise NotImplementedError


END = Batch(records(), None, end=End((AnnouncedPartition("c", ("p",)),), 9))


@driven
async def test_everything_before_a_barrier_is_committed_before_it_is_told_and_nothing_is_read_beyond() -> None:
    barrier = Barrier(7, ("p>q",), ("q>p",), "after")
    parts = Parts({"begin": Batch(records("a", "b"), "two", barrier=barrier), "after": END}, PositionRecord())
    reading = asyncio.create_task(parts.read_all())
    await parts.told.wait()
    await asyncio.sleep(0)
    assert parts.said == [
        ("read", "begin"),
        ("commit", None, "two", 1),
        ("write", 1, "a b"),
        ("commit", "two", None, 1),
        ("barrier", 7),
    ]
    parts.claim.let_cross(6)
    parts.claim.let_cross(7)
    assert await reading == END.end
    assert parts.said[5:] == [("read", "after"), ("commit", "after", None, 1)]


@driven
async def test_a_barrier_that_a_reader_comes_back_to_needs_no_commit() -> None:
    barrier = Barrier(7, (), ("q>p",), "after")
    parts = Parts({"two": Batch(records(), None, barrier=barrier), "after": END}, PositionRecord(position="two", batch=1))
    reading = asyncio.create_task(parts.read_all())
    await parts.told.wait()
    assert parts.said == [("read", "two"), ("barrier", 7)]
    parts.claim.let_cross(7)
    await reading


@driven
async def test_a_reader_that_is_to_stop_leaves_its_barrier() -> None:
    barrier = Barrier(7, (), ("q>p",), "after")
    parts = Parts({"begin": Batch(records("a"), "one", barrier=barrier)}, PositionRecord())
    reading = asyncio.create_task(parts.read_all())
    await parts.told.wait()
    parts.claim.stopping.set()
    assert await reading is None
    assert parts.said[-2:] == [("commit", "one", None, 1), ("barrier", 7)]


@driven
async def test_a_batch_that_cannot_be_repeated_is_read_anew_under_a_higher_number(caplog: pytest.LogCaptureFixture) -> None:
    kept = PositionRecord(position="one", plan="three", batch=4, records=8)
    parts = Parts({"one": Batch(records("b", "c", "d"), "four"), "four": END}, kept)
    assert await parts.read_all() == END.end
    # The next read goes on beside the writing.
    assert [each for each in parts.said if each != ("read", "four")] == [
        ("commit", "one", None, 4),
        ("read", "one"),
        ("commit", "one", "four", 5),
        ("write", 5, "b c d"),
        ("commit", "four", None, 5),
    ]
    assert "batch 4 is read anew, and may arrive twice" in caplog.text
