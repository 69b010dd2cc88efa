"""Where one request ends and the next begins. Nothing in a body is ever a request, however the bytes arrive."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from uvicorn.server import ServerState

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server import run
from sluiceway.server.app import App, Fittings
from sluiceway.server.connections import Connection
from sluiceway.server.http import JSON, DisconnectedError, Request, Scope
from tests.server.fake_service import FakeService
from tests.server.server_process import PATIENCE
from tests.server.server_running import Running, running
from tests.server.test_connections import answered, rest

Seen = tuple[str, str, bytes]


def post(call: str, body: bytes, *headers: str, length: bool = True) -> bytes:
    lines = [f"POST /v1/{call} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, *[f"content-length: {len(body)}"] * length, "", ""]).encode("latin-1") + body


def get(*headers: str) -> bytes:
    return "\r\n".join(["GET /livez HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


HIDDEN = b"POST /v1/x HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
"""What must never be carried out: it stands in a body, or where one could be."""
NEXT = get()
THEN: Seen = ("GET", "/livez", b"")
STATS: Seen = ("POST", "/v1/queue.stats", HIDDEN)
CHUNKS = b"%x;name=value\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)
CHUNKED = "transfer-encoding: chunked"
OFFER = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABk")


class Attack(NamedTuple):
    name: str
    data: bytes
    served: list[Seen]
    """All that may be carried out of it, in order; where that is less than all, the connection ends."""
    ends: bool = False


def stats(*headers: str, body: bytes = HIDDEN, length: bool = True) -> bytes:
    return post("queue.stats", body, *headers, length=length)


def chunked(body: bytes, *headers: str) -> bytes:
    return stats(CHUNKED, *headers, body=body, length=False)


SERVED = [
    Attack("plain", stats() + NEXT, [STATS, THEN]),
    Attack("chunks", chunked(CHUNKS) + NEXT, [STATS, THEN]),
    Attack("offer of HTTP/2", stats(*OFFER) + NEXT, [STATS, THEN]),
    Attack(
        "offer after the length",
        post("queue.stats", HIDDEN)[: -len(HIDDEN) - 2] + b"connection: upgrade\r\nupgrade: x\r\n\r\n" + HIDDEN,
        [STATS],
    ),
    Attack("offer in chunks", chunked(CHUNKS, *OFFER) + NEXT, [STATS, THEN]),
    Attack("offers in a row", stats(*OFFER) + chunked(CHUNKS, *OFFER) + get(*OFFER) + NEXT, [STATS, STATS, THEN, THEN]),
    Attack("offer without a body", get("connection: upgrade", "upgrade: websocket", "sec-websocket-key: x") + NEXT, [THEN, THEN]),
    Attack("offer to TLS", stats("connection: upgrade", "upgrade: TLS/1.2") + NEXT, [STATS, THEN]),
    Attack("two offers", stats("connection: upgrade", "upgrade: h2c", "upgrade: websocket") + NEXT, [STATS, THEN]),
    Attack("offer that is the last", stats("connection: close, upgrade", "upgrade: h2c") + HIDDEN, [STATS], ends=True),
    Attack("offer of HTTP/1.0", stats("connection: upgrade", "upgrade: h2c").replace(b"/1.1", b"/1.0", 1) + HIDDEN, [STATS], ends=True),
    Attack("offer and expectation", stats(*OFFER, "expect: 100-continue") + NEXT, [STATS, THEN]),
    Attack("expectation", stats("expect: 100-continue") + NEXT, [STATS, THEN]),
    Attack("expectation in chunks", chunked(CHUNKS, "expect: 100-continue") + NEXT, [STATS, THEN]),
    Attack("upgrade as a trailer", chunked(CHUNKS[:-2] + b"upgrade: h2c\r\n\r\n", "connection: upgrade") + NEXT, [STATS, THEN]),
    Attack("last request", stats("connection: close") + HIDDEN, [STATS], ends=True),
    Attack(
        "body of a GET",
        b"GET /livez HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(HIDDEN), HIDDEN) + NEXT,
        [("GET", "/livez", HIDDEN), THEN],
    ),
]


REFUSED = [
    Attack(name, data + HIDDEN, [])
    for name, data in {
        "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN),
        "CONNECT to a path": stats().replace(b"POST", b"CONNECT", 1),
        "CONNECT with an offer": stats(*OFFER).replace(b"POST", b"CONNECT", 1),
        "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/2 in the first line": stats().replace(b"HTTP/1.1", b"HTTP/2.0", 1),
        "HTTP/0.9 in the first line": stats().replace(b"HTTP/1.1", b"HTTP/0.9", 1),
        "HTTP/0.9": b"GET /livez\r\n",
        "both lengths": chunked(CHUNKS, f"content-length: {len(CHUNKS)}"),
        "both lengths, the other way": stats(CHUNKED, body=CHUNKS),
        "both lengths and an offer": stats(CHUNKED, *OFFER, body=CHUNKS),
        "two lengths": stats("content-length: 5"),
        "the same length twice": stats(f"content-length: {len(HIDDEN)}"),
        "lengths in a list": stats(f"content-length: {len(HIDDEN)}, {len(HIDDEN)}", length=False),
        "length with a sign": stats(f"content-length: +{len(HIDDEN)}", length=False),
        "length in hexadecimal": stats("content-length: 0x5", length=False),
        "length that is too long": stats("content-length: 18446744073709551621", length=False),
        "no length": stats("content-length:", length=False),
        "space before the colon": stats(f"content-length : {len(HIDDEN)}", length=False),
        "length on a line that goes on": stats("x: y\r\n content-length: 0"),
        "length that goes on": stats(f"content-length: {len(HIDDEN)}\r\n\t0", length=False),
        "coding on the next line": stats("transfer-encoding:\r\n chunked", body=CHUNKS, length=False),
        "another coding": stats("transfer-encoding: gzip", body=CHUNKS, length=False),
        "two codings": stats("transfer-encoding: gzip, chunked", body=CHUNKS, length=False),
        "no coding and one": stats("transfer-encoding: identity", CHUNKED, body=CHUNKS, length=False),
        "chunked twice": stats(CHUNKED, CHUNKED, body=CHUNKS, length=False),
        "chunked and another": stats("transfer-encoding: chunked, identity", body=CHUNKS, length=False),
        "coding with a control": stats("transfer-encoding: \x0bchunked", body=CHUNKS, length=False),
        "coding of HTTP/1.0": chunked(CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        "coding and an offer of HTTP/1.0": chunked(CHUNKS, *OFFER).replace(b"HTTP/1.1", b"HTTP/1.0", 1),
        "LF after the first line": stats().replace(b"\r\n", b"\n", 1),
        "LF after a header": stats("x: y\ncontent-length: 0"),
        "LF after an offer": stats("connection: upgrade", "upgrade: h2c\nx: y"),
        "CR in a header": stats("x: y\rcontent-length: 0"),
        "LF before the body": stats("x: y\r\n\nz: y"),
        "NUL in a header": stats("x: \0"),
        "space before a header": b"POST /v1/queue.stats HTTP/1.1\r\n content-length: 5\r\n\r\nhello",
    }.items()
]
BROKEN = [
    Attack(name, chunked(body) + HIDDEN, [])
    for name, body in {
        "chunk with LF": b"5\nhello\n0\n\n",
        "extension with LF": b"5;a\nhello\r\n0\r\n\r\n",
        "extension without an end": b'5;a="b\r\nhello\r\n0\r\n\r\n',
        "chunk with a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
        "chunk with a space": b"5 \r\nhello\r\n0\r\n\r\n",
        "chunk with a sign": b"-5\r\nhello\r\n0\r\n\r\n",
        "chunk that is too large": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
        "chunk that is too short": b"4\r\nhello\r\n0\r\n\r\n",
        "chunk that is too long": b"6\r\nhello\r\n0\r\n\r\n",
        "length as a trailer": b"5\r\nhello\r\n0\r\ncontent-length: 99\r\n\r\n",
        "coding as a trailer": b"5\r\nhello\r\n0\r\ntransfer-encoding: chunked\r\n\r\n",
        "trailer with LF": b"5\r\nhello\r\n0\r\nx: y\n\r\n",
    }.items()
]


class Wire(asyncio.Transport):
    """What a connection writes to, without a network."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def write(self, data: Any) -> None:
        if not self.closed:
            self.written += data

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False


class Broken(Wire):
    """A connection that uvloop has closed, and has told nobody yet."""

    def write(self, data: Any) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")


class Recorder(App):
    """Reads the body of each request, and notes what it would have done."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__(cast(Service, FakeService()), Fittings())
        self.seen: list[Seen] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self._reads = reads

    async def _serve(self, scope: Scope, request: Request, sent: Any, task: asyncio.Task[Any] | None) -> None:
        try:
            if self._reads:
                await request.read_body()
        except (DisconnectedError, SluicewayError):
            return
        self.seen.append((scope["method"], scope["path"], bytes(request.body)))
        self.headers = list(scope["headers"])
        request.let_go()
        await sent.respond(200, JSON, b"{}", b"id")


class Bench:
    """Gives connections what arrives, in parts."""

    def __init__(self) -> None:
        self.app = Recorder()
        self._config = run.Server(self.app, lambda: None).config

    async def receive(self, parts: Sequence[bytes], pauses: bool, on: type[Wire] = Wire) -> Wire:
        """The connection's writes. With `pauses` everything that can be done after each part is done."""
        self.app.seen = []
        wire, state = on(), ServerState()
        connection = Connection(self._config, state, {}, asyncio.get_running_loop())
        connection.connection_made(wire)
        for part in parts:
            connection.data_received(part)
            if pauses:
                if connection._parts is not None:
                    connection._hand_over()
                await self._done(state)
        await self._done(state)
        connection.connection_lost(None)
        for _ in range(20):
            if not state.tasks:
                return wire
            await asyncio.sleep(0)
        raise AssertionError("a request is still being served")

    async def _done(self, state: ServerState) -> None:
        for _ in range(6):
            if not state.tasks:
                return
            await asyncio.sleep(0)


def splits(data: bytes) -> Iterator[list[bytes]]:
    """Whole, in two parts at every place, and byte by byte."""
    yield [data]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[at : at + 1] for at in range(len(data))]


CASES = [
    *(pytest.param(attack, True, id=attack.name) for attack in (*SERVED, *REFUSED, *BROKEN)),
    *(pytest.param(attack, False, id=f"{attack.name}, at once") for attack in (*SERVED, *BROKEN)),
]


@pytest.mark.parametrize(("attack", "pauses"), CASES)
def test_nothing_in_a_body_is_a_request(attack: Attack, pauses: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "uvicorn.error")
    bench = Bench()

    async def all_splits() -> None:
        for parts in splits(attack.data):
            wire = await bench.receive(parts, pauses)
            assert bench.app.seen == attack.served, parts
            if attack.ends or not attack.served:
                assert wire.closed, parts
            if not attack.served:
                assert wire.written.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")), parts
            else:
                assert wire.written.count(b"HTTP/1.1 200 ") == len(attack.served), parts

    asyncio.run(all_splits())


def receive(bench: Bench, *parts: bytes) -> Wire:
    return asyncio.run(bench.receive(parts, pauses=True))


def test_a_trailer_is_no_header_of_the_request() -> None:
    bench = Bench()
    receive(bench, chunked(b"0\r\nauthorization: Bearer x\r\nx-request-id: mine\r\n\r\n"))
    assert bench.app.seen == [("POST", "/v1/queue.stats", b"")]
    assert {name for name, _ in bench.app.headers} == {b"host", b"content-type", b"transfer-encoding"}


def test_an_offer_is_ignored_and_all_other_headers_are_kept() -> None:
    bench = Bench()
    receive(bench, stats(*OFFER, "authorization: Bearer x", "x-a:  b c \t", "x-a: d"))
    assert (b"authorization", b"Bearer x") in bench.app.headers
    assert [value.strip() for name, value in bench.app.headers if name == b"x-a"] == [b"b c", b"d"]
    assert b"upgrade" not in {name for name, _ in bench.app.headers}


def test_a_body_that_nobody_asked_for_ends_the_connection() -> None:
    """A client that has its answer first may leave its body out: what comes next would be taken for it, or it for what comes next."""
    bench = Bench()
    bench.app = Recorder(reads=False)
    bench._config = run.Server(bench.app, lambda: None).config
    expecting = stats("expect: 100-continue")
    wire = receive(bench, expecting[: -len(HIDDEN)], HIDDEN)
    assert (bench.app.seen, wire.closed) == ([("POST", "/v1/queue.stats", b"")], True)
    assert b"connection: close" in wire.written
    # All of it is there: the next request is where it says.
    wire = receive(bench, expecting + NEXT)
    assert len(bench.app.seen) == 2
    assert b"connection: close" not in wire.written


@pytest.mark.parametrize(
    "request_", [pytest.param(stats(), id="direct"), pytest.param(NEXT, id="uvicorn"), pytest.param(NEXT * 2, id="two")]
)
def test_an_answer_to_a_broken_connection_is_no_error(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    asyncio.run(bench.receive([request_], True, on=Broken))
    gc.collect()
    assert bench.app.seen[0] in (STATS, THEN)
    assert caplog.records == []


def test_the_reason_is_said() -> None:
    wire = receive(Bench(), stats(CHUNKED, body=CHUNKS))
    assert wire.written.endswith(b"the request is not valid HTTP: Content-Length can't be present with Transfer-Encoding")
    wire = receive(Bench(), b"CONNECT localhost:80 HTTP/1.1\r\n\r\n")
    assert wire.written.endswith(b"this server is not a proxy and does not support CONNECT")


# ---- over a network -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("framing")) as served:
        yield served


def test_a_produce_in_the_body_of_an_offer_is_not_carried_out(server: Running) -> None:
    """As it was found: the body comes in a second packet."""
    name = server.queue()
    hidden = post("queue.produce", json.dumps({"queue_name": name, "items": [{"utf8": "x"}]}).encode())
    asked = stats(*OFFER, "connection: close, upgrade", body=hidden)
    connection = server.raw(asked[: -len(hidden)])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(hidden)
    assert b'"code":"invalid_body"' in rest(connection)
    assert server.totals(name)["produced"] == 0


def test_calls_that_offer_http_2_are_served(server: Running) -> None:
    """As Java's HttpClient makes them, all on one connection."""
    name = server.queue()
    body = json.dumps({"queue_name": name, "items": [{"utf8": "x"}]}).encode()
    with server.raw(post("queue.produce", body, *OFFER)) as connection:
        for _ in range(2):
            assert answered(connection, b'"duplicates":[]}').startswith(b"HTTP/1.1 200 ")
            connection.sendall(post("queue.produce", body, *OFFER))
        answered(connection, b'"duplicates":[]}')
    assert server.totals(name)["produced"] == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_that_offers_http_2(server: Running, tmp_path: Path) -> None:
    name = server.queue()
    small = json.dumps({"queue_name": name, "items": [{"utf8": "x"}]})
    large = tmp_path / "large"
    large.write_text(json.dumps({"queue_name": name, "items": [{"utf8": "x" * (2 << 20)}]}))
    for body in (small, f"@{large}"):
        asked = ["curl", "-sS", "--http2", "-H", "content-type: application/json", "-d", body, f"{server.url}/v1/queue.produce"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE, check=True)
        assert json.loads(said.stdout)["count"] == 1
