"""The partition map: where a queue's items lie, and how they move when it is rebalanced."""

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
"""Partitions: with more the map has no table below it; the queue's own page has one."""
_DRAINS: Final = (("natural", "natural: consumers empty it"), ("copy", "copy: its items are moved"))
_COUNTS: Final = ("ready", "total_leased", "scheduled", "transferring", "moved", "moved_in", "commit_time_ms", "degraded")
"""What of a partition goes to the script, after its number, backend, state, owner and parents."""


async def _chosen(visit: Visit) -> Facts:
    """The map of the queue that the reader has chosen, else of the one that moves, else of the fullest."""
    choice = await queue_names(visit)
    if not visit.query.get("queue") and choice:
        await visit.counts.known()
        moving = (await visit.api.call("rebalances.list", open=True, limit=1))["items"]
        fullest = max(choice, key=lambda name: _items(visit.counts.of.get(name, {})))
        # Once and for all: the map must not change to another queue under the reader's eyes.
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
    # What is under way is on the map itself.
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
    """None: the reader may not see how they are."""
    try:
        return list((await visit.api.call("backends.list"))["items"])
    except ProblemError as error:
        if not is_refused(error):
            raise
        return None


async def _planned(visit: Visit, name: str) -> tuple[Facts | None, ProblemError | None]:
    """What a rebalance as in the form would do, if the reader asks; or why it cannot be said."""
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
    """The partitions by number: as they are recorded, and as they are."""
    counted = {part["partition"]: part for share in stats["logical_queues"] for part in share["partitions"]}
    return [{**dict.fromkeys(_COUNTS), **each, **counted.get(each["partition"], {})} for each in info["partitions"]]


def _island(name: str, parts: list[Facts], backends: list[Facts] | None, moving: Facts | None, plan: Facts | None) -> Facts:
    """What the script draws, with lists for names, as it is sent each second."""
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
    """The backends as far as the queue tells."""
    unknown = dict.fromkeys(("kind", "partition_affinity", "problem"))
    return [{"backend": name, **unknown} for name in sorted({each["backend"] for each in parts})]


VIEWS: Final = (
    View("/ui/map", "Partition map", "map.html", _chosen, "Partition map", still="map_still.html", scripts=("map.js",)),
    View("/ui/queues/{queue}/map", "{queue}: map", "map.html", _own, "Queues", still="map_still.html", scripts=("map.js",)),
)


def _count(text: str) -> int:
    return whole(text, "requested_partitions")


_QUEUE: Final = Field("queue_name", "Queue", "known", required=True)

COMMANDS: Final = (
    Command(
        "queue.rebalance",
        "Rebalance a queue",
        "Start the rebalance",
        "New partitions are made, those that go take no new items, and are removed once they are empty. Clients go on meanwhile.",
        "queue.rebalance",
        "manage",
        "rebalance start",
        (
            _QUEUE,
            Field("requested_partitions", "Partitions", "known", "--partitions", "How many there are to be.", means=_count),
            Field("drain", "How the backlog leaves those that go", "select", "--drain", choices=_DRAINS, value="natural"),
            Field("rate", "Items a second at most", "number", "--rate", "With copy; empty: as fast as it goes."),
            # The command line shows a plan of its own, and asks.
            Field("plan_id", "Plan", "known", hint="Exactly this is done, or nothing.", words=lambda text: []),
        ),
        done="it has begun",
    ),
    Command(
        "rebalances.cancel",
        "Cancel a rebalance",
        "Cancel the rebalance",
        "It goes back: drained partitions are open again, those that were made are drained and removed. Refused once one was removed.",
        "rebalances.cancel",
        "manage",
        "rebalance cancel",
        (Field("id", "Rebalance", "known", required=True),),
        done="it goes back",
    ),
)
