"""What the leader of a term decides, and whom a finisher proposes. By the state alone, so that it can be decided again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sluiceway.core.group.plan import sticky
from sluiceway.core.group.task_state import State, Term
from sluiceway.model.task_records import Born, Group


class Division(NamedTuple):
    """What is to be said so that the members have equally many partitions, to within one."""

    assign: Mapping[str, str]
    move: Mapping[str, str]
    cancel: tuple[str, ...]


def next_term(state: State, group: Group) -> Term | None:
    """The term that the election calls for; None: it is this one, or nobody could lead."""
    members = tuple(sorted(name for name in set(group.members) if name in state.joined))
    if group.leader not in members or (state.leader, state.members) == (group.leader, members):
        return None
    return Term(state.term + 1, group.leader, members, group.generation)


def divide(state: State) -> Division:
    """Everything that is ready is given out, and as few partitions move as there can be.

    A move that has begun goes on, unless whom it was for has gone or the owner should have kept the partition after all.
    """
    members, active = state.members, state.active()
    current = {token: each.to if each.to in members else each.owner for token, each in active.items() if each.owner}
    plan = sticky(sorted(active), members, current)
    assign = {token: plan[token] for token in plan if active[token].phase == "ready"}
    moving = {token: each for token, each in active.items() if each.to}
    cancel = tuple(token for token, each in moving.items() if each.to not in members or plan[token] == each.owner)
    move = {token: to for token, to in plan.items() if active[token].owner not in ("", to) and token not in moving}
    return Division(assign, move, cancel)


def hints(state: State, finisher: str, token: str, children: Iterable[Born]) -> dict[str, str]:
    """For each child the member that has least, as the finisher sees it; itself rather than another that has as much."""
    loads = Counter(dict.fromkeys(state.members, 0))
    for name, each in state.partitions.items():
        taker = each.to or each.owner
        if name != token and taker in loads:
            loads[taker] += 1
    proposed: dict[str, str] = {}
    for born in children:
        if loads:
            taker = min(loads, key=lambda name: (loads[name], name != finisher, name))
            loads[taker] += 1
            proposed[born.token] = taker
    return proposed
