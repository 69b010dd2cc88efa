"""Arrow messages whose metadata is put together by hand, so that its parts are used several times."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SCHEMA, _BINARY = 1, 4


class Flat:
    """A flatbuffer that is written from its root on: what a table refers to is written later."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def link(self, place: int) -> None:
        """Let the reference at that place lead to what is written next."""
        self._align()
        self.to(place, len(self.data))

    def to(self, place: int, target: int) -> None:
        struct.pack_into("<I", self.data, place, target - place)

    def table(self, numbers: Mapping[int, int], links: Sequence[int]) -> dict[int, int]:
        """Write a table after a vtable. Returns the places of its references by field. `numbers`: 16-bit values by field."""
        fields = {**dict.fromkeys(numbers, 2), **dict.fromkeys(links, 4)}
        offsets, at = {}, 4
        for field, width in sorted(fields.items(), key=lambda each: -each[1]):
            offsets[field], at = at, at + width
        slots = max(fields, default=-1) + 1
        size = 4 + 2 * slots
        vtable = struct.pack(f"<{2 + slots}H", size, at, *(offsets.get(field, 0) for field in range(slots)))
        # The reference that was just linked leads to the table, not to its vtable.
        start = len(self.data)
        self.data += struct.pack("<i", 0) + bytes(at - 4)
        self._align()
        for field, value in numbers.items():
            struct.pack_into("<H", self.data, start + offsets[field], value)
        struct.pack_into("<i", self.data, start, start - len(self.data))
        self.data += vtable
        return {field: start + offsets[field] for field in links}

    def vector(self, count: int) -> list[int]:
        """Write a vector. Returns the places of its references."""
        start = len(self.data) + 4
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return list(range(start, start + 4 * count, 4))

    def text(self, text: bytes) -> None:
        self.data += struct.pack("<I", len(text)) + text + b"\0"

    def _align(self) -> None:
        self.data += bytes(-len(self.data) % 4)


def notes(flat: Flat, place: int, count: int, value: bytes, texts: int = 1) -> None:
    """So many notes at that place. All of them are one and the same pair of texts."""
    flat.link(place)
    places = flat.vector(count)
    if not count:
        return
    flat._align()
    for each in places:
        flat.to(each, len(flat.data))
    links = flat.table({}, (0, 1))
    flat.link(links[0])
    flat.text(b"k")
    flat.link(links[1])
    flat.text(value)


def schema(fields: int = 1, levels: int = 0, note: bytes = b"v", of_message: int = 0, of_schema: int = 0, of_field: int = 0) -> bytes:
    """A stream of a schema alone, with so many columns `payload`, which are one and the same. Each of `levels` has two children, which are
    one and the same again. And notes on the message, the schema and the columns."""
    flat = Flat()
    flat.to(0, 4)
    message = flat.table({0: 4, 1: _SCHEMA}, (2, 4) if of_message else (2,))
    flat.link(message[2])
    links = flat.table({}, (1, 2) if of_schema else (1,))
    if of_schema:
        notes(flat, links[2], of_schema, note)
    if of_message:
        notes(flat, message[4], of_message, note)
    flat.link(links[1])
    places = flat.vector(fields)
    for level in range(levels + 1):
        is_last = level == levels
        flat._align()
        for each in places:
            flat.to(each, len(flat.data))
        # Of a list there is one child; a struct may have any number.
        kind = _BINARY if is_last else 13
        links = flat.table({1: 0, 2: kind}, (0, 3, 5, 6) if of_field and is_last else (0, 3, 5))
        flat.link(links[0])
        flat.text(b"payload")
        flat.link(links[3])
        flat.table({}, ())
        if of_field and is_last:
            notes(flat, links[6], of_field, note)
        flat.link(links[5])
        places = flat.vector(0 if is_last else 2)
    return framed(bytes(flat.data)) + END


def framed(metadata: bytes) -> bytes:
    """A message without a body."""
    padded = metadata + bytes(-len(metadata) % 8)
    return b"\xff\xff\xff\xff" + struct.pack("<i", len(padded)) + padded
