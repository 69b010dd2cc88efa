"""The header of an Arrow IPC message, read before any of its buffers.

Two facts are needed before the data may be decoded: the number of rows, and whether the buffers are compressed. Both are in the message's
metadata, a flatbuffer. pyarrow checks its structure but does not expose them.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

_MESSAGE_HEADER = 2
_BATCH_LENGTH = 0
_BATCH_COMPRESSION = 3


class BatchHeader(NamedTuple):
    """A record batch's claimed number of rows, and whether its buffers are compressed."""

    rows: int
    compressed: bool


def batch_header(metadata: pa.Buffer) -> BatchHeader:
    """Read the header from a record batch message's metadata. Raises ValueError if the metadata is malformed."""
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
    """The position of a table's field; 0 if the field is absent."""
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
