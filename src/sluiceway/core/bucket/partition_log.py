"""Partition log: the state that a partition's cycles add up to, and its checkpoints.

A pure machine. The adapter reads and writes the objects (`adapters/storage/bucket.py`); docs/adr/0051-a-journal-for-each-process.md has the
argument.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

import msgspec

from sluiceway.core.bucket.journal_entry import KINDS, Entry, Place
from sluiceway.model.changes import RecordKey, Snapshot

CHECKPOINT_BYTES = 1 << 20
"""Bytes of cycles after which a checkpoint is due, or the size of the last checkpoint, if that is more."""


class _StoredPlace(NamedTuple):
    """`journal`: its index among the checkpoint's journals."""

    journal: int
    number: int
    start: int
    length: int
    crc: int


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    """Stored form of a PartitionLog. The order of the fields is on disk: append only."""

    txn: int
    header: bytes | None
    records: list[tuple[str, str, bytes]]
    journals: list[str]
    places: list[tuple[int, _StoredPlace]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


class PartitionLog:
    """The state after the cycle `txn` (0: none): all records, and the place of each blob."""

    def __init__(self) -> None:
        self.txn = 0
        self.header: bytes | None = None
        self.records: dict[RecordKey, bytes] = {}
        self.places: dict[int, Place] = {}
        self.saved = 0
        """The cycle up to which there is a checkpoint that the head names."""
        self._bytes = self._size = 0

    def follow(self, life: str, journal: str, entry: Entry) -> bool:
        """Apply the cycle of that life in that entry, if it is the next. Returns whether there was one.

        Raises ValueError, and changes nothing, if there is a gap before it.
        """
        part = entry.parts.get(life)
        if part is None or part[0].txn <= self.txn:
            return False
        cycle, start = part
        if cycle.txn != self.txn + 1:
            raise ValueError(f"cycle {cycle.txn} does not follow cycle {self.txn}")
        self.txn, self.header = cycle.txn, cycle.header
        for kind, key in cycle.deletes:
            self.records.pop((KINDS[kind], key), None)
        for kind, key, value in cycle.puts:
            self.records[KINDS[kind], key] = value
        self.places |= cycle.places(journal, entry.meta.number, start)
        for blob in cycle.dropped:
            self.places.pop(blob, None)
        self._bytes += sum(len(key) + len(value) for _, key, value in cycle.puts) + 16 * len(cycle.deletes) + 32 * len(cycle.blobs)
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot(self.txn, self.header, dict(self.records))

    # ---- checkpoints ------------------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of this very state, or it is empty."""
        return self.saved == self.txn

    @property
    def checkpoint_is_due(self) -> bool:
        return self._bytes >= max(CHECKPOINT_BYTES, self._size)

    def journals(self) -> set[str]:
        """Those with blobs of the partition."""
        return {place.journal for place in self.places.values()}

    def checkpoint(self) -> bytes:
        """Its stored form. The next checkpoint is counted from here."""
        journals = sorted(self.journals())
        index = {journal: at for at, journal in enumerate(journals)}
        stored = _Checkpoint(
            self.txn,
            self.header,
            [(kind.value, key, value) for (kind, key), value in self.records.items()],
            journals,
            [(blob, _StoredPlace(index[place.journal], *place[1:])) for blob, place in self.places.items()],
        )
        data = _encode(stored)
        self._bytes, self._size = 0, len(data)
        return crc32(data).to_bytes(4, "little") + data

    @classmethod
    def of(cls, data: bytes) -> PartitionLog:
        """The state that a checkpoint holds. Raises ValueError if it is damaged."""
        if crc32(data[4:]) != int.from_bytes(data[:4], "little"):
            raise ValueError("the checkpoint failed its checksum")
        try:
            stored = _decode(data[4:])
        except msgspec.DecodeError as error:
            raise ValueError(f"the checkpoint cannot be read: {error}") from None
        log = cls()
        log.txn = log.saved = stored.txn
        log.header = stored.header
        log.records = {(KINDS[kind], key): value for kind, key, value in stored.records}
        log.places = {blob: Place(stored.journals[place.journal], *place[1:]) for blob, place in stored.places}
        log._size = len(data)
        return log
