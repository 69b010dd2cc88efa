"""The consumer for ordinary, blocking code: handlers run in threads, the rest in an event loop in the background."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from sluiceway.client.aio_consumer import AsyncConsumer
from sluiceway.client.answers import LeasedItem
from sluiceway.client.consumer_common import check_concurrency, not_in_a_block, used_twice


class Consumer:
    """Takes items of one queue and keeps their leases until it is known what becomes of them. Made by `Client.consumer`; used once.

    Each item is offered at least once: it is completed when its handler has returned, or the loop's body has come round, and the server
    has been told. When the lease is lost before that, because the server could not be reached in time, the item is offered again.

    About `prefetch` items wait here while others are handled. Leases last for `lease_timeout`, and are extended, many in one call, once
    a third of that has passed, for as long as their items are held. Outcomes are told many in one call: they wait for others for `linger`.
    While the server cannot be reached, or is busy, it is asked again with growing, jittered pauses; an error that no repetition can
    mend (`unauthenticated`, `forbidden`, `queue_not_found`, …) stops the consumer and is raised.
    """

    def __init__(self, open_consumer: Callable[[], tuple[AsyncConsumer, Callable[[], Any]]]) -> None:
        self._open = open_consumer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumer: AsyncConsumer | None = None
        self._stopped = self._used = False

    def run(self, handler: Callable[[LeasedItem], object], *, concurrency: int = 8) -> None:
        """Give each item to `handler`, in up to `concurrency` threads at once, until `stop`.

        When the handler returns, the item is completed. When it raises `RetryItem`, the item is put back; when it raises `DeadItem`, it
        goes into the dead queue; any other exception puts it back as the queue's `retry_backoff` says, with the exception's type as the
        reason. Ctrl-C stops it, too. Raises what made it stop by itself.
        """
        check_concurrency(concurrency)
        self._use()
        with _Background() as background, ThreadPoolExecutor(concurrency, thread_name_prefix="sluiceway-handler") as pool:

            async def main() -> None:
                async def handle(item: LeasedItem) -> None:
                    await asyncio.get_running_loop().run_in_executor(pool, handler, item)

                consumer, close = self._opened()
                try:
                    await consumer.run(handle, concurrency=concurrency)
                finally:
                    await close()

            running = asyncio.run_coroutine_threadsafe(main(), background.loop)
            try:
                running.result()
            except KeyboardInterrupt:
                self.stop()
                running.result()
                raise

    def stop(self) -> None:
        """Take no more items; release those that were not begun, let handlers end, and tell their outcomes. From any thread."""
        self._stopped = True
        if self._loop is not None and self._consumer is not None:
            # A loop that is closed has nothing left to stop.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._consumer.stop)

    def is_lost(self, item: LeasedItem) -> bool:
        """Whether the item's lease ran out while it was being handled. Somebody else is given it, and its outcome is not told."""
        return self._consumer is not None and self._consumer.is_lost(item)

    def __enter__(self) -> Self:
        self._use()
        self._background = _Background().__enter__()
        self._do(self._enter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._do(self._leave(kind, error, trace))
        finally:
            self._background.__exit__(None, None, None)

    def __iter__(self) -> Iterator[LeasedItem]:
        """The items, until `stop`. One is completed when the next is asked for, unless `retry` or `dead` has said otherwise.

        To be used in a `with` block; at its end, an item whose turn has not come round is put back.
        """
        if self._consumer is None:
            raise not_in_a_block()
        items = aiter(self._consumer)
        while (item := self._do(_next(items))) is not None:
            yield item

    def retry(self, item: LeasedItem, after: str | timedelta | None = None, reason: str | None = None) -> None:
        """In a loop: put this item back, `after` a time or as the queue's `retry_backoff` says."""
        self._do(self._call(lambda consumer: consumer.retry(item, after, reason)))

    def dead(self, item: LeasedItem, reason: str) -> None:
        """In a loop: this item goes into the dead queue."""
        self._do(self._call(lambda consumer: consumer.dead(item, reason)))

    def _use(self) -> None:
        if self._used:
            raise used_twice()
        self._used = True

    def _opened(self) -> tuple[AsyncConsumer, Callable[[], Any]]:
        self._consumer, close = self._open()
        self._loop = asyncio.get_running_loop()
        if self._stopped:
            self._consumer.stop()
        return self._consumer, close

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._background.loop).result()

    async def _call(self, use: Callable[[AsyncConsumer], None]) -> None:
        assert self._consumer is not None
        use(self._consumer)

    async def _enter(self) -> None:
        consumer, self._close = self._opened()
        await consumer.__aenter__()

    async def _leave(self, *given: Any) -> None:
        try:
            assert self._consumer is not None
            await self._consumer.__aexit__(*given)
        finally:
            await self._close()


class _Background:
    """An event loop in a thread, for the length of a block."""

    def __enter__(self) -> Self:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sluiceway-consumer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _next(items: Any) -> LeasedItem | None:
    return await anext(items, None)
