"""MetaStore in a bucket: one object holds all keys, and each commit replaces it under the condition that it is unchanged.

Made for a cluster's metadata, some hundred kilobytes, and a few commits a second: as many as one object can be replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.background import shielded
from sluiceway.adapters.meta.commit import HISTORY, check_commit
from sluiceway.adapters.meta.watches import Watches
from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import ConflictError, Entry, MetaUnknownError, Stamp, View
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

NAME = "meta"
PATIENCE: Millis = 10_000
"""How long a commit is repeated whose outcome is unknown."""
POLL_INTERVAL: Millis = 1_000
"""How often a watch reads the object: $1 a month in S3 Standard."""
REMEMBERED = 256
"""Writes whose ids are in the object, so that one whose answer was lost is found out: mostly more than are made within PATIENCE."""
TOGETHER = 64
"""Commits that share a write."""
TRACES = 1_000
"""Deleted keys that leave a trace. Questions about older stamps get the safe answer *it has changed*."""
PAUSES = (0.02, 0.5)
"""Seconds before a commit is tried again after a failure: first, and at most (doubling)."""


class _Document(msgspec.Struct, array_like=True, frozen=True):
    """The object. The order of the fields is on disk: append only.

    `floor`: deletes up to this stamp may have lost their trace. `writes`: the latest ones, each with its id and the stamp of its first
    commit. No two versions are equal, so a tag, which may be a hash, never comes back.
    """

    stamp: Stamp = 0
    floor: Stamp = 0
    entries: dict[str, tuple[bytes, Stamp]] = {}
    deleted: list[tuple[str, Stamp]] = []
    writes: list[tuple[bytes, Stamp]] = []

    def changed(self, prefix: str, since: Stamp) -> bool:
        """Whether a key under the prefix was put or deleted after the stamp."""
        return since < self.floor or any(stamp > since for stamp in self._stamps(prefix))

    def _stamps(self, prefix: str) -> Iterator[Stamp]:
        yield from (stamp for key, (_, stamp) in self.entries.items() if key.startswith(prefix))
        yield from (stamp for key, stamp in self.deleted if key.startswith(prefix))

    def check(self, checks: Mapping[str, Stamp | None], unchanged: Mapping[str, Stamp]) -> None:
        """Raise ConflictError if a check fails."""
        for key, expected in checks.items():
            if self.entries.get(key, (b"", None))[1] != expected:
                raise ConflictError(f"{key} has changed")
        for prefix, since in unchanged.items():
            if self.changed(prefix, since):
                raise ConflictError(f"something under {prefix} has changed")

    def may_have_forgotten(self, first: Stamp) -> bool:
        """Whether a write whose first commit would have that stamp may have been made, and is remembered no more."""
        return len(self.writes) >= REMEMBERED and first < self.writes[0][1]

    def after(self, puts: Mapping[str, bytes], deletes: Sequence[str]) -> _Document:
        """The document after a commit."""
        stamp = self.stamp + 1
        gone = dict.fromkeys(key for key in deletes if key in self.entries)
        entries = {key: entry for key, entry in self.entries.items() if key not in gone} | {
            key: (data, stamp) for key, data in puts.items()
        }
        deleted = [*(each for each in self.deleted if each[1] > stamp - HISTORY), *((key, stamp) for key in gone)]
        dropped = deleted[:-TRACES]
        floor = max(self.floor, stamp - HISTORY, *(at for _, at in dropped)) if dropped else max(self.floor, stamp - HISTORY)
        return _Document(stamp, floor, entries, deleted[-TRACES:], self.writes)

    def signed(self, write: bytes, first: Stamp) -> _Document:
        """The document as that write, whose first commit has that stamp."""
        return _Document(self.stamp, self.floor, self.entries, self.deleted, [*self.writes[1 - REMEMBERED :], (write, first)])


class _Known(NamedTuple):
    """The document as last seen. `tag`: empty if there is no object yet."""

    document: _Document
    tag: str


class _Commit(NamedTuple):
    """A commit that waits, and what its caller waits for."""

    checks: Mapping[str, Stamp | None]
    unchanged: Mapping[str, Stamp]
    puts: Mapping[str, bytes]
    deletes: Sequence[str]
    done: asyncio.Future[Stamp]


class _Sent(NamedTuple):
    """An attempt at commits, the first of which has that stamp if it lands."""

    commits: Sequence[_Commit]
    first: Stamp


def _decide(document: _Document, commits: Sequence[_Commit], *, is_fresh: bool) -> tuple[_Document, list[_Commit]] | None:
    """The document after the commits, one after the other, and those of them that are in it.

    Answers those whose checks fail; None if one fails and the document is not fresh.
    """
    left = []
    for each in commits:
        try:
            document.check(each.checks, each.unchanged)
        except ConflictError as error:
            if not is_fresh:
                return None
            if not each.done.done():
                each.done.set_exception(error)
        else:
            document = document.after(each.puts, each.deletes)
            left.append(each)
    return document, left


def _tell(commits: Sequence[_Commit], first: Stamp) -> None:
    """Answer the commits of one write."""
    for stamp, each in enumerate(commits, first):
        if not each.done.done():
            each.done.set_result(stamp)


def _give_up(commits: Sequence[_Commit], why: str) -> None:
    for each in commits:
        if not each.done.done():
            each.done.set_exception(MetaUnknownError(f"meta store: {why}"))


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Document).decode


class BucketMetaStore:
    """A durable MetaStore for processes on any machines that reach the bucket. `nonce` returns 8 random bytes.

    A watch wakes at once for commits made through this object, and looks for those of others every `poll_interval`. Use from one event
    loop.
    """

    def __init__(
        self, objects: ObjectStore, *, poll_interval: Millis = POLL_INTERVAL, nonce: Callable[[], bytes] = lambda: os.urandom(8)
    ) -> None:
        self._objects = objects
        self._nonce = nonce
        self._poll_interval = poll_interval
        self._known: _Known | None = None
        self._read_at = -1e9
        """When the read began that has told it."""
        self._reading: asyncio.Task[_Known] | None = None
        """A read that has not begun yet."""
        self._waiting: list[_Commit] = []
        self._writing: asyncio.Task[None] | None = None
        self._next_at = -1e9
        """When it may write again, by the event loop's clock."""
        self._proof = Proof(objects, nonce)
        self._watches = Watches(self._changed_since, poll_interval)

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        document = (await self._read()).document
        found = {key: Entry(*document.entries[key]) for key in keys if key in document.entries}
        for prefix in prefixes:
            found.update((key, Entry(*entry)) for key, entry in document.entries.items() if key.startswith(prefix))
        return View(document.stamp, found)

    async def refresh(self, view: View, prefix: str) -> View:
        """Read again: the object comes as a whole."""
        return await self.read(prefixes=[prefix])

    async def _read(self) -> _Known:
        """Read the object as it is now. Those who ask at the same moment share a read. Raises StoreUnavailableError."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_next())
        return await shielded(self._reading)

    async def _read_next(self) -> _Known:
        await asyncio.sleep(0)
        # A later call needs a later read: it must see every write that has ended by then.
        self._reading = None
        await self._proof.give()
        began = system.stopwatch()
        found = await self._objects.get(NAME)
        if found is None:
            return _Known(_Document(), "")
        known = self._known
        if known is None or known.tag != found.tag:
            try:
                known = _Known(_decode(found.data), found.tag)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise StoreUnavailableError(f"meta store: the object {NAME} cannot be read: {error}") from None
        if self._known is None or known.document.stamp >= self._known.document.stamp:
            self._known, self._read_at = known, began
        return known

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        puts = dict(puts or {})
        check_commit(puts, deletes)
        done: asyncio.Future[Stamp] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Commit(dict(checks or {}), dict(unchanged or {}), puts, tuple(deletes), done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        # A caller that gives up does not take its commit back: it may be under way.
        return await shielded(done)

    async def _write_all(self) -> None:
        """Carry out the commits that wait. What comes while one is written shares the next: an opening of many partitions has many.

        Between two writes it lets others write. A process that has just written knows the document; all others must read it first, and
        would find it changed again and again.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await asyncio.sleep(max(0, self._next_at - loop.time()))
                commits, self._waiting = self._waiting[:TOGETHER], self._waiting[TOGETHER:]
                try:
                    await self._write_together(commits)
                except Exception as error:
                    log.exception("meta store: a commit failed")
                    _give_up(commits, repr(error))
                self._watches.wake()
        finally:
            self._writing = None

    async def _write_together(self, commits: list[_Commit]) -> None:
        pause, loop = PAUSES[0], asyncio.get_running_loop()
        until, why = loop.time() + PATIENCE / 1000, "it changes faster than it can be written"
        # What this object has seen last is mostly still right: a write instead of a read and a write.
        known = self._known
        sent: dict[bytes, _Sent] = {}
        """The attempts, by the ids of their writes."""
        while commits and loop.time() < until:
            try:
                known, is_fresh = (await self._read(), True) if known is None else (known, False)
                for write, first in known.document.writes:
                    _tell(sent[write].commits if write in sent else (), first)
                commits = [each for each in commits if not each.done.done()]
                if any(known.document.may_have_forgotten(each.first) for each in sent.values()):
                    why = "so much was written meanwhile that it cannot be found out"
                    break
                decided = _decide(known.document, commits, is_fresh=is_fresh)
                if decided is None:
                    known = None
                    continue
                document, commits = decided
                if not commits:
                    return
                write, first, began = self._nonce(), known.document.stamp + 1, loop.time()
                sent[write] = _Sent(commits, first)
                if (written := await self._write(known, document.signed(write, first))) is not None:
                    self._known, ended = written, loop.time()
                    self._next_at = ended + system.chance() * (ended - began)
                    _tell(commits, first)
                    return
                # Another was faster, so the bucket is well: no reason to wait.
                known = None
            except (StoreUnavailableError, UnknownWriteError) as error:
                known, why = None, str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
        _give_up(commits, why)

    async def _write(self, known: _Known, document: _Document) -> _Known | None:
        """Replace the document that is known. None: it is another one by now."""
        data = _encode(document)
        if known.tag:
            tag = await self._objects.replace(NAME, data, known.tag)
            return None if tag is None else _Known(document, tag)
        if not await self._objects.create(NAME, data):
            return None
        found = await self._objects.get(NAME)
        return None if found is None or found.data != data else _Known(document, found.tag)

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        """Yields for every change after this call. The first hint may be about an earlier one."""
        return self._watches.watch(prefix, 0 if self._known is None else self._known.document.stamp)

    async def _changed_since(self, prefix: str, since: Stamp) -> tuple[bool, Stamp]:
        # All watches that look within half an interval share a read.
        if system.stopwatch() - self._read_at > self._poll_interval / 2_000:
            try:
                await self._read()
            except StoreUnavailableError:
                return False, since
        document = _Document() if self._known is None else self._known.document
        return document.changed(prefix, since), document.stamp

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._watches.close()
        await self._objects.close()
