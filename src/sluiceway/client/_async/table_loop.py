"""A consumer's loop over Arrow tables: whole leases go to the handler and are settled as such, without a Python object for each item."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from sluiceway.client import item_calls
from sluiceway.client.answers import Staged
from sluiceway.client.arrow import LeasedTable, read_leased
from sluiceway.client.consumer_common import DeadItem, RetryItem, check_returned, logged_error, named_outcomes, put_back, tell_problem
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Check, Verdict
from sluiceway.client.lease_manager import is_final, refused
from sluiceway.client.outcome_rows import outcome_bodies, outcome_ids, outcome_table
from sluiceway.client.protocol import Call, backoff
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_ITEMS_JSON

log = logging.getLogger("sluiceway.client")

T = TypeVar("T")
TableHandler = Callable[[LeasedTable], Awaitable[object]]
Attempt = Callable[[Call[Any]], Awaitable[Any]]

POLL = timedelta(seconds=20)
SETTLE_TIMEOUT = timedelta(seconds=10)
"""As for single items: see `AsyncConsumer`."""
LAST_ANSWER = 0.5
"""Seconds that a lease call has to answer after a stop. With items there, it takes milliseconds. Then it is cancelled.
The server puts back what it was about to send, but the items of an answer on its way would stay leased."""


class TableLoop:
    """Leases up to `batch_size` items at a time, `concurrency` times at once, and keeps the leases alive while they are handled."""

    def __init__(
        self,
        attempt: Attempt,
        queue_name: str,
        client_id: str,
        lease_timeout: Millis,
        patience: Millis,
        error_messages: bool,
        wait_for_queue: bool,
        runs: bool,
    ) -> None:
        self._attempt, self._queue_name, self._client_id = attempt, queue_name, client_id
        self._lease_timeout, self._patience, self._error_messages = lease_timeout, patience, error_messages
        self._wait_for_queue, self._runs = wait_for_queue, runs
        self._stopping = asyncio.Event()
        self._abandoning = asyncio.Event()
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._give_up_at: float | None = None
        self.problem: str | None = None

    async def run(self, handler: TableHandler, batch_size: int, concurrency: int) -> None:
        """Run until `stop`. Raises the error that stopped it, if any. If it is cancelled, it releases what is being handled."""
        slots = [asyncio.create_task(self._slot(handler, batch_size)) for _ in range(concurrency)]
        try:
            ended, _ = await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
            if any(each.exception() for each in ended):
                self.stop(None)
                await asyncio.wait(slots)
        except asyncio.CancelledError:
            self.stop(0)
            await asyncio.wait(slots)
            raise
        finally:
            if self._abandon_timer is not None:
                self._abandon_timer.cancel()
        for each in slots:
            each.result()

    def stop(self, within: Millis | None) -> None:
        """Lease no more. Handlers may take `within` to finish (None: as long as they need); then their items are released."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._give_up_at = time.monotonic() + self._patience / 1000
        if within == 0:
            self._abandon()
        elif within is not None and self._abandon_timer is None:
            self._abandon_timer = asyncio.get_running_loop().call_later(within / 1000, self._abandon)

    def _abandon(self) -> None:
        self._abandoning.set()
        # What is released has as long as outcomes of handlers that finished before.
        self._give_up_at = time.monotonic() + self._patience / 1000

    async def _slot(self, handler: TableHandler, batch_size: int) -> None:
        failures = 0
        while not self._stopping.is_set():
            lease_timeout = timedelta(milliseconds=self._lease_timeout)
            call = item_calls.lease(self._queue_name, self._client_id, batch_size, POLL, lease_timeout, None, None, runs=self._runs)
            try:
                leased = await _unless(self._stopping, self._attempt(call.as_arrow(read_leased)), LAST_ANSWER)
            except CallError as error:
                if is_final(error) and not (self._wait_for_queue and error.code == "queue_not_found"):
                    raise
                tell_problem(self._queue_name, self.problem, error)
                self.problem = error.detail
                pause = (error.retry_after or 0) / 1000 + backoff(failures, random.random())
                failures += 1
                await _unless(self._stopping, asyncio.sleep(pause))
                continue
            tell_problem(self._queue_name, self.problem, None)
            failures, self.problem, self._wait_for_queue = 0, None, False
            if leased is not None and len(leased):
                if self._stopping.is_set():
                    await self._repeat(item_calls.release(self._queue_name, (), leased.lease_ids, SETTLE_TIMEOUT, Check()))
                else:
                    await self._handle(leased, handler)

    async def _handle(self, leased: LeasedTable, handler: TableHandler) -> None:
        keeping = asyncio.create_task(self._keep(leased))
        began = time.monotonic()
        try:
            outcome = await self._outcome(leased, handler)
            await self._settle(leased, outcome, round((time.monotonic() - began) * 1000))
        finally:
            keeping.cancel()

    async def _outcome(self, leased: LeasedTable, handler: TableHandler) -> list[Call[Staged]] | BaseException | None:
        """The calls that stage the outcomes which the handler returned, its exception, or None if it was abandoned."""

        async def handle() -> object:
            return await handler(leased)

        running = asyncio.create_task(handle())
        waiting = asyncio.create_task(self._abandoning.wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not running.done():
            running.cancel()
            return None
        try:
            returned = running.result()
            check_returned(returned)
            return _staging(leased, returned)
        except BaseException as error:
            if not isinstance(error, RetryItem | DeadItem):
                log.warning("queue %s: handling %d items failed", self._queue_name, len(leased), exc_info=logged_error(error))
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise
            return error

    async def _settle(self, leased: LeasedTable, outcome: list[Call[Staged]] | BaseException | None, handler_time: Millis) -> None:
        name, lease_ids = self._queue_name, leased.lease_ids
        if outcome is None:
            log.warning("queue %s: %d items were released before their handler was done", name, len(leased))
            await self._repeat(item_calls.release(name, (), lease_ids, SETTLE_TIMEOUT, Check()))
            return
        if isinstance(outcome, BaseException):
            retry = replace(put_back("", outcome, self._error_messages), handler_time=f"{handler_time}ms")
            wanted = [replace(retry, id=item_id) for item_id in leased.ids().to_pylist()]
            for at in range(0, len(wanted), MAX_ITEMS_JSON):
                if not await self._repeat(item_calls.retry(name, wanted[at : at + MAX_ITEMS_JSON], SETTLE_TIMEOUT, Check())):
                    # The others would wait as long for a server that is away. They run out with their leases.
                    return
            return
        for call in outcome:
            if not await self._repeat(call):
                # To complete the leases now would complete these items, too. They are offered again instead.
                return
        await self._repeat(item_calls.complete(name, (), lease_ids, SETTLE_TIMEOUT, Check(), [(handler_time, len(leased))]))

    async def _repeat(self, call: Call[Any]) -> bool:
        """Make the call until it succeeds. Returns False if it did not in time. Raises an error that no repetition can fix."""
        failures, failing_since = 0, None
        while True:
            try:
                answer = await self._attempt(call)
            except CallError as error:
                if is_final(error):
                    raise
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                # A handler may have finished long after the stop: its outcome has as much time as others.
                if self._give_up_at is not None and now >= max(self._give_up_at, failing_since + self._patience / 1000):
                    log.warning("queue %s: outcomes could not be sent (%s)", self._queue_name, error.code)
                    return False
                await asyncio.sleep((error.retry_after or 0) / 1000 + backoff(failures, random.random()))
                failures += 1
                continue
            lost = refused(answer.ignored)
            if lost:
                log.warning("queue %s: outcomes of %d items were refused: %s", self._queue_name, len(lost), lost[0].reason)
            return True

    async def _keep(self, leased: LeasedTable) -> None:
        """Extend the leases once a third of their time has passed, and sooner after a failure, until this is cancelled."""
        usual = pause = self._lease_timeout / 3000
        lease_timeout = timedelta(milliseconds=self._lease_timeout)
        failures, kept = 0, leased.lease_ids
        while kept:
            await asyncio.sleep(pause)
            call = item_calls.extend(self._queue_name, kept, (), lease_timeout, SETTLE_TIMEOUT, Check(self._client_id))
            try:
                ended = (await self._attempt(call)).ignored
                kept = [lease_id for lease_id in kept if lease_id not in {each.id for each in ended}]
                pause, failures = usual, 0
                if lost := refused(ended):
                    name, why = self._queue_name, lost[0].reason
                    log.warning(
                        "queue %s: %d leases ended (%s) while their items were handled: these are served again", name, len(lost), why
                    )
            except CallError as error:
                # What is left of the leases' time may be less than another third.
                soon = (error.retry_after or 0) / 1000 + backoff(failures, random.random())
                pause, failures = min(usual, soon) if error.retryable else usual, failures + 1
            except Exception:
                # Nobody would see that the leases are kept no longer.
                log.exception("queue %s: leases were not extended, will retry", self._queue_name)
                pause, failures = min(usual, backoff(failures, random.random())), failures + 1


def _staging(leased: LeasedTable, returned: object) -> list[Call[Staged]]:
    """The calls that stage what a handler returned: ids with their outcomes, or rows of outcomes.

    Raises TypeError as `named_outcomes` does, for rows of other items, and for a data frame that was not computed; `invalid_request` for
    rows that are no outcomes.
    """
    name = leased.queue_name
    if isinstance(returned, Mapping):
        wanted = named_outcomes(set(leased.ids().to_pylist()) if returned else (), returned).values()
        verdicts = [Verdict(each.id, "dead" if each.dead else "retry", each.retry_after, each.reason) for each in wanted]
        portions = [verdicts[at : at + MAX_ITEMS_JSON] for at in range(0, len(verdicts), MAX_ITEMS_JSON)]
        return [item_calls.settle(name, portion, SETTLE_TIMEOUT) for portion in portions]
    if not hasattr(returned, "__arrow_c_stream__"):
        if hasattr(returned, "collect"):
            raise TypeError(f"the handler returned a {type(returned).__name__}, which was not computed: return what `collect` gives")
        return []
    table = outcome_table(returned)
    if other := leased.first_other(outcome_ids(table, leased.incarnation)):
        raise TypeError(f"a handler returns outcomes of its items, not of {other!r}")
    bodies = outcome_bodies(table)
    return [item_calls.settle_stream(name, each.incarnation or leased.incarnation, each, SETTLE_TIMEOUT) for each in bodies]


async def _unless(event: asyncio.Event, work: Awaitable[T], grace: float = 0.0) -> T | None:
    """The result of the work, or None if the event happens `grace` seconds before: the work is then cancelled."""
    running = asyncio.ensure_future(work)
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if grace and not running.done():
            await asyncio.wait({running}, timeout=grace)
        return running.result() if running.done() else None
    finally:
        for each in (running, waiting):
            each.cancel()
