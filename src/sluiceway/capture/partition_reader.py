"""Partition reader: plans, hands on and commits the batches of a partition.

The end of a batch is committed before anything of it is handed on, and the next opener of the partition first hands on exactly that batch,
under its number. So after any crash, an idempotent sink has every record once. The commit that plans a batch also completes the one before:
one commit per batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition, DeadLetters, PositionRecord
from sluiceway.ports.change_stream import Barrier, Batch, BrokenOffError, ChangeSink, ChangeStream, End, PlanLostError, UnknownPositionError
from sluiceway.ports.position_store import Opening, PositionStore

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Claim:
    """A partition that this member may read, under its own opening, until `stopping` is set or a commit is refused.

    `kept` is the state committed at opening. If it has a plan, that batch is handed on first, under its number. `position`: where reading
    continues. `tell_children`: to be called with children known before the partition ends. `tell_barrier`: for `cross` alone.
    """

    opening: Opening
    kept: PositionRecord
    position: str
    tell_children: Callable[[tuple[AnnouncedPartition, ...]], None]
    tell_barrier: Callable[[Barrier], None]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    moved: bool = False
    """Whether something was committed: earlier failures are over."""
    reads: bool = False
    """Whether a read has succeeded, even an empty one: neither the stream nor the sink is a cause for an alarm."""
    _crossed: asyncio.Event = field(default_factory=asyncio.Event)
    _barrier: Barrier | None = None

    @property
    def token(self) -> str:
        return self.opening.token

    @property
    def grant(self) -> int:
        return self.opening.grant

    async def cross(self, barrier: Barrier) -> bool:
        """Wait at a barrier until the sources of its key ranges are committed up to theirs. Everything before it must be committed here.

        True: read on from the barrier's `after`. False: stop instead.
        """
        self._crossed.clear()
        self._barrier = barrier
        self.tell_barrier(barrier)
        crossed = asyncio.ensure_future(self._crossed.wait())
        try:
            await first_of(crossed, self.stopping)
        finally:
            crossed.cancel()
        return not self.stopping.is_set()

    def let_cross(self, mark: int) -> None:
        """End the wait at the barrier with that mark."""
        if self._barrier is not None and self._barrier.mark == mark:
            self._crossed.set()


Handler = Callable[[Claim], Awaitable[End | None]]
"""Reads a partition: returns its end, once all of it is committed, or None once it was asked to stop and all activity has ended.

It may raise the errors of the stream, the sink and the position store; all activity has ended then, too. It is cancelled only when the
member goes without waiting.
"""


REST: Millis = 30_000
"""Maximum age of a committed position in an idle partition."""


class Habits(NamedTuple):
    """`limit`: records per batch. The others in milliseconds. `pause`: between two empty reads. `settle`: how long a handed-on position
    waits to be committed with a next batch. `heartbeat`: interval of commits without records; `rest`: the same if only the time has
    advanced. `hint`: minimum interval of hints to the stream about safe positions. `patience`: time limit for a read that is no longer
    needed."""

    limit: int = 10_000
    pause: Millis = 200
    settle: Millis = 200
    heartbeat: Millis = 5_000
    rest: Millis = REST
    hint: Millis = 1_000
    patience: Millis = 10_000

    def is_due(self, kept: PositionRecord, done: PositionRecord, committed_at: Millis) -> bool:
        """Whether progress without records is due to be committed; `kept` was committed at `committed_at`."""
        every = self.rest if replace(done, at=kept.at) == kept else self.heartbeat
        return done != kept and system.steady() - committed_at >= every


# ---- shared by all handlers --------------------------------------------------------------------------------------------


async def read_on(stream: ChangeStream, claim: Claim, position: str, habits: Habits) -> Batch:
    """Read the batch after the position. An empty batch is returned only after a pause."""
    began = system.steady()
    batch = await stream.read(claim.token, position, None, habits.limit)
    if batch.records.num_rows and batch.upto is None:
        raise UnknownPositionError("the stream returned records without a position after them")
    if batch.children and batch.end is None:
        claim.tell_children(batch.children)
    if not batch.records.num_rows and batch.upto is None and batch.end is None:
        # The stream should have waited. If not, avoid a busy loop.
        await asyncio.sleep(max(0, began + habits.pause - system.steady()) / 1000)
    return batch


async def read_planned(stream: ChangeStream, claim: Claim, position: str, plan: str, habits: Habits) -> Batch:
    """Read the batch that the previous owner was handing on. The sink may have it already, all or in part."""
    batch = await stream.read(claim.token, position, plan, habits.limit)
    if batch.upto != plan or not batch.records.num_rows:
        raise UnknownPositionError(f"the batch from {position!r} to {plan!r} can no longer be read as it was planned")
    return batch


async def first_of(work: asyncio.Future[Any], stopping: asyncio.Event, timeout: Millis | None = None) -> None:
    """Wait until the work is done, `stopping` is set, or the time is over."""
    asked = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((work, asked), timeout=None if timeout is None else timeout / 1000, return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()


async def drop(read: asyncio.Task[Batch], patience: Millis) -> None:
    """Abandon a read. On return all activity has ended, except for an uncancellable thread that writes nothing."""
    try:
        await asyncio.wait((read,), timeout=patience / 1000)
    finally:
        read.cancel()
    await asyncio.wait((read,))
    if not read.cancelled():
        # The read was not needed, so its error does not matter. Retrieve it to avoid an unretrieved-exception warning.
        read.exception()


def handed_on(
    kept: PositionRecord, upto: str | None, at: Millis | None, behind: Millis | None, rows: int = 0, dead: DeadLetters | None = None
) -> PositionRecord:
    """The state to commit once `rows` records up to `upto` are handed on. The other values are those of the Batch, and of the sink."""
    if dead is not None and kept.dead is not None:
        dead = replace(dead, count=kept.dead.count + dead.count)
    return replace(
        kept,
        position=kept.position if upto is None else upto,
        plan=None,
        at=kept.at if at is None else at if kept.at is None else max(kept.at, at),
        behind=kept.behind if behind is None else behind,
        records=kept.records + rows,
        dead=dead or kept.dead,
    )


# ---- standard handler --------------------------------------------------------------------------------------------------


class PartitionReader:
    """The standard handler: reads a stream, and hands its records on to a sink."""

    def __init__(self, stream: ChangeStream, positions: PositionStore, sink: ChangeSink, habits: Habits | None = None) -> None:
        self.stream, self.positions, self.sink = stream, positions, sink
        self.habits = habits or Habits()

    async def read(self, claim: Claim) -> End | None:
        """Read until the partition ends, or `claim.stopping` is set. A `Handler`."""
        return await _Reading(self, claim).run()


class _Reading:
    def __init__(self, parts: PartitionReader, claim: Claim) -> None:
        self._stream, self._positions, self._sink, self._habits = parts.stream, parts.positions, parts.sink, parts.habits
        self._claim = claim
        self._position = claim.position
        self._kept = claim.kept
        """The committed state."""
        self._done = claim.kept
        """The state that may be committed: includes what was handed on since."""
        self._end: End | None = None
        self._ahead: asyncio.Task[Batch] | None = None
        """The single read in progress. Never two at once, nor one concurrent with a hint."""
        self._committed_at = self._hinted_at = system.steady()
        self._hinted: str | None = None

    async def run(self) -> End | None:
        stopping = self._claim.stopping
        try:
            if self._kept.plan is not None:
                await self._resume(self._kept.plan)
            while self._end is None and not stopping.is_set():
                batch = await self._next()
                if batch is None:
                    break
                await self._hint(self._habits.hint)
                if batch.records.num_rows:
                    await self._plan(batch)
                    await self._hand_on(batch)
                else:
                    self._note(batch)
                    await self._keep_up()
                if batch.barrier is not None and not await self._cross(batch.barrier):
                    break
            if self._done != self._kept:
                await self._commit(self._done)
        except asyncio.CancelledError:
            if self._ahead is not None:
                self._ahead.cancel()
            raise
        finally:
            if self._ahead is not None:
                await drop(self._ahead, self._habits.patience)
        await self._hint(0)
        return self._end

    async def _resume(self, plan: str) -> None:
        """Hand on the batch that the previous reader had planned."""
        try:
            batch = await read_planned(self._stream, self._claim, self._position, plan, self._habits)
        except PlanLostError as error:
            # What is read anew has a higher number, so nothing more of that batch can arrive once it is there.
            log.warning("partition %s: batch %d is read anew, and may arrive twice: %s", self._claim.token, self._kept.batch, error)
            await self._commit(replace(self._done, plan=None))
        else:
            await self._hand_on(batch)

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def _next(self) -> Batch | None:
        """The next batch; None: stop instead. If it takes a while, handed-on work is committed meanwhile."""
        if self._ahead is None:
            self._read_ahead()
        assert self._ahead is not None
        if self._kept.plan is not None:
            await first_of(self._ahead, self._claim.stopping, self._habits.settle)
            if not self._ahead.done():
                await self._commit(self._done)
        await first_of(self._ahead, self._claim.stopping)
        if self._claim.stopping.is_set():
            return None
        ahead, self._ahead = self._ahead, None
        batch = ahead.result()
        self._claim.reads = True
        return batch

    def _read_ahead(self) -> None:
        self._ahead = asyncio.create_task(read_on(self._stream, self._claim, self._position, self._habits))

    # ---- delivery ---------------------------------------------------------------------------------------------------

    async def _plan(self, batch: Batch) -> None:
        await self._commit(replace(self._done, plan=batch.upto, batch=self._done.batch + 1))

    async def _hand_on(self, batch: Batch) -> None:
        """Hand on a planned batch, while reading the next one."""
        if batch.upto is not None and batch.end is None and batch.barrier is None and not self._claim.stopping.is_set():
            self._position = batch.upto
            self._read_ahead()
        self._note(batch, await self._sink.write(self._claim.token, self._kept.batch, batch.records))

    def _note(self, batch: Batch, dead: DeadLetters | None = None) -> None:
        """Note that the batch is handed on, or is empty."""
        self._done = handed_on(self._done, batch.upto, batch.at, batch.behind, batch.records.num_rows, dead)
        self._position = batch.upto or self._position
        self._end = batch.end

    async def _cross(self, barrier: Barrier) -> bool:
        """Wait at a barrier, with everything before it committed. Returns whether to read on."""
        if self._done != self._kept:
            await self._commit(self._done)
        if not await self._claim.cross(barrier):
            return False
        self._position = barrier.after
        self._done = replace(self._done, position=barrier.after)
        return True

    # ---- committing -------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        """Commit handed-on work at once, and progress without records from time to time."""
        if self._kept.plan is not None or self._habits.is_due(self._kept, self._done, self._committed_at):
            await self._commit(self._done)

    async def _commit(self, kept: PositionRecord) -> None:
        await self._positions.commit(self._claim.opening, kept)
        self._kept = self._done = kept
        self._claim.moved = True
        self._committed_at = system.steady()

    async def _hint(self, after: Millis) -> None:
        """Tell the stream what is safe, unless the last hint is less than `after` ms old. Only while no read is in progress."""
        position = self._kept.position
        if position is None or position == self._hinted or system.steady() - self._hinted_at < after:
            return
        self._hinted_at = system.steady()
        # The next hint makes up for a lost one.
        with contextlib.suppress(BrokenOffError):
            await self._stream.kept(self._claim.token, position)
            self._hinted = position
