"""Schedules: their records in the meta store, which every instance knows, and how far each has come."""

from __future__ import annotations

import asyncio
import itertools
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.time_zones import find_zone
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.timetable import Timetable
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_SCHEDULES
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.model.meta import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS
from sluiceway.model.schedule_records import Progress, ScheduleIndex, SchedulePatch, ScheduleRecord
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

SCHEDULE: Final = "schedule/"
FIRED: Final = "fired/"
INDEX: Final = "schedules"

_pack = msgspec.msgpack.Encoder().encode
_record = msgspec.json.Decoder(ScheduleRecord).decode
_progress = msgspec.msgpack.Decoder(Progress).decode
_index = msgspec.json.Decoder(ScheduleIndex).decode


def timetable(record: ScheduleRecord) -> Timetable:
    """When the schedule fires. Raises `invalid_request`."""
    return Timetable(parse_cron(record.cron), find_zone(record.timezone), record.name, record.jitter)


class Schedules:
    """All schedules, as of the last `follow`. `heard` is called with the name of each that is new, changed or gone."""

    def __init__(self, meta: MetaStore, audit: AuditTrail) -> None:
        self._meta = meta
        self._audit = audit
        self._lock = asyncio.Lock()
        """Held by a change of this process, which would conflict with another one, and by `follow`, which would read what was before it."""
        self._records: dict[str, ScheduleRecord] = {}
        self._progress: dict[str, Progress] = {}
        self._names: list[str] | None = []
        """All names in order; None: to be sorted again."""
        self._version = -1
        self.heard: Callable[[str], None] = lambda _: None

    # ---- reading ----------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Take over what other processes have changed. Cheap if nothing has. Raises `unavailable`."""
        async with self._lock:
            await self._follow()

    async def _follow(self) -> None:
        view = await self._read([INDEX])
        index = index_of(view)
        behind = index.version - self._version
        if behind == 0:
            return
        if self._version >= 0 and 0 < behind <= len(index.recent):
            names = dict.fromkeys(index.recent[-behind:])
            view = await self._read([each + name for name in names for each in (SCHEDULE, FIRED)])
            for name in names:
                self._take(name, view)
        else:
            # Of one moment, the index included.
            view = await self._read([INDEX], [SCHEDULE, FIRED])
            index = index_of(view)
            found = [key.removeprefix(SCHEDULE) for key in view.entries if key.startswith(SCHEDULE)]
            for name in {*found, *self._records}:
                self._take(name, view)
        self._version = index.version

    def _take(self, name: str, view: View) -> None:
        entry = view.entries.get(SCHEDULE + name)
        record = None if entry is None else _record(entry.value)
        if record != self._records.get(name):
            self._note(name, record)
        self._take_progress(name, view)

    def _note(self, name: str, record: ScheduleRecord | None) -> None:
        if (record is None) != (name not in self._records):
            self._names = None
        if record is None:
            self._records.pop(name, None)
            self._progress.pop(name, None)
        else:
            self._records[name] = record
        self.heard(name)

    def _take_progress(self, name: str, view: View) -> None:
        entry, record = view.entries.get(FIRED + name), self._records.get(name)
        if entry is None or record is None:
            return
        progress = _progress(entry.value)
        # Another one is of a schedule that was deleted. An older one was overtaken.
        if progress.incarnation == record.incarnation and progress.through >= self.progress(record).through:
            self._progress[name] = progress

    async def read_progress(self, names: Iterable[str]) -> None:
        """Read how far these schedules have come, as other instances have recorded it. Raises `unavailable`."""
        for some in _batches(names, MAX_COMMIT_KEYS):
            view = await self._read([FIRED + name for name in some])
            for name in some:
                self._take_progress(name, view)

    def find(self, name: str) -> ScheduleRecord | None:
        return self._records.get(name)

    async def get(self, name: str) -> ScheduleRecord | None:
        """The schedule, even if another instance has just created it; None: there is none. Raises `unavailable`."""
        if name not in self._records:
            await self.follow()
        return self._records.get(name)

    def progress(self, record: ScheduleRecord) -> Progress:
        """How far it has come, as far as this instance knows."""
        known = self._progress.get(record.name)
        return known if known is not None and known.incarnation == record.incarnation else Progress(record.incarnation, record.after)

    def names(self, pivot: str = "") -> Iterator[str]:
        """The names in order, after that one."""
        if self._names is None:
            self._names = sorted(self._records)
        return itertools.islice(self._names, bisect_right(self._names, pivot), None)

    # ---- progress ---------------------------------------------------------------------------------------------

    def note(self, record: ScheduleRecord, progress: Progress) -> None:
        """Take note of what this instance has found out. `record_progress` makes it durable."""
        self._progress[record.name] = progress

    async def record_progress(self, progress: Mapping[str, Progress]) -> None:
        """Record how far schedules have come, by name. Raises `unavailable`; some may be recorded.

        Unchecked: an older record costs a repetition that adds nothing (`core.schedules.firings`).
        """
        for some in _commits((FIRED + name, _pack(each)) for name, each in progress.items()):
            try:
                await self._meta.commit(puts=some)
            except (MetaUnknownError, StoreUnavailableError) as error:
                raise _unreadable(error) from error

    # ---- changes ----------------------------------------------------------------------------------------------

    async def create(self, record: ScheduleRecord, by: Actor) -> ScheduleRecord:
        """Record a new schedule. Raises `schedule_exists`, `invalid_request`, `unavailable`, `outcome_unknown`."""
        timetable(record)

        def created(before: ScheduleRecord | None) -> ScheduleRecord:
            if before is not None:
                raise SluicewayError("schedule_exists", f"there is a schedule {record.name!r} already; schedules.update changes it", "name")
            return record

        detail = {"cron": record.cron, "timezone": record.timezone, "jitter": format_duration(record.jitter)}
        detail |= {"catch_up": record.catch_up}
        await self._change(record.name, created, "schedules.create", by, detail)
        return record

    async def update(self, name: str, patch: SchedulePatch, action: str, by: Actor, permit: Callable[[str], None]) -> ScheduleRecord:
        """Change these settings. `permit` is called with the queue's name, and may raise. Raises `schedule_not_found`, and as `create`."""

        def updated(before: ScheduleRecord | None) -> ScheduleRecord:
            record = _existing(before, name, permit)
            given, now = patch.given(), system.now()
            after = msgspec.structs.replace(record, **given, updated_at=now)
            moves = (after.cron, after.timezone) != (record.cron, record.timezone)
            if moves or (record.paused and not after.paused):
                # Times before now were not its times, or were those of a pause.
                after = msgspec.structs.replace(after, after=now)
            timetable(after)
            return after

        detail = {each: value for each, value in patch.given().items() if each != "item"}
        detail |= {"item": "changed"} if patch.item is not None else {}
        changed = await self._change(name, updated, action, by, detail)
        assert changed is not None, "it was not deleted"
        return changed

    async def delete(self, name: str, by: Actor, permit: Callable[[str], None]) -> None:
        """Remove the schedule. Raises as `update`."""

        def deleted(before: ScheduleRecord | None) -> None:
            _existing(before, name, permit)

        await self._change(name, deleted, "schedules.delete", by, {})

    async def _change(
        self,
        name: str,
        decide: Callable[[ScheduleRecord | None], ScheduleRecord | None],
        action: str,
        by: Actor,
        detail: Mapping[str, Any],
    ) -> ScheduleRecord | None:
        """Commit what `decide` makes of the record, None: nothing of it, and return that."""
        where = SCHEDULE + name
        async with self._lock:
            while True:
                view = await self._read([INDEX, where])
                entry, listed = view.entries.get(where), view.entries.get(INDEX)
                before = None if entry is None else _record(entry.value)
                after = decide(before)
                queue_name = next(each.queue_name for each in (after, before) if each is not None)
                index = index_of(view).changed(name, (after is not None) - (before is not None))
                if index.count > MAX_SCHEDULES:
                    raise SluicewayError("invalid_request", f"there are {MAX_SCHEDULES:,} schedules, which is the maximum; delete some")
                key, note = self._audit.entry(action, by, queue_name, {"name": name, **detail})
                puts = {INDEX: msgspec.json.encode(index), key: note}
                if after is not None:
                    puts[where] = msgspec.json.encode(after)
                checks = {where: entry and entry.stamp, INDEX: listed and listed.stamp}
                deletes = (where, FIRED + name) if after is None else ()
                if await self._commit(checks, puts, deletes):
                    break
            self._note(name, after)
            if index.version == self._version + 1:
                # Otherwise `follow` reads the changes of others first.
                self._version = index.version
            return after

    async def _commit(self, checks: Mapping[str, int | None], puts: Mapping[str, bytes], deletes: Sequence[str]) -> bool:
        """Returns False after a conflict with another process."""
        try:
            await self._meta.commit(checks, puts=puts, deletes=deletes)
        except ConflictError:
            return False
        except MetaUnknownError as error:
            detail = f"the meta store did not confirm the change: {error}; schedules.get shows it"
            raise SluicewayError("outcome_unknown", detail) from error
        except StoreUnavailableError as error:
            raise _unreadable(error) from error
        return True

    async def _read(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> View:
        try:
            return await self._meta.read(keys, prefixes)
        except StoreUnavailableError as error:
            raise _unreadable(error) from error


def not_found(name: str) -> SluicewayError:
    """The error for a schedule that does not exist, or that the caller may not see: which of both is not said."""
    return SluicewayError("schedule_not_found", f"there is no schedule {name[:64]!r} that this caller may use", "name")


def _existing(record: ScheduleRecord | None, name: str, permit: Callable[[str], None]) -> ScheduleRecord:
    if record is None:
        raise not_found(name)
    permit(record.queue_name)
    return record


def index_of(view: View) -> ScheduleIndex:
    """The index of a view that has it, if there is one."""
    entry = view.entries.get(INDEX)
    return ScheduleIndex() if entry is None else _index(entry.value)


def _unreadable(error: Exception) -> SluicewayError:
    return SluicewayError("unavailable", f"the meta store does not answer: {error}")


def _batches(names: Iterable[str], size: int) -> Iterator[list[str]]:
    names = iter(names)
    while some := list(itertools.islice(names, size)):
        yield some


def _commits(puts: Iterable[tuple[str, bytes]]) -> Iterator[dict[str, bytes]]:
    """The puts, in as few commits as hold them."""
    some: dict[str, bytes] = {}
    room = MAX_COMMIT_BYTES
    for key, value in puts:
        room -= len(key.encode()) + len(value)
        if some and (room < 0 or len(some) == MAX_COMMIT_KEYS):
            yield some
            some, room = {}, MAX_COMMIT_BYTES - len(key.encode()) - len(value)
        some[key] = value
    if some:
        yield some
