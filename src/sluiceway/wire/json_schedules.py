"""JSON codec of the calls on schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import pyarrow as pa
from msgspec import Meta

from sluiceway.contract.fields import ONE_PAYLOAD, Duration, Label, Pivot, time_field
from sluiceway.contract.schedule_answers import (
    CatchUp,
    CronText,
    LastFailure,
    LastFired,
    ScheduleInfo,
    ScheduleName,
    SchedulePage,
    ScheduleRun,
    ScheduleTimes,
    ZoneText,
)
from sluiceway.kernel.clock import Millis, check_duration, format_duration, format_time, parse_time
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON, MAX_JITTER
from sluiceway.kernel.names import QUEUE_NAME
from sluiceway.model.schedule_records import Failed, Progress, SchedulePatch, ScheduleRecord
from sluiceway.model.small_batch import SmallBatch
from sluiceway.wire.decoding import Call, JsonDecoder
from sluiceway.wire.json_items import Item
from sluiceway.wire.stored_items import fields_of, rows_of, stored_item

_ItemField = Annotated[Item, ONE_PAYLOAD]
NAME_HEADER = "schedule"
TIME_HEADER = "scheduled_at"
"""Headers of an item that say which schedule produced it, and for which time."""
_FAR: Millis = 95_617_584_000_000
"""The year 5000. A hundred times of the rarest expression from then on are not beyond the calendar."""


def check_schedule_name(name: str) -> str:
    """Raises `invalid_request`."""
    if not QUEUE_NAME.fullmatch(name):
        raise invalid("name", f"{name[:64]!r} is not a name for a schedule: 1 to 128 of A-Z a-z 0-9 _ . -, not beginning with . or -")
    return name


class CreateScheduleCall(Call):
    name: ScheduleName
    cron: CronText
    item: _ItemField
    timezone: ZoneText = "UTC"
    jitter: Duration = "0s"
    catch_up: CatchUp = "last"
    paused: bool = False

    def record(self, incarnation: str, now: Millis) -> ScheduleRecord:
        """The schedule to create. `cron` and `timezone` are not checked. Raises `invalid_request`."""
        return ScheduleRecord(
            name=check_schedule_name(self.name),
            incarnation=incarnation,
            queue_name=self.queue_name,
            cron=self.cron,
            timezone=self.timezone,
            jitter=_jitter(self.jitter),
            catch_up=self.catch_up,
            item=_stored(self.item, self.name),
            paused=self.paused,
            created_at=now,
            updated_at=now,
            after=now,
        )


class UpdateScheduleCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: ScheduleName
    cron: CronText | None = None
    timezone: ZoneText | None = None
    jitter: Duration | None = None
    catch_up: CatchUp | None = None
    item: _ItemField | None = None

    def patch(self) -> SchedulePatch:
        """The change to make. `cron` and `timezone` are not checked. Raises `invalid_request`, also if it changes nothing."""
        patch = SchedulePatch(
            cron=self.cron,
            timezone=self.timezone,
            jitter=None if self.jitter is None else _jitter(self.jitter),
            catch_up=self.catch_up,
            item=None if self.item is None else _stored(self.item, self.name),
        )
        if not patch.given():
            raise SluicewayError("invalid_request", "nothing to change; give at least one of cron, timezone, jitter, catch_up, item")
        return patch


class ScheduleCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call on one schedule."""

    name: ScheduleName


class ListSchedulesCall(msgspec.Struct, forbid_unknown_fields=True):
    """List schedules by name. `pivot`: the name of the previous page's last one. `name_contains`: in either case."""

    pivot: Pivot | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS_JSON)] = 100
    queue_name: ScheduleName | None = None
    name_contains: Label | None = None


class NextTimesCall(msgspec.Struct, forbid_unknown_fields=True):
    """The next times of an expression, after now or after a time."""

    cron: CronText
    timezone: ZoneText = "UTC"
    count: Annotated[int, Meta(ge=1, le=100)] = 5
    after: str | None = None

    def begin(self, now: Millis) -> Millis:
        """Raises `invalid_request`."""
        begin = now if self.after is None else parse_time(self.after, "after")
        if not 0 <= begin < _FAR:
            raise invalid("after", "expected a time from 1970 on and before the year 5000")
        return begin


decode_create = JsonDecoder(CreateScheduleCall)
decode_update = JsonDecoder(UpdateScheduleCall)
decode_schedule = JsonDecoder(ScheduleCall)
decode_list = JsonDecoder(ListSchedulesCall)
decode_next = JsonDecoder(NextTimesCall)


def _jitter(text: str) -> Millis:
    return check_duration(text, "jitter", 0, MAX_JITTER)


def _stored(item: Item, name: str) -> msgspec.Raw:
    return stored_item(item, _headers(name, 0), "schedule")


def _headers(name: str, at: Millis | None) -> dict[str, str]:
    return {NAME_HEADER: name, **({} if at is None else {TIME_HEADER: format_time(at)})}


def item_for(stored: bytes, name: str, at: Millis | None) -> SmallBatch | pa.RecordBatch:
    """The item to produce for the time `at` of that schedule; None: for none. Always the same for the same arguments."""
    return rows_of(stored, _headers(name, at), at or 0)


# ---- answers --------------------------------------------------------------------------------------------------


def info(record: ScheduleRecord, progress: Progress, next_at: Millis | None) -> ScheduleInfo:
    return ScheduleInfo(
        name=record.name,
        queue_name=record.queue_name,
        cron=record.cron,
        timezone=record.timezone,
        jitter=format_duration(record.jitter),
        catch_up=record.catch_up,
        paused=record.paused,
        item=fields_of(record.item),
        created_at=time_field(record.created_at),
        updated_at=time_field(record.updated_at),
        next_at=time_field(next_at),
        last_fired=None
        if progress.fired is None
        else LastFired(
            scheduled_at=time_field(progress.fired.at), fired_at=time_field(progress.fired.fired_at), id=progress.fired.id or None
        ),
        last_failure=None if progress.failed is None else _failure(progress.failed),
    )


def _failure(failed: Failed) -> LastFailure:
    return LastFailure(scheduled_at=time_field(failed.at), failed_at=time_field(failed.failed_at), code=failed.code, detail=failed.detail)


encode_info = msgspec.json.Encoder().encode


def page(infos: Sequence[ScheduleInfo], following: str | None) -> bytes:
    return msgspec.json.encode(SchedulePage(items=list(infos), next=following))


def times(moments: Sequence[Millis]) -> bytes:
    return msgspec.json.encode(ScheduleTimes(times=[time_field(at) for at in moments]))


def ran(record: ScheduleRecord, id: str) -> bytes:
    return msgspec.json.encode(ScheduleRun(name=record.name, queue_name=record.queue_name, id=id))
