"""Where a server listens, whether it asks callers for a key there, and what becomes of connections that come to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluiceway.kernel.address import Address
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.configuration import ServerSettings
from sluiceway.server import listeners
from sluiceway.server.listeners import Listener, address_of, asks_for_keys, bind, bind_all, is_loopback, url_of
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually as soon
from tests.server.test_tls import Files

HERE = Address("127.0.0.1", 80)
PUBLIC = Address("192.0.2.1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_port_0_takes_a_free_one(host: str) -> None:
    with bind(host, 0) as sock:
        assert int(url_of(sock).rpartition(":")[2]) > 0
        assert url_of(sock, tls=True).startswith("https://127.0.0.")


def test_an_address_that_is_none() -> None:
    with pytest.raises(SluicewayError, match="not an address"):
        bind("no such host", 0)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_two_listeners() -> None:
    api, admin = bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen="127.0.0.2:0"))
    with api, admin:
        assert (address_of(api).host, address_of(admin).host) == ("127.0.0.1", "127.0.0.2")


def test_where_the_second_cannot_listen_the_first_does_not(recwarn: pytest.WarningsRecorder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen=f"127.0.0.1:{port}"))
    assert not [each for each in recwarn if issubclass(each.category, ResourceWarning)]
    with pytest.raises(SluicewayError) as caught:
        bind_all(ServerSettings(listen="127.0.0.1:0", admin_listen="no such host:0"))
    assert caught.value.field == "server.admin_listen"


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("fe80::1%eth0", False)]
)
def test_what_other_machines_cannot_reach(host: str, loopback: bool) -> None:
    assert is_loopback(Address(host, 80)) is loopback


@pytest.mark.parametrize(
    ("auth", "addresses", "insecure", "asks"),
    [
        ("auto", [HERE], False, False),
        ("auto", [HERE, HERE], False, False),
        ("auto", [PUBLIC], False, True),
        ("auto", [HERE, PUBLIC], False, True),
        ("auto", [PUBLIC, HERE], False, True),
        ("auto", [PUBLIC], True, False),
        ("keys", [HERE], False, True),
        ("keys", [PUBLIC], True, True),
        ("none", [HERE], False, False),
        ("none", [PUBLIC], True, False),
    ],
)
def test_who_is_asked_for_a_key(auth: str, addresses: list[Address], insecure: bool, asks: bool) -> None:
    assert asks_for_keys(ServerSettings(auth=auth), addresses, insecure) is asks  # type: ignore[arg-type]


@pytest.mark.parametrize("addresses", [[PUBLIC], [HERE, PUBLIC]])
def test_nobody_is_asked_where_others_can_call_only_if_that_is_spelled_out(addresses: list[Address]) -> None:
    with pytest.raises(SluicewayError, match=r"other machines could call 192\.0\.2\.1.*--insecure") as caught:
        asks_for_keys(ServerSettings(auth="none"), addresses, insecure=False)
    assert caught.value.field == "server.auth"


def test_whoever_has_set_an_admin_key_is_asked_for_keys() -> None:
    with_key = ServerSettings(admin_key="k" * 32)
    assert asks_for_keys(with_key, [HERE], insecure=False)
    assert asks_for_keys(with_key, [PUBLIC], insecure=True)
    assert not asks_for_keys(ServerSettings(auth="none", admin_key="k" * 32), [HERE], insecure=False)


# ---- connections that come to nothing -------------------------------------------------------------------------


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
