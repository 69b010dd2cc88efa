"""Decisions of a term's leader, and the proposals of finishers. They depend on the state alone, so they can be repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sluiceway.core.group.plan import sticky
from sluiceway.core.group.task_state import State, Term
from sluiceway.model.task_records import AnnouncedPartition, Group


class Division(NamedTuple):
    """The decisions that level the members' partition counts to within one."""

    assign: Mapping[str, str]
    move: Mapping[str, str]
    cancel: tuple[str, ...]


def next_term(state: State, group: Group) -> Term | None:
    """The term that the election calls for; None: it is the current one, or no candidate can lead."""
    members = tuple(sorted(name for name in set(group.members) if name in state.joined))
    if group.leader not in members or (state.leader, state.members) == (group.leader, members):
        return None
    return Term(state.term + 1, group.leader, members, group.generation)


def divide(state: State) -> Division:
    """Give out every ready partition, and move as few as possible.

    A move that has begun continues, unless its target has left or the owner should keep the partition after all.
    """
    members, active = state.members, state.active()
    current = {token: each.to if each.to in members else each.owner for token, each in active.items() if each.owner}
    plan = sticky(sorted(active), members, current)
    assign = {token: plan[token] for token in plan if active[token].phase == "ready"}
    moving = {token: each for token, each in active.items() if each.to}
    cancel = tuple(token for token, each in moving.items() if each.to not in members or plan[token] == each.owner)
    move = {token: to for token, to in plan.items() if active[token].owner not in ("", to) and token not in moving}
    return Division(assign, move, cancel)


def hints(state: State, finisher: str, token: str, children: Iterable[AnnouncedPartition]) -> dict[str, str]:
    """For each child the least loaded member, as the finisher sees it; the finisher wins ties."""
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
