"""What a simulated cluster stores of its queues: each commit of a partition and each record, in the order in which they take effect."""

from __future__ import annotations

from abc import abstractmethod

from simulation.cluster import ClusterWorld
from simulation.item_history import Cycle
from simulation.scene import Scene
from simulation.store import Follower, Store
from simulation.world import EventLog
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import View
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.partition_store import PartitionRef


class WatchedQueues(ClusterWorld):
    """Comes before the world that is watched among the bases of a class."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        super().__init__(seed, log)
        self.shared.followers.append(self._follow_records)

    @abstractmethod
    def stored(self, ref: PartitionRef, scene: Scene) -> None:
        """A commit of the partition has taken effect."""

    @abstractmethod
    def recorded(self, record: QueueRecord) -> None:
        """A queue has this record."""

    def _new_store(self, ref: PartitionRef) -> Store:
        store = super()._new_store(ref)
        assert store.trail is not None
        store.trail = _Watch(self, ref, store.trail)
        return store

    def _follow_records(self, old: View, new: View) -> None:
        for key, entry in new.prefix(QUEUE).items():
            was = old.entries.get(key)
            if was is None or was.stamp != entry.stamp:
                self.recorded(decode_queue(entry.value))


class _Watch:
    """Tells of a commit before another follower looks at it, which may end the history."""

    def __init__(self, world: WatchedQueues, ref: PartitionRef, follower: Follower) -> None:
        self._world = world
        self._ref = ref
        self._follower = follower

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        self._world.stored(self._ref, new)
        self._follower.follow(old, new, cycle)
