"""Transports: carry a client's calls in place of its own connections, for tests and for observers of each call."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from sluiceway.client.connections import CONNECT_TIMEOUT, Connections
from sluiceway.client.http_messages import Answer, ExchangeError, NoAnswerError, NotSentError, Request
from sluiceway.kernel.errors import invalid

if TYPE_CHECKING:
    import httpx


class Transport(Protocol):
    """Carries calls of threads; `sluiceway.client.connections.Connections` has the meaning of its methods."""

    def exchange(self, request: Request) -> Answer: ...

    def stream(self, request: Request) -> AbstractContextManager[Iterator[Answer]]: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """Carries calls of an event loop; otherwise as `Transport`."""

    async def exchange(self, request: Request) -> Answer: ...

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[Answer]]: ...

    async def aclose(self) -> None: ...


def as_transport(given: Any) -> Transport:
    """The transport, or one over an httpx transport, which 0.1 took."""
    if not hasattr(given, "handle_request"):
        own: Transport = given
        return own
    _warn_of_httpx()
    return HttpxTransport(given)


def as_async_transport(given: Any) -> AsyncTransport:
    """The transport, or one over an httpx transport, which 0.1 took."""
    if not hasattr(given, "handle_async_request"):
        own: AsyncTransport = given
        return own
    _warn_of_httpx()
    return AsyncHttpxTransport(given)


def _warn_of_httpx() -> None:
    said = "transport: one of httpx works up to 0.3; sluiceway.client.transports says what takes its place"
    # Where the client is made.
    warnings.warn(said, DeprecationWarning, stacklevel=5)


def for_asyncio(given: Transport) -> AsyncTransport | None:
    """The same transport for asyncio; None: connections of its own. Raises `invalid_request` for one that is only for threads."""
    if isinstance(given, Connections):
        return None
    if isinstance(given, HttpxTransport):
        import httpx

        if isinstance(given.inner, httpx.AsyncBaseTransport):
            return AsyncHttpxTransport(given.inner)
        if isinstance(given.inner, httpx.HTTPTransport):
            return None
    raise invalid(
        "transport",
        "a consumer needs a transport that is also an httpx.AsyncBaseTransport; pass such a transport or none, or use AsyncClient",
    )


# ---- over httpx ---------------------------------------------------------------------------------------------------------

_LINE: Final = re.compile(r"([^:\r\n]+): ?([^\r\n]*)\r\n")


def _httpx_request(request: Request) -> httpx.Request:
    import httpx

    first, _, lines = request.head.decode("ascii").partition("\r\n")
    method, target, _ = first.split(" ")
    tls, host, port = request.origin
    usual = port == (443 if tls else 80)
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if tls else 'http'}://{shown}{'' if usual else f':{port}'}{target}"
    patience = {"connect": CONNECT_TIMEOUT, "read": request.patience, "write": request.patience, "pool": request.patience}
    stream = httpx.ByteStream(request.body)
    return httpx.Request(method, url, headers=_LINE.findall(lines), stream=stream, extensions={"timeout": patience})


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.RequestError as error:
        unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        kind: type[ExchangeError] = NotSentError if unsent else NoAnswerError
        raise kind(str(error) or type(error).__name__) from error


def _answer(response: httpx.Response, body: bytes) -> Answer:
    return Answer(response.status_code, {name.lower(): value for name, value in response.headers.raw}, body)


class HttpxTransport:
    """Calls of threads over an httpx transport."""

    def __init__(self, inner: httpx.BaseTransport) -> None:
        self.inner = inner

    def exchange(self, request: Request) -> Answer:
        with _translated():
            response = self.inner.handle_request(_httpx_request(request))
            try:
                return _answer(response, response.read())
            finally:
                response.close()

    @contextlib.contextmanager
    def stream(self, request: Request) -> Iterator[Iterator[Answer]]:
        with _translated():
            response = self.inner.handle_request(_httpx_request(request))
            try:
                yield self._parts(response)
            finally:
                response.close()

    def _parts(self, response: httpx.Response) -> Iterator[Answer]:
        yield _answer(response, response.content if response.is_stream_consumed else b"")
        for part in () if response.is_stream_consumed else response.iter_raw():
            yield _answer(response, part)

    def close(self) -> None:
        self.inner.close()


class AsyncHttpxTransport:
    """Calls of an event loop over an httpx transport."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner

    async def exchange(self, request: Request) -> Answer:
        with _translated():
            response = await self.inner.handle_async_request(_httpx_request(request))
            try:
                return _answer(response, await response.aread())
            finally:
                await response.aclose()

    @contextlib.asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[Answer]]:
        with _translated():
            response = await self.inner.handle_async_request(_httpx_request(request))
            try:
                yield self._parts(response)
            finally:
                await response.aclose()

    async def _parts(self, response: httpx.Response) -> AsyncIterator[Answer]:
        yield _answer(response, response.content if response.is_stream_consumed else b"")
        if not response.is_stream_consumed:
            async for part in response.aiter_raw():
                yield _answer(response, part)

    async def aclose(self) -> None:
        await self.inner.aclose()
