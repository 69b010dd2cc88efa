"""Position store in a MetaStore."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from urllib.parse import quote

import msgspec

from sluiceway.adapters import system
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import MAX_COMMIT_KEYS, ConflictError, MetaStore, MetaUnknownError, Stamp
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import FencedError, Opening, PositionRecord, PositionUnknownError, Stored

LONGEST_PLAIN = 200
"""Maximum characters of a token in its key. Longer ones use a digest, since PostgreSQL's keys cannot hold a long escaped token."""
MAX_REMEMBERED = 4_096
"""Openings whose last stamp is cached. A commit under another one reads first."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a partition. `grant` and `number` identify the opening that may commit."""

    token: str
    grant: int
    number: int
    written_at: Millis
    kept: PositionRecord = PositionRecord()


class MetaPositions:
    """A position store with the store's durability, shared by the store's processes. Does not own the store. Use from one event loop.

    One record per partition, with its fence and state. Every write checks the record's stamp: one whose answer was lost cannot land after a
    later one. A commit is one commit of the store; opening also takes a read.
    """

    def __init__(self, store: MetaStore, name: str) -> None:
        """Raises `invalid_request` for a bad name."""
        self._store = store
        self._prefix = f"tasks/{check_queue_name(name, 'name')}/positions/"
        self._stamps: dict[Opening, Stamp] = {}
        """Stamp of the last write under each opening, most recently used last."""

    async def open(self, token: str, grant: int) -> tuple[Opening, PositionRecord]:
        key = self._key(token)
        while True:
            record, stamp, newest = await self._look(key)
            if record is not None and record.grant > grant:
                raise FencedError(token, record.grant)
            # Greater than the number of any previous opening, including forgotten ones.
            number = max(newest, record.number if record else 0) + 1
            kept = record.kept if record else PositionRecord()
            opened = _Record(token=token, grant=grant, number=number, written_at=system.now(), kept=kept)
            opening = Opening(token, grant, number)
            if await self._write(key, opening, stamp, opened):
                return opening, kept

    async def commit(self, opening: Opening, kept: PositionRecord) -> None:
        token, grant, number = opening
        key = self._key(token)
        stamp = self._stamps.get(opening)
        while True:
            if stamp is None:
                record, stamp, _ = await self._look(key)
                if record is None or (record.grant, record.number) != (grant, number):
                    raise FencedError(token, record.grant if record else 0)
            record = _Record(token=token, grant=grant, number=number, written_at=system.now(), kept=kept)
            if await self._write(key, opening, stamp, record):
                return
            stamp = None

    async def read(self) -> Mapping[str, Stored]:
        try:
            view = await self._store.read(prefixes=[self._prefix])
        except StoreUnavailableError as error:
            raise PositionUnknownError(str(error)) from error
        records = (msgspec.json.decode(entry.value, type=_Record) for entry in view.entries.values())
        return {record.token: Stored(record.grant, record.kept, record.written_at) for record in records}

    async def forget(self, tokens: Collection[str]) -> None:
        keys = sorted({self._key(token) for token in tokens})
        for start in range(0, len(keys), MAX_COMMIT_KEYS):
            try:
                await self._store.commit(deletes=keys[start : start + MAX_COMMIT_KEYS])
            except MetaUnknownError as error:
                raise PositionUnknownError(str(error)) from error

    # ---- one record -------------------------------------------------------------------------------------------------

    async def _look(self, key: str) -> tuple[_Record | None, Stamp | None, Stamp]:
        """The record with its stamp, and the store's newest stamp. Raises PositionUnknownError."""
        try:
            view = await self._store.read([key])
        except StoreUnavailableError as error:
            raise PositionUnknownError(str(error)) from error
        entry = view.entries.get(key)
        if entry is None:
            return None, None, view.stamp
        return msgspec.json.decode(entry.value, type=_Record), entry.stamp, view.stamp

    async def _write(self, key: str, opening: Opening, stamp: Stamp | None, record: _Record) -> bool:
        """Write the record. False: it has another stamp. Raises PositionUnknownError."""
        # Unless the write surely succeeds, the next one has to read first.
        self._stamps.pop(opening, None)
        try:
            written = await self._store.commit({key: stamp}, puts={key: msgspec.json.encode(record)})
        except ConflictError:
            return False
        except MetaUnknownError as error:
            raise PositionUnknownError(str(error)) from error
        self._stamps[opening] = written
        if len(self._stamps) > MAX_REMEMBERED:
            del self._stamps[next(iter(self._stamps))]
        return True

    def _key(self, token: str) -> str:
        """A unique key for any token; readable for most."""
        plain = quote(token, safe="")
        if len(plain) > LONGEST_PLAIN:
            # Longer than any plain one.
            plain = plain[:LONGEST_PLAIN] + hashlib.sha256(token.encode()).hexdigest()
        return self._prefix + plain
