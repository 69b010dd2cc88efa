"""The metadata of an Arrow IPC message, read before pyarrow does.

It is a flatbuffer. pyarrow checks its structure, but exposes neither the number of rows nor whether the buffers are compressed. And the
parts of a flatbuffer may share other parts, which pyarrow copies for each: a hundred kilobytes can name one text ten thousand times. So
what a message's metadata has is counted first, as often as it is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import pyarrow as pa

MAX_METADATA: Final = 256 << 10
"""Bytes of a message's metadata. A schema with the notes of pandas on a hundred columns has a tenth."""
MAX_PARTS: Final = 512
"""Fields of a schema, nested ones included, and notes on it, its fields and the message, together."""

_BEGINS: Final = b"\xff\xff\xff\xff"
_PREFIX: Final = len(_BEGINS) + 4
_SCHEMA: Final = 1
_MESSAGE_KIND = 1
_MESSAGE_HEADER = 2
_MESSAGE_NOTES = 4
_SCHEMA_FIELDS = 1
_SCHEMA_NOTES = 2
_FIELD_NAME = 0
_FIELD_CHILDREN = 5
_FIELD_NOTES = 6
_NOTE_KEY = 0
_NOTE_VALUE = 1
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


def metadata_at(data: memoryview, at: int) -> memoryview | None:
    """The metadata of the message at that byte of a stream; None: the stream's end mark is there. Raises ValueError if there is neither."""
    if bytes(data[at : at + len(_BEGINS)]) != _BEGINS:
        raise ValueError("it is cut off" if at >= len(data) else f"there is no message at byte {at:,}")
    end = at + _PREFIX + _unsigned(data, at + len(_BEGINS))
    if end > len(data):
        raise ValueError("it is cut off")
    return data[at + _PREFIX : end] if end > at + _PREFIX else None


def check_metadata(metadata: memoryview) -> None:
    """Check that a message's metadata is not larger once pyarrow has read it. Raises ValueError."""
    if len(metadata) > MAX_METADATA:
        raise ValueError(f"a message has {len(metadata):,} bytes of metadata; at most {MAX_METADATA:,} are read")
    message = _unsigned(metadata, 0)
    kind = _field(metadata, message, _MESSAGE_KIND)
    if kind and _number(metadata, kind, 1, signed=False) == _SCHEMA:
        _check_schema(bytes(metadata))
    else:
        _Parts(metadata).notes(message, _MESSAGE_NOTES)


# A client's schema is the same in each of its calls.
@lru_cache(32)
def _check_schema(metadata: bytes) -> None:
    data = memoryview(metadata)
    message = _unsigned(data, 0)
    schema = _table(data, _field(data, message, _MESSAGE_HEADER))
    parts = _Parts(data)
    parts.notes(message, _MESSAGE_NOTES)
    parts.notes(schema, _SCHEMA_NOTES)
    left = [*parts.tables(schema, _SCHEMA_FIELDS)]
    while left:
        field = left.pop()
        parts.text(field, _FIELD_NAME)
        parts.notes(field, _FIELD_NOTES)
        left += parts.tables(field, _FIELD_CHILDREN)


class _Parts:
    """Counts the parts of a message's metadata, and the bytes of its texts, as often as they are named. Raises ValueError for too many."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._parts = MAX_PARTS
        self._bytes = len(data)

    def tables(self, table: int, number: int) -> Iterator[int]:
        """The positions of the tables in that field."""
        place = _field(self._data, table, number)
        if not place:
            return
        vector = _table(self._data, place)
        count = _unsigned(self._data, vector)
        self._parts -= count
        if self._parts < 0:
            raise ValueError(f"a schema has more than {MAX_PARTS} columns and notes")
        for each in range(count):
            yield _table(self._data, vector + 4 + 4 * each)

    def text(self, table: int, number: int) -> None:
        place = _field(self._data, table, number)
        if place:
            self._bytes -= _unsigned(self._data, _table(self._data, place))
            if self._bytes < 0:
                raise ValueError("parts of a message's metadata are used several times")

    def notes(self, table: int, number: int) -> None:
        """Count the pairs of texts in that field."""
        for note in self.tables(table, number):
            self.text(note, _NOTE_KEY)
            self.text(note, _NOTE_VALUE)


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
