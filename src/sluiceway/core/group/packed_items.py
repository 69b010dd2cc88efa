"""Packed form of what a large group's records say of each item: its name, its owner, its grant, and who may still serve it.

As JSON an item takes some 34 bytes, and three times as many while it moves; packed it takes at most 8 beside its name, and names that
end in a number, as those of partitions do, are ranges.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

CELL = 8
"""Bytes per item, beside its name, in a plan of up to FEW_MEMBERS: four for its owner and two members that may still serve it, four for its
grant."""
RANGE = 12
"""Bytes, at most, by which a range of names grows when it is divided in two, or a name stands alone."""
FEW_MEMBERS = (1 << 10) - 1
"""Members of which three fit into 32 bits."""
_FORMS = {10: "I", 20: "Q"}
"""The form of a cell, by the bits of each of its three members."""
_MAX_GRANT = (1 << 32) - 1
_MAX_DIGITS = 9


class PackedNames(msgspec.Struct, array_like=True, frozen=True):
    """Names, each once. On disk: append fields only.

    `ranges`: for each stem, the numbers of the names STEM.NUMBER: by turns how many numbers are passed over, and how many follow.
    """

    ranges: dict[str, list[int]]
    others: list[str]


class PackedOwners(msgspec.Struct, array_like=True, frozen=True):
    """Owners and waits of a plan, by the positions of the items in `names`. On disk: append fields only.

    `cells`: per item 32 bits, or 64 if `bits` is 20, little-endian: thrice the place of a member in `members` from 1 on, 0 for none, lowest
    first: the owner, and up to two that are waited for. `grants`: per item 32 bits. `more`: items by the members beyond those two.
    """

    names: PackedNames
    members: list[str]
    bits: int
    cells: bytes
    grants: bytes
    more: dict[str, list[str]]


def pack_names(names: Iterable[str]) -> PackedNames:
    """Pack names, which must differ. `unpack_names` returns them in an order of its own."""
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    others = []
    for name in names:
        stem, dot, digits = name.rpartition(".")
        if dot and digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS and (digits[0] != "0" or digits == "0"):
            numbers[stem].append(int(digits))
        else:
            others.append(name)
    return PackedNames({stem: _ranges(sorted(numbers[stem])) for stem in sorted(numbers)}, sorted(others))


def _ranges(numbers: Sequence[int]) -> list[int]:
    ranges: list[int] = []
    end = 0
    for number in numbers:
        if ranges and number == end:
            ranges[-1] += 1
        else:
            ranges += [number - end, 1]
        end = number + 1
    return ranges


def unpack_names(packed: PackedNames) -> list[str]:
    """Return the names. Raises ValueError for a malformed record."""
    found: list[str] = []
    for stem, ranges in packed.ranges.items():
        number = 0
        for skipped, count in zip(ranges[::2], ranges[1::2], strict=True):
            number += skipped
            found += [f"{stem}.{each}" for each in range(number, number + count)]
            number += count
    return found + packed.others


def pack_owners(owners: Mapping[str, Mapping[str, int]], waits: Mapping[str, Iterable[str]]) -> PackedOwners | None:
    """Pack a plan's owners, with grants, and waits; None: a grant is too great, or an item has two owners."""
    members = sorted({*owners, *waits})
    bits = 10 if len(members) <= FEW_MEMBERS else 20
    names = pack_names({item for items in (*owners.values(), *waits.values()) for item in items})
    place = {item: at for at, item in enumerate(unpack_names(names))}
    cells, grants = [0] * len(place), [0] * len(place)
    more: dict[str, list[str]] = {}
    for number, member in enumerate(members, 1):
        for item, grant in owners.get(member, {}).items():
            at = place[item]
            if cells[at]:
                return None
            cells[at], grants[at] = number, grant
    for number, member in enumerate(members, 1):
        for item in waits.get(member, ()):
            at = place[item]
            if not cells[at] >> bits:
                cells[at] |= number << bits
            elif not cells[at] >> 2 * bits:
                cells[at] |= number << 2 * bits
            else:
                more.setdefault(member, []).append(item)
    if max(grants, default=0) > _MAX_GRANT:
        return None
    count = len(place)
    packed_cells, packed_grants = struct.pack(f"<{count}{_FORMS[bits]}", *cells), struct.pack(f"<{count}I", *grants)
    return PackedOwners(names, members, bits, packed_cells, packed_grants, more)


def unpack_owners(packed: PackedOwners) -> tuple[dict[str, dict[str, int]], dict[str, tuple[str, ...]]]:
    """Return the owners, with grants, and the waits. Raises ValueError for a malformed record."""
    names, members, bits = unpack_names(packed.names), ["", *packed.members], packed.bits
    owners: dict[str, dict[str, int]] = {}
    waits: defaultdict[str, list[str]] = defaultdict(list)
    try:
        cells = struct.unpack(f"<{len(names)}{_FORMS[bits]}", packed.cells)
        grants = struct.unpack(f"<{len(names)}I", packed.grants)
        mask = (1 << bits) - 1
        for item, cell, grant in zip(names, cells, grants, strict=True):
            if cell & mask:
                owners.setdefault(members[cell & mask], {})[item] = grant
            while cell := cell >> bits:
                waits[members[cell & mask]].append(item)
    except (struct.error, LookupError) as error:
        raise ValueError(f"packed owners do not fit together: {error}") from error
    for member, items in packed.more.items():
        waits[member] += items
    return owners, {member: tuple(sorted(items)) for member, items in waits.items()}


def packed_size(items: Iterable[str], gone: Iterable[str]) -> int:
    """Upper bound in bytes of the packed owners of `items`, while any of them may move and any of `gone` may still be served, but for the
    members' names."""
    names = {*items}
    others = {*gone} - names
    written = len(msgspec.msgpack.encode(pack_names(names))) + sum(len(name) + RANGE for name in others)
    return written + CELL * (len(names) + len(others))
