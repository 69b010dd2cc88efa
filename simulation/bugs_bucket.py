"""Planted bugs of partitions in a bucket: rules of the protocol removed one by one, and what is known to have lost data elsewhere."""

from __future__ import annotations

from typing import Any

from simulation.planting import Bug, shelf
from sluiceway.adapters.storage import bucket
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.core.bucket.partition_log import PartitionLog
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(BucketPartitionStore, "_fence")
def opens_without_a_fencing_entry(original: Any) -> Any:
    """The new owner goes on where the log ends, without taking the next name from the former one."""

    async def fence(self: Any, ref: Any, opened: Any, fence: Any, least: Any, ours: bytes) -> None:
        opened.log.fence = fence

    return fence


@bug(PartitionLog, "kept")
def collects_fencing_entries(original: Any) -> Any:
    """A fencing entry is deleted behind a checkpoint. The former owner wakes, creates it anew, and is told that its cycle is durable."""
    return lambda self: frozenset(place.seq for place in self.places.values())


@bug(BucketPartitionStore, "_is_current")
def trusts_the_head_that_it_began_with(original: Any) -> Any:
    """An opening does not see that a checkpoint has meanwhile freed the name of its fencing entry."""

    async def is_current(self: Any, ref: Any, tag: str) -> bool:
        return True

    return is_current


@bug(BucketPartitionStore, "_collect")
def collects_every_other_checkpoint(original: Any) -> Any:
    """A former owner that wakes late deletes the checkpoint that the head names by now."""

    async def collect(self: Any, ref: Any, life: str, upto: int, kept: frozenset[int]) -> None:
        await original(self, ref, life, upto, kept)
        folder = bucket._checkpoints_of(ref, life)
        await self._objects.delete(
            [name for name in await self._objects.list(folder, folder) if int(name.rpartition("/")[2][:16], 16) != upto]
        )

    return collect


@bug(BucketPartitionStore, "_collect")
def collects_up_to_the_end(original: Any) -> Any:
    """Entries after the checkpoint are deleted, too."""
    return lambda self, ref, life, upto, kept: original(self, ref, life, upto + 1, kept)


@bug(PartitionLog, "kept")
def collects_entries_with_blobs(original: Any) -> Any:
    """An entry is deleted whose records are in the checkpoint, and whose blobs are still needed."""
    return lambda self: frozenset(self.fencing)


@bug(BucketPartitionStore, "_checkpoint")
def collects_before_the_head_names_the_checkpoint(original: Any) -> Any:
    """Entries are deleted while the head still names the checkpoint before."""

    async def checkpoint(self: Any, ref: Any, opened: Any, seq: int, kept: frozenset[int], data: bytes) -> None:
        await self._collect(ref, opened.life, seq, kept)
        await original(self, ref, opened, seq, kept, data)

    return checkpoint


@bug(BucketPartitionStore, "_write")
def takes_anothers_entry_for_its_own(original: Any) -> Any:
    """An entry that is there already is taken for one's own, whose answer was lost."""

    async def write(self: Any, ref: Any, life: str, entry: Any, data: bytes) -> None:
        await original(self, ref, life, entry, data)

    return write


@bug(BucketPartitionStore, "_write")
def takes_its_own_entry_for_anothers(original: Any) -> Any:
    """The write is repeated below, as inside a library: when its answer was lost, "it is there already" is taken for a refusal."""

    async def write(self: Any, ref: Any, life: str, entry: Any, data: bytes) -> Any:
        name = bucket._entry_of(ref, life, entry.meta.seq)
        for _ in range(3):
            try:
                if await self._objects.create(name, data):
                    return None
                there = await self._entry(ref, life, entry.meta.seq)
            except (UnknownWriteError, StoreUnavailableError):
                continue
            if there is None:
                raise UnknownWriteError
            return there
        raise UnknownWriteError

    return write


@bug(BucketPartitionStore, "_apply")
def takes_a_lost_answer_for_a_refusal(original: Any) -> Any:
    """No answer is taken to mean that nothing was written."""

    async def apply(self: Any, ref: Any, changes: Any, fence: Any) -> Outcome:
        outcome: Outcome = await original(self, ref, changes, fence)
        return Outcome.REFUSED if outcome is Outcome.UNKNOWN else outcome

    return apply


@bug(BucketPartitionStore, "_apply")
def goes_on_after_an_unknown_outcome(original: Any) -> Any:
    """After a commit whose outcome is unknown, the next one goes under the same number."""

    async def apply(self: Any, ref: Any, changes: Any, fence: Any) -> Outcome:
        outcome: Outcome = await original(self, ref, changes, fence)
        opened = self._open_ones.get(ref)
        if outcome is Outcome.UNKNOWN and opened is not None:
            opened.writing = False
            return Outcome.DONE
        return outcome

    return apply


@bug(BucketPartitionStore, "_checkpoint")
def a_checkpoint_goes_backwards(original: Any) -> Any:
    """A former owner's checkpoint replaces a later one of the present owner's."""

    async def checkpoint(self: Any, ref: Any, opened: Any, seq: int, kept: frozenset[int], data: bytes) -> None:
        name = f"{bucket._number(seq)}-{self._nonce().hex()}"
        await self._objects.create(bucket._checkpoint_of(ref, opened.life, name), data)
        head = bucket._Head(opened.life, (seq, name))
        while (tag := await self._replace_head(ref, head, opened.tag)) is None:
            found = await self._head(ref)
            if found is None:
                return
            opened.tag = found[1]
        opened.tag = tag
        await self._collect(ref, opened.life, seq, kept)

    return checkpoint


@bug(PartitionLog, "_change")
def leaves_compacted_blobs_where_they_were(original: Any) -> Any:
    """A compacted blob is read from its former place."""

    def change(self: Any, entry: Any) -> None:
        before = dict(self.places)
        original(self, entry)
        self.places |= {number: place for number, place in before.items() if number in self.places}

    return change
