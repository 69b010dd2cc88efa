"""Sync log in a MetaStore."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, ConflictError, MetaStore, MetaUnknownError, Stamp, View
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.sync_log import LogPage, LogUnavailableError

DIGITS = 16
"""Digits of a number in its key, so that keys sort like numbers."""
HEAD_BYTES = 64
"""Maximum bytes of the head's value."""
AHEAD = 4
"""Entries requested beyond the known end after a notification, to arrive together with the head."""
TRIES = 2
"""Conflicts before an append goes through the inbox."""
FIRST_PAUSE: Millis = 4
LONGEST_PAUSE: Millis = 500
"""Maximum random pause after a conflict, doubled each time."""
TRIMS = 8
"""Attempts to trim while other members append."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """`first` is the lowest existing number, `end` the last one given; in a log without entries `first` is `end + 1`."""

    first: int
    end: int


class _Known(NamedTuple):
    """The head as last seen, and its stamp. None: there was none."""

    head: _Head
    stamp: Stamp | None


class _Letter(NamedTuple):
    """A record in the inbox."""

    stamp: Stamp
    key: str
    record: bytes


class _Inbox(NamedTuple):
    """The inbox's content at that stamp, in order."""

    stamp: Stamp
    letters: Sequence[_Letter]


class MetaSyncLog:
    """A sync log with the store's durability, shared by the store's processes. Does not own the store. Use from one event loop.

    Entry n is the key `log/n`; the record `log-head`, written in the same commit, gives their range. An append is one commit that checks
    the head, or one for each MAX_COMMIT_KEYS records or MAX_COMMIT_BYTES: of two concurrent ones one must retry.

    After TRIES conflicts an append puts its records into the *inbox*, which cannot conflict. From then on no append lands without taking
    them along: each checks that the inbox is as it has seen it. So all come through, however many members there are and however busy one of
    them is. Letters of a dead member come with the next append.
    """

    def __init__(self, store: MetaStore, name: str, *, poll_interval: Millis = 500) -> None:
        """`poll_interval`: interval at which `wait` polls, since a hint of the store may be lost. Raises `invalid_request` for a bad
        name."""
        prefix = f"tasks/{check_queue_name(name, 'name')}/"
        self._store = store
        self._name = name
        self._head_key, self._entries, self._inbox = f"{prefix}log-head", f"{prefix}log/", f"{prefix}log-inbox/"
        # Unique, so that letters in the inbox are never overwritten.
        self._sender = system.new_secret()[:16]
        self._sent = 0
        self._room = MAX_COMMIT_BYTES - len(self._head_key) - HEAD_BYTES
        """Bytes of a commit besides the head."""
        self._cost = len(self._key(0)) + len(self._letter(0, 0))
        """Maximum bytes that a record adds to a commit besides its own: the commit may also have to delete it from the inbox."""
        self._poll_interval = poll_interval
        self._appending = asyncio.Lock()
        self._known: _Known | None = None
        self._mail: _Inbox | None = None
        """The inbox's last known content."""
        self._end = 0
        self._seen: Stamp = -1
        """Stamp of the newest view."""
        self._looked_at = 0.0
        self._hinted: Stamp = -1
        self._news = asyncio.Event()
        """Set, and replaced, at each hint."""
        self._listening: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    def _key(self, number: int) -> str:
        return f"{self._entries}{number:0{DIGITS}}"

    def _letter(self, number: int, at: int) -> str:
        return f"{self._inbox}{self._sender}/{number:0{DIGITS}}/{at:04}"

    # ---- appending --------------------------------------------------------------------------------------------------

    async def append(self, records: Sequence[bytes]) -> None:
        parts = self._parts(records)
        # Appends of one process need not conflict with each other.
        async with self._appending:
            for part in parts:
                await self._append(part)

    def _parts(self, records: Sequence[bytes]) -> list[Sequence[bytes]]:
        """Split the records into one part per commit. Raises ValueError."""
        parts: list[Sequence[bytes]] = []
        start = size = 0
        for at, record in enumerate(records):
            cost = self._cost + len(record)
            if cost > self._room:
                raise ValueError(f"a record of {len(record)} bytes; the log of {self._name} takes {self._room - self._cost}")
            if size + cost > self._room or at - start == MAX_COMMIT_KEYS - 1:
                parts.append(records[start:at])
                start, size = at, 0
            size += cost
        return [*parts, records[start:]] if records else parts

    async def _append(self, records: Sequence[bytes]) -> None:
        for _ in range(TRIES):
            if self._known is None or self._mail is None:
                await self._look_into_inbox()
            if await self._land(records):
                return
        begun = system.steady()
        letters = await self._post(records)
        # The busier the store, the longer.
        pause = max(FIRST_PAUSE, min(2 * (system.steady() - begun), LONGEST_PAUSE))
        while letters:
            # Meanwhile others may take them along.
            await asyncio.sleep(system.chance() * pause / 1000)
            pause = min(2 * pause, LONGEST_PAUSE)
            inbox = await self._look_into_inbox()
            letters &= {letter.key for letter in inbox.letters}
            if letters:
                await self._land(())

    async def _post(self, records: Sequence[bytes]) -> set[str]:
        """Put the records into the inbox. Returns their keys."""
        self._sent += 1
        letters = {self._letter(self._sent, at): record for at, record in enumerate(records)}
        try:
            await self._store.commit(puts=letters)
        except MetaUnknownError as error:
            raise LogUnavailableError(str(error)) from error
        return set(letters)

    async def _look_into_inbox(self) -> _Inbox:
        """Read the inbox and the head as of one moment."""
        view, self._known = await self._look(prefix=self._inbox)
        found = [_Letter(entry.stamp, key, entry.value) for key, entry in view.prefix(self._inbox).items()]
        self._mail = _Inbox(view.stamp, sorted(found))
        return self._mail

    async def _land(self, records: Sequence[bytes]) -> bool:
        """Commit as much of the inbox as fits, then the records, if they fit. Returns whether these are in the log."""
        known, mail = self._known, self._mail
        self._mail = None
        if known is None or mail is None:
            return False
        inbox, room, taken = mail.letters, self._room, 0
        # Two keys each, plus the head's.
        while taken < len(inbox) and 2 * taken + 3 <= MAX_COMMIT_KEYS and self._cost + len(inbox[taken].record) <= room:
            room -= self._cost + len(inbox[taken].record)
            taken += 1
        carried = [letter.record for letter in inbox[:taken]]
        keys, size = 2 * taken + 1 + len(records), sum(self._cost + len(record) for record in records)
        fits = taken == len(inbox) and keys <= MAX_COMMIT_KEYS and size <= room
        entries = [*carried, *records] if fits else carried
        puts = {self._key(number): record for number, record in enumerate(entries, known.head.end + 1)}
        head = _Head(known.head.first, known.head.end + len(entries))
        # An append that carries only letters need not exclude new ones; those come with the next append.
        unchanged = {self._inbox: mail.stamp} if records else {}
        stamp = await self._commit(known, head, puts, [letter.key for letter in inbox[:taken]], unchanged)
        if unchanged and stamp is not None:
            # The check shows that nothing had been added until then.
            self._mail = _Inbox(stamp, inbox[taken:])
        return stamp is not None and fits

    async def _commit(
        self, known: _Known, head: _Head, puts: Mapping[str, bytes], deletes: Sequence[str], unchanged: Mapping[str, Stamp] | None = None
    ) -> Stamp | None:
        """Commit. None: another append came first. Raises LogUnavailableError."""
        self._known = None
        try:
            puts = {self._head_key: msgspec.json.encode(head), **puts}
            stamp = await self._store.commit({self._head_key: known.stamp}, unchanged, puts, deletes)
        except ConflictError:
            return None
        except MetaUnknownError as error:
            # The member sees in the log whether it has landed; repeating it now could duplicate it.
            raise LogUnavailableError(str(error)) from error
        self._learn(_Known(head, stamp))
        return stamp

    # ---- trimming ---------------------------------------------------------------------------------------------------

    async def trim(self, upto: int) -> None:
        conflicts = 0
        while conflicts < TRIMS:
            known = self._known or (await self._look())[1]
            first, end = known.head.first, known.head.end
            # As many as a commit may delete.
            last = min(upto, end, first + MAX_COMMIT_KEYS - 2)
            if last < first:
                return
            if await self._commit(known, _Head(last + 1, end), {}, [self._key(number) for number in range(first, last + 1)]) is None:
                conflicts += 1
                await asyncio.sleep(system.chance() * FIRST_PAUSE * 2**conflicts / 1000)

    # ---- reading ----------------------------------------------------------------------------------------------------

    async def read(self, after: int, limit: int = 1_000) -> LogPage:
        self._listen()
        while True:
            start = max(after + 1, self._known.head.first if self._known else 1)
            ahead = AHEAD if self._hinted > self._seen else 0
            stop = min(max(self._end, start + ahead - 1), start + limit - 1)
            view, (head, _) = await self._look(start, stop)
            begin = max(start, head.first)
            numbers = range(begin, min(begin + limit - 1, head.end) + 1)
            # Otherwise there is more than was requested.
            if not numbers or numbers[-1] <= stop:
                return LogPage(head.first, tuple((number, self._entry(view, number)) for number in numbers), head.end)

    def _entry(self, view: View, number: int) -> bytes:
        entry = view.entries.get(self._key(number))
        if entry is None:
            # Head and entries are of the same moment, so the store was modified from outside.
            raise LogUnavailableError(f"record {number} of the log of {self._name} is missing in the meta store")
        return entry.value

    async def _look(self, start: int = 1, stop: int = 0, prefix: str | None = None) -> tuple[View, _Known]:
        """Read the head, the existing entries in that range, and the keys under the prefix, as of one moment. Raises
        LogUnavailableError."""
        keys, spans = _spans(start, stop)
        prefixes = [self._entries + span for span in spans] + ([] if prefix is None else [prefix])
        try:
            view = await self._store.read([self._head_key, *(self._entries + key for key in keys)], prefixes)
        except StoreUnavailableError as error:
            raise LogUnavailableError(str(error)) from error
        entry = view.entries.get(self._head_key)
        known = _Known(_Head(1, 0), None) if entry is None else _Known(msgspec.json.decode(entry.value, type=_Head), entry.stamp)
        self._seen = max(self._seen, view.stamp)
        self._looked_at = asyncio.get_running_loop().time()
        self._learn(known)
        return view, known

    def _learn(self, known: _Known) -> None:
        """Update the known head. Answers may overtake each other: the higher stamp wins."""
        if self._known is None or (known.stamp or 0) >= (self._known.stamp or 0):
            self._known = known
        self._end = max(self._end, known.head.end)

    # ---- waiting ----------------------------------------------------------------------------------------------------

    async def wait(self, after: int, timeout: Millis) -> None:
        self._listen()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout / 1000):
                while self._end <= after and self._hinted <= self._seen:
                    await self._hint_or_look()

    async def _hint_or_look(self) -> None:
        news = self._news
        # Not `wait_for`, which in Python 3.11 swallows a cancellation that coincides with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._looked_at + self._poll_interval / 1000):
                await news.wait()
                return
        try:
            await self._look()
        except LogUnavailableError:
            # `read` reports it.
            self._looked_at = asyncio.get_running_loop().time()

    def _listen(self) -> None:
        """Subscribe before the first read, so that no change is missed in between."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._hear(self._store.watch(self._head_key)))

    async def _hear(self, hints: AsyncIterator[Stamp]) -> None:
        async for stamp in hints:
            self._hinted = max(self._hinted, stamp)
            self._news.set()
            self._news = asyncio.Event()


def _spans(start: int, stop: int) -> tuple[list[str], list[str]]:
    """A small set of keys and prefixes that covers exactly these numbers: some 30 for 1,000 numbers."""
    keys: list[str] = []
    prefixes: list[str] = []
    while start <= stop:
        size, digits = 1, 0
        while start % (size * 10) == 0 and start + size * 10 - 1 <= stop:
            size, digits = size * 10, digits + 1
        text = f"{start:0{DIGITS}}"
        if digits:
            prefixes.append(text[: DIGITS - digits])
        else:
            keys.append(text)
        start += size
    return keys, prefixes
