"""C26–C30: limits, and what is done to a queue as a whole."""

from __future__ import annotations

from typing import Any

from conformance.api import Api, Queue, at, ids, millis, now, texts
from conformance.tested_server import Server


def test_C26_a_limit_is_an_error_that_names_its_field(api: Api) -> None:
    """What is at a limit goes through, what is beyond it is a 400 that names the field and changes nothing. (tests: Errors)"""
    queue = api.queue(max_lease_timeout="1h")
    queue.fill(1_000)
    year = 366 * 86_400_000
    for field, call, fields in (
        ("items", "queue.produce", {"items": [{"utf8": "x"}] * 1_001}),
        ("items", "queue.produce", {"items": []}),
        ("request_timeout", "queue.produce", {"items": [{"utf8": "x"}], "request_timeout": "15m1s"}),
        ("enqueue_at", "queue.produce", {"items": [{"utf8": "x", "enqueue_at": at(now() + year + 3_600_000)}]}),
        ("headers", "queue.produce", {"items": [{"utf8": "x", "headers": {"h": "v" * 8_192}}]}),
        ("idempotency_key", "queue.produce", {"items": [{"utf8": "x"}], "idempotency_key": "k" * 2_049}),
        ("idempotency_window", "queue.produce", {"items": [{"utf8": "x"}], "idempotency_key": "k", "idempotency_window": "25h"}),
        ("batch_size", "queue.lease", {"client_id": "c", "batch_size": 10_001}),
        ("batch_size", "queue.lease", {"client_id": "c", "batch_size": 0}),
        ("client_id", "queue.lease", {"client_id": "c" * 2_049}),
        ("lease_timeout", "queue.lease", {"client_id": "c", "lease_timeout": "61m"}),
        ("ids", "queue.complete", {"ids": ["aaaaaaaa.0.0"] * 1_001}),
        ("items", "queue.retry", {"items": [{"id": "aaaaaaaa.0.0"}] * 1_001}),
        ("requested_partitions", "queues.create", {"requested_partitions": 1_001}),
        ("requested_partitions", "queues.create", {"requested_partitions": 0}),
        ("lease_timeout", "queues.create", {"lease_timeout": "721h"}),
        ("no_such_field", "queue.lease", {"client_id": "c", "no_such_field": 1}),
    ):
        fields = {"queue_name": f"{queue.name}-new" if call == "queues.create" else queue.name, **fields}
        answer = api.post(call, **fields)
        assert answer.status_code == 400, (field, call, answer.text)
        assert field in (answer.json().get("field") or "") + answer.json()["detail"], answer.text
    items = [{"utf8": "x", "enqueue_at": at(now() + year - 3_600_000), "headers": {"h": "v" * 8_191}, "kind": "k" * 2_048}]
    queue.ask("queue.produce", items=items, request_timeout="15m", idempotency_key="k" * 2_048, idempotency_window="24h")
    assert len(queue.lease(10_000, client_id="c" * 2_048, lease_timeout="1h")["items"]) == 1_000
    assert (queue.total("produced"), queue.total("total_leased")) == (1_001, 1_000)


def test_C27_a_paused_queue_takes_or_gives_nothing(api: Api, server: Server) -> None:
    """Pause stops produce, lease or both, durably; what is leased can be settled; resume serves those who wait. (ADR 13)"""
    queue = api.queue()
    queue.fill(4)
    held = queue.lease(2)
    assert sorted(queue.ask("queue.pause")["paused"]) == ["lease", "produce"]
    if server.durable:
        server.restart()
    problem = queue.refused("queue.produce", 503, "queue_paused", items=[{"utf8": "x"}])
    assert problem["retryable"] is True
    assert queue.lease(10, request_timeout="50ms")["items"] == []
    assert queue.complete(ids(held)[:1])["completed"] == 1
    assert queue.retry(ids(held)[1])["retried"] == 1
    poll = queue.park(10)
    assert queue.ask("queue.resume", verbs=["produce"])["paused"] == ["lease"]
    queue.produce("4")
    assert queue.total("ready") == 4
    assert queue.ask("queue.resume")["paused"] == []
    assert texts(poll()) == ["2", "3", "1", "4"]
    queue.ask("queue.pause", verbs=["produce"])
    assert queue.api.ask("queues.info", queue_name=queue.name)["paused"] == ["produce"]
    queue.refused("queue.produce", 503, "queue_paused", items=[{"utf8": "x"}])


def test_C28_clear_drops_what_waits_and_nothing_else(api: Api) -> None:
    """Ready or scheduled items of every partition are dropped, leased ones stay; then the partitions count as empty. (tests: QueueClear)"""
    dead = api.queue()
    queue = api.queue(requested_partitions=2, dead_queue=dead.name)
    queue.fill(7)
    queue.fill(5)
    held = queue.lease(2)
    queue.schedule(now() + 3_600_000, "x", "y", "z")
    assert queue.ask("queue.clear") == {"ready": 10, "scheduled": 0}
    assert (queue.ready(), queue.total("total_leased"), queue.total("scheduled")) == ([0, 0], 2, 3)
    assert queue.ask("queue.clear", ready=False, scheduled=True) == {"ready": 0, "scheduled": 3}
    assert queue.ask("queue.clear", scheduled=True) == {"ready": 0, "scheduled": 0}
    queue.fill(3)
    queue.fill(3)
    assert queue.ready() == [3, 3]
    assert queue.complete(ids(held))["completed"] == 2
    assert (queue.total("cleared"), queue.balances()) == (13, True)
    assert dead.total("produced") == 0


def test_C29_an_update_changes_what_it_names(api: Api) -> None:
    """At once and no more than that; a null takes the default; with an old version it is a 409; a wrong dead queue is refused. (tests)"""
    dead = api.queue()
    queue = api.queue(dead_queue=dead.name, max_attempts=5, lease_timeout="90s", reference="mine")

    def update(**settings: object) -> Any:
        return api.ask("queues.update", queue_name=queue.name, **settings)

    before = api.ask("queues.info", queue_name=queue.name)
    changed = update(max_attempts=3, version=before["version"])
    assert changed["version"] > before["version"]
    same = ("dead_queue", "lease_timeout", "reference", "incarnation", "created_at", "partitions")
    assert [changed[name] for name in same] == [before[name] for name in same]
    assert changed == api.ask("queues.info", queue_name=queue.name)
    api.refused("queues.update", 409, "version_conflict", queue_name=queue.name, max_attempts=9, version=before["version"])
    assert api.ask("queues.info", queue_name=queue.name)["max_attempts"] == 3

    queue.fill(2)
    first = queue.one()
    update(lease_timeout="2h")
    second = queue.one()
    assert millis(second["lease_deadline"]) - millis(first["lease_deadline"]) > 3_600_000
    default = update(lease_timeout=None, max_attempts=None, dead_queue=None)
    assert (default["lease_timeout"], default["max_attempts"], default["dead_queue"]) == ("1m", 0, None)
    assert default["reference"] == "mine"
    chained = api.queue(dead_queue=dead.name)
    for wrong in ("no-such-queue", queue.name):
        answer = api.post("queues.update", queue_name=queue.name, dead_queue=wrong)
        assert 400 <= answer.status_code < 500, (wrong, answer.text)
    assert api.post("queues.update", queue_name=dead.name, dead_queue=chained.name).status_code in (400, 409)
    assert api.post("queues.update", queue_name=queue.name, requested_partitions=7).status_code == 400
    assert api.ask("queues.info", queue_name=queue.name) == default


def explained(queue: Queue, item_id: str) -> Any:
    answer = queue.ask("queue.explain", id=item_id)
    assert answer["id"] == item_id
    assert answer["reason"]
    return answer


def test_C30_explain_says_why_an_item_is_not_being_served(api: Api) -> None:
    """For every id there ever was, and for those there never were. A back-off is shortened by up to a fifth. (API)"""
    queue = api.queue(retry_backoff={"first": "10m", "most": "1h"})
    first_id = queue.fill(5)["first_id"]
    due = now() + 3_600_000
    scheduled = queue.schedule(due, "later")["first_id"]
    done, leased, retried = (queue.one(client_id="me") for _ in range(3))
    queue.complete([done["id"]])
    earliest = now() + 480_000
    queue.retry(retried["id"])
    last = ids(queue.ask("queue.peek", limit=10))[-1]

    ready = explained(queue, last)
    assert (ready["state"], ready["ahead"], ready["attempts"]) == ("ready", 1, 0)
    waits = explained(queue, scheduled)
    assert (waits["state"], millis(waits["due_at"])) == ("scheduled", due)
    held = explained(queue, leased["id"])
    assert (held["state"], held["client_id"], held["lease_id"]) == ("leased", "me", leased["lease_id"])
    assert (held["lease_deadline"], held["attempts"]) == (leased["lease_deadline"], 1)
    gone = explained(queue, done["id"])
    assert (gone["state"], "complete" in gone["reason"]) == ("gone", True)
    backing_off = explained(queue, retried["id"])
    assert (backing_off["state"], millis(backing_off["due_at"]) >= earliest) == ("scheduled", True)
    assert explained(queue, first_id.rsplit(".", 1)[0] + ".999999")["state"] == "unknown"
    assert explained(queue, "zzzzzzzz.0.0")["state"] == "unknown"
    assert queue.lease(10, request_timeout="50ms")["items"][-1]["id"] == last
    assert queue.total("scheduled") == 2
