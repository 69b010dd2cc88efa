"""Connections to one peer: each carries one request at a time, and reports its answer or that there will be none."""

from __future__ import annotations

import asyncio
import select
import ssl
from collections import deque
from typing import Final, NamedTuple, cast

import httptools

from sluiceway.kernel.limits import MAX_ANSWERS_BYTES

IDLE_TIMEOUT: Final = 30.0
"""Seconds. The peer closes its idle connections later, so requests rarely meet a connection that is being closed."""


class Answer(NamedTuple):
    """HTTP answer of a peer."""

    status: int
    content_type: bytes
    body: bytes


class NoAnswerError(Exception):
    """The request was written, perhaps in part, and no complete answer will come."""


class PeerConnection(asyncio.Protocol):
    """Client side of HTTP/1.1, for `loop.create_connection`. An answer counts only if its end was announced and has arrived."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._system = select.poll()
        self._waiter: asyncio.Future[Answer] | None = None
        self._answered = False
        self._size = 0

    # ---- for the caller ---------------------------------------------------------------------------------------

    async def ask(self, *request: bytes) -> Answer:
        """Send one request, given in parts, and wait for its answer; one at a time. Raises NoAnswerError."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._answered, self._size = False, 0
        self._transport.writelines(request)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    @property
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether the last answer arrived complete and nothing followed it, not even the end of the connection."""
        # Asks the operating system, since the event loop may not have looked yet.
        return self._answered and not self.is_closing and not self._system.poll(0)

    def close(self) -> None:
        self._transport.abort()

    # ---- for the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._system.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_ANSWERS_BYTES:
            self._fail(f"its answer is larger than {MAX_ANSWERS_BYTES} bytes")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"its answer cannot be read: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc or "") or "it closed the connection")

    def _fail(self, reason: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(NoAnswerError(reason))
        self.close()

    # ---- for the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()
        self._type = b""
        self._parts: list[bytes] = []
        self._has_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._type = value
        elif name == b"content-length" or (name == b"transfer-encoding" and value.lower() == b"chunked"):
            self._has_end = True

    def on_headers_complete(self) -> None:
        # A status below 200 announces an answer that is still to come; these requests never ask for one.
        if not self._has_end or self._parser.get_status_code() < 200:
            self._fail("its answer does not say where it ends")

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._answered = self._parser.should_keep_alive()
            self._waiter.set_result(Answer(self._parser.get_status_code(), self._type, b"".join(self._parts)))
        self._parts.clear()


class PeerConnections:
    """Connection pool for one peer, on one event loop: each call has a connection to itself, and returns it for the next.

    Getting a connection costs the same however many are in use. Idle ones are closed after IDLE_TIMEOUT.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self._idle: deque[tuple[float, PeerConnection]] = deque()
        """Each with the loop's time at which it became idle; the latest, used first, at the end."""
        self._look: asyncio.TimerHandle | None = None
        self._closed = False

    def idle(self) -> PeerConnection | None:
        """Take an open, unused connection; None if there is none."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return None

    async def open(self) -> PeerConnection:
        """Open a new connection. No request was sent if this raises."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(PeerConnection, self._host, self._port, ssl=self._tls)
        if connection.is_closing:
            raise ConnectionResetError("it closed the connection at once")
        return connection

    def give_back(self, connection: PeerConnection) -> None:
        """Return a connection to the pool, whatever the outcome of its last call."""
        if self._closed or not connection.is_reusable:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._look is None:
            self._look = loop.call_later(IDLE_TIMEOUT, self._close_idle)

    def close(self) -> None:
        """Close the idle connections, and those in use once they are returned."""
        self._closed = True
        if self._look is not None:
            self._look.cancel()
        while self._idle:
            self._idle.pop()[1].close()

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() - IDLE_TIMEOUT
        while self._idle and self._idle[0][0] <= latest:
            self._idle.popleft()[1].close()
        self._look = loop.call_at(self._idle[0][0] + IDLE_TIMEOUT, self._close_idle) if self._idle else None
