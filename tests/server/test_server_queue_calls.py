"""Settings, pausing, clearing, redrive, explain and what a call may insist on: over real HTTP, by both clients, to a scripted service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from sluiceway.client import Backoff, CallError, Client, Completed, Ignored, Retry
from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import (
    DONE,
    RELEASE,
    Clear,
    Cleared,
    Explanation,
    Extended,
    Lease,
    Leased,
    LeaseInfo,
    QueuePatch,
    QueueSpec,
    Redrive,
    Redriven,
    Selection,
    Settle,
    Settled,
)
from tests.client.client_faces import Blocking
from tests.server.fake_service import NOW, RECORD, FakeService, serving

ITEM, LEASE = "k7f3q2ma.0.7", "k7f3q2ma.2.L4"


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(shared: tuple[FakeService, str]) -> FakeService:
    service = shared[0]
    service.record, service.asked, service.script = RECORD, [], []
    return service


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, shared: tuple[FakeService, str]) -> Iterator[Client]:
    with request.param(shared[1], retry_for="0s") as made:
        yield made


def test_settings_go_to_the_service_and_come_back(service: FakeService, client: Client) -> None:
    changed = msgspec.structs.replace(RECORD, version=2, retry_backoff=RetryBackoff(1_000, 600_000), write_timeout=2_000)
    service.script = [RECORD, changed]
    client.create_queue("q", requested_partitions=3, max_lease_timeout=timedelta(hours=1), retry_backoff=Backoff("1s", "10m"))
    info = client.update_queue("q", version=1, retry_backoff=Backoff("1s", "10m"), dead_queue=None, write_timeout="2s", max_attempts=4)
    assert service.asked == [
        QueueSpec("q", 3, max_lease_timeout=3_600_000, retry_backoff=RetryBackoff(1_000, 600_000)),
        QueuePatch({"max_attempts": 4, "dead_queue": None, "retry_backoff": RetryBackoff(1_000, 600_000), "write_timeout": 2_000}, 1),
    ]
    assert (info.version, info.retry_backoff, info.write_timeout, info.max_lease_timeout) == (2, Backoff("1s", "10m"), "2s", "30d")


def test_a_version_that_has_passed_is_a_conflict(service: FakeService, client: Client) -> None:
    service.script = [SluicewayError("version_conflict", "the queue has version 2", "version")]
    with pytest.raises(CallError, match="version 2") as raised:
        client.update_queue("q", version=1, reference="r")
    assert (raised.value.code, raised.value.field, raised.value.kind.status) == ("version_conflict", "version", 409)


def test_what_cannot_be_changed_is_refused_before_the_service(service: FakeService, client: Client) -> None:
    with pytest.raises(CallError, match="requested_partitions: cannot be changed"):
        client.update_queue("q", requested_partitions=4)  # type: ignore[call-arg]
    with pytest.raises(CallError, match="nothing to change"):
        client.update_queue("q")
    assert service.asked == []


def test_pause_and_resume(service: FakeService, client: Client) -> None:
    assert client.pause("q", ["lease"]).paused == ["lease"]
    assert client.pause("q").paused == ["produce", "lease"]
    assert client.resume("q", ["lease"]).paused == ["produce"]
    assert client.resume("q").paused == []
    service.script = [SluicewayError("queue_paused", "the queue 'q' is paused for produce")]
    with pytest.raises(CallError) as raised:
        client.produce("q", ["x"])
    assert (raised.value.code, raised.value.retryable, raised.value.outcome_unknown) == ("queue_paused", True, False)


def test_clear_and_redrive(service: FakeService, client: Client) -> None:
    service.script = [Cleared(3, 4), Cleared(0, 5), Redriven(9, 8, {"a": 8}), Redriven()]
    cleared = client.clear("q", scheduled=True)
    assert (cleared.ready, cleared.scheduled) == (3, 4)
    client.clear("q", ready=False, scheduled=True, request_timeout="1s")
    redriven = client.redrive("q", target="t", limit=9, reason="r", source="s", dry_run=True, request_timeout="1s")
    assert (redriven.matched, redriven.redriven, redriven.targets) == (9, 8, {"a": 8})
    client.redrive("q")
    assert service.asked == [
        Clear(30_000, True, True),
        Clear(1_000, False, True),
        Redrive(1_000, 9, "t", "r", "s", True),
        Redrive(30_000, 1_000),
    ]


def test_explain(service: FakeService, client: Client) -> None:
    service.script = [Explanation("leased", "c has it", attempts=2, lease=4, client_id="c", lease_deadline=NOW)]
    found = client.explain("q", ITEM)
    assert service.asked == [(0, 7)]
    assert (found.id, found.state, found.reason, found.attempts, found.ahead) == (ITEM, "leased", "c has it", 2, None)
    assert (found.lease_id, found.client_id) == ("k7f3q2ma.0.L4", "c")
    assert found.lease_deadline is not None
    assert found.lease_deadline.timestamp() * 1_000 == NOW


def test_an_id_that_is_not_the_queue_s_is_unknown_without_a_look(service: FakeService, client: Client) -> None:
    found = client.explain("q", "another3.0.7")
    assert (found.id, found.state, service.asked) == ("another3.0.7", "unknown", [])
    assert found.reason


def test_an_id_of_a_partition_that_may_have_been_is_asked_about(service: FakeService, client: Client) -> None:
    """The record here may be older than that partition, or than its removal."""
    service.script = [Explanation("gone", "partition 3 was removed by a rebalance")]
    assert client.explain("q", "k7f3q2ma.3.7").state == "gone"
    assert service.asked == [(3, 7)]


def test_release(service: FakeService, client: Client) -> None:
    service.script = [Settled(released=3, ignored=[("k7f3q2ma.0.9", "completed")])]
    released = client.release("q", [ITEM, "k7f3q2ma.0.9"], lease_ids=[LEASE], client_id="c")
    assert (released.released, released.ignored) == (3, [Ignored(id="k7f3q2ma.0.9", reason="completed")])
    (asked,) = service.asked
    (items,) = asked.selections[0]  # type: ignore[attr-defined]
    assert (items.disposition, items.offsets.tolist()) == (RELEASE, [7, 9])
    assert asked.selections[2] == [Selection(RELEASE, lease=4)]  # type: ignore[attr-defined]
    assert (asked.client_id, asked.strict) == ("c", False)  # type: ignore[attr-defined]


def test_a_lease_that_completes(service: FakeService, client: Client, shared: tuple[FakeService, str]) -> None:
    service.script = [Leased([]), Settled(completed=3, ignored=[("k7f3q2ma.0.9", "completed")])]
    leased = client.lease("q", complete_ids=[ITEM, "k7f3q2ma.0.9"], complete_lease_ids=[LEASE])
    assert leased.completed == Completed(completed=3, ignored=[Ignored(id="k7f3q2ma.0.9", reason="completed")])
    asked, completion = service.asked
    assert (type(asked), type(completion)) == (Lease, Settle)
    (items,) = completion.selections[0]  # type: ignore[attr-defined]
    assert (items.disposition, items.offsets.tolist()) == (DONE, [7, 9])
    assert completion.selections[2] == [Selection(DONE, lease=4)]  # type: ignore[attr-defined]
    with pytest.raises(CallError, match=r"complete\.ids\[1\]: ") as raised:
        client.lease("q", complete_ids=[ITEM, "seven"])
    assert raised.value.field == "complete.ids[1]"
    empty = httpx.post(f"{shared[1]}/v1/queue.lease", json={"queue_name": "q", "client_id": "c", "complete": {}})
    assert (empty.status_code, empty.json()["field"]) == (400, "complete.ids")
    assert len(service.asked) == 2


def test_extend_by_item(service: FakeService, client: Client) -> None:
    service.script = [Extended([LeaseInfo(0, 3, 2, NOW)])]
    assert [lease.lease_id for lease in client.extend("q", ids=[ITEM], lease_timeout="5m").leases] == ["k7f3q2ma.0.L3"]
    (asked,) = service.asked
    assert np.array_equal(asked.offsets[0], [7])  # type: ignore[attr-defined]
    assert (asked.leases, asked.lease_timeout) == ([], 300_000)  # type: ignore[attr-defined]
    service.record = msgspec.structs.replace(RECORD, max_lease_timeout=299_999)
    refused: list[Callable[[], object]] = [
        lambda: client.extend("q", ids=[ITEM], lease_timeout="5m"),
        lambda: client.lease("q", lease_timeout="5m"),
    ]
    for call in refused:
        with pytest.raises(CallError, match="longer than the limit of 4m59s999ms") as raised:
            call()
        assert (raised.value.code, raised.value.field) == ("invalid_request", "lease_timeout")


@pytest.mark.parametrize(
    ("name", "argument", "answer"),
    [("complete", ITEM, Settled), ("release", ITEM, Settled), ("retry", Retry(ITEM), Settled), ("extend", LEASE, Extended)],
)
def test_strict_raises_what_was_ignored(
    service: FakeService, client: Client, name: str, argument: Any, answer: type[Settled] | type[Extended]
) -> None:
    call = getattr(client, name)
    service.script = [answer(), answer(ignored=[(ITEM, "not_yours"), ("k7f3q2ma.0.9", "expired")])]
    assert call("q", [argument], client_id="c", strict=True).ignored == []
    with pytest.raises(CallError, match=r"2 ignored: k7f3q2ma\.0\.7 \(not_yours\), k7f3q2ma\.0\.9 \(expired\)") as raised:
        call("q", [argument], client_id="c", strict=True)
    assert (raised.value.code, raised.value.retryable) == ("stale_ids", False)
    assert [(each.id, each.reason) for each in raised.value.ignored] == [(ITEM, "not_yours"), ("k7f3q2ma.0.9", "expired")]
    assert [(asked.client_id, asked.strict) for asked in service.asked] == [("c", True)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "fields"),
    [("queue.clear", {}), ("queue.redrive", {}), ("queue.pause", {}), ("queue.resume", {}), ("queue.explain", {"id": ITEM})],
)
def test_an_unknown_queue(service: FakeService, shared: tuple[FakeService, str], call: str, fields: dict[str, object]) -> None:
    for name, expected in (("nowhere", (404, "queue_not_found")), ("no/where", (400, "invalid_request"))):
        answer = httpx.post(f"{shared[1]}/v1/{call}", json={"queue_name": name, **fields})
        assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (*expected, "queue_name")
    assert service.asked == []
