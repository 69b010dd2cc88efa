"""Fires the schedules of this instance: carries out what `core.schedules.firings` decides.

An instance fires a schedule if it owns the home of the schedule's idempotency group in its queue. Two may believe so at a time; the group
makes sure that a moment is fired once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Iterable
from typing import Any, Final

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.ownership import Ownership
from sluiceway.core.partition.key_slots import home_of_name
from sluiceway.core.schedules.firings import Firing, Firings
from sluiceway.instance.schedule_catalog import INDEX, Schedules, timetable
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Produce, Produced, ProduceKey
from sluiceway.model.schedule_records import Failed, Fired, Progress, ScheduleRecord
from sluiceway.ports.meta_store import MetaStore
from sluiceway.wire.json_schedules import item_for

log = logging.getLogger(__name__)

RECORD_INTERVAL: Millis = 5_000
"""Interval between two records of how far schedules have come. What a crash loses of it is fired again, which adds nothing."""
LOOK_INTERVAL: Millis = 1_000
"""Interval between two looks at which partitions are owned, beside those after a change."""
FOLLOW_INTERVAL: Millis = 5_000
"""Maximum age of what is known of other instances' changes, when no hint of one arrives."""
MAX_FLYING: Final = 4_096
"""Firings in flight: some kilobytes each."""
MAX_OF_QUEUE: Final = 256
"""Those of one queue: enough to share its commits, and a queue that hangs does not hold up the others."""
FIRE_TIMEOUT: Millis = 10_000
MAX_WAIT: Millis = 5_000
"""How long a firing may wait for those of its queue before it is decided about again."""
AT_ONCE: Final = 500
"""Schedules handled between two moments at which other work may run: some milliseconds."""
_KEY: Final = "item"
_FIRED_BEFORE: Final = ("stale_sequence", "key_conflict")
"""Refusals that say that the moment is fired: the group is past it, or has it with the item that the schedule had then."""

Owns = tuple[Any, ...]


class ScheduleDriver:
    """`queue` finds a queue by its name, `produce` stores items. Call `run` after the schedules and the queues are known, and `stop`."""

    def __init__(
        self,
        schedules: Schedules,
        ownership: Ownership,
        meta: MetaStore,
        queue: Callable[[str], QueueRecord | None],
        produce: Callable[[str, Produce], Awaitable[Produced]],
    ) -> None:
        self._schedules = schedules
        self._ownership = ownership
        self._meta = meta
        self._queue = queue
        self._produce = produce
        self._firings = Firings()
        self._flying: set[asyncio.Task[None]] = set()
        self._flying_of: Counter[str] = Counter()
        """Firings in flight, by queue."""
        self._waiting: dict[str, deque[tuple[Firing, Millis]]] = {}
        """Firings that were begun, and when, for which their queue has no room yet."""
        self._tasks: list[asyncio.Task[None]] = []
        self._wake, self._look = asyncio.Event(), asyncio.Event()
        self._of_queue: dict[str, set[str]] = {}
        """The names of the schedules of each queue."""
        self._queue_of: dict[str, str] = {}
        self._owned: dict[str, Owns] = {}
        """What decided, at the last look, which schedules of a queue are fired here."""
        self._changed: dict[str, None] = {}
        schedules.heard = self._heard

    # ---- lifecycle --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to fire. Raises `unavailable`."""
        await self._schedules.follow()
        work = [self._fire_when_due(), self._keep_looking(), self._keep_recording()]
        if not self._ownership.is_alone:
            work += [self._keep_following(), self._watch()]
        self._tasks = [asyncio.create_task(each) for each in work]

    async def stop(self) -> None:
        """Begin nothing more, finish what is in flight, and record it."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._flying:
            await asyncio.wait(self._flying, timeout=1)
        try:
            await self._record()
        except SluicewayError as error:
            log.warning("how far schedules have come was not recorded; the next start finds out: %s", error.detail)

    def poke(self) -> None:
        """Look again at what is owned: a queue, or the ownership of a partition, has changed."""
        self._look.set()

    async def catch_up(self) -> None:
        """Fire all that is due, after the clock was moved ahead."""
        await self._assign()
        while True:
            due = self._begin()
            if self._flying:
                await asyncio.wait(self._flying)
            elif due is None or due > system.now():
                return

    # ---- firing -----------------------------------------------------------------------------------------------

    async def _fire_when_due(self) -> None:
        while True:
            self._wake.clear()
            due = self._begin()
            await system.wait(self._wake, None if due is None else max(0, due - system.now()))

    def _begin(self) -> Millis | None:
        """Begin what is due. Returns when there is more to begin; None: after another event."""
        room = MAX_FLYING - len(self._flying)
        if room <= 0 or not self._ownership.holds():
            return None
        now = system.now()
        for firing in self._firings.begin(now, min(room, AT_ONCE)):
            queue_name = self._queue_of[firing.key]
            if self._flying_of[queue_name] < MAX_OF_QUEUE:
                self._send(firing, queue_name)
            else:
                self._waiting.setdefault(queue_name, deque()).append((firing, now))
        return self._firings.due() if len(self._flying) < MAX_FLYING else None

    def _send(self, firing: Firing, queue_name: str) -> None:
        self._flying_of[queue_name] += 1
        task = asyncio.create_task(self._fire(firing))
        self._flying.add(task)

        def landed(_: object) -> None:
            self._flying.discard(task)
            self._flying_of[queue_name] -= 1
            self._send_next(queue_name)
            self._wake.set()

        task.add_done_callback(landed)

    def _send_next(self, queue_name: str) -> None:
        """Send what has waited for room in the queue."""
        waiting, now = self._waiting.get(queue_name), system.now()
        while waiting and self._flying_of[queue_name] < MAX_OF_QUEUE:
            firing, begun = waiting.popleft()
            if now - begun > MAX_WAIT:
                self._firings.put_back(firing, now)
            elif self._firings.is_flying(firing):
                self._send(firing, queue_name)
        if not waiting:
            self._waiting.pop(queue_name, None)
        if not self._flying_of[queue_name]:
            del self._flying_of[queue_name]

    async def _fire(self, firing: Firing) -> None:
        record = self._schedules.find(firing.key)
        if record is None or record.incarnation != firing.incarnation:
            return
        known = self._schedules.progress(record)
        try:
            fired = await self._store(record, firing.at)
        except SluicewayError as error:
            failed = Failed(firing.at, system.now(), error.code, error.detail)
            self._note(record, msgspec.structs.replace(known, failed=failed))
            self._firings.failed(firing, system.now())
        except Exception as error:
            log.exception("schedule %s could not be fired", record.name)
            self._note(record, msgspec.structs.replace(known, failed=Failed(firing.at, system.now(), "internal", repr(error)[:200])))
            self._firings.failed(firing, system.now())
        else:
            self._note(record, Progress(record.incarnation, max(known.through, firing.at), fired))
            self._firings.fired(firing)

    async def _store(self, record: ScheduleRecord, at: Millis) -> Fired:
        """Produce the item for that moment, unless an earlier attempt has. Raises as a produce does."""
        key = ProduceKey(_KEY, record.group, at)
        try:
            produced = await self._produce(record.queue_name, Produce(item_for(record.item, record.name, at), FIRE_TIMEOUT, key))
        except SluicewayError as error:
            if error.code not in _FIRED_BEFORE:
                raise
            return Fired(at, system.now())
        return Fired(at, system.now(), self._id(record, produced))

    async def run_now(self, record: ScheduleRecord) -> str:
        """Produce the schedule's item out of turn. Returns its id. Raises as a produce does."""
        return self._id(record, await self._produce(record.queue_name, Produce(item_for(record.item, record.name, None), FIRE_TIMEOUT)))

    def _id(self, record: ScheduleRecord, produced: Produced) -> str:
        queue = self._queue(record.queue_name)
        return "" if queue is None else str(ItemId(queue.incarnation, produced.partition, produced.first_offset))

    def _note(self, record: ScheduleRecord, progress: Progress) -> None:
        current = self._schedules.find(record.name)
        if current is not None and current.incarnation == record.incarnation:
            self._schedules.note(record, progress)
            self._firings.touched[record.name] = None

    # ---- which schedules --------------------------------------------------------------------------------------

    def _heard(self, name: str) -> None:
        record = self._schedules.find(name)
        if record is None or record.paused:
            # At once, so that a caller who was answered sees no further firing begin.
            self._firings.drop(name)
        self._changed[name] = None
        self._look.set()

    async def _keep_looking(self) -> None:
        while True:
            self._look.clear()
            try:
                await self._assign()
            except SluicewayError as error:
                log.warning("schedules were not taken over, will retry: %s", error.detail)
            except Exception:
                log.exception("the schedules of this instance could not be determined")
            await system.wait(self._look, LOOK_INTERVAL)

    async def _assign(self) -> None:
        """Hold the schedules whose homes are owned here, and drop the others."""
        changed, self._changed = self._changed, {}
        try:
            owned = {name: self._owns(name) for name in self._of_queue}
            moved = [name for name in owned.keys() | self._owned.keys() if owned.get(name) != self._owned.get(name)]
            await self._settle({**changed, **{each: None for name in moved for each in self._of_queue.get(name, ())}}, changed)
        except BaseException:
            self._changed = {**changed, **self._changed}
            raise
        for name in moved:
            self._owned[name] = owned.get(name, ())
        self._wake.set()

    def _owns(self, queue_name: str) -> Owns:
        queue = self._queue(queue_name)
        if queue is None:
            return ()
        return queue.incarnation, queue.slots, tuple(each.partition for each in queue.partitions), frozenset(self._ownership.tokens(queue))

    async def _settle(self, names: Iterable[str], changed: Container[str]) -> None:
        """Hold or drop these schedules. Of those that are held already, only the `changed` ones are held anew."""
        tokens: dict[str, tuple[QueueRecord, frozenset[int]] | None] = {}
        gained: list[ScheduleRecord] = []
        for count, name in enumerate(names, 1):
            record = self._schedules.find(name)
            self._file(name, record)
            if record is None or record.paused or not self._is_here(record, tokens):
                self._firings.drop(name)
            elif name in changed or name not in self._firings:
                gained.append(record)
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)
        if not self._ownership.is_alone:
            await self._schedules.read_progress(each.name for each in gained if each.name not in self._firings)
        for count, record in enumerate(gained, 1):
            self._hold(record)
            if count % AT_ONCE == 0:
                self._wake.set()
                await asyncio.sleep(0)

    def _hold(self, record: ScheduleRecord) -> None:
        if self._schedules.find(record.name) is not record:
            # It has changed meanwhile, and is in `_changed`.
            return
        progress = self._schedules.progress(record)
        try:
            table = timetable(record)
        except SluicewayError as error:
            # Recorded by another version, or where other time zones are known.
            self._firings.drop(record.name)
            self._note(record, msgspec.structs.replace(progress, failed=Failed(0, system.now(), error.code, error.detail)))
            return
        self._firings.hold(record.name, record.incarnation, table, record.catch_up, max(progress.through, record.after))

    def _is_here(self, record: ScheduleRecord, tokens: dict[str, tuple[QueueRecord, frozenset[int]] | None]) -> bool:
        if record.queue_name not in tokens:
            queue = self._queue(record.queue_name)
            tokens[record.queue_name] = None if queue is None else (queue, frozenset(self._ownership.tokens(queue)))
        found = tokens[record.queue_name]
        return found is not None and home_of_name(found[0], record.group) in found[1]

    def _file(self, name: str, record: ScheduleRecord | None) -> None:
        before = self._queue_of.pop(name, None)
        if before is not None and (record is None or record.queue_name != before):
            self._of_queue[before].discard(name)
            if not self._of_queue[before]:
                del self._of_queue[before]
        if record is not None:
            self._queue_of[name] = record.queue_name
            self._of_queue.setdefault(record.queue_name, set()).add(name)

    def next_at(self, record: ScheduleRecord) -> Millis | None:
        """When the schedule fires next, jitter included, as far as this instance knows; None: it does not."""
        if record.paused:
            return None
        try:
            table = timetable(record)
        except SluicewayError:
            return None
        through = max(self._schedules.progress(record).through, record.after)
        if record.name not in self._firings:
            # Its owner may be further than it has recorded.
            through = max(through, system.now())
        at = table.after(through)
        return None if at is None else table.due(at)

    async def shown(self, records: Iterable[ScheduleRecord]) -> list[tuple[ScheduleRecord, Progress, Millis | None]]:
        """These schedules with how far they have come, and their next firing. Raises `unavailable`."""
        records = list(records)
        if not self._ownership.is_alone:
            await self._schedules.read_progress(each.name for each in records if each.name not in self._firings)
        return [self.known(each) for each in records]

    def known(self, record: ScheduleRecord) -> tuple[ScheduleRecord, Progress, Millis | None]:
        """The same of one, as far as this instance knows."""
        return record, self._told(record), self.next_at(record)

    def _told(self, record: ScheduleRecord) -> Progress:
        progress = self._schedules.progress(record)
        if self._queue(record.queue_name) is not None or record.paused:
            return progress
        missing = Failed(system.now(), system.now(), "queue_not_found", f"there is no queue {record.queue_name!r}")
        return msgspec.structs.replace(progress, failed=missing)

    # ---- the meta store ---------------------------------------------------------------------------------------

    async def _keep_recording(self) -> None:
        failing = False
        while True:
            await asyncio.sleep(RECORD_INTERVAL / 1_000)
            try:
                await self._record()
                failing = False
            except SluicewayError as error:
                if not failing:
                    log.warning("how far schedules have come is not recorded, will retry: %s", error.detail)
                failing = True
            except Exception:
                log.exception("how far schedules have come could not be recorded, will retry")

    async def _record(self) -> None:
        touched, self._firings.touched = self._firings.touched, {}
        puts: dict[str, Progress] = {}
        for name in touched:
            record = self._schedules.find(name)
            if record is not None:
                progress = self._schedules.progress(record)
                if name in self._firings:
                    progress = msgspec.structs.replace(progress, through=max(progress.through, self._firings.through(name)))
                puts[name] = progress
        try:
            await self._schedules.record_progress(puts)
        except BaseException:
            self._firings.touched = {**touched, **self._firings.touched}
            raise

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_INTERVAL / 1_000)
            await self._follow()

    async def _watch(self) -> None:
        async for _ in self._meta.watch(INDEX):
            await self._follow()

    async def _follow(self) -> None:
        try:
            await self._schedules.follow()
        except SluicewayError as error:
            log.warning("changes of schedules could not be read, will retry: %s", error.detail)
        except Exception:
            # It must not end the watch, or this instance would fire a schedule that was deleted, and none that is new.
            log.exception("changes of schedules could not be followed, will retry")
