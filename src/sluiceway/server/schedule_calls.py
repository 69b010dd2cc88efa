"""The calls on schedules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sluiceway.adapters.system import new_incarnation, now
from sluiceway.adapters.time_zones import find_zone
from sluiceway.contract.schedule_answers import ScheduleInfo, SchedulePage, ScheduleRun, ScheduleTimes
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.timetable import Timetable
from sluiceway.instance.schedule_catalog import not_found
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.names import check_queue_name
from sluiceway.model.schedule_records import SchedulePatch, ScheduleRecord
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_schedules
from sluiceway.wire.shapes import Done

_AT_ONCE: Final = 2_000
"""Schedules that a list compares before other work may run: some 4 ms at most."""
_PRODUCE_ERRORS = ("queue_not_found", "queue_paused", "storage_full", "partition_damaged")


class ScheduleCalls:
    """Create, show, change, run and delete schedules. For a caller without the right on its queue, a schedule does not exist."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/schedules.create",
                "produce",
                self._create,
                json_schedules.CreateScheduleCall,
                ScheduleInfo,
                "Create a schedule, which produces an item at set times",
                ("queue_not_found", "schedule_exists"),
            ),
            Endpoint(
                "/v1/schedules.get",
                "read",
                self._get,
                json_schedules.ScheduleCall,
                ScheduleInfo,
                "Show a schedule, with its next and its latest firing",
                ("schedule_not_found",),
            ),
            Endpoint(
                "/v1/schedules.list",
                "read",
                self._list,
                json_schedules.ListSchedulesCall,
                SchedulePage,
                "List the schedules, page by page",
            ),
            Endpoint(
                "/v1/schedules.update",
                "produce",
                self._update,
                json_schedules.UpdateScheduleCall,
                ScheduleInfo,
                "Change a schedule; what is left out stays as it is",
                ("schedule_not_found",),
            ),
            Endpoint(
                "/v1/schedules.pause",
                "produce",
                self._pause,
                json_schedules.ScheduleCall,
                ScheduleInfo,
                "Pause a schedule; times of the pause are not fired",
                ("schedule_not_found",),
            ),
            Endpoint(
                "/v1/schedules.resume",
                "produce",
                self._resume,
                json_schedules.ScheduleCall,
                ScheduleInfo,
                "Resume a paused schedule",
                ("schedule_not_found",),
            ),
            Endpoint(
                "/v1/schedules.run",
                "produce",
                self._run,
                json_schedules.ScheduleCall,
                ScheduleRun,
                "Produce a schedule's item now, in addition to its times",
                ("schedule_not_found", *_PRODUCE_ERRORS),
            ),
            Endpoint(
                "/v1/schedules.delete",
                "produce",
                self._delete,
                json_schedules.ScheduleCall,
                Done,
                "Delete a schedule",
                ("schedule_not_found",),
            ),
            Endpoint(
                "/v1/schedules.next",
                None,
                self._next,
                json_schedules.NextTimesCall,
                ScheduleTimes,
                "Show the next times of a cron expression, without a schedule",
            ),
        ]

    async def _create(self, request: Request) -> Body:
        call = json_schedules.decode_create(request.body)
        await self._service.look_up(request.permit(call.queue_name))
        record = call.record(new_incarnation(), now())
        return await self._changed(await self._service.schedules.create(record, request.actor))

    async def _get(self, request: Request) -> Body:
        return await self._shown(await self._found(request, json_schedules.decode_schedule(request.body).name))

    async def _list(self, request: Request) -> Body:
        call = json_schedules.decode_list(request.body)
        pivot = check_queue_name(call.pivot, "pivot") if call.pivot else ""
        if call.queue_name is not None:
            request.permit(call.queue_name)
        wanted = (call.name_contains or "").lower()
        found: list[ScheduleRecord] = []
        for count, name in enumerate(self._service.schedules.names(pivot), 1):
            record = self._service.schedules.find(name) if wanted in name.lower() else None
            if record is not None and call.queue_name in (None, record.queue_name) and request.caller.may("read", record.queue_name):
                found.append(record)
                if len(found) > call.limit:
                    break
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
        following = found[call.limit - 1].name if len(found) > call.limit else None
        shown = await self._service.schedule_driver.shown(found[: call.limit])
        return json_schedules.page([json_schedules.info(*each) for each in shown], following)

    async def _update(self, request: Request) -> Body:
        call = json_schedules.decode_update(request.body)
        return await self._change(request, call.name, call.patch(), "schedules.update")

    async def _pause(self, request: Request) -> Body:
        name = json_schedules.decode_schedule(request.body).name
        return await self._change(request, name, SchedulePatch(paused=True), "schedules.pause")

    async def _resume(self, request: Request) -> Body:
        name = json_schedules.decode_schedule(request.body).name
        return await self._change(request, name, SchedulePatch(paused=False), "schedules.resume")

    async def _change(self, request: Request, name: str, patch: SchedulePatch, action: str) -> Body:
        schedules = self._service.schedules
        return await self._changed(await schedules.update(name, patch, action, request.actor, _permit(request, name)))

    async def _run(self, request: Request) -> Body:
        record = await self._found(request, json_schedules.decode_schedule(request.body).name)
        await self._service.look_up(record.queue_name)
        id = await self._service.audit.recorded(
            "schedules.run", request.actor, record.queue_name, {"name": record.name}, lambda: self._service.schedule_driver.run_now(record)
        )
        return json_schedules.ran(record, id)

    async def _delete(self, request: Request) -> Body:
        name = json_schedules.decode_schedule(request.body).name
        await self._service.schedules.delete(name, request.actor, _permit(request, name))
        return b"{}"

    async def _next(self, request: Request) -> Body:
        call = json_schedules.decode_next(request.body)
        table = Timetable(parse_cron(call.cron), find_zone(call.timezone))
        found: list[Millis] = []
        at = table.after(call.begin(now()))
        while at is not None and len(found) < call.count:
            found.append(at)
            # There are 28 years between two Sundays that are a 29 February, each day of which is looked at.
            await asyncio.sleep(0)
            at = table.after(at)
        return json_schedules.times(found)

    async def _found(self, request: Request, name: str) -> ScheduleRecord:
        record = await self._service.schedules.get(name)
        if record is None:
            raise not_found(name)
        _permit(request, name)(record.queue_name)
        return record

    async def _changed(self, record: ScheduleRecord) -> Body:
        """The answer to a change, which is made: no error of what is read for it may say otherwise."""
        try:
            return await self._shown(record)
        except SluicewayError:
            return json_schedules.encode_info(json_schedules.info(*self._service.schedule_driver.known(record)))

    async def _shown(self, record: ScheduleRecord) -> Body:
        (shown,) = await self._service.schedule_driver.shown([record])
        return json_schedules.encode_info(json_schedules.info(*shown))


def _permit(request: Request, name: str) -> Callable[[str], None]:
    """A check of the right on the schedule's queue. Raises `schedule_not_found`, so that the answer does not reveal the schedule."""

    def permit(queue_name: str) -> None:
        if not request.caller.may(request.action, queue_name):
            raise not_found(name)
        request.permit(queue_name)

    return permit
