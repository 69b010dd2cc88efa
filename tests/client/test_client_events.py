"""The stream of events: cut into events, resumed where it broke, on a scripted transport and from a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway import testing
from sluiceway.client import AsyncClient, CallError, Client, Event
from sluiceway.client.events import MAX_EVENT, EventParser, EventReader
from sluiceway.client.http_exchange import EVENTS_TIMEOUT

STREAM = b'id: p-1\nevent: queue.created\ndata: {"queue_name":"a"}\n\n: still there\n\n'
STREAM += b'id: p-2\r\nevent: stats\r\ndata: {"a":\r\ndata: 1}\r\n\r\n'
EVENTS = [Event(id="p-1", type="queue.created", data={"queue_name": "a"}), Event(id="p-2", type="stats", data={"a": 1})]


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_a_stream_gives_the_same_events_wherever_it_is_cut(cuts: list[int]) -> None:
    parser, found = EventParser(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for begin, end in pairwise(edges):
        found += parser.feed(STREAM[begin:end])
    assert found == EVENTS
    assert parser.last_id == "p-2"


def test_a_field_that_nobody_knows_and_an_event_without_data_are_passed_over() -> None:
    assert EventParser().feed(b"retry: 3\nevent: empty\n\nfoo\nid: p-3\ndata:7\n\n") == [Event(id="p-3", type="message", data=7)]


def test_half_an_event_is_forgotten_when_the_connection_breaks() -> None:
    parser = EventParser()
    assert parser.feed(b"id: p-1\nevent: stats\ndata: {") == []
    parser.restart()
    assert parser.last_id is None
    assert parser.feed(b"data: 1\n\n") == [Event(id=None, type="message", data=1)]


@pytest.mark.parametrize(
    "stream", [b"data: {\n\n", b'data: "\xe6"\n\n', b"x" * (MAX_EVENT + 1), b"data: " + b"x" * MAX_EVENT + b"\ndata: x"]
)
def test_what_is_no_stream_of_events_is_an_error(stream: bytes) -> None:
    with pytest.raises(CallError, match="cannot be read"):
        EventParser().feed(stream)


class Parts(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body that comes in parts; an exception breaks it off."""

    def __init__(self, *parts: bytes | Exception) -> None:
        self._parts = parts

    def __iter__(self) -> Iterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


def sse(*parts: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=Parts(*parts))


def scripted(*steps: httpx.Response | Exception) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        step = steps[len(seen)]
        seen.append(request)
        if isinstance(step, Exception):
            raise step
        return step

    return httpx.MockTransport(answer), seen


Take = Callable[..., list[Event]]


def take_blocking(count: int, url: str = "http://127.0.0.1:1", *, client: dict[str, Any], **wanted: Any) -> list[Event]:
    with Client(url, **client) as made:
        events = made.events(**wanted)
        return [next(events) for _ in range(count)]


def take_async(count: int, url: str = "http://127.0.0.1:1", *, client: dict[str, Any], **wanted: Any) -> list[Event]:
    async def main() -> list[Event]:
        async with AsyncClient(url, **client) as made:
            events = made.events(**wanted)
            return [await anext(events) for _ in range(count)]

    return asyncio.run(main())


@pytest.fixture(params=[take_blocking, take_async], ids=["sync", "async"])
def take(request: pytest.FixtureRequest) -> Take:
    made: Take = request.param
    return made


def test_a_broken_stream_is_read_on_from_where_it_broke(take: Take) -> None:
    transport, seen = scripted(
        httpx.ConnectError("refused"),
        sse(STREAM[:80], httpx.ReadError("cut")),
        httpx.Response(503, json={"code": "unavailable", "detail": "stopping", "retryable": True}),
        sse(b'id: p-2\nevent: stats\ndata: {"a": 1}\n\n'),
        sse(b"id: p-3\ndata: 3\n\n"),
    )
    found = take(3, client={"transport": transport, "api_key": "slw_a_b"}, queue_name="a", types=["stats", "queue.created"])
    assert found == [*EVENTS, Event(id="p-3", type="message", data=3)]
    assert [request.headers.get("last-event-id") for request in seen] == [None, None, "p-1", "p-1", "p-2"]
    assert {(request.method, str(request.url.path)) for request in seen} == {("GET", "/v1/events")}
    assert dict(seen[0].url.params) == {"queue_name": "a", "types": "stats,queue.created"}
    assert {request.headers["authorization"] for request in seen} == {"Bearer slw_a_b"}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (httpx.Response(403, json={"code": "forbidden", "detail": "no", "retryable": False}), "forbidden"),
        (httpx.Response(200, text="<html>"), "outcome_unknown"),
    ],
)
def test_what_no_repetition_can_mend_is_raised(take: Take, answer: httpx.Response, code: str) -> None:
    transport, seen = scripted(answer)
    with pytest.raises(CallError) as raised:
        take(1, client={"transport": transport})
    assert (raised.value.code, len(seen)) == (code, 1)


def test_a_server_that_stays_away_is_given_up(take: Take) -> None:
    transport, _ = scripted(*[httpx.ConnectError("refused")] * 100)
    with pytest.raises(CallError) as raised:
        take(1, client={"transport": transport, "retry_for": "100ms"})
    assert raised.value.code == "unavailable"


def test_a_connection_that_breaks_in_silence_is_replaced() -> None:
    """It is found broken only when there was nothing for longer than a call is repeated; so is one whose reader was slow."""
    reader = EventReader(None, None, retry_for=30, now=0)
    timed_out = CallError("outcome_unknown", "timed out")
    assert reader.heard(STREAM) == EVENTS
    broken_at = 10 + EVENTS_TIMEOUT
    assert reader.pause(timed_out, broken_at, 0) > 0
    assert reader.pause(timed_out, broken_at + 29, 0) > 0
    with pytest.raises(CallError):
        reader.pause(timed_out, broken_at + 30, 0)


def test_a_server_sends_what_happens() -> None:
    async def main() -> None:
        with testing.server() as server:
            async with AsyncClient(server.url) as client:
                events = client.events(queue_name="q", types=["queue.created"])
                first = asyncio.ensure_future(anext(events))
                number = 0
                # Not before the stream is open is anything told, so it happens again until it is seen.
                while not first.done():
                    await client.create_queue("q")
                    await client.delete_queue("q")
                    number += 1
                event = await first
                assert event.type == "queue.created"
                assert isinstance(event.data, dict)
                assert event.data["queue_name"] == "q"
                await events.aclose()

    asyncio.run(main())
