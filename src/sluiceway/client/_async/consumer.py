"""The consumer for asyncio: it carries out what the lease manager decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sluiceway.client import item_calls
from sluiceway.client._async.channel import AsyncChannel
from sluiceway.client.answers import Ignored, Leased, LeasedItem
from sluiceway.client.consumer_common import (
    SHUTDOWN_TIMEOUT,
    DeadItem,
    RetryItem,
    batch_outcomes,
    check_batch_size,
    check_concurrency,
    check_returned,
    logged_error,
    not_in_a_block,
    put_back,
    shutdown_millis,
    tell_problem,
    used_twice,
)
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Check, Retry
from sluiceway.client.lease_manager import (
    DONE,
    Abandon,
    Ask,
    Effect,
    Extend,
    HangUp,
    LeaseManager,
    Lost,
    Outcome,
    Settle,
    is_final,
    partition_of,
    refused,
)
from sluiceway.client.protocol import Call, Duration
from sluiceway.client.stop_signals import StopSignals
from sluiceway.kernel.clock import Millis

if TYPE_CHECKING:
    from sluiceway.client._async.table_loop import TableLoop
    from sluiceway.client.arrow import LeasedTable

log = logging.getLogger("sluiceway.client")

T = TypeVar("T")
Handler = Callable[[LeasedItem], Awaitable[object]]
BatchHandler = Callable[[list[LeasedItem]], Awaitable[object]]
Attempt = Callable[[Call[Any]], Awaitable[Any]]

POLL = timedelta(seconds=20)
"""How long one lease call waits for items. Less than the minute after which proxies give up."""
LEASE_PARTITIONS = 100
"""Partitions of a lease call, if the first ones have less than it asks for: each call takes a commit, which may be slow."""
SETTLE_TIMEOUT = timedelta(seconds=10)
"""How long the server may take to settle or extend leases. The call is then repeated."""
_AWAY = ("unavailable", "outcome_unknown", "partition_damaged")
"""Answers of a server to a call on several partitions of which perhaps only one is away."""


class AsyncConsumer:
    """Leases items of one queue, keeps their leases alive, and settles them. Made by `AsyncClient.consumer`; `Consumer` has the guarantees.

    Use it once: `run` a handler, or iterate over it in an `async with` block. A handler is a coroutine function. It is cancelled when the
    lease of its item is lost, but not with `cancel_lost` false.
    """

    def __init__(
        self,
        attempt: Attempt,
        queue_name: str,
        client_id: str,
        manager: LeaseManager,
        *,
        cancel_lost: bool = True,
        error_messages: bool = True,
    ) -> None:
        self._attempt = attempt
        self._queue_name = queue_name
        self._client_id = client_id
        self._manager = manager
        self._cancel_lost = cancel_lost
        self._error_messages = error_messages
        self._handler: BatchHandler | None = None
        self._handlers = self._batch_size = 1
        self._shutdown_timeout: Millis | None = None
        self._tables: TableLoop | None = None
        self._handling: dict[asyncio.Task[None], list[LeasedItem]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._away: set[str] = set()
        """Partitions of which the last call failed, as `partition_of` names them."""
        self._ask: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pumps_soon = False
        self._stirred = asyncio.Event()
        self._ended = asyncio.Event()
        self._begun = False
        self._broken: BaseException | None = None

    # -- handler style ----------------------------------------------------------------------------------------------------

    async def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 8,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give each item to `handler`, up to `concurrency` items at once, until `stop`, SIGTERM or SIGINT.

        The item is completed when the handler returns. `RetryItem` puts it back, `DeadItem` sends it to the dead queue, and any other
        exception puts it back as the queue's `retry_backoff` says, with the exception's type and message as the reason.

        Once stopped, it takes no more items and lets handlers finish. Handlers that take longer than `shutdown_timeout`, and all of them if
        `run` is cancelled or a second signal arrives, are cancelled, and their items released: the attempt does not count. SIGINT has its
        usual effect after that. With `signals` false, or where the program has its own handler of SIGTERM, signals are left alone.

        Raises the error that stopped the consumer, if any.
        """

        async def handle(items: list[LeasedItem]) -> None:
            check_returned(await handler(items[0]))

        await self._run(handle, concurrency, 1, shutdown_timeout, signals)

    async def run_batches(
        self,
        handler: BatchHandler,
        *,
        batch_size: int = 100,
        concurrency: int = 1,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give lists of up to `batch_size` items to `handler`, up to `concurrency` lists at once. Otherwise like `run`.

        The items are completed when the handler returns. For items with another outcome it returns a mapping of their ids to a `RetryItem`
        or a `DeadItem`. An exception puts all items of the list back.
        """
        check_batch_size(batch_size)
        await self._run(handler, concurrency, batch_size, shutdown_timeout, signals)

    async def run_tables(
        self,
        handler: Callable[[LeasedTable], Awaitable[object]],
        *,
        batch_size: int = 10_000,
        concurrency: int = 1,
        shutdown_timeout: Duration = SHUTDOWN_TIMEOUT,
        signals: bool = True,
    ) -> None:
        """Give up to `batch_size` items at a time to `handler` as a `LeasedTable`, up to `concurrency` at once. Otherwise like `run`.

        `leased.table` has the columns that docs/reference/api.md lists for Arrow, and `leased.ids()` the ids. The items are completed
        when the handler returns. It may return a mapping of ids to outcomes, as in `run_batches`, or a data frame of outcomes, as
        `Client.settle_arrow` takes it. Nothing is prefetched: with a `concurrency` of 2, a table is leased while another one is handled.
        """
        from sluiceway.client._async.table_loop import TableLoop

        check_concurrency(concurrency)
        check_batch_size(batch_size)
        if self._begun:
            raise used_twice()
        self._begun, self._shutdown_timeout = True, shutdown_millis(shutdown_timeout)
        manager = self._manager
        self._tables = TableLoop(
            self._attempt,
            self._queue_name,
            self._client_id,
            manager.lease_timeout,
            manager.patience,
            self._error_messages,
            manager.wait_for_queue,
            manager.ordered,
        )
        if manager.stopping:
            self._tables.stop(0)
        with self._stop_signals(signals):
            await self._tables.run(handler, batch_size, concurrency)

    async def _run(self, handler: BatchHandler, concurrency: int, batch_size: int, shutdown_timeout: Duration, signals: bool) -> None:
        check_concurrency(concurrency)
        self._shutdown_timeout = shutdown_millis(shutdown_timeout)
        self._handler, self._handlers, self._batch_size = handler, concurrency, batch_size
        self._manager.concurrency = concurrency * batch_size
        with self._stop_signals(signals):
            self._begin()
            try:
                await self._ended.wait()
            except asyncio.CancelledError:
                self.end()
                await self._finish()
                raise
            await self._finish()
            self._raise()

    def _stop_signals(self, wanted: bool) -> contextlib.AbstractContextManager[object]:
        # Python runs signal handlers between any two instructions, also within `_pump`.
        loop = asyncio.get_running_loop()
        stop, end = (partial(loop.call_soon_threadsafe, each) for each in (self.stop, self.end))
        return StopSignals(stop, end) if wanted else contextlib.nullcontext()

    def stop(self) -> None:
        """Take no more items, release those that were not begun, let handlers finish, and report their outcomes. For the event loop."""
        self._stop(self._shutdown_timeout)

    def end(self) -> None:
        """Stop without waiting for handlers: cancel them, and release their items. For the event loop."""
        self._stop(0)

    def _stop(self, within: Millis | None) -> None:
        """`within`: how long handlers may take to finish; None: as long as they need."""
        if not self._manager.stopping and self._handler is not None:
            log.info("queue %s: stopping; %d handlers finish, the other items are released", self._queue_name, len(self._handling))
        self._manager.stop(None if within is None else _now() + within)
        if self._tables is not None:
            self._tables.stop(within)
        elif self._begun:
            self._pump()

    @property
    def problem(self) -> str | None:
        """Why it gets no items: the error of the last lease call, if that failed. It repeats the call."""
        return self._manager.problem if self._tables is None else self._tables.problem

    @property
    def is_stopping(self) -> bool:
        return self._manager.stopping

    def is_lost(self, item: LeasedItem) -> bool:
        """Whether the item is no longer this consumer's: its lease ran out, or its handler took too long to stop.

        Another consumer is given it, and its outcome is not reported.
        """
        return item.id in self._manager.lost

    # -- loop style ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for item_id in self._manager.running:
            left = Retry(item_id, reason="left unfinished")
            self._tell(item_id, left if error is None else put_back(item_id, error, self._error_messages))
        await self._finish()
        if error is None:
            self._raise()

    async def __aiter__(self) -> AsyncIterator[LeasedItem]:
        if not self._begun:
            raise not_in_a_block()
        while (item := await self._next()) is not None:
            yield item
            self._tell(item.id, DONE)

    def retry(self, item: LeasedItem, after: str | timedelta | None = None, reason: str | None = None) -> None:
        """In a loop: put this item back, to be offered again `after` a time, or as the queue's `retry_backoff` says."""
        self._tell(item.id, put_back(item.id, RetryItem(after, reason)))

    def dead(self, item: LeasedItem, reason: str) -> None:
        """In a loop: send this item to the dead queue with this reason. Without a dead queue it is dropped."""
        self._tell(item.id, put_back(item.id, DeadItem(reason)))

    async def _next(self) -> LeasedItem | None:
        while (item := self._manager.take(_now())) is None:
            if self._manager.stopping or self._ended.is_set():
                return None
            self._stirred.clear()
            await self._stirred.wait()
        self._pump()
        return item

    # -- event loop -----------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._begun:
            raise used_twice()
        self._begun = True
        self._pump()

    async def _finish(self) -> None:
        """Stop and wait until the outcomes are sent. If this is cancelled, the calls in flight are cancelled, too."""
        if not self._manager.stopping:
            self.stop()
        try:
            await self._ended.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            # Tasks of handlers are left only for abandoned items. One that ignores its cancellation is left behind.
            rest = [*self._calls, *self._handling]
            for task in rest:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(rest, timeout=1) if rest else None

    def _raise(self) -> None:
        """Raise the error that stopped the consumer, if any."""
        error = self._broken or self._manager.error
        if error is not None:
            raise error

    def _tell(self, item_id: str, outcome: Outcome) -> None:
        self._manager.finish(item_id, outcome, _now())
        self._pump()

    def _pump(self) -> None:
        """Carry out the effects that are due, and set a timer for the next ones."""
        self._pumps_soon = False
        if self._ended.is_set():
            return
        now = _now()
        # First: a handler is given nothing whose lease ran out while another one kept the event loop busy.
        self._manager.run_out(now)
        if self._handler is not None:
            while len(self._handling) < self._handlers and (items := self._take(now)):
                self._handling[asyncio.create_task(self._handle(items, self._handler))] = items
        for effect in self._manager.decide(now):
            self._carry_out(effect)
        self._stirred.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._manager.ended:
            self._ended.set()
            return
        at = self._manager.wake_at()
        if at is not None:
            self._timer = asyncio.get_running_loop().call_later(max(1, at - now) / 1000, self._pump)

    def _pump_soon(self) -> None:
        """Call `_pump` once for all handlers that end in this iteration of the event loop: one costs half as much as handling an item."""
        if not self._pumps_soon:
            self._pumps_soon = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _take(self, now: Millis) -> list[LeasedItem]:
        """The next items to handle together; empty if none waits."""
        items: list[LeasedItem] = []
        while len(items) < self._batch_size and (item := self._manager.take(now)) is not None:
            items.append(item)
        return items

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Ask):
            self._ask = self._spawn(self._lease(effect.batch_size))
        elif isinstance(effect, HangUp):
            assert self._ask is not None
            self._spawn(_cancel_unless_answered(self._ask))
        elif isinstance(effect, Extend):
            self._spawn(self._extend(effect.lease_ids))
        elif isinstance(effect, Settle):
            self._spawn(self._settle(effect))
        elif isinstance(effect, Lost):
            self._lost(effect.ids)
        elif isinstance(effect, Abandon):
            log.warning("queue %s: %d items were released before their handlers were done", self._queue_name, len(effect.ids))
            self._cancel_handlers()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._called)
        return task

    def _called(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if task is self._ask and task.cancelled():
            # The server puts back the items that it was about to send.
            self._manager.leased(Leased(queue_name=self._queue_name), _now())
        elif not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
            self._ended.set()
            self._stirred.set()
        self._pump()

    def _lost(self, ids: list[str]) -> None:
        for item_id in ids:
            log.warning("queue %s: the lease of item %s ran out while it was being handled", self._queue_name, item_id)
        self._cancel_handlers()

    def _cancel_handlers(self) -> None:
        """Cancel the handlers that have none but lost items, if handlers can be cancelled."""
        loop = asyncio.get_running_loop()
        for task, items in self._handling.items() if self._cancel_lost else ():
            if all(self.is_lost(item) for item in items):
                # Once it has begun: a task that is cancelled before never gets to `_handle`, which would not see its end.
                loop.call_soon(task.cancel)

    async def _handle(self, items: list[LeasedItem], handler: BatchHandler) -> None:
        outcomes: Mapping[str, Outcome] = {}
        try:
            outcomes = batch_outcomes(items, await handler(items))
        except BaseException as error:
            outcomes = {item.id: put_back(item.id, error, self._error_messages) for item in items}
            if not isinstance(error, RetryItem | DeadItem) and not all(self.is_lost(item) for item in items):
                log.warning("queue %s: handling %s failed", self._queue_name, _named(items), exc_info=logged_error(error))
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            task = asyncio.current_task()
            assert task is not None
            del self._handling[task]
            for item in items:
                # Without an outcome, since there was no memory for one: only what was handled is done.
                self._manager.finish(item.id, outcomes.get(item.id) or Retry(item.id), _now())
            self._pump_soon()

    # -- calls ------------------------------------------------------------------------------------------------------------------

    async def _lease(self, batch_size: int) -> None:
        lease_timeout = timedelta(milliseconds=self._manager.lease_timeout)
        runs = self._manager.ordered
        call = item_calls.lease(self._queue_name, self._client_id, batch_size, POLL, lease_timeout, LEASE_PARTITIONS, None, runs=runs)
        try:
            answer = await self._attempt(call)
        except CallError as error:
            before = self._manager.problem
            self._manager.ask_failed(error, _now(), random.random())
            if self._manager.error is None:
                tell_problem(self._queue_name, before, error)
            return
        tell_problem(self._queue_name, self._manager.problem, None)
        self._manager.leased(answer, _now())

    async def _extend(self, lease_ids: list[str]) -> None:
        async def extend(some: list[str]) -> None:
            sent_at, lease_timeout = _now(), timedelta(milliseconds=self._manager.lease_timeout)
            call = item_calls.extend(self._queue_name, some, (), lease_timeout, SETTLE_TIMEOUT, Check(self._client_id))
            answer = await self._attempt(call)
            self._manager.extended_some(some, [lease.lease_id for lease in answer.leases], _now(), sent_at)

        error = await self._in_parts(lease_ids, extend)
        if error is None:
            self._manager.extended((), (), _now(), _now())
        else:
            self._manager.extend_failed(error, _now(), random.random())

    async def _settle(self, effect: Settle) -> None:
        name = self._queue_name

        async def settle(some: list[str]) -> None:
            for each in refused(await self._settle_some(effect.of({*some}.__contains__))):
                log.warning("queue %s: the outcome of item %s was refused: %s", name, each.id, each.reason)
            self._manager.settled_some(some)

        error = await self._in_parts(effect.ids, settle)
        if error is None:
            self._manager.settled((), _now())
        elif given_up := self._manager.settle_failed(error, _now(), random.random()):
            log.warning("queue %s: the outcomes of %d items could not be sent (%s)", name, len(given_up), error.code)

    async def _settle_some(self, effect: Settle) -> list[Ignored]:
        name, check, handler_times = self._queue_name, Check(), self._manager.handler_times(effect.done)
        ignored: list[Ignored] = []
        if effect.done:
            ignored += (await self._attempt(item_calls.complete(name, effect.done, (), SETTLE_TIMEOUT, check, handler_times))).ignored
        if effect.retries:
            ignored += (await self._attempt(item_calls.retry(name, effect.retries, SETTLE_TIMEOUT, check))).ignored
        if effect.released:
            ignored += (await self._attempt(item_calls.release(name, effect.released, (), SETTLE_TIMEOUT, check))).ignored
        return ignored

    async def _in_parts(self, ids: Iterable[str], send: Callable[[list[str]], Awaitable[None]]) -> CallError | None:
        """Send all of the ids together, but those of partitions that are away apart: they fail any call that names one of them.

        Returns the error of what has failed, if anything has.
        """
        groups: dict[str, list[str]] = {}
        for each in ids:
            partition = partition_of(each)
            groups.setdefault(partition if partition in self._away else "", []).append(each)
        errors = await asyncio.gather(*(self._part(group, send) for group in groups.values()))
        failed = sorted((each for each in errors if each is not None), key=is_final)
        return failed[-1] if failed else None

    async def _part(self, ids: list[str], send: Callable[[list[str]], Awaitable[None]]) -> CallError | None:
        """Send the ids. If that fails because a partition may be away, find out which, and send the others without it."""
        partitions = {*map(partition_of, ids)}
        try:
            await send(ids)
        except CallError as error:
            if error.code not in _AWAY or error.request_id is None:
                return error
            self._away |= partitions
            return error if len(partitions) == 1 else await self._in_parts(ids, send)
        self._away -= partitions
        return None


def open_consumer(
    channel: AsyncChannel, queue_name: str, client_id: str, manager: LeaseManager, error_messages: bool = True
) -> AsyncConsumer:
    """Return a consumer whose calls go over `channel`."""
    return AsyncConsumer(channel.attempt, queue_name, client_id, manager, error_messages=error_messages)


async def _cancel_unless_answered(call: asyncio.Task[None]) -> None:
    """Cancel the call, but not before it has read an answer that is here: a handler may have kept the event loop busy for long.

    What arrives in this iteration of the event loop, or waits for the next one, wakes the call in the iteration after that.
    """
    for _ in range(3):
        await asyncio.sleep(0)
    call.cancel()


def _named(items: list[LeasedItem]) -> str:
    return f"item {items[0].id}" if len(items) == 1 else f"{len(items)} items ({items[0].id}, …)"


def _now() -> Millis:
    return time.monotonic_ns() // 1_000_000
