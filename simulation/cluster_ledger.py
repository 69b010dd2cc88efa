"""Ledger of one queue in a simulated cluster: answers to clients, checked against what is durable, whichever instance wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from simulation.causes import Asks
from simulation.item_history import Cycle, ItemHistory
from simulation.known_items import Batch, Item
from simulation.promises import check
from simulation.scene import LEASED, Scene
from simulation.store import Store
from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import ItemId
from sluiceway.model.requests import Lease, Leased, Produced, ProducedByKey, ProduceKey, Settled, Verdict
from sluiceway.model.small_batch import in_columns

OUTCOME: dict[Verdict, IgnoredReason] = {"done": "completed", "retry": "retried", "dead": "dead", "release": "released"}


class Content(dict[int, Item]):
    """Items of a stored lease, by offset."""

    attempts: int = 0


@dataclass(eq=False)
class Hold:
    """Lease as its consumer knows it: unsettled items by offset."""

    partition: int
    number: int
    client_id: str
    items: dict[int, Item]


class _Follower:
    """Feeds a partition's ItemHistory, and records the content of each new lease."""

    def __init__(self, trail: ItemHistory, ledger: QueueLedger) -> None:
        self._trail = trail
        self._ledger = ledger

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        self._trail.follow(old, new, cycle)
        self._ledger.follow_order(self._trail.partition, new, self._trail.newest)
        for payload, place in new.alive.items():
            if place.kind == LEASED and place.lease in self._trail.newest:
                content = self._ledger.contents.setdefault((self._trail.partition, place.lease), Content())
                content[place.offset] = self._ledger.items[payload]


class QueueLedger:
    """Every item ever sent to the queue, and every promise about it. `items`: those of all queues."""

    def __init__(self, queue: str, items: dict[str, Item]) -> None:
        self.queue = queue
        self.incarnation = ""
        self.items = items
        self.batches: list[Batch] = []
        self.asks = Asks()
        self.heard: set[tuple[int, int]] = set()
        """Leases that a client was told of."""
        self.contents: dict[tuple[int, int], Content] = {}
        self.stores: dict[int, Store] = {}
        self.trails: dict[int, ItemHistory] = {}
        self.tally: Counter[str] = Counter()
        self.in_order: dict[str, tuple[str, int]] | None = None
        """For a queue with one partition: producer and ordinal of each item of a sequential producer, by payload."""
        self._last: dict[str, int] = {}
        self._begun: set[str] = set()

    def new_store(self, incarnation: str, partition: int) -> Store:
        """Create the store of a partition at its first opening."""
        check(self.incarnation in ("", incarnation), "a queue has two incarnations")
        check(partition not in self.trails, f"partition {partition} of {self.queue} is there again after its data was removed")
        self.incarnation = incarnation
        trail = self._history(incarnation, partition)
        store = self.stores[partition] = Store()
        store.trail = _Follower(trail, self)
        self.trails[partition] = trail
        return store

    def _history(self, incarnation: str, partition: int) -> ItemHistory:
        return ItemHistory(incarnation, partition, self.items, self.asks, self.heard, queue=self.queue, grace=True)

    def left(self) -> int:
        """Count remaining items, including those in transfers to another queue."""
        scenes = [store.scene() for store in self.stores.values()]
        return sum(len(scene.alive) + len(scene.leaving) for scene in scenes)

    def follow_order(self, partition: int, scene: Scene, newest: set[int]) -> None:
        """Check a one-partition queue's order. First leases follow each producer's order, and start only after all earlier partitions are
        finished."""
        if self.in_order is None or not newest:
            return
        for number, store in self.stores.items():
            there = store.scene()
            check(
                number >= partition or not (there.alive or there.leaving), f"partition {partition} is leased from before {number} is empty"
            )
        taken = sorted((place.lease, place.offset, payload) for payload, place in scene.alive.items() if place.lease in newest)
        for _, _, payload in taken:
            known = self.in_order.get(payload)
            if known is not None and payload not in self._begun:
                producer, number = known
                check(number > self._last.get(producer, -1), f"{payload} is leased after a later one of its producer")
                self._last[producer] = number
                self.tally["in order"] += 1
            self._begun.add(payload)

    # ---- produce ----------------------------------------------------------------------------------------------

    def add(self, key: ProduceKey | None, items: Sequence[Item], rows: pa.RecordBatch) -> Batch:
        batch = Batch(key, items, rows)
        for item in items:
            item.batch = batch
            self.items[item.payload] = item
        self.batches.append(batch)
        return batch

    def produced(self, batch: Batch, answer: Produced) -> None:
        """Check an acknowledgement: the items are durable, once, at the ids told."""
        check(answer.items == len(batch.items), "the answer counts other items than were sent")
        if batch.answer is not None:
            check(_told(answer) == _told(batch.answer), f"a repetition has another answer: {answer} after {batch.answer}")
            # Of two calls at once, each may have stored a part of what is divided.
            check(isinstance(answer, ProducedByKey) or answer.deduplicated or batch.answer.deduplicated, "a key was taken twice")
            return
        for item, (partition, offset) in zip(batch.items, _told(answer), strict=True):
            told = str(ItemId(self.incarnation, partition, offset))
            check(item.origin is not None, f"{item.payload} was acknowledged before it was durable")
            check(item.origin == told, f"{item.payload} is {item.origin}, and its producer was told {told}")
        batch.answer = answer
        self.tally["divided"] += isinstance(answer, ProducedByKey)
        self.tally["produced"] += answer.items

    def check_refused(self, batch: Batch) -> None:
        """Check that a batch whose every attempt was refused has not happened."""
        for item in batch.items:
            check(batch.may_exist or item.origin is None, f"{item.payload} is durable, and its producer was told that it was refused")

    # ---- lease ------------------------------------------------------------------------------------------------

    def live(self, client_id: str, now: Millis) -> set[tuple[int, int]]:
        """Return the client's leases at that time, whether or not it was told of them."""
        scenes = ((number, store.scene()) for number, store in self.stores.items())
        leases = ((number, lease) for number, scene in scenes for lease in scene.leases.values())
        return {(number, lease.number) for number, lease in leases if lease.client_id == client_id and (lease.deadline or 0) > now}

    def leased(self, request: Lease, answer: Leased, before: set[tuple[int, int]], now: Millis) -> list[Hold]:
        """Check that each lease was made for this client with exactly these items. It may have ended since.

        `before`: the client's leases when it asked. With a key, those still live must be in the answer. `now`: by the clock that is
        furthest ahead.
        """
        if request.lease_key is not None:
            missing = (before & self.live(request.client_id, now)) - {each[:2] for each in answer.leases}
            if not answer.leases:
                # Leases of an earlier call whose answer was lost may still have been in flight to the store.
                missing &= self.heard
            check(not missing, f"a repeated lease key of {request.client_id} did not find {missing}")
        rows: dict[tuple[int, int], dict[int, str]] = {}
        for batch in map(in_columns, answer.batches):
            columns = [batch.column(name).to_pylist() for name in ("partition", "lease", "offset", "payload", "origin_offset")]
            origins = batch.column("origin").to_pylist() if "origin" in batch.schema.names else [None] * batch.num_rows
            for partition, lease, offset, payload, first, origin in zip(*columns, origins, strict=True):
                rows.setdefault((partition, lease), {})[offset] = payload.decode()
                item = self.items[payload.decode()]
                told_of = origin or str(ItemId(self.incarnation, partition, first))
                check(told_of == item.origin, f"{item.payload} is said to have been {told_of} first, and was {item.origin}")
        check(rows.keys() == {each[:2] for each in answer.leases}, "the items are of other leases than the answer names")
        total = sum(each.items for each in answer.leases)
        # Under a key, a call still waiting may take more.
        check(request.lease_key is not None or total <= request.batch_size, "more items than were asked for")
        holds = []
        for info in answer.leases:
            name = info[:2]
            content, got = self.contents.get(name), rows[name]
            check(content is not None, f"lease {name} was answered before it was durable")
            assert content is not None
            check(self.trails[info.partition].clients[info.number] == request.client_id, f"lease {name} is of another client")
            told = {offset: content[offset].payload for offset in got if offset in content}
            check(told == got, f"lease {name} was answered with {got}, and has {told}")
            check(request.lease_key is not None or (info.items == len(got) == len(content)), f"lease {name} was answered in part")
            dispositions = [self.trails[info.partition].dispositions.get(offset) for offset in got]
            if not any((info.partition, offset) in self.asks.dispositions for offset in got):
                check({"released"} not in dispositions, f"lease {name} was given back, and yet its client was told of it")
            check(name not in self.heard or request.lease_key is not None, f"lease {name} was given to two calls")
            self.heard.add(name)
            holds.append(Hold(info.partition, info.number, request.client_id, {offset: content[offset] for offset in got}))
        self.tally["leased"] += total
        return holds

    # ---- settle -----------------------------------------------------------------------------------------------

    def settled(self, verdict: Verdict, sent: Mapping[int, Iterable[int]], answer: Settled) -> None:
        """Check a successful settle: every item not ignored has met its disposition, and every reason is true."""
        ignored = dict(_places(answer.ignored))
        wanted = {(partition, offset) for partition, offsets in sent.items() for offset in offsets}
        check(ignored.keys() <= wanted and len(ignored) == len(answer.ignored), "other ids are ignored than were sent")
        for partition, offset in sorted(wanted):
            dispositions = self.trails[partition].dispositions.get(offset)
            check(
                dispositions is not None, f"{partition}.{offset} is still leased, and its consumer was told that it is settled or ignored"
            )
            assert dispositions is not None
            reason = ignored.get((partition, offset))
            # A retry may have been the item's last.
            allowed = {OUTCOME[verdict], "dead"} if reason is None else {reason}
            check(
                bool(allowed & dispositions) or reason == "settled",
                f"{partition}.{offset} is said to be {reason or verdict}, and is {dispositions}",
            )
        check(answer.total == len(wanted) - len(ignored), f"{answer.total} are settled and {len(ignored)} ignored, of {len(wanted)}")
        self.tally[verdict] += answer.total
        self.tally["ignored"] += len(ignored)

    def check_drained(self) -> None:
        """Check that all items acknowledged or possibly accepted have ended, each with its cause."""
        for batch in self.batches:
            for item in batch.items:
                check(item.ended or item.origin is None, f"{item.payload} is left over")
                check(batch.answer is None or item.ended, f"{item.payload} was acknowledged and is lost")


def _told(answer: Produced) -> Sequence[tuple[int, int]]:
    """Return the partition and the offset of each item of the call."""
    if isinstance(answer, ProducedByKey):
        return answer.places
    return [(answer.partition, answer.first_offset + index) for index in range(answer.items)]


def _places(ignored: Iterable[tuple[str, IgnoredReason]]) -> Iterable[tuple[tuple[int, int], IgnoredReason]]:
    for name, reason in ignored:
        _, partition, offset = name.split(".")
        yield (int(partition), int(offset)), reason
