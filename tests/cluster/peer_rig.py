"""Instances that ask one another over real connections, and servers that answer as no instance does."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop

from sluiceway.cluster.peer_http import HttpTransport
from sluiceway.kernel.compatibility import NEWEST
from sluiceway.model.items import batch_from_rows
from sluiceway.model.peers import Learn, PeerRequest
from sluiceway.server.app import Fittings
from sluiceway.server.http import Request
from sluiceway.server.peer_calls import PeerCalls
from sluiceway.server.tls import TlsFiles
from sluiceway.wire import peer
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import PATIENCE

SECRET = "slwc_0123456789abcdef"
ROWS = batch_from_rows([{"payload": b"one", "kind": "k"}, {"payload": b"two", "kind": None}])
LONG = 60_000
LEARNT = peer.encode_answer(Learn(5), True)
new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
"""What `run` runs on."""


class Instance:
    """Gives each request to `reply`, or waits for ever without one. `given_up` is set when the asking side has gone."""

    def __init__(self, reply: Callable[[PeerRequest], Any] | None = None) -> None:
        self.reply = reply
        self.asked: list[PeerRequest] = []
        self.began = threading.Event()
        self.given_up = threading.Event()
        self.request_ids: list[bytes] = []
        self.statuses: list[tuple[str, int]] = []
        self.calls = PeerCalls(self, SECRET)
        self.url = ""

    async def answer(self, request: PeerRequest) -> Any:
        self.asked.append(request)
        self.began.set()
        if self.reply is not None:
            return self.reply(request)
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.given_up.set()
            raise

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        self.request_ids.append(request.request_id)
        self.statuses.append((path, status))

    @contextmanager
    def serving(self, tls: TlsFiles | None = None) -> Iterator[Instance]:
        with serving(FakeService(), Fittings(peers=self.calls, meters=[self]), tls) as self.url:
            yield self


def run(
    work: Callable[[HttpTransport], Coroutine[Any, Any, Any]],
    secret: str = SECRET,
    ca_file: Path | None = None,
    level: Callable[[], int] = lambda: NEWEST,
) -> Any:
    async def life() -> Any:
        transport = HttpTransport(secret, ca_file, level)
        try:
            return await work(transport)
        finally:
            await transport.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(life())


def ask(address: str, request: PeerRequest, timeout: int = LONG, **options: Any) -> Any:
    return run(lambda transport: transport.ask(address, request, timeout, "r-1"), **options)


def announce(url: str, length: int, token: str, body: bytes = b"") -> socket.socket:
    """A connection with a request that says how long it is, and so much of its body."""
    address = httpx.URL(url)
    connection = socket.create_connection((address.host, address.port or 0), timeout=PATIENCE)
    head = f"POST {peer.PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: {length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


class Raw:
    """A server that does with its connections what the test says. `requests` counts those that came whole."""

    def __init__(self, *acts: Callable[[Raw, socket.socket], None]) -> None:
        self.requests = 0
        self._acts = acts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._work, name="raw server")

    def _work(self) -> None:
        for act in self._acts:
            connection, _ = self._server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                act(self, connection)

    def read(self, connection: socket.socket) -> None:
        """One whole request."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65_536)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        while len(body) < length:
            body += connection.recv(65_536)
        self.requests += 1

    def __enter__(self) -> Raw:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)
        self._server.close()
        assert not self._thread.is_alive()


def said(body: bytes, status: int = 200, content_type: str = peer.CONTENT_TYPE, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status} x\r\ncontent-type: {content_type}\r\ncontent-length: {size}\r\n\r\n".encode() + body
