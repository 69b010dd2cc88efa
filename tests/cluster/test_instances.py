"""What is told of a cluster's instances, its rounds, and of whose a partition is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sluiceway.client import Client
from sluiceway.cluster.instance_view import belonging, instances_of
from sluiceway.cluster.ownership import PARAMETERS
from sluiceway.contract.queue_stats import LogicalQueueStats, PartitionStats
from sluiceway.core.group.group_records import (
    Claim,
    GroupView,
    Keys,
    MemberRecord,
    Move,
    Parameters,
    Plan,
    Resource,
    Round,
    SealedRound,
    read_group,
)
from sluiceway.kernel.clock import format_time
from sluiceway.kernel.compatibility import Levels
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.instances import Belonging, ClusterInfo, InstanceInfo, PinInfo, RoundInfo
from sluiceway.model.meta import Entry, View
from sluiceway.wire import json_instances
from tests.server.fake_service import NOW, RECORD, FakeService, serving
from tests.server.server_guarded import guarded
from tests.server.server_running import running

KEYS = Keys("partitions")
ITEM = "k7f3q2ma.0"
SEALED = SealedRound(
    number=7,
    trigger="i-3 has joined",
    participants=("i-1", "i-2"),
    moved=1,
    kept=2,
    sealed_by="i-2",
    sealed_at=NOW,
    duration=250,
    moves=(Move(ITEM, "i-3", "i-1"), Move("deleted1.4", "", "i-2")),
)


def member(**fields: Any) -> MemberRecord:
    return MemberRecord(**{"beat": 1, "lease_timeout": 2_000, "applied": 7, "era": 2, "address": "http://i-1", **fields})


def look(**records: msgspec.Struct) -> GroupView:
    """A group of those records, by their keys below the prefix, with a slash for each `__`."""
    entries = {KEYS.prefix + name.replace("__", "/").replace("_", "-"): msgspec.json.encode(each) for name, each in records.items()}
    return read_group(View(9, {key: Entry(value, 9) for key, value in entries.items()}), KEYS, 0)


def planned(owners: dict[str, dict[str, int]], waits: Mapping[str, tuple[str, ...]] | None = None, era: int = 2, **more: Any) -> GroupView:
    resource = Resource(items=(ITEM, "k7f3q2ma.1", "k7f3q2ma.2"), era=2)
    plan = Plan(round=7, era=era, resource_version=1, owners=owners, waits=dict(waits or {}))
    there = {"member__i_1": member(), "member__i_2": member(address="http://i-2"), **more}
    return look(resource=resource, plan=plan, round=Round(number=7, sealed=True, trigger="i-3 has joined"), **there)


def why(found: GroupView, item: str = ITEM, history: dict[int, SealedRound] | None = None, created_at: int = 0) -> Belonging:
    assert found.resource is not None
    return belonging(found, found.resource, item, {7: SEALED} if history is None else history, created_at)


# -- the instances ----------------------------------------------------------------------------------------------------


def test_each_instance_is_shown_as_this_one_sees_it() -> None:
    found = planned({"i-1": {ITEM: 7, "k7f3q2ma.1": 3}}, member__i_3=member(leaving=True, joined_at=NOW, zone="east"))
    shown = {each.name: each for each in instances_of(found, {"i-1": 100, "i-2": 3_000, "i-3": 2_999}, "i-1", holds=True)}
    assert [(each.state, each.here, each.partitions) for each in shown.values()] == [
        ("alive", True, 2),
        ("silent", False, 0),
        ("leaving", False, 0),
    ]
    assert (shown["i-2"].silent_for, shown["i-2"].address, shown["i-2"].joined_at) == (3_000, "http://i-2", None)
    assert (shown["i-3"].joined_at, shown["i-3"].zone, shown["i-1"].zone) == (NOW, "east", "")


def test_silence_goes_by_the_longer_of_the_two_times() -> None:
    found = planned({}, member__i_2=member(lease_timeout=4_000))
    assert [each.state for each in instances_of(found, {"i-1": 3_000, "i-2": 4_999}, "x", holds=True)] == ["silent", "alive"]
    assert [each.state for each in instances_of(found, {"i-2": 5_000}, "x", holds=True)] == ["alive", "silent"]


def test_an_instance_whose_lease_has_run_out_calls_itself_silent() -> None:
    found = instances_of(planned({}), {"i-1": 10, "i-2": 10}, "i-1", holds=False)
    assert [each.state for each in found] == ["silent", "alive"]


# -- whose a partition is ---------------------------------------------------------------------------------------------


def test_a_partition_is_its_owner_s_since_a_round() -> None:
    found = why(planned({"i-1": {ITEM: 7}}))
    assert (found.owner, found.address, found.era, found.grant, found.waits_for) == ("i-1", "http://i-1", 2, 7, [])
    assert found.reason == "owned by i-1 since round 7; reason of the round: i-3 has joined"
    assert (
        "reason of the round: scheduled"
        in why(planned({"i-1": {ITEM: 7}}), history={7: msgspec.structs.replace(SEALED, trigger="heartbeat")}).reason
    )
    assert "whose record no longer exists" in why(planned({"i-1": {ITEM: 2}})).reason


def test_a_partition_of_a_queue_that_came_after_the_round_was_placed() -> None:
    assert "when its queue was created, after round 7" in why(planned({"i-1": {ITEM: 7}}), created_at=NOW).reason


def test_who_has_to_stop_first_is_told() -> None:
    waits = {"i-2": (ITEM,), "i-3": ("k7f3q2ma.1",), "gone": (ITEM,)}
    found = planned({"i-1": {ITEM: 7}}, waits, member__i_2=member(applied=6), member__i_3=member(applied=6))
    assert why(found).waits_for == ["i-2"]
    assert "waiting until i-2 has stopped" in why(found).reason
    applied = planned({"i-1": {ITEM: 7}}, waits, member__i_2=member(applied=7))
    assert why(applied).waits_for == []
    old = planned({"i-1": {ITEM: 7}}, member__i_2=member(era=1), member__i_3=member(era=1))
    assert why(old).waits_for == ["i-2", "i-3"]
    assert "i-2, i-3 have stopped" in why(old).reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (planned({"gone": {ITEM: 7}}), "gone has left; the next round"),
        (planned({"i-1": {"k7f3q2ma.1": 7}}), "it was created after the last round"),
        (planned({"i-1": {ITEM: 7}}, era=1), "no round in era 2 yet"),
        (look(resource=Resource(items=(ITEM,), strategy="claims")), "not claimed yet"),
        (look(resource=Resource(items=())), "just created"),
        (look(resource=Resource(items=(ITEM,), strategy="static")), "no round in era 1"),
    ],
)
def test_that_nobody_has_it_is_told_with_the_cause(found: GroupView, reason: str) -> None:
    told = why(found)
    assert reason in told.reason
    assert (told.owner, told.grant) == (None, None)


def test_a_claimed_partition() -> None:
    claims = {"claim__k7f3q2ma.0": Claim(owner="i-1", grant=4), "member__i_1": member()}
    found = why(look(resource=Resource(items=(ITEM,), strategy="claims", era=2), **claims))
    assert (found.owner, found.grant, found.reason) == ("i-1", 4, "claimed by i-1")


# -- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with serving(service) as url:
        yield service, url


def post(url: str, call: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/{call}", json=fields)


CLUSTER = ClusterInfo(
    [
        InstanceInfo("i-1", "http://i-1", True, "alive", 20, NOW, 5),
        InstanceInfo("i-2", "", False, "silent", 90_000, release="0.3.0", levels=Levels(11, 12), zone="east", load=0.25, items=70, bytes=9),
    ],
    "rounds",
    2,
    11,
    12,
    msgspec.structs.asdict(Parameters()),
    RoundInfo(7, False, "i-3 has joined", ("i-1",), 1, 2),
    4,
    [PinInfo("q", 1, "", "east")],
)


def test_instances_on_the_wire(shared: tuple[FakeService, str]) -> None:
    service, url = shared
    service.instances.script = [CLUSTER]
    assert post(url, "instances.list").json() == {
        "items": [
            {
                "instance": "i-1",
                "address": "http://i-1",
                "here": True,
                "state": "alive",
                "silent_for": "20ms",
                "joined_at": format_time(NOW),
                "partitions": 5,
                "release": None,
                "levels": None,
                "zone": None,
                "load": None,
                "items_per_second": None,
                "bytes_per_second": None,
            },
            {
                "instance": "i-2",
                "address": None,
                "here": False,
                "state": "silent",
                "silent_for": "1m30s",
                "joined_at": None,
                "partitions": 0,
                "release": "0.3.0",
                "levels": [11, 12],
                "zone": "east",
                "load": 0.25,
                "items_per_second": 70,
                "bytes_per_second": 9,
            },
        ],
        "strategy": "rounds",
        "era": 2,
        "parameters": {
            "settle_timeout": "200ms",
            "round_interval": "1s",
            "heartbeat_interval": "10m",
            "beat_interval": "500ms",
            "lease_timeout": "2s",
            "member_timeout": "3s",
        },
        "round": {"number": 7, "sealed": False, "trigger": "i-3 has joined", "participants": ["i-1"], "moved": 1, "kept": 2},
        "load_moves": 4,
        "pins": [{"queue_name": "q", "partition": 1, "instance": None, "zone": "east"}],
        "level": 11,
        "reachable_level": 12,
    }
    assert post(url, "instances.list", limit=1).json()["field"] == "limit"


def test_rounds_on_the_wire(shared: tuple[FakeService, str]) -> None:
    service, url = shared
    service.instances.script = [[SEALED, SEALED]] * 2
    (shown,) = post(url, "rounds.list", limit=1).json()["items"]
    assert shown == {
        "number": 7,
        "trigger": "i-3 has joined",
        "participants": ["i-1", "i-2"],
        "moved": 1,
        "kept": 2,
        "duration": "250ms",
        "sealed_at": format_time(NOW),
        "sealed_by": "i-2",
        "moves": [
            {"queue_name": "q", "partition": 0, "before": "i-3", "owner": "i-1"},
            {"queue_name": None, "partition": 4, "before": None, "owner": "i-2"},
        ],
    }
    assert len(post(url, "rounds.list").json()["items"]) == 2
    for limit in (0, 101, "x"):
        assert post(url, "rounds.list", limit=limit).json()["field"] == "limit"


def test_an_explained_partition_on_the_wire(shared: tuple[FakeService, str]) -> None:
    service, url = shared
    service.instances.script = [Belonging("because", "i-1", "http://i-1", 2, 7, ["i-2"], pinned_zone="east")]
    service.script = [LogicalQueueStats(partitions=[PartitionStats(partition=1, state="failed")])]
    assert post(url, "queue.explain", queue_name="q", partition=1).json() == {
        "partition": 1,
        "owner": "i-1",
        "address": "http://i-1",
        "backend": "default",
        "state": "failed",
        "reason": "because",
        "era": 2,
        "grant": 7,
        "waits_for": ["i-2"],
        "pinned_instance": None,
        "pinned_zone": "east",
    }


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "id"), ({"id": "k7f3q2ma.0.1", "partition": 0}, "partition"), ({"partition": 3}, "partition"), ({"partition": -1}, "partition")],
)
def test_what_to_explain_is_named_once(shared: tuple[FakeService, str], fields: dict[str, object], field: str) -> None:
    answer = post(shared[1], "queue.explain", queue_name="q", **fields)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_every_partition_is_shown_with_its_owner(shared: tuple[FakeService, str]) -> None:
    owners = [("i-1", "http://i-1"), (None, None), (None, None)]
    infos = [post(shared[1], "queues.info", queue_name="q").json(), post(shared[1], "queues.list").json()["items"][0]]
    assert [[(each["owner"], each["address"]) for each in info["partitions"]] for info in infos] == [owners, owners]


def test_that_the_meta_store_does_not_answer_is_told(shared: tuple[FakeService, str]) -> None:
    service, url = shared

    async def fails(limit: int) -> list[SealedRound]:
        raise SluicewayError("unavailable", "the meta store cannot be read: x")

    before, service.instances.rounds = service.instances.rounds, fails  # type: ignore[method-assign]
    try:
        assert post(url, "rounds.list").status_code == 503
    finally:
        service.instances.rounds = before  # type: ignore[method-assign]


def test_who_may_not_see_all_is_not_told_of_the_cluster(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        for call in ("/v1/instances.list", "/v1/rounds.list"):
            for scope, status in (("read:orders-*", 403), ("manage:*", 403), ("read:*", 200), ("admin", 200)):
                assert served.client(scope).post(call, json={}).status_code == status, (call, scope)


# -- a server that is alone -------------------------------------------------------------------------------------------


def test_a_server_that_is_alone_answers_with_itself(tmp_path: Path) -> None:
    with running(tmp_path) as server, Client(server.url) as client:
        queue = server.queue(requested_partitions=2)
        (seen,) = client.list_instances().items
        assert (seen.instance, seen.here, seen.state, seen.address, seen.partitions) == ("instance", True, "alive", None, 2)
        found = client.list_instances()
        assert (found.strategy, found.era, found.parameters, found.round) == ("static", 1, None, None)
        assert client.list_rounds() == []
        why = client.explain_partition(queue, 1)
        assert (why.owner, why.state, why.grant, why.waits_for) == ("instance", "available", None, [])
        assert why.reason == "single server: it owns all partitions"
        assert [part.owner for part in client.queue_info(queue).partitions] == ["instance"] * 2
        assert [each.instance for each in client.stats(queue).logical_queues] == ["instance"]


def test_the_times_in_the_documentation_are_those_of_a_cluster() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "cluster.md").read_text()
    takeover = PARAMETERS.member_timeout + PARAMETERS.round_interval + PARAMETERS.settle_timeout
    round_ = PARAMETERS.round_interval + PARAMETERS.settle_timeout
    assert f"a heartbeat every {PARAMETERS.beat_interval} ms. If it cannot for {PARAMETERS.lease_timeout // 1000} s," in text
    assert (
        f"no heartbeat for {PARAMETERS.member_timeout // 1000} s, they reassign its partitions in a round, which takes {round_ / 1000} s"
        in text
    )
    assert text.count(f"about {takeover / 1000} s") == 2
    assert text.count(f" {PARAMETERS.lease_timeout // 1000} s") == 4


def test_the_record_s_shape_is_what_is_encoded() -> None:
    said = json.loads(json_instances.partition_explained(RECORD.partitions[0].partition, "b", "opening", Belonging("r")))
    assert (said["owner"], said["address"], said["grant"], said["waits_for"]) == (None, None, None, [])
