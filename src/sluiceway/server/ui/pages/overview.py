"""The first page: whether all is well, and where to look if not."""

from __future__ import annotations

import asyncio
from typing import Final

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import every_queue, state_of
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

_SHOWN: Final = 10
"""Queues: those with most to do. The page of all queues has the rest."""
_FAILED: Final = ("retried", "expired", "dead")


async def _gather(visit: Visit) -> Facts:
    queues, backends, instances, rebalances = await asyncio.gather(
        every_queue(visit), _items(visit, "backends.list"), _items(visit, "instances.list"), _open_rebalances(visit)
    )
    if queues:
        await visit.counts.known()
    rows = [_row(visit, queue) for queue in queues]
    rates = [visit.counts.rates(queue["queue_name"]) for queue in queues]
    return {
        "totals": {name: sum(row[name] or 0 for row in rows) for name in ("ready", "leased", "scheduled")},
        "rates": {
            "produced": sum(each.get("produced", 0) for each in rates),
            "completed": sum(each.get("completed", 0) for each in rates),
            "failed": sum(each.get(name, 0) for each in rates for name in _FAILED),
        },
        "queues": sorted(rows, key=lambda row: (-(row["ready"] or 0) - (row["leased"] or 0), row["name"]))[:_SHOWN],
        "queue_count": len(queues),
        "backends": backends,
        "instances": instances,
        "rebalances": rebalances,
        "problems": _problems(queues, backends, instances),
    }


def _row(visit: Visit, queue: Facts) -> Facts:
    name = queue["queue_name"]
    counts, rates = visit.counts.of.get(name, {}), visit.counts.rates(name)
    return {
        "name": name,
        "state": state_of(queue),
        "ready": counts.get("ready"),
        "leased": counts.get("total_leased"),
        "scheduled": counts.get("scheduled"),
        "produced": rates.get("produced"),
        "completed": rates.get("completed"),
    }


async def _items(visit: Visit, call: str, **fields: object) -> list[Facts]:
    """What a call lists; nothing, if the reader may not see it."""
    try:
        return list((await visit.api.call(call, **fields))["items"])
    except ProblemError as error:
        if error.code != "forbidden":
            raise
        return []


async def _open_rebalances(visit: Visit) -> list[Facts]:
    return await _items(visit, "rebalances.list", open=True)


def _problems(queues: list[Facts], backends: list[Facts], instances: list[Facts]) -> list[Facts]:
    found = [
        {"what": each["backend"], "url": "/ui/map", "state": "unavailable", "why": each["problem"]} for each in backends if each["problem"]
    ]
    found += [
        {"what": each["instance"], "url": "/ui/instances", "state": each["state"], "why": f"silent for {each['silent_for']}"}
        for each in instances
        if each["state"] not in ("alive", "joining")
    ]
    for queue in queues:
        bad = [part for part in queue["partitions"] if part["state"] == "unavailable"]
        url = f"/ui/queues/{queue['queue_name']}/partitions"
        if bad:
            why = f"{len(bad)} of {len(queue['partitions'])} partitions are not available"
            found.append({"what": queue["queue_name"], "url": url, "state": "unavailable", "why": why})
    return found


VIEWS: Final = (View("/ui", "Overview", "overview.html", _gather, "Overview"),)
