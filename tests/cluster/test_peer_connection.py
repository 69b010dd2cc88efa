"""The connections over which one instance asks another: what is known when no answer comes, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from sluiceway.cluster import peer_connection, peer_http
from sluiceway.cluster.peer_http import HttpTransport
from sluiceway.model.peers import Ask, Learn, PeerRequest, Poll, Polled
from sluiceway.model.requests import Lease, Produce
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer
from tests.cluster import peer_rig
from tests.cluster.peer_rig import LEARNT, LONG, ROWS, SECRET, Instance, Raw, announce, ask, run
from tests.server.server_guarded import certified
from tests.server.server_process import PATIENCE, closed_port
from tests.server.server_running import eventually


@pytest.fixture(autouse=True, params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def _loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Event loops differ in what they notice, when, and how they say it."""
    monkeypatch.setattr(peer_rig, "new_loop", request.param)


@pytest.fixture
def instance() -> Iterator[Instance]:
    with Instance().serving() as running:
        yield running


def test_over_tls_the_peer_is_known_by_its_certificate(tmp_path: Path) -> None:
    tls, ca_file = certified(tmp_path / "one")
    _, stranger = certified(tmp_path / "other")
    with Instance(lambda _: True).serving(tls) as instance:
        assert instance.url.startswith("https://")
        assert ask(instance.url, Learn(5), ca_file=Path(ca_file)) is True
        with pytest.raises(PeerRefusedError, match="certificate"):
            ask(instance.url, Learn(5), ca_file=Path(stranger))
        with pytest.raises(PeerRefusedError, match="certificate"):
            ask(instance.url, Learn(5))
    assert len(instance.asked) == 1
    with pytest.raises(FileNotFoundError):
        HttpTransport(SECRET, tmp_path / "none.pem")


# ---- who does not wait any more -------------------------------------------------------------------------------------


def test_a_time_out_leaves_it_unknown_and_ends_the_work(instance: Instance) -> None:
    instance.reply = lambda _: True

    async def wait(transport: HttpTransport) -> None:
        # So that there is a connection: to get one has a time-out of its own.
        assert await transport.ask(instance.url, Learn(5), LONG) is True
        instance.began.clear()
        instance.reply = None
        with pytest.raises(PeerUnknownError, match="did not answer within 300ms"):
            await transport.ask(instance.url, Ask("k7f3q2ma", Lease("c", 1, 5_000)), 300)

    run(wait)
    assert not instance.began.is_set() or instance.given_up.wait(PATIENCE)


@pytest.mark.parametrize("request_", [Ask("k7f3q2ma", Lease("c", 1, 5_000)), Ask("k7f3q2ma", Produce(ROWS, 5_000)), Poll((), 5_000)])
def test_a_caller_that_is_cancelled_ends_the_work(instance: Instance, request_: PeerRequest) -> None:
    async def give_up(transport: HttpTransport) -> None:
        call = asyncio.ensure_future(transport.ask(instance.url, request_, LONG))
        assert await asyncio.to_thread(instance.began.wait, PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(instance.given_up.wait, PATIENCE)

    run(give_up)
    eventually(lambda: instance.statuses == [(peer.PATH, 0)])


# ---- what is known when no answer comes -----------------------------------------------------------------------------


def test_who_cannot_be_reached_surely_did_nothing() -> None:
    with closed_port() as port, pytest.raises(PeerRefusedError, match="cannot reach"):
        ask(f"http://127.0.0.1:{port}", Learn(5))
    for address in ("ftp://127.0.0.1", "127.0.0.1:5", "", "http://[::"):
        with pytest.raises(PeerRefusedError):
            ask(address, Learn(5))


def test_a_peer_that_takes_no_connection_surely_did_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_http, "_CONNECT_TIMEOUT", 50)
    with ExitStack() as open_, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        # What is beyond the backlog is left without an answer.
        for _ in range(4):
            connection = open_.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(address)
        with pytest.raises(PeerRefusedError, match="cannot reach"):
            ask(f"http://127.0.0.1:{address[1]}", Learn(5))


def said(body: bytes, status: int = 200, content_type: str = peer.CONTENT_TYPE, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n".encode() + body


RESET = struct.pack("ii", 1, 0)


def close_unread(raw: Raw, connection: socket.socket) -> None:
    connection.recv(1)


def reset_unread(raw: Raw, connection: socket.socket) -> None:
    connection.recv(1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def close_after_reading(raw: Raw, connection: socket.socket) -> None:
    raw.read(connection)


def answering(data: bytes) -> Callable[[Raw, socket.socket], None]:
    def act(raw: Raw, connection: socket.socket) -> None:
        raw.read(connection)
        connection.sendall(data)

    return act


BROKEN = {
    "closed unread": close_unread,
    "reset unread": reset_unread,
    "closed after reading": close_after_reading,
    "cut off": answering(said(LEARNT, length=len(LEARNT) + 1)),
    "half a head": answering(b"HTTP/1.1 200 OK\r\ncontent-"),
    "not http": answering(b"no such thing\r\n\r\n"),
    "damaged": answering(said(LEARNT[:-1])),
    "to something else": answering(said(peer.encode_answer(Poll((), 0), Polled()))),
    "a page": answering(said(b"<html>", 200, "text/html")),
    "a gateway": answering(said(b"<html>", 502, "text/html")),
    "a gateway in json": answering(said(b'{"code": "queue_not_found"}', 502, "application/json")),
    "not an error": answering(said(LEARNT, 503)),
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=list(BROKEN))
def test_what_was_sent_and_not_answered_is_unknown(act: Callable[[Raw, socket.socket], None]) -> None:
    with Raw(act) as raw, pytest.raises(PeerUnknownError, match=raw.url):
        ask(raw.url, Learn(5))


def test_an_answer_that_is_too_large_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "MAX_ANSWERS_BYTES", 10)
    with Raw(answering(said(bytes(1_000)))) as raw, pytest.raises(PeerUnknownError, match="larger than 10 bytes"):
        ask(raw.url, Learn(5))


def test_a_connection_that_the_peer_closed_meanwhile_is_not_used() -> None:
    """Nothing was sent on it, so the call goes over another one."""
    closed = threading.Event()

    def answer_and_close(raw: Raw, connection: socket.socket) -> None:
        answering(said(LEARNT))(raw, connection)
        connection.close()
        closed.set()

    async def twice(transport: HttpTransport) -> list[Any]:
        first = await transport.ask(raw.url, Learn(5), LONG)
        # The event loop has no time to notice.
        assert closed.wait(PATIENCE)
        return [first, await transport.ask(raw.url, Learn(5), LONG)]

    with Raw(answer_and_close, answering(said(LEARNT))) as raw:
        assert run(twice) == [True, True]
    assert raw.requests == 2


def test_a_connection_that_the_peer_closes_on_the_second_request_leaves_that_unknown() -> None:
    """The peer may have carried it out: it is not sent again."""

    def answer_once(raw: Raw, connection: socket.socket) -> None:
        answering(said(LEARNT))(raw, connection)
        raw.read(connection)

    async def twice(transport: HttpTransport) -> None:
        assert await transport.ask(raw.url, Learn(5), LONG) is True
        with pytest.raises(PeerUnknownError):
            await transport.ask(raw.url, Learn(5), LONG)

    with Raw(answer_once) as raw:
        run(twice)
    assert raw.requests == 2


# ---- a peer that dies in that moment --------------------------------------------------------------------------------


Connecting = Callable[..., Coroutine[Any, Any, tuple[asyncio.Transport, asyncio.Protocol]]]


def connecting(monkeypatch: pytest.MonkeyPatch, replaced: Callable[[Connecting], Connecting]) -> None:
    """Have `loop.create_connection` replaced on both loops."""
    for loop in (asyncio.BaseEventLoop, uvloop.Loop):
        original: Any = loop.create_connection
        monkeypatch.setattr(loop, "create_connection", replaced(original))


@pytest.mark.parametrize(
    "error", [AttributeError("'NoneType' object has no attribute 'getpeername'"), RuntimeError("closed"), ValueError()]
)
def test_whatever_goes_wrong_before_the_request_is_written_surely_did_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def replaced(_: Connecting) -> Connecting:
        async def fail(*_: object, **__: object) -> tuple[asyncio.Transport, asyncio.Protocol]:
            raise error

        return fail

    connecting(monkeypatch, replaced)
    with closed_port() as port, pytest.raises(PeerRefusedError, match=f"cannot reach http://127.0.0.1:{port}: ."):
        ask(f"http://127.0.0.1:{port}", Learn(5))


def reset_at_once(raw: Raw, connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.parametrize("act", [reset_at_once, lambda _, connection: None], ids=["reset", "closed"])
def test_a_connection_that_ends_before_the_request_is_written_is_not_used(
    act: Callable[[Raw, socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(original: Connecting) -> Connecting:
        async def late(*arguments: object, **options: object) -> tuple[asyncio.Transport, asyncio.Protocol]:
            made = await original(*arguments, **options)
            await asyncio.to_thread(eventually, made[0].is_closing)
            return made

        return late

    connecting(monkeypatch, replaced)
    with Raw(act) as raw, pytest.raises(PeerRefusedError, match="cannot reach"):
        ask(raw.url, Learn(5))


def test_a_peer_that_dies_while_many_connect_leaves_each_call_refused_or_unknown() -> None:
    """As it came about: under uvloop some of them ended with an error of another kind."""

    async def all_of(transport: HttpTransport) -> list[Any]:
        calls = [transport.ask(raw.url, Learn(5), LONG) for _ in range(50)]
        return await asyncio.gather(*calls, return_exceptions=True)

    with Raw(*[reset_at_once, close_unread] * 25) as raw:
        ends = run(all_of)
    assert {type(end) for end in ends} <= {PeerRefusedError, PeerUnknownError}


# ---- which connection a call takes ----------------------------------------------------------------------------------


class Peer:
    """Answers each request with `data`, and then closes the connection or not; `last` is the number of the connection that it came by.

    Answers wait while `release` is not set.
    """

    def __init__(self, data: bytes, closes: bool = False) -> None:
        self.data = data
        self.closes = closes
        self.opened = 0
        self.last = 0
        self.ended: list[int] = []
        self.arrived = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        self.release.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        number = self.opened
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.rpartition(b"Content-Length: ")[2].split(b"\r")[0]))
                self.last = number
                self.arrived.release()
                await self.release.wait()
                writer.write(self.data)
                if self.closes:
                    break
        self.ended.append(number)
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """In this event loop; the URL."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def has_ended(self, *numbers: int) -> None:
        await asyncio.to_thread(eventually, lambda: sorted(self.ended) == sorted(numbers))


def test_calls_take_the_connection_that_was_used_last_and_open_one_only_if_all_are_in_use() -> None:
    async def life(transport: HttpTransport) -> None:
        peer_ = Peer(said(LEARNT))
        async with peer_.serving() as url:
            peer_.release.clear()
            calls = [asyncio.ensure_future(transport.ask(url, Learn(5), LONG)) for _ in range(3)]
            for _ in calls:
                await peer_.arrived.acquire()
            peer_.release.set()
            assert await asyncio.gather(*calls) == [True] * 3
            await transport.ask(url, Learn(5), LONG)
            used = peer_.last
            for _ in range(5):
                await transport.ask(url, Learn(5), LONG)
                assert peer_.last == used
            assert (peer_.opened, peer_.ended) == (3, [])
            await transport.close()
            await peer_.has_ended(1, 2, 3)

    run(life)


def test_a_connection_without_work_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_connection, "IDLE_TIMEOUT", 0.05)

    async def life(transport: HttpTransport) -> None:
        peer_ = Peer(said(LEARNT))
        async with peer_.serving() as url:
            for number in (1, 2):
                assert await transport.ask(url, Learn(5), LONG) is True
                await peer_.has_ended(*range(1, number + 1))
            assert peer_.opened == 2

    run(life)


def test_a_call_under_way_when_the_transport_closes_has_its_answer_and_leaves_nothing_open() -> None:
    async def life(transport: HttpTransport) -> None:
        peer_ = Peer(said(LEARNT))
        async with peer_.serving() as url:
            peer_.release.clear()
            call = asyncio.ensure_future(transport.ask(url, Learn(5), LONG))
            await peer_.arrived.acquire()
            await transport.close()
            assert not call.done()
            peer_.release.set()
            assert await call is True
            await peer_.has_ended(1)

    run(life)


CLOSING = said(LEARNT).replace(b"content-type", b"connection: close\r\ncontent-type", 1)


@pytest.mark.parametrize(
    "data", [CLOSING, said(LEARNT) + b"HTTP/1.1 200 OK\r\n", said(LEARNT) * 2, said(LEARNT) + b"x"], ids=["close", "more", "twice", "junk"]
)
def test_a_connection_is_not_used_again_if_its_answer_says_so_or_goes_on_after_its_end(data: bytes) -> None:
    async def life(transport: HttpTransport) -> None:
        peer_ = Peer(data)
        async with peer_.serving() as url:
            for number in (1, 2, 3):
                assert await transport.ask(url, Learn(5), LONG) is True
                assert peer_.opened == number
            await peer_.has_ended(1, 2, 3)

    run(life)


# ---- answers that are cut, damaged or strange -----------------------------------------------------------------------


def chunked(answer: bytes, size: int = 7) -> bytes:
    """The same answer in chunks of so many bytes."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
    return b"\r\n".join([*lines, b"transfer-encoding: chunked", b"", sent])


def real_answer() -> bytes:
    """What an instance sends."""
    request, answer = peer.encode_request(Learn(5)), b""
    with Instance(lambda _: True).serving() as instance, announce(instance.url, len(request), SECRET, request) as connection:
        while not answer.endswith(LEARNT):
            answer += connection.recv(65_536)
    return answer


@pytest.mark.parametrize("form", [bytes, chunked], ids=["by length", "in chunks"])
def test_an_answer_that_is_cut_anywhere_is_none(form: Callable[[bytes], bytes]) -> None:
    whole = form(real_answer())

    async def cut(transport: HttpTransport) -> None:
        peer_ = Peer(whole, closes=True)
        async with peer_.serving() as url:
            assert await transport.ask(url, Learn(5), LONG) is True
            for end in range(len(whole)):
                peer_.data = whole[:end]
                with pytest.raises(PeerUnknownError):
                    await transport.ask(url, Learn(5), LONG)

    run(cut)


@pytest.mark.parametrize("form", [bytes, chunked], ids=["by length", "in chunks"])
def test_an_answer_with_a_wrong_byte_never_says_that_nothing_was_done(form: Callable[[bytes], bytes]) -> None:
    whole = form(real_answer())

    async def damage(transport: HttpTransport) -> None:
        unknown = 0
        peer_ = Peer(whole, closes=True)
        async with peer_.serving() as url:
            for place, bit in itertools.product(range(len(whole)), (0, 5)):
                damaged = bytearray(whole)
                damaged[place] ^= 1 << bit
                peer_.data = bytes(damaged)
                try:
                    assert await transport.ask(url, Learn(5), LONG) in (True, False)
                except PeerUnknownError:
                    unknown += 1
        assert unknown > len(LEARNT)

    run(damage)


STRANGE = {
    "without an end": b"HTTP/1.1 200 OK\r\n\r\nbody",
    "of an odd coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nbody",
    "of two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    "of a length and in chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "of a wrong chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "still to come": b"HTTP/1.1 100 Continue\r\n\r\n",
    "still to come, with a body": b"HTTP/1.1 100 Continue\r\ncontent-length: 0\r\n\r\n",
    "in another protocol": b"HTTP/1.1 101 x\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "of none": b"HTTP/1.1 204 No Content\r\n\r\n",
    "of another version": b"HTTP/2.0 200\r\n\r\n",
    "of a request": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("data", STRANGE.values(), ids=list(STRANGE))
def test_a_strange_answer_is_not_waited_out(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The peer keeps the connection open, and says nothing more."""

    async def life(transport: HttpTransport) -> None:
        peer_ = Peer(data)
        async with peer_.serving() as url:
            with pytest.raises(PeerUnknownError, match=r"no answer from .*: its answer "):
                await transport.ask(url, Learn(5), LONG)
            await peer_.has_ended(1)

    run(life)
    assert caplog.text == ""
