"""Item moves: sends waiting items, named by id, to another queue, and waits for their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from sluiceway.adapters import system
from sluiceway.core.partition.item_listing import waiting_among, why_left
from sluiceway.core.queue.tickets import TakeOut, TransferBegun
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import ItemId
from sluiceway.local.redrive import Arrival, Route, arrived, incarnations, left, source_of
from sluiceway.model.inspection import MovedAway, MoveItems
from sluiceway.model.item_filter import column_bit
from sluiceway.model.leased_items import Slice, present, take_rows, with_columns
from sluiceway.model.requests import Offsets

if TYPE_CHECKING:
    from sluiceway.core.queue.partition_executor import PartitionExecutor
    from sluiceway.local.queue_driver import QueueDriver

Begun = tuple[TransferBegun, asyncio.Future[bool]]
"""A transfer that has begun, and its arrival."""
Failed = tuple[list[str], SluicewayError]
"""Ids of a partition, and the error that says what became of them."""


async def move_items(driver: QueueDriver, request: MoveItems, incarnation_of: Callable[[str], str | None]) -> MovedAway:
    """Begin the transfers and wait for these until `request_timeout`. Transfers that have begun continue after that.

    Raises `queue_not_found` if a target does not exist (nothing was moved), and what `QueueDriver.ask` raises if nothing was. If some
    partitions fail and others do not, the ids of those are ignored with the error's code.
    """
    deadline = system.now() + request.request_timeout
    if request.target == driver.record.queue_name:
        raise invalid("target", "the items are already in this queue")
    result = MovedAway()
    routes, failures = await _routes(driver, request, result)
    targets = incarnations({route.target for route in routes}, incarnation_of)
    # All at once: one that hangs must not use up the time of the others.
    asked = (
        _begin(driver, TakeOut(at, offsets, to, left(deadline), opening, targets[to], True))
        for (at, to, opening), offsets in routes.items()
    )
    answers: list[Begun | BaseException] = await asyncio.gather(*asked, return_exceptions=True)
    arrivals: list[Arrival] = []
    for (route, offsets), answer in zip(routes.items(), answers, strict=True):
        if isinstance(answer, SluicewayError):
            failures.append((_names(driver, route.partition, offsets), answer))
        elif isinstance(answer, BaseException):
            raise answer
        else:
            begun, arrival = answer
            result.matched += begun.items
            result.ignored += begun.ignored
            if begun.items:
                arrivals.append(Arrival(route.target, begun.items, arrival))
    result.note_failures(failures)
    result.targets = await arrived(arrivals, deadline)
    result.moved = sum(result.targets.values())
    return result


async def _begin(driver: QueueDriver, request: TakeOut) -> Begun:
    """Begin a transfer. Its arrival is looked for at once: later it may have ended, and how is not known any more."""
    begun: TransferBegun = await driver.ask(request)
    return begun, driver.transfers.arrival(request.partition, begun.number)


async def _routes(driver: QueueDriver, request: MoveItems, result: MovedAway) -> tuple[dict[Route, Offsets], list[Failed]]:
    """Where the items go, and those whose partition is not open. Items without a source to go back to are ignored in `result`."""
    routes: dict[Route, Offsets] = {}
    failures: list[Failed] = []
    for number, offsets in request.offsets.items():
        try:
            executor = driver.executor(number)
            if request.target is not None:
                routes[Route(number, request.target, executor.opening)] = offsets
            else:
                routes |= await _routes_back(driver, executor, offsets, result)
        except SluicewayError as error:
            failures.append((_names(driver, number, offsets), error))
    return routes, failures


async def _routes_back(driver: QueueDriver, executor: PartitionExecutor, offsets: Offsets, result: MovedAway) -> dict[Route, Offsets]:
    """The routes of dead items of one partition to the queues in which they died."""
    number, opening = executor.number, executor.opening
    waiting = waiting_among(executor.partition, offsets)
    there = {offset for piece in waiting for offset in piece.offsets.tolist()}
    left_alone = {offset: why_left(executor.partition, offset) for offset in offsets.tolist() if offset not in there}
    sources = await _sources(driver, number, waiting)
    left_alone |= {offset: "no_source" if offset in sources else "gone" for offset in there if sources.get(offset) is None}
    result.ignored += [(str(ItemId(driver.record.incarnation, number, offset)), why) for offset, why in sorted(left_alone.items())]
    found = sorted({source for source in sources.values() if source is not None})
    return {Route(number, source, opening): np.array(sorted(at for at in sources if sources[at] == source), np.int64) for source in found}


def _names(driver: QueueDriver, number: int, offsets: Offsets) -> list[str]:
    return [str(ItemId(driver.record.incarnation, number, offset)) for offset in offsets.tolist()]


async def _sources(driver: QueueDriver, number: int, pieces: list[Slice]) -> dict[int, str | None]:
    """The queue in which each of the items died, by offset. Leaves out items that were settled meanwhile."""
    sources: dict[int, str | None] = {}
    own = f"{driver.record.incarnation}."
    for piece in pieces:
        # One by one: each may have a large blob of its own.
        for blob in (await driver.blobs(number, [piece], keep=False)).values():
            found = present(piece, blob)
            if found is None:
                continue
            names = [name for name in ("headers", "origin") if piece.columns & column_bit(name)]
            rows = take_rows(with_columns(blob, names), found.rows) if names else None
            headers, origins = (rows.column(name).to_pylist() if rows and name in names else repeat(None) for name in ("headers", "origin"))
            sources |= {at: source_of(own, *about) for at, *about in zip(found.offsets.tolist(), headers, origins, strict=False)}
    return sources
