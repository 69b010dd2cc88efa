"""Queues that lie on so many members only: the plan with limits, and how limits come and go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.group_checks import check_even, check_limits
from simulation.promises import BrokenPromiseError
from sluiceway.core.group.group_records import Resource, Strategy, Writes, largest_commit, owners
from sluiceway.core.group.item_placement import begin, limit, place, remove
from sluiceway.core.group.plan import dealt, moves, sticky
from tests.group.test_assignment_holes import KEYS, QUICK, Rig

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
from sluiceway.core.group.plan import dealt, sticky
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


# ---- limits in the group's records --------------------------------------------------------------------------------------


def settled(items: list[str], limits: dict[str, int] | None = None, strategy: Strategy = "rounds", *names: str) -> Rig:
    rig = Rig((), strategy)
    rig.put(Resource(items=tuple(sorted(items)), limits=limits or {}, strategy=strategy, parameters=QUICK))
    rig.go_on(*(names or MEMBERS))
    return rig


def commit(rig: Rig, writes: Writes) -> None:
    assert writes.puts
    assert rig.store.commit(writes)


def recorded(rig: Rig) -> dict[str, int]:
    resource = rig.view().resource
    assert resource is not None
    return resource.limits


def number(rig: Rig) -> int:
    current = rig.view().round
    assert current is not None
    return current.number


def test_a_change_of_a_limit_moves_the_queue_by_a_round() -> None:
    rig = settled([*queue("p", 8), *queue("q", 8)])
    assert len(on(owners(rig.view()), "q")) == 4
    commit(rig, limit(rig.view(), KEYS, "q", 1))
    rounds = number(rig)
    rig.go_on(*MEMBERS)
    assert number(rig) == rounds + 1
    assert list(on(owners(rig.view()), "q").values()) == [8]
    check_even(owners(rig.view()), MEMBERS, recorded(rig))
    commit(rig, limit(rig.view(), KEYS, "q", 3))
    rig.go_on(*MEMBERS)
    assert sorted(on(owners(rig.view()), "q").values()) == [2, 3, 3]
    commit(rig, limit(rig.view(), KEYS, "q", None))
    rig.go_on(*MEMBERS)
    assert recorded(rig) == {}


def test_a_limit_that_changes_nothing_is_not_written() -> None:
    rig = settled(queue("q", 4), {"q": 2})
    assert not limit(rig.view(), KEYS, "q", 2).puts
    assert not limit(rig.view(), KEYS, "other", 2).puts
    assert not limit(rig.view(), KEYS, "other", None).puts


def test_a_new_queue_is_placed_on_so_many_without_a_round() -> None:
    rig = settled(queue("p", 6))
    rounds = number(rig)
    commit(rig, place(rig.view(), KEYS, queue("q", 5), (), {"q": 2}))
    rig.go_on(*MEMBERS)
    assert number(rig) == rounds
    assert sorted(on(owners(rig.view()), "q").values()) == [2, 3]
    assert recorded(rig) == {"q": 2}


def test_what_comes_to_a_limited_queue_is_left_to_a_round() -> None:
    rig = settled(queue("q", 4), {"q": 2})
    writes = place(rig.view(), KEYS, ["q.4", "q.5"])
    assert writes.puts.keys() == {KEYS.resource}
    commit(rig, writes)
    rig.go_on(*MEMBERS)
    assert list(on(owners(rig.view()), "q").values()) == [3, 3]


def test_the_limit_goes_with_the_last_item() -> None:
    rig = settled([*queue("p", 2), *queue("q", 2)], {"p": 1, "q": 1})
    commit(rig, remove(rig.view(), KEYS, ["q.0"]))
    assert recorded(rig) == {"p": 1, "q": 1}
    commit(rig, remove(rig.view(), KEYS, ["q.1"]))
    assert recorded(rig) == {"p": 1}


def test_what_is_begun_anew_keeps_its_limits_unless_others_are_given() -> None:
    rig = settled([*queue("p", 2), *queue("q", 2)], {"p": 1, "q": 1})
    entry = rig.store.read().entries[KEYS.resource]
    assert begin(KEYS, entry, queue("q", 3), "rounds")[0].limits == {"q": 1}
    assert begin(KEYS, entry, queue("q", 2), "rounds", None, {"q": 3, "gone": 1})[0].limits == {"q": 3}
    assert begin(KEYS, None, queue("q", 2), "rounds", None, {"q": 3, "gone": 1})[0].limits == {"q": 3}


def test_claims_pass_over_limits() -> None:
    rig = settled(queue("q", 8), {"q": 1}, "claims")
    assert on(owners(rig.view()), "q") == dict.fromkeys(MEMBERS, 2)
    commit(rig, place(rig.view(), KEYS, queue("p", 4), (), {"p": 1}))
    assert len(on(owners(rig.view()), "p")) == 4


def test_a_record_of_an_earlier_release_has_no_limits() -> None:
    earlier = b'{"items":["q.0"],"parameters":{},"strategy":"rounds","era":2,"version":7}'
    assert msgspec.json.decode(earlier, type=Resource).limits == {}


@given(st.dictionaries(st.text("abcdefgh", min_size=1, max_size=150), st.integers(1, 3), max_size=20))
def test_a_resource_with_limits_fits_where_a_plan_fits(queues: dict[str, int]) -> None:
    items = tuple(item for name, partitions in queues.items() for item in queue(name, partitions))
    resource = Resource(items=items, limits=dict.fromkeys(queues, 1_000), era=1_000, version=10**9)
    assert len(msgspec.json.encode(resource)) < largest_commit(KEYS, items, ())


# ---- what the checks would see ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owners", "limits"),
    [
        ({"q.0": "a", "q.1": "b"}, {"q": 1}),
        ({"q.0": "a", "q.1": "a"}, {"q": 2}),
        ({"q.0": "a", "q.1": "a", "q.2": "a", "q.3": "b"}, {"q": 2}),
    ],
)
def test_the_checks_see_a_queue_on_too_many_or_too_few(owners: dict[str, str], limits: dict[str, int]) -> None:
    with pytest.raises(BrokenPromiseError):
        check_limits(owners, MEMBERS, limits)


@pytest.mark.parametrize(
    "owners",
    [
        {"p.0": "a", "p.1": "a", "q.0": "a", "q.1": "a"},
        {"p.0": "a", "p.1": "a", "q.0": "a", "other": "b"},
        {"other": "a", "another": "a"},
    ],
)
def test_the_checks_see_that_a_part_is_better_elsewhere(owners: dict[str, str]) -> None:
    with pytest.raises(BrokenPromiseError):
        check_even(owners, ["a", "b"], {"p": 1, "q": 1})
