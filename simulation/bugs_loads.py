"""Planted bugs of loads: which items move to level them, how many, and when."""

from __future__ import annotations

from typing import Any

import msgspec

from simulation.planting import Bug, shelf
from sluiceway.core.group import load_balance, rounds
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.load_balance import Balancer

BUGS: list[Bug] = []
bug = shelf(BUGS)


@bug(Balancer, "budget")
def moves_as_many_as_it_likes(original: Any) -> Any:
    """The bound on moves is not kept."""
    return lambda *_: 20


@bug(Balancer, "budget")
def bounds_each_round_alone(original: Any) -> Any:
    """Each round may make as many moves as are allowed in a minute."""
    return lambda self, now, look, most: most


@bug(load_balance, "is_uneven")
def never_finds_loads_uneven(original: Any) -> Any:
    """Loads are never levelled."""
    return lambda totals: False


@bug(load_balance._Exchanges, "_candidates")
def hands_the_whole_load_on(original: Any) -> Any:
    """The busiest item goes to the idlest member, whatever the loads are then: it comes back soon."""

    def candidates(self: Any, busy: str, idle: str, room: int) -> Any:
        gives, takes = self._by_class(busy, idle), self._by_class(idle, busy)
        for group in sorted(gives.keys() & takes.keys()) if room >= 2 else ():
            item, load = max(gives[group], key=lambda pair: (pair[1], pair[0]))
            other, less = min(takes[group], key=lambda pair: (pair[1], pair[0]))
            if load > less:
                yield load_balance._Candidate(load - less, False, item, other)

    return candidates


@bug(rounds, "_swaps")
def makes_no_moves(original: Any) -> Any:
    """A round that was opened to level loads moves nothing."""
    return lambda *_: {}


@bug(Beating, "report")
def counts_on_the_first_beat(original: Any) -> Any:
    """A report is never sent."""
    return lambda *_: None


@bug(rounds.Rounds, "_seal")
def leaves_reports_behind(original: Any) -> Any:
    """The report of a member that is given up stays for ever."""

    def seal(self: Any, *args: Any) -> Any:
        writes = original(self, *args)
        writes.deletes = [key for key in writes.deletes if not key.startswith(self._keys.loads)]
        return writes

    return seal


@bug(rounds, "next_plan")
def forgets_how_many_have_moved(original: Any) -> Any:
    """The count of moves for loads starts over with each plan."""

    def next_plan(look: Any, *args: Any) -> Any:
        plan, moved = original(look, *args)
        before = look.plan.swapped if look.plan else 0
        return msgspec.structs.replace(plan, swapped=plan.swapped - before), moved

    return next_plan
