"""What a MetaStore shows: entries with the stamps of the commits that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_COMMIT_KEYS = 1_000
MAX_COMMIT_BYTES = 1 << 20

Stamp = int
"""The store's version. It grows with every commit and becomes visible in commit order."""


class Entry(NamedTuple):
    value: bytes
    stamp: Stamp
    """The stamp of the commit that wrote the value."""


@dataclass(frozen=True, slots=True)
class View:
    """What the store held at one moment: `stamp` is that of the last commit it shows."""

    stamp: Stamp
    entries: Mapping[str, Entry]

    def prefix(self, prefix: str) -> dict[str, Entry]:
        """The entries whose key begins with `prefix`, by key."""
        return {key: self.entries[key] for key in sorted(self.entries) if key.startswith(prefix)}
