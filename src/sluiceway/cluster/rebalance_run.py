"""Run of one rebalance: commits the decisions of its machine, and sends the requests it asks for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.queue_changes import QueueChanges, Shares
from sluiceway.cluster.rebalance_records import RebalanceRecords, StaleError, Stored, cause, dropping_key, said
from sluiceway.cluster.router import Router
from sluiceway.core.rebalance import steps as machine
from sluiceway.core.rebalance.steps import AskFor, Change, StepReplies
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.queue_catalog import Catalog
from sluiceway.model.access import SYSTEM
from sluiceway.model.meta import Stamp
from sluiceway.model.peers import MoveOut
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance

log = logging.getLogger(__name__)

AT_ONCE = 8
"""Maximum number of a rebalance's requests in flight. Moves of ready items, which take longest, do not count."""
MOVES_AT_ONCE = 2
"""Maximum number of such moves: one writes while another reads. More would be a little faster, at the expense of clients' latency."""
NOTE_EVERY: Millis = 3_000
"""Interval between two records of the progress, and of the reason for a lack of it."""
AUDIT_EVERY: Millis = 60_000
"""Interval between two audit entries about a rebalance's problems while they last."""
COUNT_EVERY: Millis = 1_000
"""Maximum age of the backlog counts that choose the targets of moves."""
BACK_OFF: Millis = 25
MAX_BACK_OFF: Millis = 5_000
CATCH_UP: Millis = 1_000
"""Maximum time that a delayed copy makes up for, during which it exceeds its rate."""


@dataclass(frozen=True)
class RebalanceContext:
    """Dependencies of a coordinator. `drop` arranges the removal of the data of removed partitions."""

    catalog: Catalog
    router: Router
    audit: AuditTrail
    changes: QueueChanges
    shares: Shares
    records: RebalanceRecords
    drop: Callable[[str, tuple[PartitionRecord, ...]], None]


class Run:
    """Carries out one rebalance to its end, or until cancelled, as the coordinator whose election has the stamp `held`.

    `name` is the instance's. `run` returns at the end, and raises StaleError when another instance is the coordinator.
    """

    def __init__(self, parts: RebalanceContext, stored: Stored, held: Stamp, name: str) -> None:
        self._parts = parts
        self._stored = stored
        self._held = held
        self._name = name
        self._heard = StepReplies()
        self._cursor: int | None = None
        """The queue's, under which the answers were heard."""
        self._asked: dict[int, asyncio.Task[None]] = {}
        self._counting: asyncio.Task[None] | None = None
        self._counted_at: Millis = -COUNT_EVERY
        self._again = asyncio.Event()
        self._poked = True
        self._few, self._moves = asyncio.Semaphore(AT_ONCE), asyncio.Semaphore(MOVES_AT_ONCE)
        self._pace = Pace(stored.rebalance.rate)
        self._problems: dict[int, str] = {}
        """Current problems, by the partition that was asked; -1: a commit."""
        self._retries = stored.rebalance.retries
        self._in_a_row: Counter[int] = Counter()
        self._noted_at: Millis = system.steady()
        self._audited_at: Millis = -AUDIT_EVERY

    @property
    def rebalance(self) -> Rebalance:
        return self._stored.rebalance

    def poke(self) -> None:
        """Read again: the rebalance's or the queue's record may have changed."""
        self._poked = True
        self._again.set()

    async def run(self) -> None:
        try:
            while self.rebalance.is_open:
                try:
                    await self._cycle()
                    self._succeed(-1)
                except SluicewayError as error:
                    log.warning("rebalance %s is interrupted, will retry: %s", self.rebalance.id, error)
                    self._fail(-1, error)
                    await asyncio.sleep(self._back_off(-1) / 1000)
                    self._poked = True
        finally:
            await self._forget()

    async def _cycle(self) -> None:
        """Read the records that may have changed; commit if a commit is due, else send the due requests and wait for an answer."""
        self._again.clear()
        while self._poked:
            # Repeat until no change comes in between: the queue's current record beside the rebalance's earlier one would mean a state
            # that neither describes, under the current cursor.
            self._poked = False
            await self._read()
        if not self.rebalance.is_open or await self._commit_next():
            return
        record = self._record()
        if record is None:
            return
        self._count(record)
        for ask in machine.asks(self.rebalance, record, self._heard):
            if ask.partition not in self._asked:
                task = asyncio.create_task(self._ask(ask, self._heard))
                self._asked[ask.partition] = task
                task.add_done_callback(lambda _, number=ask.partition: self._answered(number))  # type: ignore[misc]
        await system.wait(self._again, NOTE_EVERY)
        await self._note()

    def _record(self) -> QueueRecord | None:
        return self._parts.catalog.of(self.rebalance.incarnation)

    # ---- records ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        stored = await self._parts.records.get(self.rebalance.id)
        if stored is None:
            # It ended so long ago that its record was trimmed.
            raise StaleError
        # Keeps the queue's record from being older than the rebalance's. If it is newer, a poke has announced it.
        await self._parts.changes.follow()
        await self._take(stored)

    async def _take(self, stored: Stored) -> None:
        """Adopt the record. Answers heard in another step, or under another cursor, no longer count."""
        before, self._stored = self._stored, stored
        # The queue's cursor has risen without a new step where some of the slots were handed over, by a commit that was not confirmed.
        record, cursor = self._record(), self._cursor
        self._cursor = None if record is None else record.cursor
        if _phase(before.rebalance) != _phase(stored.rebalance) or self._cursor != cursor:
            await self._forget()

    async def _forget(self) -> None:
        tasks = [*self._asked.values(), *([self._counting] if self._counting else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._asked.clear()
        self._counting = None
        self._heard = StepReplies()
        self._problems.clear()

    async def _commit_next(self) -> bool:
        """Commit the machine's next change. Returns whether one was due."""
        if self._record() is not None and self._decided(self._record()) is None:
            return False

        async def change() -> tuple[Change, Stamp] | None:
            record = self._record()
            decided = None if self._poked else self._decided(record)
            if decided is None:
                return None
            return decided, await self._write(decided, record)

        async with self._parts.changes.lock:
            try:
                done = await self._parts.changes.decide(change)
            except StaleError:
                await self._stale()
                return True
            except SluicewayError as error:
                if error.code == "outcome_unknown":
                    # The commit may have landed. Moved items may be counted once at most.
                    self._heard.moved = 0
                raise
        if done is None:
            return True
        decided, stamp = done
        log.info("rebalance %s of queue %s: %s", self.rebalance.id, self.rebalance.queue_name, _words(decided, self.rebalance))
        # More items may have arrived while the commit was in flight.
        self._heard.moved -= min(self._heard.moved, decided.rebalance.moved - self.rebalance.moved)
        await self._take(Stored(decided.rebalance, stamp))
        if decided.record is not None:
            await self._parts.shares.tell(stamp)
        if decided.removed:
            self._parts.drop(dropping_key(self.rebalance.incarnation, decided.removed), decided.removed)
        return True

    def _decided(self, record: QueueRecord | None) -> Change | None:
        if record is None:
            return machine.failed(self.rebalance, "the queue was deleted", system.now())
        return machine.change(self.rebalance, record, self._heard, system.now(), self._name)

    async def _write(self, change: Change, record: QueueRecord | None) -> Stamp:
        step = change.step if change.rebalance.state != "failed" else "failed"
        entries = []
        if step is not None:
            detail = said(change, record, self.rebalance)
            entries.append(self._parts.audit.entry(f"rebalance.{step}", SYSTEM, self.rebalance.queue_name, detail))
        return await self._parts.records.write(self._stored, change, entries, self._held)

    async def _stale(self) -> None:
        """Read the rebalance again after a stale commit. Raises StaleError if it is unchanged: then another instance is the coordinator."""
        stamp = self._stored.stamp
        await self._read()
        if self._stored.stamp == stamp:
            raise StaleError

    # ---- requests ---------------------------------------------------------------------------------------------

    def _answered(self, number: int) -> None:
        self._asked.pop(number, None)
        self._again.set()

    async def _ask(self, ask: AskFor, heard: StepReplies) -> None:
        if ask.delay:
            await asyncio.sleep(ask.delay / 1000)
        request = ask.request
        is_copy = isinstance(request, MoveOut) and not request.scheduled
        try:
            async with self._moves if is_copy else self._few:
                answer = await (self._paced(ask) if isinstance(request, MoveOut) else self._owner_of(ask))
        except SluicewayError as error:
            if not heard.refuse(ask, error):
                self._fail(ask.partition, error)
                await asyncio.sleep(self._back_off(ask.partition) / 1000)
            return
        except Exception as error:
            # Otherwise it would be asked again at once, and nothing would say why.
            log.exception("rebalance %s: partition %d could not be asked, will retry", self.rebalance.id, ask.partition)
            self._fail(ask.partition, SluicewayError("internal", repr(error)[:200]))
            await asyncio.sleep(self._back_off(ask.partition) / 1000)
            return
        self._succeed(ask.partition)
        heard.hear(ask, answer)

    async def _owner_of(self, ask: AskFor) -> Any:
        record = self._record()
        if record is None:
            raise SluicewayError("queue_not_found", "the queue was deleted")
        return await self._parts.router.owner_of(record, ask.partition, ask.request)

    async def _paced(self, ask: AskFor) -> Any:
        assert isinstance(ask.request, MoveOut)
        most = await self._pace.take(ask.request.limit)
        moved = 0
        try:
            answer = await self._owner_of(AskFor(ask.partition, _limited(ask.request, most)))
            moved = answer.begun
        finally:
            self._pace.give_back(most - moved)
        return answer

    def _count(self, record: QueueRecord) -> None:
        """Count the backlogs in the background if there are items to move."""
        if self.rebalance.step != "drain" or self._counting is not None or system.steady() - self._counted_at < COUNT_EVERY:
            return
        counts = [look.counts for look in self._heard.looks.values() if look.counts is not None]
        if any(each.movable or (self.rebalance.drain == "copy" and each.ready) for each in counts):
            self._counting = asyncio.create_task(self._count_waiting(record, self._heard))

    async def _count_waiting(self, record: QueueRecord, heard: StepReplies) -> None:
        try:
            stats = await self._parts.router.count(record)
            heard.waiting.update({each.partition: each.ready for each in stats.partitions})
        except SluicewayError as error:
            log.info("the backlogs of queue %s are not known: %s", record.queue_name, error)
        finally:
            self._counted_at = system.steady()
            self._counting = None

    # ---- problems and progress --------------------------------------------------------------------------------

    def _fail(self, number: int, error: SluicewayError) -> None:
        self._problems[number] = f"{error.code}: {error.detail}"
        self._retries += 1
        self._in_a_row[number] += 1

    def _succeed(self, number: int) -> None:
        self._problems.pop(number, None)
        del self._in_a_row[number]

    def _back_off(self, number: int) -> Millis:
        return min(MAX_BACK_OFF, BACK_OFF << min(self._in_a_row[number], 8))

    async def _note(self) -> None:
        """Record progress and problems every NOTE_EVERY ms, if they have changed."""
        if system.steady() - self._noted_at < NOTE_EVERY:
            return
        self._noted_at = system.steady()
        problem = next((self._problems[number] for number in sorted(self._problems)), "")
        before = self.rebalance
        after = machine.progress(before, self._heard)
        # Error texts may differ each time: record that there is a problem at once, and a changed text once a minute.
        is_new = bool(problem) != bool(before.problem)
        if problem and problem != before.problem and system.steady() - self._audited_at >= AUDIT_EVERY:
            is_new = True
        if is_new:
            after = msgspec.structs.replace(after, problem=problem, retries=self._retries if problem else 0)
        if after == before:
            return
        after = msgspec.structs.replace(after, updated_at=system.now())
        entries = []
        if is_new and problem:
            self._audited_at = system.steady()
            detail = cause(before) | {"step": before.step, "problem": problem, "retries": self._retries}
            entries.append(self._parts.audit.entry("rebalance.problem", SYSTEM, before.queue_name, detail))
        try:
            stamp = await self._parts.records.write(self._stored, Change(None, after), entries, self._held)
        except StaleError:
            await self._stale()
            return
        except SluicewayError as error:
            if error.code == "outcome_unknown":
                # As in `_commit_next`: what may have been counted is not counted again.
                self._heard.moved -= min(self._heard.moved, after.moved - before.moved)
            raise
        self._heard.moved -= min(self._heard.moved, after.moved - before.moved)
        self._stored = Stored(after, stamp)


class Pace:
    """Rate limiter for moved items. `rate`: items per second; None: unlimited."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._next: float | None = None

    async def take(self, most: int) -> int:
        """Wait until some of `most` items may be moved. Returns their number."""
        if self._rate is None:
            return most
        # At most a fifth of a second's worth at a time, so that the last of them do not wait long.
        items = max(1, min(most, self._rate // 5))
        now = float(system.steady())
        begin = now if self._next is None else max(self._next, now - CATCH_UP)
        self._next = begin + items * 1000 / self._rate
        await asyncio.sleep(max(0.0, begin - now) / 1000)
        return items

    def give_back(self, items: int) -> None:
        """Return the unused part of a `take`."""
        if self._rate is not None and self._next is not None:
            self._next -= items * 1000 / self._rate


def _limited(request: MoveOut, limit: int) -> MoveOut:
    return replace(request, limit=limit)


def _phase(rebalance: Rebalance) -> tuple[object, ...]:
    return rebalance.state, rebalance.step, rebalance.slots_at_once


def _words(change: Change, before: Rebalance) -> str:
    if not change.rebalance.is_open:
        return f"{before.step} is done, it is {change.rebalance.state}"
    removed = f" of {len(change.removed)} partitions" if change.removed else ""
    return f"{before.step}{removed} is done, {change.rebalance.step} is next"
