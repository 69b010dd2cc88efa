"""Ledger of a queue whose items have keys: the order, the limit and the home of each key, checked against what is durable.

Judged by the durable places of items before and after each change set, and by the keys that their producers sent. So nothing is uncertain:
a settlement whose answer was lost has become durable or has not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from simulation.cluster_ledger import Hold, QueueLedger
from simulation.item_history import Cycle, ItemHistory
from simulation.known_items import Item, Way
from simulation.promises import check
from simulation.scene import DUE, LEASED, Place, Scene
from sluiceway.core.partition.key_slots import home_of_key, slot_of_hash
from sluiceway.core.partition.records import Header, LeaseState, slots_in
from sluiceway.kernel.clock import Millis
from sluiceway.model.item_keys import hash_of
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import Lease, Leased
from sluiceway.model.small_batch import in_columns

Placed = tuple[int, str, Place]
"""An item's first offset, by which a key is ordered, its payload, and its place."""


class KeyHistory(ItemHistory):
    """Follows the durable steps of one partition, and what holds of its keys."""

    def __init__(self, incarnation: str, partition: int, ledger: KeyLedger) -> None:
        super().__init__(incarnation, partition, ledger.items, ledger.asks, ledger.heard, queue=ledger.queue, grace=True)
        self._ledger = ledger
        self.keys: dict[str, str] = {}
        """The keys of items that were stored while the queue went by keys: for the others, its rules do not hold."""
        self._returned: set[str] = set()
        """Items that were leased before."""
        self.ordered: set[int] = set()
        """Leases that were taken in order."""
        self._went_by_keys = False

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        record = cycle.record
        born = [payload for payload in new.alive if payload not in old.alive and self._is_new(payload)]
        if goes_by_keys(record):
            self._went_by_keys = True
            self.keys |= {payload: key for payload in born if (key := self.items[payload].key) is not None}
        super().follow(old, new, cycle)
        self._check_sorted(born, new)
        if record.order is not None:
            self.ordered |= self.newest
            self._check_left_behind(old, new)
        if record.order is not None or record.key_concurrency:
            for key, placed in self._leased_anew(new).items():
                self._check_key(key, placed, record)
                if self._ledger.record is not None:
                    self._check_alone(key)
        self._returned |= {payload for payload, place in new.alive.items() if place.lease in self.newest}

    def _is_new(self, payload: str) -> bool:
        return payload in self.items and self.items[payload].origin is None

    def _check_sorted(self, born: Iterable[str], new: Scene) -> None:
        """Check that the items of a key, and of one priority, are stored in the order of their batch."""
        last: dict[tuple[int, str | None, int | None], int] = {}
        for item in sorted((self.items[payload] for payload in born), key=lambda item: new.alive[item.payload].first):
            name = id(item.batch), item.key, item.priority
            check(last.get(name, -1) < item.index, f"{item.payload} is stored behind a later one of its batch and key")
            last[name] = item.index

    def _is_born(self, item: Item, place: Place) -> None:
        super()._is_born(item, place)
        if item.key is not None and self._ledger.record is not None:
            home = home_of_key(self._ledger.record(), item.key)
            # While a slot moves, its former home may store what it has accepted.
            check(
                home in (self.partition, MOVING),
                f"{item.payload} is in partition {self.partition}, and the home of key {item.key!r} is {home}",
            )

    def _comes_over(self, item: Item, way: Way, place: Place) -> None:
        super()._comes_over(item, way, place)
        source = self._ledger.trail(int(way.source.rpartition(".")[2]))
        if item.payload in source.keys:
            self.keys[item.payload] = source.keys[item.payload]

    def _goes_over(self, item: Item, was: Place, number: int) -> None:
        """Check in addition that what holds up its key is not moved behind what its key has elsewhere."""
        super()._goes_over(item, was, number)
        waits = was.kind == DUE and self.record.order is not None and item.payload in self._returned
        check(not waits, f"{item.payload} is moved, and was to hold up its key until its delay is over")

    def _may_go_over(self, item: Item) -> bool:
        """A partition in use moves scheduled items of slots that it has given away."""
        header = self.new.header
        return super()._may_go_over(item) or (item.key is not None and _has_slot(header.closed_slots, item.key, header))

    def _check_turn(self, lease: LeaseState) -> None:
        if not self._went_by_keys:
            super()._check_turn(lease)

    # ---- order and limits -------------------------------------------------------------------------------------

    def _leased_anew(self, new: Scene) -> dict[str, list[Placed]]:
        """Return the items of each key that was leased in this cycle, in order."""
        found: dict[str, list[Placed]] = {}
        if self.newest:
            keys = {self.keys.get(payload) for payload, place in new.alive.items() if place.lease in self.newest}
            for payload, place in new.alive.items():
                key = self.keys.get(payload)
                if key is not None and key in keys:
                    found.setdefault(key, []).append((place.first, payload, place))
        return {key: sorted(placed) for key, placed in found.items()}

    def _check_key(self, key: str, placed: Sequence[Placed], record: QueueRecord) -> None:
        leased = [each for each in placed if each[2].kind == LEASED]
        limit = record.key_concurrency
        check(not limit or len(leased) <= limit, f"{len(leased)} items of key {key!r} are leased, and {limit} may be")
        self._ledger.tally["at the limit"] += len(leased) == limit
        if record.order is not None:
            self._check_order(key, placed, leased)

    def _check_alone(self, key: str) -> None:
        """Check that no other partition has items of the key that come first: those that it does not hold back."""
        for number in self._ledger.stores:
            trail = self._ledger.trail(number)
            if number != self.partition and not _has_slot(trail.new.header.held_slots, key, trail.new.header):
                there = [payload for payload in trail.new.alive if trail.keys.get(payload) == key]
                check(not there, f"key {key!r} is served by partition {self.partition}, and {there} are in {number}")

    def _check_order(self, key: str, placed: Sequence[Placed], leased: Sequence[Placed]) -> None:
        leases = {place.lease for _, _, place in leased}
        check(len(leases) == 1, f"key {key!r} is in the leases {sorted(leases)} at once, and in order")
        client_id = self.clients[leases.pop()]
        check(
            len(leased) == 1 or self._ledger.runs[client_id], f"{client_id} got {len(leased)} items of key {key!r}, and asked for no runs"
        )
        self._ledger.tally["runs"] += len(leased) > 1
        last = leased[-1][0]
        for first, payload, place in placed:
            if place.kind == DUE:
                check(payload not in self._returned, f"key {key!r} is served, and {payload} was to hold it up until its delay is over")
                check(place.due_at > self.cycle.now or first > last, f"{payload} was due, and a later item of key {key!r} is served")
            else:
                check(place.kind == LEASED or first > last, f"{payload} is overtaken by a later item of key {key!r}")
        self._ledger.tally["in order"] += 1

    # ---- runs -------------------------------------------------------------------------------------------------

    def _is_behind(self, item: Item, was: Place) -> bool:
        """An item goes back with one before it in the run of its key, which a client has given back."""
        if self.record.order is None or item.payload not in self.keys:
            return False
        before = (each for each in self._with(self.old, was.lease, self.keys[item.payload]) if each[1] != item.payload)
        return any(
            (first < was.first or was.lease not in self.ordered)
            and any(asked.verdict in ("retry", "release") for asked in self.asks.of(self.partition, was.lease, place.offset))
            for first, _, place in before
        )

    def _check_left_behind(self, old: Scene, new: Scene) -> None:
        """Check that no lease keeps items of a run one of which, before them, has gone back."""
        for payload, was in old.alive.items():
            place = new.alive.get(payload)
            if (
                was.lease in self.ordered
                and was.lease in new.leases
                and payload in self.keys
                and place is not None
                and place.lease != was.lease
            ):
                for first, other, _ in self._with(new, was.lease, self.keys[payload]):
                    check(first < was.first, f"{payload} has gone back, and {other} behind it is still leased")
                self._ledger.tally["runs broken off"] += 1

    def _with(self, scene: Scene, lease: int, key: str) -> Iterable[Placed]:
        """Return the items of that key in the lease."""
        for payload, place in scene.alive.items():
            if place.lease == lease and self.keys.get(payload) == key:
                yield place.first, payload, place


class KeyLedger(QueueLedger):
    """QueueLedger of a queue that goes by the keys of its items, always or at times.

    `record`: returns the queue's record, as it is in the meta store, if the queue keeps keys together from beginning to end.
    """

    def __init__(self, queue: str, items: dict[str, Item], *, record: Callable[[], QueueRecord] | None) -> None:
        super().__init__(queue, items)
        self.runs: dict[str, bool] = {}
        """By client, whether it asks for runs."""
        self.record = record

    def _history(self, incarnation: str, partition: int) -> KeyHistory:
        return KeyHistory(incarnation, partition, self)

    def leased(self, request: Lease, answer: Leased, before: set[tuple[int, int]], now: Millis) -> list[Hold]:
        """Check in addition that the items have their keys, and that those of a key are in order."""
        holds = super().leased(request, answer, before, now)
        # First offsets by partition, lease and key, as far as the queue goes by it.
        told: dict[tuple[int, int, str], list[int]] = {}
        for batch in map(in_columns, answer.batches):
            columns = [batch.column(name).to_pylist() for name in ("partition", "lease", "payload", "origin_offset")]
            none = [None] * batch.num_rows
            keys, priorities = (batch.column(name).to_pylist() if name in batch.schema.names else none for name in ("key", "priority"))
            for partition, lease, payload, first, key, priority in zip(*columns, keys, priorities, strict=True):
                item = self.items[payload.decode()]
                check((item.key, item.priority) == (key, priority), f"{item.payload} is said to have key {key!r} and priority {priority}")
                if key is not None and payload.decode() in self.trail(partition).keys:
                    told.setdefault((partition, lease, key), []).append(first)
        for (partition, lease, key), firsts in told.items():
            in_order = all(one < other for one, other in pairwise(firsts))
            check(
                in_order or lease not in self.trail(partition).ordered, f"lease {partition}.{lease} has key {key!r} in the order {firsts}"
            )
        return holds

    def trail(self, partition: int) -> KeyHistory:
        trail = self.trails[partition]
        assert isinstance(trail, KeyHistory)
        return trail


def _has_slot(bits: bytes, key: str, header: Header) -> bool:
    """Whether the slot of the key is in that bit map of the partition."""
    return bool(header.slots_of) and slot_of_hash(hash_of(key), header.slots_of) in slots_in(bits)


def goes_by_keys(record: QueueRecord) -> bool:
    """Whether the queue orders its items by key, shares service between keys, or limits them, or priorities matter."""
    return record.order is not None or record.fair is not None or record.key_concurrency > 0 or record.priority is not None
