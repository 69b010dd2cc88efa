"""Histories of the simulator's rebalances of a queue that keeps the items of a key together, for the trace check."""

from __future__ import annotations

from collections.abc import Iterable

from simulation.cluster_by_key import MovingKeysWorld
from simulation.scene import LEASED, Scene
from sluiceway.core.partition.key_slots import slot_of_hash, slots_of
from sluiceway.core.partition.records import slots_in
from sluiceway.model.item_keys import hash_of
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.partition_store import PartitionRef
from spec.keys_trace import Contents, Event, Item, Recorded, Stored
from spec.watched_queues import WatchedQueues

_QUEUE = "q0"
"""The one queue of such a history that keeps keys together from its beginning to its end."""


class RecordedKeys(WatchedQueues, MovingKeysWorld):
    """A history of the simulator that is recorded."""

    def __init__(self, seed: int) -> None:
        self.events: list[Event] = []
        self._incarnation = ""
        self._slots = 0
        super().__init__(seed)

    def stored(self, ref: PartitionRef, scene: Scene) -> None:
        if ref.incarnation == self._incarnation:
            self.events.append(Stored(ref.partition, self._contents(scene)))

    def recorded(self, record: QueueRecord) -> None:
        if record.queue_name == _QUEUE:
            homes = slots_of(record)
            self._incarnation, self._slots = record.incarnation, len(homes)
            self.events.append(Recorded(homes, frozenset(each.partition for each in record.partitions), record.cursor))

    def _contents(self, scene: Scene) -> Contents:
        header = scene.header
        return Contents(
            self._keyed(scene.alive),
            self._keyed(payload for payload, place in scene.alive.items() if place.kind == LEASED),
            self._keyed(payload for number, payload in scene.leaving if scene.transfers[number].moves_to is not None),
            frozenset(slots_in(header.closed_slots)),
            frozenset(slots_in(header.held_slots)),
            header.given_cursor,
            header.taken_cursor,
        )

    def _keyed(self, payloads: Iterable[str]) -> frozenset[Item]:
        """Those of the items that have a key."""
        keys = ((payload, self.items[payload].key) for payload in payloads)
        return frozenset(Item(payload, slot_of_hash(hash_of(key), self._slots)) for payload, key in keys if key is not None)


def keys_histories(seed: int) -> dict[str, list[Event]]:
    """Run the seed's history, and return what was recorded of its queue. Raises what the history does."""
    world = RecordedKeys(seed)
    world.live()
    return {_QUEUE: world.events}
