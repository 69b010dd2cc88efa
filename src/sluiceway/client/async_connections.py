"""The connection pool of the asyncio client; otherwise as `connections`, which comes without asyncio, as that takes long to import."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Self, cast

from sluiceway.client.connections import CHUNK, CONNECT_TIMEOUT, Links, watch, why
from sluiceway.client.http_messages import Answer, AnswerParser, NoAnswerError, NotSentError, Origin, Request

HELD: Final = 1 << 20
"""Bytes of a stream that wait for their reader, above which no more are read from the socket."""


class AsyncConnection(asyncio.Protocol):
    """A connection of an event loop, for `connect`."""

    def __init__(self) -> None:
        self._parser = AnswerParser()
        self._transport: asyncio.Transport
        self._loop: asyncio.AbstractEventLoop
        self._is_quiet: Callable[[], bool]
        self._waiter: asyncio.Future[None] | None = None
        self._error: NoAnswerError | None = None
        self._streams = False
        self._patience = 0.0
        self._heard = 0.0

    @classmethod
    async def connect(cls, origin: Origin, context: ssl.SSLContext | None) -> Self:
        """Raises NotSentError."""
        name = None if context is None else origin.host
        failed: Exception = OSError("the name has no address")
        try:
            for address in await _addresses(origin):
                try:
                    # Each has its own time, so that one which does not answer hides none of the others.
                    async with asyncio.timeout(CONNECT_TIMEOUT):
                        loop = asyncio.get_running_loop()
                        _, made = await loop.create_connection(cls, address, origin.port, ssl=context, server_hostname=name)
                    return made
                except OSError as error:
                    failed = error
            raise failed
        except (OSError, ValueError) as error:
            raise NotSentError(why(error)) from error

    def is_usable(self) -> bool:
        """Whether the connection, which is idle, is open."""
        return not self._transport.is_closing() and self._is_quiet()

    def is_reusable(self) -> bool:
        """Whether the last answer has left the connection in a state for another request."""
        return self._parser.is_reusable and not self._transport.is_closing()

    async def exchange(self, request: Request) -> Answer:
        """Raises NoAnswerError."""
        self._send(request)
        await self._wait()
        return self._parser.answer()

    def _send(self, request: Request) -> None:
        if self._transport.is_closing():
            raise NoAnswerError("the connection was closed")
        self._parser.begin()
        self._patience = request.patience
        if len(request.body) < CHUNK:
            self._transport.write(request.head + request.body)
        else:
            self._transport.writelines((request.head, request.body))

    async def _wait(self) -> None:
        """Wait until the answer is complete; of a stream, until there is more of it."""
        if self._error is not None:
            raise self._error
        self._heard = self._loop.time()
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._patience, self._expire)
        try:
            await waiter
        finally:
            self._waiter = None
            timer.cancel()

    def _expire(self) -> None:
        """Give up, unless some of the answer has arrived since."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        left = self._heard + self._patience - self._loop.time()
        if left > 0.001:
            self._loop.call_later(left, self._expire)
        else:
            self._fail(NoAnswerError("timed out"))

    def _fail(self, error: NoAnswerError) -> None:
        self._error = self._error or error
        self._parser.is_reusable = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    async def parts(self, request: Request) -> AsyncIterator[Answer]:
        """As `Connection.parts`."""
        parser, self._streams = self._parser, True
        self._send(request)
        while not parser.has_head:
            await self._wait()
        yield Answer(parser.status, parser.headers, b"")
        while parser.parts or not parser.is_complete:
            parts, parser.parts = parser.parts, []
            self._transport.resume_reading()
            for part in parts:
                yield Answer(parser.status, parser.headers, part)
            if not parts:
                await self._wait()

    def close(self) -> None:
        self._transport.abort()

    # ---- called by the event loop -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._loop = cast(asyncio.Transport, transport), asyncio.get_running_loop()
        self._is_quiet = watch(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        parser = self._parser
        try:
            parser.feed(data)
        except NoAnswerError as error:
            self._fail(error)
            return
        if self._streams and sum(map(len, parser.parts)) > HELD:
            self._transport.pause_reading()
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (self._parser.is_complete or self._streams):
            waiter.set_result(None)

    def eof_received(self) -> None:
        self._parser.is_reusable = False
        try:
            self._parser.end()
        except NoAnswerError as error:
            self._fail(error)
        else:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._parser.is_complete:
            self._fail(NoAnswerError("the connection was closed" if error is None else why(error)))


async def _addresses(origin: Origin) -> list[str]:
    """The addresses of the server, in the order in which to try them. Raises OSError, ValueError."""
    if ":" in origin.host or origin.host.replace(".", "").isdigit():
        return [origin.host]
    async with asyncio.timeout(CONNECT_TIMEOUT):
        found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    return [_named(each[4]) for each in found]


def _named(address: tuple[Any, ...]) -> str:
    """The text of a socket's address, with its link if it is only valid there."""
    return f"{address[0]}%{address[3]}" if len(address) > 3 and address[3] else str(address[0])


class AsyncConnections:
    """The pool for an event loop. Otherwise as `Connections`."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._links: Links[AsyncConnection] = Links()

    async def exchange(self, request: Request) -> Answer:
        """Send the request and return its answer. Raises NotSentError, NoAnswerError."""
        link = await self._take(request.origin)
        try:
            answer = await link.exchange(request)
        except BaseException:
            self._drop(link)
            raise
        if link.is_reusable():
            for each in self._links.give_back(request.origin, link):
                each.close()
        else:
            self._drop(link)
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[Answer]]:
        """As `Connections.stream`."""
        link = await AsyncConnection.connect(request.origin, self._context if request.origin.tls else None)
        self._links.add(link)
        try:
            yield link.parts(request)
        finally:
            self._drop(link)

    async def _take(self, origin: Origin) -> AsyncConnection:
        while True:
            link, old = self._links.take(origin)
            for each in old:
                each.close()
            if link is None:
                link = await AsyncConnection.connect(origin, self._context if origin.tls else None)
                self._links.add(link)
                return link
            if link.is_usable():
                return link
            self._drop(link)

    def _drop(self, link: AsyncConnection) -> None:
        self._links.forget(link)
        link.close()

    async def aclose(self) -> None:
        """Close all, also those in use."""
        for link in self._links.forget_all():
            link.close()
