"""Ids of items and leases: they encode the location, and serve as fencing tokens.

An item id is `INCARNATION.PARTITION.OFFSET`. An item that is put back gets a new offset, so a stale id never touches the item's later
attempts. A lease id is `INCARNATION.PARTITION.L<number>`.
"""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.errors import SluicewayError, invalid

INCARNATION_LENGTH = 8
INCARNATION_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


class ItemId(NamedTuple):
    incarnation: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.partition}.{self.offset}"


class LeaseId(NamedTuple):
    incarnation: str
    partition: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.partition}.L{self.number}"


def _plain(digits: str) -> bool:
    """Whether the digits are canonical, so that each id has exactly one spelling."""
    return digits == "0" or digits[:1] != "0"


def _parts(text: object, field: str, expected: str) -> tuple[str, int, str]:
    if isinstance(text, str) and len(text) <= 64:
        parts = text.split(".")
        if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 10 and _plain(parts[1]):
            return parts[0], int(parts[1]), parts[2]
    raise _refused(text, field, expected)


def _refused(text: object, field: str, expected: str) -> SluicewayError:
    # Cut after quoting: a quoted character may be ten long.
    return invalid(field, f"{repr(str(text)[:64])[:66]} is not {expected}")


def parse_item_id(text: object, field: str = "ids") -> ItemId:
    """Parse an item id. Raises `invalid_request` that names `field`."""
    expected = "an item id such as k7f3q2ma.0.1042"
    incarnation, partition, offset = _parts(text, field, expected)
    if not (offset.isascii() and offset.isdigit() and len(offset) < 19 and _plain(offset)):
        raise _refused(text, field, expected)
    return ItemId(incarnation, partition, int(offset))


def parse_lease_id(text: object, field: str = "lease_ids") -> LeaseId:
    """Parse a lease id. Raises `invalid_request` that names `field`."""
    expected = "a lease id such as k7f3q2ma.0.L17"
    incarnation, partition, number = _parts(text, field, expected)
    if not (number[:1] == "L" and number[1:].isascii() and number[1:].isdigit() and len(number) < 19 and _plain(number[1:])):
        raise _refused(text, field, expected)
    return LeaseId(incarnation, partition, int(number[1:]))
