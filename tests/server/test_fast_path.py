"""Calls that come whole take the direct path, all others uvicorn's; nobody can tell from the answers."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from sluiceway.model.access import Caller
from sluiceway.model.requests import Produced
from sluiceway.server import connections, run
from sluiceway.server.app import App, Fittings
from sluiceway.server.guard import OpenDoor
from sluiceway.server.http import Receive, Request, Scope, Send
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually, running
from tests.server.test_connections import rest

BODY = b'{"queue_name":"q","items":[{"utf8":"x"}]}'
JSON = b"content-type: application/json\r\n"
ARROW = b"content-type: application/vnd.apache.arrow.stream\r\n"
MADE = Produced(0, 5, 1, False)
GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


def items() -> bytes:
    """Two, as a stream."""
    batch = pa.record_batch({"payload": pa.array([b"x", b"y"])})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


class Ways:
    """Which way each request went, in order."""

    def __init__(self) -> None:
        self.taken: list[str] = []


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Bodies are waited for as long as it takes, so that which way a request goes depends on what is sent only."""
    found = Ways()
    answer, call = App.answer, App.__call__

    async def direct(self: App, exchange: Any) -> None:
        found.taken.append("direct")
        await answer(self, exchange)

    async def asgi(self: App, scope: Scope, receive: Receive, send: Send) -> None:
        found.taken.append("asgi")
        await call(self, scope, receive, send)

    monkeypatch.setattr(App, "answer", direct)
    monkeypatch.setattr(App, "__call__", asgi)
    monkeypatch.setattr(connections, "_TOGETHER", PATIENCE)
    monkeypatch.setattr(run, "_LINGER", 0)
    return found


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def url(service: FakeService, ways: Ways) -> Iterator[str]:
    with serving(service) as url:
        yield url


def post(body: bytes = BODY, headers: bytes = JSON, call: bytes = b"queue.produce", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"POST /v1/%b HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n%b" % (call, headers, size, body)


def connect(url: str) -> socket.socket:
    address = httpx.URL(url)
    return socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)


def one(connection: socket.socket) -> bytes:
    """The next answer, which has a length."""
    found = b""
    while b"\r\n\r\n" not in found:
        part = connection.recv(1)
        assert part, found
        found += part
    length = int(re.search(rb"content-length: (\d+)", found)[1])  # type: ignore[index]
    while length:
        part = connection.recv(length)
        assert part, found
        found, length = found + part, length - len(part)
    return found


def alike(answer: bytes) -> bytes:
    """Without what no two answers share."""
    return re.sub(rb"date: [^\r]*|[a-z0-9]{8}-[0-9]+", b"", answer)


def produced(service: FakeService, times: int = 1) -> None:
    service.script = [MADE] * times


def test_a_whole_call_is_direct_and_so_is_one_whose_body_follows(url: str, service: FakeService, ways: Ways) -> None:
    produced(service, 2)
    with connect(url) as connection:
        connection.sendall(post())
        together = one(connection)
        connection.sendall(post()[: -len(BODY)])
        connection.sendall(BODY[:5])
        connection.sendall(BODY[5:])
        assert alike(one(connection)) == alike(together)
    assert together.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert ways.taken == ["direct", "direct"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(),
        post(headers=JSON + b"x-request-id: mine\r\n"),
        post(headers=JSON + b"connection: close\r\n"),
        post(headers=JSON + b"connection: upgrade\r\nupgrade: h2c\r\n"),
        post(headers=JSON + b"accept: application/vnd.apache.arrow.stream\r\n"),
        post(b"{"),
        post(BODY.replace(b'"q"', b'"other"')),
        post(BODY.replace(b"utf8", b"utf9")),
        post(headers=b""),
        post(headers=b"content-type: text/plain\r\n"),
        post(headers=JSON + b"content-encoding: gzip\r\n"),
        post(b"\x00\xff", headers=b"content-type: application/protobuf\r\n"),
        post(b"\x00\xff", headers=ARROW, call=b"queue.produce?queue_name=q&x=%20y"),
        post(items(), headers=ARROW, call=b"queue.produce?queue_name=q"),
        post(items(), headers=ARROW, call=b"queue.produce?queue_name=q&"),
        post(items(), headers=ARROW, call=b"queue.produce?"),
        post(call=b"queue.produce?queue_name=q"),
    ],
)
def test_both_ways_answer_alike(url: str, service: FakeService, ways: Ways, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes) -> None:
    produced(service)
    with connect(url) as connection:
        connection.sendall(request_bytes)
        direct = one(connection)
        assert ends(connection) == (b"connection: close" in direct)
    produced(service)
    # As if nothing had come of the body in time.
    monkeypatch.setattr(connections, "_TOGETHER", 0)
    at = request_bytes.index(b"\r\n\r\n") + 4
    before = len(ways.taken)
    with connect(url) as connection:
        connection.sendall(request_bytes[:at])
        eventually(lambda: len(ways.taken) > before)
        connection.sendall(request_bytes[at:])
        assert alike(one(connection)) == alike(direct)
    assert (ways.taken[0], ways.taken[before]) == ("direct", "asgi")


def ends(connection: socket.socket) -> bool:
    try:
        connection.sendall(GET)
        return not connection.recv(1)
    except ConnectionError:
        return True


CHUNKED = (
    post(headers=JSON + b"transfer-encoding: chunked\r\n")
    .replace(b"content-length: 41\r\n", b"")
    .replace(BODY, b"29\r\n" + BODY + b"\r\n0\r\n\r\n")
)


@pytest.mark.parametrize(
    "request_bytes",
    [
        CHUNKED,
        post().replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(call=b"queue.produce?x=1#y"),
        post(call=b"queue%2Eproduce"),
        post(BODY.replace(b"x", b"x" * 70_000)),
        post().replace(b"POST", b"PUT"),
    ],
)
def test_all_else_is_not_direct(url: str, service: FakeService, ways: Ways, request_bytes: bytes) -> None:
    produced(service)
    with connect(url) as connection:
        connection.sendall(request_bytes)
        assert one(connection).startswith(b"HTTP/1.1 ")
    assert ways.taken == ["asgi"]


def test_one_that_waits_to_be_told_to_go_on_is_not_direct(url: str, service: FakeService, ways: Ways) -> None:
    produced(service)
    with connect(url) as connection:
        connection.sendall(post(headers=JSON + b"expect: 100-continue\r\n")[: -len(BODY)])
        told = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.recv(len(told), socket.MSG_WAITALL) == told
        connection.sendall(BODY)
        assert one(connection).startswith(b"HTTP/1.1 200 ")
    assert ways.taken == ["asgi"]


def test_what_comes_before_its_turn_is_answered_in_its_turn(url: str, service: FakeService, ways: Ways) -> None:
    produced(service, 4)
    numbered = [post(headers=JSON + b"x-request-id: n-%d\r\n" % number) for number in range(3)]
    with connect(url) as connection:
        connection.sendall(numbered[0] + GET + numbered[1] + numbered[2])
        answers = [one(connection) for _ in range(4)]
        assert b'{"alive":true}' in answers[1]
        assert all(b"x-request-id: n-%d\r\n" % number in answers[at] for number, at in enumerate((0, 2, 3)))
        connection.sendall(post())
        assert one(connection).startswith(b"HTTP/1.1 200 ")
    assert ways.taken == ["direct", "asgi", "asgi", "asgi", "direct"]


class SlowService(FakeService):
    """A produce has begun, and does not end before it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    async def produce(self, queue_name: str, request: Any) -> Produced:
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize(("request_bytes", "way"), [(post(), "direct"), (CHUNKED, "asgi")])
def test_what_is_wrong_behind_an_unanswered_call_is_not_answered_in_its_place(
    ways: Ways, monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, way: str
) -> None:
    monkeypatch.setattr(run, "_PATIENT", 0)
    service = SlowService()
    with serving(service) as url:
        connection = connect(url)
        connection.sendall(request_bytes)
        assert service.begun.wait(PATIENCE)
        connection.sendall(b"\0\0 is no request\r\n\r\n")
        assert rest(connection) == b""
    assert ways.taken == [way]


def test_what_is_given_up_is_told_that_it_may_have_happened(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PATIENT", 0)
    service = SlowService()
    with serving(service) as url:
        connection = connect(url)
        connection.sendall(post())
        assert service.begun.wait(PATIENCE)
    answer = rest(connection)
    assert b'"code":"outcome_unknown"' in answer
    assert b"connection: close\r\n" in answer
    assert ways.taken == ["direct"]


def test_a_stop_does_not_drop_a_call_whose_body_is_on_its_way(tmp_path: Path, ways: Ways) -> None:
    with running(tmp_path) as server:
        name = server.queue()
        asked = post(BODY.replace(b'"q"', b'"%b"' % name.encode()))
        connection = server.raw(asked[:-5])
        eventually(lambda: any(each._parts for each in list(server._server.server_state.connections)))  # type: ignore[union-attr]
        server.stop()
        eventually(lambda: "asgi" in ways.taken)
        connection.sendall(asked[-5:])
        answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in answer


def test_a_connection_that_has_nothing_to_say_is_closed_and_one_that_waits_is_not(tmp_path: Path, ways: Ways) -> None:
    with running(tmp_path) as server:
        name = server.queue()
        server._server.config.timeout_keep_alive = 0
        waiting = server.raw_post("queue.lease", queue_name=name, client_id="c", request_timeout="15m")
        eventually(lambda: server.waiting(name) == 1)
        assert rest(server.raw_post("queue.stats", queue_name=name)).startswith(b"HTTP/1.1 200 ")
        server.produce(name, "x")
        assert b'"bytes":"eA=="' in rest(waiting)


def test_a_busy_connection_outlives_the_time_of_an_idle_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request is sent once the look at the connection, which the one before had made due, has been."""
    looked = threading.Semaphore(0)
    look = connections.Connection._look_at_idling

    def noted(self: connections.Connection) -> None:
        look(self)
        looked.release()

    monkeypatch.setattr(connections.Connection, "_look_at_idling", noted)
    with running(tmp_path) as server:
        name = server.queue()
        waits = server.raw_post("queue.lease", queue_name=name, client_id="c", request_timeout="15m")
        eventually(lambda: server.waiting(name) == 1)
        (one_that_waits,) = [each for each in server._server.server_state.connections if each._direct is not None]  # type: ignore[union-attr]
        one_that_waits.loop.call_soon_threadsafe(one_that_waits._look_at_idling)  # type: ignore[union-attr]
        assert looked.acquire(timeout=PATIENCE)
        server.produce(name, "x")
        assert b'"bytes":"eA=="' in one(waits)
        one_that_waits.loop.call_soon_threadsafe(one_that_waits._look_at_idling)  # type: ignore[union-attr]
        assert looked.acquire(timeout=PATIENCE)
        waits.sendall(GET)
        assert b'{"alive":true}' in one(waits)
        waits.close()


def test_a_client_that_has_gone_before_its_lease_waits_takes_nothing(tmp_path: Path, ways: Ways) -> None:
    arrived, gone = threading.Event(), threading.Event()

    class Late(OpenDoor):
        async def admit(self, request: Request) -> Caller:
            if request.authorization:
                arrived.set()
                await asyncio.to_thread(gone.wait)
            return await super().admit(request)

    with running(tmp_path, lambda _: Fittings(Late())) as server:
        name = server.queue()
        before = set(server._server.server_state.connections)
        body = b'{"queue_name":"%b","client_id":"c","request_timeout":"15m"}' % name.encode()
        with server.raw(post(body, JSON + b"authorization: Bearer x\r\n", b"queue.lease")):
            assert arrived.wait(PATIENCE)
        eventually(lambda: not server._server.server_state.connections - before)
        gone.set()
        eventually(lambda: not server._server.server_state.tasks)
        assert ways.taken[-1] == "direct"
        server.produce(name, "x")
        assert len(server.lease(name)["items"]) == 1


def test_an_answer_cannot_get_another_header(service: FakeService, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.instances, "elsewhere", lambda *_: "http://i-1\r\nx-evil: 1")
    with serving(service) as url:
        connection = connect(url)
        body = b'{"queue_name":"q","lease_ids":["k7f3q2ma.0.L1"]}'
        connection.sendall(post(body, JSON + b"x-sluiceway-redirect: 1\r\n", b"queue.complete"))
        assert rest(connection) == b""
    assert ways.taken == ["direct"]
