"""The partitions that the driver of a micro-batch capture has: their next batches are looked at, offered, planned and settled.

It is what a member does with a partition instead of handing it on itself. A partition is at any time in one of these: it is read on, until
something comes; that is offered; the offer becomes a batch, by recording its end as the plan; Spark hands it on; it is recorded as done.
The records themselves are dropped here: a task reads them again, by the same ends.
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
from sluiceway.model.task_records import Kept
from sluiceway.ports.change_stream import Batch, BrokenOffError, ChangeStream, End, UnknownPositionError
from sluiceway.ports.position_store import FencedError, PositionStore, PositionUnknownError
from sluiceway.spark.capture_plan import Done, Slice, choose, judge

log = logging.getLogger(__name__)

_LINGER: Millis = 50
"""How long a batch waits for the offers of other partitions, once it has one."""


class _Offer(NamedTuple):
    """A batch without its records. `began`: by the steady clock, when the read that gave it began."""

    began: Millis
    upto: str
    rows: int
    at: Millis | None
    behind: Millis | None
    end: End | None


@dataclass(eq=False)
class _Held:
    """A partition that is this member's now."""

    claim: Claim
    kept: Kept
    position: str
    since: int
    """Its place in the line of those that offer."""
    offer: _Offer | None = None
    """What comes next; once planned: what the plan is."""
    busy: bool = False
    """A commit is on its way, or a read for a plan: it goes on until it is known what became of it."""
    in_flight: bool = False
    """Its plan is in an offset that Spark was given."""
    failed: Exception | None = None
    reached: bool = False
    """Nothing is left that is older than the moment of `read_up_to_now`."""
    past: bool = False
    """`position` is past that moment."""
    committed_at: Millis = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def waits(self) -> bool:
        """Has something for a batch."""
        return not (self.is_idle() or self.busy or self.in_flight or self.failed is not None or self.claim.stopping.is_set())

    def is_idle(self) -> bool:
        """Nothing is offered or planned: it is read on."""
        return self.offer is None and self.kept.plan is None


class Offering:
    """All partitions that are this member's, and what they offer. Everything on one event loop."""

    def __init__(self, stream: ChangeStream, positions: PositionStore, limit: int) -> None:
        self._stream, self._positions, self._habits = stream, positions, Habits(limit=limit)
        self._held: dict[str, _Held] = {}
        self._news = asyncio.Event()
        self._count = 0
        self._until: Millis | None = None
        self._closing = False

    # ---- what the member calls ----------------------------------------------------------------------------------------

    async def handle(self, claim: Claim) -> End | None:
        """Until the partition has ended and all of it is recorded, or it is to stop and nothing of it is in flight. A `Handler`."""
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
        """Until something else is planned than that, or it is to stop and may. Raises what the planner's commit or read failed with."""
        while held.kept.plan == plan and not self._may_leave(held):
            held.changed.clear()
            await held.changed.wait()
            if held.failed is not None:
                raise held.failed

    def _may_leave(self, held: _Held) -> bool:
        return held.claim.stopping.is_set() and not held.busy and (self._closing or not held.in_flight)

    async def _read_on(self, held: _Held) -> End | None:
        """Read until there is something to offer, or the partition ends; or nothing of both: it is to stop."""
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
        held.kept = await self._record(held, done)
        return None

    async def _next(self, held: _Held) -> Batch | None:
        """What comes next; None: stop instead."""
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

    async def _record(self, held: _Held, kept: Kept) -> Kept:
        """That is what is recorded of it from now on, or is already."""
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

    # ---- what the planner calls ---------------------------------------------------------------------------------------

    async def settle(self, done: Iterable[Done]) -> dict[str, Done]:
        """Record that these are done, which Spark has committed; returns those that could not be recorded now, by token.

        Raises `invalid_request` if the position store knows less than that.
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
        """Plan the next batch, of about `most` rows, and wait so long for something to be offered. `done`: what `settle` left.

        Plans that were found go first, all of them, but for those that are done. Whatever fails is not in the batch: it is opened again.
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
        """A plan that was found: what is it?"""
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

    async def _commit(self, held: _Held, kept: Kept) -> bool:
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
        # It was opened, or opened again, since that was to be settled: it is not to be handed on once more.
        return held.waits and not (entry is not None and judge(held.kept, entry) == "settle")

    async def _wait(self, done: Mapping[str, Done], wait: Millis) -> None:
        deadline = system.steady() + wait
        while not any(self._ready(each, done) for each in self._held.values()):
            left = deadline - system.steady()
            if left <= 0:
                return
            self._news.clear()
            # Not `wait_for`, which in Python 3.11 swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left / 1000):
                    await self._news.wait()
        if not all(self._ready(each, done) for each in self._held.values()):
            await asyncio.sleep(_LINGER / 1000)

    # ---- the end ------------------------------------------------------------------------------------------------------

    def read_up_to_now(self) -> None:
        """From now on partitions are read until nothing is left that is older than this moment."""
        self._until = system.steady()

    def reached(self) -> frozenset[str]:
        """Those in which nothing is left that was there at the moment of `read_up_to_now`, and nothing is planned."""
        return frozenset(
            token
            for token, each in self._held.items()
            if each.reached and each.offer is None and each.kept.plan is None and not each.failed
        )

    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    def close(self) -> None:
        """No batch is planned or settled any more: whatever is in flight may be given back as it is."""
        self._closing = True
        for held in self._held.values():
            held.changed.set()

    def _reach(self, held: _Held, offer: _Offer | None) -> None:
        """Note whether, after that batch, which is handed on, nothing older than the moment is left.

        `behind` was true while the batch was read, which may be long before it is handed on: so it is held against when that read began.
        The end is reached by an empty read at the tip that began after the moment. Or, lest a stream to which records keep coming is read
        for ever, by the batch after one that ended past the moment: a child's parent may end just there, and one more read tells that.
        """
        if self._until is None or offer is None or offer.behind is None:
            # Not known, so it may be anything: too many calls for now, a queue that is paused.
            return
        ended = held.past
        held.past = held.past or offer.behind < offer.began - self._until
        held.reached = held.reached or ended or (held.past and not offer.rows and offer.behind == 0)


def _offer(began: Millis, upto: str, batch: Batch) -> _Offer:
    return _Offer(began, upto, batch.records.num_rows, batch.at, batch.behind, batch.end)


async def _relay(stopping: asyncio.Event, changed: asyncio.Event) -> None:
    await stopping.wait()
    changed.set()
