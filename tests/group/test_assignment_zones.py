"""Members in zones: each has its part of every queue, loads stay even, and nothing moves without need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.group_checks import check_even, check_limits, check_shares, check_zones
from simulation.promises import BrokenPromiseError
from sluiceway.core.group.group_records import MemberRecord, owners
from sluiceway.core.group.item_placement import place
from sluiceway.core.group.member import Member
from sluiceway.core.group.plan import dealt, moves, sticky
from sluiceway.core.group.zones import MAX_ZONES, span, targets
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.names import check_zone
from tests.group.test_assignment_holes import KEYS, Rig
from tests.group.test_assignment_limits import on, queue

State = tuple[list[str], dict[str, str], dict[str, str], dict[str, int]]


@st.composite
def states(draw: st.DrawFn) -> State:
    """Queues of all sizes, some of them limited, whoever had their items before, and members in a few zones."""
    queues = {f"q{n:02}": draw(st.integers(1, 12)) for n in range(draw(st.integers(0, 10)))}
    zones = {f"m{n}": draw(st.sampled_from(["", "east", "west", "north"])) for n in range(draw(st.integers(1, 9)))}
    known = [*zones, "gone"]
    current: dict[str, str] = {}
    for name, partitions in queues.items():
        where = draw(st.lists(st.sampled_from(known), max_size=len(known), unique=True))
        if where:
            current |= {item: draw(st.sampled_from(where)) for item in queue(name, partitions)}
    limits = {name: draw(st.integers(1, 10)) for name in queues if draw(st.integers(0, 3)) == 0}
    return [item for name, partitions in queues.items() for item in queue(name, partitions)], zones, current, limits


@given(states())
def test_each_zone_has_its_part_of_each_queue_and_loads_are_even(state: State) -> None:
    items, zones, current, limits = state
    plan = sticky(items, zones, current, limits, (), zones)
    across = span(zones, zones)
    assert sorted(plan) == sorted(items)
    assert {*plan.values()} <= zones.keys()
    check_limits(plan, zones, limits)
    check_even(plan, zones, limits, across)
    check_zones(plan, limits, across)
    check_shares(plan, limits, across)
    if not limits:
        counts = Counter(plan.values())
        assert max(counts[name] for name in zones) - min(counts[name] for name in zones) <= 1


@given(states())
def test_a_plan_that_was_made_is_kept(state: State) -> None:
    items, zones, current, limits = state
    plan = sticky(items, zones, current, limits, (), zones)
    assert sticky(items, reversed([*zones]), plan, limits, (), zones) == plan


@given(states())
def test_a_single_zone_changes_nothing(state: State) -> None:
    items, zones, current, limits = state
    one = dict.fromkeys(zones, "east")
    assert sticky(items, zones, current, limits, (), one) == sticky(items, zones, current, limits)


@given(st.data())
def test_numbers_that_fit_are_found_for_any_rooms(data: st.DataObject) -> None:
    zones = [f"z{n}" for n in range(data.draw(st.integers(2, 5)))]
    sizes = {f"q{n}": data.draw(st.integers(1, 7)) for n in range(data.draw(st.integers(1, 8)))}
    cuts = sorted(data.draw(st.lists(st.integers(0, sum(sizes.values())), min_size=len(zones) - 1, max_size=len(zones) - 1)))
    rooms = {zone: end - start for zone, start, end in zip(zones, [0, *cuts], [*cuts, sum(sizes.values())], strict=True)}
    has = {name: Counter(data.draw(st.lists(st.sampled_from(zones), max_size=size))) for name, size in sizes.items()}
    made = targets(sizes, has, rooms)
    for name, size in sizes.items():
        assert sum(made[name].values()) == size
        assert all(abs(count * sum(rooms.values()) - size * rooms[zone]) < sum(rooms.values()) for zone, count in made[name].items())
    assert {zone: sum(each[zone] for each in made.values()) for zone in zones} == rooms


EAST_WEST = {"a": "east", "b": "east", "c": "west", "d": "west"}


def parts(plan: dict[str, str], name: str, zones: dict[str, str]) -> dict[str, int]:
    """How many of the queue's items each zone has."""
    return dict(Counter(zones[owner] for item, owner in plan.items() if item.startswith(f"{name}.")))


def test_all_of_a_queue_in_one_zone_is_spread() -> None:
    items = [*queue("p", 4), *queue("q", 4)]
    current = dict(zip(items, "ababcdcd", strict=True))
    assert sticky(items, EAST_WEST, current) == current
    plan = sticky(items, EAST_WEST, current, {}, (), EAST_WEST)
    assert parts(plan, "p", EAST_WEST) == parts(plan, "q", EAST_WEST) == {"east": 2, "west": 2}
    assert moves(plan, current) == 4


def test_a_dead_zone_s_items_go_to_the_others_and_nothing_else_moves() -> None:
    zones = EAST_WEST | {"e": "north", "f": "north"}
    items = [item for n in range(6) for item in queue(f"q{n}", 6)]
    before = sticky(items, zones, {}, {}, (), zones)
    left = {name: zone for name, zone in zones.items() if zone != "north"}
    after = sticky(items, left, before, {}, (), zones)
    assert all(after[item] == owner for item, owner in before.items() if owner in left)
    assert all(parts(after, f"q{n}", zones) == {"east": 3, "west": 3} for n in range(6))
    # When the zone is back, it gets its part again, and nothing else moves.
    back = sticky(items, zones, after, {}, (), zones)
    assert moves(back, after) == 12
    assert all(parts(back, f"q{n}", zones) == {"east": 2, "west": 2, "north": 2} for n in range(6))


def test_one_more_instance_takes_its_share_and_nothing_else_moves() -> None:
    items = [item for n in range(8) for item in queue(f"q{n}", 10)]
    before = sticky(items, EAST_WEST, {}, {}, (), EAST_WEST)
    zones = EAST_WEST | {"e": "west"}
    after = sticky(items, zones, before, {}, (), zones)
    assert moves(after, before) == Counter(after.values())["e"] == 16
    assert all(parts(after, f"q{n}", zones) == {"east": 4, "west": 6} for n in range(8))


def test_a_zone_s_part_is_that_of_its_instances() -> None:
    zones = {"a": "east", "b": "east", "c": "east", "d": "west"}
    items = [*queue("p", 8), *queue("q", 8)]
    plan = sticky(items, zones, {}, {}, (), zones)
    assert Counter(plan.values()) == dict.fromkeys(zones, 4)
    assert parts(plan, "p", zones) == parts(plan, "q", zones) == {"east": 6, "west": 2}


def test_a_limited_queue_lies_in_as_many_zones_as_it_can() -> None:
    zones = EAST_WEST | {"e": "north", "f": "north"}
    items = [item for n in range(6) for item in queue(f"q{n}", 6)]
    limits = {f"q{n}": 1 + n % 3 for n in range(6)}
    plan = sticky(items, zones, dict.fromkeys(items, "a"), limits, (), zones)
    for n in range(6):
        assert len({zones[owner] for owner in on(plan, f"q{n}")}) == limits[f"q{n}"]


def test_members_without_a_zone_are_a_zone() -> None:
    zones = {"a": "east", "b": "east", "c": "", "d": ""}
    plan = sticky(queue("q", 4), zones, dict.fromkeys(queue("q", 4), "a"), {}, (), zones)
    assert parts(plan, "q", zones) == {"east": 2, "": 2}


def test_too_many_zones_are_ignored() -> None:
    zones = {f"m{n:02}": f"z{n}" for n in range(MAX_ZONES + 1)}
    assert not span(zones, zones)
    assert span([f"m{n:02}" for n in range(MAX_ZONES)], zones)


def test_a_new_queue_is_placed_in_all_zones() -> None:
    plan = dealt(queue("q", 2), dict.fromkeys(EAST_WEST, 5), {}, EAST_WEST)
    assert parts(plan, "q", EAST_WEST) == {"east": 1, "west": 1}
    assert on(dealt(queue("q", 2), dict.fromkeys(EAST_WEST, 5)), "q") == {"a": 1, "b": 1}
    limited = dealt(queue("q", 4), {"a": 0, "b": 0, "c": 1, "d": 1}, {"q": 2}, EAST_WEST)
    assert parts(limited, "q", EAST_WEST) == {"east": 2, "west": 2}


def test_ten_thousand_items_in_many_zones_are_planned_soon() -> None:
    """Also when all has to move, and when most queues have one item. By count of what is done, not by time."""
    rng = Random(1)
    zones = {f"m{n:03}": f"z{n % MAX_ZONES}" for n in range(200)}
    for items in ([f"q{n}.0" for n in range(10_000)], [f"q{n // 8}.{n % 8}" for n in range(10_000)]):
        for current in ({}, dict.fromkeys(items, "m000"), {item: rng.choice([*zones]) for item in items}):
            plan = sticky(items, zones, current, {}, (), zones)
            assert {*Counter(plan.values()).values()} == {50}
            assert sticky(items, zones, plan, {}, (), zones) == plan


# ---- in the group's records ---------------------------------------------------------------------------------------------


def test_members_say_their_zone_and_the_round_goes_by_it() -> None:
    rig = Rig(tuple(queue("q", 4)))
    rig.members = {name: Member(KEYS, name, zone=zone) for name, zone in {"a": "east", "b": "east", "c": "west"}.items()}
    rig.go_on("a", "b", "c")
    assert rig.view().zones == {"a": "east", "b": "east", "c": "west"}
    assert sum(owner == "c" for owner in owners(rig.view()).values()) in (1, 2)
    assert rig.store.commit(place(rig.view(), KEYS, queue("p", 2)))
    rig.go_on("a", "b", "c")
    assert "c" in on(owners(rig.view()), "p")


def test_a_record_of_before_has_no_zone() -> None:
    assert MemberRecord(beat=1, lease_timeout=1).zone == ""


@pytest.mark.parametrize("zone", ["a b", "a/b", "ä", "a" * 65, 3])
def test_a_zone_has_a_plain_name(zone: object) -> None:
    with pytest.raises(SluicewayError, match="is not the name of a zone"):
        check_zone(zone)
    assert check_zone("eu-west-1a") == "eu-west-1a"
    assert check_zone("") == ""


PROGRAM = """
import hashlib, json, random
from sluiceway.core.group.plan import dealt, sticky
rng = random.Random(7)
items = [f"q{q}.{n}" for q in range(60) for n in range(8)]
zones = {f"m{n}": f"z{n % 3}" for n in range(17)}
current = {item: f"m{rng.randrange(25)}" for item in items}
limits = {f"q{q}": rng.randrange(1, 9) for q in range(0, 60, 3)}
plans = [sticky(items, set(zones), current, limits, (), zones), dealt(items, {m: int(m[1:]) % 3 for m in set(zones)}, limits, zones)]
print(hashlib.sha256(json.dumps(plans).encode()).hexdigest())
"""


def test_every_process_makes_the_same_plan() -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}
        )
        for seed in range(6)
    ]
    assert len({process.communicate()[0] for process in running}) == 1
    assert all(process.returncode == 0 for process in running)


# ---- what the checks would see ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "limits"), list(product(["aabb", "aaab"], [{}, {"q": 2}])))
def test_the_checks_see_a_queue_in_one_zone(where: str, limits: dict[str, int]) -> None:
    plan = dict(zip(queue("q", 4), where, strict=True)) | dict(zip(queue("p", 4), "cdcd", strict=True))
    with pytest.raises(BrokenPromiseError):
        check_zones(plan, limits, EAST_WEST)
