"""C59: limits of a whole queue."""

from __future__ import annotations

import time

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
