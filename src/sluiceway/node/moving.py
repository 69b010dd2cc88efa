"""Moving items from a partition that is drained to another one of its queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from sluiceway.adapters import system
from sluiceway.core.lane import not_here
from sluiceway.kernel.clock import Millis
from sluiceway.model.peers import Moved, MoveOut

if TYPE_CHECKING:
    from sluiceway.node.driver import QueueDriver


async def move_out(driver: QueueDriver, request: MoveOut) -> Moved:
    """Begin the move as soon as earlier ones from that partition have arrived, and wait for it until `request_timeout`.

    So a coordinator that asks again and again has one move under way, however long its target is in coming. Raises what
    `QueueDriver.ask` raises.
    """
    deadline = system.now() + request.request_timeout
    for number in _moves(driver, request.partition):
        if not await _arrived(driver.arrival(request.partition, number), deadline):
            return Moved(0, 0)
    items, arrival = await driver.send_away(replace(request, request_timeout=max(1, deadline - system.now())))
    return Moved(items, items if await _arrived(arrival, deadline) else 0)


def _moves(driver: QueueDriver, partition: int) -> list[int]:
    """The moves from that partition that are under way. Raises `not_here`."""
    if not driver.owns(partition):
        raise not_here(partition)
    transfers = driver.lane(partition).partition.transfers
    return [number for number, lease in transfers.items() if lease.moves_to is not None]


async def _arrived(arrival: asyncio.Future[bool], deadline: Millis) -> bool:
    """Whether it has by then."""
    await asyncio.wait((arrival,), timeout=max(0, deadline - system.now()) / 1000)
    return arrival.done() and not arrival.cancelled() and arrival.result()
