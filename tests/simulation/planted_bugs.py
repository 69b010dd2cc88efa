"""Finding the planted bugs of the simulator's bank without looking through hundreds of histories each time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from simulation.bank import SEEDS_PER_BUG, Found, hunt
from simulation.planting import Bug

FEW = 10
"""So many seeds are looked through so fast that none needs to be known."""


def found(bug: Bug, known: Mapping[str, int]) -> Found:
    """How a seed shows the bug. `known` has seeds that have shown bugs: tried first, to be quick. When the world changes, others do, and a
    warning names the one to put there, also if it is one of the first: the history of the former seed was lived through in vain. Fails if
    none does."""
    first = known.get(bug.name, 0)
    seen = hunt(bug, [first, *range(SEEDS_PER_BUG)])
    assert seen is not None, bug.what
    assert not seen.is_crash_of_plant, f"the planted bug crashes by itself: {seen.how}"
    if seen.seed != first and (bug.name in known or seen.seed >= FEW):
        warnings.warn(f"{bug.name} is shown by seed {seen.seed} now: with it in KNOWN this test is quick", stacklevel=2)
    return seen
