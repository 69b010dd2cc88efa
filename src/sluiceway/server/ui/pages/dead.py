"""Dead letters: dead queues, and the redrive of their items."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from typing import Final

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queue_commands import QUEUE
from sluiceway.server.ui.pages.queues import every_queue
from sluiceway.server.ui.view import Command, Field, View, problem_of
from sluiceway.server.ui.visit import Visit

SLICE: Final = 1_000
"""Maximum items per call: small enough to show progress and to stop between calls."""
_EXAMPLES: Final = 5
_LOOKED_AT: Final = 20
"""Items per partition that are searched for examples; each comes with its payload."""
_PARTITIONS: Final = 3


async def _gather(visit: Visit) -> Facts:
    queues = await every_queue(visit)
    if queues:
        await visit.counts.known()
    sources = _sources(queues)
    dropping = [
        {"name": each["queue_name"], "dead": visit.counts.of[each["queue_name"]]["dead"]}
        for each in queues
        if each["dead_queue"] is None and each["queue_name"] not in sources and visit.counts.of.get(each["queue_name"], {}).get("dead", 0)
    ]
    rows = [{**_row(visit, name), "sources": [_row(visit, each) for each in sources[name]]} for name in sorted(sources)]
    return {"rows": rows, "dropping": dropping}


def _sources(queues: list[Facts]) -> dict[str, list[str]]:
    """Source queues by dead queue."""
    found: dict[str, list[str]] = {}
    for each in queues:
        if each["dead_queue"] is not None:
            found.setdefault(each["dead_queue"], []).append(each["queue_name"])
    return found


def _row(visit: Visit, name: str) -> Facts:
    counts, rates = visit.counts.of.get(name, {}), visit.counts.rates(name)
    return {
        "name": name,
        **{each: counts.get(each) for each in ("ready", "total_leased", "scheduled", "redriven", "dead", "transferring")},
        **{f"{each}_rate": rates.get(each) for each in ("produced", "completed", "dead")},
    }


async def _gather_redrive(visit: Visit) -> Facts:
    name = visit.parts["queue_name"]
    info, queues = await asyncio.gather(visit.api.call("queues.info", queue_name=name), every_queue(visit))
    await visit.counts.known()
    sources = _sources(queues).get(name, [])
    shown: Facts = {"row": _row(visit, name), "sources": [_row(visit, each) for each in sources]}
    if visit.live:
        return shown
    found: Facts | None = None
    examples: list[Facts] = []
    problem: ProblemError | None = None
    wanted: Facts = {}
    if "check" in visit.query and visit.may("manage", name):
        try:
            wanted = _wanted(visit.query)
            found, examples = await asyncio.gather(_dry_run(visit, name, wanted), _examples(visit, info, wanted))
        except ProblemError as error:
            if error.is_stranger or error.code not in ("invalid_request", "queue_not_found", "forbidden"):
                raise
            problem = error
    shown |= {"name": name, "source_names": sources, "found": found, "examples": examples, "problem": problem}
    if found is not None:
        # A dry run counts up to a limit. Below it, the redrive moves exactly the items that were counted.
        whole = found["matched"] < MAX_ITEMS_ARROW
        most = found["matched"] if whole else wanted.get("limit") or max(shown["row"]["ready"] or 0, found["matched"])
        shown |= {
            "wanted": wanted,
            "most": most,
            "whole": whole,
            "line": _line(name, wanted),
            "slice": min(SLICE, wanted.get("rate", SLICE)),
        }
    return shown


def _wanted(query: Mapping[str, str]) -> Facts:
    """The values of the form. Raises ProblemError."""
    try:
        wanted = _FILTER.values(query)
        for name in ("limit", "rate"):
            if wanted.get(name, 1) < 1:
                raise invalid(name, "expected a number of at least 1, or blank")
    except SluicewayError as error:
        raise problem_of(error) from None
    return wanted


async def _dry_run(visit: Visit, name: str, wanted: Facts) -> Facts:
    about = {key: wanted.get(key) for key in ("source", "reason", "target")}
    limit = min(wanted.get("limit", MAX_ITEMS_ARROW), MAX_ITEMS_ARROW)
    return await visit.api.call("queue.redrive", queue_name=name, dry_run=True, limit=limit, **about)


async def _examples(visit: Visit, info: Facts, wanted: Facts) -> list[Facts]:
    """A few of the first matching items, with their reasons."""
    found: list[Facts] = []
    for part in info["partitions"][:_PARTITIONS]:
        try:
            page = await visit.api.call("storage/items.list", queue_name=info["queue_name"], partition=part["partition"], limit=_LOOKED_AT)
        except ProblemError as error:
            if error.is_stranger:
                raise
            # Fewer examples, no error: the key may not read, or the partition is not open.
            continue
        for item in page["items"]:
            headers = item["headers"] or {}
            source, reason = headers.get("sluiceway-queue"), headers.get("sluiceway-reason", "")
            fits = wanted.get("source") in (None, source) and wanted.get("reason", "") in reason
            if fits and not item["is_leased"]:
                attempts = headers.get("sluiceway-attempts")
                found.append({"id": item["id"], "source": source, "reason": reason, "attempts": attempts, "at": item["created_at"]})
            if len(found) == _EXAMPLES:
                return found
    return found


def _line(name: str, wanted: Facts) -> str:
    words = ["sluiceway", "redrive", name]
    for key, flag in (("source", "--source"), ("reason", "--reason"), ("target", "--to")):
        if key in wanted:
            words += [flag, wanted[key]]
    words += ["--limit", str(wanted["limit"])] if "limit" in wanted else ["--all"]
    if "rate" in wanted:
        words += ["--rate", f"{wanted['rate']}/s"]
    return shlex.join(words)


VIEWS: Final = (
    View("/ui/dead", "Dead letters", "dead.html", _gather, "Dead letters"),
    View(
        "/ui/queues/{queue_name}/redrive",
        "Redrive {queue_name}",
        "redrive_counts.html",
        _gather_redrive,
        "Dead letters",
        still="redrive.html",
        scripts=("redrive.js",),
    ),
)

_ABOUT: Final = (
    Field("source", "Source queue", flag="--source"),
    Field("reason", "Reason contains", flag="--reason"),
    Field("target", "Target queue", flag="--to", hint="Blank = source queue of each item."),
    Field("limit", "Limit", "number", "--limit", hint=f"Items in this call. Blank = {SLICE:,}."),
)

COMMANDS: Final = (
    Command(
        "queue.redrive",
        "Redrive",
        "Redrive",
        "Moves dead items back to their source queues and resets their attempts.",
        "queue.redrive",
        "manage",
        "redrive",
        (QUEUE, *_ABOUT),
        tells=True,
    ),
)

_FILTER: Final = Command("", "", "", "", "", "manage", "", (*_ABOUT, Field("rate", "Items per second", "number")))
