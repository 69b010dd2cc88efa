"""Dispatch of requests to an instance's share of a queue, from its own router and from those of other instances."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from sluiceway.core.queue.partition_executor import not_here
from sluiceway.core.queue.routing import numbers_of
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.local import queries
from sluiceway.local.drain_copy import hand_over_keys, move_out
from sluiceway.local.item_moves import move_items
from sluiceway.local.item_search import search
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.local.redrive import redrive
from sluiceway.local.snapshot_reader import browse
from sluiceway.model.inspection import Browse, DeleteItems, ListItems, MoveItems, RunNow, Search
from sluiceway.model.peers import (
    Close,
    Count,
    CountKeys,
    CountReasons,
    Explain,
    FindLeases,
    GiveKeys,
    HandOverKeys,
    MoveOut,
    NoteKeys,
    Reload,
    ServeSlots,
    ShareRequest,
    Shut,
    TakeKeys,
)
from sluiceway.model.requests import Clear, CountBundles, Extend, Lease, Peek, Produce, Redrive, Settle

IncarnationOf = Callable[[str], str | None]
"""Returns the incarnation of the queue of that name; None: no such queue."""


async def perform(driver: QueueDriver, request: ShareRequest, payload: bool, incarnation_of: IncarnationOf) -> Any:
    """Carry out the request on the partitions served here; `model.peers` defines the answers.

    Raises `not_here`, before doing anything, if it names a partition that is not served here.
    """
    if isinstance(request, Settle | Extend | DeleteItems | RunNow | Clear | CountBundles):
        numbers = numbers_of(request)
        _check_here(driver, numbers)
        try:
            return await driver.ask(request)
        except SluicewayError as error:
            if error.code == "unavailable" and driver.numbers.isdisjoint(numbers):
                # They were removed while it waited. The asking instance may not know yet, and learns it this way.
                raise not_here(numbers[0]) from error
            raise
    if isinstance(request, Produce | Lease):
        if isinstance(request, Lease) and request.partition is not None:
            _check_here(driver, (request.partition,))
        return await driver.ask(request, payload)
    if isinstance(request, Shut | GiveKeys | TakeKeys | NoteKeys | ServeSlots):
        _check_here(driver, (request.partition,))
        done = await driver.ask(request)
        return done.keys if isinstance(request, TakeKeys | NoteKeys | ServeSlots) else done
    if isinstance(request, HandOverKeys):
        return await hand_over_keys(driver, request)
    if isinstance(request, MoveOut):
        # It arrives as one produce, so it is limited to one call's items.
        return await move_out(driver, replace(request, limit=min(request.limit, MAX_ITEMS_ARROW)))
    if isinstance(request, Redrive):
        return await redrive(driver, request, incarnation_of)
    if isinstance(request, MoveItems):
        _check_here(driver, numbers_of(request))
        return await move_items(driver, request, incarnation_of)
    if isinstance(request, Search):
        return await search(driver, request)
    if isinstance(request, Reload):
        return await driver.reload(request.request_timeout)
    if isinstance(request, ListItems):
        return await queries.list_items(driver, request)
    if isinstance(request, Browse):
        return await browse(driver, request)
    if isinstance(request, Peek):
        return await queries.peek(driver, request)
    if isinstance(request, CountKeys):
        return await queries.keys(driver, request.limit)
    if isinstance(request, Explain):
        return await queries.explain(driver, request)
    return _look(driver, request)


def _look(driver: QueueDriver, request: Count | CountReasons | Close | FindLeases) -> Any:
    if isinstance(request, CountReasons):
        return queries.reasons(driver)
    if isinstance(request, FindLeases):
        _check_here(driver, request.partitions)
        return len(queries.keyed_leases(driver, request.client_id, request.lease_key))
    if isinstance(request, Close):
        driver.closing.close_for(request.close_timeout)
        return queries.left(driver)
    return queries.stats(driver)


def _check_here(driver: QueueDriver, numbers: Iterable[int]) -> None:
    for number in numbers:
        if not driver.owns(number):
            raise not_here(number)
