"""Histories of the simulator's rebalances, for the trace check: each queue of a history is one."""

from __future__ import annotations

from collections import defaultdict

from simulation.cluster_rebalances import RebalanceWorld
from simulation.item_history import Cycle
from simulation.scene import Scene
from simulation.store import Follower, Store
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import View
from sluiceway.model.queue import decode_queue
from sluiceway.ports.partition_store import PartitionRef
from spec.removal_trace import Contents, Event, Move, Recorded, Stored


class _Watch:
    """Notes what a partition stores, before another follower looks at it."""

    def __init__(self, ref: PartitionRef, events: list[Event], follower: Follower) -> None:
        self._partition = ref.partition
        self._events = events
        self._follower = follower

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        self._events.append(Stored(self._partition, contents_of(self._partition, new)))
        self._follower.follow(old, new, cycle)


class RecordedRebalances(RebalanceWorld):
    """A history of the simulator that is recorded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.events: defaultdict[str, list[Event]] = defaultdict(list)
        """By the queue's incarnation."""
        self.shared.followers.append(self._follow)

    def _new_store(self, ref: PartitionRef) -> Store:
        store = super()._new_store(ref)
        assert store.trail is not None
        store.trail = _Watch(ref, self.events[ref.incarnation], store.trail)
        return store

    def _follow(self, old: View, new: View) -> None:
        for key, entry in new.prefix(QUEUE).items():
            was = old.entries.get(key)
            if was is None or was.stamp != entry.stamp:
                record = decode_queue(entry.value)
                there = frozenset(each.partition for each in record.partitions)
                draining, preparing = (
                    frozenset(each.partition for each in record.partitions if each.state == state) for state in ("draining", "preparing")
                )
                self.events[record.incarnation].append(Recorded(there, draining, record.cursor, preparing))


def contents_of(partition: int, scene: Scene) -> Contents:
    """What the partition has stored."""
    moving, others = set[Move](), set[str]()
    for number, item in scene.leaving:
        target = scene.transfers[number].moves_to
        if target is None:
            others.add(item)
        else:
            moving.add(Move(item, partition, number, target))
    return Contents(frozenset(scene.alive), frozenset(moving), frozenset(others), scene.header.shut, scene.header.shut_cursor)


def removal_histories(seed: int) -> dict[str, list[Event]]:
    """Run the seed's history, and return what was recorded of each queue. Raises what the history does."""
    world = RecordedRebalances(seed)
    world.live()
    return dict(world.events)
