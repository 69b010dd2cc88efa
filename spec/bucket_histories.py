"""Histories of the simulator's partitions in a bucket, for the trace check: what takes effect in the bucket, and what owners hear.

Each partition of a history of the simulator is one. Cycles are told apart by their headers, which are unlike each other there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from simulation.bucket_objects import Bucket
from simulation.bucket_world import BucketWorld
from simulation.loop import Process
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.core.bucket import journal_entry, partition_head
from sluiceway.core.bucket.partition_log import PartitionLog
from sluiceway.model.changes import RecordKey
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import ObjectStore
from sluiceway.ports.partition_store import Changes, Fence, Least, PartitionRef, RecordKind, Snapshot
from spec.bucket_trace import Created, Cycle, Deleted, Discarded, Entry, Event, Head, Headed, Heard, Opened, Part, Saved, Sent

_decode_head = msgspec.msgpack.Decoder(partition_head.Head).decode


class LineRecorder:
    """The events of one partition. `folder`: of its objects."""

    def __init__(self, folder: str) -> None:
        self.events: list[Event] = []
        self._folder = folder
        self._life = ""
        self._cycles: dict[bytes, Cycle] = {}
        """Each that was sent, by its header."""

    # ---- owners ---------------------------------------------------------------------------------------------------

    def sent(self, fence: Fence, changes: Changes) -> None:
        """Its owner begins to commit a cycle."""
        cycle = self._cycles[changes.header] = Cycle(tuple(fence), changes.txn, changes.header.decode())
        self.events.append(Sent(cycle))

    def heard(self, changes: Changes, outcome: Outcome) -> None:
        """It has heard what became of it."""
        if outcome is not Outcome.UNKNOWN:
            self.events.append(Heard(self._cycles[changes.header], "done" if outcome is Outcome.DONE else "refused"))

    def opened(self, fence: Fence, snapshot: Snapshot) -> None:
        """An opening has ended."""
        self.events.append(Opened(tuple(fence), self._of(snapshot.records)))

    def _of(self, records: dict[RecordKey, bytes]) -> tuple[Cycle, ...]:
        """The cycles of a state, each of which has left a record."""
        keys = sorted(key for kind, key in records if kind is RecordKind.KEY)
        return tuple(self._cycle(number, records[RecordKind.KEY, key]) for number, key in enumerate(keys, 1))

    def _cycle(self, txn: int, header: bytes) -> Cycle:
        return self._cycles.get(header, Cycle((), txn, header.decode()))

    # ---- the bucket -----------------------------------------------------------------------------------------------

    def wrote(self, by: str, name: str, data: bytes) -> None:
        """An object is there, or another one of that name."""
        what = name.removeprefix(self._folder)
        if (entry := _entry_of(name)) is not None:
            self.events.append(Created(by, *entry, self._entry(data)))
        elif what == "head":
            self.events.append(Headed(by, self._head(data)))
        elif what != name:
            self.events.append(Saved(what, self._of(PartitionLog.of(data).records)))

    def deleted(self, name: str) -> None:
        """An object is gone."""
        if (entry := _entry_of(name)) is not None:
            self.events.append(Deleted(*entry))
        elif name.startswith(self._folder):
            self.events.append(Discarded(name.removeprefix(self._folder)))

    def _entry(self, data: bytes) -> Entry:
        entry = journal_entry.decode(data)
        if entry.is_ending:
            return "end"
        part = entry.parts.get(self._life)
        return "other" if part is None else self._cycle(part[0].txn, part[0].header)

    def _head(self, data: bytes) -> Head:
        head = _decode_head(data)
        self._life = head.life
        checkpoint = f"{head.life}/checkpoint/{head.checkpoint}" if head.checkpoint else ""
        return Head(head.nonce.hex(), tuple(head.fence or ()), checkpoint, tuple(Part(*each) for each in head.tail))


def _entry_of(name: str) -> tuple[str, int] | None:
    """The journal and the number of an entry; None: it is another object."""
    folder, _, rest = name.partition("/")
    journal, _, number = rest.partition("/log/")
    return (journal, int(number, 16)) if folder == "journals" and number else None


class _ProcessBucket(Bucket):
    """The bucket as one process has it. `wrote` is called with what takes effect, `deleted` with what goes."""

    def __init__(self, bucket: Bucket, wrote: Callable[[str, bytes], None], deleted: Callable[[str], None]) -> None:
        self.objects = bucket.objects
        self._wrote = wrote
        self._deleted = deleted

    def create(self, name: str, data: bytes) -> bool:
        created = super().create(name, data)
        if created:
            self._wrote(name, data)
        return created

    def replace(self, name: str, data: bytes, tag: str) -> str | None:
        replaced = super().replace(name, data, tag)
        if replaced is not None:
            self._wrote(name, data)
        return replaced

    def delete(self, names: Sequence[str]) -> None:
        there = [name for name in names if name in self.objects]
        super().delete(names)
        for name in there:
            self._deleted(name)


class _RecordedStore(BucketPartitionStore):
    """A store whose owner is watched."""

    recorders: dict[PartitionRef, LineRecorder]

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        snapshot = await super().open(ref, fence, least)
        self.recorders[ref].opened(fence, snapshot)
        return snapshot

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        self.recorders[ref].sent(fence, changes)
        outcome = await super().apply(ref, changes, fence)
        self.recorders[ref].heard(changes, outcome)
        return outcome


class RecordedBucketWorld(BucketWorld):
    """A history of the simulator that is recorded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.recorders = {line.ref: LineRecorder(f"partitions/{line.ref.incarnation}-{line.ref.partition}/") for line in self.lines}

    def _bucket_of(self, process: Process) -> Bucket:
        recorders = self.recorders.values()

        def wrote(name: str, data: bytes) -> None:
            for each in recorders:
                each.wrote(process.name, name, data)

        def deleted(name: str) -> None:
            for each in recorders:
                each.deleted(name)

        return _ProcessBucket(self.bucket, wrote, deleted)

    def _store_over(self, objects: ObjectStore) -> BucketPartitionStore:
        store = _RecordedStore(objects, self.patience, self.window, self._nonce)
        store.recorders = self.recorders
        return store

    def histories(self) -> dict[str, list[Event]]:
        """What was recorded so far, by partition."""
        return {f"partition {ref.partition}": recorder.events for ref, recorder in self.recorders.items()}


def bucket_histories(seed: int) -> dict[str, list[Event]]:
    """Run the seed's history, and return what was recorded of each partition. Raises what the history does."""
    world = RecordedBucketWorld(seed)
    world.live()
    return world.histories()
