"""Schedules: their records in the meta store, which every instance knows, and how far each has come."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.time_zones import find_zone
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.timetable import Timetable
from sluiceway.instance.indexed_records import IndexedRecords, unreadable
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_SCHEDULES
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor
from sluiceway.model.meta import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS
from sluiceway.model.schedule_records import Progress, SchedulePatch, ScheduleRecord
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError, View
from sluiceway.ports.partition_store import StoreUnavailableError

SCHEDULE: Final = "schedule/"
FIRED: Final = "fired/"
INDEX: Final = "schedules"

_pack = msgspec.msgpack.Encoder().encode
_progress = msgspec.msgpack.Decoder(Progress).decode


def timetable(record: ScheduleRecord) -> Timetable:
    """When the schedule fires. Raises `invalid_request`."""
    return Timetable(parse_cron(record.cron), find_zone(record.timezone), record.name, record.jitter)


class Schedules(IndexedRecords[ScheduleRecord]):
    """All schedules, as of the last `follow`, and how far each has come."""

    def __init__(self, meta: MetaStore, audit: AuditTrail) -> None:
        super().__init__(meta, ScheduleRecord, SCHEDULE, INDEX, [FIRED])
        self._audit = audit
        self._progress: dict[str, Progress] = {}

    # ---- reading ----------------------------------------------------------------------------------------------

    def _take(self, name: str, view: View) -> None:
        super()._take(name, view)
        self._take_progress(name, view)

    def _note(self, name: str, record: ScheduleRecord | None) -> None:
        if record is None:
            self._progress.pop(name, None)
        super()._note(name, record)

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

    def progress(self, record: ScheduleRecord) -> Progress:
        """How far it has come, as far as this instance knows."""
        known = self._progress.get(record.name)
        return known if known is not None and known.incarnation == record.incarnation else Progress(record.incarnation, record.after)

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
                raise unreadable(error) from error

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
        await self._record_change(record.name, created, "schedules.create", by, detail)
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
        changed = await self._record_change(name, updated, action, by, detail)
        assert changed is not None, "it was not deleted"
        return changed

    async def delete(self, name: str, by: Actor, permit: Callable[[str], None]) -> None:
        """Remove the schedule. Raises as `update`."""

        def deleted(before: ScheduleRecord | None) -> None:
            _existing(before, name, permit)

        await self._record_change(name, deleted, "schedules.delete", by, {})

    async def _record_change(
        self,
        name: str,
        decide: Callable[[ScheduleRecord | None], ScheduleRecord | None],
        action: str,
        by: Actor,
        detail: Mapping[str, Any],
    ) -> ScheduleRecord | None:
        """As `_change`, with an entry in the audit trail."""

        def entry(record: ScheduleRecord) -> dict[str, bytes]:
            return dict([self._audit.entry(action, by, record.queue_name, {"name": name, **detail})])

        too_many = f"there are {MAX_SCHEDULES:,} schedules, which is the maximum; delete some"
        return await self._change(name, decide, entry, MAX_SCHEDULES, too_many)


def not_found(name: str) -> SluicewayError:
    """The error for a schedule that does not exist, or that the caller may not see: which of both is not said."""
    return SluicewayError("schedule_not_found", f"there is no schedule {name[:64]!r} that this caller may use", "name")


def _existing(record: ScheduleRecord | None, name: str, permit: Callable[[str], None]) -> ScheduleRecord:
    if record is None:
        raise not_found(name)
    permit(record.queue_name)
    return record


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
