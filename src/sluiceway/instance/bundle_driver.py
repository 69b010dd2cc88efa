"""Drives the bundles of this instance: counts their items, and carries out what `core.bundles.lifecycle` decides.

An instance drives a bundle if it owns one partition of the bundle's queue, the home of its idempotency group. Two may believe so at a time:
a partition's counts, the follow-up's idempotency group and the meta store's checks let no step be taken twice.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.core.bundles.lifecycle import decide, due, wants
from sluiceway.core.partition.key_slots import home_of_name
from sluiceway.instance.bundle_catalog import INDEX, Bundles, closed, ended
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import BundleCount, BundleCounts, CountBundles, CountStep, Produce, Produced, ProduceKey
from sluiceway.ports.meta_store import MetaStore
from sluiceway.wire.json_bundles import follow_up_for

log = logging.getLogger(__name__)

FOLLOW_INTERVAL: Millis = 5_000
"""Maximum age of what is known of other instances' changes, when no hint of one arrives."""
ELSEWHERE: Millis = 2_000
"""Interval between two looks at whether a bundle of another instance is driven here now."""
ENDED_ELSEWHERE: Millis = 600_000
"""The same of one that is over: what is left to do does not hurry, and nearly all bundles are over."""
FIRST_PAUSE: Millis = 500
LAST_PAUSE: Millis = 30_000
"""First and longest pause before a failed step is repeated; each is twice the one before."""
SETTLED_PAUSE: Millis = 200
"""How long after a settlement the closed bundles of its queue are counted, so that many settlements share a count."""
TIMEOUT: Millis = 10_000
MAX_COUNTED: Final = 1_000
"""Bundles of one count."""
AT_ONCE: Final = 500
"""Bundles handled between two moments at which other work may run: some milliseconds."""
_KEY: Final = "follow-up"
_PRODUCED_BEFORE: Final = ("stale_sequence", "key_conflict")
"""Refusals that say that the follow-up is produced."""

Count = Callable[[QueueRecord, CountBundles], Awaitable[BundleCounts]]


@dataclass(slots=True)
class _Failing:
    pause: Millis
    problem: str


class BundleDriver:
    """`look_up` finds a queue by its name, or raises `queue_not_found`; `count` counts in all of a queue's partitions; `produce` stores."""

    def __init__(
        self,
        bundles: Bundles,
        ownership: Ownership,
        meta: MetaStore,
        look_up: Callable[[str], Awaitable[QueueRecord]],
        count: Count,
        produce: Callable[[str, Produce], Awaitable[Produced]],
    ) -> None:
        self._bundles = bundles
        self._ownership = ownership
        self._meta = meta
        self._look_up = look_up
        self._count = count
        self._produce = produce
        self._heap: list[tuple[Millis, str]] = []
        """Entries outlive their reason: only one whose time is the bundle's in `_due` counts."""
        self._due: dict[str, Millis] = {}
        self._closed: dict[str, set[str]] = {}
        """The bundles of each queue that may be over with the next settlement."""
        self._settled: dict[str, Millis] = {}
        """Queues in which items were settled, and when their bundles are counted for it."""
        self._failing: dict[str, _Failing] = {}
        self._at_work: dict[str, asyncio.Task[None]] = {}
        """By queue: one that hangs holds up no other."""
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        bundles.heard = self._heard

    # ---- lifecycle --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to drive. Raises `unavailable`."""
        await self._bundles.follow()
        work = [self._keep_driving()]
        if not self._ownership.is_alone:
            work += [self._keep_following(), self._watch()]
        self._tasks = [asyncio.create_task(each) for each in work]

    async def stop(self) -> None:
        """Begin no further step. One that is interrupted is taken again, here or elsewhere."""
        tasks = [*self._tasks, *self._at_work.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def catch_up(self) -> None:
        """Take all steps that are due, after the clock was moved ahead."""
        while True:
            at = self._begin()
            if self._at_work:
                await asyncio.wait(self._at_work.values())
            elif at is None or at > system.now():
                return

    def note_settled(self, queue_name: str) -> None:
        """Items of the queue have ended, or may have: its closed bundles may be over."""
        if queue_name in self._closed and queue_name not in self._settled:
            self._settled[queue_name] = system.now() + SETTLED_PAUSE
            self._wake.set()

    # ---- what is due ------------------------------------------------------------------------------------------

    def _heard(self, id: str) -> None:
        record = self._bundles.find(id)
        if record is None:
            self._due.pop(id, None)
            self._failing.pop(id, None)
        else:
            if record.state == "closed" or (record.state == "open" and record.items is not None):
                self._closed.setdefault(record.queue_name, set()).add(id)
            elif record.ended_at is not None:
                self._let_go(record)
            self._plan(id, 0)

    def _plan(self, id: str, at: Millis) -> None:
        self._due[id] = at
        heapq.heappush(self._heap, (at, id))
        self._wake.set()

    async def _keep_driving(self) -> None:
        while True:
            self._wake.clear()
            at = self._begin()
            await system.wait(self._wake, None if at is None else max(1, at - system.now()))

    def _begin(self) -> Millis | None:
        """Begin what is due. Returns when there is more to begin; None: after another event."""
        now = system.now()
        for queue_name in [name for name, at in self._settled.items() if at <= now]:
            del self._settled[queue_name]
            for id in self._closed.get(queue_name, ()):
                if self._due.get(id, 0) > now and id not in self._failing:
                    self._plan(id, now)
        begun: dict[str, list[BundleRecord]] = {}
        later = []
        while self._heap and self._heap[0][0] <= now:
            at, id = heapq.heappop(self._heap)
            record = self._bundles.find(id)
            if record is None or self._due.get(id) != at:
                continue
            if record.queue_name in self._at_work or not self._ownership.holds():
                later.append((at, id))
            else:
                # Until it is known when to look again: a change meanwhile plans it anew.
                self._due[id] = -1
                begun.setdefault(record.queue_name, []).append(record)
        for entry in later:
            heapq.heappush(self._heap, entry)
        for queue_name, records in begun.items():
            self._send(queue_name, records)
        times = [*self._settled.values(), *(at for at, _ in self._heap[:1])]
        return max(min(times), now + FIRST_PAUSE) if times and later else min(times, default=None)

    def _send(self, queue_name: str, records: Sequence[BundleRecord]) -> None:
        task = asyncio.create_task(self._drive(queue_name, records))
        self._at_work[queue_name] = task

        def landed(_: object) -> None:
            del self._at_work[queue_name]
            self._wake.set()

        task.add_done_callback(landed)

    def _wait(self, record: BundleRecord, at: Millis) -> None:
        if self._due.get(record.id) == -1:
            self._plan(record.id, at)

    # ---- steps ------------------------------------------------------------------------------------------------

    async def _drive(self, queue_name: str, records: Sequence[BundleRecord]) -> None:
        try:
            await self._drive_of(queue_name, records)
        except Exception as error:
            log.exception("the bundles of queue %s could not be driven", queue_name)
            self._failed(records, SluicewayError("internal", repr(error)[:200]))

    async def _drive_of(self, queue_name: str, records: Sequence[BundleRecord]) -> None:
        try:
            queue = await self._look_up(queue_name)
        except SluicewayError as error:
            if error.code != "queue_not_found":
                self._failed(records, error)
                return
            queue = None
        owned = () if queue is None else self._ownership.tokens(queue)
        by_step: dict[CountStep | None, list[BundleRecord]] = {}
        for number, record in enumerate(records, 1):
            now = system.now()
            if queue is None or record.queue_incarnation != queue.incarnation:
                await self._end_without_queue(record)
            elif self._is_here(queue, record, owned):
                by_step.setdefault(wants(record, now), []).append(record)
            else:
                self._wait(record, now + (ELSEWHERE if record.ended_at is None else ENDED_ELSEWHERE))
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if queue is None:
            return
        for step, some in by_step.items():
            for at in range(0, len(some), MAX_COUNTED):
                await self._take_steps(queue, step, some[at : at + MAX_COUNTED])
                await asyncio.sleep(0)

    def _is_here(self, queue: QueueRecord, record: BundleRecord, owned: Container[int]) -> bool:
        """Whether this instance drives the bundle, if it owns these partitions of the queue."""
        return home_of_name(queue, record.group) in owned

    async def _take_steps(self, queue: QueueRecord, step: CountStep | None, records: Sequence[BundleRecord]) -> None:
        counts = BundleCounts()
        if step is not None:
            try:
                counts = await self._count(queue, CountBundles(TIMEOUT, tuple(each.hashed for each in records), step))
            except SluicewayError as error:
                self._failed(records, error)
                return
        for record in records:
            try:
                await self._take_step(queue, record, counts.counts.get(record.hashed, BundleCount()))
            except SluicewayError as error:
                self._failed([record], error)

    async def _take_step(self, queue: QueueRecord, record: BundleRecord, count: BundleCount) -> None:
        step = decide(record, count, system.now())
        if step == "close":
            await self._bundles.take_step(record, closed)
        elif step == "finish":
            id = await self._produce_follow_up(record, count)
            await self._bundles.take_step(record, lambda before: ended(before, "done", count, id))
        elif step == "expire":
            await self._bundles.take_step(record, lambda before: ended(before, "expired", count))
        elif step == "delete":
            await self._bundles.take_step(record, lambda _: None)
        self._failing.pop(record.id, None)
        if record.ended_at is not None:
            self._let_go(record)
        self._wait(record, due(record, system.now()))

    async def _produce_follow_up(self, record: BundleRecord, count: BundleCount) -> str:
        """Produce the follow-up, unless an earlier attempt has. Returns its id; empty: there is none, or it is not known."""
        if record.follow_up is None:
            return ""
        target = record.follow_up.queue_name
        request = Produce(follow_up_for(record, count), TIMEOUT, ProduceKey(_KEY, record.group, 1))
        queue = await self._look_up(target)
        try:
            produced = await self._produce(target, request)
        except SluicewayError as error:
            if error.code not in _PRODUCED_BEFORE:
                raise
            return ""
        return str(ItemId(queue.incarnation, produced.partition, produced.first_offset))

    async def _end_without_queue(self, record: BundleRecord) -> None:
        """The queue was deleted, and the items with it."""
        try:
            if record.ended_at is None:
                await self._bundles.take_step(record, lambda before: ended(before, "cancelled", BundleCount()))
            elif decide(record, BundleCount(), system.now()) == "delete":
                await self._bundles.take_step(record, lambda _: None)
        except SluicewayError as error:
            self._failed([record], error)
            return
        self._let_go(record)
        self._wait(record, due(record, system.now()))

    def _let_go(self, record: BundleRecord) -> None:
        """The bundle is over: no settlement concerns it any more."""
        ids = self._closed.get(record.queue_name, set())
        ids.discard(record.id)
        if not ids:
            self._closed.pop(record.queue_name, None)

    def _failed(self, records: Iterable[BundleRecord], error: SluicewayError) -> None:
        for record in records:
            before = self._failing.get(record.id)
            pause = FIRST_PAUSE if before is None else min(LAST_PAUSE, 2 * before.pause)
            self._failing[record.id] = _Failing(pause, f"{error.code}: {error.detail}")
            self._wait(record, system.now() + pause)

    # ---- answers ----------------------------------------------------------------------------------------------

    async def shown(self, records: Sequence[BundleRecord]) -> list[tuple[BundleRecord, BundleCount | None, str | None]]:
        """These bundles with the counts of their items (None: not known now), and why they make no progress."""
        by_queue: dict[str, list[BundleRecord]] = {}
        for record in records:
            if record.ended_at is None:
                by_queue.setdefault(record.queue_name, []).append(record)
        counted = await asyncio.gather(*(self._look(name, some) for name, some in by_queue.items()))
        counts = {bundle: count for each in counted for bundle, count in each.counts.items()}
        return [(each, counts.get(each.hashed) if each.ended_at is None else each.count, self._problem(each)) for each in records]

    async def _look(self, queue_name: str, records: Sequence[BundleRecord]) -> BundleCounts:
        try:
            return await self._count(await self._look_up(queue_name), CountBundles(TIMEOUT, tuple(each.hashed for each in records)))
        except SluicewayError:
            return BundleCounts()

    def _problem(self, record: BundleRecord) -> str | None:
        failing = self._failing.get(record.id)
        return None if failing is None or record.ended_at is not None else failing.problem

    # ---- the meta store ---------------------------------------------------------------------------------------

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_INTERVAL / 1_000)
            await self._follow()

    async def _watch(self) -> None:
        async for _ in self._meta.watch(INDEX):
            await self._follow()

    async def _follow(self) -> None:
        try:
            await self._bundles.follow()
        except SluicewayError as error:
            log.warning("changes of bundles could not be read, will retry: %s", error.detail)
        except Exception:
            # It must not end the watch, or this instance would hear of no bundle any more.
            log.exception("changes of bundles could not be followed, will retry")
