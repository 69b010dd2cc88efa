"""Who calls, and whom: keys, certificates, servers that ask to wait, and the calls of whoever runs a server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from sluiceway import testing
from sluiceway.client import AsyncClient, CallError, Client, SluicewayError, protocol
from sluiceway.client.protocol import Call, Repeats

KEY = "slw_k7f3q2ma_verysecret"
Kind = type[Client] | type[AsyncClient]


@pytest.fixture(params=[Client, AsyncClient])
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = request.param
    return made


def call(kind: Kind, use: Callable[[Any], Any], **options: Any) -> Any:
    if kind is Client:
        with Client(**options) as client:
            return use(client)

    async def main() -> Any:
        async with AsyncClient(**options) as client:
            answer = use(client)
            return await answer if inspect.isawaitable(answer) else answer

    return asyncio.run(main())


def scripted(*answers: httpx.Response) -> tuple[dict[str, Any], list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answers[len(seen) - 1]

    return {"transport": httpx.MockTransport(handler)}, seen


PAGE: dict[str, object] = {"items": []}


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [(None, None, None), (KEY, None, KEY), (None, KEY, KEY), (KEY, "slw_other_key", KEY), ("", KEY, None), (None, "", None)],
)
def test_a_key_is_sent_with_each_call(
    kind: Kind, given: str | None, environment: str | None, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("SLUICEWAY_API_KEY", environment)
    options, seen = scripted(httpx.Response(200, json=PAGE))
    call(kind, lambda client: client.list_queues(), api_key=given, **options)
    assert seen[0].headers.get("authorization") == (None if sent is None else f"Bearer {sent}")


def test_a_key_is_shown_nowhere(kind: Kind) -> None:
    options, _ = scripted(httpx.Response(401, json={"code": "unauthenticated", "detail": "who are you?", "retryable": False}))
    shown: list[str] = []

    def use(client: Any) -> Any:
        shown.extend([repr(client), str(client), repr(client.producer("q")), repr(client.consumer("q"))])
        return client.list_queues()

    with pytest.raises(CallError) as raised:
        call(kind, use, api_key=KEY, **options)
    shown += [repr(raised.value), str(raised.value), repr(raised.value.__dict__)]
    for bad in (f"{KEY} x", f"{KEY}\r\nevil: 1", f"{KEY}é"):
        with pytest.raises(SluicewayError) as refused:
            call(kind, lambda client: None, api_key=bad)
        assert refused.value.field == "api_key"
        shown.append(str(refused.value))
    assert not [text for text in shown if "verysecret" in text]


def test_a_new_key_is_in_the_answer_and_not_in_its_repr(kind: Kind) -> None:
    body = {"key_id": "k7f3q2ma", "key": KEY, "name": "shop", "scopes": ["admin"], "created_at": "2026-01-31T08:00:00Z", "expires_at": None}
    options, seen = scripted(httpx.Response(200, json=body))
    made = call(kind, lambda client: client.create_key("shop", ["admin"], expires_after="90d", requests_per_second=5), **options)
    assert (made.key, made.name, made.expires_at) == (KEY, "shop", None)
    assert "verysecret" not in f"{made!r} {made}"
    sent = msgspec.json.decode(seen[0].content)
    assert (seen[0].url.path, sent) == (
        "/v1/keys.create",
        {"name": "shop", "scopes": ["admin"], "expires_after": "90d", "requests_per_second": 5},
    )


def test_making_a_key_is_not_repeated_when_its_outcome_is_unknown(kind: Kind) -> None:
    options, seen = scripted(httpx.Response(504, json={"code": "outcome_unknown", "detail": "?", "retryable": True}))
    with pytest.raises(CallError):
        call(kind, lambda client: client.create_key("shop", ["admin"]), **options)
    assert len(seen) == 1


def test_the_calls_of_whoever_runs_a_server(kind: Kind) -> None:
    with testing.server() as server:
        url = {"url": server.url, "api_key": ""}
        made = call(kind, lambda client: client.create_key("shop", ["produce:orders-*", "admin"], bytes_per_second=0), **url)
        assert made.key.startswith(f"slw_{made.key_id}_")
        (listed,) = [each for each in call(kind, lambda client: client.list_keys(limit=1_000), **url).items if each.key_id == made.key_id]
        assert (listed.scopes, listed.bytes_per_second, listed.created_at) == (made.scopes, 0, made.created_at)
        assert call(kind, lambda client: client.revoke_key(made.key_id), **url) is None
        with pytest.raises(CallError) as raised:
            call(kind, lambda client: client.revoke_key("k7f3q2ma"), **url)
        assert raised.value.code == "key_not_found"

        server.client.create_queue("q")
        first, second = call(kind, lambda client: client.list_audit(limit=2), **url).items
        assert (first.queue_name, first.at >= second.at) == ("q", True)
        page = call(kind, lambda client: client.list_audit(limit=1), **url)
        assert call(kind, lambda client: client.list_audit(limit=1, pivot=page.next), **url).items == [second]
        assert call(kind, lambda client: client.list_audit(queue_name="other"), **url).items == []
        assert {each.action for each in call(kind, lambda client: client.list_audit(action=first.action), **url).items} == {first.action}

        own = call(kind, lambda client: client.own_key(), **url)
        assert (own.key_id, own.name, own.scopes) == (None, "anybody", ["produce:*", "consume:*", "read:*", "manage:*", "admin"])

        (backend,) = call(kind, lambda client: client.list_backends(), **url)
        assert "memory" in backend.values()
        assert "configuration" in call(kind, lambda client: client.show_config(), **url)
        assert call(kind, lambda client: client.reload_config(), **url).changed == []


# -- a server that asks to wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "retry_after"),
    [(None, None), ("0", 0), ("7", 7_000), ("-1", None), ("1.5", None), ("٣", None), ("9" * 30, None), ("soon", None)],
)
@pytest.mark.parametrize("body", [b'{"code":"rate_limited","retryable":true}', b"<html>"])
def test_what_a_server_asks_to_wait_is_understood(header: str | None, retry_after: int | None, body: bytes) -> None:
    assert protocol.read_problem(429, body, header).retry_after == retry_after


def test_a_call_is_not_repeated_before_the_server_wants_it() -> None:
    repeats = Repeats(Call("/", b"", bytes, True), retry_for=10, started=0)
    busy = CallError("rate_limited", "slow down", retry_after=3_000)
    first, second = repeats.pause(busy, 0, 0), repeats.pause(busy, first_at := 3.1, 1)
    assert 3 < first < second < 3.2
    with pytest.raises(CallError, match="slow down"):
        repeats.pause(busy, first_at + 4, 0)


def test_a_client_comes_back_after_the_time_it_was_told(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("sluiceway.client._sync.channel.time.sleep", pauses.append)
    monkeypatch.setattr("sluiceway.client._async.channel.asyncio.sleep", sleep)
    problem = {"code": "rate_limited", "detail": "slow down", "retryable": True}
    options, seen = scripted(httpx.Response(429, json=problem, headers={"Retry-After": "20"}), httpx.Response(200, json=PAGE))
    assert call(kind, lambda client: client.list_queues(), **options).items == []
    assert len(seen) == 2
    assert 20 < pauses[0] < 20.1


# -- certificates ---------------------------------------------------------------------------------------------------------


def test_a_file_of_certificates_that_is_none_is_named(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "not.pem").write_text("no certificate")
    for path in (tmp_path / "missing.pem", tmp_path / "not.pem"):
        with pytest.raises(SluicewayError, match=path.name) as raised:
            call(kind, lambda client: None, url="https://127.0.0.1:1", ca_file=path)
        assert raised.value.field == "ca_file"
