"""Drain copy: moves a draining partition's items, and the answers that key homes rely on, to other partitions of its queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from sluiceway.adapters import system
from sluiceway.core.partition.key_slots import home_of_name
from sluiceway.core.queue.partition_executor import not_here
from sluiceway.core.queue.tickets import ForgetAnswers
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import HandOverKeys, Moved, MoveOut, NoteKeys
from sluiceway.model.queue import MOVING

if TYPE_CHECKING:
    from sluiceway.local.queue_driver import QueueDriver


async def move_out(driver: QueueDriver, request: MoveOut) -> Moved:
    """Begin the move once earlier ones from that partition have arrived, and wait for it until `request_timeout`.

    So a coordinator that asks repeatedly has one move in progress, however slow its target. Raises what `QueueDriver.ask` raises.
    """
    deadline = system.now() + request.request_timeout
    for number in _moves(driver, request.partition):
        if not await _arrived(driver.transfers.arrival(request.partition, number), deadline):
            return Moved(0, 0)
    items, arrival = await driver.send_away(replace(request, request_timeout=max(1, deadline - system.now())))
    return Moved(items, items if await _arrived(arrival, deadline) else 0)


def _moves(driver: QueueDriver, partition: int) -> list[int]:
    """The numbers of moves in progress from that partition. Raises `not_here`."""
    if not driver.owns(partition):
        raise not_here(partition)
    transfers = driver.executor(partition).partition.transfers.by_number
    return [number for number, lease in transfers.items() if lease.moves_to is not None]


async def _arrived(arrival: asyncio.Future[bool], deadline: Millis) -> bool:
    """Whether it has arrived by the deadline."""
    await asyncio.wait((arrival,), timeout=max(0, deadline - system.now()) / 1000)
    return arrival.done() and not arrival.cancelled() and arrival.result()


async def hand_over_keys(driver: QueueDriver, request: HandOverKeys) -> int:
    """Have key homes note the partition's answers as the target of their intents, then forget these there.

    Returns the number of records. Raises what `QueueDriver.ask` raises; idempotent.
    """
    deadline = system.now() + request.request_timeout
    if not driver.owns(request.partition):
        raise not_here(request.partition)
    given = driver.executor(request.partition).partition.keys.answers_as_target(request.partition, MAX_KEYS_BYTES // 2)
    homes: dict[int, dict[str, bytes]] = {}
    for name, data in given.items():
        homes.setdefault(home_of_name(driver.record, name[1:]), {})[name] = data
    if MOVING in homes:
        raise SluicewayError("unavailable", "the queue's idempotency keys are moving to other partitions; try again")
    for home, keys in homes.items():
        await driver.ask_owner(home, NoteKeys(home, keys, max(1, deadline - system.now())))
    await driver.ask(ForgetAnswers(request.partition, tuple(given), request.cursor, max(1, deadline - system.now())))
    return len(given)
