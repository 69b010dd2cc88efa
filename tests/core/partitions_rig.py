"""The steps of a rebalance, one by one and by hand: a queue's partitions are made, shut, emptied and removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sluiceway.cluster.ownership import item_of
from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.partition.key_slots import slots_of
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import Stamp
from sluiceway.model.peers import GiveKeys, KeysGiven, Moved, MoveOut, Shut, Shutted, Shutting, TakeKeys
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from tests.instance.instance_rig import PATIENCE

CURSOR = 10
TIMEOUT: Millis = 10_000


async def change(service: Service, queue: str, decide: Callable[[QueueRecord], QueueRecord], *, told: bool = True) -> QueueRecord:
    """Commit the queue's record as decided, and what its partitions are owned by; `told`: all instances that can follow do."""

    async def commit() -> Stamp:
        before = service.queue(queue)
        after = decide(before)
        had, has = ({each.partition for each in record.partitions} for record in (before, after))
        made = [item_of(after.incarnation, number) for number in sorted(has - had)]
        gone = [item_of(after.incarnation, number) for number in sorted(had - has)]
        assert not (made and gone), "one after the other"
        writes = service.ownership.placing(made) if made else service.ownership.removing(gone)
        return await service._catalog.put(msgspec.structs.replace(after, version=before.version + 1), {}, writes)

    async with service._changes.lock:
        stamp = await service._changes.decide(commit)
    if told:
        await service.tell(stamp)
        await service.opened(service.queue(queue))
    return service.queue(queue)


async def add(service: Service, queue: str, count: int, *, told: bool = True) -> list[int]:
    """So many more partitions, which are available. Returns their numbers."""

    def decide(record: QueueRecord) -> QueueRecord:
        new = tuple(PartitionRecord(record.given + n) for n in range(count))
        # The homes of the keys stay.
        return msgspec.structs.replace(
            record, partitions=record.partitions + new, next_partition=record.given + count, slots=slots_of(record)
        )

    record = await change(service, queue, decide, told=told)
    return [each.partition for each in record.partitions[-count:]]


async def set_state(service: Service, queue: str, numbers: Iterable[int], state: PartitionState, *, told: bool = True) -> None:
    chosen = set(numbers)

    def decide(record: QueueRecord) -> QueueRecord:
        partitions = [msgspec.structs.replace(each, state=state) if each.partition in chosen else each for each in record.partitions]
        return msgspec.structs.replace(record, partitions=tuple(partitions))

    await change(service, queue, decide, told=told)


async def set_slots(service: Service, queue: str, homes: Callable[[int], int], *, told: bool = True) -> QueueRecord:
    """Each slot's home by what it was."""

    def decide(record: QueueRecord) -> QueueRecord:
        return msgspec.structs.replace(record, slots=tuple(map(homes, slots_of(record))))

    return await change(service, queue, decide, told=told)


async def remove(service: Service, queue: str, number: int, *, told: bool = True) -> None:
    """The partition is sealed, and not there any more. It must be empty."""
    assert (await shut(service, queue, number, "sealed")).shutting == "sealed"

    def decide(record: QueueRecord) -> QueueRecord:
        left = tuple(each for each in record.partitions if each.partition != number)
        return msgspec.structs.replace(record, partitions=left, next_partition=record.given)

    await change(service, queue, decide, told=told)


async def ask(service: Service, queue: str, number: int, request: Any) -> Any:
    return await service._router.owner_of(service.queue(queue), number, request)


async def shut(service: Service, queue: str, number: int, shutting: Shutting, cursor: int = CURSOR) -> Shutted:
    """As often as it takes: its partition may just be opened anew."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                done: Shutted = await ask(service, queue, number, Shut(number, shutting, cursor, TIMEOUT))
                return done
            except SluicewayError as error:
                if error.code != "unavailable":
                    raise
                await asyncio.sleep(0.002)


async def move(
    service: Service, queue: str, number: int, target: int, limit: int = 1_000, timeout: Millis = TIMEOUT, *, scheduled: bool = False
) -> Moved:
    done: Moved = await ask(service, queue, number, MoveOut(number, target, limit, CURSOR, timeout, scheduled))
    return done


async def drain(service: Service, queue: str, number: int, target: int) -> None:
    """Take no more items there, and move all that waits."""
    await set_state(service, queue, [number], "draining")
    await shut(service, queue, number, "read_only")
    while (await move(service, queue, number, target)).begun or (await move(service, queue, number, target, scheduled=True)).begun:
        pass


async def hand_over_keys(service: Service, queue: str, former: int, home: int, cursor: int = CURSOR) -> None:
    """The keys of one partition get another home."""
    record = await set_slots(service, queue, lambda number: MOVING if number == former else number)
    slots = tuple(slot for slot, number in enumerate(record.slots) if number == MOVING)
    given: KeysGiven = await ask(service, queue, former, GiveKeys(former, slots, len(record.slots), cursor, TIMEOUT))
    await ask(service, queue, home, TakeKeys(home, slots, len(record.slots), cursor, given.keys, TIMEOUT))
    await set_slots(service, queue, lambda number: home if number == MOVING else number)
