"""Captures: change streams whose partitions are shared among tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.pages.refusal import refusing
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

MOST: Final = 500
"""Maximum partitions that are shown of a capture."""


@refusing
async def _gather(visit: Visit) -> Facts:
    found = await visit.api.call("tasks.list")
    return {"captures": found["items"], "unseen": found["unseen"]}


@refusing
async def _gather_one(visit: Visit) -> Facts:
    found = await visit.api.call("tasks.get", name=visit.parts["name"])
    known = {each["partition"] for each in found["partitions"]}
    lines = tree(found["partitions"])
    stuck = [
        {"partition": each, "parents": [(parent, parent in known) for parent in parents]}
        for each, parents in sorted(found["stuck"].items())
    ]
    return {"capture": found, "lines": lines[:MOST], "left_out": max(0, len(lines) - MOST), "stuck": stuck}


def tree(partitions: list[Facts]) -> list[tuple[str, Facts]]:
    """Each partition with its tree prefix, listed below its first remaining parent."""
    return list(_lines(partitions))


def _lines(partitions: list[Facts]) -> Iterator[tuple[str, Facts]]:
    known = {each["partition"] for each in partitions}
    below: dict[str | None, list[Facts]] = {}
    for each in partitions:
        first = next((parent for parent in each["parents"] if parent in known), None)
        below.setdefault(first, []).append(each)
    shown: set[str] = set()
    # Depth first without recursion: a lineage may be long.
    left = [("", "", each) for each in reversed(below.get(None, []))]
    while left:
        own, further, each = left.pop()
        shown.add(each["partition"])
        yield own, each
        for place, child in enumerate(reversed(below.get(each["partition"], []))):
            left.append((further + ("└─ " if place == 0 else "├─ "), further + ("   " if place == 0 else "│  "), child))
    # Partitions that name each other as parents have no root.
    yield from (("", each) for each in partitions if each["partition"] not in shown)


VIEWS: Final = (
    View("/ui/captures", "Change capture", "tasks.html", _gather, "Streams"),
    View("/ui/captures/{name}", "Capture {name}", "task.html", _gather_one, "Streams"),
)
