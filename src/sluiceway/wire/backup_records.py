"""Encoding of the small records in a backup: those of a partition, and those of the meta store. In MessagePack."""

from __future__ import annotations

import msgspec

from sluiceway.model.changes import RecordKind

MetaEntry = tuple[str, int, bytes]
"""Key, stamp, value."""


class MetaRecords(msgspec.Struct, array_like=True, frozen=True):
    """Entries of the meta store at `stamp`."""

    stamp: int
    entries: list[MetaEntry]


class PartitionRecords(msgspec.Struct, array_like=True, frozen=True):
    """Records of a partition after its cycle `txn`. Each part of a partition repeats its header."""

    txn: int
    header: bytes | None
    records: list[tuple[RecordKind, str, bytes]]


encode = msgspec.msgpack.Encoder().encode
decode_meta = msgspec.msgpack.Decoder(MetaRecords).decode
decode_partition = msgspec.msgpack.Decoder(PartitionRecords).decode
