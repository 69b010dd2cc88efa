"""C34–C49: order, fairness and limits by key, and priorities."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from conformance.api import POLL, Api, Queue, at, ids, now, reasons, texts, until
from conformance.tested_server import Server


def test_C34_without_runs_a_lease_has_one_item_of_a_key(api: Api) -> None:
    """Each key's first one, and all that have no key; whoever waits gets the next of a key when that one is settled. (API)"""
    queue = api.queue(order="key")
    keyed(queue, "a1 a2 b1 -1 -2 a3 c1")
    leased = queue.lease(10)
    assert sorted(texts(leased)) == ["-1", "-2", "a1", "b1", "c1"]
    assert not queue.lease(10)["items"]
    waiting = queue.park(10)
    queue.complete([the(leased, "a1")["id"]])
    assert texts(waiting()) == ["a2"]


def test_C35_with_runs_a_lease_has_items_of_a_key_in_order(api: Api) -> None:
    """However they were produced: in one call, in several, in a call with other keys between. (API)"""
    queue = api.queue(order="key")
    keyed(queue, "a1 b1 a2 b2")
    keyed(queue, "a3")
    keyed(queue, "b3 a4")
    leased = queue.lease(10, runs=True)
    assert of_key("a", leased) == ["a1", "a2", "a3", "a4"]
    assert of_key("b", leased) == ["b1", "b2", "b3"]
    keyed(queue, "a5")
    queue.complete([the(leased, each)["id"] for each in ("a1", "a2", "a4")])
    assert not queue.lease(10, runs=True)["items"], "a3 is not settled"
    queue.complete([the(leased, "a3")["id"]])
    assert texts(queue.lease(10, runs=True)) == ["a5"]


def test_C36_a_retried_item_stays_in_front_also_through_its_delay(api: Api) -> None:
    """Those behind it in its lease are released with it: to settle them is ignored, and counts no attempt. (API)"""
    queue = api.queue(order="key")
    keyed(queue, "a1 a2 a3 b1")
    leased = queue.lease(10, runs=True)
    queue.complete([the(leased, "a1")["id"]])
    queue.retry(the(leased, "a2")["id"], retry_after="1s")
    behind = the(leased, "a3")["id"]
    assert reasons(queue.complete([behind])) == {behind: "released"}
    keyed(queue, "a4")
    queue.complete([the(leased, "b1")["id"]])
    assert not queue.lease(10, runs=True)["items"], "all wait for a2"
    again = queue.lease(10, runs=True, request_timeout=POLL)
    assert texts(again) == ["a2", "a3", "a4"]
    assert [item["attempts"] for item in again["items"]] == [2, 1, 1]


def test_C37_what_a_lost_consumer_had_comes_first_and_in_order(api: Api) -> None:
    """Its lease runs out: what it completed is gone, the rest comes before all later items of the key. (API)"""
    queue = api.queue(order="key")
    keyed(queue, "a1 a2 a3 b1 b2")
    leased = queue.lease(5, runs=True)
    keyed(queue, "a4 b3")
    queue.complete([the(leased, "a1")["id"], the(leased, "b1")["id"]])
    queue.expire(leased["leases"][0]["lease_id"])
    served: list[str] = []
    while len(served) < 5:
        # Several leases, as items of expired ones come in smaller ones.
        leased = queue.lease(10, runs=True, request_timeout=POLL)
        served += texts(leased)
        queue.complete(ids(leased))
    assert [text for text in served if text[0] == "a"] == ["a2", "a3", "a4"]
    assert [text for text in served if text[0] == "b"] == ["b2", "b3"]


def test_C38_a_released_item_takes_those_behind_it_along(api: Api) -> None:
    """And what is in front of it goes on. So does a retry that was staged, when the lease is closed. (API)"""
    queue = api.queue(order="key")
    keyed(queue, "a1 a2 a3")
    leased = queue.lease(10, runs=True)
    keyed(queue, "a4")
    queue.ask("queue.release", ids=[the(leased, "a2")["id"]])
    assert not queue.lease(10, runs=True)["items"], "a1 is not settled"
    queue.complete([the(leased, "a1")["id"]])
    again = queue.lease(10, runs=True)
    assert texts(again) == ["a2", "a3", "a4"]
    queue.ask("queue.release", lease_ids=[again["leases"][0]["lease_id"]])
    again = queue.lease(10, runs=True)
    assert texts(again) == ["a2", "a3", "a4"]
    outcomes = {"a2": {"outcome": "done"}, "a3": {"outcome": "retry", "retry_after": "0s"}, "a4": {"outcome": "dead"}}
    queue.ask("queue.settle", items=[{"id": the(again, text)["id"], **outcome} for text, outcome in outcomes.items()])
    queue.ask("queue.complete", lease_ids=[again["leases"][0]["lease_id"]])
    assert texts(queue.lease(10, runs=True)) == ["a3", "a4"], "a4 was staged behind what came back"


def test_C39_an_item_that_dies_lets_the_next_one_go(api: Api) -> None:
    """By its consumer's verdict, within a run too, and by its last attempt. (API)"""
    dead = api.queue()
    queue = api.queue(order="key", dead_queue=dead.name, max_attempts=2)
    keyed(queue, "a1 a2 a3 a4")
    leased = queue.lease(2, runs=True)
    queue.retry(the(leased, "a1")["id"], dead=True)
    assert not queue.lease()["items"], "a2 is not settled"
    assert not queue.complete([the(leased, "a2")["id"]])["ignored"]
    for _ in range(2):
        leased = queue.lease(1, request_timeout=POLL)
        assert texts(leased) == ["a3"]
        queue.retry(ids(leased)[0], retry_after="0s")
    assert texts(queue.lease(1, request_timeout=POLL)) == ["a4"]
    until(lambda: dead.total("ready") == 2, "the arrival of two dead items")


def test_C40_a_scheduled_item_takes_its_place_when_it_is_due(api: Api) -> None:
    """Until then those stored after it are served; then it comes before those that wait. (API)"""
    queue = api.queue(order="key")
    due = now() + 1_000
    queue.ask("queue.produce", items=[{"utf8": "a1", "key": "a", "enqueue_at": at(due)}, {"utf8": "a2", "key": "a"}])
    keyed(queue, "a3 a4")
    leased = queue.lease()
    assert texts(leased) == ["a2"]
    until(lambda: queue.total("scheduled") == 0, "the scheduled item's turn")
    queue.complete(ids(leased))
    assert texts(queue.lease(10, runs=True)) == ["a1", "a3", "a4"]


def test_C41_a_key_with_many_items_does_not_keep_others_waiting(api: Api) -> None:
    """200 items of one key wait, then one of another comes: it is in the first lease of two, or one of the first two. (API)"""
    for sizes in ([2], [1, 1]):
        queue = api.queue(fair="key")
        keyed(queue, " ".join(f"a{number}" for number in range(200)))
        keyed(queue, "b0")
        served = [text for size in sizes for text in texts(queue.lease(size))]
        assert sorted(served) == ["a0", "b0"]
    queue = api.queue(fair="key")
    keyed(queue, " ".join(f"a{number}" for number in range(50)))
    keyed(queue, " ".join(f"b{number}" for number in range(10)))
    keyed(queue, " ".join(f"c{number}" for number in range(10)))
    shares = Counter(text[0] for _ in range(32) for text in texts(queue.lease()))
    assert (shares["b"], shares["c"]) == (10, 10)


def test_C42_no_more_items_of_a_key_are_leased_than_its_limit(api: Api) -> None:
    """Whatever is leased, completed, retried, released and lost, in any order; and everything is served at last. (API)"""
    chance, limit = random.Random(42), 3
    queue = api.queue(key_concurrency=limit, requested_partitions=2)
    keyed(queue, " ".join(f"{chance.choice('abcd')}{number}" for number in range(120)))
    held: dict[str, dict[str, Any]] = {}
    done = 0
    while done < 120:
        leased = queue.lease(chance.randint(1, 8), max_partitions=2)
        held |= {item["id"]: item for item in leased["items"]}
        counts = Counter(item["key"] for item in held.values())
        assert max(counts.values()) <= limit, counts
        for item_id in chance.sample(sorted(held), chance.randint(0 if leased["items"] else 1, len(held))):
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


def test_C43_a_produce_is_divided_by_key_and_answers_in_the_order_of_the_call(api: Api) -> None:
    """All items of a key are in one partition. A repetition with the idempotency key stores nothing and gives the same ids. (API)"""
    queue = api.queue(order="key", requested_partitions=4)
    names = [f"{key}{number}" for number in range(3) for key in "abcdefghij"]
    first = keyed(queue, " ".join(names), idempotency_key="call-1")
    assert first["count"] == len(names)
    assert not first["deduplicated"]
    assert ids_of(first)[0] == first["first_id"]
    items = {item["id"]: item for _ in range(3) for item in drain(queue)}
    assert [items[item_id]["bytes"] for item_id in ids_of(first)] == [item["bytes"] for item in in_order(names, items)]
    homes = {key: {item_id.split(".")[1] for item_id, item in items.items() if item["key"] == key} for key in "abcdefghij"}
    assert all(len(partitions) == 1 for partitions in homes.values())
    assert len(set.union(*homes.values())) > 1
    again = keyed(queue, " ".join(names), idempotency_key="call-1")
    assert again["deduplicated"]
    assert ids_of(again) == ids_of(first)
    assert queue.total("produced") == len(names)
    queue.refused("queue.produce", 409, "key_conflict", items=[{"utf8": "x", "key": key} for key in "ab"], idempotency_key="call-1")
    assert queue.total("produced") == len(names)


def test_C44_what_would_part_the_items_of_a_key_is_refused(api: Api) -> None:
    """A dead queue with order, order for a dead queue, a rebalance that copies, an import into another partition than the key's. (API)"""
    for setting in ({"order": "key"}, {"key_concurrency": 1}):
        ordered = api.queue(**setting, requested_partitions=2)
        field = next(iter(setting))
        problem = api.refused("queues.create", 400, "invalid_request", queue_name=f"{ordered.name}.x", dead_queue=ordered.name)
        assert problem["field"] == "dead_queue"
        dead = api.queue()
        api.queue(dead_queue=dead.name)
        assert dead.refused("queues.update", 400, "invalid_request", **setting)["field"] == field
        assert ordered.refused("queue.rebalance", 400, "invalid_request", requested_partitions=3, drain="copy")["field"] == "drain"
        stored = keyed(ordered, "a1")
        home = int(stored["partition"])
        item = {"payload": "eA==", "key": "a"}
        refused = ordered.refused("storage/items.import", 400, "invalid_request", partition=1 - home, items=[item])
        assert refused["field"] == "partition"
        assert ordered.ask("storage/items.import", partition=home, items=[item])["partition"] == home
        assert ordered.ready()[1 - home] == 0
    problem = api.refused("queues.create", 400, "invalid_request", queue_name="never", order="keys")
    assert problem["field"] == "order"


def test_C45_what_is_done_with_an_item_that_holds_up_its_key_lets_the_key_go_on(api: Api) -> None:
    """An item whose retry waits is run now, deleted, moved, cleared or expires; or the setting is turned off. (API)"""
    other = api.queue()
    for way in ("run_now", "delete", "move", "clear", "expire", "off"):
        queue = api.queue(order="key", expire_timeout="1s" if way == "expire" else "0s")
        keyed(queue, "a1 a2 a3")
        leased = queue.lease(3, runs=True)
        if way == "expire":
            queue.ask("queues.update", expire_timeout="0s")
        queue.retry(the(leased, "a1")["id"], retry_after="1h")
        keyed(queue, "a4")
        assert not queue.lease(3, runs=True)["items"], way
        (held,) = queue.ask("queue.browse", partition=0, states=["scheduled"])["items"]
        if way == "run_now":
            queue.ask("storage/items.run_now", ids=[held["id"]])
        elif way == "delete":
            queue.ask("storage/items.delete", ids=[held["id"]])
        elif way == "move":
            queue.ask("storage/items.move", ids=[held["id"]], target=other.name)
        elif way == "clear":
            queue.ask("queue.clear", ready=False, scheduled=True)
        elif way == "off":
            queue.ask("queues.update", order=None)
        served = queue.lease(10, runs=True, request_timeout=POLL)
        expected = ["a4"] if way == "expire" else ["a2", "a3", "a4"]
        assert texts(served) == (["a1", *expected] if way == "run_now" else expected), way


def test_C46_order_survives_the_death_of_the_server(api: Api, restartable: Server) -> None:
    """What is leased, what waits for its retry, and what was put back are as before. (API)"""
    queue = api.queue(order="key", fair="key", key_concurrency=2)
    keyed(queue, "a1 a2 a3 b1 b2 c1 c2 c3")
    leased = queue.lease(10, runs=True)
    assert sorted(texts(leased)) == ["a1", "a2", "b1", "b2", "c1", "c2"], "no more than the limit"
    queue.retry(the(leased, "b1")["id"], retry_after="1h")
    queue.ask("queue.release", ids=[the(leased, "c1")["id"]])
    restartable.restart()
    assert texts(queue.lease(10, runs=True)) == ["c1", "c2"]
    assert not queue.complete([the(leased, "a1")["id"]])["ignored"]
    assert not queue.lease(10, runs=True)["items"], "a2 is leased, b1 waits"
    assert not queue.complete([the(leased, "a2")["id"]])["ignored"]
    assert texts(queue.lease(10, runs=True)) == ["a3"]
    (held,) = queue.ask("queue.browse", partition=0, states=["scheduled"])["items"]
    queue.ask("storage/items.run_now", ids=[held["id"]])
    assert texts(queue.lease(10, runs=True)) == ["b1", "b2"]


def test_C47_an_item_that_would_die_blocks_its_key_if_the_queue_says_so(api: Api) -> None:
    """Rejected, or at its last attempt, until an operator decides. Other keys go on, and items without a key die. (API)"""
    dead = api.queue()
    queue = api.queue(order="key", key_on_dead="block", dead_queue=dead.name, max_attempts=1)
    for reject in (True, False):
        keyed(queue, "a1 a2 b1 -1")
        leased = queue.lease(10)
        for name in ("a1", "-1"):
            queue.retry(the(leased, name)["id"], **({"dead": True} if reject else {"retry_after": "0s"}))
        queue.complete([the(leased, "b1")["id"]])
        assert not queue.lease(10)["items"]
        (held,) = queue.ask("queue.browse", partition=0, states=["scheduled"])["items"]
        queue.ask("storage/items.run_now", ids=[held["id"]])
        leased = queue.lease(10, runs=True, request_timeout=POLL)
        assert texts(leased) == ["a1", "a2"]
        queue.complete(ids(leased))
    until(lambda: dead.total("ready") == 2, "the arrival of those without a key")


def test_C48_items_of_the_highest_priority_are_leased_first(api: Api) -> None:
    """Of equal ones the oldest, and one without a priority counts as of 4. What comes back is the first of its priority. (API)"""
    queue = api.queue(priority="strict")
    ranked(queue, "a0x b9x -4x a-x b9y")
    produced = ranked(queue, "a4y b8x a9z")
    assert texts(queue.lease(4)) == ["b9x", "b9y", "a9z", "b8x"]
    assert queue.ask("queue.explain", id=ids_of(produced)[0])["ahead"] == 2
    leased = queue.lease(2)
    assert texts(leased) == ["-4x", "a-x"]
    assert [item["priority"] for item in leased["items"]] == [4, None]
    ranked(queue, "b9w")
    queue.retry(the(leased, "a-x")["id"], retry_after="0s")
    queue.complete([the(leased, "-4x")["id"]])
    assert [texts(queue.lease()) for _ in range(4)] == [["b9w"], ["a-x"], ["a4y"], ["a0x"]]
    items = [{"utf8": "x", "priority": 4}, {"utf8": "y", "priority": 10}]
    assert queue.refused("queue.produce", 400, "invalid_request", items=items)["field"] == "items[1].priority"
    for others in ({"order": "key"}, {"key_concurrency": 1}, {"key_rate": {"per_second": 1, "burst": 1}}):
        name = f"{queue.name}-refused"
        assert api.refused("queues.create", 400, "invalid_request", queue_name=name, priority="strict", **others)["field"] == "priority"
        assert queue.refused("queues.update", 400, "invalid_request", **others)["field"] == next(iter(others))


def test_C49_in_a_fair_queue_priorities_hold_within_each_key(api: Api) -> None:
    """Keys are served in turn, each its highest first. (API)"""
    queue = api.queue(fair="key", priority="strict", key_concurrency=2)
    ranked(queue, "a9u a9v a0x b0x b9y b-z")
    first = queue.lease(2)
    assert sorted(texts(first)) == ["a9u", "b9y"]
    second = queue.lease(4)
    assert sorted(texts(second)) == ["a9v", "b-z"], "no more than the limit of each key"
    queue.complete(ids(first))
    assert sorted(texts(queue.lease(4))) == ["a0x", "b0x"]


def ranked(queue: Queue, payloads: str) -> Any:
    """As `keyed`; the second letter is the priority, `-`: none."""
    items = [
        {"utf8": each, "key": None if each[0] == "-" else each[0], "priority": None if each[1] == "-" else int(each[1])}
        for each in payloads.split()
    ]
    return queue.ask("queue.produce", items=items)


def keyed(queue: Queue, payloads: str, **fields: object) -> Any:
    """Produce these payloads in one call. The first letter of each is its key; `-`: it has none."""
    items = [{"utf8": payload, "key": None if payload[0] == "-" else payload[0]} for payload in payloads.split()]
    return queue.ask("queue.produce", items=items, **fields)


def ids_of(produced: Any) -> list[str]:
    """The ids that the answer of a produce names, in the order of the call."""
    incarnation, partition, first = produced["first_id"].split(".")
    offsets = produced["offsets"] or range(int(first), int(first) + produced["count"])
    partitions = produced["partitions"] or [partition] * produced["count"]
    return [f"{incarnation}.{each}.{offset}" for each, offset in zip(partitions, offsets, strict=True)]


def the(leased: Any, payload: str) -> Any:
    """The item of an answer that has this payload."""
    return leased["items"][texts(leased).index(payload)]


def of_key(key: str, leased: Any) -> list[str]:
    return [text for text in texts(leased) if text[0] == key]


def drain(queue: Queue) -> list[Any]:
    """The items of a lease, which are completed."""
    leased = queue.lease(100, runs=True, max_partitions=4)
    if leased["items"]:
        queue.complete(ids(leased))
    found: list[Any] = leased["items"]
    return found


def in_order(names: list[str], items: dict[str, Any]) -> list[Any]:
    """The items by their payloads."""
    by_text = {text: item for item, text in zip(items.values(), texts({"items": [*items.values()]}), strict=True)}
    return [by_text[name] for name in names]
