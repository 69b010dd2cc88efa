"""Listeners: bound sockets, their addresses, and the decision whether callers need keys."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable

from sluiceway.kernel.address import Address, parse_address
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import GOODBYE_TIMEOUT, HEAD_TIMEOUT
from sluiceway.model.configuration import ServerSettings

_BACKLOG = 2_048
_HESITATION = 0.002
"""Seconds in which another process with fewer connections may accept one first."""
_PAUSE = 1.0
"""Seconds without accepting after the system ran out of files or memory; connections wait in the backlog."""


def bind(host: str, port: int, field: str = "server.listen") -> socket.socket:
    """Return a bound socket; port 0 takes a free one. Raises `invalid_request` for an address that is not this machine's, OSError for one
    in use."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise invalid(field, f"{host!r} is not an address of this machine: {error.strerror}") from None
    family, _, _, _, address = found[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{field}: {url_at(Address(host, port), False).removeprefix('http://')}: {error.strerror}") from None
    return sock


def bind_all(server: ServerSettings) -> list[socket.socket]:
    """Bind the socket of the API, then the administrators' if configured. Raises as `bind` does."""
    socks = [bind(*parse_address(server.listen, "server.listen"))]
    if server.admin_listen:
        try:
            socks.append(bind(*parse_address(server.admin_listen, "server.admin_listen"), "server.admin_listen"))
        except BaseException:
            socks[0].close()
            raise
    return socks


class Listener:
    """Accepts connections on a bound socket, each with its own protocol, until closed.

    With TLS, a connection gets its protocol only after the handshake, within HEAD_TIMEOUT. Connections before that are counted here, and
    closed while there is no `room` for them. If other processes accept on the same socket, one that `hesitates` leaves the next connection
    to them for a moment. Use from one event loop.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        room: Callable[[], bool],
        hesitates: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sock = sock
        self._protocol = protocol
        self._tls = tls
        self._room = room
        self._hesitates = hesitates
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        # One connection per loop iteration, so that a burst of them does not delay all else.
        self._loop.add_reader(sock, self._accept_next)

    @property
    def opening(self) -> int:
        """Number of accepted connections without a protocol yet."""
        return len(self._opening)

    def _accept_next(self) -> None:
        if not self._hesitates():
            self._accept(1)
            return
        self._loop.remove_reader(self._sock)
        self._pause = self._loop.call_later(_HESITATION, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept_next)
        self._accept(1)

    def _accept(self, most: int) -> None:
        for _ in range(most):
            try:
                made, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                # An immediate retry would fail again, as fast as the loop can run.
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(_PAUSE, self._loop.add_reader, self._sock, self._accept_next)
                return
            if self._tls is not None and not self._room():
                made.close()
                continue
            task = self._loop.create_task(self._open(made))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, made: socket.socket) -> None:
        made.setblocking(False)
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._protocol, made)
                return
            await self._loop.connect_accepted_socket(
                self._protocol,
                made,
                ssl=self._tls,
                ssl_handshake_timeout=HEAD_TIMEOUT / 1_000,
                ssl_shutdown_timeout=GOODBYE_TIMEOUT / 1_000,
            )
        except OSError:
            # The client has gone, or its TLS handshake failed: there is no one to answer.
            return

    async def close(self, patience: float) -> None:
        """Accept no more. Connections made before are kept, except those whose handshake takes longer than `patience` seconds."""
        if self._pause is not None:
            self._pause.cancel()
        # Closing the socket would reset connections that wait to be accepted.
        self._accept(_BACKLOG)
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
        self._sock.close()
        if self._opening:
            await asyncio.wait(self._opening, timeout=patience)
        for task in list(self._opening):
            task.cancel()


def url_of(sock: socket.socket, tls: bool = False) -> str:
    """URL of the address that the socket is bound to."""
    return url_at(address_of(sock), tls)


def url_at(address: Address, tls: bool) -> str:
    """URL of an address; an IPv6 address gets brackets."""
    host, port = address
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def address_of(sock: socket.socket) -> Address:
    """Return the address that the socket is bound to."""
    return Address(*sock.getsockname()[:2])


def is_loopback(address: Address) -> bool:
    """Whether other machines cannot reach the address."""
    return ipaddress.ip_address(address.host.partition("%")[0]).is_loopback


def asks_for_keys(server: ServerSettings, addresses: list[Address], insecure: bool) -> bool:
    """Whether callers need an API key. Raises `invalid_request` if other machines could call without one, unless `insecure`."""
    # A configured key is meant to be required, wherever the server listens.
    if server.auth == "keys" or (server.auth == "auto" and server.admin_key):
        return True
    public = [address.host for address in addresses if not is_loopback(address)]
    if not public or insecure:
        return False
    if server.auth == "none":
        raise invalid(
            "server.auth",
            f"other machines could call {public[0]} without an API key; leave auth at auto, listen on 127.0.0.1, or pass --insecure to "
            "allow it",
        )
    return True
