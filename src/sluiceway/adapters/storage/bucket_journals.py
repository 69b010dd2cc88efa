"""Journals in a bucket: a process writes one, with the cycles of all its partitions. Others read it, and end it.

docs/adr/0051-a-journal-for-each-process.md has the layout, and the argument why no acknowledged cycle is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from sluiceway.adapters.background import shielded
from sluiceway.core.bucket.journal_entry import Entry, decode, ending_entry, entry_of, meta_bytes
from sluiceway.core.bucket.partition_head import Range
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import Changes, DamagedError, StoreUnavailableError

log = logging.getLogger(__name__)

FIRST_BYTES = 64 << 10
"""Read of each entry at first: nearly always its whole meta, and few of its blobs."""
AT_ONCE = 256
"""Entries of a journal that are read at the same time."""
AHEAD = 4
"""Ending entries that are written at once, at first, where the process that writes the journal is alive."""
SHARED = 2_048
"""Entries that are remembered while partitions are opened."""
PAUSES = (0.05, 2.0)
"""Seconds before a write is repeated: first, and at most (doubling)."""
MAX_ENTRY = 8 << 20
"""Bytes of blobs after which an entry takes no further cycle: the others wait for the next one."""

FOLDER = "journals/"


class ChangedError(Exception):
    """What was read does not fit together: either a head is no longer the current one, or something is damaged."""


class JournalOverError(Exception):
    """The journal was ended before the cycle was written: surely nothing happened."""


def entry_name(journal: str, number: int) -> str:
    return f"{_entries_of(journal)}{number:016x}"


def tombstone_name(journal: str) -> str:
    """The object that says that no head named that journal, which had ended, when it was deleted."""
    return f"{FOLDER}{journal}/deleted"


def mark_name(journal: str, partition: str) -> str:
    """The mark that the partition's head may name that journal."""
    return f"{FOLDER}{journal}/of/{partition}"


class Waiting(NamedTuple):
    """A cycle that waits to be written. `follow` is called with its entry when that is durable."""

    life: str
    changes: Changes
    follow: Callable[[Entry], None]
    done: asyncio.Future[None]


class Journal:
    """The journal that this process writes, one entry after the other. `window`: seconds that each entry waits for further cycles."""

    def __init__(self, objects: ObjectStore, patience: float, window: float, nonce: Callable[[], bytes], wrote: Callable[[], None]) -> None:
        self._objects = objects
        self._patience = patience
        self._window = window
        self._nonce = nonce
        self._wrote = wrote
        self._crc = 0
        self._waiting: list[Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self.name = nonce().hex()
        self.number = 0
        """Of the last durable entry."""
        self.is_over = False
        self.kept: dict[int, None] = {}
        """Entries that were not deleted."""
        self.marks: set[str] = set()
        """Partitions with a mark."""

    @property
    def begins(self) -> Range:
        """The entries that are to come."""
        return Range(self.name, self.number + 1)

    async def mark(self, partition: str) -> None:
        """Mark that the partition's head may name this journal. Raises StoreUnavailableError."""
        if partition not in self.marks:
            await _ensure(self._objects, mark_name(self.name, partition))
            self.marks.add(partition)

    async def write(self, life: str, changes: Changes, follow: Callable[[Entry], None]) -> None:
        """Have the cycle be in the next entry. Raises JournalOverError, StoreUnavailableError: nothing happened; UnknownWriteError.

        What happens up to its first suspension makes the cycle wait, so that nothing can come between a check and that.
        """
        if self.is_over:
            raise JournalOverError
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(life, changes, follow, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await done

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                if self._window:
                    # Also for the partitions of the entry before, whose next cycles come as soon as it is durable.
                    await asyncio.sleep(self._window)
                await self._write(self._next())
        finally:
            self._writing = None

    def _next(self) -> list[Waiting]:
        """The cycles of the next entry."""
        size = taken = 0
        while taken < len(self._waiting) and size < MAX_ENTRY:
            changes = self._waiting[taken].changes
            size += sum(map(len, changes.blobs.values())) + sum(map(len, changes.compacted_blobs.values()))
            taken += 1
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    async def _write(self, batch: list[Waiting]) -> None:
        """Write the next entry. Whatever happens, whoever waits is told."""
        try:
            entry, data = entry_of([(each.life, each.changes) for each in batch], self.number + 1, self._nonce(), self._crc)
        except Exception as error:
            if len(batch) > 1:
                # Which one it is shows then, and the others are written.
                self._waiting = [*batch, *self._waiting]
                await self._write([self._waiting.pop(0)])
                return
            log.exception("journal %s: a cycle cannot be encoded", self.name)
            _fail(batch, StoreUnavailableError(repr(error)))
            return
        try:
            if await write_entry(self._objects, self.name, entry, data, self._patience) is None:
                self._wrote_entry(entry, batch)
            else:
                self._end()
                _fail(batch, JournalOverError())
        except StoreUnavailableError as error:
            _fail(batch, error)
        except Exception as error:
            self._end()
            _fail(batch, UnknownWriteError(str(error)))
            if not isinstance(error, UnknownWriteError | DamagedError):
                log.exception("journal %s: writing failed", self.name)

    def _wrote_entry(self, entry: Entry, batch: Iterable[Waiting]) -> None:
        self.number, self._crc = entry.meta.number, entry.crc
        self.kept[self.number] = None
        for each in batch:
            each.follow(entry)
        for each in batch:
            if not each.done.done():
                each.done.set_result(None)
        self._wrote()

    def _end(self) -> None:
        self.is_over = True
        waiting, self._waiting = self._waiting, []
        _fail(waiting, JournalOverError())

    async def close(self) -> None:
        """Let what is under way end, and end the journal, so that nothing large has to stay of it."""
        await self.settle()
        if (self.number or self.marks) and not self.is_over:
            self._end()
            entry, data = ending_entry(self.number + 1, self._nonce())
            await self._objects.create(entry_name(self.name, entry.meta.number), data)


def _fail(batch: Iterable[Waiting], error: Exception) -> None:
    for each in batch:
        if not each.done.done():
            each.done.set_exception(error)


async def write_entry(objects: ObjectStore, journal: str, entry: Entry, data: bytes, patience: float) -> Entry | None:
    """Create the entry. Returns None if it is there, or the one that was there before.

    Raises StoreUnavailableError if it surely was not written, and UnknownWriteError if it may be, or have been there, or come later.
    The same bytes may be written under the same name any number of times.
    """
    number = entry.meta.number
    pause, is_sure = PAUSES[0], True
    loop = asyncio.get_running_loop()
    until = loop.time() + patience
    while True:
        try:
            if await objects.create(entry_name(journal, number), data):
                return None
            is_there = await read_entry(objects, journal, number)
        except UnknownWriteError:
            is_sure = False
        except StoreUnavailableError as error:
            if loop.time() >= until and is_sure:
                raise
            log.debug("journal %s: %s", journal, error)
        else:
            # Nothing: the store refused it only because of another write at the same time, or what was there is superfluous by now.
            if is_there is not None and is_there.meta.nonce == entry.meta.nonce:
                return None
            if is_there is not None and is_sure:
                return is_there
            if is_there is not None:
                # An earlier attempt may have landed, and become superfluous before this one came: what is there now need not have been
                # there first.
                raise UnknownWriteError(f"entry {number} is another's, and was perhaps this one's before")
        if loop.time() >= until:
            raise UnknownWriteError(f"no answer within {patience:g} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSES[1])


async def read_entry(objects: ObjectStore, journal: str, number: int) -> Entry | None:
    """The entry without its blobs; None: there is none of that number. What does not fit is read twice: the answer may be at fault.

    Raises StoreUnavailableError, DamagedError.
    """
    try:
        return await _entry_as_read(objects, journal, number)
    except ValueError:
        try:
            return await _entry_as_read(objects, journal, number)
        except ValueError as error:
            raise DamagedError(f"journal {journal}, entry {number}: {error}") from None


async def _entry_as_read(objects: ObjectStore, journal: str, number: int) -> Entry | None:
    name = entry_name(journal, number)
    data = await objects.get_range(name, 0, FIRST_BYTES)
    if data is None:
        return None
    size = meta_bytes(data)
    if size > len(data):
        data += await objects.get_range(name, len(data), size - len(data)) or b""
    entry = decode(data)
    if entry.meta.number != number:
        raise ValueError(f"it calls itself {entry.meta.number}")
    return entry


class Journals:
    """The journals of other processes, and former ones of this: their entries and ends.

    Partitions of one owner are opened together, so what is read is shared while openings are under way.
    """

    def __init__(self, objects: ObjectStore, patience: float, nonce: Callable[[], bytes]) -> None:
        self._objects = objects
        self._patience = patience
        self._nonce = nonce
        self._users = 0
        self._reads: dict[tuple[str, int], asyncio.Task[Entry | None]] = {}
        self._endings: dict[str, asyncio.Lock] = {}
        self._ends: dict[str, int] = {}
        """Of journals that have ended, which they do once."""
        self._listed: dict[str, range] = {}
        """Entries that were there when a journal was read ahead: the next may be where it can be ended."""
        self._limit = asyncio.Semaphore(AT_ONCE)

    def __enter__(self) -> None:
        """What is read from now on is shared."""
        self._users += 1

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._reads.clear()
            self._listed.clear()

    def share_for(self, seconds: float) -> None:
        """Share what is read until then."""
        self.__enter__()
        asyncio.get_running_loop().call_later(seconds, self.__exit__)

    async def entries(self, part: Range) -> list[Entry]:
        """The entries of the range, which has an end. Raises ChangedError if one is missing, StoreUnavailableError, DamagedError."""
        assert part.end is not None
        return await self._read(part.journal, range(part.start, part.end))

    async def entries_so_far(self, part: Range) -> list[Entry]:
        """The entries of the range, up to the last one that is there."""
        numbers = await self._list(part)
        return [entry for entry in await self._read(part.journal, numbers) if not entry.is_ending]

    async def read_ahead(self, part: Range) -> None:
        """Read what there is of the range, for `end` and `entries`. Raises ChangedError, StoreUnavailableError, DamagedError."""
        if part.end is not None:
            await self.entries(part)
            return
        async with self._endings.setdefault(part.journal, asyncio.Lock()):
            listed = self._listed.get(part.journal)
            if listed is None or part.start not in range(listed.start, listed.stop + 1):
                listed = self._listed[part.journal] = await self._list(part)
        await self._read(part.journal, range(part.start, listed.stop))

    async def end(self, part: Range) -> int:
        """End the journal, if nobody has. Returns the number of its ending entry: the entries before, from the range's start on, are all
        that there will ever be.

        Raises ChangedError, StoreUnavailableError, UnknownWriteError, DamagedError.
        """
        async with self._endings.setdefault(part.journal, asyncio.Lock()):
            # One below is not the end: it was written where entries had been deleted, by somebody who had read an old head.
            if self._ends.get(part.journal, 0) < part.start:
                self._ends[part.journal] = await self._end(part)
            return self._ends[part.journal]

    async def _end(self, part: Range) -> int:
        listed = self._listed.pop(part.journal, range(0))
        if part.start in range(listed.start, listed.stop + 1) and (end := await self._end_after(part, listed)) is not None:
            return end
        numbers = await self._list(part)
        # Whoever asks for the end wants the entries, too. If there is an ending entry already, a second one after it does no harm.
        ending = asyncio.create_task(self._write_end(part.journal, numbers.stop))
        try:
            entries = await self._read(part.journal, numbers)
        finally:
            await asyncio.wait([ending])
        entries += await self._read(part.journal, range(numbers.stop, ending.result()))
        return next((entry.meta.number for entry in entries if entry.is_ending), ending.result())

    async def _end_after(self, part: Range, listed: range) -> int | None:
        """End the journal after the entries that were read ahead. None: there are others by now."""
        if not await self._is_written(part.journal, ending_entry(listed.stop, self._nonce())):
            return None
        entries = await self._read(part.journal, range(part.start, listed.stop))
        return next((entry.meta.number for entry in entries if entry.is_ending), listed.stop)

    async def _write_end(self, journal: str, number: int) -> int:
        """Write an ending entry, with that number or a later one. Returns its number; there may be one before it."""
        nonce, ahead = self._nonce(), AHEAD
        if await self._is_written(journal, ending_entry(number, nonce)):
            return number
        # Its process is alive, and would be first at each number that follows. It cannot be first at several.
        number += 1
        while True:
            endings = [ending_entry(number + gap, nonce, gap) for gap in range(ahead)]
            tries = await asyncio.gather(
                *(self._objects.create(entry_name(journal, each.meta.number), data) for each, data in endings), return_exceptions=True
            )
            for (entry, data), tried in zip(endings, tries, strict=True):
                if tried is True or (tried is not False and await self._is_written(journal, (entry, data))):
                    return entry.meta.number
            number, ahead = number + ahead, 2 * ahead

    async def _is_written(self, journal: str, ending: tuple[Entry, bytes]) -> bool:
        """Write an ending entry. False: there is another entry, which ends nothing."""
        theirs = await write_entry(self._objects, journal, *ending, self._patience)
        return theirs is None or theirs.is_ending

    async def _list(self, part: Range) -> range:
        """The numbers of entries from the range's start on. Raises ChangedError unless they follow each other."""
        names = await self._objects.list(_entries_of(part.journal), entry_name(part.journal, part.start - 1))
        numbers = [_number_of(name) for name in names]
        found = range(part.start, part.start + len(numbers))
        later = next((number for number, expected in zip(numbers, found, strict=True) if number != expected), None)
        if later is None:
            return found
        entry, found = await read_entry(self._objects, part.journal, later), range(part.start, part.start + numbers.index(later))
        if entry is not None and entry.is_ending and later - entry.meta.gap <= found.stop:
            return found
        await self._check_deleted(part.journal)
        return range(part.start, part.start)

    async def _read(self, journal: str, numbers: range) -> list[Entry]:
        found = await asyncio.gather(*(self._entry(journal, number) for number in numbers))
        entries = [entry for entry in found if entry is not None]
        if len(entries) == len(numbers) and all(
            later.meta.before == entry.crc for entry, later in pairwise(entries) if not later.is_ending and not entry.is_ending
        ):
            return entries
        await self._check_deleted(journal)
        return []

    async def _check_deleted(self, journal: str) -> None:
        """Raise ChangedError unless the journal was deleted, so that missing entries were of no partition whose head names it.

        Its head may name it all the same, since a request to attach the partition there came so late. Its owner has written nothing then.
        """
        if await self._objects.get(tombstone_name(journal)) is None:
            raise ChangedError(f"entries of journal {journal} are missing")

    async def _entry(self, journal: str, number: int) -> Entry | None:
        key = journal, number
        reading = self._reads.get(key)
        if reading is None:
            if len(self._reads) >= SHARED:
                self._reads.pop(next(iter(self._reads)))
            reading = self._reads[key] = asyncio.create_task(self._limited(journal, number))
        try:
            found = await shielded(reading)
        except BaseException:
            self._reads.pop(key, None)
            raise
        if found is None:
            self._reads.pop(key, None)
        return found

    async def _limited(self, journal: str, number: int) -> Entry | None:
        async with self._limit:
            return await read_entry(self._objects, journal, number)

    # ---- deletion ---------------------------------------------------------------------------------------------

    async def wipe(self, journal: str, is_named: Callable[[str], Awaitable[bool]]) -> None:
        """Delete a journal that was ended, and that no head names any more. Its ending entries stay for ever: its writer may be asleep
        before it writes there.

        `is_named`: whether that partition's head names the journal. Raises StoreUnavailableError, DamagedError.
        """
        # In this order: a mark precedes the head that names the journal, and that the partition's first entry. So for each entry in the one
        # list there is a mark in the other.
        entries = await self._objects.list(_entries_of(journal), _entries_of(journal))
        marks = await self._objects.list(mark_name(journal, ""), "")
        for mark in marks:
            if await is_named(mark.rpartition("/")[2]):
                return
        left = len(entries)
        while left and (last := await read_entry(self._objects, journal, _number_of(entries[left - 1]))) is not None and last.is_ending:
            left -= 1
        # Without an ending entry it may be in use, and its writer relies on the marks.
        if left < len(entries) and (gone := [*entries[:left], *marks]):
            await _ensure(self._objects, tombstone_name(journal))
            await self._objects.delete(gone)


async def _ensure(objects: ObjectStore, name: str) -> None:
    """Create an empty object, unless it exists. Raises StoreUnavailableError if that is not certain."""
    try:
        # A refusal alone does not mean that the object exists: a store also refuses one of two writes at the same time.
        if not await objects.create(name, b"") and await objects.get(name) is None:
            raise StoreUnavailableError(f"{name} could not be created")
    except UnknownWriteError as error:
        raise StoreUnavailableError(str(error)) from error


def _entries_of(journal: str) -> str:
    return f"{FOLDER}{journal}/log/"


def _number_of(name: str) -> int:
    return int(name.rpartition("/")[2], 16)
