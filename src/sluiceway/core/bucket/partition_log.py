"""Partition log: a partition's state after an entry of its log, and what may follow it.

A pure machine. The adapter reads and writes the objects (`adapters/storage/bucket.py`); docs/adr/0049-partitions-in-a-bucket.md has the
argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import msgspec

from sluiceway.core.bucket.log_entry import KINDS, Entry, Place, entry_of, fencing_entry
from sluiceway.model.changes import Changes, Fence, RecordKey, Snapshot

CHECKPOINT_ENTRIES = 128
"""Entries after which a checkpoint is due. A takeover reads as many, all at once; a checkpoint costs as much as four entries."""
CHECKPOINT_BYTES = 1 << 20
"""Bytes of metas after which a checkpoint is due, or the size of the last checkpoint, if that is more."""


class _Checkpoint(msgspec.Struct, array_like=True, frozen=True):
    """Stored form of a PartitionLog. The order of the fields is on disk: append only."""

    seq: int
    crc: int
    fence: Fence | None
    txn: int
    header: bytes | None
    records: list[tuple[str, str, bytes]]
    places: list[tuple[int, Place]]
    fencing: list[int]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Checkpoint).decode


class PartitionLog:
    """The state after the entry `seq` (0: none): all records, the place of each blob, and the fence.

    `fence`: of the last fencing entry; None before the first. `fencing`: numbers of all fencing entries, which are never deleted.
    """

    def __init__(self) -> None:
        self.seq = self.crc = self.txn = 0
        self.fence: Fence | None = None
        self.header: bytes | None = None
        self.records: dict[RecordKey, bytes] = {}
        self.places: dict[int, Place] = {}
        self.fencing: list[int] = []
        self.opener = b""
        """Nonce of the last fencing entry; unknown after a checkpoint."""
        self._entries = self._bytes = self._size = 0

    # ---- entries ----------------------------------------------------------------------------------------------

    def fencing_entry(self, fence: Fence, nonce: bytes) -> tuple[Entry, bytes]:
        """The next entry, as one that raises the fence, and its object."""
        return fencing_entry(self.seq + 1, nonce, fence, self.crc, self.txn)

    def entry_of(self, changes: Changes, nonce: bytes) -> tuple[Entry, bytes]:
        """The next entry, as one of these changes, and its object."""
        assert self.fence is not None, "it was opened"
        return entry_of(changes, self.seq + 1, nonce, self.fence, self.crc)

    def follow(self, entry: Entry) -> None:
        """Apply the next entry. Raises ValueError, and changes nothing, if it does not follow."""
        meta, fence = entry.meta, entry.meta.fence
        if meta.seq != self.seq + 1 or meta.before != self.crc:
            raise ValueError(f"entry {meta.seq} does not follow entry {self.seq}")
        if meta.is_fencing:
            if (self.fence is not None and fence <= self.fence) or meta.txn != self.txn:
                raise ValueError(f"entry {meta.seq} does not raise the fence")
            self.fence, self.opener = fence, meta.nonce
            self.fencing.append(meta.seq)
        elif fence != self.fence or meta.txn != self.txn + 1:
            raise ValueError(f"entry {meta.seq} is not of the partition's owner")
        else:
            self._change(entry)
        self.seq, self.crc = meta.seq, entry.crc
        self._entries += 1
        self._bytes += entry.body

    def _change(self, entry: Entry) -> None:
        meta = entry.meta
        self.txn, self.header = meta.txn, meta.header
        for kind, key in meta.deletes:
            self.records.pop((KINDS[kind], key), None)
        for kind, key, value in meta.puts:
            self.records[KINDS[kind], key] = value
        self.places |= entry.places
        for number in meta.dropped:
            self.places.pop(number, None)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.txn, self.header, dict(self.records))

    # ---- checkpoints and collection ---------------------------------------------------------------------------

    @property
    def checkpoint_is_due(self) -> bool:
        return self._entries >= CHECKPOINT_ENTRIES or self._bytes >= max(CHECKPOINT_BYTES, self._size)

    def checkpoint(self) -> bytes:
        """Its stored form. The next checkpoint is counted from here."""
        stored = _Checkpoint(
            self.seq,
            self.crc,
            self.fence,
            self.txn,
            self.header,
            [(kind.value, key, value) for (kind, key), value in self.records.items()],
            list(self.places.items()),
            self.fencing,
        )
        data = _encode(stored)
        self._entries, self._bytes, self._size = 0, 0, len(data)
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
        log.seq, log.crc, log.fence, log.txn, log.header = stored.seq, stored.crc, stored.fence, stored.txn, stored.header
        log.records = {(KINDS[kind], key): value for kind, key, value in stored.records}
        log.places = dict(stored.places)
        log.fencing, log._size = stored.fencing, len(data)
        return log

    def kept(self) -> frozenset[int]:
        """The entries up to this state that must stay once a checkpoint of it is named by the head.

        Those with blobs that are still needed; and the fencing entries, for ever: each is at the name which a former owner would create
        next, so it must never be free, however late that owner wakes.
        """
        return frozenset((*self.fencing, *(place.seq for place in self.places.values())))


def garbage(listed: Iterable[int], upto: int, kept: frozenset[int]) -> list[int]:
    """Of the listed entries, those that a checkpoint at `upto` has made superfluous."""
    return [seq for seq in listed if seq <= upto and seq not in kept]
