"""A backlog that nobody takes is copied from one kind of storage to the other: each item once, with everything that it has behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import httpx
import pyarrow as pa

from sluiceway.client import Client, Retry
from tests.campaigns.kit.report import Report
from tests.campaigns.rebalance.mixed_fleet import LOCAL, SHARED, MixedFleet
from tests.campaigns.rebalance.rebalance_judging import Moves, ask, how_many

QUEUE, PARTITIONS = "backlog", 4
ROWS, PAGE = 10_000, 10_000
SCHEDULED = 20
"""One in so many is not due for an hour."""
TRIED = 10
"""One in so many was tried once, and one in twice so many twice."""
RATE_MARGIN = 0.10


class Item(NamedTuple):
    """What must be as before, wherever the item lies."""

    payload: str
    kind: str | None
    reference: str | None
    headers: tuple[tuple[str, str], ...]
    attempts: int
    created_at: str
    due_at: str | None
    expires_at: str | None


def run_copies(report: Report, fleet: MixedFleet, items: int) -> None:
    """To the shared backend as fast as it goes, back at half of that rate."""
    moves = Moves(report, fleet)
    fleet.settle_on(LOCAL)
    with Client(fleet.url(0)) as client:
        client.create_queue(QUEUE, requested_partitions=PARTITIONS, expire_timeout="1d")
        _fill(client, items)
        _try_some(client, items)
    before = listed(fleet)
    report.say(f"{len(before):,} items, {sum(item.attempts > 0 for item in before.values()):,} of them were tried")
    if len(before) != items:
        report.fail(f"{items:,} items were produced, and {len(before):,} are there")
    fastest = _copy(report, fleet, moves, SHARED, None, before)
    limit = max(1_000, int(fastest / 2))
    slower = _copy(report, fleet, moves, LOCAL, limit, before)
    if not (1 - RATE_MARGIN) * limit <= slower <= (1 + RATE_MARGIN) * limit:
        report.fail(f"{limit:,} items a second were allowed, and it were {slower:,.0f}")
    moves.judge_audit()
    report.figure(f"{items:,} items copied at {fastest:,.0f} a second; at {slower:,.0f} where {limit:,} were allowed")


def _copy(report: Report, fleet: MixedFleet, moves: Moves, there: str, rate: int | None, before: Mapping[str, Item]) -> float:
    """Items a second."""
    fleet.settle_on(there)
    more = {} if rate is None else {"rate": rate}
    begun = time.monotonic()
    found = moves.do(QUEUE, drain="copy", **more)
    seconds = time.monotonic() - begun
    drained = (_moment(found["ended_at"]) - _moment(found["drain_at"])).total_seconds()
    if set(how_many(fleet, QUEUE)) != {there}:
        report.fail(f"{QUEUE} does not lie on {there}: {how_many(fleet, QUEUE)}")
    if found["moved"] != len(before):
        report.fail(f"{len(before):,} items were there, and {found['moved']:,} are said to have moved")
    for line in differences(before, listed(fleet)):
        report.fail(f"copied to {there}: {line}")
    report.say(f"copied to {there} in {seconds:.1f} s, of which {drained:.1f} s draining")
    return len(before) / drained


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def differences(before: Mapping[str, Item], after: Mapping[str, Item]) -> list[str]:
    """What is missing, has come, or is not what it was; a few examples of each."""
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    found = [f"{len(those):,} items {what}, such as {min(those)}" for those, what in ((gone, "are gone"), (new, "have come")) if those]
    changed = [origin for origin in before.keys() & after.keys() if before[origin] != after[origin]]
    if changed:
        found.append(f"{len(changed):,} items have changed:")
    return found + [f"{origin} was {before[origin]}, is {after[origin]}" for origin in sorted(changed)[:3]]


def _fill(client: Client, items: int) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    for first in range(0, items, ROWS):
        numbers = range(first, min(first + ROWS, items))
        columns: dict[str, Any] = {
            "payload": pa.array([f"{number}|{number * 2_654_435_761 % 2**32:08x}".encode() for number in numbers], pa.binary()),
            "kind": [f"kind-{number % 3}" for number in numbers],
            "reference": [f"reference-{number}" for number in numbers],
            "headers": pa.array([[("number", str(number))] for number in numbers], pa.map_(pa.string(), pa.string())),
            "enqueue_at": pa.array([later if number % SCHEDULED == 0 else None for number in numbers], pa.timestamp("ms", "UTC")),
        }
        client.produce_arrow(QUEUE, pa.table(columns))


def _try_some(client: Client, items: int) -> None:
    """Lease some and put them back: a half at once, a half for later."""
    for part in (items // TRIED, items // TRIED // 2):
        left = part
        while left > 0:
            leased = client.lease(QUEUE, batch_size=min(1_000, left), max_partitions=PARTITIONS)
            ids = leased.ids
            assert ids, "nothing is ready"
            client.retry(QUEUE, [Retry(id_, retry_after="2h") if number % 2 else id_ for number, id_ in enumerate(ids)])
            left -= len(ids)


def listed(fleet: MixedFleet, queue: str = QUEUE) -> dict[str, Item]:
    """Every item where it lies, by its origin. Raises AssertionError if there are two of one origin."""
    found: dict[str, Item] = {}
    with httpx.Client(timeout=60) as http:
        for each in ask(fleet, "queues.info", queue_name=queue)["partitions"]:
            for name in ("items.list", "scheduled.list"):
                pivot = None
                while True:
                    fields = {"queue_name": queue, "partition": each["partition"], "limit": PAGE} | ({"pivot": pivot} if pivot else {})
                    answer = http.post(f"{fleet.url(0)}/v1/storage/{name}", json=fields)
                    assert answer.status_code == 200, answer.text
                    page = answer.json()
                    for item in page["items"]:
                        assert item["origin"] not in found, f"{item['origin']} is there twice"
                        found[item["origin"]] = _item(item)
                    if (pivot := page["next"]) is None:
                        break
    return found


def _item(item: Mapping[str, Any]) -> Item:
    return Item(
        item["payload"],
        item["kind"],
        item["reference"],
        tuple(sorted((item["headers"] or {}).items())),
        item["attempts"],
        item["created_at"],
        item["enqueue_at"],
        item["expire_deadline"],
    )
