"""Instances, and the rounds in which they assign partitions."""

from __future__ import annotations

import asyncio
from typing import Final

from sluiceway.kernel.errors import SluicewayError
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import queue_names
from sluiceway.server.ui.pages.refusal import refusing
from sluiceway.server.ui.view import View, problem_of, whole
from sluiceway.server.ui.visit import Visit

_ROUNDS: Final = 100


async def _instances(visit: Visit) -> Facts:
    cluster, shares, queues = await asyncio.gather(visit.api.call("instances.list"), _shares(visit), queue_names(visit))
    return {"cluster": cluster, "shares": shares, "queues": queues, "queue_name": visit.query.get("queue", ""), "most": _most(cluster)}


def _most(cluster: Facts) -> int:
    return max((each["partitions"] for each in cluster["items"]), default=0)


async def _shares(visit: Visit) -> list[Facts] | ProblemError | None:
    """The logical queues of the selected queue with their counts; None if no queue is selected."""
    name = visit.query.get("queue")
    if not name:
        return None
    try:
        stats = await visit.api.call("queue.stats", queue_name=name)
    except ProblemError as error:
        if error.is_stranger:
            raise
        return error
    return sorted((_summed(each) for each in stats["logical_queues"]), key=lambda each: each["instance"] or "")


def _summed(share: Facts) -> Facts:
    parts = share["partitions"]
    sums = {name: sum(each.get(name) or 0 for each in parts) for name in ("ready", "total_leased", "scheduled")}
    return {**share, **sums, "numbers": sorted(each["partition"] for each in parts)}


async def _rounds(visit: Visit) -> Facts:
    cluster, rounds, why = await asyncio.gather(visit.api.call("instances.list"), visit.api.call("rounds.list", limit=_ROUNDS), _why(visit))
    return {
        "cluster": cluster,
        "rounds": rounds["items"],
        "chosen": chosen_round(rounds["items"], visit.query.get("round", "")),
        "why": why,
    }


def chosen_round(rounds: list[Facts], number: str) -> Facts | None:
    """The selected round, with the instances that joined and left since the previous one."""
    for place, found in enumerate(rounds):
        if str(found["number"]) == number:
            before = rounds[place + 1] if place + 1 < len(rounds) else None
            now, then = set(found["participants"]), set(before["participants"] if before else ())
            moves = _grouped(found["moves"])
            untold = found["moved"] - len(found["moves"])
            return {**found, "before": before, "came": sorted(now - then), "went": sorted(then - now), "ways": moves, "untold": untold}
    return None


def _grouped(moves: list[Facts]) -> list[Facts]:
    """Moves grouped by old owner, new owner and queue."""
    ways: dict[tuple[str, str, str], list[int]] = {}
    for each in moves:
        ways.setdefault((each["before"] or "", each["owner"], each["queue_name"] or ""), []).append(each["partition"])
    return [{"before": way[0], "owner": way[1], "queue": way[2], "partitions": sorted(those)} for way, those in sorted(ways.items())]


async def _why(visit: Visit) -> Facts | ProblemError | None:
    """The placement of the requested partition; None if none is requested."""
    name, partition = visit.query.get("queue", "").strip(), visit.query.get("partition", "").strip()
    if not name or not partition:
        return None
    try:
        return await visit.api.call("queue.explain", queue_name=name, partition=whole(partition, "partition"))
    except SluicewayError as error:
        return problem_of(error)
    except ProblemError as error:
        if error.is_stranger:
            raise
        return error


VIEWS: Final = (
    View("/ui/instances", "Instances", "instances.html", refusing(_instances), "Cluster", still="instances_still.html"),
    View("/ui/rounds", "Rounds", "rounds.html", refusing(_rounds), "Cluster", still="rounds_still.html"),
)
