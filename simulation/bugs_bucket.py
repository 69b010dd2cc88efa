"""Planted bugs of partitions in a bucket: rules of the protocol removed one by one, and what is known to have lost data elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from simulation import bucket_objects
from simulation.planting import Bug, shelf
from sluiceway.adapters.storage import bucket, bucket_journals
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_journals import Journals
from sluiceway.core.bucket.journal_entry import ending_entry
from sluiceway.core.bucket.partition_head import Head
from sluiceway.core.bucket.partition_log import PartitionLog
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

BUGS: list[Bug] = []
bug = shelf(BUGS)


# ---- ends of journals -------------------------------------------------------------------------------------------


@bug(Journals, "_write_end")
def opens_without_an_ending_entry(original: Any) -> Any:
    """The new owner goes on where the former one's journal ends, without taking the next name from it."""

    async def write_end(self: Any, journal: str, number: int) -> int:
        return number

    return write_end


@bug(Journals, "_write_end")
def ends_a_living_journal_number_by_number(original: Any) -> Any:
    """Its process is first at each number, for ever: the partition is not opened."""

    async def write_end(self: Any, journal: str, number: int) -> int:
        nonce = self._nonce()
        while not await self._is_written(journal, ending_entry(number, nonce)):
            number += 1
        return number

    return write_end


@bug(bucket_journals, "ending_entry")
def forgets_that_numbers_may_be_missing(original: Any) -> Any:
    """Who ends the journal of a living process some numbers ahead is killed then, and so is that process: what is missing is damage."""
    return lambda number, nonce, gap=0: original(number, nonce)


@bug(Journals, "wipe")
def collects_ending_entries(original: Any) -> Any:
    """An ending entry is deleted with its journal. The former owner wakes, creates it anew, and is told that its cycle is durable."""

    async def wipe(self: Any, journal: str, is_named: Any) -> None:
        await original(self, journal, is_named)
        folder = bucket_journals._entries_of(journal)
        marks = await self._objects.list(bucket_journals.mark_name(journal, ""), "")
        if not marks:
            await self._objects.delete(await self._objects.list(folder, folder))

    return wipe


@bug(BucketPartitionStore, "_for_good")
def reads_the_former_journal_only_so_far(original: Any) -> Any:
    """The journal is ended after it was read: what came between is missed."""

    async def for_good(self: Any, part: Any) -> Any:
        _, entries = await self._so_far(part)
        if part.end is None:
            part, _ = await original(self, part)
        return part, entries

    return for_good


# ---- heads ------------------------------------------------------------------------------------------------------


@bug(BucketPartitionStore, "_put_head")
def a_former_owner_replaces_the_head(original: Any) -> Any:
    """A former owner's checkpoint goes on from a head that a later owner has written."""

    async def put_head(self: Any, ref: Any, opened: Any, head: Any) -> bool:
        try:
            return bool(await original(self, ref, opened, head))
        except bucket._TakenOverError:
            found = await self._head(ref)
            self._open_ones[ref] = opened
            opened.head, opened.tag = found
            return False

    return put_head


@bug(bucket_objects, "tag_of")
def tags_that_come_back(original: Any) -> Any:
    """Nothing in a head is new with each version: the tag, a hash, is that of an earlier one, and a former owner takes it for unchanged."""

    def tag_of(data: bytes) -> str:
        try:
            return str(original(bucket._encode(replace(bucket._decode_head(data), nonce=b"", fence=None))))
        except msgspec.DecodeError:
            return str(original(data))

    return tag_of


@bug(Head, "checkpointed")
def a_checkpoint_covers_what_came_after_it(original: Any) -> Any:
    """The tail begins anew where the journal is when the head is written, and not where it was when the checkpoint was made."""

    def checkpointed(self: Any, nonce: bytes, checkpoint: str, journals: Any, covered: Any) -> Head:
        later = [part._replace(end=part.end + 1) if part.end is not None else part for part in covered]
        made: Head = original(self, nonce, checkpoint, journals, later)
        return made

    return checkpointed


# ---- collection -------------------------------------------------------------------------------------------------


@bug(BucketPartitionStore, "_starts")
def collects_entries_of_the_tail(original: Any) -> Any:
    """Entries are deleted that no checkpoint has."""
    return lambda self, opened: []


@bug(BucketPartitionStore, "_numbers")
def collects_entries_with_blobs(original: Any) -> Any:
    """An entry is deleted whose records are in checkpoints, and whose blobs are still needed."""
    return lambda self, opened: iter(())


@bug(BucketPartitionStore, "_forget")
def forgets_partitions_that_left(original: Any) -> Any:
    """Entries are deleted that are needed by partitions which have moved to another owner."""

    def forget(self: Any, ref: Any) -> None:
        original(self, ref)
        self._left.pop(ref, None)

    return forget


@bug(BucketPartitionStore, "_is_named")
def wipes_a_journal_that_others_need(original: Any) -> Any:
    """The first partition that no longer needs a journal deletes it."""

    async def is_named(self: Any, ref: Any, journal: str) -> bool:
        return False

    return is_named


@bug(BucketPartitionStore, "_clean")
def collects_every_other_checkpoint(original: Any) -> Any:
    """A former owner that wakes late deletes the checkpoint that the head names by now."""

    async def clean(self: Any, ref: Any, opened: Any, before: Any) -> None:
        await original(self, ref, opened, before)
        folder = bucket._checkpoints_of(ref, opened.head.life)
        await self._objects.delete(
            [name for name in await self._objects.list(folder, folder) if not name.endswith(opened.head.checkpoint or "-")]
        )

    return clean


@bug(BucketPartitionStore, "_checkpoint")
def collects_before_the_head_names_the_checkpoint(original: Any) -> Any:
    """The checkpoint before is deleted while the head still names it."""

    async def checkpoint(self: Any, ref: Any, opened: Any, covered: Any, name: str, journals: Any, data: Any) -> Head:
        if opened.head.checkpoint not in ("", name):
            await self._objects.delete([bucket._checkpoints_of(ref, opened.head.life) + opened.head.checkpoint])
        before: Head = await original(self, ref, opened, covered, name, journals, data)
        return before

    return checkpoint


# ---- outcomes ---------------------------------------------------------------------------------------------------


@bug(bucket_journals, "write_entry")
def takes_anothers_entry_for_its_own(original: Any) -> Any:
    """An entry that is there already is taken for one's own, whose answer was lost."""

    async def write(objects: Any, journal: str, entry: Any, data: bytes, patience: float) -> None:
        await original(objects, journal, entry, data, patience)

    return write


@bug(bucket_journals, "write_entry")
def takes_its_own_entry_for_anothers(original: Any) -> Any:
    """The write is repeated below, as inside a library: when its answer was lost, "it is there already" is taken for a refusal."""

    async def write(objects: Any, journal: str, entry: Any, data: bytes, patience: float) -> Any:
        for _ in range(3):
            try:
                if await objects.create(bucket_journals.entry_name(journal, entry.meta.number), data):
                    return None
                there = await bucket_journals.read_entry(objects, journal, entry.meta.number)
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


@bug(BucketPartitionStore, "_commit")
def goes_on_after_an_unknown_outcome(original: Any) -> Any:
    """After a cycle whose outcome is unknown, the next one goes under the same number."""

    async def commit(self: Any, ref: Any, opened: Any, changes: Any, fence: Any) -> Outcome:
        outcome: Outcome = await original(self, ref, opened, changes, fence)
        if outcome is Outcome.UNKNOWN:
            opened.writing = False
            return Outcome.DONE
        return outcome

    return commit


@bug(PartitionLog, "follow")
def leaves_compacted_blobs_where_they_were(original: Any) -> Any:
    """A compacted blob is read from its former place."""

    def follow(self: Any, life: str, journal: str, entry: Any) -> bool:
        before = dict(self.places)
        followed = bool(original(self, life, journal, entry))
        self.places |= {number: place for number, place in before.items() if number in self.places}
        return followed

    return follow
