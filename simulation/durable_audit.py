"""Audit of all queues' durable state against everything that was ever acknowledged."""

from __future__ import annotations

from collections.abc import Sequence

from simulation.known_items import Item
from simulation.promises import check
from simulation.simulated_queue import SimQueue
from sluiceway.core.partition.queries import stats_of
from sluiceway.core.queue.partition_executor import ExecutorState


def audit(queues: Sequence[SimQueue]) -> None:
    """Check all queues. Raises BrokenPromiseError. `queues` must include every queue that items may move to."""
    for queue in queues:
        for number, store in enumerate(queue.stores):
            durable = store.look()
            check(store.blobs.keys() == durable.log.blobs.keys(), "the store has a blob that the partition does not know")
            for lease in durable.leases.values():
                told = queue.ledger.told.get(lease.client_id)
                check(told is None or (number, lease.number) in told, "items are leased and nobody was told")
        _audit_memory(queue)
    living: dict[str, str] = {}
    for queue in queues:
        for trail, store in zip(queue.ledger.trails, queue.stores, strict=True):
            for payload in store.scene().alive:
                check(payload not in living, f"{payload} is duplicated")
                living[payload] = trail.name
    for queue in queues:
        for item in queue.ledger.items.values():
            _audit_item(item, living.get(item.payload))


def _audit_memory(queue: SimQueue) -> None:
    """Check that an owner with nothing in flight counts exactly the durable items."""
    for executor in queue.owner.executors.values() if queue.owner is not None else ():
        store = queue.stores[executor.number]
        if executor.state is ExecutorState.READY and executor.partition.txn == store.txn:
            check(stats_of(executor.partition, 0) == stats_of(store.look(), 0), "an owner counts other items than are there")


def _audit_item(item: Item, lives_in: str | None) -> None:
    check(item.home == lives_in, f"{item.payload} was lost or moved without a trace")
    lost = item.home is None and item.way is None and not item.ended
    check(not lost or item.batch.answer is None, f"{item.payload} was acknowledged and is lost")
