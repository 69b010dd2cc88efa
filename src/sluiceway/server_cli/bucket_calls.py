"""Calls to a bucket from code that waits for them: they run on an event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.object_store import UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

T = TypeVar("T")


class BucketCalls:
    """The event loop, for the length of a block. `name`: what the operator calls the bucket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bucket", daemon=True)

    def begin(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the call, which goes on by itself."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def result(self, begun: Future[T]) -> T:
        """Wait for the end of a call. Raises `unavailable` if the bucket does not answer or refuses."""
        try:
            return begun.result()
        except (StoreUnavailableError, UnknownWriteError) as error:
            raise SluicewayError("unavailable", f"{self.name}: {error}", "dir") from error

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Carry out the call. Raises as `result` does."""
        return self.result(self.begin(call))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.begin(_cancel_others()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
