"""A member of a group: from each look at the group's records it decides what to serve and what to commit."""

from __future__ import annotations

from sluiceway.core.group.claims import Claims
from sluiceway.core.group.group_records import Decision, GroupView, Keys, LoadReport, Resource, Strategy, Token, Writes, is_full
from sluiceway.core.group.heartbeats import FEW, Beating
from sluiceway.core.group.levels import admits
from sluiceway.core.group.rounds import Rounds
from sluiceway.core.group.static import NoAssignment
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import Levels

IDLE: Millis = 1_000
"""Interval of looks without an occasion: notifications of changes may be lost."""
MANY = 100
"""Members from which on looks at hints are a beat apart. Up to FEW, each hint is looked at at once."""


def hint_pace(look: GroupView) -> Millis:
    """Minimum time from the last look at a hint to the next one. Each hint makes all members look, and a burst of changes would be looked
    at change by change."""
    if look.resource is None:
        return 0
    share = min(1.0, max(0.0, (len(look.members) - FEW) / (MANY - FEW)))
    return int(look.resource.parameters.beat_interval * share)


class Member:
    """One member, for the lifetime of its process; `name` is never reused. Feed it looks in order, none older than the one before.

    `levels`: the compatibility levels that it understands; it joins only while the group's is one of them. None: the group has none.
    `zone`: its failure domain.
    """

    def __init__(self, keys: Keys, name: str, address: str = "", levels: Levels | None = None, release: str = "", zone: str = "") -> None:
        self.name, self.zone = name, zone
        self._beating = Beating(keys, name, address, levels, release, zone)
        self._going = False
        self._strategies: dict[Strategy, Rounds | Claims | NoAssignment] = {
            "rounds": Rounds(self._beating),
            "claims": Claims(self._beating),
            "static": NoAssignment(),
        }

    def leave(self) -> None:
        """Hand over all items and leave. Keep looking until a decision says `left`."""
        self._beating.leaving = True

    def report(self, report: LoadReport) -> None:
        """Tell the group what this member's items cost it, with one of the next beats."""
        self._beating.report(report)

    def late(self, look: GroupView, now: Millis) -> frozenset[str]:
        """The members that should be given nothing new, as far as this one has observed them."""
        return self._beating.late(look, now)

    def still(self, look: GroupView, now: Millis) -> dict[str, Millis]:
        """Milliseconds since this member last saw each member's beat change."""
        return self._beating.still(look, now)

    def look(self, look: GroupView) -> Decision:
        """Return what follows from that look."""
        beating, resource = self._beating, look.resource
        beating.note(look)
        if resource is None:
            return Decision({}, 0, None, look.seen_at + IDLE, left=beating.leaving)
        serving = look.seen_at < beating.lease_deadline() and beating.one_era(look, resource)
        strategy = self._strategies[resource.strategy]
        owned = {item: Token(resource.era, grant) for item, grant in strategy.owned(look, resource).items()} if serving else {}
        if beating.leaving and (self._going or self.name not in look.members or strategy.may_go(look)):
            # The deletion of its record may be committed late, so from here on it serves nothing, whatever happens.
            self._going = True
            # Keep the lease unchanged, so that requests in flight can end before the record goes.
            deadline = beating.lease_deadline()
            return Decision({}, deadline, self._go(look), look.seen_at + IDLE, left=self.name not in look.members)
        writes, wake_at = self._next(look, resource, strategy)
        # A beat to be sent now may shorten the lease.
        deadline = beating.lease_deadline()
        wake_at = min(wake_at, look.seen_at + IDLE, deadline if serving else wake_at)
        expected = strategy.expected(look, resource) if serving else frozenset[str]()
        return Decision(owned, deadline, writes, max(wake_at, look.seen_at + 1), expected=expected)

    def _next(self, look: GroupView, resource: Resource, strategy: Rounds | Claims | NoAssignment) -> tuple[Writes | None, Millis]:
        """The commit to make, including a beat; or None and when to look again."""
        if self.name not in look.members:
            outside = is_full(look.members) or not admits(look.level, self._beating.levels)
            return None if outside else self._beating.beat(look, resource, Writes()), look.seen_at + IDLE
        writes, wake_at = strategy.next(look, resource)
        beat_due_at = self._beating.beat_due_at(look, resource)
        if writes is not None or look.seen_at >= beat_due_at:
            return self._beating.beat(look, resource, writes or Writes()), look.seen_at
        return None, min(wake_at, beat_due_at)

    def _go(self, look: GroupView) -> Writes | None:
        if self.name not in look.members:
            return None
        key = self._beating.keys.member(self.name)
        return Writes(checks={key: look.stamp(key)}, deletes=self._beating.keys.all_of(self.name))
