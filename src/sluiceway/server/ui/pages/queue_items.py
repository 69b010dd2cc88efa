"""Items of a queue, listed without leasing them, and its dead items."""

from __future__ import annotations

import asyncio
import shlex
from typing import Final

from sluiceway.contract.item_answers import FAILURES_HEADER, failures_before_death
from sluiceway.server.ui.api import Facts, ProblemError
from sluiceway.server.ui.pages.item_commands import COPY_OF, ITEM_TEXTS
from sluiceway.server.ui.pages.queues import every_queue
from sluiceway.server.ui.payload import editable, preview, visible, whole
from sluiceway.server.ui.view import View
from sluiceway.server.ui.visit import Visit, facts_of

_SHOWN: Final = 50
_LOOKED_AT: Final = 1_000
"""Items that are filtered per page for one state, because the API lists ready and leased items together."""
_READ: Final = 32 << 20
"""The same limit in payload bytes."""
_SAMPLE: Final = 50
"""Dead items per partition whose reasons are counted, in up to _SAMPLED partitions."""
_SAMPLED: Final = 4

STATES: Final = (("line", "ready or leased"), ("ready", "ready"), ("leased", "leased"), ("scheduled", "scheduled"))
"""Filters of the list and their labels."""


SEARCHED: Final = (
    ("kind", "Kind"),
    ("reference", "Reference"),
    ("key", "Key"),
    ("unique_key", "Unique key"),
    ("header", "Header"),
    ("contains", "Payload contains"),
    ("reason", "Reason"),
)
"""Fields of the search, and their labels."""
_FLAGS: Final = {"key": "--item-key", "unique_key": "--unique-key"}
"""Options of `sluiceway search` that have another name than the field."""
ANY: Final = "any"


async def _items(visit: Visit) -> Facts:
    name, wanted = visit.parts["name"], visit.query.get("id", "").strip()
    stats = await visit.api.call("queue.stats", queue_name=name)
    partitions = sorted((part for each in stats["logical_queues"] for part in each["partitions"]), key=lambda part: int(part["partition"]))
    numbers = [part["partition"] for part in partitions]
    asked = visit.query.get("partition", "")
    partition = next((number for number in numbers if asked == str(number)), numbers[0] if numbers else 0)
    state = visit.query.get("state", "")
    if state not in dict(STATES):
        # Where all items wait for their time, as after failures, an empty table would say that there are none.
        waits = any(part["partition"] == partition and part["scheduled"] == part["total"] > 0 for part in partitions)
        state = "scheduled" if waits else STATES[0][0]
    sought = facts_of(visit.query, (name for name, _ in SEARCHED))
    is_search = bool(sought) or visit.query.get("in") in _IN
    facts: Facts = {
        "here": "Items",
        "partitions": partitions,
        "partition": partition,
        "states": STATES,
        "state": state,
        "fields": SEARCHED,
        "search": sought,
        "in_states": _IN,
        "line": "",
        "skipped": [],
        "is_search": is_search,
    }
    if wanted:
        return {**facts, "one": await _one(visit, name, wanted), "rows": [], "next": None, "looked": 0, "problem": None}
    try:
        if is_search:
            return {**facts, "one": None, "problem": None, **await _searched(visit, name, sought)}
        rows, after, looked = await _page(visit, name, partition, state)
    except ProblemError as error:
        if error.is_stranger or error.code in ("forbidden", "queue_not_found"):
            raise
        return {**facts, "one": None, "rows": [], "next": None, "looked": 0, "problem": error}
    return {**facts, "one": None, "rows": rows, "next": after, "looked": looked, "problem": None}


_IN: Final = {ANY: "any", "ready": "ready", "leased": "leased", "scheduled": "scheduled"}
"""States of a search and their labels."""


async def _searched(visit: Visit, queue_name: str, wanted: Facts) -> Facts:
    """A page of what a search of all partitions finds."""
    state = visit.query.get("in", ANY)
    states = [state] if state in _IN and state != ANY else None
    header, equals, value = wanted.get("header", "").partition("=")
    fields = {name: text for name, text in wanted.items() if name != "header"}
    fields |= {"headers": {header.strip(): value if equals else None}} if header else {}
    found = await visit.api.call("queue.search", queue_name=queue_name, states=states, limit=_SHOWN, next=visit.query.get("next"), **fields)
    rows = [_row({**item, "payload": item["bytes"], "created_at": item["enqueued_at"], "max_attempts": 0}) for item in found["items"]]
    words = [word for name, _ in SEARCHED if name in wanted for word in (_FLAGS.get(name, f"--{name}"), wanted[name])]
    line = shlex.join(["sluiceway", "search", queue_name, *words, *(("--state", state) if states else ())])
    return {"rows": rows, "next": found["next"], "looked": found["looked_at"], "skipped": found["skipped"], "line": line}


async def _page(visit: Visit, queue_name: str, partition: int, state: str) -> tuple[list[Facts], str | None, int]:
    """A page of rows, the pivot of the next page, and the number of items checked."""
    call = "storage/scheduled.list" if state == "scheduled" else "storage/items.list"
    rows: list[Facts] = []
    looked, read, after = 0, 0, visit.query.get("after") or None
    while True:
        page = await visit.api.call(call, queue_name=queue_name, partition=partition, limit=_SHOWN, pivot=after)
        found, after = page["items"], page["next"]
        looked += len(found)
        read += sum(len(item["payload"]) for item in found)
        for item in found:
            rows += [_row(item, state)] if state in ("line", "scheduled") or (state == "leased") == item["is_leased"] else []
            if len(rows) == _SHOWN:
                return rows, None if after is None and item is found[-1] else item["id"], looked
        if after is None or looked >= _LOOKED_AT or read >= _READ:
            return rows, after, looked


def _row(item: Facts, state: str = "") -> Facts:
    payload = preview(item["payload"])
    return {
        **item,
        "state": item.get("state") or ("scheduled" if state == "scheduled" else "leased" if item["is_leased"] else "ready"),
        "kind": visible(item["kind"] or ""),
        "shown": payload.text,
        "note": payload.note,
        "size": payload.size,
    }


async def _one(visit: Visit, queue_name: str, item_id: str) -> Facts:
    """An item's state, and its contents if the item still has that ID."""
    try:
        said = await visit.api.call("queue.explain", queue_name=queue_name, id=item_id)
    except ProblemError as error:
        if error.is_stranger or error.code in ("forbidden", "queue_not_found"):
            raise
        return {"id": item_id, "problem": error, "said": None, "item": None}
    item = await _found(visit, queue_name, said)
    failures = [_failure(each) for each in said.get("failures", [])]
    now = None if item else await _now(visit, queue_name, said["id"])
    return {"id": said["id"], "problem": None, "said": said, "item": item, "failures": failures, "now": now}


def _failure(failure: Facts) -> Facts:
    """A failed attempt, with texts that can be shown, empty where nothing is known."""
    unknown = dict.fromkeys(("client_id", "host", "handler_time", "reason", "trace"), "")
    return unknown | {name: visible(value) if isinstance(value, str) else value for name, value in failure.items()}


async def _now(visit: Visit, queue_name: str, item_id: str) -> str | None:
    """The present id of the item whose origin that is: the reader may have followed a link a moment too late."""
    try:
        found = await visit.api.call("queue.search", queue_name=queue_name, id=item_id, limit=1, payload=False)
    except ProblemError as error:
        if error.is_stranger:
            raise
        return None
    return next((str(item["id"]) for item in found["items"]), None)


async def _found(visit: Visit, queue_name: str, said: Facts) -> Facts | None:
    """The item itself: the first one after the preceding ID. A page may start after an ID that no item has."""
    if said["state"] not in ("ready", "leased", "scheduled"):
        return None
    incarnation, partition, offset = said["id"].split(".")
    before = f"{incarnation}.{partition}.{int(offset) - 1}" if int(offset) else None
    call = "storage/scheduled.list" if said["state"] == "scheduled" else "storage/items.list"
    page = await visit.api.call(call, queue_name=queue_name, partition=int(partition), limit=1, pivot=before)
    for item in page["items"]:
        if item["id"] == said["id"]:
            is_shown = bool(failures_before_death(item["headers"] or {}))
            own = {name: text for name, text in (item["headers"] or {}).items() if not is_shown or name != FAILURES_HEADER}
            headers = [(visible(name), visible(text)) for name, text in own.items()]
            texts = {name: visible(item[name] or "") for name in ITEM_TEXTS}
            facts = {"headers": headers, "payload": whole(item["payload"]), "again": _again(queue_name, item)}
            return {**item, **texts, **facts}
    return None


def _again(queue_name: str, item: Facts) -> dict[str, str] | None:
    """The form that sends the item again, filled in; None: a form cannot hold it as it is."""
    payload = editable(item["payload"])
    # Headers of its death, of an earlier copy and of a trace are about the old item.
    own = ((name, text) for name, text in (item["headers"] or {}).items() if not name.startswith("sluiceway-"))
    headers = {name: text for name, text in own if name not in (COPY_OF, "traceparent")}
    texts = [item[name] or "" for name in ITEM_TEXTS] + [text for pair in headers.items() for text in pair]
    if payload is None or any(text != text.strip() or not text.isprintable() for text in texts) or any("=" in name for name in headers):
        return None
    lines = [f"{name}={text}" for name, text in {**headers, COPY_OF: item["origin"]}.items()]
    fields = {name: item[name] for name in ITEM_TEXTS if item[name]}
    fields |= {} if item["priority"] is None else {"priority": str(item["priority"])}
    return {"queue_name": queue_name, "utf8": payload, **fields, "headers": "\n".join(lines)}


# ---- dead items ---------------------------------------------------------------------------------------------------------


async def _dead(visit: Visit) -> Facts:
    name = visit.parts["name"]
    info, queues = await asyncio.gather(visit.api.call("queues.info", queue_name=name), every_queue(visit))
    sources = [each["queue_name"] for each in queues if each["dead_queue"] == name]
    dead_queue = info["dead_queue"] or (name if sources else "")
    facts: Facts = {"here": "Dead", "queue": info, "sources": sources, "dead_queue": dead_queue, "waiting": 0, "reasons": []}
    if not dead_queue:
        return facts
    try:
        return {**facts, **await _reasons(visit, dead_queue)}
    except ProblemError as error:
        # The dead queue may be deleted, or hidden from this reader.
        if error.code not in ("forbidden", "queue_not_found", "unavailable"):
            raise
        return {**facts, "problem": error}


async def _reasons(visit: Visit, dead_queue: str) -> Facts:
    """Why the items of the dead queue died, the most frequent reason first."""
    found = await visit.api.call("queue.reasons", queue_name=dead_queue)
    reasons = [{**each, "shown": visible(each["reason"])} for each in found["reasons"]]
    other = found["items"] - sum(each["items"] for each in reasons)
    return {"waiting": found["items"], "reasons": reasons, "other": other, "skipped": found["skipped"]}


_ONE: Final = "/ui/queues/{name}"
VIEWS: Final = (
    View(f"{_ONE}/items", "Items of {name}", "queue_items.html", _items, "Queues", still="queue_items_head.html", refreshes=False),
    View(f"{_ONE}/dead", "Dead items of {name}", "queue_dead.html", _dead, "Queues", still="queue_head.html", refreshes=False),
)
