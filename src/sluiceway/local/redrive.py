"""Redrive: selects a queue's ready items by target, sends them there, and waits for their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core.queue.tickets import TakeOut
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.local.queries import ready_rows
from sluiceway.model.item_filter import REASON_HEADER, SOURCE_HEADER
from sluiceway.model.requests import Redrive, Redriven

if TYPE_CHECKING:
    from sluiceway.local.queue_driver import QueueDriver


class Route(NamedTuple):
    """The partition that items leave, as of that opening, and the queue that they go to."""

    partition: int
    target: str
    opening: int


class Arrival(NamedTuple):
    """Items on their way to a queue, and whether they have arrived."""

    target: str
    items: int
    future: asyncio.Future[bool]


async def redrive(driver: QueueDriver, request: Redrive, incarnation_of: Callable[[str], str | None]) -> Redriven:
    """Choose the items, begin their transfers, and wait for these until `request_timeout`. Transfers that have begun continue after that.

    Raises `queue_not_found` if a target does not exist (nothing was moved), and what `QueueDriver.ask` raises.
    """
    deadline = system.now() + request.request_timeout
    if request.target == driver.record.queue_name:
        raise invalid("target", "the items are already in this queue")
    chosen = await _choose(driver, request, deadline)
    result = Redriven()
    for place, offsets in chosen.items():
        result.matched += len(offsets)
        result.targets[place.target] = result.targets.get(place.target, 0) + len(offsets)
    targets = incarnations(result.targets, incarnation_of)
    if not request.dry_run:
        result.targets = await arrived(await _begin(driver, chosen, targets, deadline), deadline)
        result.redriven = sum(result.targets.values())
    return result


async def _begin(
    driver: QueueDriver, chosen: dict[Route, list[int]], incarnations: Mapping[str, str | None], deadline: Millis
) -> list[Arrival]:
    """Begin the transfers, each to the given incarnation of its target.

    Raises an error only if none has begun; otherwise the answer reports those that have.
    """
    arrivals: list[Arrival] = []
    for place, offsets in chosen.items():
        try:
            incarnation = incarnations[place.target]
            request = TakeOut(place.partition, np.array(sorted(offsets)), place.target, left(deadline), place.opening, incarnation)
            begun = await driver.send_away(request)
        except SluicewayError:
            if not arrivals:
                raise
            break
        arrivals.append(Arrival(place.target, *begun))
    return arrivals


async def _choose(driver: QueueDriver, request: Redrive, deadline: Millis) -> dict[Route, list[int]]:
    """Choose the items, up to the limit, to a lease's maximum bytes, or until the deadline: many ready items may not match."""
    chosen: dict[Route, list[int]] = {}
    wanted, room = request.limit, MAX_LEASE_BYTES
    own = f"{driver.record.incarnation}."
    async for opening, batch in ready_rows(driver):
        each = batch.nbytes / batch.num_rows
        for partition, offset, headers, origin in zip(*columns(batch), strict=True):
            source = source_of(own, headers, origin)
            target = request.target or source
            fits = request.reason is None or request.reason in dict(headers or ()).get(REASON_HEADER, "")
            if target is None or not fits or request.source not in (None, source):
                continue
            chosen.setdefault(Route(partition, target, opening), []).append(offset)
            wanted, room = wanted - 1, room - each
            if not wanted or room < 0:
                return chosen
        if system.now() >= deadline:
            break
        await asyncio.sleep(0)
    return chosen


def columns(batch: pa.RecordBatch) -> list[list[Any]]:
    """Partition, offset, headers and origin of the rows."""
    absent = [None] * batch.num_rows
    names = ("partition", "offset", "headers", "origin")
    return [batch.column(name).to_pylist() if name in batch.schema.names else absent for name in names]


def incarnations(targets: Iterable[str], incarnation_of: Callable[[str], str | None]) -> dict[str, str]:
    """The incarnation of each target. Raises `queue_not_found` for one that does not exist."""
    found = {target: incarnation_of(target) for target in targets}
    missing = sorted(target for target, incarnation in found.items() if incarnation is None)
    if missing:
        raise SluicewayError("queue_not_found", f"there is no queue {missing[0]!r} to send items to; pass another target", "target")
    return {target: incarnation for target, incarnation in found.items() if incarnation is not None}


async def arrived(arrivals: list[Arrival], deadline: Millis) -> dict[str, int]:
    """Wait until all have arrived, or until the deadline. Returns the items that have, by target."""
    if arrivals:
        await asyncio.wait([arrival.future for arrival in arrivals], timeout=left(deadline) / 1000)
    targets: dict[str, int] = {}
    for target, items, future in arrivals:
        if future.done() and not future.cancelled() and future.result():
            targets[target] = targets.get(target, 0) + items
    return targets


def source_of(own: str, headers: Any, origin: str | None) -> str | None:
    """The queue in which an item died; None: in none. `own`: start of the ids of the queue that it is in.

    Headers of items produced here are untrusted: a producer must not choose where an operator sends them.
    """
    return dict(headers or ()).get(SOURCE_HEADER) if origin is not None and not origin.startswith(own) else None


def left(deadline: Millis) -> Millis:
    """Milliseconds left until the deadline, at least 1."""
    return max(1, deadline - system.now())
