"""The connections of a client, against a server that counts them: as many as calls at once, used again, and not kept for ever."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sluiceway.client import CallError, Client, async_connections, connections
from sluiceway.client.async_connections import AsyncConnections
from sluiceway.client.connections import Connections
from sluiceway.client.http_exchange import Endpoint
from sluiceway.client.http_messages import Answer, NoAnswerError, NotSentError, Request
from tests.server.server_process import PATIENCE


class Counting:
    """A server that answers once so many requests (`together`) are there."""

    def __init__(self) -> None:
        self.accepted = 0
        self.together = 1
        self._open: set[asyncio.StreamWriter] = set()
        self._waiting: list[asyncio.Event] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def start(self) -> None:
        self._thread.start()
        self._changed = self.run(self._condition())
        self._server = self.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/"

    async def _condition(self) -> asyncio.Condition:
        return asyncio.Condition()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._open.add(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                mine = asyncio.Event()
                self._waiting.append(mine)
                async with self._changed:
                    self._changed.notify_all()
                if len(self._waiting) == self.together:
                    await self.answer_all()
                await mine.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            self._open.remove(writer)
            writer.close()
            async with self._changed:
                self._changed.notify_all()

    def wait_for_open(self, count: int) -> None:
        """Returns when so many connections are open."""
        self.run(self._wait(lambda: len(self._open) == count))

    async def has_requests(self, count: int) -> None:
        """Returns when so many requests wait for their answer."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._wait(lambda: len(self._waiting) == count), self._loop))

    async def _wait(self, met: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(met)

    async def answer_all(self) -> None:
        """Also where nobody waits for it any more, which is how the server learns of that."""
        for each in self._waiting:
            each.set()
        self._waiting.clear()

    async def close_all(self) -> None:
        """The server ends its connections."""
        for writer in self._open:
            writer.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def counting() -> Iterator[Counting]:
    server = Counting()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server() -> Iterator[Counting]:
    with counting() as started:
        yield started


def get(url: str) -> Request:
    return Endpoint(url, "").get("/", PATIENCE)


class Face:
    """Calls by one kind of connections: `count` of them at once."""

    def __init__(self, kind: str) -> None:
        self._sync = Connections() if kind == "sync" else None
        self._runner = asyncio.Runner()
        self._async = AsyncConnections()

    def get(self, server: Counting, count: int = 1) -> None:
        server.together = count
        if self._sync is not None:
            with ThreadPoolExecutor(count) as pool:
                answers = list(pool.map(self._sync.exchange, [get(server.url)] * count))
        else:
            answers = self._runner.run(self._several(server.url, count))
        assert [answer.body for answer in answers] == [b"ok"] * count

    async def _several(self, url: str, count: int) -> list[Answer]:
        return await asyncio.gather(*(self._async.exchange(get(url)) for _ in range(count)))

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        self._runner.run(self._async.aclose())
        self._runner.close()


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    made = Face(request.param)
    yield made
    made.close()


def test_calls_at_once_have_a_connection_each_and_later_ones_use_them_again(server: Counting, face: Face) -> None:
    face.get(server, 20)
    assert server.accepted == 20
    for _ in range(5):
        face.get(server)
    face.get(server, 20)
    assert server.accepted == 20


def test_closed_there_are_none_left(server: Counting) -> None:
    pool = Connections()
    pool.exchange(get(server.url))
    pool.close()
    server.wait_for_open(0)


def test_servers_have_connections_of_their_own(server: Counting, face: Face) -> None:
    with counting() as other:
        for _ in range(3):
            face.get(server)
            face.get(other)
        assert (server.accepted, other.accepted) == (1, 1)


def test_no_more_are_kept_than_may_be(server: Counting, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT", 3)
    face.get(server, 8)
    server.wait_for_open(3)


def test_those_that_nobody_needs_any_more_are_closed(server: Counting, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock.now))
    face.get(server, 5)
    clock.now += connections.IDLE + 1
    face.get(server)
    server.wait_for_open(1)
    assert server.accepted == 6, "the server may close one that was idle for so long at any moment"


def test_those_to_a_server_that_nobody_calls_any_more_are_closed(server: Counting, face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: clock.now))
    face.get(server, 5)
    clock.now += connections.IDLE + 1
    with counting() as other:
        face.get(other)
        server.wait_for_open(0)


def test_a_connection_that_the_server_has_closed_is_not_used_again(face: Face) -> None:
    with counting() as server:
        face.get(server, 2)
        server.run(server.close_all())
        server.wait_for_open(0)
        face.get(server, 2)
        assert server.accepted == 4


def test_of_several_addresses_one_that_does_not_answer_hides_none_of_the_others(server: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the loss of one of the machines that a name stands for."""
    monkeypatch.setattr(async_connections, "CONNECT_TIMEOUT", 0.05)
    port = int(server.url.rstrip("/").rpartition(":")[2])

    async def exchange() -> Answer:
        loop = asyncio.get_running_loop()
        connect = loop.sock_connect

        async def found(host: str, *_: object, **__: object) -> list[Any]:
            addresses = ["192.0.2.1", "127.0.0.1"] if host == "queue.example" else [host]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

        async def answered(sock: socket.socket, address: Any) -> None:
            await (asyncio.Event().wait() if address[0] == "192.0.2.1" else connect(sock, address))

        monkeypatch.setattr(loop, "getaddrinfo", found)
        monkeypatch.setattr(loop, "sock_connect", answered)
        pool = AsyncConnections()
        try:
            return await pool.exchange(get(f"http://queue.example:{port}/"))
        finally:
            await pool.aclose()

    assert asyncio.run(exchange()).body == b"ok"


def test_a_cancelled_call_leaves_no_connection(server: Counting) -> None:
    async def cancel() -> None:
        pool = AsyncConnections()
        call = asyncio.create_task(pool.exchange(get(server.url)))
        await server.has_requests(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        server.run(server.answer_all())
        server.wait_for_open(0)

    server.together = 2
    asyncio.run(cancel())


def test_closing_ends_calls_that_are_running(server: Counting) -> None:
    async def close() -> None:
        pool = AsyncConnections()
        call = asyncio.create_task(pool.exchange(get(server.url)))
        await server.has_requests(1)
        await pool.aclose()
        with pytest.raises(NoAnswerError):
            await call
        server.run(server.answer_all())
        server.wait_for_open(0)

    server.together = 2
    asyncio.run(close())


def test_closing_ends_calls_that_are_running_in_threads(server: Counting) -> None:
    server.together = 2
    connected = Connections()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(connected.exchange, get(server.url))
        asyncio.run(server.has_requests(1))
        connected.close()
        with pytest.raises(NoAnswerError):
            call.result(PATIENCE)
    server.run(server.answer_all())
    server.wait_for_open(0)


@pytest.mark.parametrize("make", [lambda client: client.stats("q"), lambda client: next(client.events())], ids=["call", "events"])
def test_a_call_that_closing_ends_is_not_repeated(server: Counting, make: Any) -> None:
    """A thread that reads events could not be ended, and had a connection that nobody closed."""
    server.together = 2
    client = Client(server.url.rstrip("/"))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(make, client)
        asyncio.run(server.has_requests(1))
        client.close()
        with pytest.raises(CallError):
            call.result(PATIENCE)
    assert server.accepted == 1
    server.run(server.answer_all())


def test_a_forked_process_has_connections_of_its_own(server: Counting) -> None:
    pool = Connections()
    pool.exchange(get(server.url))
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if pool.exchange(get(server.url)).body == b"ok" else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    pool.exchange(get(server.url))
    assert server.accepted == 2
    pool.close()


def test_a_forked_process_closes_none_of_the_connections_of_its_parent(server: Counting) -> None:
    pool = Connections()
    pool.exchange(get(server.url))
    child = os.fork()
    if child == 0:
        try:
            pool.close()
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    pool.exchange(get(server.url))
    assert server.accepted == 1
    pool.close()


# ---- answers of all kinds -----------------------------------------------------------------------------------------------


class Said:
    """A server that says given bytes, in given pieces, to each connection's request, and then closes it."""

    def __init__(self, *pieces: bytes, reads: bool = True) -> None:
        self._pieces, self._reads = pieces, reads
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._reads:
                    connection.recv(1 << 16)
                for piece in self._pieces:
                    connection.sendall(piece)
                    time.sleep(0.002)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(PATIENCE)


def exchanged(kind: str, *requests: Request) -> list[Answer]:
    """The answers to requests that are sent one after the other."""
    if kind == "sync":
        pool = Connections()
        try:
            return [pool.exchange(request) for request in requests]
        finally:
            pool.close()

    async def ask() -> list[Answer]:
        pool = AsyncConnections()
        try:
            return [await pool.exchange(request) for request in requests]
        finally:
            await pool.aclose()

    return asyncio.run(ask())


def asked(kind: str, said: Said, body: bytes = b"") -> Answer:
    try:
        return exchanged(kind, get(said.url)._replace(body=body))[0]
    finally:
        said.close()


BIG = bytes(range(256)) * 4_000
HEAD = b"HTTP/1.1 200 OK\r\nX-One: 1\r\n"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("pieces", "status", "body"),
    [
        ([HEAD + b"content-length: 2\r\n\r\nok"], 200, b"ok"),
        ([HEAD[:9], HEAD[9:], b"content-len", b"gth: 2\r", b"\n\r\no", b"k"], 200, b"ok"),
        ([HEAD + b"Content-Length: %d\r\n\r\n" % len(BIG), BIG[:1000], BIG[1000:]], 200, BIG),
        ([HEAD + b"Content-Length: %d\r\n\r\n" % len(BIG) + BIG], 200, BIG),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"3\r\nyes\r\n0\r\n\r\n"], 200, b"okyes"),
        ([HEAD + b"connection: close\r\n\r\nto the end", b" of it"], 200, b"to the end of it"),
        ([b"HTTP/1.0 503 Busy\r\n\r\nwait"], 503, b"wait"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"content-length: 2\r\n\r\nok"], 200, b"ok"),
        ([b"HTTP/1.1 204 None\r\n\r\n"], 204, b""),
        ([HEAD + b"content-length: 0\r\n\r\n"], 200, b""),
    ],
    ids=["plain", "in pieces", "large", "large at once", "chunked", "to the end", "http 1.0", "continue", "no content", "empty"],
)
def test_answers_are_read_in_every_form(kind: str, pieces: list[bytes], status: int, body: bytes) -> None:
    answer = asked(kind, Said(*pieces))
    assert (answer.status, bytes(answer.body)) == (status, body)
    if pieces[-1].startswith(HEAD):
        assert answer.header(b"x-one") == "1"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([], "without an answer|reset"),
        ([HEAD], "without an answer"),
        ([HEAD + b"content-length: 5\r\n\r\nok"], "in the middle"),
        ([HEAD + b"content-length: %d\r\n\r\n" % len(BIG), BIG[:-1]], "in the middle"),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n"], "in the middle"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], "not HTTP"),
    ],
    ids=["nothing", "half a head", "half a body", "half a large body", "half the chunks", "not http"],
)
def test_what_is_no_complete_answer_is_none(kind: str, pieces: list[bytes], why: str) -> None:
    with pytest.raises(NoAnswerError, match=why):
        asked(kind, Said(*pieces))


class Cut:
    """A socket whose server has answered, and takes no more than it has."""

    def __init__(self, inner: socket.socket) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sendall(self, data: bytes) -> None:
        self._inner.sendall(data)
        raise BrokenPipeError


@pytest.mark.parametrize(("said", "status"), [([HEAD + b"content-length: 2\r\n\r\nno"], 200), ([], None)], ids=["answered", "silent"])
def test_an_answer_to_half_a_request_counts(monkeypatch: pytest.MonkeyPatch, said: list[bytes], status: int | None) -> None:
    """As a server refuses what is too large, and closes."""
    create = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *given: Cut(create(*given)))
    if status is None:
        with pytest.raises(NoAnswerError, match=r"Broken ?[Pp]ipe"):
            asked("sync", Said(*said), b"x")
    else:
        assert asked("sync", Said(*said), b"x").status == status


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_answer_before_a_large_request_was_read_counts(kind: str) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(refusal)
                # Until the client hangs up.
                while connection.recv(1 << 20):
                    pass

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        (answer,) = exchanged(kind, get(f"http://127.0.0.1:{listener.getsockname()[1]}")._replace(body=b"x" * (1 << 22)))
        assert (answer.status, answer.body) == (413, b"no")
        thread.join(PATIENCE)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_no_connection_is_not_sent(kind: str) -> None:
    said = Said()
    said.close()
    with pytest.raises(NotSentError):
        exchanged(kind, get(said.url))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_silence_ends_a_call(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        request = get(f"http://127.0.0.1:{silent.getsockname()[1]}")._replace(patience=0.05)
        with pytest.raises(NoAnswerError, match="timed out"):
            exchanged(kind, request)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_server_says_unasked_ends_the_connection(kind: str) -> None:
    extra = HEAD + b"content-length: 2\r\n\r\nok"
    said = Said(extra + extra)
    try:
        answers = exchanged(kind, get(said.url), get(said.url))
    finally:
        said.close()
    assert [answer.body for answer in answers] == [b"ok", b"ok"]
