"""What a review of the surface found: each test failed before its repair."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.configuration import Address, Configuration, ServerSettings
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produce, QueueSpec, Redrive
from sluiceway.server import events, listeners, run
from sluiceway.server.listeners import Listener, asks_for_keys, bind
from sluiceway.server.reload import Reloader
from sluiceway.testing.drive import driven
from tests.instance.node_rig import eventually as soon
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_process import COMMAND, PATIENCE
from tests.server.server_running import eventually
from tests.server.test_tls import Files

HERE, PUBLIC = Address("127.0.0.1", 80), Address("192.0.2.1", 80)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("review") / "data") as server:
        yield server


# ---- who is let in ----------------------------------------------------------------------------------------------


def test_whoever_has_set_an_admin_key_is_asked_for_keys() -> None:
    with_key = ServerSettings(admin_key="k" * 32)
    assert asks_for_keys(with_key, [HERE], insecure=False)
    assert asks_for_keys(with_key, [PUBLIC], insecure=True)
    assert not asks_for_keys(ServerSettings(auth="none", admin_key="k" * 32), [HERE], insecure=False)


def test_a_body_that_breaks_off_counts_towards_the_rate(server: Guarded) -> None:
    text = server.key("read:*", bytes_per_second=1_000)
    head = f"POST /v1/queues.list HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {text}\r\n"
    connection = server.raw(head.encode() + b"content-length: 1000000\r\n\r\n" + b"{" + b" " * 500_000)
    connection.close()
    client = server.with_key(text)
    eventually(lambda: client.post("/v1/queues.list", json={}).status_code == 429)


def test_one_key_does_not_take_all_streams_of_events(server: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_KEY_STREAMS", 1)
    one, other = server.client("read:*"), server.client("read:*")
    with one.stream("GET", "/v1/events") as first:
        assert first.status_code == 200
        refused = one.get("/v1/events")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
        with other.stream("GET", "/v1/events") as second:
            assert second.status_code == 200

    def again() -> bool:
        with one.stream("GET", "/v1/events") as third:
            return third.status_code == 200

    eventually(again)


@driven
async def test_an_item_does_not_choose_where_it_is_redriven(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    try:
        for name in ("dead", "secret"):
            await service.create_queue(QueueSpec(name))
        row = {"payload": b"forged", "headers": [("sluiceway-queue", "secret")]}
        await service.produce("dead", Produce(batch_from_rows([row]), 10_000))
        for wanted in (Redrive(10_000, 10), Redrive(10_000, 10, source="secret")):
            assert (await service.redrive("dead", wanted)).matched == 0
        assert (await service.redrive("dead", Redrive(10_000, 10, target="secret"))).redriven == 1
    finally:
        await service.stop()


# ---- connections ------------------------------------------------------------------------------------------------


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self.transport, asyncio.Transport)
        self.transport.write(data)


@contextlib.asynccontextmanager
async def listening(sock: socket.socket, tls: ssl.SSLContext | None, most: int = 10) -> AsyncIterator[Listener]:
    listener = Listener(sock, Echo, tls, lambda: listener.opening < most)
    try:
        yield listener
    finally:
        await listener.close(0)


async def greet(port: int, context: ssl.SSLContext | None = None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"hello")
    try:
        return await reader.readexactly(5)
    finally:
        writer.transport.abort()


@driven
async def test_connections_that_do_not_agree_on_tls_are_counted(tmp_path: Path) -> None:
    """They had no limit, held a file each for a minute, and so took those of the stores."""
    files = Files(tmp_path)
    sock = bind("127.0.0.1", 0)
    async with listening(sock, files.tls().context, most=2) as listener:
        port = sock.getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await soon(lambda: listener.opening == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for each in (writer, *(writer for _, writer in silent)):
            each.close()
        await soon(lambda: listener.opening == 0)
        assert await greet(port, files.context()) == b"hello"


@driven
async def test_who_does_not_agree_on_tls_in_time_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "HEAD_TIMEOUT", 1)
    sock = bind("127.0.0.1", 0)
    async with listening(sock, Files(tmp_path).tls().context):
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


@driven
async def test_a_listener_that_closes_does_not_wait_for_who_is_silent(tmp_path: Path) -> None:
    sock = bind("127.0.0.1", 0)
    async with listening(sock, Files(tmp_path).tls().context) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
        await soon(lambda: listener.opening == 1)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await soon(lambda: listener.opening == 0)


@driven
async def test_without_files_left_a_listener_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        refusals = 0

        def accept(self) -> tuple[socket.socket, Any]:
            if self.refusals < 3:
                self.refusals += 1
                raise OSError(errno.EMFILE, "too many open files")
            return super().accept()

    monkeypatch.setattr(listeners, "_PAUSE", 0)
    with Full() as sock:
        sock.bind(("127.0.0.1", 0))
        async with listening(sock, None):
            assert await greet(sock.getsockname()[1]) == b"hello"
        assert sock.refusals == 3


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


# ---- starting, reloading and stopping ---------------------------------------------------------------------------

HUNG_UP = """
import os, signal, sys
from pathlib import Path
from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.server.run import serve

def hung_up(name):
    plain = getattr(Service, name)
    async def wrapped(self):
        os.kill(os.getpid(), signal.SIGHUP)
        await plain(self)
    setattr(Service, name, wrapped)

hung_up("start")
hung_up("stop")
loaded = load(environment={}, flags={"server.listen": "127.0.0.1:0"})
serve(Path(sys.argv[1]), loaded, lambda url: os.kill(os.getpid(), signal.SIGTERM))
"""


def test_a_hangup_while_it_starts_or_stops_does_not_end_the_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HUNG_UP, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "stopped" in done.stderr


@pytest.mark.parametrize("error", [None, ValueError("not allowed"), OSError(errno.EPERM, "not permitted")])
def test_a_server_opens_as_many_files_as_it_may(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    wanted: list[tuple[int, int]] = []

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        wanted.append(limits)
        if error is not None:
            raise error

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1_024, 4_096))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    run._open_more_files()
    assert wanted == [(4_096, 4_096)]


@driven
async def test_a_key_that_is_replaced_again_while_a_reload_is_applied_leaves_the_rest_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was an error that said that nothing had changed, when all but the certificate had."""
    files = Files(tmp_path / "tls")
    config = tmp_path / "sluiceway.toml"
    text = f"[server]\ntls_certificate = '{files.certificate}'\ntls_key = '{files.key}'\n"
    config.write_text(text)

    async def reconfigure(old: Configuration, new: Configuration, also: Sequence[str], by: Actor) -> list[str]:
        files.key.write_text("half of a")
        return ["log.level", *also]

    applied: list[Configuration] = []
    service: Any = SimpleNamespace(reconfigure=reconfigure)
    reloader = Reloader(load(config, environment={}), service, applied.append, files.tls())
    files.renew()
    config.write_text(text + "[log]\nlevel = 'error'\n")
    with caplog.at_level(logging.WARNING):
        assert await reloader.reload(SYSTEM) == ["log.level", "server.tls_certificate"]
    assert [each.log.level for each in applied] == ["error"]
    assert "keeping the current certificate" in caplog.text
    with pytest.raises(SluicewayError, match="no private key"):
        await reloader.reload(SYSTEM)
