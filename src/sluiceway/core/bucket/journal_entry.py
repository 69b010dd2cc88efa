"""A journal entry: one object, with cycles of any number of partitions.

It is the frame, the meta, and the bytes of the blobs one after the other. The meta comes first, so that a takeover can read it without the
blobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import msgspec

from sluiceway.model.changes import Changes, RecordKind

MAGIC = b"SWJ1"
_FRAME = Struct("<4sII")
"""MAGIC, the length of the meta, and its CRC-32."""
FRAME_BYTES = _FRAME.size


class Place(NamedTuple):
    """Where a blob lies: in that entry of that journal, from the byte `start` on."""

    journal: str
    number: int
    start: int
    length: int
    crc: int


class Cycle(msgspec.Struct, array_like=True, frozen=True):
    """One cycle of a partition without the bytes of its blobs. The order of the fields is on disk: append only.

    `life`: of the partition. `blobs`: number, length and CRC-32 of each, in the order of their bytes; those of a compaction replace the
    ones of the same number.
    """

    life: str
    txn: int
    header: bytes
    puts: list[tuple[str, str, bytes]]
    deletes: list[tuple[str, str]]
    dropped: list[int]
    blobs: list[tuple[int, int, int]]

    def places(self, journal: str, number: int, start: int) -> dict[int, Place]:
        """Where its blobs lie, by number, if the first begins at `start` of that entry."""
        found = {}
        for blob, length, crc in self.blobs:
            found[blob] = Place(journal, number, start, length, crc)
            start += length
        return found


class Meta(msgspec.Struct, array_like=True, frozen=True):
    """An entry without the bytes of its blobs. The order of the fields is on disk: append only.

    `nonce` tells two entries of the same content apart. `before` is the CRC-32 of the previous entry's meta, 0 for the first. An *ending
    entry* has no cycles: nobody writes to the journal after it. Up to `gap` entries before an ending entry may be missing.
    """

    number: int
    nonce: bytes
    before: int = 0
    cycles: list[Cycle] = []
    gap: int = 0


class Entry(NamedTuple):
    """An entry as it was read or is to be written: its meta, and the meta's CRC-32. `parts`: its cycles by the partition's life, each with
    the position of its first blob. `size`: bytes up to the first blob."""

    meta: Meta
    crc: int
    size: int
    parts: dict[str, tuple[Cycle, int]]

    @property
    def is_ending(self) -> bool:
        return not self.parts


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Meta).decode


def ending_entry(number: int, nonce: bytes, gap: int = 0) -> tuple[Entry, bytes]:
    """An entry that ends its journal, and its object."""
    return _written(Meta(number, nonce, gap=gap), ())


def entry_of(parts: Sequence[tuple[str, Changes]], number: int, nonce: bytes, before: int) -> tuple[Entry, bytes]:
    """The entry of a cycle of each of those lives, and its object."""
    cycles: list[Cycle] = []
    bodies: list[bytes] = []
    for life, changes in parts:
        blobs = {**changes.blobs, **changes.compacted_blobs}
        bodies += blobs.values()
        cycles.append(
            Cycle(
                life,
                changes.txn,
                changes.header,
                [(kind.value, key, value) for (kind, key), value in changes.puts.items()],
                # Sorted: a set of texts has another order in each process, and the same changes are to be the same bytes.
                sorted((kind.value, key) for kind, key in changes.deletes),
                sorted(changes.dropped_blobs),
                [(blob, len(data), crc32(data)) for blob, data in blobs.items()],
            )
        )
    return _written(Meta(number, nonce, before, cycles), bodies)


def _written(meta: Meta, bodies: Sequence[bytes]) -> tuple[Entry, bytes]:
    data = _encode(meta)
    crc = crc32(data)
    return _entry(meta, crc, FRAME_BYTES + len(data)), b"".join((_FRAME.pack(MAGIC, len(data), crc), data, *bodies))


def _entry(meta: Meta, crc: int, size: int) -> Entry:
    parts, start = {}, size
    for cycle in meta.cycles:
        parts[cycle.life] = cycle, start
        start += sum(length for _, length, _ in cycle.blobs)
    return Entry(meta, crc, size, parts)


def meta_bytes(data: bytes) -> int:
    """The bytes up to the first blob, told by the first FRAME_BYTES of an entry. Raises ValueError."""
    if len(data) < FRAME_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ValueError("it is not a journal entry")
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
        return _entry(_decode(meta), crc, end)
    except msgspec.DecodeError as error:
        raise ValueError(f"its meta cannot be read: {error}") from None


KINDS = {kind.value: kind for kind in RecordKind}
"""Kinds of records by their stored names."""
