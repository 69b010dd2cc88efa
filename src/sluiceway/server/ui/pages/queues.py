"""The list of queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.pages.queue_commands import COMMANDS as COMMANDS
from sluiceway.server.ui.pages.queue_commands import QUEUE as QUEUE
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

_PAGE: Final = 1_000
SHOWN: Final = 200
"""Rows per page of a table."""
FAILED: Final = ("retried", "expired", "dead")

COLUMNS: Final = (
    ("name", "Queue", False),
    ("state", "State", False),
    ("ready", "Ready", True),
    ("leased", "Leased", True),
    ("scheduled", "Scheduled", True),
    ("produced", "Produced", True),
    ("completed", "Completed", True),
    ("failed", "Failed", True),
    ("partitions", "Partitions", True),
    ("dead_queue", "Dead queue", False),
)
"""Key, heading, and whether the column is numeric."""


async def every_queue(visit: Visit) -> list[Facts]:
    """The records of all queues that the reader may see, in name order."""
    found: list[Facts] = []
    pivot: str | None = None
    while True:
        page = await visit.api.call("queues.list", limit=_PAGE, pivot=pivot)
        found += page["items"]
        pivot = page["next"]
        if pivot is None:
            return found


async def queue_names(visit: Visit) -> list[str]:
    """The names of all queues that the reader may see. A live page reads them once, or until there is one."""
    if not visit.kept.get("queue_names"):
        visit.kept["queue_names"] = [each["queue_name"] for each in await every_queue(visit)]
    return list(visit.kept["queue_names"])


def state_of(queue: Facts, counts: Mapping[str, int]) -> str:
    """The most severe state of a queue. Availability comes from the counts, the rest from the record."""
    if counts.get("not_served"):
        return "unavailable" if counts["not_served"] >= len(queue["partitions"]) else "partly unavailable"
    if queue["paused"]:
        return "paused"
    if counts.get("circuits_open"):
        return "circuit open"
    return "draining" if queue["rebalance"] else "available"


def failed(rates: Facts) -> float | None:
    """Items per second that were retried, expired or dead."""
    return sum(rates.get(name, 0) for name in FAILED) if rates else None


async def _gather(visit: Visit) -> Facts:
    queues = await every_queue(visit)
    if queues:
        await visit.counts.known()
    wanted = visit.query.get("name", "").strip().lower()
    rows = [row_of(visit, queue) for queue in queues if wanted in queue["queue_name"].lower()]
    return {"queue_count": len(queues), "wanted": wanted, **table(visit, rows, COLUMNS, "name")}


def row_of(visit: Visit, queue: Facts) -> Facts:
    """The queue as a row of a table; unknown values are None."""
    name = queue["queue_name"]
    counts, rates = visit.counts.of.get(name, {}), visit.counts.rates(name)
    return {
        "name": name,
        "state": state_of(queue, counts),
        "partitions": len(queue["partitions"]),
        "not_served": counts.get("not_served", 0),
        "ready": counts.get("ready"),
        "leased": counts.get("total_leased"),
        "scheduled": counts.get("scheduled"),
        "produced": rates.get("produced"),
        "completed": rates.get("completed"),
        "failed": failed(dict(rates)),
        "dead_queue": queue["dead_queue"] or "",
    }


def table(visit: Visit, rows: list[Facts], columns: Sequence[tuple[str, str, bool]], first: str) -> Facts:
    """A page of the rows, as `sort` and `page` of the query say, with what its heading and the links to other pages need.

    `sort` is a column's key, after a dash for the highest first; `first` is the column by which rows are sorted to begin with.
    """
    sort = visit.query.get("sort", first)
    key, falls = sort.removeprefix("-"), sort.startswith("-")
    if key not in {name for name, _, _ in columns}:
        key, falls = first, False
    # What is not known comes last, whichever way.
    known = [row for row in rows if row[key] is not None]
    known.sort(key=_by(key), reverse=falls)
    rows = known + [row for row in rows if row[key] is None]
    page = visit.query.get("page", "1")
    number = int(page) if page.isascii() and page.isdecimal() and len(page) < 6 else 1
    pages = max(1, -(-len(rows) // SHOWN))
    number = min(max(number, 1), pages)
    headings = [
        {
            "text": text,
            "numeric": numeric,
            "url": _url(visit, sort=f"-{name}" if (name != key and numeric) or (name == key and not falls) else name, page=""),
            "sorted": ("descending" if falls else "ascending") if name == key else "",
        }
        for name, text, numeric in columns
    ]
    return {
        "rows": rows[(number - 1) * SHOWN : number * SHOWN],
        "row_count": len(rows),
        "headings": headings,
        "from_row": (number - 1) * SHOWN + 1,
        "before": _url(visit, page=str(number - 1)) if number > 1 else "",
        "after": _url(visit, page=str(number + 1)) if number < pages else "",
    }


def _by(key: str) -> Callable[[Facts], Any]:
    return lambda row: row[key]


def _url(visit: Visit, **changed: str) -> str:
    query = {name: text for name, text in {**visit.query, **changed}.items() if text}
    return f"{visit.path}?{urlencode(query)}" if query else visit.path


VIEWS: Final = (View("/ui/queues", "Queues", "queues.html", _gather, "Queues", still="queues_head.html"),)
