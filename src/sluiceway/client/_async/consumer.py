"""The consumer for asyncio: it carries out what the lease manager decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from sluiceway.client import item_calls
from sluiceway.client._async.channel import AsyncChannel
from sluiceway.client.answers import Ignored, Leased, LeasedItem
from sluiceway.client.consumer_common import DeadItem, RetryItem, check_concurrency, not_in_a_block, put_back, used_twice
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Check, Retry
from sluiceway.client.lease_manager import DONE, Ask, Effect, Extend, HangUp, LeaseManager, Lost, Outcome, Settle
from sluiceway.client.protocol import Call
from sluiceway.kernel.clock import Millis

log = logging.getLogger("sluiceway.client")

T = TypeVar("T")
Handler = Callable[[LeasedItem], Awaitable[object]]
Attempt = Callable[[Call[Any]], Awaitable[Any]]

POLL = timedelta(seconds=20)
"""How long one lease call waits for items. Less than the minute after which proxies give up."""
SETTLE_TIMEOUT = timedelta(seconds=10)
"""How long the server may take to settle or extend leases. The call is then repeated."""


class AsyncConsumer:
    """Leases items of one queue, keeps their leases alive, and settles them. Made by `AsyncClient.consumer`; `Consumer` has the guarantees.

    Use it once: `run` a handler, or iterate over it in an `async with` block. A handler is a coroutine function. It is cancelled when the
    lease of its item is lost, but not with `cancel_lost` false.
    """

    def __init__(self, attempt: Attempt, queue_name: str, client_id: str, manager: LeaseManager, *, cancel_lost: bool = True) -> None:
        self._attempt = attempt
        self._queue_name = queue_name
        self._client_id = client_id
        self._manager = manager
        self._cancel_lost = cancel_lost
        self._handler: Handler | None = None
        self._handling: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._ask: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stirred = asyncio.Event()
        self._ended = asyncio.Event()
        self._begun = False
        self._broken: BaseException | None = None

    # -- handler style ----------------------------------------------------------------------------------------------------

    async def run(self, handler: Handler, *, concurrency: int = 8) -> None:
        """Give each item to `handler`, up to `concurrency` items at once, until `stop`.

        The item is completed when the handler returns. `RetryItem` puts it back, `DeadItem` sends it to the dead queue, and any other
        exception puts it back as the queue's `retry_backoff` says, with the exception's type as the reason. If `run` is cancelled, it
        cancels the handlers and puts their items back. Raises the error that stopped the consumer, if any.
        """
        check_concurrency(concurrency)
        self._handler, self._manager.concurrency = handler, concurrency
        self._begin()
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            for task in self._handling.values():
                task.cancel()
            await self._finish()
            raise
        await self._finish()
        self._raise()

    def stop(self) -> None:
        """Take no more items, release those that were not begun, let handlers finish, and report their outcomes. For the event loop."""
        self._manager.stop()
        if self._begun:
            self._pump()

    def is_lost(self, item: LeasedItem) -> bool:
        """Whether the item's lease ran out while it was being handled. Another consumer is given it, and its outcome is not reported."""
        return item.id in self._manager.lost

    # -- loop style ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for item_id in self._manager.running:
            self._tell(item_id, Retry(item_id, reason="left unfinished") if error is None else put_back(item_id, error))
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
        while (item := self._manager.take()) is None:
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
        self.stop()
        try:
            await self._ended.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in self._calls:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*self._calls, return_exceptions=True)

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
        if self._ended.is_set():
            return
        if self._handler is not None:
            while (item := self._manager.take()) is not None:
                self._handling[item.id] = asyncio.create_task(self._handle(item, self._handler))
        now = _now()
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

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Ask):
            self._ask = self._spawn(self._lease(effect.batch_size))
        elif isinstance(effect, HangUp):
            assert self._ask is not None
            self._ask.cancel()
        elif isinstance(effect, Extend):
            self._spawn(self._extend(effect.lease_ids))
        elif isinstance(effect, Settle):
            self._spawn(self._settle(effect))
        elif isinstance(effect, Lost):
            self._lost(effect.ids)

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
            if self._cancel_lost and item_id in self._handling:
                self._handling[item_id].cancel()

    async def _handle(self, item: LeasedItem, handler: Handler) -> None:
        outcome: Outcome = DONE
        try:
            await handler(item)
        except (RetryItem, DeadItem) as verdict:
            outcome = put_back(item.id, verdict)
        except BaseException as error:
            outcome = put_back(item.id, error)
            if not self.is_lost(item):
                log.warning("queue %s: handling item %s failed", self._queue_name, item.id, exc_info=error)
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
        finally:
            del self._handling[item.id]
            self._tell(item.id, outcome)

    # -- calls ------------------------------------------------------------------------------------------------------------------

    async def _lease(self, batch_size: int) -> None:
        lease_timeout = timedelta(milliseconds=self._manager.lease_timeout)
        call = item_calls.lease(self._queue_name, self._client_id, batch_size, POLL, lease_timeout, None, None)
        try:
            answer = await self._attempt(call)
        except CallError as error:
            self._manager.ask_failed(error, _now(), random.random())
            return
        self._manager.leased(answer, _now())

    async def _extend(self, lease_ids: list[str]) -> None:
        sent_at = _now()
        lease_timeout = timedelta(milliseconds=self._manager.lease_timeout)
        try:
            answer = await self._attempt(
                item_calls.extend(self._queue_name, lease_ids, (), lease_timeout, SETTLE_TIMEOUT, Check(self._client_id))
            )
        except CallError as error:
            self._manager.extend_failed(error, _now(), random.random())
            return
        self._manager.extended(lease_ids, [lease.lease_id for lease in answer.leases], _now(), sent_at)

    async def _settle(self, effect: Settle) -> None:
        name, check = self._queue_name, Check()
        ignored: list[Ignored] = []
        try:
            if effect.done:
                ignored += (await self._attempt(item_calls.complete(name, effect.done, (), SETTLE_TIMEOUT, check))).ignored
            if effect.retries:
                ignored += (await self._attempt(item_calls.retry(name, effect.retries, SETTLE_TIMEOUT, check))).ignored
            if effect.released:
                ignored += (await self._attempt(item_calls.release(name, effect.released, (), SETTLE_TIMEOUT, check))).ignored
        except CallError as error:
            given_up = self._manager.settle_failed(error, _now(), random.random())
            if given_up:
                log.warning("queue %s: the outcomes of %d items could not be sent (%s)", name, len(given_up), error.code)
            return
        for each in self._manager.settled(ignored, _now()):
            log.warning("queue %s: the outcome of item %s was refused: %s", name, each.id, each.reason)


def open_consumer(channel: AsyncChannel, queue_name: str, client_id: str, manager: LeaseManager) -> AsyncConsumer:
    """Return a consumer whose calls go over `channel`."""
    return AsyncConsumer(channel.attempt, queue_name, client_id, manager)


def _now() -> Millis:
    return time.monotonic_ns() // 1_000_000
