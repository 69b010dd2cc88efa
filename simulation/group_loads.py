"""Loads of a simulated group's items: constant and very different. Checks how they are levelled."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from simulation.promises import check
from sluiceway.core.group.group_records import GroupView, LoadReport
from sluiceway.core.group.load_balance import PACE, exchanges, is_uneven, totals_of
from sluiceway.kernel.clock import Millis

BALANCE = PACE._replace(looks=2, look=300, minute=2_000)
"""Times fit for histories of half a minute."""
SLOWEST_MINUTE: Millis = 1_800
"""The window of the bound on moves by the clock of the fastest member, by the world's."""


class ItemLoads:
    """The load of each item, in millionths of what a member can carry. `seed` None: there are none, and none are reported."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self._loads: dict[str, int] = {}
        self._moved: list[tuple[Millis, int]] = []

    def __bool__(self) -> bool:
        return self._seed is not None

    def of(self, item: str) -> int:
        if item not in self._loads:
            self._loads[item] = Random(f"{self._seed} {item}").choice([0, 0, 5_000, 40_000, 100_000, 300_000])
        return self._loads[item]

    def report(self, items: Iterable[str], look: GroupView) -> LoadReport:
        return LoadReport(loads={item: self.of(item) for item in items}, round=look.plan.round if look.plan else 0)

    def check_moves(self, was: GroupView, now: GroupView, at: Millis) -> None:
        """Check that no more than the allowed number of items move in a minute to level loads. Raises BrokenPromiseError."""
        if was.plan is None or now.plan is None or now.resource is None or was.plan.swapped == now.plan.swapped:
            return
        self._moved = [(then, moved) for then, moved in self._moved if then > at - SLOWEST_MINUTE]
        self._moved.append((at, now.plan.swapped - was.plan.swapped))
        moved = sum(moved for _, moved in self._moved)
        check(0 < moved <= now.resource.load_moves, f"{moved} moves in a minute to level loads, {now.resource.load_moves} are allowed")

    def check_rest(self, look: GroupView) -> None:
        """Check that the loads are even in the end, or that no exchange would help. Raises BrokenPromiseError."""
        resource, plan = look.resource, look.plan
        if not self or resource is None or plan is None or look.round is None or resource.strategy != "rounds" or plan.era != resource.era:
            return
        reports = {name: self.report(grants, look) for name, grants in plan.owners.items()}
        totals = totals_of(plan, look.round.participants, reports)
        mean, most = sum(totals.values()) / max(1, len(totals)), max(totals.values(), default=0)
        # Members report changes only if they are noticeable.
        if is_uneven(totals) and most > 1.5 * mean and most - mean > 2 * PACE.floor:
            found = exchanges(look, resource, plan, reports, 20)
            check(not found, f"loads at rest: {totals}, and {found} would level them")
