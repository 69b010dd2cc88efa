"""What an Arrow IPC message says about itself, read before any of its buffers is touched.

A message's metadata is a flatbuffer; pyarrow checks its structure when it reads the message but does not show the two facts that
must be known before the data is decoded: how many rows it claims, and whether its buffers are compressed.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_MESSAGE_HEADER = 2
_BATCH_LENGTH = 0
_BATCH_COMPRESSION = 3


class BatchHeader(NamedTuple):
    rows: int
    compressed: bool


def batch_header(metadata: pa.Buffer) -> BatchHeader:
    """The header of a record batch message. Raises ValueError where the metadata is not as it should be."""
    data = memoryview(metadata).cast("B")
    batch = _table(data, _field(data, _unsigned(data, 0), _MESSAGE_HEADER))
    length = _field(data, batch, _BATCH_LENGTH)
    return BatchHeader(
        rows=_number(data, length, 8, signed=True) if length else 0,
        compressed=_field(data, batch, _BATCH_COMPRESSION) != 0,
    )


def _table(data: memoryview, at: int) -> int:
    if at == 0:
        raise ValueError("the message has no header")
    return at + _unsigned(data, at)


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of the table is; 0 if it is absent."""
    vtable = table - _number(data, table, 4, signed=True)
    slot = 4 + 2 * number
    if slot >= _number(data, vtable, 2, signed=False):
        return 0
    offset = _number(data, vtable + slot, 2, signed=False)
    return table + offset if offset else 0


def _unsigned(data: memoryview, at: int) -> int:
    return _number(data, at, 4, signed=False)


def _number(data: memoryview, at: int, width: int, *, signed: bool) -> int:
    if at < 0 or at + width > len(data):
        raise ValueError("the message's metadata points outside itself")
    return int.from_bytes(data[at : at + width], "little", signed=signed)
