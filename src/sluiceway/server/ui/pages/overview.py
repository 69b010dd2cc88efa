"""The overview: totals, problems, and the busiest queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import every_queue, row_of
from sluiceway.server.ui.pages.refusal import is_refused
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

_SHOWN: Final = 10
"""Queues on the overview: those with the most items."""
_SUMMED: Final = ("ready", "leased", "scheduled", "produced", "completed", "failed")
_STOPPED: Final = {"silent": "no sign of life", "leaving": "shutting down"}
"""Problem texts by instance state. They do not include the duration, which would change every second."""


async def _gather(visit: Visit) -> Facts:
    queues, backends, instances, rebalances = await asyncio.gather(
        every_queue(visit), _items(visit, "backends.list"), _items(visit, "instances.list"), _items(visit, "rebalances.list", open=True)
    )
    if queues:
        await visit.counts.known()
    rows = [row_of(visit, queue) for queue in queues]
    return {
        "totals": {name: _total(row[name] for row in rows) for name in _SUMMED},
        "queues": sorted(rows, key=lambda row: (-(row["ready"] or 0) - (row["leased"] or 0), row["name"]))[:_SHOWN],
        "queue_count": len(queues),
        "backends": backends,
        "instances": instances,
        "rebalances": rebalances or [],
        "problems": _problems(rows, backends or [], instances or []),
    }


def _total(values: Iterable[float | None]) -> float | None:
    """The sum of the known values; None if there are values and none is known."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if known or not values else None


async def _items(visit: Visit, call: str, **fields: object) -> list[Facts] | None:
    """The items of a list call; None if the reader may not see them."""
    try:
        return list((await visit.api.call(call, **fields))["items"])
    except ProblemError as error:
        if not is_refused(error):
            raise
        return None


def _problems(rows: list[Facts], backends: list[Facts], instances: list[Facts]) -> list[Facts]:
    found = [
        {"what": each["backend"], "url": "/ui/map", "state": "unavailable", "why": each["problem"]} for each in backends if each["problem"]
    ]
    found += [
        {"what": each["instance"], "url": "/ui/instances", "state": each["state"], "why": _STOPPED[each["state"]]}
        for each in instances
        if each["state"] in _STOPPED
    ]
    for row in rows:
        if row["not_served"]:
            why = f"{row['not_served']} of {row['partitions']} partitions unavailable"
            found.append({"what": row["name"], "url": f"/ui/queues/{row['name']}/partitions", "state": row["state"], "why": why})
    return found


VIEWS: Final = (View("/ui", "Overview", "overview.html", _gather, "Overview"),)
