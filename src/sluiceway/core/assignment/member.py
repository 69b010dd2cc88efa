"""A member of a group: told what a look at the group's records showed, it says what to serve and what to commit."""

from __future__ import annotations

from sluiceway.core.assignment.beating import Beating
from sluiceway.core.assignment.claims import Claims
from sluiceway.core.assignment.group import Decision, Keys, Look, Resource, Strategy, Writes
from sluiceway.core.assignment.rounds import Rounds
from sluiceway.kernel.clock import Millis

IDLE: Millis = 1_000
"""How often a member looks when it has no reason to: hints of changes may be lost."""


class Member:
    """One member, for as long as its process lives; `name` is never used again. Feed it looks, none older than the one before."""

    def __init__(self, keys: Keys, name: str, address: str = "") -> None:
        self.name = name
        self._beating = Beating(keys, name, address)
        self._strategies: dict[Strategy, Rounds | Claims] = {"rounds": Rounds(self._beating), "claims": Claims(self._beating)}

    def leave(self) -> None:
        """Hand over and go. Keep looking until a decision says `left`."""
        self._beating.leaving = True

    def look(self, look: Look) -> Decision:
        """What follows from that look."""
        beating, resource = self._beating, look.resource
        beating.note(look)
        if resource is None:
            return Decision({}, 0, None, look.seen_at + IDLE, left=beating.leaving)
        deadline = beating.lease_deadline(resource.parameters)
        serving = look.seen_at < deadline and beating.one_era(look, resource)
        strategy = self._strategies[resource.strategy]
        owned = strategy.owned(look, resource) if serving else {}
        if beating.leaving and (self.name not in look.members or strategy.may_go(look)):
            return Decision({}, deadline, self._go(look), look.seen_at + IDLE, left=self.name not in look.members)
        writes, wake_at = self._next(look, resource, strategy)
        wake_at = min(wake_at, look.seen_at + IDLE, deadline if serving else wake_at)
        return Decision(owned, deadline, writes, max(wake_at, look.seen_at + 1))

    def _next(self, look: Look, resource: Resource, strategy: Rounds | Claims) -> tuple[Writes | None, Millis]:
        """What to commit, with a beat in it; or None and when to look again."""
        writes: Writes | None = Writes()
        wake_at = look.seen_at
        if self.name in look.members:
            writes, wake_at = strategy.next(look, resource)
        beat_due_at = self._beating.beat_due_at(look, resource.parameters)
        if writes is not None or look.seen_at >= beat_due_at:
            return self._beating.beat(look, writes or Writes()), look.seen_at
        return None, min(wake_at, beat_due_at)

    def _go(self, look: Look) -> Writes | None:
        if self.name not in look.members:
            return None
        key = self._beating.keys.member(self.name)
        return Writes(checks={key: look.stamp(key)}, deletes=[key])
