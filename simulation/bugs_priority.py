"""Planted bugs of priorities."""

from __future__ import annotations

from typing import Any

from simulation.planting import Bug, shelf
from sluiceway.core.partition.key_flows import KeyFlows

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(KeyFlows, "_before")
def enters_behind_its_equals_last_segment(original: Any) -> Any:
    """What comes back goes behind all of its priority, not in front."""

    def before(self: Any, number: int, rank: int) -> Any:
        last = self._levels.last(number, rank) if self.rules.priority else -1
        return original(self, number, rank) if last == -1 else last

    return before


@bug(KeyFlows, "_enter_by_priority")
def all_are_equal(_original: Any) -> Any:
    """Priorities are stored, and not looked at."""

    def enter(self: Any, keys: Any, extent: Any, at: int, counts: Any) -> None:
        for key, items in zip(keys, counts, strict=True):
            for position in range(at, at + items):
                self._enter(key, extent, position, 1, 5 << 48)
            at += items

    return enter
