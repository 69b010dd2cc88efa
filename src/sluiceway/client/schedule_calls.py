"""Encoders of the calls on schedules."""

from __future__ import annotations

from datetime import datetime

from sluiceway.client.item_calls import wire_item
from sluiceway.client.protocol import Call, Duration, call, duration_text, given, time_text
from sluiceway.contract.schedule_answers import CatchUp as CatchUp
from sluiceway.contract.schedule_answers import ScheduleInfo, SchedulePage, ScheduleRun, ScheduleTimes


def create_schedule(
    name: str,
    queue_name: str,
    cron: str,
    item: object,
    timezone: str | None,
    jitter: Duration | None,
    catch_up: CatchUp | None,
    paused: bool,
) -> Call[ScheduleInfo]:
    fields = given(name=name, queue_name=queue_name, cron=cron, timezone=timezone, jitter=duration_text(jitter), catch_up=catch_up)
    # A repeat after a success would find the call's own schedule and fail with a conflict.
    return call("/v1/schedules.create", ScheduleInfo, fields | {"item": wire_item(item), "paused": paused}, repeatable=False)


def update_schedule(
    name: str, cron: str | None, item: object, timezone: str | None, jitter: Duration | None, catch_up: CatchUp | None
) -> Call[ScheduleInfo]:
    wired = None if item is None else wire_item(item)
    fields = given(name=name, cron=cron, item=wired, timezone=timezone, jitter=duration_text(jitter), catch_up=catch_up)
    return call("/v1/schedules.update", ScheduleInfo, fields)


def get_schedule(name: str) -> Call[ScheduleInfo]:
    return call("/v1/schedules.get", ScheduleInfo, {"name": name})


def list_schedules(queue_name: str | None, name_contains: str | None, pivot: str | None, limit: int | None) -> Call[SchedulePage]:
    fields = given(queue_name=queue_name, name_contains=name_contains, pivot=pivot, limit=limit)
    return call("/v1/schedules.list", SchedulePage, fields)


def pause_schedule(name: str, paused: bool) -> Call[ScheduleInfo]:
    return call("/v1/schedules.pause" if paused else "/v1/schedules.resume", ScheduleInfo, {"name": name})


def run_schedule(name: str) -> Call[ScheduleRun]:
    # A repeat produces another item.
    return call("/v1/schedules.run", ScheduleRun, {"name": name}, repeatable=False)


def delete_schedule(name: str) -> Call[dict[str, object]]:
    # A repeat after a success could delete a newer schedule of the same name.
    return call("/v1/schedules.delete", dict[str, object], {"name": name}, repeatable=False)


def next_times(cron: str, timezone: str | None, count: int | None, after: datetime | None) -> Call[ScheduleTimes]:
    return call("/v1/schedules.next", ScheduleTimes, given(cron=cron, timezone=timezone, count=count, after=time_text(after, "after")))
