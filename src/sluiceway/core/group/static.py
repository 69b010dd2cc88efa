"""Static strategy: members own nothing, since a single owner outside the group, proven by a lock, owns every item.

A group enters it when a cluster becomes a single server again. Its plan, claims and member records stay. Returning to another strategy
begins a new era, in which plans of earlier eras give nothing, and no member serves until all member records have reached it.
"""

from __future__ import annotations

from sluiceway.core.group.group_records import GroupView, Resource, Writes
from sluiceway.kernel.clock import Millis


class NoAssignment:
    """The strategy as a member runs it: beat, and wait for another strategy."""

    def owned(self, look: GroupView, resource: Resource) -> dict[str, int]:
        """Always empty."""
        return {}

    def expected(self, look: GroupView, resource: Resource) -> frozenset[str]:
        """Always empty."""
        return frozenset()

    def may_go(self, look: GroupView) -> bool:
        """Always true: other members take records under this name as those of a member that has left."""
        return True

    def next(self, look: GroupView, resource: Resource) -> tuple[Writes | None, Millis]:
        """No writes; the next beat is the only thing due."""
        return None, look.seen_at + resource.parameters.beat_interval
