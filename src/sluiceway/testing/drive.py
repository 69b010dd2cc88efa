"""Async tests without a pytest plugin."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Protocol, TypeVar

TEST_TIMEOUT = 300.0
"""Seconds until a waiting test fails. Only a test that hangs takes this long, even on the slowest machine."""


class Closeable(Protocol):
    async def close(self) -> None: ...


S = TypeVar("S", bound=Closeable)

OpenStore = Callable[[], Awaitable[S]]
"""Opens a store; each call opens another one on the same data. A store is closed in the event loop that opened it."""


class Opened(AbstractAsyncContextManager[S]):
    """A store, open for the duration of a block."""

    def __init__(self, open_store: OpenStore[S]) -> None:
        self._open_store = open_store

    async def __aenter__(self) -> S:
        self._store = await self._open_store()
        return self._store

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._store.close()


def driven(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn an async test into one that pytest can run; it takes the same fixtures."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(TEST_TIMEOUT):
                await test(*args, **fixtures)

        asyncio.run(main())

    return run


def with_store(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Turn an async test of a `store` into one for pytest; the fixture `open_store` opens the store."""

    async def opened(self: object, open_store: OpenStore[Any], **fixtures: Any) -> None:
        async with Opened(open_store) as store:
            await test(self, store=store, **fixtures)

    functools.update_wrapper(opened, test)
    signature = inspect.signature(test)
    parameters = [value.replace(name="open_store") if name == "store" else value for name, value in signature.parameters.items()]
    opened.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return driven(opened)
