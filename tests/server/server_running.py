"""A real server for tests: uvicorn on a free loopback port, in a thread, over the real service."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import uvloop

from sluiceway.instance.service import Service
from sluiceway.server.app import Fittings, create_app
from sluiceway.server.listeners import bind, url_of
from sluiceway.server.run import Server
from tests.server.server_process import PATIENCE

ARROW = "application/vnd.apache.arrow.stream"
_numbers = itertools.count()


def eventually(condition: Callable[[], object], within: float = PATIENCE) -> None:
    """Wait until the condition holds; fails when it does not in that many seconds."""
    deadline = time.monotonic() + within
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s"
        pause.wait(0.01)


class Running:
    """A server that takes requests, and a client of it."""

    def __init__(self, service: Service, server: Server, url: str, verify: ssl.SSLContext | bool = True) -> None:
        self.service = service
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE, verify=verify)
        self._server = server
        self.thread: threading.Thread

    def stop(self) -> None:
        """Ask the server to stop; returns at once."""
        self._server.should_exit = True

    def post(self, call: str, **fields: object) -> httpx.Response:
        return self.http.post(f"/v1/{call}", json=fields)

    def ask(self, call: str, **fields: object) -> Any:
        """The answer of a call that must succeed."""
        answer = self.post(call, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def queue(self, **fields: object) -> str:
        """Create a queue and return its name."""
        queue_name = f"queue-{next(_numbers)}"
        self.ask("queues.create", queue_name=queue_name, **fields)
        return queue_name

    def produce(self, queue_name: str, *texts: str, **fields: object) -> Any:
        return self.ask("queue.produce", queue_name=queue_name, items=[{"utf8": text} for text in texts], **fields)

    def lease(self, queue_name: str, batch_size: int = 1_000, **fields: object) -> Any:
        return self.ask("queue.lease", queue_name=queue_name, client_id="c", batch_size=batch_size, **fields)

    def totals(self, queue_name: str) -> dict[str, int]:
        """The counters of the queue's partitions, added up."""
        sums: dict[str, int] = {}
        for logical_queue in self.ask("queue.stats", queue_name=queue_name)["logical_queues"]:
            for counters in logical_queue["partitions"]:
                for name, value in counters.items():
                    if isinstance(value, int):
                        sums[name] = sums.get(name, 0) + value
        return sums

    def waiting(self, queue_name: str) -> int:
        return int(self.ask("queue.stats", queue_name=queue_name)["logical_queues"][0]["lease_waiting"])

    def raw(self, data: bytes) -> socket.socket:
        """A connection on which those bytes were sent."""
        address = httpx.URL(self.url)
        connection = socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)
        connection.sendall(data)
        return connection

    def raw_post(self, call: str, **fields: object) -> socket.socket:
        body = json.dumps(fields).encode()
        head = f"POST /v1/{call} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return self.raw(head.encode() + body)


def balances(sums: dict[str, int]) -> bool:
    gone = sums["completed"] + sums["dead"] + sums["cleared"] + sums["redriven"]
    return sums["produced"] == gone + sums["total"] + sums["transferring"]


@contextmanager
def running(
    data: Path, fit: Callable[[Service], Fittings] = lambda _: Fittings(), make: Callable[[Path], Service] = Service
) -> Iterator[Running]:
    """A server over that data directory, with what `fit` adds to it, until the block ends."""
    # As in a server process: the slow first conversion must not fall into a test's timing.
    pa.array([b""])
    ready = threading.Event()
    service = make(data)
    sock = bind("127.0.0.1", 0)
    app = create_app(service, fit(service))
    server = Server(app, ready.set)

    async def life() -> None:
        await service.start()
        try:
            await server.serve([sock])
        finally:
            await service.stop()

    def thread() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(life())

    served = Running(service, server, url_of(sock))
    served.thread = threading.Thread(target=thread, name="server")
    served.thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield served
    finally:
        served.http.close()
        served.stop()
        served.thread.join(PATIENCE)
        assert not served.thread.is_alive()
