"""What is durable in all queues right now, held against everything that was ever acknowledged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sluiceway.core.looking import stats_of
from sluiceway.sim.checks import BrokenPromiseError, check
from sluiceway.sim.items import Item
from sluiceway.sim.queue import SimQueue


def audit(queues: Sequence[SimQueue]) -> None:
    """Raises BrokenPromiseError. Every queue's dead queue is among the queues."""
    alive: dict[str, Counter[str]] = {}
    dying: dict[str, Counter[str]] = {}
    for queue in queues:
        alive[queue.incarnation], dying[queue.incarnation] = _count(queue)
    for queue in queues:
        there: Counter[str] = Counter() if queue.dead is None else alive[queue.dead.incarnation]
        _audit_items(queue, alive[queue.incarnation], dying[queue.incarnation], there)


def _count(queue: SimQueue) -> tuple[Counter[str], Counter[str]]:
    """Where each payload is durable: living, and on its way to the dead queue."""
    alive: Counter[str] = Counter()
    dying: Counter[str] = Counter()
    for number, store in enumerate(queue.stores):
        for payload, place in store.places():
            (dying if place == "dying" else alive)[payload] += 1
        durable = store.look()
        check(store.blobs.keys() == durable.blobs.keys(), "a blob is in the store and nobody knows it")
        stats = stats_of(durable, number)
        balance = stats.completed + stats.dead + stats.total + stats.transferring
        check(stats.produced == balance, "the counters do not balance")
        for lease in durable.leases.values():
            told = queue.ledger.told.get(lease.client_id)
            check(told is None or (number, lease.number) in told, "items are leased and nobody was told")
    check(alive.keys() | dying.keys() <= queue.ledger.items.keys(), "a payload that nobody sent")
    return alive, dying


def _audit_items(queue: SimQueue, alive: Counter[str], dying: Counter[str], there: Counter[str]) -> None:
    for payload, item in queue.ledger.items.items():
        arrived = queue.dead is not None and _has_arrived(queue.dead, payload, there)
        broken = _what_is_broken(item, alive[payload], dying[payload], arrived)
        if broken:
            raise BrokenPromiseError(f"{queue.incarnation}: {payload} {broken}")


def _has_arrived(dead: SimQueue, payload: str, there: Counter[str]) -> bool:
    if there[payload]:
        return True
    item = dead.ledger.items.get(payload)
    return item is not None and (item.batch.answer is not None or item.seen)


def _what_is_broken(item: Item, alive: int, dying: int, arrived: bool) -> str:
    """What the ledger says of one item and what is durable of it."""
    count = alive + (1 if dying or arrived else 0)
    if dying > 1:
        return "dies twice"
    if count > 1:
        return "is duplicated"
    if count and not item.batch.may_exist:
        return "exists although its produce was refused"
    if count and item.gone:
        return "exists although it was settled"
    if item.dying and not (dying or arrived):
        return "was lost on its way to the dead queue"
    if count == 0 and not item.gone and not item.ending and (item.seen or item.batch.answer is not None):
        return "is lost"
    return ""
