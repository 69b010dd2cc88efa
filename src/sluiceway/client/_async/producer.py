"""The producer for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from sluiceway.client import answers
from sluiceway.client.batching import Batch, Batching, BatchLimits
from sluiceway.client.producer_common import Posting, checked_item, closed, cut_off
from sluiceway.client.protocol import Call
from sluiceway.kernel.clock import Millis

Done = asyncio.Future[None]


class AsyncSent:
    """An item that was sent. Awaiting it returns the item's id once the item is stored, or raises the error that it failed with."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: Batch[Done], at: int) -> None:
        self._batch = batch
        self._at = at

    def __await__(self) -> Generator[Any, None, str]:
        self._batch.asked.add(self._at)
        if not self._batch.done.done():
            # A caller that is cancelled while it waits must not cancel the batch, which has other items.
            yield from asyncio.shield(self._batch.done).__await__()
        return self._batch.id_of(self._at)

    def done(self) -> bool:
        """Whether the item is stored or has failed."""
        return self._batch.done.done()


class AsyncProducer:
    """Sends items to one queue in batches, in tasks of the event loop. Made by `AsyncClient.producer`; `Producer` has the guarantees.

    Await `send` to buffer an item, and await its result to know that the item is stored.
    """

    def __init__(self, run: Callable[[Call[answers.Produced], float], Awaitable[answers.Produced]], posting: Posting, limits: BatchLimits):
        self._run = run
        self._posting = posting
        self._batching: Batching[Done] = Batching(limits, lambda: asyncio.get_running_loop().create_future())
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pumps_soon = False
        self._moved: Done | None = None
        """Done when a batch has ended. A `send` that waits for room then checks again."""
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(Exception):
            await self.close()

    async def send(
        self,
        payload: object,
        *,
        kind: str | None = None,
        encoding: str | None = None,
        reference: str | None = None,
        headers: Mapping[str, str] | None = None,
        enqueue_at: datetime | None = None,
        key: str | None = None,
        priority: int | None = None,
        unique_key: str | None = None,
    ) -> AsyncSent:
        """Put an item into the next batch, and return it without waiting until it is stored.

        A payload that is neither bytes nor text is sent as JSON, as `Item` says. The item is not served before `enqueue_at`. Waits while
        `max_buffered` bytes are buffered or being sent. Raises `invalid_request` for an item that no server would take, and `unavailable`
        if the producer is closed.
        """
        item, size = checked_item(payload, kind, encoding, reference, headers, enqueue_at, key, priority, unique_key)
        while not self._closed and not self._batching.has_room(size):
            if self._moved is None:
                self._moved = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._moved)
        if self._closed:
            raise closed()
        sent = AsyncSent(*self._batching.add(item, size, _now()))
        self._pump_soon()
        return sent

    async def flush(self) -> None:
        """Send all waiting items at once. Returns when every item sent so far is stored or has failed.

        Raises the first failure of an item whose result was not asked for.
        """
        self._batching.flush(_now())
        self._pump()
        waited_for = [batch.done for batch in self._batching.unfinished]
        if waited_for:
            await asyncio.wait(waited_for)
        error = self._batching.unheard()
        if error is not None:
            raise error

    async def close(self) -> None:
        """Take no more items, and flush. Raises as `flush`."""
        self._closed = True
        await self.flush()

    def _pump_soon(self) -> None:
        """Call `_pump` once for all items that are sent in this iteration of the event loop, so that they share a batch."""
        if not self._pumps_soon:
            self._pumps_soon = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumps_soon = False
        now = _now()
        while (batch := self._batching.take(now)) is not None:
            task = asyncio.create_task(self._deliver(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        at = self._batching.wake_at()
        if at is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(max(1, at - now) / 1000, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._pump()

    async def _deliver(self, batch: Batch[Done]) -> None:
        try:
            again = True
            while again:
                try:
                    batch.produced = await self._run(self._posting.call(batch), self._posting.retry_for)
                    again = False
                except Exception as error:
                    again = self._posting.failed(batch, error)
        except BaseException:
            batch.error = cut_off()
            raise
        finally:
            self._batching.ended(batch)
            if not batch.done.done():
                batch.done.set_result(None)
            if self._moved is not None:
                self._moved.set_result(None)
                self._moved = None
            self._pump()


def _now() -> Millis:
    return time.monotonic_ns() // 1_000_000
