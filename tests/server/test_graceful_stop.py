"""A server that is told to stop while many connections are busy: whatever it has accepted is answered, and the ledger agrees."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import httpx
import pytest

from sluiceway.instance.service import Service
from sluiceway.server import run
from sluiceway.server.app import create_app
from sluiceway.server.listeners import bind
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until
from tests.server.server_running import Running, running
from tests.server.test_tls import Files

PRODUCERS = 30
NEWCOMERS = 10
POLLS = 20
SLOW = 5


class TornError(Exception):
    """An answer that broke off."""


class Peer:
    """One connection, looked at closely: HTTP clients repeat, and hide what happened."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.closes = False
        """The last answer said so."""

    @classmethod
    async def connect(cls, server: ServerProcess) -> Peer:
        host, port = server.address.rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port)))

    def begin(self, call: str, body: bytes, sent: int | None = None) -> None:
        """Send a request, or its first `sent` bytes of body."""
        head = f"POST /v1/{call} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body[:sent])

    def go_on(self, rest: bytes) -> None:
        self._writer.write(rest)

    async def answer(self) -> tuple[int, dict[str, object]] | None:
        """Status and body; None: the connection ended before anything came. Raises TornError when it ended in the middle."""
        begun = b""
        try:
            begun = await self._reader.readuntil(b"\r\n\r\n")
            head = begun.decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            if begun or getattr(error, "partial", b""):
                raise TornError(repr(error)) from error
            return None
        self.closes = "connection: close" in head
        return int(head.split()[1]), json.loads(body)

    def close(self) -> None:
        self._writer.close()


class Books:
    """What became of each payload, as its producer saw it."""

    def __init__(self) -> None:
        self.acknowledged: set[str] = set()
        self.refused: set[str] = set()
        self.unknown: set[str] = set()
        self.seen: Counter[str] = Counter()

    def note(self, kind: str, payload: str, answer: tuple[int, dict[str, object]] | None) -> None:
        status = 0 if answer is None else answer[0]
        self.seen[f"{kind} {status}"] += 1
        {200: self.acknowledged, 503: self.refused}.get(status, self.unknown).add(payload)


def produce(payload: str) -> bytes:
    return json.dumps({"queue_name": "q", "items": [{"utf8": payload}]}).encode()


async def until_refused(
    server: ServerProcess, books: Books, name: str, stopping: asyncio.Event, peer_of: Callable[[Peer | None], Awaitable[Peer]]
) -> None:
    """Produce one item after the other until the server takes no connection any more."""
    peer, number = None, 0
    while True:
        try:
            peer = await peer_of(peer)
        except ConnectionRefusedError:
            assert stopping.is_set()
            return
        payload = f"{name}-{number}"
        number += 1
        peer.begin("queue.produce", produce(payload))
        answer = await peer.answer()
        books.note(name.split("-")[0], payload, answer)
        if answer is None or peer.closes:
            assert stopping.is_set()
            peer.close()
            peer = None


async def poll(server: ServerProcess) -> tuple[int, dict[str, object]] | None:
    peer = await Peer.connect(server)
    peer.begin("queue.lease", json.dumps({"queue_name": "idle", "client_id": "c", "request_timeout": "15m"}).encode())
    return await peer.answer()


async def begun(server: ServerProcess, payload: str) -> tuple[Peer, bytes]:
    """A produce of which a part of the body is still to come, and that part."""
    peer, body = await Peer.connect(server), produce(payload)
    peer.begin("queue.produce", body, sent=10)
    return peer, body[10:]


async def waiting(http: httpx.AsyncClient) -> int:
    answer = await http.post("/v1/queue.stats", json={"queue_name": "idle"})
    return int(answer.json()["logical_queues"][0]["lease_waiting"])


async def stop_under_load(server: ServerProcess, books: Books) -> list[tuple[int, dict[str, object]] | None]:
    """Tell the server to stop while it is busy. The answers to the long polls."""
    stopping = asyncio.Event()

    async def same(peer: Peer | None) -> Peer:
        return peer or await Peer.connect(server)

    async def another(peer: Peer | None) -> Peer:
        if peer is not None:
            peer.close()
        return await Peer.connect(server)

    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
        for name in ("q", "idle"):
            (await http.post("/v1/queues.create", json={"queue_name": name, "requested_partitions": 2})).raise_for_status()
        async with asyncio.TaskGroup() as group:
            polls = [group.create_task(poll(server)) for _ in range(POLLS)]
            slow = [await begun(server, f"slow-{n}") for n in range(SLOW)]
            for n in range(PRODUCERS):
                group.create_task(until_refused(server, books, f"same-{n}", stopping, same))
            for n in range(NEWCOMERS):
                group.create_task(until_refused(server, books, f"new-{n}", stopping, another))
            await eventually(lambda: len(books.acknowledged) >= 200)
            while await waiting(http) < POLLS:
                pass
            stopping.set()
            server.process.send_signal(signal.SIGTERM)
            # Their answers say that it has begun to stop.
            answers = [await each for each in polls]
            for n, (peer, rest) in enumerate(slow):
                peer.go_on(rest)
                books.note("slow", f"slow-{n}", await peer.answer())
    return answers


def contents(data: Path) -> list[str]:
    with ServerProcess(data) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        found: list[str] = []
        while True:
            body = {"queue_name": "q", "client_id": "c", "batch_size": 1000, "max_partitions": 2}
            taken = http.post("/v1/queue.lease", json=body).raise_for_status().json()
            if not taken["leases"]:
                return found
            found += [base64.b64decode(item["bytes"]).decode() for item in taken["items"]]


@driven
async def test_what_was_accepted_is_answered_and_the_ledger_agrees(tmp_path: Path) -> None:
    books = Books()
    with ServerProcess(tmp_path / "data") as server:
        polls = await stop_under_load(server, books)
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
    assert [answer and (answer[0], answer[1]["code"]) for answer in polls] == [(503, "unavailable")] * POLLS
    # Who kept a connection, or had begun a request, has an answer to everything.
    assert not {what: count for what, count in books.seen.items() if what.split()[0] in ("same", "slow") and not what.endswith(" 200")}
    found = await asyncio.to_thread(contents, tmp_path / "data")
    assert len(found) == len(set(found))
    assert books.acknowledged <= set(found) <= books.acknowledged | books.unknown


@driven
@pytest.mark.slow
async def test_a_body_that_does_not_come_is_refused_in_the_end(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, SLUICEWAY_SERVER__SHUTDOWN_TIMEOUT="1s"), ServerProcess(tmp_path / "data") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:
            (await http.post("/v1/queues.create", json={"queue_name": "q"})).raise_for_status()
        peers = [await begun(server, f"slow-{n}") for n in range(SLOW)]
        server.process.send_signal(signal.SIGTERM)
        answers = [await peer.answer() for peer, _ in peers]
        assert [answer and (answer[0], answer[1]["code"]) for answer in answers] == [(503, "unavailable")] * SLOW
        assert await asyncio.to_thread(server.process.wait, PATIENCE) == 0
    assert await asyncio.to_thread(contents, tmp_path / "data") == []


def head_of(connection: socket.socket) -> str:
    """Sends a request, and returns the head of its answer."""
    connection.sendall(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    return connection.recv(4096).decode().lower()


def test_a_connection_that_is_idle_may_send_one_more_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Until no connection is left; otherwise the test would be a race.
    monkeypatch.setattr(run, "_LINGER", 3_600_000)
    with running(tmp_path) as server, server.raw(b"") as idle:
        assert "connection: close" not in head_of(idle)
        server.stop()
        wait_until(lambda: refuses(server), "that it refuses connections")
        head = head_of(idle)
        assert head.startswith("http/1.1 200")
        assert "connection: close" in head
        assert idle.recv(1) == b""


def refuses(server: Running) -> bool:
    try:
        server.raw(b"").close()
    except ConnectionRefusedError:
        return True
    return False


@driven
async def test_a_connection_that_was_made_and_not_accepted_is_served(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    with bind("127.0.0.1", 0) as sock:
        server = run.Server(create_app(service), lambda: None)
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup([sock])
        # The event loop is not given a chance to accept it.
        with socket.create_connection(sock.getsockname(), timeout=PATIENCE) as made:
            made.sendall(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            await server.shutdown([sock])
            assert made.recv(4096).startswith(b"HTTP/1.1 200")
    await service.stop()


@driven
async def test_a_server_that_is_told_to_stop_while_it_begins_takes_no_requests(tmp_path: Path) -> None:
    service, begins, ready = Service(tmp_path), asyncio.Event(), list[bool]()

    async def join() -> None:
        begins.set()
        await asyncio.Event().wait()

    await service.start()
    with bind("127.0.0.1", 0) as sock:
        server = run.Server(create_app(service), lambda: ready.append(True), before_listen=join)
        serving = asyncio.create_task(server.serve([sock]))
        await begins.wait()
        server.handle_exit(signal.SIGTERM, None)
        await serving
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sock.getsockname(), timeout=PATIENCE)
    assert not ready
    await service.stop()


def test_a_stop_does_not_wait_for_tls_connections_that_are_kept_for_later(tmp_path: Path) -> None:
    """Their clients do not look, so they do not close their side: the whole of shutdown_timeout was waited for."""
    files = Files(tmp_path / "tls")
    config = tmp_path / "sluiceway.toml"
    config.write_text(f"[server]\ntls_certificate = '{files.certificate}'\ntls_key = '{files.key}'\n")
    command = [*COMMAND, "serve", "--data", str(tmp_path / "data"), "--config", str(config), "--listen", "127.0.0.1:0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        httpx.Client(verify=files.context(), timeout=PATIENCE) as client,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        assert client.get(f"{url}/livez").status_code == 200
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "stopped" in log
    assert "exceeded" not in log
