"""Claims strategy: members take free items one by one, each by a conditional write. No rounds, no plan.

After the reply to the description of rounds: a member picks free items in an order of its own, so that two rarely want the same, and takes
no more than its share. Added here: a member above its share gives back while another is below, and any member that notices a silent one
strikes it off, which frees its items. Exclusive service rests on the same arguments as with rounds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sluiceway.core.group.group_records import Claim, GroupView, Resource, Writes
from sluiceway.core.group.heartbeats import Beating
from sluiceway.kernel.clock import Millis

MAX_CLAIMS = 100
"""Items per commit that claims or gives back: a conflict on one of them fails them all."""


@dataclass(frozen=True)
class Division:
    """The division of items at one look."""

    claims: Mapping[str, Claim]
    mine: dict[str, int]
    free: list[str]
    surplus: int
    """Items this member has above its share; negative: how many it may take."""


class Claims:
    """The strategy as one member runs it."""

    def __init__(self, beating: Beating) -> None:
        self._beating = beating
        self._keys, self._name = beating.keys, beating.name
        self._renounced: dict[str, int] = {}
        """Grants it has tried to give back. The commit may land late, so it never serves under them again."""

    def owned(self, look: GroupView, resource: Resource) -> dict[str, int]:
        """The items this member has and continues to serve, with their grants."""
        return self._kept(self._divide(look, resource), resource)

    def expected(self, look: GroupView, resource: Resource) -> frozenset[str]:
        """None: which items it takes of those that become free is not known ahead."""
        return frozenset()

    def may_go(self, look: GroupView) -> bool:
        """Whether no claim names this member any more."""
        return all(claim.owner != self._name for claim in look.claims.values())

    def next(self, look: GroupView, resource: Resource) -> tuple[Writes | None, Millis]:
        """The claims' next write for this member, if any. Nothing foreseeable becomes due by time alone, except silence."""
        division = self._divide(look, resource)
        give_back = sorted(division.mine.keys() - self._kept(division, resource).keys())
        self._renounce({item: division.mine[item] for item in give_back})
        if give_back:
            return self._write(look, division, give_back[:MAX_CLAIMS], None), look.seen_at
        for name in sorted(look.members):
            if self._beating.silent(look, name, resource.parameters):
                key = self._keys.member(name)
                return Writes(checks={key: look.stamp(key)}, deletes=self._keys.all_of(name)), look.seen_at
        wanted = min(-division.surplus, MAX_CLAIMS)
        if self._beating.leaving or wanted <= 0 or not division.free:
            return None, look.seen_at + resource.parameters.beat_interval
        return self._write(look, division, sorted(division.free, key=self._liking)[:wanted], self._name), look.seen_at

    def _divide(self, look: GroupView, resource: Resource) -> Division:
        claims = look.claims
        counts: Counter[str] = Counter()
        free = []
        for item in resource.items:
            owner = claims[item].owner if item in claims else None
            if owner is None or owner not in look.members:
                free.append(item)
            else:
                counts[owner] += 1
        mine = {item: claim.grant for item, claim in claims.items() if claim.owner == self._name} if self._name in look.members else {}
        return Division(claims, mine, free, self._surplus(counts, len(resource.items), self._beating.live(look, resource.parameters)))

    def _surplus(self, counts: Counter[str], items: int, live: list[str]) -> int:
        if self._name not in live:
            return 0
        least, more = divmod(items, len(live))
        has = counts[self._name]
        if has < least:
            return has - least
        larger = [name for name in live if counts[name] > least]
        if has == least:
            return -1 if len(larger) < more else 0
        # The first members by name keep the larger shares.
        return has - least - (1 if self._name in larger[:more] else 0)

    def _kept(self, division: Division, resource: Resource) -> dict[str, int]:
        """The items it has and continues to serve."""
        if self._beating.leaving:
            return {}
        mine = {item: division.mine[item] for item in resource.items if item in division.mine}
        kept = {item: grant for item, grant in mine.items() if self._renounced.get(item) != grant}
        stay = min(len(kept), len(mine) - max(0, division.surplus))
        for item in sorted(kept, key=self._liking)[stay:]:
            del kept[item]
        return kept

    def _renounce(self, grants: dict[str, int]) -> None:
        self._renounced = grants

    def _liking(self, item: str) -> bytes:
        """Sort key in an order of this member's own, so that two rarely want the same item."""
        return hashlib.blake2b(f"{self._name}/{item}".encode(), digest_size=8).digest()

    def _write(self, look: GroupView, division: Division, items: list[str], owner: str | None) -> Writes:
        """Claim the items, or give them back if `owner` is None."""
        writes = Writes()
        if owner is not None:
            # Only existing items: one removed concurrently must leave no record.
            writes.checks[self._keys.resource] = look.stamp(self._keys.resource)
        for item in items:
            key, before = self._keys.claims + item, division.claims.get(item, Claim(owner=None, grant=0))
            writes.checks[key] = look.stamp(key)
            if owner is not None and before.owner is not None:
                # If the former owner came back, it would serve the item.
                writes.checks[self._keys.member(before.owner)] = None
            writes.put(key, Claim(owner=owner, grant=before.grant + (owner is not None)))
        return writes
