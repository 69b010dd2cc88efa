"""Bucket partition store: a log of create-only objects for each partition, and a head that names its last checkpoint.

docs/adr/0049-partitions-in-a-bucket.md has the layout, and the argument why no acknowledged cycle is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.core.bucket.log_entry import Entry, Place, decode, meta_bytes
from sluiceway.core.bucket.partition_log import PartitionLog, garbage
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import Object, ObjectStore, UnknownWriteError
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

FIRST_BYTES = 64 << 10
"""Read of each entry of a log at first: nearly always its whole meta, and few of its blobs."""
AT_ONCE = 128
"""Objects of a partition that are read at the same time."""
WALKS = 20
"""Times that a log is read again because its head changed meanwhile. It changes every few hundred cycles."""
PAUSES = (0.05, 2.0)
"""Seconds before a write is repeated: first, and at most (doubling)."""
GAP = 64 << 10
"""Bytes between two blobs of an entry up to which they are read together."""

STORAGE = "storage"
"""Name of the object that holds the storage's identity."""


class _Head(msgspec.Struct, array_like=True, frozen=True):
    """The one object of a partition that changes. No two versions of a life are equal, so a tag, which may be a hash, never comes back.

    `life`: folder of the log, a new one whenever the partition is created; empty once it was dropped. `checkpoint`: number and name of the
    last one.
    """

    life: str
    checkpoint: tuple[int, str] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(_Head).decode


@dataclass(slots=True, eq=False)
class _Open:
    """A partition whose log this store follows. `life`: the folder of its log; `tag`: of the head that it was read by."""

    life: str
    log: PartitionLog
    tag: str
    writing: bool = False
    """Whether a write is under way, or has ended with an unknown outcome, which only `open` settles."""
    checkpointing: asyncio.Task[None] | None = field(default=None)


class _ChangedError(Exception):
    """What was read does not fit together: either the head is no longer the current one, or the log is damaged."""


class BucketPartitionStore:
    """A PartitionStore in a bucket. `patience`: how long a write whose outcome is unknown is repeated; `nonce` returns 8 random bytes."""

    def __init__(self, objects: ObjectStore, patience: Millis, nonce: Callable[[], bytes] = lambda: os.urandom(8)) -> None:
        self._objects = objects
        self._patience = patience / 1000
        self._nonce = nonce
        self._open_ones: dict[PartitionRef, _Open] = {}
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
            return await self._carry_out(self._open(ref, fence, least))
        except UnknownWriteError as error:
            raise StoreUnavailableError(f"partition {_name(ref)}: {error}") from error

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        # Copied: the caller may use them again, and this may outlive the call.
        return await self._carry_out(self._apply(ref, _copy(changes), fence))

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        return await self._carry_out(self._read(ref, blobs))

    async def browse(self, ref: PartitionRef) -> Snapshot:
        opened = await self._look(ref)
        return Snapshot(0, None, {}) if opened is None else opened.log.snapshot()

    async def drop(self, ref: PartitionRef) -> None:
        await self._carry_out(self._drop(ref))

    async def release(self, ref: PartitionRef) -> None:
        self._open_ones.pop(ref, None)

    async def close(self) -> None:
        while self._calls:
            await asyncio.wait(self._calls)
        await self._objects.close()

    async def _carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._begin(call))

    def _begin(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    # ---- reading a log ----------------------------------------------------------------------------------------

    async def _head(self, ref: PartitionRef) -> tuple[_Head, str] | None:
        found = await self._objects.get(_head_of(ref))
        return None if found is None else (_read_head(ref, found), found.tag)

    async def _walk(self, ref: PartitionRef, head: _Head, tag: str) -> _Open:
        """Read the log up to its end. Raises _ChangedError."""
        partition = PartitionLog()
        folder = _log_of(ref, head.life)
        if head.checkpoint is not None:
            upto, name = head.checkpoint
            found, listed = await asyncio.gather(
                self._objects.get(_checkpoint_of(ref, head.life, name)), self._objects.list(folder, folder + _number(upto))
            )
            if found is None:
                raise _ChangedError(f"checkpoint {name} is missing")
            with _damage(ref):
                partition = PartitionLog.of(found.data)
        else:
            listed = await self._objects.list(folder, folder)
        opened = _Open(head.life, partition, tag)
        numbers = [_seq_of(name) for name in listed]
        for at in range(0, len(numbers), AT_ONCE):
            for entry in await asyncio.gather(*(self._entry(ref, head.life, seq) for seq in numbers[at : at + AT_ONCE])):
                if entry is None:
                    raise _ChangedError("entries of its log are missing")
                _follow(partition, entry)
        return opened

    async def _entry(self, ref: PartitionRef, life: str, seq: int) -> Entry | None:
        """The entry without its blobs; None: there is none of that number. What does not fit is read twice: the answer may be at fault."""
        try:
            return await self._entry_as_read(ref, life, seq)
        except ValueError:
            with _damage(ref):
                return await self._entry_as_read(ref, life, seq)

    async def _entry_as_read(self, ref: PartitionRef, life: str, seq: int) -> Entry | None:
        name = _entry_of(ref, life, seq)
        data = await self._objects.get_range(name, 0, FIRST_BYTES)
        if data is None:
            return None
        size = meta_bytes(data)
        if size > len(data):
            data += await self._objects.get_range(name, len(data), size - len(data)) or b""
        entry = decode(data)
        if entry.meta.seq != seq:
            raise ValueError(f"entry {seq} calls itself {entry.meta.seq}")
        return entry

    async def _look(self, ref: PartitionRef) -> _Open | None:
        """Read the partition as it is now; None: there is none."""
        for times in range(WALKS):
            found = await self._head(ref)
            if found is None or not found[0].life:
                return None
            why = None
            try:
                opened = await self._walk(ref, *found)
            except _ChangedError as error:
                why = str(error)
            if await self._is_current(ref, found[1]):
                if why is None:
                    return opened
                await self._doubt(ref, why, times)
        raise _changes_too_fast(ref)

    async def _is_current(self, ref: PartitionRef, tag: str) -> bool:
        now = await self._head(ref)
        return now is not None and now[1] == tag

    async def _doubt(self, ref: PartitionRef, why: str, times: int) -> None:
        """Wait before the log is read again, which does not fit together though its head is unchanged. Raises DamagedError if it never did:
        a head may come late, but not twice."""
        if times >= 2:
            raise DamagedError(f"partition {_name(ref)}: {why}")
        await asyncio.sleep(PAUSES[0])

    # ---- opening ----------------------------------------------------------------------------------------------

    async def _open(self, ref: PartitionRef, fence: Fence, least: Least | None) -> Snapshot:
        ours = self._nonce()
        for times in range(WALKS):
            found = await self._head(ref)
            if found is None or not found[0].life:
                LostError.check(_name(ref), None, least)
                await self._create(ref, None if found is None else found[1])
                continue
            why: str | LostError | None = None
            try:
                opened = await self._walk(ref, *found)
                await self._fence(ref, opened, fence, least, ours)
            except _ChangedError as error:
                why = str(error)
            except LostError as error:
                why = error
            # An owner's checkpoint that this has not seen may have freed the very name of the fencing entry.
            if await self._is_current(ref, found[1]):
                if why is None:
                    self._open_ones[ref] = opened
                    return opened.log.snapshot()
                if isinstance(why, LostError):
                    raise why
                await self._doubt(ref, why, times)
        raise _changes_too_fast(ref)

    async def _create(self, ref: PartitionRef, dropped: str | None) -> None:
        """Create an empty partition, in place of the dropped one whose head has that tag. Another one may be first."""
        head = _encode(_Head(self._nonce().hex()))
        with contextlib.suppress(UnknownWriteError):
            if dropped is None:
                await self._objects.create(_head_of(ref), head)
            else:
                await self._objects.replace(_head_of(ref), head, dropped)

    async def _fence(self, ref: PartitionRef, opened: _Open, fence: Fence, least: Least | None, ours: bytes) -> None:
        """Take the end of the log for a fencing entry, so that no former owner can add to it. Raises _ChangedError, too."""
        partition = opened.log
        while True:
            if partition.opener == ours:
                # This call wrote it, and then read the log again.
                return
            if partition.fence is not None:
                FencedError.check(_name(ref), partition.fence, fence)
            LostError.check(_name(ref), None if partition.fence is None else Least(partition.fence, partition.txn), least)
            entry, data = partition.fencing_entry(fence, ours)
            theirs = await self._write(ref, opened.life, entry, data)
            _follow(partition, theirs or entry)
            if theirs is None:
                return

    async def _write(self, ref: PartitionRef, life: str, entry: Entry, data: bytes) -> Entry | None:
        """Create the entry. Returns None if it is there, or the one that was there before.

        Raises StoreUnavailableError if it surely was not written, and UnknownWriteError if it may be, or have been there, or come later.
        The same bytes may be written under the same name any number of times.
        """
        name = _entry_of(ref, life, entry.meta.seq)
        pause, is_sure = PAUSES[0], True
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience
        while True:
            try:
                if await self._objects.create(name, data):
                    return None
                is_there = await self._entry(ref, life, entry.meta.seq)
            except UnknownWriteError:
                is_sure = False
            except StoreUnavailableError as error:
                if loop.time() >= until and is_sure:
                    raise
                log.debug("partition %s: %s", _name(ref), error)
            else:
                # Nothing: the store refused it only because of another write at the same time, or what was there is superfluous by now.
                if is_there is not None and is_there.meta.nonce == entry.meta.nonce:
                    return None
                if is_there is not None and is_sure:
                    return is_there
                if is_there is not None:
                    # An earlier attempt may have landed, and become superfluous before this one came: what is there now need not have been
                    # there first.
                    raise UnknownWriteError(f"entry {entry.meta.seq} is another's, and was perhaps this one's before")
            if loop.time() >= until:
                raise UnknownWriteError(f"no answer within {self._patience:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, PAUSES[1])

    # ---- cycles -----------------------------------------------------------------------------------------------

    async def _apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        try:
            opened = await self._following(ref)
        except (StoreUnavailableError, DamagedError):
            return Outcome.REFUSED
        if opened is None or opened.writing or opened.log.fence != fence or changes.txn > opened.log.txn + 1:
            return Outcome.REFUSED
        if changes.txn <= opened.log.txn:
            return Outcome.DONE
        entry, data = opened.log.entry_of(changes, self._nonce())
        opened.writing = True
        try:
            theirs = await self._write(ref, opened.life, entry, data)
        except StoreUnavailableError:
            opened.writing = False
            return Outcome.REFUSED
        except (UnknownWriteError, DamagedError):
            return Outcome.UNKNOWN
        if theirs is not None:
            # Another owner has opened the partition.
            self._open_ones.pop(ref, None)
            return Outcome.REFUSED
        opened.writing = False
        opened.log.follow(entry)
        if opened.log.checkpoint_is_due and opened.checkpointing is None:
            self._checkpoint_soon(ref, opened)
        return Outcome.DONE

    async def _following(self, ref: PartitionRef) -> _Open | None:
        """The partition as this store follows it. Read anew if the store has just been opened, or has released it."""
        opened = self._open_ones.get(ref)
        if opened is None:
            opened = await self._look(ref)
            if opened is not None:
                self._open_ones[ref] = opened
        return opened

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def _checkpoint_soon(self, ref: PartitionRef, opened: _Open) -> None:
        # At this moment, since cycles go on meanwhile.
        seq, kept, data = opened.log.seq, opened.log.kept(), opened.log.checkpoint()

        async def run() -> None:
            try:
                await self._checkpoint(ref, opened, seq, kept, data)
            except (StoreUnavailableError, UnknownWriteError, DamagedError) as error:
                log.warning("partition %s: a checkpoint failed, and is tried again later: %s", _name(ref), error)
            finally:
                opened.checkpointing = None

        opened.checkpointing = self._begin(run())

    async def _checkpoint(self, ref: PartitionRef, opened: _Open, seq: int, kept: frozenset[int], data: bytes) -> None:
        """Write a checkpoint, name it in the head, and delete what it makes superfluous."""
        name = f"{_number(seq)}-{self._nonce().hex()}"
        if not await self._objects.create(_checkpoint_of(ref, opened.life, name), data):
            raise StoreUnavailableError("the checkpoint's name is taken")
        head = _Head(opened.life, (seq, name))
        while (tag := await self._replace_head(ref, head, opened.tag)) is None:
            # A former owner's checkpoint of an earlier state, or the present one's of a later state.
            found = await self._head(ref)
            if found is None or found[0].life != opened.life or (found[0].checkpoint or (0, ""))[0] >= seq:
                return
            opened.tag = found[1]
        opened.tag = tag
        await self._collect(ref, opened.life, seq, kept)

    async def _replace_head(self, ref: PartitionRef, head: _Head, tag: str) -> str | None:
        """Replace the head that has this tag. Returns the new one's tag; None if it has another."""
        try:
            return await self._objects.replace(_head_of(ref), _encode(head), tag)
        except UnknownWriteError:
            found = await self._head(ref)
            if found is None or found[1] == tag:
                # It may still come.
                raise
            return found[1] if found[0] == head else None

    async def _collect(self, ref: PartitionRef, life: str, upto: int, kept: frozenset[int]) -> None:
        """Delete the entries and checkpoints that the one at `upto`, which the head names or has named, makes superfluous.

        It deletes nothing later: other owners may have written more by the time it runs.
        """
        folder = _log_of(ref, life)
        entries = await self._objects.list(folder, folder)
        gone = [_entry_of(ref, life, seq) for seq in garbage(map(_seq_of, entries), upto, kept)]
        folder = _checkpoints_of(ref, life)
        gone += [name for name in await self._objects.list(folder, folder) if name < folder + _number(upto)]
        if gone:
            await self._objects.delete(gone)

    # ---- blobs ------------------------------------------------------------------------------------------------

    async def _read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        opened = await self._following(ref)
        if opened is None:
            return {}
        wanted = {number: opened.log.places[number] for number in blobs if number in opened.log.places}
        found = await self._places(ref, opened.life, wanted.values())
        if rest := [place for place in wanted.values() if place not in found]:
            # The answer may be at fault, or it is gone because its owner has dropped it.
            found |= await self._places(ref, opened.life, rest)
        for number, place in wanted.items():
            if place not in found and opened.log.places.get(number) == place and self._open_ones.get(ref) is opened:
                is_there = await self._objects.get_range(_entry_of(ref, opened.life, place.seq), 0, 1) is not None
                what = "failed its checksum" if is_there else "is missing"
                raise DamagedError(f"partition {_name(ref)}: blob {number} {what}")
        return {number: found[place] for number, place in wanted.items() if place in found}

    async def _places(self, ref: PartitionRef, life: str, places: Iterable[Place]) -> dict[Place, bytes]:
        """What lies in those places, as far as it is what was put there."""
        pieces = list(_pieces(places))
        found = {}
        for piece, data in zip(pieces, await asyncio.gather(*(self._piece(ref, life, piece) for piece in pieces)), strict=True):
            for place in piece:
                blob = (data or b"")[place.start - piece[0].start :][: place.length]
                if data is not None and len(blob) == place.length and crc32(blob) == place.crc:
                    found[place] = blob
        return found

    async def _piece(self, ref: PartitionRef, life: str, piece: Sequence[Place]) -> bytes | None:
        start, end = piece[0].start, piece[-1].start + piece[-1].length
        return await self._objects.get_range(_entry_of(ref, life, piece[0].seq), start, end - start) if end > start else b""

    # ---- dropping ---------------------------------------------------------------------------------------------

    async def _drop(self, ref: PartitionRef) -> None:
        self._open_ones.pop(ref, None)
        while (found := await self._head(ref)) is not None:
            head, tag = found
            if not head.life:
                break
            # The head stays, so that the partition's next life gets another folder, to which no present owner writes.
            with contextlib.suppress(UnknownWriteError):
                if await self._replace_head(ref, _Head(""), tag) is not None:
                    break
        folder = _folder_of(ref) + "/"
        names = await self._objects.list(folder, folder)
        # Read after the list: whoever has created the partition anew by then keeps what is in the list.
        present = await self._head(ref)
        kept = f"{folder}{present[0].life}/" if present is not None and present[0].life else _head_of(ref)
        if gone := [name for name in names if name != _head_of(ref) and not name.startswith(kept)]:
            await self._objects.delete(gone)


def _changes_too_fast(ref: PartitionRef) -> StoreUnavailableError:
    return StoreUnavailableError(f"partition {_name(ref)}: its log changes faster than it can be read")


def _follow(partition: PartitionLog, entry: Entry) -> None:
    try:
        partition.follow(entry)
    except ValueError as error:
        raise _ChangedError(str(error)) from None


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
        if piece and (place.seq != piece[-1].seq or place.start > piece[-1].start + piece[-1].length + GAP):
            yield piece
            piece = []
        piece.append(place)
    if piece:
        yield piece


def _read_head(ref: PartitionRef, found: Object) -> _Head:
    try:
        return _decode_head(found.data)
    except msgspec.DecodeError as error:
        raise DamagedError(f"partition {_name(ref)}: its head cannot be read: {error}") from None


@contextlib.contextmanager
def _damage(ref: PartitionRef) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise DamagedError(f"partition {_name(ref)}: {error}") from None


# ---- names ----------------------------------------------------------------------------------------------------


def _name(ref: PartitionRef) -> str:
    return f"{ref.incarnation}-{ref.partition}"


def _folder_of(ref: PartitionRef) -> str:
    return f"partitions/{_name(ref)}"


def _head_of(ref: PartitionRef) -> str:
    return f"{_folder_of(ref)}/head"


def _log_of(ref: PartitionRef, life: str) -> str:
    return f"{_folder_of(ref)}/{life}/log/"


def _checkpoints_of(ref: PartitionRef, life: str) -> str:
    return f"{_folder_of(ref)}/{life}/checkpoint/"


def _number(seq: int) -> str:
    return f"{seq:016x}"


def _entry_of(ref: PartitionRef, life: str, seq: int) -> str:
    return _log_of(ref, life) + _number(seq)


def _checkpoint_of(ref: PartitionRef, life: str, name: str) -> str:
    return _checkpoints_of(ref, life) + name


def _seq_of(name: str) -> int:
    return int(name.rpartition("/")[2], 16)
