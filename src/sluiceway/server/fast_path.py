"""The direct path: a call that arrived whole is answered without ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import BODY_TIMEOUT, MAX_BODY_BYTES
from sluiceway.server.http import Body, BodyMemory, DisconnectedError, Message, Request, Scope

_ONE_WRITE: Final = 16 << 10
"""Bytes of a body up to which it is copied behind the head instead of written separately: one system call instead of two."""


class _State(Protocol):
    default_headers: list[tuple[bytes, bytes]]


class _Flow(Protocol):
    @property
    def write_paused(self) -> bool: ...

    async def drain(self) -> None: ...


class Connection(Protocol):
    """The part of a connection that an answer needs; `server/connections.py` has one."""

    @property
    def server_state(self) -> _State: ...

    @property
    def flow(self) -> _Flow: ...

    @property
    def transport(self) -> asyncio.Transport: ...

    def on_response_complete(self) -> None: ...


class Direct:
    """A call and its answer on a connection, in place of uvicorn's cycle of ASGI messages.

    It has no code to wait for a request: the request is complete, and no earlier one is unanswered.
    """

    __slots__ = (
        "_connection",
        "_gone",
        "_head",
        "body",
        "disconnected",
        "keep_alive",
        "response_complete",
        "scope",
        "task",
    )

    response_started = True
    """True from the start: no other input on the connection, such as half a request, may be answered in its place."""

    def __init__(self, connection: Connection, scope: Scope, body: bytes, keep_alive: bool) -> None:
        self._connection = connection
        self._gone: Callable[[], None] | None = None
        self._head = b""
        self.scope = scope
        self.body = body
        self.keep_alive = keep_alive
        self.task: asyncio.Task[None] | None = None
        self.disconnected = self.response_complete = False

    # ---- connection events ------------------------------------------------------------------------------------

    def lost(self) -> None:
        """Handle the loss of the client."""
        self.disconnected = True
        if self._gone is not None:
            self._gone()

    # ---- the request ------------------------------------------------------------------------------------------

    def watch(self, gone: Callable[[], None]) -> Callable[[], object]:
        """Call `gone` when the client goes away, until the returned function is called. Raises DisconnectedError if it has gone."""
        if self.disconnected:
            raise DisconnectedError
        self._gone = gone
        return self._watch_no_more

    def _watch_no_more(self) -> None:
        self._gone = None

    # ---- the answer -------------------------------------------------------------------------------------------

    async def send(self, message: Message) -> None:
        """Send an ASGI message of an answer whose length is in its headers. Waits until the connection has room for more."""
        if message["type"] == "http.response.start":
            self._head = self._made(message["status"], message["headers"])
            return
        await self.write(message["body"], more=message.get("more_body", False))

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: Body) -> None:
        """Send a whole answer."""
        self._head = self._made(status, headers)
        await self.write(body)

    async def answer_plainly(self, status: int, content_type: bytes, body: Body, request_id: bytes) -> None:
        """Send a whole answer on a connection that stays, without further headers."""
        first = _first_lines(status, content_type, tuple(self._connection.server_state.default_headers))
        self._head = b"%b%d\r\nx-request-id: %b\r\n\r\n" % (first, len(body), request_id)
        await self.write(body)

    async def write(self, body: Body, more: bool = False) -> None:
        connection = self._connection
        if connection.flow.write_paused and not self.disconnected:
            await connection.flow.drain()
        if self.disconnected:
            return
        head, self._head = self._head, b""
        try:
            if head and len(body) <= _ONE_WRITE:
                connection.transport.write(head + body)
            else:
                connection.transport.writelines((head, body))
        except RuntimeError:
            # uvloop's for a closed connection whose loss was not told yet. Other event loops drop the data.
            self.lost()
            return
        if not more:
            self.response_complete = True
            self.body = b""
            if not self.keep_alive:
                connection.transport.close()
            connection.on_response_complete()

    def _made(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        headers = [*self._connection.server_state.default_headers, *headers]
        if (b"connection", b"close") in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            headers.append((b"connection", b"close"))
        lines = [b"%b: %b\r\n" % header for header in headers]
        head = b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines))
        if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2:
            raise RuntimeError("a header has the end of a line in it")
        return head


@lru_cache(64)
def _first_lines(status: int, content_type: bytes, default_headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """The head of an answer up to its length. Cached: it changes with the date, each second."""
    lines = [b"%b: %b\r\n" % header for header in (*default_headers, (b"content-type", content_type))]
    return STATUS_LINE[status] + b"".join(lines) + b"content-length: "


class WholeRequest(Request):
    """A request whose body has arrived. The body counts, and is available, after `read_body`."""

    __slots__ = ("_direct",)

    def __init__(self, direct: Direct, memory: BodyMemory) -> None:
        super().__init__(direct.scope, _nothing, memory)
        self._direct = direct

    async def read_body(self, most: int = MAX_BODY_BYTES, body_timeout: Millis = BODY_TIMEOUT) -> None:
        """Make the body available; there is no wait. Raises `body_too_large`, `too_many_requests`."""
        self._hold(len(self._direct.body), most)
        self.whole, self.body, self._direct.body = True, self._direct.body, b""

    def watch(self, gone: Callable[[], None]) -> Callable[[], object]:
        return self._direct.watch(gone)


async def _nothing() -> Message:
    raise AssertionError("there is no more of it to come")
