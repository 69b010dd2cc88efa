"""Rows of a PostgreSQL partition store: their checksums, and what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, LiteralString
from zlib import crc32

import psycopg
from psycopg.types.numeric import Int8

from sluiceway.ports.partition_store import DamagedError, Fence, PartitionRef, RecordKey, RecordKind, Snapshot, StoreUnavailableError

FIELDS: LiteralString = "id, fence_era, fence_grant, fence_opening, txn, header, crc"
LOOK: LiteralString = f"SELECT {FIELDS} FROM partition WHERE incarnation = %s AND partition = %b"
LOCK: LiteralString = f"{LOOK} FOR UPDATE"
RECORDS = "SELECT key, crc, value FROM record WHERE partition_id = %b"

_KINDS = {kind.value.encode(): kind for kind in RecordKind}

Row = tuple[Any, ...]
"""FIELDS, and possibly more."""


def place_of(ref: PartitionRef) -> list[object]:
    """The parameters that find a partition's row."""
    return [ref.incarnation, Int8(ref.partition)]


def name_of(ref: PartitionRef) -> str:
    """The partition's name in messages."""
    return f"{ref.incarnation}-{ref.partition}"


def fence_of(row: Row) -> Fence:
    """The fence under which the partition was last opened."""
    return Fence(*row[1:4])


def check_row(ref: PartitionRef, row: Row) -> None:
    """Raise DamagedError if the row fails its checksum."""
    if row_crc(fence_of(row), row[4], row[5]) != row[6]:
        raise DamagedError(f"partition {name_of(ref)}: the header failed its checksum")


def snapshot_of(ref: PartitionRef, row: Row, records: Iterable[tuple[bytes, int, bytes]]) -> Snapshot:
    """The partition of that row, with these records: key, checksum, value. Raises DamagedError."""
    found: dict[RecordKey, bytes] = {}
    for key, crc, value in records:
        kind, _, name = key.partition(b":")
        if kind not in _KINDS or record_crc(key, value) != crc:
            raise DamagedError(f"partition {name_of(ref)}: record {key.decode(errors='replace')} failed its checksum")
        found[_KINDS[kind], name.decode()] = value
    return Snapshot(row[4], row[5], found)


def encoded(key: RecordKey) -> bytes:
    """The key as it is stored."""
    return f"{key[0].value}:{key[1]}".encode()


def record_crc(key: bytes, value: bytes) -> int:
    return crc32(value, crc32(key))


def row_crc(fence: Fence, txn: int, header: bytes | None) -> int:
    # The flag distinguishes a header that was never written from an empty one.
    return crc32(header or b"", crc32(f"{fence.era}.{fence.grant}.{fence.opening}.{txn}.{header is None}".encode()))


@contextlib.contextmanager
def translated(ref: PartitionRef) -> Iterator[None]:
    """Raise the port's errors in place of the driver's."""
    try:
        yield
    except (psycopg.errors.DataCorrupted, psycopg.errors.IndexCorrupted) as error:
        raise DamagedError(f"partition {name_of(ref)}: the server found damage ({error})") from error
    except psycopg.Error as error:
        raise StoreUnavailableError(f"partition {name_of(ref)}: {error}") from error
