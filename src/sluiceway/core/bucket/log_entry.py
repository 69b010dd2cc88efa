"""A log entry: one object of a partition's log in a bucket.

It is the frame, the meta, and the bytes of the blobs one after the other. The meta comes first, so that a takeover can read it without the
blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

from sluiceway.model.changes import Changes, Fence, RecordKind

MAGIC = b"SWL1"
_FRAME = Struct("<4sII")
"""MAGIC, the length of the meta, and its CRC-32."""
FRAME_BYTES = _FRAME.size


class Place(NamedTuple):
    """Where a blob lies: in the entry `seq`, from the byte `start` on."""

    seq: int
    start: int
    length: int
    crc: int


class Meta(msgspec.Struct, array_like=True, frozen=True):
    """An entry without the bytes of its blobs. The order of the fields is on disk: append only.

    `nonce` tells two entries of the same content apart. `before` is the CRC-32 of the previous entry's meta, 0 for the first. A *fencing
    entry* has no header: it raises the fence and changes nothing else. `blobs`: number, length and CRC-32 of each, in the order of their
    bytes; those of a compaction replace the ones of the same number.
    """

    seq: int
    nonce: bytes
    fence: Fence
    before: int
    txn: int
    header: bytes | None = None
    puts: list[tuple[str, str, bytes]] = []
    deletes: list[tuple[str, str]] = []
    dropped: list[int] = []
    blobs: list[tuple[int, int, int]] = []

    @property
    def is_fencing(self) -> bool:
        return self.header is None


class Entry(NamedTuple):
    """An entry as it was read or is to be written: its meta, the meta's CRC-32, and the position of the first blob."""

    meta: Meta
    crc: int
    body: int

    @property
    def places(self) -> dict[int, Place]:
        """Where its blobs lie, by number."""
        start, found = self.body, {}
        for number, length, crc in self.meta.blobs:
            found[number] = Place(self.meta.seq, start, length, crc)
            start += length
        return found


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Meta).decode


def fencing_entry(seq: int, nonce: bytes, fence: Fence, before: int, txn: int) -> tuple[Entry, bytes]:
    """An entry that raises the fence, and its object."""
    return _written(Meta(seq, nonce, fence, before, txn), ())


def entry_of(changes: Changes, seq: int, nonce: bytes, fence: Fence, before: int) -> tuple[Entry, bytes]:
    """The entry of a cycle's changes, and its object."""
    blobs = {**changes.blobs, **changes.compacted_blobs}
    meta = Meta(
        seq,
        nonce,
        fence,
        before,
        changes.txn,
        changes.header,
        [(kind.value, key, value) for (kind, key), value in changes.puts.items()],
        # Sorted: a set of texts has another order in each process, and the same changes are to be the same bytes.
        sorted((kind.value, key) for kind, key in changes.deletes),
        sorted(changes.dropped_blobs),
        [(number, len(data), crc32(data)) for number, data in blobs.items()],
    )
    return _written(meta, list(blobs.values()))


def _written(meta: Meta, blobs: Sequence[bytes]) -> tuple[Entry, bytes]:
    data = _encode(meta)
    crc = crc32(data)
    return Entry(meta, crc, FRAME_BYTES + len(data)), b"".join((_FRAME.pack(MAGIC, len(data), crc), data, *blobs))


def meta_bytes(data: bytes) -> int:
    """The bytes up to the first blob, told by the first FRAME_BYTES of an entry. Raises ValueError."""
    if len(data) < FRAME_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a log entry")
    _, length, _ = _FRAME.unpack_from(data)
    return FRAME_BYTES + int(length)


def decode(data: bytes) -> Entry:
    """Decode an entry from at least its first `meta_bytes`. Raises ValueError if it is damaged."""
    end = meta_bytes(data)
    _, _, crc = _FRAME.unpack_from(data)
    meta = data[FRAME_BYTES:end]
    if len(meta) < end - FRAME_BYTES or crc32(meta) != crc:
        raise ValueError("its meta failed the checksum")
    try:
        return Entry(_decode(meta), crc, end)
    except msgspec.DecodeError as error:
        raise ValueError(f"its meta cannot be read: {error}") from None


KINDS = {kind.value: kind for kind in RecordKind}
"""Kinds of records by their stored names."""
