"""In-memory server for tests: a real one, on a free port of this machine."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import uvloop

from sluiceway.adapters import system
from sluiceway.client import Client
from sluiceway.client.protocol import Duration, millis
from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.server.listeners import bind, url_of
from sluiceway.server.run import Server
from sluiceway.server.wiring import Assembly, Door

FLAGS = {"backends.default.kind": "memory", "server.auth": "none"}
"""The configuration of each server."""


class TestClock:
    """Clock of the server: real time until it is moved ahead."""

    __test__ = False

    def __init__(self, loop: asyncio.AbstractEventLoop, service: Service) -> None:
        self._loop = loop
        self._service = service

    def advance(self, duration: Duration) -> None:
        """Move the server's time ahead. Returns when all that is due has happened: leases have run out, scheduled items are ready.

        The caller's own clock does not move.
        """
        asyncio.run_coroutine_threadsafe(self._advance(millis(duration, "duration")), self._loop).result()

    async def _advance(self, by: int) -> None:
        system.move_ahead(by)
        await self._service.catch_up()


class TestServer:
    """A running server: its `url`, a `client` for it, and its `clock`."""

    __test__ = False

    def __init__(self, url: str, clock: TestClock) -> None:
        self.url = url
        self.clock = clock
        self.client = Client(url, api_key="")


@contextmanager
def server() -> Iterator[TestServer]:
    """Run a server on a free port of the loopback address until the block ends. It needs no API key, and keeps nothing.

    Each server has its own queues and clock; several can run at once.
    """
    ready: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()
    with bind("127.0.0.1", 0) as sock, tempfile.TemporaryDirectory(prefix="sluiceway-") as folder:
        loaded = load(environment={}, flags=FLAGS)
        service = Service(Path(folder), loaded.configuration.backends)

        async def serve() -> None:
            await service.start()
            try:
                assembly = Assembly(service, loaded, Door(keys=False))
                await assembly.start()
                try:
                    serving = Server(assembly.app, lambda: ready.set_result((asyncio.get_running_loop(), serving)))
                    await serving.serve([sock])
                finally:
                    await assembly.stop()
            finally:
                await service.stop()

        def thread() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(serve())
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        running = threading.Thread(target=thread, name="sluiceway-test-server", daemon=True)
        running.start()
        loop, serving = ready.result()
        served = TestServer(url_of(sock), TestClock(loop, service))
        try:
            with served.client:
                yield served
        finally:
            serving.should_exit = True
            running.join()
