"""Who is let in, and how fast."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluiceway.adapters import system
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.core.queue.token_bucket import Rates
from sluiceway.instance.api_keys import ApiKeys, keys_of
from sluiceway.kernel.errors import RateLimitedError, SluicewayError
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.model.access import Actor, KeySpec
from sluiceway.server import events, guard
from sluiceway.server.app import Fittings
from sluiceway.server.guard import KeyGuard, OpenDoor
from sluiceway.server.http import BodyMemory, Message, Request
from tests.server.server_guarded import ADMIN_KEY, Guarded, guarded
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually, running

BY = Actor("ada")


async def nothing() -> Message:
    raise AssertionError("the body was read")


def request(**headers: str) -> Request:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return Request({"headers": pairs, "query_string": b"", "client": ("192.0.2.7", 1)}, nothing, BodyMemory())


def bearer(text: str) -> Request:
    return request(authorization=f"Bearer {text}")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1_700_000_000_000]
    monkeypatch.setattr(system, "now", lambda: now[0])
    return now


class Made:
    """A guard over a store in memory."""

    def __init__(self, rates: Rates | None = None, admin_key: str = "") -> None:
        self.meta = MemoryMetaStore()
        self.keys = ApiKeys(self.meta, AuditTrail(self.meta), look_interval=0)
        self.guard = KeyGuard(self.keys, rates, admin_key)

    async def key(self, **fields: Any) -> str:
        return (await self.keys.create(KeySpec("etl", ["read:*"], **fields), BY)).text


# ---- a unit of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "  Bearer "])
def test_a_good_key_is_let_in(scheme: str) -> None:
    async def run() -> None:
        made = Made()
        text = await made.key()
        assert (await made.guard.admit(request(authorization=f"{scheme} {text} "))).name.startswith("etl/")

    asyncio.run(run())


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic c2x3X2E6Yg==", "slw_abcdefgh_1", "Bearer slw_abcdefgh_1", "Bearer \xff"]
)
def test_anything_else_is_not(header: str) -> None:
    async def run() -> None:
        made = Made(admin_key=ADMIN_KEY)
        await made.key()
        with pytest.raises(SluicewayError) as caught:
            await made.guard.admit(request(authorization=header) if header else request())
        assert caught.value.code == "unauthenticated"

    asyncio.run(run())


def test_the_admin_key_may_administer_and_nothing_else() -> None:
    async def run() -> None:
        caller = await Made(Rates(1, 1), ADMIN_KEY).guard.admit(bearer(ADMIN_KEY))
        assert caller.may("admin")
        assert not any(caller.may(action, "orders") for action in ("produce", "consume", "read", "manage"))
        with pytest.raises(SluicewayError):
            await Made().guard.admit(bearer(ADMIN_KEY))

    asyncio.run(run())


def test_an_admin_key_has_no_rate(clock: list[int]) -> None:
    async def run() -> None:
        made = Made(Rates(1, 1), ADMIN_KEY)
        for _ in range(50):
            made.guard.charge(await made.guard.admit(bearer(ADMIN_KEY)), 1 << 20)

    asyncio.run(run())


def test_a_guessable_admin_key_is_refused() -> None:
    with pytest.raises(SluicewayError, match="at least 32 random"):
        Made(admin_key="admin")


def test_requests_have_a_rate(clock: list[int]) -> None:
    async def run() -> None:
        made = Made(Rates(requests_per_second=5))
        text, other = await made.key(), await made.key()
        for _ in range(5):
            await made.guard.admit(bearer(text))
        with pytest.raises(RateLimitedError, match="may send 5 requests per second; wait 1 ms") as caught:
            await made.guard.admit(bearer(text))
        assert caught.value.retry_after == 1
        # Nobody else's business.
        await made.guard.admit(bearer(other))
        clock[0] += 1
        await made.guard.admit(bearer(text))
        with pytest.raises(RateLimitedError) as caught:
            await made.guard.admit(bearer(text))
        assert caught.value.retry_after == 200

    asyncio.run(run())


def test_bytes_have_a_rate_and_a_large_body_is_paid_for_afterwards(clock: list[int]) -> None:
    async def run() -> None:
        made = Made(Rates(bytes_per_second=1_000))
        text = await made.key()
        made.guard.charge(await made.guard.admit(bearer(text)), 11_000)
        with pytest.raises(RateLimitedError, match="may send 1,000 bytes per second") as caught:
            await made.guard.admit(bearer(text))
        assert caught.value.retry_after == 10_001
        clock[0] += 10_001
        await made.guard.admit(bearer(text))

    asyncio.run(run())


def test_a_key_may_have_rates_of_its_own(clock: list[int]) -> None:
    async def run() -> None:
        made = Made(Rates(requests_per_second=1))
        free, slow = await made.key(requests_per_second=0), await made.key(requests_per_second=2)
        for _ in range(100):
            await made.guard.admit(bearer(free))
        for _ in range(2):
            await made.guard.admit(bearer(slow))
        with pytest.raises(RateLimitedError):
            await made.guard.admit(bearer(slow))

    asyncio.run(run())


def test_rates_change_while_it_runs(clock: list[int]) -> None:
    async def run() -> None:
        made = Made()
        text = await made.key()
        for _ in range(100):
            await made.guard.admit(bearer(text))
        made.guard.configure(Rates(requests_per_second=1))
        await made.guard.admit(bearer(text))
        with pytest.raises(RateLimitedError):
            await made.guard.admit(bearer(text))
        made.guard.configure(Rates())
        await made.guard.admit(bearer(text))

    asyncio.run(run())


def test_its_memory_is_bounded(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_API_KEYS", 3)

    async def run() -> None:
        made = Made(Rates(1, 1))
        for _ in range(20):
            key, text = await made.keys.create(KeySpec("etl", ["read:*"]), BY)
            await made.guard.admit(bearer(text))
            await made.keys.revoke(key.key_id, BY)
        assert len(made.guard._requests) <= 3
        assert len(made.guard._bytes) <= 3

    asyncio.run(run())


def test_a_caller_is_checked_again(clock: list[int]) -> None:
    async def run() -> None:
        made = Made(Rates(1, 1), ADMIN_KEY)
        key, text = await made.keys.create(KeySpec("etl", ["read:*"]), BY)
        stream, admin = bearer(text), bearer(ADMIN_KEY)
        stream.caller, admin.caller = await made.guard.admit(stream), await made.guard.admit(admin)
        for _ in range(10):
            assert await made.guard.recheck(stream) == stream.caller
        await made.keys.revoke(key.key_id, BY)
        with pytest.raises(SluicewayError, match="has expired or was revoked") as caught:
            await made.guard.recheck(stream)
        assert caught.value.code == "unauthenticated"
        await made.guard.recheck(admin)

    asyncio.run(run())


def test_refusals_are_logged_without_the_key_and_not_one_by_one(clock: list[int], caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        made = Made()
        for text in ["slw_abcdefgh_5ec2e7", "hunter2-5ec2e7", "slw_5ec2e75ec2e7_1", "slw_5ec2e7\nx_1"] * 25:
            with pytest.raises(SluicewayError):
                await made.guard.admit(bearer(text))
        clock[0] += 1_000
        with pytest.raises(SluicewayError):
            await made.guard.admit(bearer("slw_abcdefgh_5ec2e7"))

    with caplog.at_level(logging.DEBUG, "sluiceway"):
        asyncio.run(run())
    first, second = caplog.messages
    assert "1 requests; the last one from 192.0.2.7, key id abcdefgh" in first
    assert "100 requests; the last one from 192.0.2.7, key id abcdefgh" in second
    assert "5ec2e7" not in caplog.text


@pytest.mark.parametrize(
    ("host", "let_in"),
    [
        *(("localhost", True), ("localhost:2319", True), ("LOCALHOST.", True), ("app.localhost:1", True), ("127.0.0.1:2319", True)),
        *(("127.1.2.3", True), ("[::1]:2319", True), ("[::1]", True), ("queue.example:2319", True), ("", True)),
        *(("evil.example", False), ("evil.example:2319", False), ("192.0.2.1", False), ("[2001:db8::1]:80", False), ("0.0.0.0", False)),
        *(("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("notlocalhost", False), ("[::1", False), ("\xff", False)),
    ],
)
def test_an_open_server_on_loopback_answers_to_its_own_names_only(host: str, let_in: bool) -> None:
    async def run() -> None:
        door = OpenDoor(["queue.example"])
        if let_in:
            assert (await door.admit(request(host=host))).may("admin")
            return
        with pytest.raises(SluicewayError, match="answers only to localhost") as caught:
            await door.admit(request(host=host))
        assert caught.value.code == "forbidden"
        assert (await OpenDoor().admit(request(host=host))).may("admin")

    asyncio.run(run())


# ---- in a server ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        yield served


def test_without_a_key_only_health_is_answered(server: Guarded) -> None:
    for endpoint in server.app.endpoints:
        answer = server.http.post(endpoint.path, json={})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), endpoint.path
        assert answer.headers["www-authenticate"] == 'Bearer realm="sluiceway"'
    public = [page.path for page in server.app.pages if page.action is None]
    for page in server.app.pages:
        assert (server.http.get(page.path).status_code == 401) == (page.path not in public)
    assert {"/livez", "/readyz"} <= set(public)


def test_the_body_of_a_stranger_is_not_read(server: Guarded) -> None:
    head = "POST /v1/queue.produce HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    with server.raw(head.encode()) as connection:
        answer = b""
        # It ends, although the body never came.
        while part := connection.recv(65_536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


def test_a_key_made_over_http_works_until_it_is_revoked(server: Guarded) -> None:
    made = server.admin.post("/v1/keys.create", json={"name": "etl", "scopes": ["manage:*", "read:*"], "expires_after": "1h"}).json()
    assert set(made) == {"key_id", "key", "name", "scopes", "created_at", "expires_at", "requests_per_second", "bytes_per_second"}
    client = server.with_key(made["key"])
    assert client.post("/v1/queues.list", json={}).status_code == 200
    listed = server.admin.post("/v1/keys.list", json={"limit": 1_000}).json()["items"]
    assert {name: value for name, value in made.items() if name != "key"} in listed
    assert made["key"].split("_")[2] not in str(listed)
    assert server.admin.post("/v1/keys.revoke", json={"key_id": made["key_id"]}).json() == {}
    answer = client.post("/v1/queues.list", json={})
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    again = server.admin.post("/v1/keys.revoke", json={"key_id": made["key_id"]})
    assert (again.status_code, again.json()["code"]) == (404, "key_not_found")


def test_keys_are_listed_page_by_page(server: Guarded) -> None:
    for _ in range(5):
        server.key("read:*")
    pages, pivot = [], None
    while True:
        page = server.admin.post("/v1/keys.list", json={"limit": 2, "pivot": pivot}).json()
        pages.append([item["key_id"] for item in page["items"]])
        pivot = page["next"]
        if pivot is None:
            break
    ids = [key_id for page in pages for key_id in page]
    assert ids == sorted(set(ids))
    assert ids == [item["key_id"] for item in server.admin.post("/v1/keys.list", json={"limit": 1_000}).json()["items"]]
    assert all(len(page) == 2 for page in pages[:-1])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"scopes": ["produce"]}, "scopes[0]"),
        ({"scopes": []}, "scopes"),
        ({"expires_after": "0s"}, "expires_after"),
        ({"expires_after": "4000d"}, "expires_after"),
        ({"requests_per_second": -1}, "requests_per_second"),
        ({"rate": 1}, "rate"),
    ],
)
def test_a_key_that_cannot_be(server: Guarded, fields: dict[str, object], field: str) -> None:
    answer = server.admin.post("/v1/keys.create", json={"name": "etl", "scopes": ["read:*"], **fields})
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_who_changed_something_is_in_the_audit_trail(server: Guarded) -> None:
    made = server.admin.post("/v1/keys.create", json={"name": "etl", "scopes": ["manage:*"]}).json()
    server.with_key(made["key"]).post("/v1/queues.create", json={"queue_name": "audited"}).raise_for_status()
    entries = server.admin.post("/v1/audit.list", json={"limit": 2}).json()["items"]
    assert [(entry["action"], entry["actor"]) for entry in entries] == [
        ("queues.create", f"etl/{made['key_id']}"),
        ("keys.create", "admin"),
    ]


def test_a_rate_is_a_429_that_says_when_to_come_back(server: Guarded) -> None:
    client = server.client("read:*", bytes_per_second=1)
    assert client.post("/v1/queues.list", json={"limit": 1}).status_code == 200
    answer = client.post("/v1/queues.list", json={"limit": 1})
    assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (429, "rate_limited", True)
    assert 1 <= int(answer.headers["retry-after"]) <= len('{"limit": 1}')


def test_another_process_revokes(tmp_path: Path) -> None:
    with guarded(tmp_path) as server:
        text = server.key("read:*")
        client = server.with_key(text)
        assert client.post("/v1/queues.list", json={}).status_code == 200

        async def revoke() -> None:
            # The path of a process that has nothing to do with the server but the data folder.
            async with keys_of(tmp_path) as keys:
                await keys.revoke(text.split("_")[1], BY)

        asyncio.run(revoke())
        eventually(lambda: client.post("/v1/queues.list", json={}).status_code == 401, PATIENCE)


def test_a_page_in_a_browser_cannot_reach_an_open_server(tmp_path: Path) -> None:
    with running(tmp_path, lambda _: Fittings(OpenDoor([]))) as server:
        name = server.queue()
        for call in ("queues.list", "queue.stats"):
            answer = server.http.post(f"/v1/{call}", json={"queue_name": name}, headers={"host": "evil.example"})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert name not in answer.text
        assert server.post("queue.stats", queue_name=name).status_code == 200


def test_a_body_that_breaks_off_counts_towards_the_rate(server: Guarded) -> None:
    text = server.key("read:*", bytes_per_second=1_000)
    head = f"POST /v1/queues.list HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {text}\r\n"
    connection = server.raw(head.encode() + b"content-length: 1000000\r\n\r\n" + b"{" + b" " * 500_000)
    connection.close()
    client = server.with_key(text)
    eventually(lambda: client.post("/v1/queues.list", json={}).status_code == 429)


def test_one_key_does_not_take_all_streams_of_events(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_KEY_STREAMS", 1)
    one, other = server.client("read:*"), server.client("read:*")
    with one.stream("GET", "/v1/events") as first:
        assert first.status_code == 200
        refused = one.get("/v1/events")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        with other.stream("GET", "/v1/events") as second:
            assert second.status_code == 200

    def again() -> bool:
        with one.stream("GET", "/v1/events") as third:
            return third.status_code == 200

    eventually(again)
