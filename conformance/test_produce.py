"""C01–C06: where produced items go, and that they go there once."""

from __future__ import annotations

from conformance.api import Api, ids, now, texts, until
from conformance.tested_server import Server


def test_C01_a_produce_goes_whole_into_one_partition(api: Api) -> None:
    """A request's items are in one partition, in order and with dense ids; with a bad item among them nothing is added. (A)"""
    queue = api.queue(requested_partitions=4)
    answer = queue.fill(30)
    assert answer["count"] == 30
    assert sorted(queue.ready()) == [0, 0, 0, 30]
    items = queue.lease(100)["items"]
    incarnation, partition, first = answer["first_id"].split(".")
    assert answer["partition"] == int(partition)
    assert [item["origin"] for item in items] == [f"{incarnation}.{partition}.{int(first) + number}" for number in range(30)]
    assert texts({"items": items}) == [str(number) for number in range(30)]
    for bad in ({"bytes": "not base64!"}, {"utf8": "x", "no_such_field": 1}, {"utf8": "x", "kind": "k" * 2_049}):
        assert queue.api.post("queue.produce", queue_name=queue.name, items=[{"utf8": "good"}, bad]).status_code == 400
    assert queue.total("produced") == 30


def test_C02_the_partition_with_the_fewest_waiting_items_takes_a_produce(api: Api) -> None:
    """50, 30 and 100 over four empty partitions, then 20, 100 and 100: exactly as in document A's two worked examples."""
    queue = api.queue(requested_partitions=4)
    assert [queue.fill(count)["partition"] for count in (50, 30, 100)] == [0, 1, 2]
    assert queue.ready() == [50, 30, 100, 0]
    assert [queue.fill(count)["partition"] for count in (20, 100, 100)] == [3, 3, 1]
    assert queue.ready() == [50, 130, 100, 120]
    assert queue.fill(1)["partition"] == 0


def test_C03_scheduled_items_are_counted_apart(api: Api) -> None:
    """What is not due yet does not make a partition look full; it decides between partitions that are equally full. (A, ADR 24)"""
    queue = api.queue(requested_partitions=2)
    assert queue.schedule(now() + 3_600_000, *"abcdefgh")["partition"] == 0
    assert [partition["scheduled"] for partition in queue.partitions()] == [8, 0]
    assert queue.ready() == [0, 0]
    assert queue.fill(5)["partition"] == 1
    assert queue.fill(3)["partition"] == 0
    assert queue.ready() == [3, 5]


def test_C04_a_produce_waits_until_a_partition_can_be_written(api: Api, storage: Server) -> None:
    """While no partition can be written the request waits, until its request_timeout; when one can it is done, once. (A)"""
    queue = api.queue(requested_partitions=2)
    queue.produce("before")
    storage.stop_storage()
    waiting = api.later("queue.produce", queue_name=queue.name, items=[{"utf8": "during"}, {"utf8": "too"}], request_timeout="50s")
    until(lambda: storage_is_missed(api), "the server's notice that its storage is away")
    assert not waiting.done()
    storage.continue_storage()
    assert waiting.result().status_code == 200, waiting.result().text
    until(lambda: queue.total("ready") == 3, "the partitions' return")
    assert sorted(texts(queue.lease(100, max_partitions=2))) == ["before", "during", "too"]


def storage_is_missed(api: Api) -> bool:
    return api.http.get("/readyz").status_code == 503


def test_C05_bad_requests_do_no_harm_to_good_ones(api: Api) -> None:
    """Requests that must fail, in the same turns as many that must not, fail alone. (A, ADR 20)"""
    queue = api.queue()
    queue.produce("first", idempotency_key="taken")
    queue.produce("first", idempotency_group="group", idempotency_key="a", idempotency_sequence=7)
    leased = ids(queue.lease(2))
    stranger = "zzzzzzzz.0.1"
    good, bad = [], []
    for number in range(30):
        good.append(api.later("queue.produce", queue_name=queue.name, items=[{"utf8": f"{number}"}]))
        bad.append(api.later("queue.produce", queue_name=queue.name, items=[{"utf8": "other"}], idempotency_key="taken"))
        stale = {"idempotency_group": "group", "idempotency_key": "b", "idempotency_sequence": 6}
        bad.append(api.later("queue.produce", queue_name=queue.name, items=[{"utf8": "other"}], **stale))
        good.append(api.later("queue.complete", queue_name=queue.name, ids=[stranger, *leased]))
    assert {answer.result().status_code for answer in good} == {200}
    assert {answer.result().json()["code"] for answer in bad} == {"key_conflict", "stale_sequence"}
    assert sum(answer.result().json().get("completed", 0) for answer in good) == 2
    assert sorted(texts(queue.lease(100)), key=int) == [str(number) for number in range(30)]


def test_C06_a_repeated_idempotency_key_adds_nothing(api: Api, server: Server) -> None:
    """A repetition yields the first call's ids and adds nothing; another body under the key is a 409. Also after a restart. (API)"""
    queue = api.queue(requested_partitions=4)
    first = queue.produce("a", "b", idempotency_key="key")
    assert first["deduplicated"] is False
    queue.lease(1)
    again = queue.produce("a", "b", idempotency_key="key")
    assert again == {**first, "deduplicated": True}
    queue.refused("queue.produce", 409, "key_conflict", items=[{"utf8": "a"}, {"utf8": "c"}], idempotency_key="key")
    if server.durable:
        server.restart()
        assert queue.produce("a", "b", idempotency_key="key") == again
        queue.refused("queue.produce", 409, "key_conflict", items=[{"utf8": "a"}], idempotency_key="key")
    assert queue.total("produced") == 2
    assert queue.produce("a", "b", idempotency_key="another")["first_id"] != first["first_id"]
