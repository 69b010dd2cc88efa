"""Settings, pausing, clearing, release, explain and redrive over real HTTP, against the real service."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from sluiceway.adapters.system import now
from sluiceway.kernel.clock import format_time, parse_time
from tests.server.server_running import Running, balances, eventually, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as served:
        yield served


def texts(answer: Any) -> list[str]:
    return [base64.b64decode(item["bytes"]).decode() for item in answer["items"]]


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer["items"]]


def test_settings_change_while_the_queue_is_used(server: Running) -> None:
    name = server.queue(max_attempts=1)
    server.produce(name, "x")
    made = server.ask("queues.info", queue_name=name)
    changed = server.ask("queues.update", queue_name=name, version=made["version"], max_attempts=None, max_lease_timeout="2m")
    assert changed == made | {"max_attempts": 0, "max_lease_timeout": "2m", "version": 2, "updated_at": changed["updated_at"]}
    assert changed == server.ask("queues.info", queue_name=name)
    late = server.post("queues.update", queue_name=name, version=1, reference="r")
    assert (late.status_code, late.json()["code"]) == (409, "version_conflict")
    for fields in ({"lease_timeout": "3m"}, {"max_lease_timeout": "30s"}, {"dead_queue": "nowhere"}, {"dead_queue": name}):
        assert server.post("queues.update", queue_name=name, **fields).status_code == 400
    assert server.post("queue.lease", queue_name=name, client_id="c", lease_timeout="3m").json()["field"] == "lease_timeout"
    (item,) = ids(server.lease(name, lease_timeout="2m"))
    assert server.ask("queue.retry", queue_name=name, items=[{"id": item}]) == {"retried": 1, "dead": 0, "ignored": []}


def test_a_retry_waits_as_the_queue_or_the_call_says(server: Running) -> None:
    name = server.queue(retry_backoff={"first": "1h", "most": "2h"})
    server.produce(name, "a", "b")
    first, second = ids(server.lease(name))
    server.ask("queue.retry", queue_name=name, items=[{"id": first}, {"id": second, "retry_after": "0s"}])
    assert (server.totals(name)["scheduled"], server.totals(name)["ready"]) == (1, 1)


def test_a_paused_queue_takes_and_gives_nothing(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b")
    held = server.lease(name, batch_size=1)
    assert set(server.ask("queue.pause", queue_name=name)["paused"]) == {"produce", "lease"}
    refused = server.post("queue.produce", queue_name=name, items=[{"utf8": "c"}])
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (503, "queue_paused", True)
    assert server.lease(name, request_timeout="10ms")["items"] == []
    assert server.ask("queue.complete", queue_name=name, ids=ids(held))["completed"] == 1
    assert server.ask("queue.resume", queue_name=name, verbs=["lease"])["paused"] == ["produce"]
    assert texts(server.lease(name)) == ["b"]
    assert server.ask("queue.resume", queue_name=name)["paused"] == []
    server.produce(name, "c")


def test_clear_drops_what_waits_and_leaves_what_is_leased(server: Running) -> None:
    name = server.queue(requested_partitions=2)
    for text in "abcd":
        server.produce(name, text)
    server.ask("queue.produce", queue_name=name, items=[{"utf8": "later", "enqueue_at": format_time(now() + 3_600_000)}])
    held = server.lease(name, batch_size=1)
    assert server.ask("queue.clear", queue_name=name) == {"ready": 3, "scheduled": 0}
    assert server.ask("queue.clear", queue_name=name, scheduled=True) == {"ready": 0, "scheduled": 1}
    sums = server.totals(name)
    assert (sums["cleared"], sums["total"], sums["total_leased"]) == (4, 1, 1)
    assert server.ask("queue.complete", queue_name=name, ids=ids(held))["completed"] == 1
    assert balances(server.totals(name))


def test_release_counts_no_attempt(server: Running) -> None:
    name = server.queue(max_attempts=1)
    server.produce(name, "a", "b")
    held = server.lease(name)
    assert server.ask("queue.release", queue_name=name, ids=ids(held)[:1]) == {"released": 1, "ignored": []}
    assert server.ask("queue.release", queue_name=name, lease_ids=[held["leases"][0]["lease_id"]])["released"] == 1
    again = server.lease(name)
    assert (sorted(texts(again)), [item["attempts"] for item in again["items"]]) == (["a", "b"], [1, 1])
    assert server.totals(name)["released"] == 2


def test_only_the_owner_settles_and_strict_says_what_was_ignored(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b")
    first, second = ids(server.lease(name))
    theirs = server.ask("queue.complete", queue_name=name, ids=[first], client_id="other")
    assert theirs == {"completed": 0, "ignored": [{"id": first, "reason": "not_yours"}]}
    server.ask("queue.complete", queue_name=name, ids=[first], client_id="c", strict=True)
    stale = server.post("queue.complete", queue_name=name, ids=[first, second], client_id="c", strict=True)
    assert (stale.status_code, stale.json()["code"], stale.json()["ignored"]) == (409, "stale_ids", [{"id": first, "reason": "completed"}])
    assert server.totals(name)["completed"] == 2


def test_a_lease_is_extended_by_an_item_of_it(server: Running) -> None:
    name = server.queue()
    server.produce(name, "a", "b")
    got = server.lease(name)
    (moved,) = server.ask("queue.extend", queue_name=name, ids=ids(got)[1:], lease_timeout="1h")["leases"]
    assert moved["lease_id"] == got["leases"][0]["lease_id"]
    assert parse_time(moved["lease_deadline"], "") > parse_time(got["leases"][0]["lease_deadline"], "")


def test_explain(server: Running) -> None:
    name = server.queue()
    made = server.produce(name, "a", "b")
    first = made["first_id"]
    second = f"{first.rpartition('.')[0]}.1"
    assert server.ask("queue.explain", queue_name=name, id=second) | {"reason": ""} == {
        "id": second,
        "state": "ready",
        "reason": "",
        "ahead": 1,
        "attempts": 0,
    }
    held = server.lease(name, batch_size=1)
    found = server.ask("queue.explain", queue_name=name, id=first)
    assert (found["state"], found["lease_id"], found["client_id"]) == ("leased", held["leases"][0]["lease_id"], "c")
    server.ask("queue.complete", queue_name=name, ids=[first])
    assert server.ask("queue.explain", queue_name=name, id=first)["state"] == "gone"
    assert server.ask("queue.explain", queue_name=name, id="elsewhere.0.1")["state"] == "unknown"


def test_a_dead_item_is_explained_with_its_failed_attempts(server: Running) -> None:
    dead = server.queue()
    name = server.queue(dead_queue=dead)
    server.produce(name, "bad")
    (item,) = ids(server.lease(name))
    server.ask("queue.retry", queue_name=name, items=[{"id": item, "trace": "Traceback …", "reason": "not yet", "host": "h"}])
    (item,) = ids(server.lease(name))
    server.ask("queue.retry", queue_name=name, items=[{"id": item, "dead": True, "reason": "no good", "trace": "Traceback 2"}])
    eventually(lambda: server.totals(dead)["ready"] == 1)
    leased = server.lease(dead)
    for _ in range(2):
        (dead_id,) = ids(leased)
        found = server.ask("queue.explain", queue_name=dead, id=dead_id)
        assert [(each["attempt"], each["reason"]) for each in found["failures"]] == [(1, "not yet"), (2, "no good")]
        assert found["failures"][1]["trace"] == "Traceback 2"
        server.ask("queue.release", queue_name=dead, ids=[dead_id])
        leased = server.lease(dead)
    # What fails in the dead queue comes after it.
    server.ask("queue.retry", queue_name=dead, items=[{"id": each, "reason": "again"} for each in ids(leased)])
    (dead_id,) = ids(server.ask("queue.peek", queue_name=dead))
    found = server.ask("queue.explain", queue_name=dead, id=dead_id)
    assert [each["reason"] for each in found["failures"]] == ["not yet", "no good", "again"]


AT = '"at": "2026-01-01T00:00:00.000Z"'


def test_a_header_of_that_name_that_is_not_ours_explains_nothing(server: Running) -> None:
    name = server.queue()
    for text in (
        "[",
        "{}",
        '[{"attempt": "x"}]',
        '[{"attempt": 1, "at": "2026-01-01T00:00:00"}]',
        f'[{{"attempt": 1, {AT}, "handler_time": "long"}}]',
    ):
        made = server.ask("queue.produce", queue_name=name, items=[{"utf8": "x", "headers": {"sluiceway-failures": text}}])
        assert "failures" not in server.ask("queue.explain", queue_name=name, id=made["first_id"])


def test_dead_items_are_sent_back_once(server: Running) -> None:
    dead = server.queue()
    name = server.queue(dead_queue=dead)
    server.produce(name, "bad")
    (item,) = ids(server.lease(name))
    server.ask("queue.retry", queue_name=name, items=[{"id": item, "dead": True, "reason": "no good"}])
    eventually(lambda: server.totals(dead)["ready"] == 1)
    assert server.ask("queue.redrive", queue_name=dead, reason="other", dry_run=True)["matched"] == 0
    assert server.ask("queue.redrive", queue_name=dead, dry_run=True) == {"matched": 1, "redriven": 0, "targets": {name: 1}}
    assert server.ask("queue.redrive", queue_name=dead) == {"matched": 1, "redriven": 1, "targets": {name: 1}}
    again = server.lease(name)
    assert (texts(again), again["items"][0]["attempts"], again["items"][0]["origin"]) == (["bad"], 1, item)
    assert server.ask("queue.redrive", queue_name=dead)["matched"] == 0
    assert balances(server.totals(dead))
