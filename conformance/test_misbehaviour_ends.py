"""B09–B22: deaths, settings, clients that go away, names."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import pytest

from conformance.api import POLL, Api, Queue, ids, now, reasons, texts, until


def buried(dead: Queue) -> tuple[str, str]:
    """The text of the next item in the dead queue, and why it died."""
    item = dead.one()
    return texts({"items": [item]})[0], item["headers"]["sluiceway-reason"]


def test_B09_a_retry_minds_max_attempts(api: Api) -> None:
    """An item that has used up its attempts dies instead of being retried, and the answer says so."""
    dead = api.queue()
    queue = api.queue(max_attempts=2, dead_queue=dead.name)
    queue.produce("x")
    assert queue.retry(queue.one()["id"]) == {"retried": 1, "dead": 0, "ignored": []}
    assert queue.retry(queue.one()["id"]) == {"retried": 0, "dead": 1, "ignored": []}
    assert buried(dead)[0] == "x"
    assert (queue.total("total"), queue.total("dead")) == (0, 1)


def test_B10_a_dead_item_goes_to_the_dead_queue(api: Api) -> None:
    """A retry with `dead` puts it there, with the reason; only a queue without a dead queue drops it."""
    dead = api.queue(requested_partitions=2)
    queue = api.queue(dead_queue=dead.name)
    queue.produce("x")
    poll = dead.park()
    assert queue.retry(queue.one()["id"], dead=True, reason="no such account") == {"retried": 0, "dead": 1, "ignored": []}
    (item,) = poll()["items"]
    assert (texts({"items": [item]}), item["headers"]["sluiceway-reason"]) == (["x"], "no such account")
    dropping = api.queue()
    dropping.produce("y")
    assert dropping.retry(dropping.one()["id"], dead=True)["dead"] == 1
    assert (dropping.total("total"), dropping.balances()) == (0, True)


def test_B11_an_item_that_dies_again_is_there_again(api: Api) -> None:
    """Three times it dies and is redriven; each time it is in the dead queue, once."""
    dead = api.queue()
    queue = api.queue(dead_queue=dead.name)
    origin = queue.produce("phoenix")["first_id"]
    for death in range(1, 4):
        item = queue.one()
        assert (item["origin"], item["attempts"]) == (origin, 1)
        queue.retry(item["id"], dead=True, reason=f"death {death}")
        until(lambda: dead.total("ready") == 1, "the item's arrival in the dead queue")
        (body,) = dead.ask("queue.peek")["items"]
        assert body["headers"]["sluiceway-reason"] == f"death {death}"
        assert dead.ask("queue.redrive", request_timeout=POLL)["matched"] == 1
    assert queue.one()["origin"] == origin
    until(lambda: dead.total("redriven") == 3, "the third redrive")
    assert (queue.total("dead"), dead.total("produced"), dead.total("total")) == (3, 3, 0)


def test_B12_a_dead_item_says_why_and_where_it_died(api: Api) -> None:
    """Reason, queue, attempts and the time of its production are in its headers, beside those it had; its origin is the old one."""
    dead = api.queue()
    queue = api.queue(max_attempts=2, dead_queue=dead.name)
    queue.ask("queue.produce", items=[{"utf8": "x", "headers": {"mine": "1"}, "kind": "k"}])
    first = queue.one()
    queue.retry(first["id"])
    queue.retry(queue.one()["id"], reason="broken")
    item = dead.one()
    assert (item["origin"], item["kind"], item["attempts"]) == (first["origin"], "k", 1)
    headers = item["headers"]
    assert headers["mine"] == "1"
    assert headers["sluiceway-queue"] == queue.name
    assert headers["sluiceway-attempts"] == "2"
    assert headers["sluiceway-reason"]
    assert headers["sluiceway-enqueued-at"][:19] == first["enqueued_at"][:19]


def test_B13_an_update_leaves_alone_what_it_does_not_name(api: Api) -> None:
    """The dead queue stays when max_attempts changes, and takes the dead; `queues.info` shows both at once."""
    dead = api.queue()
    queue = api.queue(dead_queue=dead.name, max_attempts=9)
    queue.produce("x")
    api.ask("queues.update", queue_name=queue.name, max_attempts=1)
    info = api.ask("queues.info", queue_name=queue.name)
    assert (info["dead_queue"], info["max_attempts"]) == (dead.name, 1)
    (listed,) = (
        entry for entry in api.ask("queues.list", pivot=queue.name[:-1], limit=1_000)["items"] if entry["queue_name"] == queue.name
    )
    assert listed == info
    queue.expire(queue.one()["lease_id"])
    assert buried(dead)[0] == "x"


def test_B14_stats_are_those_of_the_partition_they_name(api: Api) -> None:
    """Whatever the order of the partitions by load, the counts agree with what lies in each of them."""
    queue = api.queue(requested_partitions=4)
    for count in (9, 3, 7, 5):
        queue.fill(count)
    queue.lease(6)
    queue.schedule(now() + 3_600_000, "x")
    for partition in queue.partitions():
        look = queue.ask("queue.peek", partition=partition["partition"], limit=100)["items"]
        assert len(look) == partition["ready"]
        assert partition["total"] == partition["ready"] + partition["total_leased"] + partition["scheduled"]
    assert queue.ready() == [3, 3, 7, 5]
    assert [partition["total_leased"] for partition in queue.partitions()] == [6, 0, 0, 0]
    assert queue.total("scheduled") == 1


def test_B15_a_complete_gets_past_ids_that_are_gone_or_stand_there_twice(api: Api) -> None:
    """The rest of a call is done whatever stands before it, so repeating a call that was cut off ends in a success."""
    queue = api.queue()
    first_id = queue.fill(6)["first_id"]
    held = ids(queue.lease(6))
    queue.complete(held[:2])
    answer = queue.complete([held[0], "zzzzzzzz.3.1", held[2], held[2], held[1], held[3]])
    assert answer["completed"] == 2
    assert reasons(answer) | {held[2]: ""} == {held[0]: "completed", "zzzzzzzz.3.1": "unknown", held[1]: "completed", held[2]: ""}
    assert queue.complete(held)["completed"] == 2
    assert (queue.total("total"), queue.balances(), first_id) == (0, True, held[0])


def test_B16_expire_timeout_is_counted_from_the_due_time(api: Api) -> None:
    """An item that is scheduled for later than its expire_timeout is served when it is due."""
    dead = api.queue()
    queue = api.queue(expire_timeout="10s", dead_queue=dead.name)
    queue.schedule(now() + 60_000, "in a minute")
    short = api.queue(expire_timeout="2500ms", dead_queue=dead.name)
    due = now() + 3_000
    short.schedule(due, "in three seconds")
    item = short.one()
    assert now() >= due
    assert short.complete([item["id"]])["completed"] == 1
    assert (queue.total("scheduled"), dead.total("produced")) == (1, 0)


def test_B17_a_queue_that_is_created_anew_is_another_queue(api: Api) -> None:
    """It has nothing of the deleted one's: no items, no schedule, no keys, no settings; ids of the old one are unknown."""
    queue = api.queue(requested_partitions=2, max_attempts=3)
    old = queue.produce("ready", "leased", idempotency_key="key")["first_id"]
    held = queue.one()
    queue.schedule(now() + 500, "scheduled")
    api.ask("queues.delete", queue_name=queue.name, force=True)
    queue.refused("queue.produce", 404, "queue_not_found", items=[{"utf8": "x"}])
    made = api.ask("queues.create", queue_name=queue.name)
    assert made["max_attempts"] != 3
    assert (queue.ready(), queue.total("produced"), queue.total("scheduled")) == ([0], 0, 0)
    again = queue.produce("ready", "leased", idempotency_key="key")
    assert (again["deduplicated"], again["first_id"] == old) == (False, False)
    item = queue.one()
    answer = queue.complete([old, held["id"]])
    assert (answer["completed"], set(reasons(answer).values())) == (0, {"unknown"})
    assert reasons(queue.ask("queue.retry", items=[{"id": held["id"]}])) == {held["id"]: "unknown"}
    assert queue.complete([item["id"]])["completed"] == 1
    assert texts(queue.lease(10)) == ["leased"]


@pytest.mark.parametrize("ahead", [30, 60, 95])
def test_B18_nothing_is_served_before_its_time(api: Api, ahead: int) -> None:
    """Not by a millisecond, also where the time is nearer than the hundred milliseconds that the original takes for now."""
    queue = api.queue()
    due = now() + ahead
    queue.schedule(due, "soon")
    item = queue.one()
    assert now() >= due
    due = now() + ahead
    queue.retry(item["id"], retry_after=f"{ahead}ms")
    queue.one()
    assert now() >= due


def hang_up_while_waiting(queue: Queue, **fields: object) -> None:
    """A consumer begins a long poll and closes its connection."""
    body = json.dumps({"queue_name": queue.name, "request_timeout": POLL, "lease_timeout": "10m", **fields}).encode()
    address = urlsplit(queue.api.url)
    head = f"POST /v1/queue.lease HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    waiting = queue.waiting()
    with socket.create_connection((address.hostname, address.port or 80), timeout=120) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: queue.waiting() > waiting, "a long poll's waiting")


def test_B19_a_client_that_comes_back_is_served(api: Api) -> None:
    """With the client_id that it had when it lost its connection; and two long polls of one client are both served."""
    queue = api.queue()
    hang_up_while_waiting(queue, client_id="me")
    until(lambda: queue.waiting() == 0, "the end of the poll that was hung up")
    polls = [queue.park(client_id="me"), queue.park(client_id="me")]
    queue.produce("a", "b")
    assert sorted(text for poll in polls for text in texts(poll())) == ["a", "b"]


def test_B20_a_client_that_has_gone_takes_nothing_with_it(api: Api) -> None:
    """A long poll ends when its client hangs up, on an idle queue too; what comes after that goes to whoever asks."""
    queue = api.queue()
    for _ in range(3):
        hang_up_while_waiting(queue, client_id="gone", batch_size=10)
        until(lambda: queue.waiting() == 0, "the end of the poll that was hung up")
        queue.produce("a", "b")
        assert queue.complete(ids(queue.lease(2)))["completed"] == 2


def test_B21_a_queue_that_has_items_is_not_deleted_by_mistake(api: Api) -> None:
    """Without `force` it is a 409, for ready, leased and scheduled items alike; a dead queue that is in use stays; an empty queue goes."""
    queue = api.queue()
    item_id = queue.produce("x")["first_id"]
    api.refused("queues.delete", 409, "queue_not_empty", queue_name=queue.name)
    queue.one()
    api.refused("queues.delete", 409, "queue_not_empty", queue_name=queue.name)
    queue.retry(item_id, retry_after="1h")
    api.refused("queues.delete", 409, "queue_not_empty", queue_name=queue.name)
    assert queue.total("scheduled") == 1
    source = api.queue(dead_queue=queue.name)
    api.refused("queues.delete", 409, "queue_in_use", queue_name=queue.name, force=True)
    assert api.ask("queues.delete", queue_name=source.name) == {}
    assert api.ask("queues.delete", queue_name=queue.name, force=True) == {}


def test_B22_a_name_is_a_name_and_not_a_path(api: Api) -> None:
    """Names that mean something to a file system or to SQL are refused, or are as good as any; such that differ are different queues."""
    for name in ("../escape", "..", ".", "a/b", "/etc", "a\\b", "a\u0000b", "a b", "", "~a", 'a"b', "a'b;--", "é", "x" * 129):
        api.refused("queues.create", 400, "invalid_request", queue_name=name)
    first = api.queue()
    names = [f"{first.name}-{suffix}" for suffix in ("a", "A", "a.b", "a_b", "a-b", "a..b", "con", "x" * 80)]
    queues = [Queue(api, name) for name in names]
    for queue in queues:
        api.ask("queues.create", queue_name=queue.name)
        queue.produce(queue.name)
    assert [texts(queue.lease(10)) for queue in queues] == [[name] for name in names]
