"""Schedules: a list that is paged and searched, one schedule, and the commands on them."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode
from zoneinfo import ZoneInfo

from sluiceway.adapters.system import now
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.item_commands import HEADERS, ITEM_TEXTS, PRIORITY
from sluiceway.server.ui.payload import visible, whole
from sluiceway.server.ui.view import Command, Field, View
from sluiceway.server.ui.visit import Visit, facts_of

_PAGE: Final = 100
_TIMES: Final = 5
_LATE: Final = timedelta(minutes=1)
"""Time after which a firing that is due counts as missed."""
_FILTERS: Final = {"name_contains": "--contains", "queue_name": "--queue"}


async def _gather(visit: Visit) -> Facts:
    given = {name: text.strip() for name, text in facts_of(visit.query, _FILTERS).items() if text.strip()}
    pivot = visit.query.get("pivot") or None
    page = await visit.api.call("schedules.list", limit=_PAGE, pivot=pivot, **given)
    return {
        "given": given,
        "rows": [_told(each) for each in page["items"]],
        "first": f"/ui/schedules?{urlencode(given)}" if pivot else "",
        "more": f"/ui/schedules?{urlencode({**given, 'pivot': ''})}",
        "next": page["next"],
        "line": shlex.join(["sluiceway", "schedule", "list", *(word for name, text in given.items() for word in (_FILTERS[name], text))]),
    }


def _told(schedule: Facts) -> Facts:
    fired = schedule["last_fired"]
    late = None if fired is None else (_moment(fired["fired_at"]) - _moment(fired["scheduled_at"])).total_seconds()
    return {**schedule, "state": _state(schedule), "late": late, "cron": visible(schedule["cron"])}


def _state(schedule: Facts) -> str:
    if schedule["paused"]:
        return "paused"
    if schedule["last_failure"] is not None:
        return "failing"
    if schedule["next_at"] is None:
        return "ended"
    due = _moment(schedule["next_at"])
    return "late" if due + _LATE < datetime.fromtimestamp(now() / 1000, UTC) else "active"


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


async def _one(visit: Visit) -> Facts:
    found = await visit.api.call("schedules.get", name=visit.parts["name"])
    zone = _zone(found["timezone"])
    times = [
        # Where the zone's clock is not known, it is not shown.
        {"at": at, "there": f"{_moment(at).astimezone(zone):%a %Y-%m-%d %H:%M}" if zone else "–"}
        for at in await _next_times(visit, found)
    ]
    return {
        "schedule": _told(found),
        "item": _item(found["item"]),
        "times": times,
        "known": {"name": found["name"], "queue_name": found["queue_name"]},
    }


async def _next_times(visit: Visit, schedule: Facts) -> list[str]:
    try:
        answer = await visit.api.call("schedules.next", cron=schedule["cron"], timezone=schedule["timezone"], count=_TIMES)
    except ProblemError as error:
        # Another version has recorded it, or this machine does not know the zone: the schedule's failure says so.
        if error.code != "invalid_request":
            raise
        return []
    return list(answer["times"])


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        return None


def _item(item: Mapping[str, Any]) -> Facts:
    payload = item.get("bytes")
    if payload is None:
        payload = base64.b64encode(item.get("utf8", "").encode("utf-8", "surrogatepass")).decode()
    return {
        "texts": [(name, visible(str(item[name]))) for name in (*ITEM_TEXTS, "priority") if item.get(name) is not None],
        "headers": [(visible(name), visible(text)) for name, text in (item.get("headers") or {}).items()],
        "payload": whole(payload),
    }


VIEWS: Final = (
    View("/ui/schedules", "Schedules", "schedules.html", _gather, "Queues", still="schedules_head.html"),
    View("/ui/schedules/{name}", "Schedule {name}", "schedule.html", _one, "Queues"),
)

# ---- commands -----------------------------------------------------------------------------------------------------------

_NAME: Final = Field("name", "Schedule", "known", required=True)
_QUEUE: Final = Field("queue_name", "Queue", "known", words=lambda _: [])
"""Decides which scope it takes. The call and the command line name the schedule alone."""
_POLICIES: Final = (("last", "fire the latest one"), ("skip", "fire none"), ("all", "fire each"))
_ONE: Final = "/ui/schedules/{name}"


def _when(is_new: bool) -> tuple[Field, ...]:
    blank = "Blank = {}." if is_new else "Blank = unchanged."
    first = () if is_new else (("", "unchanged"),)
    return (
        Field(
            "cron",
            "Cron expression",
            flag="--cron",
            hint="Minute, hour, day of month, month, day of week, or such as @hourly.",
            required=is_new,
        ),
        Field("timezone", "Time zone", flag="--timezone", hint=f"Such as Europe/Berlin. {blank.format('UTC')}"),
        Field("jitter", "Jitter", flag="--jitter", hint=f"Each firing is delayed by a part of this, such as 5m. {blank.format('none')}"),
        Field("catch_up", "Missed times", "select", "--catch-up", choices=(*first, *_POLICIES)),
    )


def _named(form: Facts) -> Facts:
    return {name: value for name, value in form.items() if name != "queue_name"}


def _created(form: Facts) -> Facts:
    item = {name: form.pop(name) for name in ("utf8", *ITEM_TEXTS, "priority", "headers") if name in form}
    return {**form, "item": {"utf8": "", **item}}


COMMANDS: Final = (
    Command(
        "schedules.create",
        "Create a schedule",
        "Create a schedule",
        "Each of its times produces one item.",
        "schedules.create",
        "produce",
        "schedule create",
        (
            Field("name", "Name", required=True, hint="1 to 128 characters of A-Z a-z 0-9 _ . -, not starting with . or -"),
            Field("queue_name", "Queue", flag="--queue", required=True, hint="It cannot be changed later."),
            *_when(is_new=True),
            Field("utf8", "Payload", "area", "--payload"),
            Field("kind", "Kind", flag="--kind"),
            Field("encoding", "Encoding", flag="--encoding"),
            Field("reference", "Reference", flag="--reference"),
            Field("key", "Key", flag="--item-key", hint="What the item belongs to, such as a customer."),
            PRIORITY,
            Field("unique_key", "Unique key", flag="--unique-key", hint="A time is passed over while an item with the same one is there."),
            HEADERS,
            Field("paused", "Paused: fire nothing until it is resumed", "flag", "--paused"),
        ),
        then=_ONE,
        shape=_created,
    ),
    Command(
        "schedules.update",
        "Change a schedule",
        "Change",
        "A new cron expression or time zone counts from now on.",
        "schedules.update",
        "produce",
        "schedule update",
        (_NAME, _QUEUE, *_when(is_new=False)),
        then=_ONE,
        shape=_named,
    ),
    Command(
        "schedules.pause",
        "Pause a schedule",
        "Pause",
        "Times of the pause are not fired, later either.",
        "schedules.pause",
        "produce",
        "schedule pause",
        (_NAME, _QUEUE),
        shape=_named,
    ),
    Command(
        "schedules.resume",
        "Resume a schedule",
        "Resume",
        "Its times are fired again, from now on.",
        "schedules.resume",
        "produce",
        "schedule resume",
        (_NAME, _QUEUE),
        shape=_named,
    ),
    Command(
        "schedules.run",
        "Run a schedule now",
        "Run now",
        "Produces the item now, in addition to the schedule's times. A repetition produces another one.",
        "schedules.run",
        "produce",
        "schedule run",
        (_NAME, _QUEUE),
        shape=_named,
        tells=True,
    ),
    Command(
        "schedules.delete",
        "Delete a schedule",
        "Delete",
        "Permanently deletes the schedule. The items that it has produced stay.",
        "schedules.delete",
        "produce",
        "schedule delete",
        (_NAME, _QUEUE),
        destroys=True,
        typed="name",
        then="/ui/schedules",
        shape=_named,
    ),
)
