"""Static: no member of the group has anything, since everything has one owner outside of it, who proves itself by a lock.

A group comes to this when a cluster is made a single server again. Its plan, claims and members' records stay as they were: coming back
begins another era, in which a plan of an earlier one gives nothing to anybody, and nobody serves until all records have reached it.
"""

from __future__ import annotations

from sluiceway.core.group.group_records import Look, Resource, Writes
from sluiceway.kernel.clock import Millis


class Static:
    """The strategy as a member carries it out: it lives, and waits for another."""

    def owned(self, look: Look, resource: Resource) -> dict[str, int]:
        """Nothing."""
        return {}

    def may_go(self, look: Look) -> bool:
        """At any time: what others find at its name they take as that of one who has gone."""
        return True

    def next(self, look: Look, resource: Resource) -> tuple[Writes | None, Millis]:
        """Nothing, but to beat."""
        return None, look.seen_at + resource.parameters.beat_interval
