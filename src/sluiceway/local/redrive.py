"""Redrive: selects a queue's ready items by target, sends them there, and waits for their arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.core.queue.tickets import TakeOut
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.local.dead_letters import QUEUE_HEADER, REASON_HEADER
from sluiceway.local.queries import ready_rows
from sluiceway.model.requests import Redrive, Redriven

if TYPE_CHECKING:
    from sluiceway.local.queue_driver import QueueDriver


class _Place(NamedTuple):
    partition: int
    target: str
    opening: int


class _Arrival(NamedTuple):
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
    targets = {target: incarnation_of(target) for target in result.targets}
    missing = sorted(target for target, incarnation in targets.items() if incarnation is None)
    if missing:
        raise SluicewayError("queue_not_found", f"there is no queue {missing[0]!r} to send items to; name another target", "target")
    if not request.dry_run:
        result.targets.clear()
        await _count(result, await _begin(driver, chosen, targets, deadline), deadline)
    return result


async def _begin(
    driver: QueueDriver, chosen: dict[_Place, list[int]], incarnations: Mapping[str, str | None], deadline: Millis
) -> list[_Arrival]:
    """Begin the transfers, each to the given incarnation of its target.

    Raises an error only if none has begun; otherwise the answer reports those that have.
    """
    arrivals: list[_Arrival] = []
    for place, offsets in chosen.items():
        try:
            incarnation = incarnations[place.target]
            request = TakeOut(place.partition, np.array(sorted(offsets)), place.target, _left(deadline), place.opening, incarnation)
            begun = await driver.send_away(request)
        except SluicewayError:
            if not arrivals:
                raise
            break
        arrivals.append(_Arrival(place.target, *begun))
    return arrivals


async def _choose(driver: QueueDriver, request: Redrive, deadline: Millis) -> dict[_Place, list[int]]:
    """Choose the items, up to the limit, to a lease's maximum bytes, or until the deadline: many ready items may not match."""
    chosen: dict[_Place, list[int]] = {}
    left, room = request.limit, MAX_LEASE_BYTES
    own = f"{driver.record.incarnation}."
    async for opening, batch in ready_rows(driver):
        each = batch.nbytes / batch.num_rows
        for partition, offset, headers, origin in zip(*_columns(batch), strict=True):
            about = dict(headers or ())
            # Headers of items produced here are untrusted: a producer must not choose where an operator's redrive sends them.
            source = about.get(QUEUE_HEADER) if origin is not None and not origin.startswith(own) else None
            target = request.target or source
            fits = request.reason is None or request.reason in about.get(REASON_HEADER, "")
            if target is None or not fits or request.source not in (None, source):
                continue
            chosen.setdefault(_Place(partition, target, opening), []).append(offset)
            left, room = left - 1, room - each
            if not left or room < 0:
                return chosen
        if system.now() >= deadline:
            break
        await asyncio.sleep(0)
    return chosen


def _columns(batch: pa.RecordBatch) -> list[list[Any]]:
    absent = [None] * batch.num_rows
    names = ("partition", "offset", "headers", "origin")
    return [batch.column(name).to_pylist() if name in batch.schema.names else absent for name in names]


async def _count(result: Redriven, arrivals: list[_Arrival], deadline: Millis) -> None:
    """Count the items that have arrived by the deadline."""
    if arrivals:
        await asyncio.wait([arrival.future for arrival in arrivals], timeout=_left(deadline) / 1000)
    for target, items, future in arrivals:
        if future.done() and not future.cancelled() and future.result():
            result.redriven += items
            result.targets[target] = result.targets.get(target, 0) + items


def _left(deadline: Millis) -> Millis:
    return max(1, deadline - system.now())
