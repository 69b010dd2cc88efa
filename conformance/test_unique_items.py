"""C50–C54: unique items."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from conformance.api import POLL, Api, Queue, at, ids, now, texts, until
from conformance.test_item_keys import PROTOBUF, as_arrow_of, field, text
from conformance.test_key_order import ids_of
from conformance.tested_server import Server


def test_C50_an_item_whose_unique_key_is_taken_is_not_stored(api: Api) -> None:
    """The answer has the id of the item that is there. Of one call, the first is stored, and all that have no unique key. (API)"""
    queue = api.queue(unique="until_settled", requested_partitions=4)
    names = [f"u{number}" for number in range(20)]
    first = unique(queue, *names, "u3", None, None, "u0")
    assert (first["count"], first["duplicates"]) == (24, [20, 23])
    stored = ids_of(first)
    assert [stored[20], stored[23]] == [stored[3], stored[0]]
    assert queue.total("produced") == 22
    assert sum(1 for each in queue.ready() if each) > 1, "they are in several partitions"
    again = unique(queue, "new", "u7", "u7")
    assert again["duplicates"] == [1, 2]
    assert ids_of(again)[1:] == [stored[7]] * 2
    (found,) = queue.ask("queue.search", unique_key="new")["items"]
    assert (found["id"], found["unique_key"]) == (again["first_id"], "new")
    assert queue.ask("queue.explain", id=found["id"])["unique_key"] == "new"
    assert not unique(queue, "u7", key="other")["duplicates"], "they are compared with their keys"
    assert (queue.total("produced"), queue.total("duplicates")) == (24, 4)


@pytest.mark.parametrize("unique_for", ["until_settled", "while_waiting"])
def test_C51_a_unique_key_is_free_when_its_item_is_settled_or_no_longer_waits(api: Api, unique_for: str) -> None:
    """Completed, dead, deleted, cleared, moved and expired items hold no key; retried, released and scheduled ones do. (API)"""
    other, dead = api.queue(), api.queue()
    queue = api.queue(unique=unique_for, dead_queue=dead.name)

    def is_free() -> bool:
        """Whether an item with the unique key is stored; it then is the one that is there."""
        return not unique(queue, "k")["duplicates"]

    assert is_free()
    assert not is_free()
    leased = queue.one()
    if unique_for == "while_waiting":
        assert is_free()
        queue.ask("queue.clear")
    assert unique(queue, "k")["duplicates"] == ([0] if unique_for == "until_settled" else [])
    queue.ask("queue.clear")
    queue.retry(leased["id"], retry_after="1h")
    assert not is_free()
    queue.ask("storage/items.run_now", ids=[scheduled_id(queue)])
    assert not is_free()
    queue.ask("queue.release", ids=[queue.one()["id"]])
    assert not is_free()
    queue.complete([queue.one()["id"]])
    assert is_free()
    queue.retry(queue.one()["id"], dead=True, reason="bad")
    assert is_free()
    queue.ask("storage/items.delete", ids=ids(queue.ask("queue.peek")))
    assert is_free()
    queue.ask("storage/items.move", ids=ids(queue.ask("queue.peek")), target=other.name)
    assert is_free()
    queue.ask("queue.clear")
    assert not unique(queue, "k", enqueue_at=at(now() + 3_600_000))["duplicates"]
    assert not is_free()
    queue.ask("queue.clear", scheduled=True)
    queue.ask("queues.update", expire_timeout="1ms")
    assert is_free()
    until(lambda: queue.total("ready") == 0, "the item's end")
    queue.ask("queues.update", expire_timeout="0s")
    assert is_free()
    until(lambda: dead.total("ready") == 2, "the arrival of the dead items")
    dead.ask("queue.redrive")
    until(lambda: queue.total("ready") == 3, "the return of the dead items, which are stored in any case")
    while leased := queue.lease(1)["items"]:
        queue.complete([leased[0]["id"]])
    assert is_free()


def test_C52_a_repeated_call_has_the_first_answer_with_its_duplicates(api: Api) -> None:
    """Whatever has become of the items, and of its duplicates, since; and it stores nothing. (API)"""
    queue = api.queue(unique="until_settled", requested_partitions=3)
    before = unique(queue, *"abc")
    first = unique(queue, *"cdefga", idempotency_key="call-1")
    assert first["duplicates"] == [0, 5]
    told, there = ids_of(first), ids_of(before)
    assert [told[0], told[5]] == [there[2], there[0]]
    while leased := queue.lease(100, max_partitions=3)["items"]:
        queue.complete([item["id"] for item in leased])
    again = unique(queue, *"cdefga", idempotency_key="call-1")
    assert again == {**first, "deduplicated": True}
    assert queue.total("total") == 0
    fields = [{"utf8": "x", "unique_key": name} for name in "ab"]
    queue.refused("queue.produce", 409, "key_conflict", items=fields, idempotency_key="call-1")
    assert not unique(queue, *"ca")["duplicates"]


def test_C53_unique_keys_are_taken_in_every_form_and_refused_by_name(api: Api) -> None:
    """JSON, Arrow and protobuf see one another's; empty and long ones are refused, and so are all by a queue without the setting. (API)"""
    queue, plain = api.queue(unique="until_settled"), api.queue()
    for number, produce in enumerate((as_json, as_arrow, as_protobuf)):
        response = produce(queue, ["same", f"own {number}", "é" * 128])
        assert response.status_code == 200, response.text
        assert produce(plain, [None, None]).status_code == 200
        for bad in ["é" * 128 + "x"] if produce is as_protobuf else ["", "é" * 128 + "x"]:
            refused = produce(queue, ["good", bad])
            assert refused.status_code == 400, bad
            assert b"items[1].unique_key" in refused.content, bad
        refused = produce(plain, [None, "k"])
        assert refused.status_code == 400
        assert b"items[1].unique_key" in refused.content
    assert [item["unique_key"] for item in queue.lease(10)["items"]] == ["same", "own 0", "é" * 128, "own 1", "own 2"]
    assert plain.total("produced") == 6
    assert queue.refused("queue.rebalance", 400, "invalid_request", requested_partitions=3)["field"] == "queue_name"
    problem = api.refused("queues.create", 400, "invalid_request", queue_name=f"{queue.name}.x", dead_queue=queue.name)
    assert problem["field"] == "dead_queue"
    assert api.refused("queues.create", 400, "invalid_request", queue_name="never", unique="always")["field"] == "unique"


def test_C54_what_is_taken_survives_the_death_of_the_server(api: Api, restartable: Server) -> None:
    """Keys of items that wait, are leased, scheduled or put back; and the answer of a call that is repeated. (API)"""
    queue = api.queue(unique="until_settled", requested_partitions=2)
    unique(queue, "later", enqueue_at=at(now() + 3_600_000))
    unique(queue, "retried")
    queue.retry(queue.one(max_partitions=2)["id"], retry_after="1h")
    unique(queue, "leased", "done")
    leased = {item["unique_key"]: item["id"] for _ in range(2) for item in queue.lease(2, max_partitions=2)["items"]}
    first = unique(queue, "waits", "leased", idempotency_key="call-1")
    queue.complete([leased["done"]])
    restartable.restart()
    assert unique(queue, "waits", "leased", idempotency_key="call-1") == {**first, "deduplicated": True}
    answer = unique(queue, "later", "retried", "leased", "done", "waits")
    assert answer["duplicates"] == [0, 1, 2, 4]
    assert ids_of(answer)[4] == first["first_id"]
    assert sorted(texts(queue.lease(9, max_partitions=2, request_timeout=POLL))) == ["done", "waits"]


def unique(queue: Queue, *names: str | None, key: str | None = None, enqueue_at: str | None = None, **fields: object) -> Any:
    """Produce items with these unique keys in one call."""
    items = [{"utf8": name or "-", "unique_key": name, "key": key, "enqueue_at": enqueue_at} for name in names]
    return queue.ask("queue.produce", items=items, **fields)


def scheduled_id(queue: Queue) -> str:
    (item,) = queue.ask("queue.browse", partition=0, states=["scheduled"])["items"]
    return str(item["id"])


def as_json(queue: Queue, names: list[str | None]) -> httpx.Response:
    return queue.api.post("queue.produce", queue_name=queue.name, items=[{"utf8": "x", "unique_key": name} for name in names])


def as_arrow(queue: Queue, names: list[str | None]) -> httpx.Response:
    return as_arrow_of(queue, "unique_key", names)


def as_protobuf(queue: Queue, names: list[str | None]) -> httpx.Response:
    items = b"".join(field(3, text(6, "x") + (b"" if name is None else text(101, name))) for name in names)
    message = text(1, queue.name) + items
    return queue.api.http.post("/v1/queue.produce", content=message, headers={"content-type": PROTOBUF})
