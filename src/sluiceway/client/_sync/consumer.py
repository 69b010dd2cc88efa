"""The consumer for blocking code: handlers run in threads, an asyncio consumer runs in a background event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import wait
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sluiceway.client._async.channel import AsyncChannel
from sluiceway.client._async.consumer import AsyncConsumer
from sluiceway.client._sync.channel import Channel
from sluiceway.client.answers import LeasedItem
from sluiceway.client.consumer_common import SHUTDOWN_TIMEOUT, check_concurrency, not_in_a_block, shutdown_millis, used_twice
from sluiceway.client.handler_threads import HandlerThreads
from sluiceway.client.lease_manager import LeaseManager
from sluiceway.client.protocol import Duration
from sluiceway.client.stop_signals import StopSignals
from sluiceway.client.transports import for_asyncio

if TYPE_CHECKING:
    from sluiceway.client.arrow import LeasedTable


SIGNAL_DELAY = 1.0
"""Seconds after which a signal is noticed at the latest."""


class Consumer:
    """Leases items of one queue, keeps their leases alive, and settles them. Made by `Client.consumer`; used once.

    Each item is offered at least once. It is completed when its handler returns, or the loop asks for the next item, and the server
    has been told. If the lease is lost before that, because the server could not be reached in time, the item is offered again.

    About `prefetch` items wait while others are handled. Leases last for `lease_timeout`, and are extended, many in one call, once a third
    of that has passed, for as long as their items are held. Outcomes are reported many in one call: they wait for others for `linger`.
    A partition that is away holds up no leases and outcomes of others.
    While the server is unreachable or busy, calls are repeated with growing, jittered pauses. An error that no repetition can fix
    (`unauthenticated`, `forbidden`, `queue_not_found`, …) stops the consumer and is raised.
    """

    def __init__(self, open_consumer: Callable[[], tuple[AsyncConsumer, Callable[[], Any]]]) -> None:
        self._open = open_consumer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._consumer: AsyncConsumer | None = None
        self._stopped = self._used = False

    def run(
        self,
        handler: Callable[[LeasedItem], object],
        *,
        concurrency: int = 8,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give each item to `handler`, in up to `concurrency` threads at once, until `stop`, SIGTERM or SIGINT.

        The item is completed when the handler returns. `RetryItem` puts it back, `DeadItem` sends it to the dead queue, and any other
        exception puts it back as the queue's `retry_backoff` says, with the exception's type and message as the reason.

        Once stopped, it takes no more items and lets handlers finish. The items of handlers that take longer than `shutdown_timeout`, and
        of all handlers after a second signal, are released: the attempt does not count. Their threads cannot be ended, but the process can
        end without them. SIGINT raises KeyboardInterrupt after that. Signals are left alone with `signals` false, outside the
        main thread, and where the program has its own handler of SIGTERM.

        Raises the error that stopped the consumer, if any.
        """

        async def consume(consumer: AsyncConsumer, threads: HandlerThreads) -> None:
            async def handle(item: LeasedItem) -> object:
                return await asyncio.wrap_future(threads.submit(handler, item))

            await consumer.run(handle, concurrency=concurrency, shutdown_timeout=shutdown_timeout, signals=False)

        self._run(consume, concurrency, shutdown_timeout, signals)

    def run_batches(
        self,
        handler: Callable[[list[LeasedItem]], object],
        *,
        batch_size: int = 100,
        concurrency: int = 1,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give lists of up to `batch_size` items to `handler`, in up to `concurrency` threads at once. Otherwise like `run`.

        The items are completed when the handler returns. For items with another outcome it returns a mapping of their ids to a `RetryItem`
        or a `DeadItem`. An exception puts all items of the list back.
        """

        async def consume(consumer: AsyncConsumer, threads: HandlerThreads) -> None:
            async def handle(items: list[LeasedItem]) -> object:
                return await asyncio.wrap_future(threads.submit(handler, items))

            await consumer.run_batches(
                handle, batch_size=batch_size, concurrency=concurrency, shutdown_timeout=shutdown_timeout, signals=False
            )

        self._run(consume, concurrency, shutdown_timeout, signals)

    def run_tables(
        self,
        handler: Callable[[LeasedTable], object],
        *,
        batch_size: int = 10_000,
        concurrency: int = 1,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give up to `batch_size` items at a time to `handler` as a `LeasedTable`, in up to `concurrency` threads. Otherwise like `run`.

        `leased.table` has the columns that docs/reference/api.md lists for Arrow, and `leased.ids()` the ids. The items are completed
        when the handler returns. It may return a mapping of ids to outcomes, as in `run_batches`, or a data frame of outcomes, as
        `Client.settle_arrow` takes it. Nothing is prefetched: with a `concurrency` of 2, a table is leased while another one is handled.
        """

        async def consume(consumer: AsyncConsumer, threads: HandlerThreads) -> None:
            async def handle(leased: LeasedTable) -> object:
                return await asyncio.wrap_future(threads.submit(handler, leased))

            await consumer.run_tables(
                handle, batch_size=batch_size, concurrency=concurrency, shutdown_timeout=shutdown_timeout, signals=False
            )

        self._run(consume, concurrency, shutdown_timeout, signals)

    def _run(
        self,
        consume: Callable[[AsyncConsumer, HandlerThreads], Coroutine[Any, Any, None]],
        concurrency: int,
        shutdown_timeout: Duration,
        signals: bool,
    ) -> None:
        check_concurrency(concurrency)
        shutdown_millis(shutdown_timeout)
        self._use()
        threads = HandlerThreads(concurrency)

        async def main() -> None:
            consumer, close = self._opened()
            try:
                await consume(consumer, threads)
            finally:
                threads.close()
                await close()

        with _Background() as background, StopSignals(self.stop, self.end) if signals else contextlib.nullcontext():
            running = asyncio.run_coroutine_threadsafe(main(), background.loop)
            try:
                # A signal that another thread was given does not wake this one, which runs the handlers of signals.
                while not wait([running], SIGNAL_DELAY).done:
                    pass
                running.result()
            except KeyboardInterrupt:
                self.stop()
                running.result()
                raise

    def stop(self) -> None:
        """Take no more items, release those that were not begun, let handlers finish, and report their outcomes. For any thread."""
        self._stopped = True
        self._call_soon(AsyncConsumer.stop)

    def end(self) -> None:
        """Stop without waiting for handlers, whose items are released: the attempt does not count. For any thread."""
        self._stopped = True
        self._call_soon(AsyncConsumer.end)

    def _call_soon(self, use: Callable[[AsyncConsumer], None]) -> None:
        if self._loop is not None and self._consumer is not None:
            # A loop that is closed has nothing left to stop.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(use, self._consumer)

    @property
    def problem(self) -> str | None:
        """Why it gets no items: the error of the last lease call, if that failed. It repeats the call."""
        return None if self._consumer is None else self._consumer.problem

    @property
    def is_stopping(self) -> bool:
        return self._stopped or (self._consumer is not None and self._consumer.is_stopping)

    def is_lost(self, item: LeasedItem) -> bool:
        """Whether the item is no longer this consumer's: its lease ran out, or its handler took too long to stop.

        Another consumer is given it, and its outcome is not reported.
        """
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
        """Yield items until `stop`. An item is completed when the next one is asked for, unless it was given to `retry` or `dead`.

        Use it in a `with` block. At the end of the block, the item in hand is put back.
        """
        if self._consumer is None:
            raise not_in_a_block()
        items = aiter(self._consumer)
        while (item := self._do(_next(items))) is not None:
            yield item

    def retry(self, item: LeasedItem, after: str | timedelta | None = None, reason: str | None = None) -> None:
        """In a loop: put this item back, to be offered again `after` a time, or as the queue's `retry_backoff` says."""
        self._do(self._call(lambda consumer: consumer.retry(item, after, reason)))

    def dead(self, item: LeasedItem, reason: str) -> None:
        """In a loop: send this item to the dead queue with this reason. Without a dead queue it is dropped."""
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


def open_consumer(channel: Channel, queue_name: str, client_id: str, manager: LeaseManager, error_messages: bool = True) -> Consumer:
    """Return a consumer that calls the server of `channel`, over an asyncio channel of its own while it runs.

    That consumer raises `invalid_request` when it starts, if the channel's transport is a user's that does not also serve asyncio.
    """

    def opened() -> tuple[AsyncConsumer, Callable[[], Any]]:
        own = _async_channel(channel)
        return AsyncConsumer(own.attempt, queue_name, client_id, manager, cancel_lost=False, error_messages=error_messages), own.close

    return Consumer(opened)


def _async_channel(channel: Channel) -> AsyncChannel:
    transport = for_asyncio(channel.transport)
    direct = channel.direct is not None
    return AsyncChannel(channel.endpoint, channel.retry_for, ca_file=channel.ca_file, direct=direct, transport=transport)


class _Background:
    """An event loop in a thread, which ends with the block."""

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
