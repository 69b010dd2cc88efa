"""Rebalances: open ones with their progress, and past ones."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Final

from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.refusal import is_refused
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

STEPS: Final = {
    "create": "New partitions opened",
    "flip": "Producers switched to the new partitions",
    "shut": "Old partitions closed to new items",
    "keys": "Idempotency keys moved",
    "drain": "Drained",
    "finish": "Finished",
}
"""Texts of completed steps, in order."""
_CURRENT: Final = {
    "create": "Opening new partitions",
    "flip": "Switching producers to the new partitions",
    "shut": "Closing old partitions to new items",
    "keys": "Moving idempotency keys",
    "drain": "Draining",
    "finish": "Finishing",
}
"""Texts of the current step."""
_LISTED: Final = 20
_ENTRIES: Final = 200
_UNTIL: Final = timedelta(seconds=5)
"""Allowance for clock differences between the instances that write the entries of a rebalance."""
_SHOWN: Final = 24
"""Partitions whose progress is listed individually: those with the most items left."""


async def _all(visit: Visit) -> Facts:
    going, page = await asyncio.gather(
        visit.api.call("rebalances.list", open=True, limit=100),
        visit.api.call("rebalances.list", limit=_LISTED, pivot=visit.query.get("pivot")),
    )
    ended = [each for each in page["items"] if each["ended_at"]]
    is_first = not visit.query.get("pivot")
    return {"going": going["items"] if is_first else [], "ended": ended, "next": page["next"], "is_first": is_first}


async def _one(visit: Visit) -> Facts:
    found = await visit.api.call("rebalances.get", id=visit.parts["id"])
    parts: list[Facts] = []
    if found["progress"]:
        parts = [{"partition": each["partition"], "total": each["items_left"]} for each in found["progress"]["partitions"]]
    return {"it": found, "stage": stage(found, parts), "entries": await audited(visit, found)}


def stage(rebalance: Facts, parts: list[Facts]) -> Facts:
    """A rebalance's progress: completed, current and pending steps, and the items left to drain.

    `parts` are the queue's partitions with their item counts in `total` and `transferring`, which are absent while the owner is silent.
    """
    is_open = rebalance["ended_at"] is None
    drains = rebalance["plan"]["drains"]
    known = {each["partition"]: each for each in parts}
    left = [{"partition": number, "left": _left(known[number])} for number in drains if number in known]
    items_left = sum(each["left"] or 0 for each in left)
    names = list(STEPS)
    return {
        "is_open": is_open,
        "done": [{**each, "says": _says(each)} for each in rebalance["steps"]],
        "now": rebalance["step"] if is_open else None,
        "to_come": names[names.index(rebalance["step"]) + 1 :] if is_open else [],
        "left": _fullest(left) if is_open else [],
        "not_shown": max(0, len(left) - _SHOWN) if is_open else 0,
        "items": max(rebalance["items"], items_left),
        "items_left": items_left if is_open else 0,
        "removed": sum(each["partition"] is not None for each in rebalance["steps"]),
        "drains": len(drains),
        "current": _CURRENT,
    }


def _fullest(left: list[Facts]) -> list[Facts]:
    """The partitions with the most items left, in number order."""
    return sorted(sorted(left, key=lambda each: -(each["left"] or 0))[:_SHOWN], key=lambda each: each["partition"])


def _left(part: Facts) -> int | None:
    counts = [part.get("total"), part.get("transferring", 0)]
    return None if counts[0] is None else sum(each or 0 for each in counts)


def _says(step: Facts) -> str:
    if step["partition"] is not None:
        return f"Partition {step['partition']} removed"
    return STEPS.get(step["step"], "")


async def audited(visit: Visit, rebalance: Facts) -> list[Facts] | None:
    """The rebalance's audit entries, oldest first; None if the reader may not see them."""
    if not visit.may("admin"):
        return None
    # Entries are written in the commits that change the rebalance: an unchanged one has no new entries.
    state = [rebalance[name] for name in ("id", "state", "updated_at", "step", "problem", "retries")] + [len(rebalance["steps"])]
    if visit.kept.get("audited", (None,))[0] != state:
        visit.kept["audited"] = (state, await _entries(visit, rebalance))
    found: list[Facts] | None = visit.kept["audited"][1]
    return found


async def _entries(visit: Visit, rebalance: Facts) -> list[Facts] | None:
    until = None
    if rebalance["ended_at"]:
        until = (datetime.fromisoformat(rebalance["ended_at"]) + _UNTIL).isoformat()
    since = rebalance["created_at"]
    try:
        found = await visit.api.call("audit.list", queue_name=rebalance["queue_name"], since=since, until=until, limit=_ENTRIES)
    except ProblemError as error:
        if not is_refused(error):
            raise
        return None
    return [each for each in reversed(found["items"]) if each["detail"].get("rebalance") == rebalance["id"]]


VIEWS: Final = (
    View("/ui/rebalances", "Rebalances", "rebalances.html", _all, "Cluster"),
    View("/ui/rebalances/{id}", "Rebalance {id}", "rebalance.html", _one, "Cluster"),
)
