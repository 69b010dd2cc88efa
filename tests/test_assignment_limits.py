"""Queues that lie on so many members only: the plan with limits, and how limits come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.assignment.plan import dealt, moves, sticky
from sluiceway.sim.group_checks import check_even, check_limits

MEMBERS = ["a", "b", "c", "d"]


def queue(name: str, partitions: int) -> list[str]:
    return [f"{name}.{n}" for n in range(partitions)]


def on(plan: dict[str, str], name: str) -> dict[str, int]:
    """Who has how many of the queue's items."""
    return dict(Counter(owner for item, owner in plan.items() if item.startswith(f"{name}.")))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[str], list[str], dict[str, str], dict[str, int]]:
    """Queues of all sizes, some of them limited, and whoever had their items before; some queues begin where others are."""
    queues = {f"q{n:02}": draw(st.integers(1, 12)) for n in range(draw(st.integers(0, 12)))}
    members = [f"m{n}" for n in range(draw(st.integers(1, 9)))]
    known = [*members, "gone"]
    items = [item for name, partitions in queues.items() for item in queue(name, partitions)]
    current: dict[str, str] = {}
    for name, partitions in queues.items():
        where = draw(st.lists(st.sampled_from(known), max_size=len(known), unique=True))
        if where:
            current |= {item: draw(st.sampled_from(where)) for item in queue(name, partitions)}
    limits = {name: draw(st.integers(1, 10)) for name in queues if draw(st.booleans())}
    return items, draw(st.permutations(members)), current, limits


@given(states())
def test_each_queue_lies_on_so_many_and_all_is_as_even_as_that_allows(
    state: tuple[list[str], list[str], dict[str, str], dict[str, int]],
) -> None:
    items, members, current, limits = state
    plan = sticky(items, members, current, limits)
    assert sorted(plan) == sorted(items)
    assert set(plan.values()) <= set(members)
    check_limits(plan, members, limits)
    check_even(plan, members, limits)


@given(states())
def test_a_plan_that_was_made_is_kept(state: tuple[list[str], list[str], dict[str, str], dict[str, int]]) -> None:
    items, members, current, limits = state
    plan = sticky(items, members, current, limits)
    assert sticky(items, members[::-1], plan, limits) == plan


@given(states())
def test_the_rest_moves_as_little_as_there_can_be(state: tuple[list[str], list[str], dict[str, str], dict[str, int]]) -> None:
    """Beside what is limited, which fills the members to some height."""
    items, members, current, limits = state
    plan = sticky(items, members, current, limits)
    rest = [item for item in items if item.rpartition(".")[0] not in limits]
    below = Counter(owner for item, owner in plan.items() if item not in rest)
    share = Counter(owner for item, owner in plan.items() if item in rest)
    has = Counter(current[item] for item in rest if item in current)
    height = max((below[name] + share[name] for name in members if share[name]), default=0)
    # What the lesser share of each is; those who are no higher than that may have one more.
    least = {name: max(0, height - 1 - below[name]) for name in members}
    able = [name for name in members if below[name] <= height - 1]
    more = len(rest) - sum(least.values())
    kept = sum(min(has[name], least[name]) for name in members) + min(more, sum(has[name] > least[name] for name in able))
    assert moves({item: plan[item] for item in rest}, current) == len(rest) - kept


def test_one_logical_queue_stays_where_most_of_it_is() -> None:
    items = queue("q", 4)
    current = {"q.0": "c", "q.1": "b", "q.2": "b", "q.3": "a"}
    assert on(sticky(items, MEMBERS, current, {"q": 1}), "q") == {"b": 4}


def test_more_logical_queues_than_members_or_partitions_are_as_many_as_can_be() -> None:
    items = [*queue("p", 8), *queue("q", 2)]
    plan = sticky(items, MEMBERS, dict.fromkeys(items, "a"), {"p": 9, "q": 9})
    assert on(plan, "p") == dict.fromkeys(MEMBERS, 2)
    assert len(on(plan, "q")) == 2


def test_a_queue_of_all_spreads_even_if_all_was_even_before() -> None:
    """A limit that binds nobody is still what the queue is to have."""
    items = [*queue("p", 8), *queue("q", 8)]
    before = sticky(items, MEMBERS, {}, {"p": 2, "q": 2})
    assert sorted(Counter(before.values()).values()) == [4, 4, 4, 4]
    after = sticky(items, MEMBERS, before, {"p": 4, "q": 2})
    assert on(after, "p") == dict.fromkeys(MEMBERS, 2)


def test_who_comes_gets_queues_though_their_owner_has_all_of_them() -> None:
    items = [item for n in range(6) for item in queue(f"q{n}", 4)]
    limits = {f"q{n}": 1 for n in range(6)}
    alone = sticky(items, ["a"], {}, limits)
    both = sticky(items, ["a", "b"], alone, limits)
    assert Counter(both.values()) == {"a": 12, "b": 12}
    assert moves(both, alone) == 12


def test_the_rest_makes_up_for_what_is_limited() -> None:
    """No queue that is limited moves if others can."""
    items = [*queue("big", 8), *queue("other", 24)]
    before = dict.fromkeys(queue("big", 8), "a") | dict.fromkeys(queue("other", 24), "b")
    after = sticky(items, MEMBERS, before, {"big": 1})
    assert on(after, "big") == {"a": 8}
    assert on(after, "other") == {"b": 8, "c": 8, "d": 8}


def test_new_queues_go_to_those_who_have_least() -> None:
    counts = {"a": 5, "b": 3, "c": 0, "d": 4}
    assert on(dealt(queue("q", 5), counts, {"q": 2}), "q") == {"c": 3, "b": 2}
    assert on(dealt(queue("q", 5), counts, {"q": 9}), "q") == {"c": 2, "b": 1, "d": 1, "a": 1}
    both = dealt([*queue("p", 4), *queue("q", 2)], counts, {"p": 1})
    assert on(both, "p") == {"c": 4}
    assert on(both, "q") == {"b": 1, "c": 1}


PROGRAM = """
import hashlib, json, random
from sluiceway.core.assignment.plan import dealt, sticky
rng = random.Random(7)
items = [f"q{q}.{n}" for q in range(60) for n in range(8)]
members = {f"m{n}" for n in range(17)}
current = {item: f"m{rng.randrange(25)}" for item in items}
limits = {f"q{q}": rng.randrange(1, 9) for q in range(0, 60, 2)}
plans = [sticky(items, members, current, limits), dealt(items, {member: int(member[1:]) % 3 for member in members}, limits)]
print(hashlib.sha256(json.dumps(plans).encode()).hexdigest())
"""


@pytest.mark.parametrize("processes", [8])
def test_every_process_makes_the_same_plan(processes: int) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in range(processes)
    ]
    assert len({process.communicate()[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)
