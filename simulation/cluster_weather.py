"""What befalls a simulated cluster, and how bad its ways are."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from simulation.network_link import Roads


@dataclass
class Weather:
    """What befalls instances, in the time of traffic."""

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
    """Partitions that are not where they were, for a while."""
    late_commits: bool = False
    """Many commits reach their store when their instance has given up, and others have taken over."""
    stragglers: float = 0.0
    """How often a commit does so between an opening and the first commit after it."""


def weather_of(random: Random) -> Weather:
    pick = random.choice
    if random.random() < 0.3:
        # Everything moves all the time, while instances stand still.
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
