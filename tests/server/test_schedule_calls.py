"""The calls on schedules: their answers, their refusals, and what they tell a key of the schedules of others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from sluiceway.adapters import time_zones
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_STORED_ITEM
from sluiceway.server.app import create_app
from sluiceway.server.http import Request
from sluiceway.server.schedule_calls import ScheduleCalls
from tests.cluster.cluster_rig import cluster
from tests.instance.instance_rig import down, spec
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_process import PATIENCE

OWN, OTHERS = "orders-1", "secret-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        everything = served.client("produce:*", "manage:*", "read:*")
        for name in (OWN, OTHERS):
            everything.post("/v1/queues.create", json={"queue_name": name}).raise_for_status()
        created(everything, "theirs", queue_name=OTHERS).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def client(server: Guarded) -> httpx.Client:
    return server.client("produce:orders-*", "read:orders-*", "consume:orders-*")


def created(client: httpx.Client, name: str = "s", **fields: Any) -> httpx.Response:
    call = {"name": name, "queue_name": OWN, "cron": "@daily", "item": {"utf8": "x"}, **fields}
    return client.post("/v1/schedules.create", json=call)


def call(client: httpx.Client, verb: str, name: str, **fields: Any) -> httpx.Response:
    return client.post(f"/v1/schedules.{verb}", json={"name": name, **fields})


def test_a_schedule_from_its_creation_to_its_end(server: Guarded, client: httpx.Client) -> None:
    item = {"bytes": "AAE=", "kind": "k", "reference": "r", "headers": {"a": "b"}}
    made = created(client, cron="0 3 * * mon", timezone="Europe/Berlin", jitter="10m", catch_up="all", item=item).json()
    assert made["item"] == item
    assert (made["paused"], made["last_fired"], made["last_failure"]) == (False, None, None)
    assert made["next_at"] is not None
    assert call(client, "get", "s").json() == made
    listed = client.post("/v1/schedules.list", json={}).json()
    assert listed == {"items": [made], "next": None}
    assert client.post("/v1/schedules.list", json={"queue_name": "orders-2"}).json()["items"] == []
    assert client.post("/v1/schedules.list", json={"pivot": "s"}).json()["items"] == []

    paused = call(client, "pause", "s").json()
    assert (paused["paused"], paused["next_at"]) == (True, None)
    changed = call(client, "update", "s", jitter="0s", item={"utf8": "y"}).json()
    assert (changed["jitter"], changed["item"], changed["cron"]) == ("0s", {"utf8": "y"}, "0 3 * * mon")
    assert call(client, "resume", "s").json()["next_at"].endswith(("T01:00:00.000Z", "T02:00:00.000Z"))
    id = call(client, "run", "s").json()["id"]
    (leased,) = client.post("/v1/queue.lease", json={"queue_name": OWN, "client_id": "c"}).json()["items"]
    assert (leased["id"], leased["bytes"], leased["headers"]) == (id, "eQ==", {"schedule": "s"})

    assert call(client, "delete", "s").json() == {}
    assert call(client, "get", "s").json()["code"] == "schedule_not_found"
    entries = server.admin.post("/v1/audit.list", json={"action": "schedules.", "queue_name": OWN}).json()["items"]
    assert [entry["action"].partition(".")[2] for entry in entries] == ["delete", "run", "resume", "update", "pause", "create"]
    assert entries[3]["detail"] == {"name": "s", "jitter": 0, "item": "changed"}


@pytest.mark.parametrize(
    ("fields", "field", "detail"),
    [
        ({"cron": "0 25 * * *"}, "cron", "cron: hour: 25 is not between 0 and 23"),
        ({"timezone": "Mars"}, "timezone", "timezone: 'Mars' is not a time zone of the IANA database"),
        ({"jitter": "2d"}, "jitter", "jitter: '2d' is longer than the limit of 1d"),
        ({"catch_up": "some"}, "catch_up", "catch_up: "),
        ({"name": ".s"}, "name", "name: '.s' is not a name for a schedule"),
        ({"item": {}}, "item.bytes", "an item needs bytes (base64) or utf8"),
        ({"item": {"utf8": "x", "bytes": ""}}, "item.utf8", "an item has bytes or utf8, not both"),
        ({"item": {"utf8": "x", "enqueue_at": "2026-01-31T08:00:00Z"}}, "item.enqueue_at", "the schedule says when"),
        ({"item": {"utf8": "x", "headers": {"scheduled_at": "now"}}}, "item.headers", "the header scheduled_at is set by the server"),
        ({"item": {"utf8": "x" * MAX_STORED_ITEM}}, "item", "item: larger than 65,536 bytes as JSON"),
        ({"item": {"utf8": "x", "kind": "k" * 2_049}}, "item.kind", "item.kind: larger than 2048 bytes"),
        ({"item": {"utf8": "x", "colour": 1}}, "item.colour", "item.colour: unknown field"),
        ({"queue_name": "orders-none"}, "queue_name", "there is no queue 'orders-none'"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(client: httpx.Client, fields: dict[str, Any], field: str, detail: str) -> None:
    refused = created(client, **{"name": "wrong", **fields}).json()
    assert refused["field"] == field
    assert detail in refused["detail"]
    assert call(client, "get", "wrong").json()["code"] == "schedule_not_found"


def test_a_name_is_taken_once(client: httpx.Client) -> None:
    created(client, "twice").raise_for_status()
    assert created(client, "twice").json()["code"] == "schedule_exists"
    assert call(client, "update", "twice").json()["code"] == "invalid_request"
    assert call(client, "update", "twice", cron="* * 99 * *").json()["field"] == "cron"
    assert call(client, "get", "twice").json()["cron"] == "@daily"
    call(client, "delete", "twice").raise_for_status()


def told(answer: httpx.Response, name: str) -> str:
    return answer.text.replace(answer.headers["x-request-id"], "").replace(name, "")


def test_a_schedule_of_another_queue_does_not_exist(server: Guarded, client: httpx.Client) -> None:
    for verb, fields in {"get": {}, "update": {"jitter": "1s"}, "pause": {}, "resume": {}, "run": {}, "delete": {}}.items():
        theirs, nobodys = call(client, verb, "theirs", **fields), call(client, verb, "nobodys", **fields)
        assert theirs.status_code == nobodys.status_code == 404
        known = [
            each.text.replace(each.headers["x-request-id"], "").replace(name, "")
            for each, name in ((theirs, "theirs"), (nobodys, "nobodys"))
        ]
        assert known[0] == known[1]
    assert "theirs" not in client.post("/v1/schedules.list", json={}).text
    assert client.post("/v1/schedules.list", json={"queue_name": OTHERS}).status_code == 403
    assert call(server.client("read:*"), "get", "theirs").json()["queue_name"] == OTHERS


def test_who_may_only_read_changes_nothing(server: Guarded) -> None:
    reader = server.client("read:*")
    assert created(reader).json()["code"] == "forbidden"
    assert call(reader, "pause", "theirs").json()["code"] == "schedule_not_found"


def test_pages(client: httpx.Client) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        created(client, name, paused=True).raise_for_status()
    found, pivot = [], None
    for _ in range(3):
        page = client.post("/v1/schedules.list", json={"limit": 2, "pivot": pivot}).json()
        found += [each["name"] for each in page["items"]]
        pivot = page["next"]
    assert (found, pivot) == (names, None)
    for name in names:
        call(client, "delete", name).raise_for_status()


def test_the_next_times_of_an_expression(client: httpx.Client) -> None:
    def ask(**fields: Any) -> Any:
        return client.post("/v1/schedules.next", json=fields).json()

    after = "2027-03-27T12:00:00Z"
    assert ask(cron="30 2 * * *", timezone="Europe/Berlin", after=after, count=2)["times"] == [
        "2027-03-28T01:00:00.000Z",
        "2027-03-29T00:30:00.000Z",
    ]
    assert len(ask(cron="* * * * *")["times"]) == 5
    assert ask(cron="x")["field"] == "cron"
    assert ask(cron="@daily", timezone="x")["field"] == "timezone"
    assert ask(cron="@daily", after="yesterday")["field"] == "after"
    for beyond in ("9999-12-31T23:59:00Z", "5000-01-01T00:00:00Z", "1969-12-31T23:59:59Z", "0001-01-01T00:00:00Z"):
        assert ask(cron="@daily", after=beyond)["field"] == "after"
    rare = ask(cron="0 0 29 2 */7", timezone="Pacific/Apia", after="4999-12-31T00:00:00Z", count=100)["times"]
    assert (len(rare), rare[-1] < "9000") == (100, True)


def test_rare_times_hold_up_nobody() -> None:
    """A hundred of the rarest took the event loop for a second."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def story() -> None:
        beside = asyncio.create_task(others())
        request = SimpleNamespace(body=b'{"cron": "0 0 29 2 */7", "count": 100}')
        await ScheduleCalls(cast(Service, None))._next(cast(Request, request))
        beside.cancel()

    asyncio.run(story())
    assert turns >= 100


def test_names_of_zones_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def names() -> set[str]:
        nonlocal looked
        looked += 1
        return {"Europe/Berlin"}

    monkeypatch.setattr(time_zones, "available_timezones", names)
    time_zones._names.cache_clear()
    for name in ("Europe/Berlim", "Europa/Berlin"):
        with pytest.raises(SluicewayError, match="did you mean Europe/Berlin"):
            time_zones.find_zone(name)
    time_zones._names.cache_clear()
    assert looked == 1


def test_a_time_is_fired_and_shown(server: Guarded, client: httpx.Client) -> None:
    """At the end of a real minute."""
    created(client, "real", cron="* * * * *").raise_for_status()
    item = client.post("/v1/queue.lease", json={"queue_name": OWN, "client_id": "c", "request_timeout": f"{PATIENCE:.0f}s"}).json()[
        "items"
    ][0]
    shown = call(client, "get", "real").json()
    assert shown["last_fired"]["id"] == item["id"]
    assert item["headers"] == {"schedule": "real", "scheduled_at": shown["last_fired"]["scheduled_at"]}
    call(client, "delete", "real").raise_for_status()


@pytest.mark.parametrize("verb", ["create", "pause"])
def test_a_change_that_is_made_is_not_refused_because_the_meta_store_goes_then(tmp_path: Path, verb: str) -> None:
    """An instance of a cluster reads how far the schedule has come, to show it. The change was answered *nothing was done*."""

    async def scenario() -> None:
        async with cluster(tmp_path, "a") as (_, (service,)):
            await service.create_queue(spec("q"))
            commit = service.meta.commit

            async def commit_last(*args: Any, **named: Any) -> int:
                stamp = await commit(*args, **named)
                if "schedule/s" in named.get("puts", ()):
                    patch.setattr(service.meta, "read", down)
                return stamp

            async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://localhost") as client:
                fields: dict[str, Any] = {"name": "s", "queue_name": "q", "cron": "@daily", "item": {"utf8": "x"}}
                if verb == "pause":
                    assert (await client.post("/v1/schedules.create", json=fields)).status_code == 200
                    fields = {"name": "s"}
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(service.meta, "commit", commit_last)
                    answer = await client.post(f"/v1/schedules.{verb}", json=fields)
                assert answer.status_code == 200, answer.text
                assert answer.json()["paused"] is (verb == "pause")

    asyncio.run(scenario())
