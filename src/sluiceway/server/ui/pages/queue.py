"""The pages of one queue: summary with history, partitions, consumers and audit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from sluiceway.adapters.system import stopwatch
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.queues import FAILED, failed, state_of, table
from sluiceway.server.ui.pages.refusal import is_refused
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit

RANGES: Final = ((60, "1 hour"), (360, "6 hours"), (1_440, "24 hours"))
_TAIL: Final = 15
"""Minutes in each live update and in the table beneath the charts."""
_READ_EVERY: Final = 10.0
"""Seconds between two reads of the history, which changes once a minute, or of the keys, whose texts are read from storage."""
_SUMS: Final = (
    "produced",
    "completed",
    "retried",
    "expired",
    "dead",
    "released",
    "cleared",
    "redriven",
    "moved",
    "moved_in",
    "deduplicated",
    "duplicates",
)

SERIES: Final = (
    ("produced", "produced"),
    ("completed", "completed"),
    ("failed", "retried, expired or dead"),
    ("ready", "ready"),
    ("leased", "leased"),
    ("scheduled", "scheduled"),
)
"""Series of the charts: names shared with charts.js, and labels."""
_BY_KEY: Final = ("order", "fair", "key_concurrency", "key_rate")
"""Settings with any of which a queue goes by the keys of its items."""


async def _summary(visit: Visit) -> Facts:
    name = visit.parts["name"]
    info, history = await asyncio.gather(visit.api.call("queues.info", queue_name=name), _history(visit, name))
    keys = await _keys(visit, name) if any(info[each] for each in _BY_KEY) else None
    await visit.counts.known()
    counts, rates = visit.counts.of.get(name, {}), dict(visit.counts.rates(name))
    now = {
        **{each: rates[each] * 60 if each in rates else None for each in ("produced", "completed")},
        "failed": _a_minute(failed(rates)),
        **{each: counts.get(key) for each, key in (("ready", "ready"), ("leased", "total_leased"), ("scheduled", "scheduled"))},
    }
    return {
        "here": "Summary",
        "queue": info,
        "keys": keys,
        "state": state_of(info, counts),
        "counts": counts,
        "rates": {**rates, "failed": failed(rates)},
        "sums": [(each, counts.get(each)) for each in _SUMS if each in counts],
        "ranges": RANGES,
        "minutes": _minutes(visit),
        "series": SERIES,
        "now": {each: None if value is None else round(value, 1) for each, value in now.items()},
        **history,
    }


def _a_minute(a_second: float | None) -> float | None:
    return None if a_second is None else a_second * 60


def _minutes(visit: Visit) -> int:
    text = visit.query.get("minutes", "")
    return next((minutes for minutes, _ in RANGES if text == str(minutes)), RANGES[0][0])


async def _history(visit: Visit, queue_name: str) -> Facts:
    """The history for the charts and its last minutes. A live page reads only the last minutes, every _READ_EVERY seconds."""
    told: Facts | None
    at, told = visit.kept.get("history", (0.0, None))
    if told is None or stopwatch() - at >= _READ_EVERY:
        minutes = _TAIL if visit.live else _minutes(visit)
        answer = await visit.api.call("queue.history", queue_name=queue_name, minutes=minutes)
        told = _told(answer)
        visit.kept["history"] = stopwatch(), told
    return told


async def _keys(visit: Visit, queue_name: str) -> Facts:
    """The busiest keys of the queue, and those that wait longest. A live page reads them every _READ_EVERY seconds."""
    at, told = visit.kept.get("keys", (0.0, None))
    if told is None or stopwatch() - at >= _READ_EVERY:
        told = await visit.api.call("queue.keys", queue_name=queue_name, limit=10)
        visit.kept["keys"] = stopwatch(), told
    found: Facts = told
    return found


def _told(answer: Facts) -> Facts:
    series: Mapping[str, list[int | None]] = answer["series"]
    columns = {
        "produced": series["produced"],
        "completed": series["completed"],
        "failed": [_sum(each) for each in zip(*(series[name] for name in FAILED), strict=True)],
        "ready": series["ready"],
        "leased": series["total_leased"],
        "scheduled": series["scheduled"],
    }
    first = int(datetime.fromisoformat(answer["from"]).timestamp())
    count = len(columns["ready"])
    return {
        "history": {"from": first, "columns": columns},
        "tail": {"from": first + 60 * max(0, count - _TAIL), "columns": {name: column[-_TAIL:] for name, column in columns.items()}},
        "oldest": next((age for age in reversed(series["oldest_s"][-3:]) if age is not None), None),
        "waits": any(series["ready"][-3:]),
    }


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# ---- partitions ---------------------------------------------------------------------------------------------------------

_PARTITIONS: Final = (
    ("partition", "Partition", True),
    ("state", "State", False),
    ("ready", "Ready", True),
    ("leased", "Leased", True),
    ("scheduled", "Scheduled", True),
    ("backend", "Backend", False),
    ("owner", "Owner", False),
    ("commit", "Commit", True),
    ("failures", "Failures", True),
)


async def _partitions(visit: Visit) -> Facts:
    name = visit.parts["name"]
    info, stats = await asyncio.gather(visit.api.call("queues.info", queue_name=name), visit.api.call("queue.stats", queue_name=name))
    counted = {part["partition"]: part for each in stats["logical_queues"] for part in each["partitions"]}
    rows = [_partition(part, counted.get(part["partition"], {})) for part in info["partitions"]]
    one = await _one(visit, name, rows)
    return {"here": "Partitions", "queue": info, "one": one, **table(visit, rows, _PARTITIONS, "partition")}


def _partition(part: Facts, counts: Facts) -> Facts:
    return {
        "partition": part["partition"],
        "state": counts.get("state") or part["state"],
        "recorded": part["state"],
        "degraded": bool(counts.get("degraded")),
        "backend": part["backend"],
        "owner": part["owner"] or "",
        "ready": counts.get("ready"),
        "leased": counts.get("total_leased"),
        "scheduled": counts.get("scheduled"),
        "commit": counts.get("commit_time_ms"),
        "failures": counts.get("failures"),
        "parents": part["parents"],
        "counts": counts,
    }


async def _one(visit: Visit, queue_name: str, rows: list[Facts]) -> Facts | None:
    """The details of the selected partition; None if none is selected."""
    text = visit.query.get("partition", "")
    found = next((row for row in rows if text == str(row["partition"])), None)
    if found is None:
        return None
    why = await visit.api.call("queue.explain", queue_name=queue_name, partition=found["partition"])
    sums = [(each, found["counts"][each]) for each in (*_SUMS, "transferring", "leases") if each in found["counts"]]
    return {**found, "why": why, "sums": sums}


# ---- consumers ----------------------------------------------------------------------------------------------------------


async def _consumers(visit: Visit) -> Facts:
    answer = await visit.api.call("consumers.list", queue_name=visit.parts["name"])
    found: Facts = answer["items"][0] if answer["items"] else {"consumers": [], "more": False}
    queries: list[Any] = [{"client_id": each["client_id"], **query} for each in found["consumers"] for query in each["queries"]]
    return {"here": "Consumers", "consumers": found["consumers"], "more": found["more"], "queries": queries, "silent": answer["silent"]}


# ---- audit --------------------------------------------------------------------------------------------------------------


async def _audit(visit: Visit) -> Facts:
    """The queue's audit entries; None in their place if the reader may not see them."""
    name = visit.parts["name"]
    await visit.api.call("queues.info", queue_name=name)
    try:
        page = await visit.api.call("audit.list", queue_name=name, limit=50, pivot=visit.query.get("after") or None)
    except ProblemError as error:
        if not is_refused(error):
            raise
        return {"here": "Audit", "entries": None, "next": None}
    return {"here": "Audit", "entries": [_entry(each) for each in page["items"]], "next": page["next"]}


def _entry(entry: Facts) -> Facts:
    changes, others = [], []
    for name, value in (entry["detail"] or {}).items():
        if isinstance(value, dict) and set(value) == {"from", "to"}:
            changes.append((name, value["from"], value["to"]))
        else:
            others.append((name, value))
    return {**entry, "changes": changes, "others": others}


_ONE: Final = "/ui/queues/{name}"
VIEWS: Final = (
    View(_ONE, "{name}", "queue_summary.html", _summary, "Queues", still="queue_summary_head.html", scripts=("charts.js",)),
    View(f"{_ONE}/partitions", "Partitions of {name}", "queue_partitions.html", _partitions, "Queues", still="queue_partitions_head.html"),
    View(f"{_ONE}/consumers", "Consumers of {name}", "queue_consumers.html", _consumers, "Queues", still="queue_head.html"),
    View(f"{_ONE}/audit", "Audit of {name}", "queue_audit.html", _audit, "Queues", still="queue_head.html", refreshes=False),
)
