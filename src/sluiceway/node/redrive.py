"""Sending dead items back: which of a queue's ready items go where, and waiting until they are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.model.requests import Redrive, Redriven
from sluiceway.node.burial import QUEUE_HEADER, REASON_HEADER

if TYPE_CHECKING:
    from sluiceway.node.driver import QueueDriver


class _Place(NamedTuple):
    partition: int
    target: str


async def redrive(driver: QueueDriver, request: Redrive, exists: Callable[[str], bool]) -> Redriven:
    """Choose the items, begin their transfers, and wait for these until `request_timeout`. A transfer that has begun goes on after that.

    Raises `queue_not_found` if a target is not there (nothing was moved), and what `QueueDriver.ask` raises.
    """
    deadline = system.now() + request.request_timeout
    if request.target == driver.record.queue_name:
        raise invalid("target", "the items are in this queue already")
    chosen = await _choose(driver, request)
    result = Redriven()
    for place, offsets in chosen.items():
        result.matched += len(offsets)
        result.targets[place.target] = result.targets.get(place.target, 0) + len(offsets)
    missing = sorted(target for target in result.targets if not exists(target))
    if missing:
        raise SluicewayError("queue_not_found", f"there is no queue {missing[0]!r} to send items to; name another target", "target")
    if not request.dry_run:
        result.targets.clear()
        arrivals = []
        for place, offsets in chosen.items():
            arrivals.append(
                (place.target, await driver.send_away(place.partition, np.array(sorted(offsets)), place.target, _left(deadline)))
            )
        await _count(result, arrivals, deadline)
    return result


async def _choose(driver: QueueDriver, request: Redrive) -> dict[_Place, list[int]]:
    chosen: dict[_Place, list[int]] = {}
    left = request.limit
    async for batch in driver.ready_rows():
        for partition, offset, headers in zip(*_columns(batch), strict=True):
            about = dict(headers or ())
            source = about.get(QUEUE_HEADER)
            target = request.target or source
            fits = request.reason is None or request.reason in about.get(REASON_HEADER, "")
            if target is None or not fits or request.source not in (None, source):
                continue
            chosen.setdefault(_Place(partition, target), []).append(offset)
            left -= 1
            if not left:
                return chosen
    return chosen


def _columns(batch: pa.RecordBatch) -> list[list[object]]:
    headers = batch.column("headers").to_pylist() if "headers" in batch.schema.names else [None] * batch.num_rows
    return [batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), headers]


async def _count(result: Redriven, arrivals: list[tuple[str, tuple[int, asyncio.Future[bool]]]], deadline: Millis) -> None:
    """Those that have arrived by the deadline."""
    futures = [future for _, (_, future) in arrivals]
    if futures:
        await asyncio.wait(futures, timeout=_left(deadline) / 1000)
    for target, (items, future) in arrivals:
        if future.done() and not future.cancelled() and future.result():
            result.redriven += items
            result.targets[target] = result.targets.get(target, 0) + items


def _left(deadline: Millis) -> Millis:
    return max(1, deadline - system.now())
