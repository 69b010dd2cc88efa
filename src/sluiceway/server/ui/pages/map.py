"""The partition map: a queue's items by partition and backend, and their moves during a rebalance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import queue_names
from sluiceway.server.ui.pages.rebalances import audited, stage
from sluiceway.server.ui.pages.refusal import is_refused
from sluiceway.server.ui.view import Command, Field, View, problem_of, whole
from sluiceway.server.ui.visit import Visit

TABLED: Final = 200
"""Maximum partitions of the table below the map; larger queues link to their own table."""
_DRAINS: Final = (("natural", "natural: consumers take the backlog"), ("copy", "copy: the backlog is moved"))
_COUNTS: Final = ("ready", "total_leased", "scheduled", "transferring", "moved", "moved_in", "commit_time_ms", "degraded")
"""Fields of a partition in the script's data, after its number, backend, state, owner and parents."""


async def _chosen(visit: Visit) -> Facts:
    """The map of the selected queue, else of one that is being rebalanced, else of the fullest."""
    choice = await queue_names(visit)
    if not visit.query.get("queue") and choice:
        await visit.counts.known()
        moving = (await visit.api.call("rebalances.list", open=True, limit=1))["items"]
        fullest = max(choice, key=lambda name: _items(visit.counts.of.get(name, {})))
        # Kept in the query: a live page must not switch to another queue.
        visit.query = {**visit.query, "queue": moving[0]["queue_name"] if moving else fullest}
    name = visit.query.get("queue")
    found: Facts = {"choice": choice, "chooses": True, "queue_name": name}
    return {**found, **(await _map(visit, name))} if name else found


def _items(counts: Mapping[str, int]) -> int:
    return sum(counts.get(each, 0) for each in ("ready", "total_leased", "scheduled"))


async def _own(visit: Visit) -> Facts:
    """The map of the queue in the path."""
    name = visit.parts["queue"]
    return {"choice": (), "chooses": False, "queue_name": name, **(await _map(visit, name))}


async def _map(visit: Visit, name: str) -> Facts:
    info, stats, backends, past, planned = await asyncio.gather(
        visit.api.call("queues.info", queue_name=name),
        visit.api.call("queue.stats", queue_name=name),
        _backends(visit),
        visit.api.call("rebalances.list", queue_name=name, limit=1),
        _planned(visit, name),
    )
    last = past["items"][0] if past["items"] else None
    parts = _parts(info, stats)
    plan, problem = planned
    # An open rebalance is drawn on the map itself.
    is_moving = last is not None and last["ended_at"] is None
    return {
        "queue": info,
        "parts": parts,
        "backends": backends,
        "plan": None if is_moving else plan,
        "plan_problem": None if is_moving else problem,
        "last": last,
        "stage": stage(last, parts) if last else None,
        "is_moving": is_moving,
        "entries": await audited(visit, last) if last else [],
        "tabled": TABLED,
        "data": _island(name, parts, backends, last if is_moving else None, None if is_moving else plan),
    }


async def _backends(visit: Visit) -> list[Facts] | None:
    """The backends; None if the reader may not see them."""
    try:
        return list((await visit.api.call("backends.list"))["items"])
    except ProblemError as error:
        if not is_refused(error):
            raise
        return None


async def _planned(visit: Visit, name: str) -> tuple[Facts | None, ProblemError | None]:
    """The requested plan, or the problem that prevents one."""
    if "partitions" not in visit.query:
        return None, None
    asked = visit.query["partitions"].strip()
    try:
        return await visit.api.call("rebalances.plan", queue_name=name, requested_partitions=_count(asked) if asked else None), None
    except SluicewayError as error:
        return None, problem_of(error)
    except ProblemError as error:
        if error.is_stranger:
            raise
        return None, error


def _parts(info: Facts, stats: Facts) -> list[Facts]:
    """The partitions by number: their records merged with their live counts."""
    counted = {part["partition"]: part for share in stats["logical_queues"] for part in share["partitions"]}
    return [{**dict.fromkeys(_COUNTS), **each, **counted.get(each["partition"], {})} for each in info["partitions"]]


def _island(name: str, parts: list[Facts], backends: list[Facts] | None, moving: Facts | None, plan: Facts | None) -> Facts:
    """The script's data. Partitions are lists without field names, because they are sent every second."""
    listed = [
        [each["partition"], each["backend"], each["state"], each["owner"], each["parents"], *(each[count] for count in _COUNTS)]
        for each in parts
    ]
    found: dict[str, Any] = {"queue": name, "parts": listed, "moving": None, "plan": None}
    found["backends"] = [
        {key: each[key] for key in ("backend", "kind", "partition_affinity", "problem")} for each in backends or _named(parts)
    ]
    if moving:
        found["moving"] = {"drain": moving["drain"], "back": moving["state"] == "cancelling", "drains": moving["plan"]["drains"]}
    if plan:
        found["plan"] = {key: plan["plan"][key] for key in ("creates", "drains")}
    return found


def _named(parts: list[Facts]) -> list[Facts]:
    """The backends by name alone, from the queue's partitions."""
    unknown = dict.fromkeys(("kind", "partition_affinity", "problem"))
    return [{"backend": name, **unknown} for name in sorted({each["backend"] for each in parts})]


VIEWS: Final = (
    View("/ui/map", "Partition map", "map.html", _chosen, "Cluster", still="map_still.html", scripts=("map.js",)),
    View("/ui/queues/{queue}/map", "{queue}: map", "map.html", _own, "Queues", still="map_still.html", scripts=("map.js",)),
)


def _count(text: str) -> int:
    return whole(text, "requested_partitions")


_QUEUE: Final = Field("queue_name", "Queue", "known", required=True)

COMMANDS: Final = (
    Command(
        "queue.rebalance",
        "Rebalance a queue",
        "Start rebalance",
        "Creates new partitions and drains old ones, which are removed once they are empty. Clients keep working throughout.",
        "queue.rebalance",
        "manage",
        "rebalance start",
        (
            _QUEUE,
            Field("requested_partitions", "Partitions", "known", "--partitions", "Target number of partitions.", means=_count),
            Field("drain", "Drain mode", "select", "--drain", choices=_DRAINS, value="natural"),
            Field("rate", "Max items per second", "number", "--rate", "Only with copy. Blank = no limit."),
            # The command line shows its own plan and asks for confirmation.
            Field("plan_id", "Plan", "known", hint="Applied exactly as shown, or refused.", words=lambda text: []),
        ),
        done="started",
    ),
    Command(
        "rebalances.cancel",
        "Cancel a rebalance",
        "Cancel rebalance",
        "Rolls back: draining partitions reopen, new ones are drained and removed. Refused once a partition has been removed.",
        "rebalances.cancel",
        "manage",
        "rebalance cancel",
        (Field("id", "Rebalance", "known", required=True),),
        done="cancelling",
    ),
)
