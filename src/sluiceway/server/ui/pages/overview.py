"""The overview: what is wrong, totals, and the queues with trouble or most items."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

from sluiceway.adapters.system import stopwatch
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import every_queue, row_of
from sluiceway.server.ui.pages.refusal import is_refused
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

_SHOWN: Final = 10
"""Queues on the overview: those with problems, then those with the most items."""
_PROBLEMS_EVERY: Final = 2.0
"""Seconds between two reads of a queue's problems: as often as the server looks for them."""
_PATIENCE: Final = 1.0
"""Seconds that a queue's page waits for the queue's problems."""
_SUMMED: Final = ("ready", "leased", "scheduled", "produced", "completed", "failed")


async def _gather(visit: Visit) -> Facts:
    queues, backends, instances, rebalances, judged = await asyncio.gather(
        every_queue(visit),
        _items(visit, "backends.list"),
        _items(visit, "instances.list"),
        _items(visit, "rebalances.list", open=True),
        _problems(visit),
    )
    if queues:
        await visit.counts.known()
    rows = [row_of(visit, queue) for queue in queues]
    totals = {name: _total(row[name] for row in rows) for name in _SUMMED}
    problems = judged["items"] if judged is not None else []
    return {
        "totals": totals,
        "now": {name: _a_minute(count) if name in ("produced", "completed", "failed") else count for name, count in totals.items()},
        "queues": _by_trouble(rows, problems)[:_SHOWN],
        "queue_count": len(queues),
        "backends": backends,
        "instances": instances,
        "rebalances": rebalances or [],
        "judged": judged,
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


async def _problems(visit: Visit) -> Facts | None:
    """What is wrong, as the server judges it; None if the reader may not ask."""
    try:
        return await visit.api.call("problems.list")
    except ProblemError as error:
        if not is_refused(error):
            raise
        return None


async def own_problems(visit: Visit) -> list[Facts]:
    """What is wrong with the page's queue; empty if the reader may not ask. A live page asks every _PROBLEMS_EVERY seconds."""
    at, found = visit.kept.get("problems", (0.0, []))
    if "problems" not in visit.kept or stopwatch() - at >= _PROBLEMS_EVERY:
        (queue_name,) = visit.parts.values()
        # The page itself raises the errors that matter, and does not wait for a silent instance.
        with contextlib.suppress(ProblemError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                found = list((await visit.api.call("problems.list", queue_name=queue_name))["items"])
        visit.kept["problems"] = stopwatch(), found
    return list(found)


def _by_trouble(rows: list[Facts], problems: list[Facts]) -> list[Facts]:
    """Queues with critical problems first, then those with warnings, then those with most items."""
    ranks: dict[str, int] = {}
    for each in problems:
        rank = 0 if each["severity"] == "critical" else 1
        ranks[each["queue_name"]] = min(rank, ranks.get(each["queue_name"], rank))
    worst = {0: "critical", 1: "warning"}
    rows = [{**row, "trouble": worst.get(ranks.get(row["name"], 2), "")} for row in rows]
    return sorted(rows, key=lambda row: (ranks.get(row["name"], 2), -(row["ready"] or 0) - (row["leased"] or 0), row["name"]))


def _a_minute(a_second: float | None) -> float | None:
    return None if a_second is None else round(a_second * 60, 1)


VIEWS: Final = (View("/ui", "Overview", "overview.html", _gather, "Overview", scripts=("charts.js",)),)
