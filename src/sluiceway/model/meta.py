"""Views of a MetaStore: entries with the stamps of the commits that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_COMMIT_KEYS = 1_000
MAX_COMMIT_BYTES = 1 << 20

Stamp = int
"""Version of the store. It grows with every commit and becomes visible in commit order."""


class Entry(NamedTuple):
    """A value, with the stamp of its commit."""

    value: bytes
    stamp: Stamp
    """Stamp of the commit that wrote the value."""


@dataclass(frozen=True, slots=True)
class View:
    """Content of the store at one moment. `stamp`: the last commit included."""

    stamp: Stamp
    entries: Mapping[str, Entry]

    def prefix(self, prefix: str) -> dict[str, Entry]:
        """Return the entries whose key begins with `prefix`, sorted by key."""
        return {key: self.entries[key] for key in sorted(self.entries) if key.startswith(prefix)}
