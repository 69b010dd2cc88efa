"""Spark streaming queries that consume queues."""

from __future__ import annotations

from typing import Final

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

_CALLS: Final = 5
"""Pages of `consumers.list` that are read for one page of the dashboard."""


async def _gather(visit: Visit) -> Facts:
    rows: list[Facts] = []
    silent: set[str] = set()
    more = False
    pivot = visit.query.get("pivot") or None
    for _ in range(_CALLS):
        page = await visit.api.call("consumers.list", pivot=pivot)
        silent.update(page["silent"])
        for queue in page["items"]:
            more = more or queue["more"]
            rows += [_row(queue, consumer, query) for consumer in queue["consumers"] for query in consumer["queries"]]
        pivot = page["next"]
        if pivot is None:
            break
    return {"rows": rows, "silent": sorted(silent), "more": more, "next": pivot, "begins_after": visit.query.get("pivot", "")}


def _row(queue: Facts, consumer: Facts, query: Facts) -> Facts:
    return {
        **query,
        "queue_name": queue["queue_name"],
        "lag": queue["ready"],
        "client_id": consumer["client_id"],
        "leased": consumer["items"],
        "leases": consumer["leases"],
    }


VIEWS: Final = (View("/ui/spark", "Spark", "spark.html", _gather, "Streams"),)
