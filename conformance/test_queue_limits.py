"""C59 and C60: limits of a whole queue."""

from __future__ import annotations

import random
import time
from typing import Any

from conformance.api import POLL, Api


def test_C59_no_more_items_are_leased_than_the_rate_allows(api: Api) -> None:
    """From all partitions together; who waits gets the next as it comes; a change holds at once. (API)"""
    queue = api.queue(rate={"per_second": 5, "burst": 3}, requested_partitions=3)
    for _ in range(6):
        queue.fill(5)
    began = time.monotonic()
    leased = 0
    while leased < 8:
        answer = queue.lease(30, max_partitions=3, request_timeout=POLL)
        leased += len(answer["items"])
        # Tokens that came while the call was on its way are used, too, up to half a second late.
        assert leased <= 3 + 5 * (time.monotonic() - began + 0.5)
    assert time.monotonic() - began >= (8 - 3) / 5 - 0.5
    api.ask("queues.update", queue_name=queue.name, rate={"per_second": 0.001})
    answer = queue.lease(30, max_partitions=3)
    assert not answer["items"] or not queue.lease(30, max_partitions=3)["items"]
    waiting = queue.park(30)
    api.ask("queues.update", queue_name=queue.name, rate=None)
    assert waiting()["items"]
    for wrong in ({"per_second": 0}, {"per_second": 1, "burst": 0}, {"burst": 1}, 5):
        api.refused("queues.update", 400, "invalid_request", queue_name=queue.name, rate=wrong)


def test_C60_no_more_items_are_leased_at_once_than_the_limit(api: Api) -> None:
    """Whatever is leased, completed, retried, released and lost, in any order; and everything is served at last. (API)"""
    chance, limit = random.Random(60), 5
    queue = api.queue(concurrency=limit, requested_partitions=3)
    for _ in range(6):
        queue.fill(10)
    held: dict[str, dict[str, Any]] = {}
    done = 0
    while done < 60:
        leased = queue.lease(chance.randint(1, 8), max_partitions=3, request_timeout="100ms")
        held |= {item["id"]: item for item in leased["items"]}
        assert len(held) <= limit
        for item_id in chance.sample(sorted(held), chance.randint(0 if leased["items"] else 1, len(held)) if held else 0):
            del held[item_id]
            way = chance.choice(["complete", "complete", "retry", "release"])
            if way == "complete":
                queue.complete([item_id])
                done += 1
            elif way == "retry":
                queue.retry(item_id, retry_after="0s")
            else:
                queue.ask("queue.release", ids=[item_id])
        if held and chance.random() < 0.1:
            lease_id = next(iter(held.values()))["lease_id"]
            queue.expire(lease_id)
            held = {item_id: item for item_id, item in held.items() if item["lease_id"] != lease_id}
    assert queue.total("total") == 0


def test_C60_a_limit_is_changed_live(api: Api) -> None:
    """It counts what is leased already, and who waits is served when it is raised. (API)"""
    queue = api.queue(requested_partitions=2)
    for _ in range(2):
        queue.fill(10)
    leased = queue.lease(4, max_partitions=2)["items"]
    api.ask("queues.update", queue_name=queue.name, concurrency=3)
    assert not queue.lease(1, request_timeout="300ms")["items"]
    queue.complete([item["id"] for item in leased[:2]])
    assert len(queue.lease(10, max_partitions=2, request_timeout=POLL)["items"]) == 1
    waiting = queue.park(10)
    api.ask("queues.update", queue_name=queue.name, concurrency=4)
    assert len(waiting()["items"]) == 1
    api.ask("queues.update", queue_name=queue.name, concurrency=0)
    assert len(queue.lease(10, max_partitions=2)["items"]) == 10
    api.refused("queues.update", 400, "invalid_request", queue_name=queue.name, concurrency=-1)
