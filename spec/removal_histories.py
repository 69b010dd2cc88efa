"""Histories of the simulator's rebalances, for the trace check: each queue of a history is one."""

from __future__ import annotations

from collections import defaultdict

from simulation.cluster_rebalances import RebalanceWorld
from simulation.scene import Scene
from sluiceway.model.queue import QueueRecord
from sluiceway.ports.partition_store import PartitionRef
from spec.removal_trace import Contents, Event, Move, Recorded, Stored
from spec.watched_queues import WatchedQueues


class RecordedRebalances(WatchedQueues, RebalanceWorld):
    """A history of the simulator that is recorded."""

    def __init__(self, seed: int) -> None:
        self.events: defaultdict[str, list[Event]] = defaultdict(list)
        """By the queue's incarnation."""
        super().__init__(seed)

    def stored(self, ref: PartitionRef, scene: Scene) -> None:
        self.events[ref.incarnation].append(Stored(ref.partition, contents_of(ref.partition, scene)))

    def recorded(self, record: QueueRecord) -> None:
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
