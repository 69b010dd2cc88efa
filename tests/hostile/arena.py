"""A real server under attack: its process with a ceiling for its memory, a neighbour who must be served meanwhile, and raw connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.cluster.cluster_secret import secret_of
from tests.server.server_process import PATIENCE, wait_until

MIB: Final = 1 << 20
CEILING: Final = 1_024 * MIB
"""Resident memory of the server that no attack may take it above: all bodies that it holds (512 MiB), as much for what it makes of them."""
QUEUE: Final = "attacked"
_CYCLES: Final = 3


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        return str(json.loads(self.body)["code"])


class Neighbour:
    """A well-behaved client on the same server: whatever happens, each of its calls must succeed. `cycles` counts its rounds."""

    def __init__(self, url: str) -> None:
        self.cycles = 0
        self.failure: str | None = None
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="neighbour")

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def serve_more(self) -> None:
        """Returns once it was served some more."""
        wanted = self.cycles + _CYCLES
        wait_until(lambda: self.cycles >= wanted or self.failure is not None, "a neighbour being served", 2 * PATIENCE)
        assert self.failure is None, self.failure

    def _work(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:
            try:
                while not self._stop.is_set():
                    self._cycle(http)
                    self.cycles += 1
                    self._stop.wait(0.02)
            except Exception as error:
                self.failure = f"the neighbour was not served: {error!r}"

    def _cycle(self, http: httpx.Client) -> None:
        def ask(call: str, **fields: object) -> Any:
            answer = http.post(f"/v1/{call}", json={"queue_name": "neighbour", **fields})
            assert answer.status_code == 200, f"{call}: {answer.status_code} {answer.text[:300]}"
            return answer.json()

        text = f"item {self.cycles}"
        ask("queue.produce", items=[{"utf8": text}])
        leased = ask("queue.lease", client_id="n", request_timeout="30s")
        assert [item["reference"] for item in leased["items"]] == [None]
        assert ask("queue.complete", lease_ids=[leased["leases"][0]["lease_id"]])["completed"] == 1


@dataclass
class Arena:
    """The server, which is the one instance of a cluster. Leaving the context kills it."""

    folder: Path
    sockets: list[socket.socket] = field(default_factory=list)
    """Those that the attack at hand has open."""

    def __enter__(self) -> Arena:
        self._log = (self.folder / "server.log").open("ab")
        config = self.folder / "sluiceway.toml"
        config.write_text(f'[cluster]\nmeta = "{self._meta}"\n')
        command = [sys.executable, "-m", "sluiceway.server.run", "--data", str(self.folder / "data"), "--config", str(config)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on http://" in line, f"{line!r}; see {self._log.name}"
        self.url = line.split()[-1]
        address = httpx.URL(self.url)
        self.address = (address.host, address.port or 0)
        self.call("queues.create", queue_name="neighbour")
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """An attack: the server lives through it, below its ceiling, and a neighbour is served before, during and after."""
        self.call("queues.create", queue_name=QUEUE)
        self._forget_peak()
        with Neighbour(self.url) as neighbour:
            neighbour.serve_more()
            yield
            # What the attack holds open is still open.
            neighbour.serve_more()
            self.hang_up()
            neighbour.serve_more()
        self.call("queues.delete", queue_name=QUEUE, force=True)
        assert neighbour.failure is None, neighbour.failure
        assert self.process.poll() is None, f"the server has ended with {self.process.returncode}; see {self._log.name}"
        peak = self.peak()
        assert peak < CEILING, f"the server took {peak // MIB} MiB"

    # ---- the cluster ------------------------------------------------------------------------------------------

    @property
    def _meta(self) -> str:
        return f"sqlite:{self.folder / 'meta.sqlite'}"

    @cached_property
    def secret(self) -> str:
        """By which the instances of its cluster know one another."""

        async def find() -> str:
            meta = open_meta_store(self._meta)
            try:
                return await secret_of(meta)
            finally:
                await meta.close()

        return asyncio.run(find())

    def logged(self) -> int:
        """Bytes that the server has logged."""
        return Path(self._log.name).stat().st_size

    # ---- memory -----------------------------------------------------------------------------------------------

    def peak(self) -> int:
        """The most bytes of memory that the process had since the attack began; 0 where the system does not tell."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1_024
        return 0

    def _forget_peak(self) -> None:
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    # ---- connections ------------------------------------------------------------------------------------------

    def connect(self, data: bytes = b"") -> socket.socket:
        """A connection, open until the end of the attack, on which those bytes were sent."""
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.append(connection)
        send(connection, data)
        return connection

    def hang_up(self) -> None:
        for connection in self.sockets:
            connection.close()
        self.sockets.clear()

    def ask(self, data: bytes) -> Answer:
        """The answer to those bytes."""
        return answer(self.connect(data))

    def post(self, call: str, body: bytes, content_type: str = "application/json", query: str = "", **headers: str) -> Answer:
        """The answer to a request that is well-formed as far as HTTP goes."""
        return self.ask(head(call, len(body), content_type, query, **headers) + body)

    def call(self, call: str, **fields: object) -> Any:
        """The answer of a call that must succeed."""
        given = httpx.post(f"{self.url}/v1/{call}", json=fields, timeout=PATIENCE)
        assert given.status_code == 200, given.text
        return given.json()

    def total(self) -> int:
        """Items in the attacked queue."""
        partitions = self.call("queue.stats", queue_name=QUEUE)["logical_queues"][0]["partitions"]
        return sum(each["total"] for each in partitions)


def head(call: str, length: int | str | None, content_type: str = "application/json", query: str = "", **headers: str) -> bytes:
    """Request line and headers of a call; without a length there is no content-length."""
    lines = [f"POST /v1/{call}{query} HTTP/1.1", "host: localhost", f"content-type: {content_type}"]
    if length is not None:
        lines.append(f"content-length: {length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def stats_call() -> bytes:
    """A whole, small, valid request."""
    body = json.dumps({"queue_name": QUEUE}).encode()
    return head("queue.stats", len(body)) + body


def send(connection: socket.socket, data: bytes) -> bool:
    """Whether all of it could be sent: the server may have had enough."""
    try:
        connection.sendall(data)
    except OSError:
        return False
    return True


def pour(connection: socket.socket, part: bytes, most: int) -> int:
    """Send that again and again, until the server takes no more or `most` bytes are sent. How many were."""
    sent = 0
    while sent < most and send(connection, part):
        sent += len(part)
    return sent


def answer(connection: socket.socket) -> Answer:
    response = HTTPResponse(connection)
    response.begin()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def answer_or_end(connection: socket.socket) -> Answer | None:
    """The answer; None if the server has cut the connection instead."""
    try:
        return answer(connection)
    except (HTTPException, ConnectionError):
        return None


def ended(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, which it must."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def reset(connection: socket.socket) -> None:
    """Close it with an RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


Attack = Callable[[Arena], None]
