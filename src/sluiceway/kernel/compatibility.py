"""Compatibility levels: the form of what is stored, and of what the instances of a cluster say to one another.

A release understands the levels OLDEST to NEWEST. All instances of a cluster use the level that is recorded in the meta store, whatever
their releases, and `sluiceway upgrade finalize` raises it once all of them understand a higher one (docs/adr/0059-rolling-upgrades.md).

What a level may add: a field with a default, a kind of request, a column, a kind of record, a layout of files and tables. Nothing of it is
written or sent below that level. Raise NEWEST by one with the first such change after a release, and note here what the level adds. OLDEST
rises with a release whose predecessor understands the new OLDEST, so that each release works together with the one before.

11: the first that was released.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Levels(NamedTuple):
    """The levels that a release understands, from `oldest` to `newest`."""

    oldest: int
    newest: int


UNRECORDED: Final = 11
"""The level of data from before levels were recorded."""
OLDEST: Final = 11
NEWEST: Final = 11
KNOWN: Final = Levels(OLDEST, NEWEST)
