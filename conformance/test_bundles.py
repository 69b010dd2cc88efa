"""C55–C58: bundles of items, with a follow-up."""

from __future__ import annotations

from typing import Any

from conformance.api import POLL, Api, Queue, ids, until
from conformance.tested_server import Server


def test_C55_a_follow_up_comes_once_when_all_items_of_a_closed_bundle_have_ended(api: Api) -> None:
    """Not before; and it says how many were completed, have died, and were dropped. (API)"""
    queue, then = api.queue(requested_partitions=2), api.queue()
    bundle = created(queue, then)
    for payload in "abcd":
        queue.produce(payload, bundle=bundle)
    queue.produce("of no bundle")
    leased = ids(queue.lease(3, max_partitions=2))
    queue.complete(leased[:1])
    shown = api.ask("bundles.close", id=bundle)
    assert (shown["state"], shown["stored"]) == ("closed", 4)
    assert then.total("produced") == 0
    queue.retry(leased[1], dead=True)
    queue.ask("queue.release", ids=leased[2:])
    queue.ask("queue.clear")
    follow_up = then.one()
    counts = [int(follow_up["headers"][f"bundle_{name}"]) for name in ("stored", "completed", "dead", "dropped")]
    assert follow_up["headers"]["bundle"] == bundle
    assert (counts[0], sum(counts[1:])) == (4, 4)
    until(lambda: api.ask("bundles.get", id=bundle)["state"] == "done", "the end of the bundle")
    assert api.ask("bundles.get", id=bundle)["follow_up"]["id"] == follow_up["id"]
    assert then.total("produced") == 1


def test_C56_retries_and_repeated_produces_count_once_and_what_is_redriven_not_at_all(api: Api) -> None:
    """A retry, a release and a lost lease are no end; a repeat under an idempotency key is the same item. (API)"""
    dead, then = api.queue(), api.queue()
    queue = api.queue(dead_queue=dead.name, max_attempts=3)
    bundle = created(queue, then)
    for _ in range(2):
        queue.produce("a", "b", bundle=bundle, idempotency_key="once")
    api.ask("bundles.close", id=bundle)
    leased = queue.lease(2)
    queue.retry(ids(leased)[0])
    queue.ask("queue.release", ids=ids(leased)[1:])
    leased = queue.lease(1)
    queue.expire(leased["leases"][0]["lease_id"])
    shown = api.ask("bundles.get", id=bundle)
    assert (shown["stored"], shown["left"]) == (2, 2)
    while queue.total("ready"):
        for item in ids(queue.lease(2)):
            queue.retry(item, dead=True)
    assert then.one()["headers"]["bundle_dead"] == "2"
    until(lambda: dead.total("ready") == 2, "the items' arrival in the dead queue")
    dead.ask("queue.redrive")
    again = queue.lease(2, request_timeout=POLL)
    queue.complete(ids(again))
    shown = api.ask("bundles.get", id=bundle)
    assert (shown["completed"], shown["dead"]) == (0, 2)


def test_C57_a_bundle_that_is_closed_takes_no_items(api: Api) -> None:
    """Nor does one of another queue, one that does not exist, or one that was cancelled, which has no follow-up. (API)"""
    queue, then = api.queue(), api.queue()
    bundle, other = created(queue, then, items=1), created(then, then)
    queue.produce("a", bundle=bundle)
    until(lambda: api.ask("bundles.get", id=bundle)["state"] == "closed", "the close of the bundle")
    queue.refused("queue.produce", 409, "bundle_closed", items=[{"utf8": "b"}], bundle=bundle)
    queue.refused("queue.produce", 404, "bundle_not_found", items=[{"utf8": "b"}], bundle=other)
    queue.refused("queue.produce", 404, "bundle_not_found", items=[{"utf8": "b"}], bundle="nope")
    assert api.ask("bundles.cancel", id=bundle)["state"] == "cancelled"
    queue.complete(ids(queue.lease(1)))
    assert queue.total("produced") == 1
    assert api.ask("bundles.get", id=bundle)["state"] == "cancelled"
    assert then.total("produced") == 0


def test_C58_a_bundle_survives_the_death_of_the_server(api: Api, restartable: Server) -> None:
    """Its counts, and that it is closed; its follow-up comes once. (API)"""
    queue, then = api.queue(requested_partitions=2), api.queue()
    bundle = created(queue, then)
    for payload in "abc":
        queue.produce(payload, bundle=bundle)
    queue.complete(ids(queue.lease(1)))
    api.ask("bundles.close", id=bundle)
    restartable.restart()
    shown = api.ask("bundles.get", id=bundle)
    assert (shown["state"], shown["stored"], shown["completed"]) == ("closed", 3, 1)
    queue.complete(ids(queue.lease(3, max_partitions=2)))
    assert then.one()["headers"]["bundle_completed"] == "3"
    restartable.restart()
    until(lambda: api.ask("bundles.get", id=bundle)["state"] == "done", "the end of the bundle")
    assert then.total("produced") == 1


def created(queue: Queue, then: Queue, **fields: Any) -> str:
    """A bundle of the queue, whose follow-up goes into the other one."""
    follow_up = {"queue_name": then.name, "item": {"utf8": "next"}}
    return str(queue.ask("bundles.create", follow_up=follow_up, **fields)["id"])
