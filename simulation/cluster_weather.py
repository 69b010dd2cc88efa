"""Fault rates of a simulated cluster and its links."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulation.network_link import Roads


@dataclass
class Weather:
    """Number of each fault during traffic, unless said otherwise."""

    kills: int = 0
    stops: int = 0
    freezes: int = 0
    meta_cuts: int = 0
    store_cuts: int = 0
    peer_cuts: int = 0
    jumps: int = 0
    joins: int = 0
    changes: int = 0
    updates: int = 0
    losses: int = 0
    """Number of partitions whose storage is gone for a while."""
    late_commits: bool = False
    """Whether many commits reach their store only after their instance has given up and others have taken over."""
    stragglers: float = 0.0
    """Probability that a commit lands between an opening and the first commit after it."""


def weather_of(random: Random) -> Weather:
    pick = random.choice
    if random.random() < 0.3:
        # Ownership moves constantly, with frozen instances.
        return Weather(
            kills=3,
            stops=pick([2, 4]),
            freezes=8,
            meta_cuts=pick([1, 4]),
            peer_cuts=pick([0, 4]),
            joins=2,
            late_commits=True,
            stragglers=0.02,
        )
    return Weather(
        kills=pick([0, 0, 1, 3]),
        stops=pick([0, 1, 2]),
        freezes=pick([0, 2, 6]),
        meta_cuts=pick([0, 1, 4]),
        store_cuts=pick([0, 1, 3]),
        peer_cuts=pick([0, 2, 6]),
        jumps=pick([0, 0, 3]),
        joins=pick([0, 0, 1]),
        changes=pick([0, 0, 1]),
        updates=pick([0, 2]),
        losses=pick([0, 1, 3]),
    )


def roads_of(random: Random) -> Roads:
    pick = random.choice
    return Roads(
        slow=pick([1, 2, 10, 50]),
        refused=pick([0, 0, 0.03]),
        lost=pick([0, 0, 0.03]),
        late=pick([0, 0.03, 0.15]),
        unheard=pick([0, 0.01, 0.05]),
        latest=pick([3_000, 12_000]),
    )
