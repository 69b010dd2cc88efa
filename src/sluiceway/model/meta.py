"""Views of a MetaStore: entries with the stamps of the commits that wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def after(self, stamp: Stamp, rows: Iterable[tuple[str, bytes | None, Stamp]]) -> View:
        """Return the view as of a later stamp, from all keys that were put or deleted since this one, each once: key, value (None: deleted)
        and the stamp of that commit."""
        changed = {key: None if value is None else Entry(value, at) for key, value, at in rows}
        left = {key: entry for key, entry in self.entries.items() if key not in changed} if changed else self.entries
        return View(stamp, {**left, **{key: entry for key, entry in changed.items() if entry is not None}})


NOTHING = View(0, {})
"""What a store holds before its first commit: the view that a first `refresh` starts from."""
