"""The connection pool of a client. Each connection is its own httpx transport, used by one call at a time, most recently used first.

A single httpx transport would scan all of its connections for each call and ask the operating system about the idle ones. With 64 calls in
flight, that took ten times as long as the call itself.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final, Generic, TypeVar

import httpx

KEPT: Final = 100
"""Maximum number of idle connections to one server. Those in use are not limited, because each waiting lease call holds one."""
IDLE: Final = 30.0
"""Idle connections are closed after this many seconds, before the server does so. A call on a closing connection has an unknown outcome."""

_ONE: Final = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE)
Origin = tuple[bytes, bytes]
L = TypeVar("L")


class _Links(Generic[L]):
    """The connections, and which of them are idle. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[L] = set()
        self._idle: dict[Origin, deque[tuple[L, float]]] = {}

    def take(self, origin: Origin, make: Callable[[], L]) -> L:
        with self._lock:
            idle = self._idle.get(origin)
            if idle:
                return idle.pop()[0]
            link = make()
            self._all.add(link)
            return link

    def give_back(self, origin: Origin, link: L) -> list[L]:
        """Return a connection that is idle now. Returns the connections to close: idle for too long, or too many."""
        now = time.monotonic()
        old = []
        with self._lock:
            if link not in self._all:
                return [link]
            self._idle.setdefault(origin, deque()).append((link, now))
            # This includes connections to servers that are no longer called. There are few servers.
            for server, idle in list(self._idle.items()):
                while idle and (len(idle) > KEPT or idle[0][1] < now - IDLE):
                    old.append(idle.popleft()[0])
                if not idle:
                    del self._idle[server]
            self._all.difference_update(old)
        return old

    def forget(self, link: L) -> None:
        with self._lock:
            self._all.discard(link)

    def forget_all(self) -> list[L]:
        """Remove and return all connections, idle or in use."""
        with self._lock:
            links = list(self._all)
            self._all.clear()
            self._idle.clear()
        return links


def _origin(request: httpx.Request) -> Origin:
    return request.url.raw_scheme, request.url.netloc


class Connections(httpx.BaseTransport):
    """The pool for threads. It takes any number of concurrent calls, to one or several servers."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._context = httpx.create_ssl_context(verify)
        self._links: _Links[httpx.HTTPTransport] = _Links()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        origin = _origin(request)
        link = self._links.take(origin, lambda: httpx.HTTPTransport(verify=self._context, limits=_ONE))
        try:
            response = link.handle_request(request)
        except BaseException:
            self._links.forget(link)
            link.close()
            raise
        assert isinstance(response.stream, httpx.SyncByteStream), "an answer of this kind of transport"
        response.stream = _Held(response.stream, lambda: self._give_back(origin, link))
        return response

    def _give_back(self, origin: Origin, link: httpx.HTTPTransport) -> None:
        for each in self._links.give_back(origin, link):
            each.close()

    def close(self) -> None:
        """Close all, also those in use."""
        for link in self._links.forget_all():
            link.close()


class _Held(httpx.SyncByteStream):
    """An answer's body. Closing it returns its connection to the pool. httpx drops a connection whose body was not read to the end."""

    def __init__(self, stream: httpx.SyncByteStream, free: Callable[[], None]) -> None:
        self._stream = stream
        self._free = free

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._free()


class AsyncConnections(httpx.AsyncBaseTransport):
    """The pool for an event loop. Otherwise as `Connections`."""

    def __init__(self, verify: ssl.SSLContext | bool) -> None:
        self._context = httpx.create_ssl_context(verify)
        self._links: _Links[httpx.AsyncHTTPTransport] = _Links()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        origin = _origin(request)
        link = self._links.take(origin, lambda: httpx.AsyncHTTPTransport(verify=self._context, limits=_ONE))
        try:
            response = await link.handle_async_request(request)
        except BaseException:
            self._links.forget(link)
            await link.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream), "an answer of this kind of transport"
        response.stream = _AsyncHeld(response.stream, lambda: self._give_back(origin, link))
        return response

    async def _give_back(self, origin: Origin, link: httpx.AsyncHTTPTransport) -> None:
        for each in self._links.give_back(origin, link):
            await each.aclose()

    async def aclose(self) -> None:
        """Close all, also those in use."""
        for link in self._links.forget_all():
            await link.aclose()


class _AsyncHeld(httpx.AsyncByteStream):
    """The asyncio counterpart of `_Held`."""

    def __init__(self, stream: httpx.AsyncByteStream, free: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._free = free

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._free()
