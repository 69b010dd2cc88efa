"""The connections of a client, against a server that counts them: as many as calls at once, used again, and not kept for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sluiceway.client import connections
from sluiceway.client.connections import AsyncConnections, Connections
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


class Face:
    """Calls by one kind of connections: `count` of them at once."""

    def __init__(self, kind: str) -> None:
        self._sync = httpx.Client(transport=Connections(False)) if kind == "sync" else None
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=AsyncConnections(False))

    def get(self, server: Counting, count: int = 1) -> None:
        server.together = count
        if self._sync is not None:
            with ThreadPoolExecutor(count) as pool:
                answers = list(pool.map(self._sync.get, [server.url] * count))
        else:
            answers = self._runner.run(self._several(server.url, count))
        assert [answer.text for answer in answers] == ["ok"] * count

    async def _several(self, url: str, count: int) -> list[httpx.Response]:
        return await asyncio.gather(*(self._client.get(url) for _ in range(count)))

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        self._runner.run(self._client.aclose())
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
    with httpx.Client(transport=Connections(False)) as client:
        client.get(server.url)
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
    assert server.accepted == 5


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


def test_a_cancelled_call_leaves_no_connection(server: Counting) -> None:
    async def cancel() -> None:
        async with httpx.AsyncClient(transport=AsyncConnections(False)) as client:
            call = asyncio.create_task(client.get(server.url))
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
        transport = AsyncConnections(False)
        call = asyncio.create_task(httpx.AsyncClient(transport=transport).get(server.url))
        await server.has_requests(1)
        await transport.aclose()
        with pytest.raises(httpx.RequestError):
            await call
        server.run(server.answer_all())
        server.wait_for_open(0)

    server.together = 2
    asyncio.run(close())
