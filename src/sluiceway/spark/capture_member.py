"""Driver's partitions in a micro-batch capture: their next batches are read, offered, planned and settled.

This replaces the standard handing on. A partition cycles through these states: it is read until records come; these are offered; the offer
becomes a batch by recording its end as the plan; Spark hands the batch on; it is recorded as done. The records themselves are dropped here:
a task reads them again, between the same positions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from sluiceway.adapters import system
from sluiceway.capture.partition_reader import Claim, Habits, drop, first_of, handed_on, read_on, read_planned
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import PositionRecord
from sluiceway.ports.change_stream import Batch, BrokenOffError, ChangeStream, End, UnknownPositionError
from sluiceway.ports.position_store import FencedError, PositionStore, PositionUnknownError
from sluiceway.spark.capture_plan import Done, Slice, choose, judge

log = logging.getLogger(__name__)

_LINGER: Millis = 50
"""Time that a batch with one offer waits for those of other partitions."""


class _Offer(NamedTuple):
    """A batch without its records. `began`: start of the read that returned it, by the steady clock."""

    began: Millis
    upto: str
    rows: int
    at: Millis | None
    behind: Millis | None
    end: End | None
    barred: bool
    """Whether a barrier follows."""


@dataclass(eq=False)
class _Held:
    """A partition that this member owns now."""

    claim: Claim
    kept: PositionRecord
    position: str
    since: int
    """Its place in the order of offers."""
    offer: _Offer | None = None
    """The next batch; once planned: the batch of the plan."""
    busy: bool = False
    """A commit, or a read for a plan, is in progress: the partition stays until its outcome is known."""
    in_flight: bool = False
    """Its plan is in an offset that Spark was given."""
    failed: Exception | None = None
    reached: bool = False
    """Nothing older than the moment of `read_up_to_now` is left."""
    past: bool = False
    """`position` is past that moment."""
    committed_at: Millis = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waits(self) -> bool:
        """Whether it has something for a batch."""
        return not (self.is_idle() or self.busy or self.in_flight or self.failed is not None or self.claim.stopping.is_set())

    def is_idle(self) -> bool:
        """Whether nothing is offered or planned, so that reading continues."""
        return self.offer is None and self.kept.plan is None


class Offering:
    """All partitions of this member, and their offers. Used on one event loop."""

    def __init__(self, stream: ChangeStream, positions: PositionStore, limit: int) -> None:
        self._stream, self._positions, self._habits = stream, positions, Habits(limit=limit)
        self._held: dict[str, _Held] = {}
        self._news = asyncio.Event()
        self._count = 0
        self._until: Millis | None = None
        self._closing = False

    # ---- called by the member -----------------------------------------------------------------------------------------

    async def handle(self, claim: Claim) -> End | None:
        """Handle the partition until it has ended and is recorded, or it is to stop and nothing of it is in flight. A `Handler`."""
        self._count += 1
        held = _Held(claim, claim.kept, claim.position, self._count, committed_at=system.steady())
        self._held[claim.token] = held
        relay = asyncio.create_task(_relay(claim.stopping, held.changed))
        self._news.set()
        try:
            return await self._go_on(held)
        finally:
            relay.cancel()
            del self._held[claim.token]
            self._news.set()

    async def _go_on(self, held: _Held) -> End | None:
        stopping = held.claim.stopping
        while True:
            if held.is_idle():
                if not stopping.is_set() and self._until is not None and held.reached:
                    await stopping.wait()
                end = await self._read_on(held)
                if end is not None or held.is_idle():
                    return end
                self._count += 1
                held.since = self._count
                self._news.set()
            plan = held.kept.plan
            await self._changed(held, plan)
            if held.kept.plan == plan:
                return None
            if held.kept.plan is None:
                # Handed on.
                offer, held.offer = held.offer, None
                self._reach(held, offer)
                await self._hint(held)
                if offer is not None and offer.end is not None:
                    return offer.end
                self._news.set()

    async def _changed(self, held: _Held, plan: str | None) -> None:
        """Wait until the plan changes, or the partition is to stop and may. Raises the error of the planner's commit or read."""
        while held.kept.plan == plan and not self._may_leave(held):
            held.changed.clear()
            await held.changed.wait()
            if held.failed is not None:
                raise held.failed

    def _may_leave(self, held: _Held) -> bool:
        return held.claim.stopping.is_set() and not held.busy and (self._closing or not held.in_flight)

    async def _read_on(self, held: _Held) -> End | None:
        """Read until there is something to offer, or the partition ends, or (neither) it is to stop."""
        stopping = held.claim.stopping
        done = held.kept
        while not stopping.is_set():
            began = system.steady()
            batch = await self._next(held)
            if batch is None:
                break
            if batch.upto is not None and batch.records.num_rows:
                held.kept = await self._record(held, done)
                held.offer = _offer(began, batch.upto, batch)
                return None
            done = handed_on(done, batch.upto, batch.at, batch.behind)
            held.position = batch.upto or held.position
            if batch.end is not None:
                held.kept = await self._record(held, done)
                await self._hint(held)
                return batch.end
            if self._habits.is_due(held.kept, done, held.committed_at):
                held.kept = await self._record(held, done)
                await self._hint(held)
            self._reach(held, _offer(began, held.position, batch))
            if self._until is not None and held.reached:
                self._news.set()
                await stopping.wait()
            if batch.barrier is not None and not stopping.is_set():
                held.kept = await self._record(held, done)
                if await held.claim.cross(batch.barrier):
                    held.position = batch.barrier.after
                    done = replace(done, position=held.position)
        held.kept = await self._record(held, done)
        return None

    async def _next(self, held: _Held) -> Batch | None:
        """The next batch; None: stop instead."""
        read = asyncio.create_task(read_on(self._stream, held.claim, held.position, self._habits))
        try:
            await first_of(read, held.claim.stopping)
            if held.claim.stopping.is_set():
                return None
            held.claim.reads = True
            return read.result()
        except asyncio.CancelledError:
            read.cancel()
            raise
        finally:
            await drop(read, self._habits.patience)

    async def _record(self, held: _Held, kept: PositionRecord) -> PositionRecord:
        """Record `kept`, unless it is recorded already."""
        if kept == held.kept:
            return kept
        await self._positions.commit(held.claim.opening, kept)
        held.claim.moved = True
        held.committed_at = system.steady()
        return kept

    async def _hint(self, held: _Held) -> None:
        if held.kept.position is not None:
            with contextlib.suppress(BrokenOffError):
                await self._stream.kept(held.claim.token, held.kept.position)

    # ---- called by the planner ----------------------------------------------------------------------------------------

    async def settle(self, done: Iterable[Done]) -> dict[str, Done]:
        """Record entries that Spark has committed as done; returns those that could not be recorded now, by token.

        Raises `invalid_request` if the position store is behind them.
        """
        entries = list(done)
        fared = await asyncio.gather(*(self._settle(each) for each in entries))
        return {each.token: each for each, recorded in zip(entries, fared, strict=True) if not recorded}

    async def _settle(self, done: Done) -> bool:
        held = self._held.get(done.token)
        if held is None or held.failed is not None or held.busy:
            return False
        if judge(held.kept, done) == "settled":
            return True
        offer = held.offer
        at, behind = (offer.at, offer.behind) if offer is not None else (None, None)
        kept = handed_on(held.kept, done.upto, at, behind, done.rows)
        if not await self._commit(held, kept):
            return False
        held.position, held.in_flight = done.upto, False
        held.changed.set()
        return True

    async def plan(self, most: int, done: Mapping[str, Done], wait: Millis) -> list[Slice]:
        """Plan the next batch, of about `most` rows, waiting up to `wait` ms for an offer. `done`: the rest from `settle`.

        All existing plans go first, except those already done. A partition that fails is left out, and reopened.
        """
        await self._wait(done, wait)
        waiting = sorted((each for each in self._held.values() if self._ready(each, done)), key=lambda each: each.since)
        found = [each.claim.token for each in waiting if each.kept.plan is not None]
        rows = {each.claim.token: each.offer.rows if each.offer is not None else 0 for each in waiting}
        chosen = choose(rows, most, found)
        slices = await asyncio.gather(*(self._plan(self._held[token]) for token in chosen))
        return [each for each in slices if each is not None]

    async def _plan(self, held: _Held) -> Slice | None:
        token, kept = held.claim.token, held.kept
        if kept.plan is None:
            assert held.offer is not None
            if not await self._commit(held, replace(kept, plan=held.offer.upto, batch=kept.batch + 1)):
                return None
        elif held.offer is None and not await self._look(held, kept.plan):
            return None
        kept, offer = held.kept, held.offer
        assert kept.plan is not None
        assert offer is not None
        held.in_flight = True
        held.changed.set()
        return Slice(token, held.position, kept.plan, kept.batch, held.claim.grant, offer.rows)

    async def _look(self, held: _Held, plan: str) -> bool:
        """Look up the batch of an existing plan. Returns whether it succeeded."""
        held.busy, began = True, system.steady()
        try:
            batch = await read_planned(self._stream, held.claim, held.position, plan, self._habits)
            held.claim.reads = True
            held.offer = _offer(began, plan, batch)
            return True
        except (BrokenOffError, UnknownPositionError, SluicewayError) as error:
            held.failed = error
            return False
        finally:
            held.busy = False
            held.changed.set()

    async def _commit(self, held: _Held, kept: PositionRecord) -> bool:
        held.busy = True
        try:
            held.kept = await self._record(held, kept)
            return True
        except (FencedError, PositionUnknownError) as error:
            held.failed = error
            return False
        finally:
            held.busy = False
            held.changed.set()

    def _ready(self, held: _Held, done: Mapping[str, Done]) -> bool:
        entry = done.get(held.claim.token)
        # Opened (again) since it was to be settled: it must not be handed on again.
        return held.waits and not (entry is not None and judge(held.kept, entry) == "settle")

    async def _wait(self, done: Mapping[str, Done], wait: Millis) -> None:
        deadline = system.steady() + wait
        while not any(self._ready(each, done) for each in self._held.values()):
            left = deadline - system.steady()
            if left <= 0:
                return
            self._news.clear()
            await system.wait(self._news, left)
        if not all(self._ready(each, done) for each in self._held.values()):
            await asyncio.sleep(_LINGER / 1000)

    # ---- shutdown -----------------------------------------------------------------------------------------------------

    def read_up_to_now(self) -> None:
        """From now on read partitions only until nothing older than this moment is left."""
        self._until = system.steady()

    def reached(self) -> frozenset[str]:
        """The partitions with nothing left from before `read_up_to_now`, and nothing planned."""
        return frozenset(
            token
            for token, each in self._held.items()
            if each.reached and each.offer is None and each.kept.plan is None and not each.failed
        )

    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    def close(self) -> None:
        """Stop planning and settling: batches in flight may be given back as they are."""
        self._closing = True
        for held in self._held.values():
            held.changed.set()

    def _reach(self, held: _Held, offer: _Offer | None) -> None:
        """Note whether, after that handed-on batch, nothing older than the moment is left.

        `behind` was true at the time of the read, possibly long before the batch was handed on, so it is compared with the start of that
        read. The end is reached by an empty read at the tip that began after the moment. Or, so that a steadily growing stream is not read
        for ever, by the batch after one that ended past the moment: a child's parent may end just there, which one more read reveals.
        """
        if self._until is None or offer is None or offer.behind is None:
            # Unknown, for any reason: throttling, a paused queue.
            return
        ended = held.past
        held.past = held.past or offer.behind < offer.began - self._until
        # The rest of a partition at a barrier may depend on one that is not read any further.
        held.reached = held.reached or ended or (held.past and not offer.rows and (offer.behind == 0 or offer.barred))


def _offer(began: Millis, upto: str, batch: Batch) -> _Offer:
    return _Offer(began, upto, batch.records.num_rows, batch.at, batch.behind, batch.end, batch.barrier is not None)


async def _relay(stopping: asyncio.Event, changed: asyncio.Event) -> None:
    await stopping.wait()
    changed.set()
