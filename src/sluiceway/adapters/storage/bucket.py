"""Bucket partition store: a journal for each process, with the cycles of all its partitions; for each partition a head and a checkpoint.

docs/adr/0051-a-journal-for-each-process.md has the layout, and the argument why no acknowledged cycle is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import msgspec
from msgspec.structs import replace

from sluiceway.adapters.background import shielded
from sluiceway.adapters.storage.bucket_journals import PAUSES, ChangedError, Journal, JournalOverError, Journals, entry_name
from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.core.bucket.journal_entry import Entry, Place
from sluiceway.core.bucket.partition_head import Head, Range
from sluiceway.core.bucket.partition_log import PartitionLog
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    FencedError,
    Least,
    LostError,
    PartitionRef,
    Snapshot,
    StoreUnavailableError,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECKPOINT_ENTRIES = 512
"""Entries of the journal after which each partition that wrote to it checkpoints. A takeover reads as many, shared by its partitions."""
WALKS = 20
"""Times that a partition is read again because its head changed meanwhile. It changes every few hundred entries."""
READ_AHEAD_FOR = 10.0
"""Seconds until what was read ahead is forgotten: more than `member_timeout` exceeds `lease_timeout`."""
READ_AHEAD_AT_ONCE = 64
"""Partitions that are read ahead at the same time."""
GAP = 64 << 10
"""Bytes between two blobs of an entry up to which they are read together."""
READS_AT_ONCE, READS_OF_A_CALL = 512, 128
"""Entries whose blobs are read at the same time, by all calls and by one of them: of items that were produced one by one, each has an entry
of its own, and a lease may have thousands. The others need not wait for all of those."""

STORAGE = "storage"
"""Name of the object that holds the storage's identity."""

_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode


@dataclass(slots=True, eq=False)
class _Open:
    """A partition whose state this store follows. `head`: as it was last written or read, with its `tag`. `last`: the last entry of this
    process's journal with a cycle of it. `tried`: where a request that was not answered may attach it; `unsure`: whether one may detach it.
    """

    head: Head
    tag: str
    log: PartitionLog
    last: int = 0
    tried: int | None = None
    unsure: bool = False
    sent: set[bytes] = field(default_factory=set)
    """Nonces of the heads that were sent since, any of which may have replaced it."""
    is_clean: bool = False
    """Whether no earlier checkpoints are left but the one that the head names."""
    checkpointing: bool = False
    writing: bool = False
    """Whether a cycle is under way, or has ended with an unknown outcome, which only `open` settles."""
    applying: asyncio.Lock = field(default_factory=asyncio.Lock)
    heading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the head is replaced, and from a look at where it is attached until the cycle waits there."""


class _Left(NamedTuple):
    """What a partition that is no longer open here may need of this process's journal: entries from `start` on, if any, and others. `tag`:
    that the head had."""

    start: int | None
    numbers: frozenset[int]
    tag: str


class _TakenOverError(Exception):
    """The partition is no longer open here: another owner has opened it, or it was released or dropped."""


_ERRORS = StoreUnavailableError, UnknownWriteError, DamagedError, ChangedError, _TakenOverError


class BucketPartitionStore:
    """A PartitionStore in a bucket.

    `patience`: how long a write whose outcome is unknown is repeated. `window`: how long each entry waits for further cycles.
    `nonce` returns 8 random bytes.
    """

    def __init__(
        self, objects: ObjectStore, patience: Millis, window: Millis = 0, nonce: Callable[[], bytes] = lambda: os.urandom(8)
    ) -> None:
        self._objects = objects
        self._patience = patience / 1000
        self._window = window / 1000
        self._nonce = nonce
        self._journal = self._new_journal()
        self._others = Journals(objects, self._patience, nonce)
        self._open_ones: dict[PartitionRef, _Open] = {}
        self._attached: dict[PartitionRef, _Open] = {}
        """Those of the open ones that are attached to the journal. The first is due for a checkpoint first."""
        self._opening: dict[PartitionRef, asyncio.Lock] = {}
        self._found: dict[PartitionRef, tuple[Head, str]] = {}
        """Heads that were read ahead, with their tags."""
        self._reading_ahead = asyncio.Semaphore(READ_AHEAD_AT_ONCE)
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._left: dict[PartitionRef, _Left] = {}
        self._unnamed: set[str] = set()
        """Journals that a head has ceased to name since they were looked at."""
        self._wiping: dict[str, asyncio.Task[None]] = {}
        self._collecting = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._proof = Proof(objects, nonce)

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def identify(self, new: str | None) -> str | None:
        await self._proof.give()
        found = await self._objects.get(STORAGE)
        if found is None and new is not None:
            with contextlib.suppress(UnknownWriteError):
                await self._objects.create(STORAGE, new.encode())
            found = await self._objects.get(STORAGE)
            if found is None:
                raise StoreUnavailableError("the storage's name could not be written")
        return None if found is None else found.data.decode()

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        await self._proof.give()
        try:
            return (await self._carry_out(self._open(ref, fence, least))).log.snapshot()
        except UnknownWriteError as error:
            raise StoreUnavailableError(f"partition {_name(ref)}: {error}") from error

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        # Copied: the caller may use them again, and this may outlive the call.
        return await self._carry_out(self._apply(ref, _copy(changes), fence))

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        # It ends when its caller gives up: nobody needs the rows, and the rest of the requests would hold up those of others.
        return await self._begin(self._read(ref, blobs))

    async def browse(self, ref: PartitionRef) -> Snapshot:
        opened = await self._look(ref)
        return Snapshot(0, None, {}) if opened is None else opened.log.snapshot()

    async def drop(self, ref: PartitionRef) -> None:
        await self._carry_out(self._drop(ref))

    async def release(self, ref: PartitionRef) -> None:
        await self._carry_out(self._release(ref))

    async def close(self) -> None:
        await self._settle()
        await self._collect()
        await self._settle()
        try:
            await self._journal.close()
            await self._wipe_own()
        except (StoreUnavailableError, UnknownWriteError, DamagedError) as error:
            log.debug("something stays of journal %s: %s", self._journal.name, error)
        await self._objects.close()

    async def _settle(self) -> None:
        while self._calls:
            await asyncio.wait(self._calls)

    async def _wipe_own(self) -> None:
        journal = self._journal.name
        await self._others.wipe(journal, lambda name: self._is_named(_ref_of(name), journal))

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        return await shielded(self._begin(call))

    def _begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    # ---- reading a partition ----------------------------------------------------------------------------------

    async def _head(self, ref: PartitionRef) -> tuple[Head, str] | None:
        found = await self._objects.get(_head_of(ref))
        if found is None:
            return None
        try:
            return _decode_head(found.data), found.tag
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"partition {_name(ref)}: its head cannot be read: {error}") from None

    async def _walk(
        self, ref: PartitionRef, head: Head, entries: Callable[[Range], Coroutine[Any, Any, tuple[Range, list[Entry]]]]
    ) -> tuple[PartitionLog, list[Range]]:
        """The state, and the ranges of the tail that have cycles of it. Raises ChangedError."""
        state, parts = await asyncio.gather(self._checkpoint_of(ref, head), asyncio.gather(*map(entries, head.tail)))
        needed = []
        for part, found in parts:
            try:
                followed = [state.follow(head.life, part.journal, entry) for entry in found]
            except ValueError as error:
                raise ChangedError(str(error)) from None
            if any(followed):
                needed.append(part)
        return state, needed

    async def _checkpoint_of(self, ref: PartitionRef, head: Head) -> PartitionLog:
        if not head.checkpoint:
            return PartitionLog()
        found = await self._objects.get(_checkpoints_of(ref, head.life) + head.checkpoint)
        if found is None:
            raise ChangedError(f"checkpoint {head.checkpoint} is missing")
        try:
            return PartitionLog.of(found.data)
        except ValueError as error:
            raise ChangedError(str(error)) from None

    async def _so_far(self, part: Range) -> tuple[Range, list[Entry]]:
        """The range as it is now."""
        return part, await (self._others.entries_so_far(part) if part.end is None else self._others.entries(part))

    async def _for_good(self, part: Range) -> tuple[Range, list[Entry]]:
        """The range with its end, beyond which no other process writes to the journal."""
        if part.end is None:
            own = part.journal == self._journal.name and not self._journal.is_over
            part = part._replace(end=self._journal.number + 1 if own else await self._others.end(part))
        return part, await self._others.entries(part)

    async def _look(self, ref: PartitionRef) -> _Open | None:
        """Read the partition as it is now; None: there is none."""
        doubts = 0
        with self._others:
            for _ in range(WALKS):
                found = await self._head(ref)
                if found is None or not found[0].life:
                    return None
                why = None
                try:
                    state, _ = await self._walk(ref, found[0], self._so_far)
                except ChangedError as error:
                    why = str(error)
                if await self._is_current(ref, found[1]):
                    if why is None:
                        return _Open(*found, state)
                    doubts = await self._doubt(ref, why, doubts)
        raise _changes_too_fast(ref)

    async def _is_current(self, ref: PartitionRef, tag: str) -> bool:
        now = await self._head(ref)
        return now is not None and now[1] == tag

    async def _doubt(self, ref: PartitionRef, why: str, doubts: int) -> int:
        """Wait before the partition is read again: it does not fit together, though its head is unchanged. Raises DamagedError if it never
        did; a head may come late, but not twice."""
        if doubts == 2:
            raise DamagedError(f"partition {_name(ref)}: {why}")
        await asyncio.sleep(PAUSES[0])
        return doubts + 1

    # ---- opening ----------------------------------------------------------------------------------------------

    async def read_ahead(self, ref: PartitionRef) -> None:
        """Read the partition's head and entries, since its owner has probably died. The checkpoint, which may be large, is read beside the
        journal's end.

        It is as if the opening had begun now, and went on later: it replaces the head that was read here, or starts over.
        """
        with contextlib.suppress(*_ERRORS):
            await self._carry_out(self._read_ahead(ref))

    async def _read_ahead(self, ref: PartitionRef) -> None:
        async with self._reading_ahead:
            found = await self._head(ref)
            if found is None or not found[0].life or ref in self._open_ones:
                return
            self._others.share_for(READ_AHEAD_FOR)
            others = [part for part in found[0].tail if part.journal != self._journal.name]
            await asyncio.gather(*map(self._others.read_ahead, others))
        self._found[ref] = found
        asyncio.get_running_loop().call_later(READ_AHEAD_FOR, self._found.pop, ref, None)

    async def _open(self, ref: PartitionRef, fence: Fence, least: Least | None, *, again: bool = False) -> _Open:
        """Open the partition. `again`: under the fence that it has."""
        async with self._opening.setdefault(ref, asyncio.Lock()):
            with self._others:
                return await self._open_once(ref, fence, least, again)

    async def _open_once(self, ref: PartitionRef, fence: Fence, least: Least | None, again: bool) -> _Open:
        doubts = 0
        # Under the fence that it has, this process has opened it since it was read ahead.
        ahead = None if again else self._found.pop(ref, None)
        for _ in range(WALKS):
            if (before := self._open_ones.get(ref)) is not None:
                # A cycle of this process is to end first, and none is to begin.
                async with before.applying:
                    self._forget(ref)
            found, ahead = ahead or await self._head(ref), None
            if found is None or not found[0].life:
                LostError.check(_name(ref), None, least)
                await self._create(ref, None if found is None else found[1])
                continue
            head, tag = found
            if again and head.fence != fence:
                raise FencedError(f"partition {_name(ref)} is open with {head.fence}")
            if head.fence is not None and not again:
                FencedError.check(_name(ref), head.fence, fence)
            why: ChangedError | LostError
            try:
                opened = await self._take(ref, head, tag, fence, least)
                if opened is not None:
                    return opened
                continue
            except (ChangedError, LostError) as error:
                why = error
            if await self._is_current(ref, tag):
                if isinstance(why, LostError):
                    raise why
                doubts = await self._doubt(ref, str(why), doubts)
        raise _changes_too_fast(ref)

    async def _create(self, ref: PartitionRef, dropped: str | None) -> None:
        """Create an empty partition, in place of the dropped one whose head has that tag. Another one may be first."""
        head = _encode(Head(self._nonce(), self._nonce().hex()))
        with contextlib.suppress(UnknownWriteError):
            if dropped is None:
                await self._objects.create(_head_of(ref), head)
            else:
                await self._objects.replace(_head_of(ref), head, dropped)

    async def _take(self, ref: PartitionRef, head: Head, tag: str, fence: Fence, least: Least | None) -> _Open | None:
        """Read the partition for good, and have its head say so, so that no former owner can add to it. None: it was changed meanwhile."""
        journal = self._present()
        # One that was in use, or is new, will be used: it is attached at once.
        attaches = bool(head.tail) or head.fence is None
        marking = journal.mark(_name(ref)) if attaches else asyncio.sleep(0)
        (state, tail), _ = await asyncio.gather(self._walk(ref, head, self._for_good), marking)
        LostError.check(_name(ref), None if head.fence is None else Least(head.fence, state.txn), least)
        taken = head.opened(self._nonce(), fence, tail)
        if attaches and not journal.is_over:
            taken = taken.attach(self._nonce(), *journal.begins[:2])
            self._hold(ref, journal.begins.start, tag)
        written = await self._replace_head(ref, taken, tag)
        if written is None:
            return None
        self._left.pop(ref, None)
        self._wipe_unless_named(head, taken)
        opened = self._open_ones[ref] = _Open(taken, written, state)
        if self._is_attached(opened):
            opened.last = taken.tail[-1].start - 1
            self._attached[ref] = opened
        if tail:
            self._checkpoint_soon(ref, opened)
        return opened

    def _hold(self, ref: PartitionRef, start: int, tag: str) -> None:
        """Keep the entries from there on until it is known whether the head names them."""
        left = self._left.get(ref, _Left(None, frozenset(), tag))
        self._left[ref] = _Left(start if left.start is None else min(left.start, start), left.numbers, tag)

    def _forget(self, ref: PartitionRef) -> None:
        """The partition is no longer open here."""
        opened = self._open_ones.pop(ref, None)
        if opened is None:
            return
        self._attached.pop(ref, None)
        starts = self._starts(opened)
        numbers = frozenset(self._numbers(opened))
        if starts or numbers:
            self._left[ref] = _Left(min(starts, default=None), numbers, opened.tag)

    def _starts(self, opened: _Open) -> list[int]:
        """From where on the partition may need entries of the journal, which its checkpoint does not have."""
        starts = [part.start for part in opened.head.tail if part.journal == self._journal.name]
        return starts if opened.tried is None else [*starts, opened.tried]

    def _numbers(self, opened: _Open) -> Iterator[int]:
        """The entries of the journal with blobs of the partition."""
        return (place.number for place in opened.log.places.values() if place.journal == self._journal.name)

    # ---- heads ------------------------------------------------------------------------------------------------

    async def _replace_head(self, ref: PartitionRef, head: Head, tag: str) -> str | None:
        """Replace the head that has this tag. Returns the new one's tag; None if it has another."""
        try:
            return await self._objects.replace(_head_of(ref), _encode(head), tag)
        except UnknownWriteError:
            found = await self._head(ref)
            if found is None or found[1] == tag:
                # It may still come.
                raise
            return found[1] if found[0] == head else None

    async def _put_head(self, ref: PartitionRef, opened: _Open, head: Head) -> bool:
        """Replace the head of an open partition. False: an earlier request of this store has changed it; see there. Raises
        _TakenOverError."""
        opened.sent.add(head.nonce)
        tag = await self._replace_head(ref, head, opened.tag)
        if tag is not None:
            opened.tried, opened.unsure = None, False
            self._note_head(ref, opened, head, tag)
            return True
        found = await self._head(ref)
        # The fence alone would not do: another store of this process may have opened it under the same one.
        if found is None or found[0].nonce not in {opened.head.nonce, *opened.sent}:
            if self._open_ones.get(ref) is opened:
                self._forget(ref)
            raise _TakenOverError
        self._note_head(ref, opened, *found)
        return False

    def _note_head(self, ref: PartitionRef, opened: _Open, head: Head, tag: str) -> None:
        """The open partition has that head now."""
        self._wipe_unless_named(opened.head, head)
        if tag != opened.tag:
            # Those that were sent before can no longer come.
            opened.sent.clear()
        opened.head, opened.tag = head, tag
        self._attached.pop(ref, None)
        if self._is_attached(opened) and self._open_ones.get(ref) is opened:
            self._attached[ref] = opened

    def _new_journal(self) -> Journal:
        return Journal(self._objects, self._patience, self._window, self._nonce, self._wrote)

    def _present(self) -> Journal:
        """The journal of this process: another one after it was ended."""
        if self._journal.is_over:
            self._journal = self._new_journal()
            self._attached.clear()
            self._left.clear()
            for opened in self._open_ones.values():
                opened.tried = None
        return self._journal

    def _is_attached(self, opened: _Open) -> bool:
        """Whether its head names the journal as the one that the owner writes to."""
        attached = opened.head.attached
        return attached is not None and attached.journal == self._journal.name

    async def _attach(self, ref: PartitionRef, opened: _Open) -> Journal:
        """The journal, once the partition's head names it.

        Raises _TakenOverError, StoreUnavailableError, UnknownWriteError, DamagedError, ChangedError.
        """
        while True:
            journal, head = self._present(), opened.head
            if self._is_attached(opened):
                if opened.unsure:
                    await self._renew_head(ref, opened)
                    continue
                return journal
            await journal.mark(_name(ref))
            if head.attached is not None:
                # A former journal of this process. It has no cycle of the partition that is not known here.
                with self._others:
                    head = head.detach(self._nonce(), await self._others.end(head.attached))
            if journal.is_over:
                continue
            opened.tried = min(opened.tried or journal.begins.start, journal.begins.start)
            if await self._put_head(ref, opened, head.attach(self._nonce(), *journal.begins[:2])):
                opened.last = opened.head.tail[-1].start - 1

    async def _renew_head(self, ref: PartitionRef, opened: _Open) -> None:
        """Replace the head by another version of the same, so that requests which were not answered find another tag."""
        await self._put_head(ref, opened, replace(opened.head, nonce=self._nonce()))

    async def _release(self, ref: PartitionRef) -> None:
        """Detach the partition, so that its next owner does not have to end the journal."""
        opened = self._open_ones.get(ref)
        if opened is None:
            return
        async with opened.applying, opened.heading:
            try:
                while self._is_attached(opened) and not opened.writing and self._open_ones.get(ref) is opened:
                    if await self._put_head(ref, opened, opened.head.detach(self._nonce(), self._journal.number + 1)):
                        break
            except _ERRORS as error:
                log.debug("partition %s was not detached: %r", _name(ref), error)
        if self._open_ones.get(ref) is opened:
            self._forget(ref)

    # ---- cycles -----------------------------------------------------------------------------------------------

    async def _apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        while True:
            try:
                opened = await self._owned(ref, fence)
            except (StoreUnavailableError, UnknownWriteError, DamagedError, FencedError):
                return Outcome.REFUSED
            if opened is None:
                return Outcome.REFUSED
            async with opened.applying:
                # It may have been released meanwhile.
                if self._open_ones.get(ref) is opened:
                    return await self._commit(ref, opened, changes, fence)

    async def _commit(self, ref: PartitionRef, opened: _Open, changes: Changes, fence: Fence) -> Outcome:
        if opened.writing or opened.head.fence != fence or changes.txn not in (opened.log.txn, opened.log.txn + 1):
            return Outcome.REFUSED
        if changes.txn == opened.log.txn:
            return Outcome.DONE
        opened.writing = True
        try:
            await self._write(ref, opened, changes)
        except UnknownWriteError:
            return Outcome.UNKNOWN
        except (StoreUnavailableError, DamagedError, ChangedError, _TakenOverError) as error:
            log.debug("partition %s: a cycle was refused: %r", _name(ref), error)
            opened.writing = False
            if isinstance(error, ChangedError):
                self._forget(ref)
            return Outcome.REFUSED
        opened.writing = False
        if opened.log.checkpoint_is_due:
            self._checkpoint_soon(ref, opened)
        return Outcome.DONE

    async def _owned(self, ref: PartitionRef, fence: Fence) -> _Open | None:
        """The partition, opened again under its fence if this store has released it, or has just been opened."""
        opened = self._open_ones.get(ref)
        if opened is None and (found := await self._head(ref)) is not None and found[0].life and found[0].fence == fence:
            opened = await self._open(ref, fence, None, again=True)
        return opened

    async def _write(self, ref: PartitionRef, opened: _Open, changes: Changes) -> None:
        """Have the cycle be durable. Raises StoreUnavailableError, DamagedError, ChangedError, _TakenOverError: surely nothing happened;
        UnknownWriteError."""
        while True:
            async with opened.heading:
                try:
                    journal = await self._attach(ref, opened)
                except UnknownWriteError as error:
                    # Of the head alone.
                    raise StoreUnavailableError(str(error)) from error
            try:
                await journal.write(opened.head.life, changes, lambda entry: self._follow(opened, entry))
                return
            except JournalOverError:
                # By an opening of one of its partitions elsewhere. The others go on in another journal.
                continue

    def _follow(self, opened: _Open, entry: Entry) -> None:
        opened.log.follow(opened.head.life, self._journal.name, entry)
        opened.last = entry.meta.number

    def _wrote(self) -> None:
        """There is another entry: whose turn is it to write a checkpoint?"""
        number = self._journal.number
        for ref, opened in list(self._attached.items()):
            attached = opened.head.attached
            if attached is not None and number - attached.start < CHECKPOINT_ENTRIES:
                break
            self._attached[ref] = self._attached.pop(ref)
            self._checkpoint_soon(ref, opened)
        if number % CHECKPOINT_ENTRIES == 0 and not self._collecting:
            self._collecting = True
            self._begin(self._collect())

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def _checkpoint_soon(self, ref: PartitionRef, opened: _Open) -> None:
        if opened.checkpointing or (opened.head.attached is not None and not self._is_attached(opened)):
            return
        opened.checkpointing = True
        # At this moment, since cycles go on meanwhile.
        upto, state, txn = self._journal.number, opened.log, opened.log.txn
        covered = [part if part.end is not None else part._replace(end=upto + 1) for part in opened.head.tail]
        saved = opened.head.checkpoint, opened.head.journals, None
        made = saved if state.is_saved else (f"{_number(state.txn)}-{self._nonce().hex()}", sorted(state.journals()), state.checkpoint())

        async def run() -> None:
            try:
                before = await self._checkpoint(ref, opened, covered, *made)
                state.saved = txn
                await self._clean(ref, opened, before)
            except (StoreUnavailableError, UnknownWriteError, DamagedError) as error:
                log.warning("partition %s: a checkpoint failed, and is tried again later: %s", _name(ref), error)
            except _TakenOverError:
                log.debug("partition %s is no longer open here, and needs no checkpoint", _name(ref))
            except Exception:
                log.exception("partition %s: a checkpoint failed", _name(ref))
            finally:
                opened.checkpointing = False

        self._begin(run())

    async def _checkpoint(
        self, ref: PartitionRef, opened: _Open, covered: list[Range], name: str, journals: list[str], data: bytes | None
    ) -> Head:
        """Write a checkpoint, and name it in the head instead of the ranges that it covers. Returns the head before."""
        life = opened.head.life
        if data is not None and not await self._objects.create(_checkpoints_of(ref, life) + name, data):
            raise StoreUnavailableError("the checkpoint's name is taken")
        async with opened.heading:
            while True:
                if self._open_ones.get(ref) is not opened:
                    # Released, and perhaps open here again: its head is no longer this one's to replace.
                    raise _TakenOverError
                before, head = opened.head, opened.head.checkpointed(self._nonce(), name, journals, covered)
                if self._is_idle(opened, head):
                    head, opened.unsure = head.detach(self._nonce(), 0), True
                if await self._put_head(ref, opened, head):
                    return before

    def _is_idle(self, opened: _Open, head: Head) -> bool:
        """Whether the partition has had no cycle for a while. Then it leaves the journal, and costs nothing until the next one."""
        attached = head.attached
        if attached is None or attached.journal != self._journal.name or opened.writing:
            return False
        return opened.last < attached.start and opened.last < self._journal.number - CHECKPOINT_ENTRIES // 2

    async def _clean(self, ref: PartitionRef, opened: _Open, before: Head) -> None:
        """Delete the checkpoints before the present one."""
        folder = _checkpoints_of(ref, opened.head.life)
        gone = [folder + before.checkpoint] if before.checkpoint and before.checkpoint != opened.head.checkpoint else []
        was_clean, opened.is_clean = opened.is_clean, False
        if not was_clean:
            # Another owner may have written one of a later state by now.
            gone = [name for name in await self._objects.list(folder, folder) if name < folder + opened.head.checkpoint[:16]]
        if gone:
            await self._objects.delete(gone)
        opened.is_clean = True

    def _wipe_unless_named(self, before: Head, head: Head) -> None:
        """Have the journals deleted that the one head names and the other does not, if they have ended and no other head names them."""
        for journal in sorted(before.named - head.named - {self._journal.name}):
            self._unnamed.add(journal)
            if journal not in self._wiping:
                self._wiping[journal] = self._begin(self._wipe(journal))

    async def _wipe(self, journal: str) -> None:
        """Partitions that are opened together let go of it together: it is looked at once more after each look."""
        try:
            while journal in self._unnamed:
                self._unnamed.discard(journal)
                await self._others.wipe(journal, lambda name: self._is_named(_ref_of(name), journal))
        except (StoreUnavailableError, DamagedError) as error:
            self._unnamed.add(journal)
            log.warning("journal %s could not be deleted, which is tried again later: %s", journal, error)
        finally:
            self._wiping.pop(journal, None)

    async def _is_named(self, ref: PartitionRef, journal: str) -> bool:
        found = await self._head(ref)
        return found is not None and journal in found[0].named

    async def _collect(self) -> None:
        """Delete the entries of this process's journal that no partition needs."""
        journal = self._journal
        try:
            await self._settle_heads()
            for each in sorted(self._unnamed - self._wiping.keys()):
                await self._wipe(each)
            await self._look_after_the_left(journal)
            if journal is not self._journal:
                return
            needed = {number for opened in self._open_ones.values() for number in self._numbers(opened)}
            floors = [journal.number, *(start for opened in self._open_ones.values() for start in self._starts(opened))]
            for left in self._left.values():
                needed |= left.numbers
                floors += [] if left.start is None else [left.start]
            floor = min(floors)
            gone = [number for number in journal.kept if number < floor and number not in needed]
            if gone:
                await self._objects.delete([entry_name(journal.name, number) for number in gone])
            for number in gone:
                del journal.kept[number]
        except (StoreUnavailableError, UnknownWriteError, DamagedError) as error:
            log.warning("entries of a journal could not be deleted, which is tried again later: %s", error)
        finally:
            self._collecting = False

    async def _settle_heads(self) -> None:
        """Make sure of the heads that may be attached by requests that were not answered, and of those that are to a former journal."""
        for ref, opened in list(self._open_ones.items()):
            attached = opened.head.attached
            if opened.tried is None and (attached is None or self._is_attached(opened)):
                continue
            try:
                async with opened.heading:
                    if self._open_ones.get(ref) is opened:
                        await self._settle_head(ref, opened)
            except _ERRORS as error:
                log.debug("partition %s: its head is as it was: %r", _name(ref), error)

    async def _settle_head(self, ref: PartitionRef, opened: _Open) -> None:
        attached = opened.head.attached
        if attached is None or self._is_attached(opened):
            await self._renew_head(ref, opened)
        elif not opened.writing:
            with self._others:
                end = await self._others.end(attached)
            if await self._put_head(ref, opened, opened.head.detach(self._nonce(), end)):
                self._checkpoint_soon(ref, opened)

    async def _look_after_the_left(self, journal: Journal) -> None:
        """Forget what is no longer needed: a head that has changed will not name entries of the journal again that it does not name now."""
        for ref, left in list(self._left.items()):
            found = await self._head(ref)
            if journal is not self._journal:
                # What is left now is of another journal.
                return
            if self._left.get(ref) is not left or (found is not None and found[1] == left.tag):
                continue
            if found is None or journal.name not in found[0].named:
                del self._left[ref]
            elif all(part.journal != journal.name for part in found[0].tail):
                self._left[ref] = left._replace(start=None)

    # ---- blobs ------------------------------------------------------------------------------------------------

    async def _read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        opened = self._open_ones.get(ref) or await self._look(ref)
        if opened is None:
            return {}
        wanted = {number: opened.log.places[number] for number in blobs if number in opened.log.places}
        found = await self._places(wanted.values())
        if rest := [place for place in wanted.values() if place not in found]:
            # The answer may be at fault, or it is gone because its owner has dropped it.
            found |= await self._places(rest)
        for number, place in wanted.items():
            if place not in found and opened.log.places.get(number) == place and self._open_ones.get(ref) is opened:
                is_there = await self._objects.get_range(entry_name(place.journal, place.number), 0, 1) is not None
                what = "failed its checksum" if is_there else "is missing"
                raise DamagedError(f"partition {_name(ref)}: blob {number} {what}")
        return {number: found[place] for number, place in wanted.items() if place in found}

    async def _places(self, places: Iterable[Place]) -> dict[Place, bytes]:
        """What lies in those places, as far as it is what was put there."""
        pieces = list(_pieces(places))
        of_this_call = asyncio.Semaphore(READS_OF_A_CALL)

        async def read(piece: Sequence[Place]) -> bytes | None:
            async with of_this_call, self._reading:
                return await self._piece(piece)

        found = {}
        for piece, data in zip(pieces, await asyncio.gather(*map(read, pieces)), strict=True):
            for place in piece:
                blob = (data or b"")[place.start - piece[0].start :][: place.length]
                if data is not None and len(blob) == place.length and crc32(blob) == place.crc:
                    found[place] = blob
        return found

    async def _piece(self, piece: Sequence[Place]) -> bytes | None:
        start, end = piece[0].start, piece[-1].start + piece[-1].length
        return await self._objects.get_range(entry_name(piece[0].journal, piece[0].number), start, end - start) if end > start else b""

    # ---- dropping ---------------------------------------------------------------------------------------------

    async def _drop(self, ref: PartitionRef) -> None:
        self._forget(ref)
        pause, until = PAUSES[0], asyncio.get_running_loop().time() + self._patience
        while (found := await self._head(ref)) is not None and found[0].life:
            # The head stays, so that the partition's next life gets another folder, to which no present owner writes.
            try:
                if await self._replace_head(ref, dropped := Head(self._nonce()), found[1]) is not None:
                    self._wipe_unless_named(found[0], dropped)
                    break
            except UnknownWriteError as error:
                if asyncio.get_running_loop().time() >= until:
                    raise StoreUnavailableError(f"partition {_name(ref)}: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        folder = _folder_of(ref) + "/"
        names = await self._objects.list(folder, folder)
        # Read after the list: whoever has created the partition anew by then keeps what is in the list.
        present = await self._head(ref)
        kept = f"{folder}{present[0].life}/" if present is not None and present[0].life else _head_of(ref)
        if gone := [name for name in names if name != _head_of(ref) and not name.startswith(kept)]:
            await self._objects.delete(gone)


def _changes_too_fast(ref: PartitionRef) -> StoreUnavailableError:
    return StoreUnavailableError(f"partition {_name(ref)}: its log changes faster than it can be read")


def _copy(changes: Changes) -> Changes:
    """The changes in collections of their own."""
    return Changes(
        changes.txn,
        changes.header,
        dict(changes.puts),
        set(changes.deletes),
        dict(changes.blobs),
        set(changes.dropped_blobs),
        dict(changes.compacted_blobs),
    )


def _pieces(places: Iterable[Place]) -> Iterator[list[Place]]:
    """The places in groups that are read together."""
    piece: list[Place] = []
    for place in sorted(places):
        if piece and (place[:2] != piece[-1][:2] or place.start > piece[-1].start + piece[-1].length + GAP):
            yield piece
            piece = []
        piece.append(place)
    if piece:
        yield piece


# ---- names ----------------------------------------------------------------------------------------------------


def _name(ref: PartitionRef) -> str:
    return f"{ref.incarnation}-{ref.partition}"


def _ref_of(name: str) -> PartitionRef:
    incarnation, _, partition = name.rpartition("-")
    return PartitionRef(incarnation, int(partition))


def _folder_of(ref: PartitionRef) -> str:
    return f"partitions/{_name(ref)}"


def _head_of(ref: PartitionRef) -> str:
    return f"{_folder_of(ref)}/head"


def _checkpoints_of(ref: PartitionRef, life: str) -> str:
    return f"{_folder_of(ref)}/{life}/checkpoint/"


def _number(txn: int) -> str:
    return f"{txn:016x}"
