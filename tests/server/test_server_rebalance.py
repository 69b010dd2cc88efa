"""Rebalances over real HTTP, by both clients, to a scripted service: what is asked for, what is answered, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import httpx
import msgspec
import pytest

from sluiceway.client import CallError, Client
from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller, Scope
from sluiceway.model.queue import PartitionRecord
from sluiceway.model.rebalance import LeftOut, NewPartition, Plan, Rebalance, RebalanceBatch, RebalanceProgress, StepDone
from sluiceway.server import rebalance_calls
from sluiceway.server.app import Fittings
from sluiceway.server.http import Request
from tests.client.client_faces import Blocking
from tests.server.fake_service import NOW, RECORD, FakeService, serving

PLAN = Plan((NewPartition(3, "pg", (0, 1)),), (0, 1), (2,))
OPEN = Rebalance(
    "000000000000007-aaaa", "q", "k7f3q2ma", 2, PLAN, "copy", NOW, NOW + 1, "root/key", "r-1", rate=50, step="drain", items=90, moved=7
)
OPEN = msgspec.structs.replace(
    OPEN, started_at=NOW, drain_at=NOW + 1, done=(StepDone("create", NOW, "i-1"), StepDone("drain", NOW, "i-1", 1))
)
ENDED = msgspec.structs.replace(
    OPEN, id="000000000000003-aaaa", state="failed", ended_at=NOW + 9, problem="the queue was deleted", retries=4
)
PROGRESS = RebalanceProgress(83, 3, 4, {0: 83}, 12.345, 6_700)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with serving(service) as url:
        yield service, url


@pytest.fixture
def service(shared: tuple[FakeService, str]) -> FakeService:
    service = shared[0]
    service.record, service.asked, service.script, service.changed_by = RECORD, [], [], []
    return service


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, shared: tuple[FakeService, str]) -> Iterator[Client]:
    with request.param(shared[1], retry_for="0s") as made:
        yield made


def counts(*partitions: PartitionStats) -> LogicalQueueStats:
    return LogicalQueueStats(partitions=list(partitions))


def test_a_plan_has_what_there_is_now_and_what_becomes_of_it(service: FakeService, client: Client) -> None:
    stats = [
        PartitionStats(partition=0, total=6, ready=5, total_leased=1, transferring=2),
        PartitionStats(partition=1, state="draining"),
        PartitionStats(partition=2, state="unavailable"),
    ]
    service.script = [("p-1", PLAN, RECORD), counts(*stats)]
    found = client.plan_rebalance("q", requested_partitions=2)
    assert service.asked == [("q", 2), "q"]
    assert (found.queue_name, found.plan_id, found.requested_partitions) == ("q", "p-1", 2)
    assert [(each.partition, each.backend, each.parents) for each in found.plan.creates] == [(3, "pg", [0, 1])]
    assert (found.plan.drains, found.plan.keeps, found.plan.reopens, found.plan.in_order) == ([0, 1], [2], [], False)
    assert [(each.partition, each.items) for each in found.partitions] == [(0, 8), (1, 0), (2, None)]
    assert not found.plan.is_empty
    assert service.changed_by == [], "a plan changes nothing"


def test_what_is_asked_for_goes_to_the_service(service: FakeService, client: Client) -> None:
    service.script = [OPEN, OPEN]
    found = client.rebalance("q", requested_partitions=2, drain="copy", rate=50, plan_id="p-1")
    client.rebalance("q")
    assert service.asked == [("q", 2, "copy", 50, "p-1"), ("q", None, "natural", None, None)]
    assert [by.name for by in service.changed_by] == ["anybody"] * 2
    assert (found.id, found.state, found.step, found.drain, found.rate) == (OPEN.id, "running", "drain", "copy", 50)
    assert (found.items, found.moved, found.actor, found.request_id, found.problem) == (90, 7, "root/key", "r-1", None)
    assert [(each.step, each.instance, each.partition) for each in found.steps] == [("create", "i-1", None), ("drain", "i-1", 1)]
    assert found.progress is None
    assert found.is_open
    assert found.ended_at is None


def test_one_that_is_looked_at_says_how_far_it_is(service: FakeService, client: Client) -> None:
    service.script = [OPEN, PROGRESS, ENDED, msgspec.structs.replace(OPEN, state="waiting")]
    progress = client.get_rebalance(OPEN.id).progress
    assert progress is not None
    assert (progress.items_left, progress.leased_left, progress.scheduled_left) == (83, 3, 4)
    assert [(each.partition, each.items_left) for each in progress.partitions] == [(0, 83)]
    assert (progress.rate_per_s, progress.time_left) == (12.3, "7s")
    ended, waiting = client.get_rebalance(ENDED.id), client.get_rebalance(OPEN.id)
    assert (ended.progress, ended.problem, ended.retries, ended.is_open) == (None, "the queue was deleted", 4, False)
    assert (waiting.progress, waiting.is_open) == (None, True)
    assert service.asked == [OPEN.id, ("progress", OPEN.id), ENDED.id, OPEN.id], "nobody is asked of one that does nothing"


def test_it_is_watched_to_its_end(service: FakeService, shared: tuple[FakeService, str]) -> None:
    service.script = [OPEN, PROGRESS, OPEN, PROGRESS, ENDED]
    with Client(shared[1]) as client:
        assert [each.state for each in client.watch_rebalance(OPEN.id, interval="1ms")] == ["running", "running", "failed"]
        with pytest.raises(SluicewayError, match="interval"):
            next(client.watch_rebalance(OPEN.id, interval="soon"))
    assert service.script == []


def test_they_are_listed_page_by_page(service: FakeService, client: Client) -> None:
    several = [msgspec.structs.replace(OPEN, id=f"00000000000000{number}-aaaa") for number in (9, 8, 7)]
    service.script = [several, several, several]
    first = client.list_rebalances(limit=2)
    second = client.list_rebalances(queue_name="q", only_open=True, limit=2, pivot=first.next)
    assert [each.id[:15] for each in first.items + second.items] == ["000000000000009", "000000000000008", "000000000000007"]
    assert second.next is None
    assert service.asked == [(None, False), ("q", True)]


def test_several_queues_in_one_call(service: FakeService, client: Client) -> None:
    service.script = [RebalanceBatch("b-1", [OPEN], [LeftOut("orders-2", "there is nothing to do")])] * 2
    found = client.rebalance_many("orders-*", requested_partitions=3, drain="copy", rate=9)
    client.rebalance_many("*")
    assert service.asked == [("orders-*", 3, "copy", 9), ("*", None, "natural", None)]
    assert (found.batch, [each.id for each in found.rebalances]) == ("b-1", [OPEN.id])
    assert [(each.queue_name, each.reason) for each in found.left_out] == [("orders-2", "there is nothing to do")]


def test_one_is_cancelled(service: FakeService, client: Client) -> None:
    service.script = [
        OPEN,
        msgspec.structs.replace(OPEN, state="cancelling"),
        OPEN,
        SluicewayError("not_cancellable", "partition 1 is gone"),
    ]
    assert client.cancel_rebalance(OPEN.id).state == "cancelling"
    with pytest.raises(CallError, match="partition 1 is gone") as raised:
        client.cancel_rebalance(OPEN.id)
    assert (raised.value.code, raised.value.kind.status, raised.value.retryable) == ("not_cancellable", 409, False)


@pytest.mark.parametrize("code", ["rebalance_open", "plan_changed", "nothing_to_rebalance"])
def test_refusals_are_conflicts_with_a_code_of_their_own(service: FakeService, client: Client, code: str) -> None:
    service.script = [SluicewayError(code, "no")]
    with pytest.raises(CallError) as raised:
        client.rebalance("q", plan_id="p-1")
    assert (raised.value.code, raised.value.kind.status) == (code, 409)


def test_a_partition_is_paused_and_goes_on(service: FakeService, client: Client) -> None:
    paused = msgspec.structs.replace(RECORD, partitions=(PartitionRecord(0, state="paused"), *RECORD.partitions[1:]))
    service.script = [paused, RECORD]
    assert [each.state for each in client.pause_partition("q", 0).partitions] == ["paused", "available", "available"]
    assert {each.state for each in client.resume_partition("q", 2).partitions} == {"available"}
    assert service.asked == [("q", 0, True), ("q", 2, False)]
    with pytest.raises(CallError) as raised:
        client.pause_partition("q", 3)
    assert (raised.value.code, raised.value.field) == ("invalid_request", "partition")


# -- what a queue says of it ------------------------------------------------------------------------------------------


def test_a_queue_shows_its_rebalance_and_where_partitions_come_from(service: FakeService, client: Client) -> None:
    new = PartitionRecord(3, "pg", "available", parents=(0, 1))
    draining = tuple(PartitionRecord(number, state="draining") for number in (0, 1))
    service.record = msgspec.structs.replace(RECORD, partitions=(*draining, PartitionRecord(2), new), rebalance=OPEN.id)
    service.script = [OPEN, PROGRESS]
    info = client.queue_info("q")
    assert info.requested_partitions == 2, "those that stay"
    assert [(each.partition, each.state, each.parents) for each in info.partitions][1:] == [
        (1, "draining", []),
        (2, "available", []),
        (3, "available", [0, 1]),
    ]
    assert info.rebalance is not None
    assert (info.rebalance.id, info.rebalance.state, info.rebalance.step, info.rebalance.items_left) == (OPEN.id, "running", "drain", 83)
    service.script = [[OPEN]]
    (listed,) = client.list_queues().items
    assert listed.rebalance is not None
    assert (listed.rebalance.state, listed.rebalance.items_left) == ("running", None)


def test_a_queue_is_shown_also_when_nothing_can_be_told_of_its_rebalance(service: FakeService, client: Client) -> None:
    service.record = msgspec.structs.replace(RECORD, rebalance=OPEN.id)
    service.script = [SluicewayError("unavailable", "the meta store cannot be read"), [], ENDED, PROGRESS]
    found = client.queue_info("q").rebalance
    assert found is not None
    assert (found.id, found.state, found.step, found.items_left) == (OPEN.id, None, None, None)
    assert client.list_queues().items[0].rebalance is None
    assert client.queue_info("q").rebalance is None, "it has ended in between"


def test_a_queue_is_shown_also_when_nobody_answers_about_its_rebalance(
    service: FakeService, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(id: str) -> Rebalance:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(service, "get_rebalance", hangs)
    monkeypatch.setattr(rebalance_calls, "_PATIENCE", 0.02)
    service.record = msgspec.structs.replace(RECORD, rebalance=OPEN.id)
    found = client.queue_info("q").rebalance
    assert found is not None
    assert (found.id, found.state) == (OPEN.id, None)


def test_settings_sent_back_as_they_were_told_are_taken_while_partitions_drain(
    service: FakeService, shared: tuple[FakeService, str]
) -> None:
    service.record = msgspec.structs.replace(RECORD, partitions=(PartitionRecord(0, state="draining"), *RECORD.partitions[1:]))
    service.script = [RECORD]
    with httpx.Client(base_url=shared[1]) as http:
        assert http.post("/v1/queues.update", json={"queue_name": "q", "reference": "r", "requested_partitions": 2}).status_code == 200
        refused = http.post("/v1/queues.update", json={"queue_name": "q", "requested_partitions": 3}).json()
    assert refused["field"] == "requested_partitions"
    assert "queue.rebalance" in refused["detail"]


# -- what is refused before the service -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "fields", "field"),
    [
        ("rebalances.plan", {"requested_partitions": 0}, "requested_partitions"),
        ("rebalances.plan", {"requested_partitions": 1_001}, "requested_partitions"),
        ("rebalances.plan", {"drain": "copy"}, "drain"),
        ("queue.rebalance", {"drain": "quick"}, "drain"),
        ("queue.rebalance", {"rate": 5}, "rate"),
        ("queue.rebalance", {"drain": "copy", "rate": 0}, "rate"),
        ("queue.rebalance", {"plan_id": ""}, "plan_id"),
        ("queues.rebalance", {}, "match"),
        ("queues.rebalance", {"match": "a", "all": True}, "match"),
        ("queues.rebalance", {"match": "a?"}, "match"),
        ("queues.rebalance", {"all": True, "rate": 5}, "rate"),
        ("rebalances.get", {}, "id"),
        ("rebalances.get", {"id": ""}, "id"),
        ("rebalances.list", {"limit": 101}, "limit"),
        ("rebalances.list", {"queue_name": "no/name"}, "queue_name"),
        ("partition.pause", {"partition": -1}, "partition"),
        ("partition.resume", {}, "partition"),
    ],
)
def test_a_wrong_field_is_named(
    shared: tuple[FakeService, str], service: FakeService, call: str, fields: dict[str, Any], field: str
) -> None:
    named = fields if call.startswith(("queues", "rebalances")) and call != "rebalances.plan" else {"queue_name": "q", **fields}
    with httpx.Client(base_url=shared[1]) as http:
        answer = http.post(f"/v1/{call}", json=named)
    assert (answer.status_code, answer.json()["field"]) == (400, field)
    assert service.asked == []


# -- who may ----------------------------------------------------------------------------------------------------------


class Scoped:
    """A guard that takes the authorization header for the caller's scopes, such as `manage:a-*,read:*`."""

    async def admit(self, request: Request) -> Caller:
        scopes = (each.split(":") for each in request.authorization.decode().split(","))
        return Caller("somebody", tuple(Scope(cast(Any, action), pattern) for action, pattern in scopes))

    async def recheck(self, request: Request) -> Caller:
        return request.caller

    def charge(self, caller: Caller, size: int) -> None: ...


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[FakeService, httpx.Client]]:
    service = FakeService()
    with serving(service, Fittings(Scoped())) as url, httpx.Client(base_url=url) as http:
        yield service, http


def post(http: httpx.Client, scopes: str, call: str, **fields: object) -> tuple[int, str]:
    answer = http.post(f"/v1/{call}", json=fields, headers={"authorization": scopes})
    return answer.status_code, answer.json().get("code", "")


def test_a_rebalance_of_another_queue_is_as_one_that_is_not_there(guarded: tuple[FakeService, httpx.Client]) -> None:
    service, http = guarded
    for call, action in (("rebalances.get", "read"), ("rebalances.cancel", "manage")):
        said = []
        for found in (OPEN, SluicewayError("rebalance_not_found", "there is none of that name here")):
            service.script = [found]
            answer = http.post(f"/v1/{call}", json={"id": OPEN.id}, headers={"authorization": f"{action}:other"})
            said.append((answer.status_code, answer.json()["code"], answer.json()["detail"]))
        assert said[0] == said[1]
        assert said[0][:2] == (404, "rebalance_not_found")
    service.script = [OPEN]
    assert post(http, "read:q", "rebalances.cancel", id=OPEN.id)[1] == "rebalance_not_found", "who may read it may not cancel it"
    service.script = [OPEN, PROGRESS]
    assert post(http, "read:q", "rebalances.get", id=OPEN.id)[0] == 200


def test_a_list_has_what_the_key_may_read(guarded: tuple[FakeService, httpx.Client]) -> None:
    service, http = guarded
    service.script = [[OPEN, msgspec.structs.replace(OPEN, queue_name="other")]]
    answer = http.post("/v1/rebalances.list", json={}, headers={"authorization": "read:other"}).json()
    assert [each["queue_name"] for each in answer["items"]] == ["other"]
    assert post(http, "read:other", "rebalances.list", queue_name="q") == (403, "forbidden")


@pytest.mark.parametrize(
    ("scopes", "fields", "allowed"),
    [
        ("manage:*", {"all": True}, True),
        ("manage:orders-*", {"match": "orders-*"}, True),
        ("manage:orders-*", {"match": "orders-eu-*"}, True),
        ("manage:orders-1", {"match": "orders-1"}, True),
        ("manage:orders-*", {"all": True}, False),
        ("manage:orders-*", {"match": "*"}, False),
        ("manage:orders-*", {"match": "o*"}, False),
        ("manage:orders-1", {"match": "orders-*"}, False),
        ("read:*", {"all": True}, False),
    ],
)
def test_several_queues_take_the_right_to_all_that_match(
    guarded: tuple[FakeService, httpx.Client], scopes: str, fields: dict[str, Any], allowed: bool
) -> None:
    service, http = guarded
    service.script, service.asked = [RebalanceBatch("b", [], [])], []
    assert post(http, scopes, "queues.rebalance", **fields) == ((200, "") if allowed else (403, "forbidden"))
    assert bool(service.asked) == allowed
