"""C07–C17: who is served what, when, and in which order."""

from __future__ import annotations

from typing import Any

from conformance.api import POLL, Api, Queue, ids, millis, now, texts, until


def test_C07_waiting_consumers_are_dealt_fair_shares(api: Api) -> None:
    """Requests for 20, 6 and 1 wait; 23 items come in one produce: 16, 6 and 1. (tests: DistributeNotEnoughItems)"""
    queue = api.queue()
    polls = [queue.park(wanted, client_id=f"c{wanted}") for wanted in (20, 6, 1)]
    queue.fill(23)
    answers = [poll() for poll in polls]
    assert [len(answer["items"]) for answer in answers] == [16, 6, 1]
    assert len({item_id for answer in answers for item_id in ids(answer)}) == 23


def test_C08_what_comes_is_shared_by_all_who_wait(api: Api) -> None:
    """Five wait for ten each, ten items come: two each, and none is anybody else's. (tests: WaitingConsumers, OnePartitionManyConsumers)"""
    queue = api.queue(requested_partitions=5)
    polls = [queue.park(10, client_id=f"c{number}") for number in range(5)]
    queue.fill(10)
    answers = [poll() for poll in polls]
    assert [len(answer["items"]) for answer in answers] == [2] * 5
    assert len({item_id for answer in answers for item_id in ids(answer)}) == 10
    assert queue.lease(10)["items"] == []


def test_C09_an_answer_comes_from_one_partition_unless_more_are_allowed(api: Api) -> None:
    """The biggest backlog serves, alone; with max_partitions the answer has a lease of each partition. (B, tests: OpportunisticLease)"""
    queue = api.queue(requested_partitions=3)
    for count in (5, 9, 7):
        queue.fill(count)
    one = queue.lease(100, client_id="one")
    assert (one["partition"], len(one["items"]), len(one["leases"])) == (1, 9, 1)
    several = queue.lease(100, client_id="several", max_partitions=3)
    assert {lease["partition"]: lease["count"] for lease in several["leases"]} == {0: 5, 2: 7}
    held = {lease["lease_id"]: lease["partition"] for lease in several["leases"]}
    assert all(held[item["lease_id"]] == item["partition"] for item in several["items"])


def test_C10_no_partition_waits_longer_than_one_rotation(api: Api) -> None:
    """100 partitions and one consumer that takes one item at a time: each partition is served once in every hundred leases. (C)"""
    queue = api.queue(requested_partitions=100)
    for _ in range(100):
        queue.fill(2)
    queue.fill(40)
    assert min(queue.ready()) == 2
    for _ in range(2):
        served = [queue.lease()["partition"] for _ in range(100)]
        assert sorted(served) == list(range(100))


def test_C11_a_waiting_consumer_gets_what_is_produced(api: Api) -> None:
    """A long poll is answered by the produce that brings an item; without one, at its request_timeout, with none. (ADR 3)"""
    queue = api.queue(requested_partitions=3)
    assert queue.lease(request_timeout="50ms")["items"] == []
    poll = queue.park()
    queue.produce("here")
    assert texts(poll()) == ["here"]


def test_C12_a_waiting_consumer_gets_what_becomes_due(api: Api) -> None:
    """A long poll is answered when a scheduled item is due, and not before. (ADR 24)"""
    queue = api.queue(requested_partitions=3)
    due = now() + 700
    produced = queue.schedule(due, "later")
    item = queue.one()
    assert now() >= due
    assert (item["origin"], item["attempts"]) == (produced["first_id"], 1)


def again(item: Any, poll: Any, attempts: int) -> None:
    """The poll is answered with the same item under another id."""
    (served,) = poll()["items"]
    assert (served["origin"], served["bytes"], served["attempts"]) == (item["origin"], item["bytes"], attempts)
    assert served["id"] != item["id"]


def held(api: Api) -> tuple[Queue, Any]:
    """A queue whose only item is leased."""
    queue = api.queue(requested_partitions=3)
    queue.produce("again")
    return queue, queue.one(client_id="first")


def test_C13_a_waiting_consumer_gets_what_is_retried(api: Api) -> None:
    """A long poll is answered by another consumer's retry; that was an attempt. (ADR 22)"""
    queue, item = held(api)
    poll = queue.park()
    assert queue.retry(item["id"]) == {"retried": 1, "dead": 0, "ignored": []}
    again(item, poll, attempts=2)


def test_C14_a_waiting_consumer_gets_what_is_released(api: Api) -> None:
    """A long poll is answered by another consumer's release; that was no attempt. (API)"""
    queue, item = held(api)
    poll = queue.park()
    assert queue.ask("queue.release", ids=[item["id"]]) == {"released": 1, "ignored": []}
    again(item, poll, attempts=1)


def test_C15_a_waiting_consumer_gets_what_comes_back_from_an_expired_lease(api: Api) -> None:
    """A long poll is answered when another consumer's lease runs out, and not before. (ADR 22)"""
    queue, item = held(api)
    poll = queue.park()
    (lease,) = queue.ask("queue.extend", lease_ids=[item["lease_id"]], lease_timeout="300ms")["leases"]
    again(item, poll, attempts=2)
    assert now() >= millis(lease["lease_deadline"])


def test_C16_a_waiting_consumer_gets_what_is_redriven(api: Api) -> None:
    """A long poll is answered by a redrive: the same item, with no attempts and without the headers that death gave it. (API)"""
    dead = api.queue()
    queue = api.queue(dead_queue=dead.name, requested_partitions=3)
    queue.ask("queue.produce", items=[{"utf8": "again", "kind": "k", "headers": {"mine": "1"}}])
    item = queue.one()
    queue.retry(item["id"], dead=True, reason="broken")
    until(lambda: dead.total("ready") == 1, "the item's arrival in the dead queue")
    poll = queue.park()
    look = dead.ask("queue.redrive", dry_run=True)
    assert (look["matched"], look["redriven"]) == (1, 0)
    assert dead.ask("queue.redrive", reason="something else")["matched"] == 0
    assert dead.ask("queue.redrive", reason="brok", source=queue.name, request_timeout=POLL)["matched"] == 1
    (served,) = poll()["items"]
    assert (served["origin"], served["bytes"], served["attempts"]) == (item["origin"], item["bytes"], 1)
    assert (served["kind"], served["headers"]) == ("k", {"mine": "1"})
    until(lambda: dead.total("redriven") == 1 and dead.balances() and queue.balances(), "the end of the redrive")


def test_C17_first_in_first_out_and_what_is_put_back_goes_to_the_tail(api: Api) -> None:
    """One partition, one consumer: the order of production. What comes back, or due, goes behind what waits. (C, ADR 22, ADR 24)"""
    queue = api.queue()
    for start in range(0, 40, 8):
        queue.produce(*(str(number) for number in range(start, start + 8)))
    assert queue.drained() == [str(number) for number in range(40)]

    queue = api.queue()
    queue.produce("retried", "expired", "released", "waits")
    first, second, third = (queue.one() for _ in range(3))
    queue.retry(first["id"])
    queue.expire(second["lease_id"])
    queue.ask("queue.release", ids=[third["id"]])
    assert queue.drained() == ["waits", "retried", "expired", "released"]

    queue = api.queue()
    due = now() + 2_500
    queue.schedule(due, "due-1", "due-2")
    queue.schedule(due, "due-3")
    queue.produce("waits")
    until(lambda: queue.total("scheduled") == 0, "the due time")
    assert queue.drained() == ["waits", "due-1", "due-2", "due-3"]
