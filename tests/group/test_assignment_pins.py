"""Pinned items are where they are pinned to, as long as a member is there, and the others make up for them."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.group_checks import check_rules
from sluiceway.core.group.group_records import (
    MAX_PINS,
    Pin,
    Resource,
    Strategy,
    base_name,
    largest_commit,
    members_of,
    owners,
    pinned,
)
from sluiceway.core.group.item_placement import begin, pin, place, remove
from sluiceway.core.group.load_balance import exchanges
from sluiceway.core.group.member import Member
from sluiceway.core.group.plan import moves, sticky
from sluiceway.core.group.zones import span
from sluiceway.kernel.errors import SluicewayError
from tests.group.test_assignment_holes import KEYS, Rig
from tests.group.test_assignment_limits import commit, number, queue, settled
from tests.group.test_load_balance import World

Case = tuple[Resource, dict[str, str], dict[str, str]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A resource with limits and pins, members in zones, and who had the items."""
    zones = {f"m{n}": draw(st.sampled_from(["", "east", "west"])) for n in range(draw(st.integers(1, 7)))}
    queues = {f"q{n}": draw(st.integers(1, 9)) for n in range(draw(st.integers(1, 8)))}
    items = tuple(item for name, partitions in queues.items() for item in queue(name, partitions))
    limits = {name: draw(st.integers(1, 5)) for name in queues if draw(st.integers(0, 3)) == 0}
    targets = [Pin(instance="m0"), Pin(instance="m3"), Pin(instance="gone"), Pin(zone="east"), Pin(zone="west")]
    pins = {item: draw(st.sampled_from(targets)) for item in items if draw(st.integers(0, 4)) == 0}
    current = {item: draw(st.sampled_from([*zones, "gone"])) for item in items if draw(st.booleans())}
    return Resource(items=items, limits=limits, pins=pins), zones, current


@given(cases())
def test_pins_hold_and_loads_are_as_even_as_they_allow(case: Case) -> None:
    resource, zones, current = case
    pins = pinned(resource.pins, zones)
    plan = sticky(resource.items, zones, current, resource.limits, (), zones, pins)
    assert sorted(plan) == sorted(resource.items)
    assert {*plan.values()} <= zones.keys()
    check_rules(plan, zones, resource, span(zones, zones), pins)
    assert sticky(resource.items, [*zones][::-1], plan, resource.limits, (), zones, pins) == plan


def test_the_others_make_up_for_what_is_pinned() -> None:
    items = [*queue("p", 4), *queue("q", 8)]
    before = sticky(items, "abc", {})
    pins = dict.fromkeys(queue("p", 4), ("a",))
    after = sticky(items, "abc", before, {}, (), {}, pins)
    assert Counter(after.values()) == {"a": 4, "b": 4, "c": 4}
    assert all(after[item] == "a" for item in queue("p", 4))


def test_more_than_its_share_may_be_pinned_to_a_member() -> None:
    items = queue("q", 8)
    after = sticky(items, "abc", {}, {}, (), {}, dict.fromkeys(items[:6], ("a",)))
    assert Counter(after.values()) == {"a": 6, "b": 1, "c": 1}


def test_what_is_pinned_to_a_zone_is_spread_over_its_members_and_stays() -> None:
    items = queue("q", 6)
    pins = dict.fromkeys(items[:4], ("a", "b"))
    plan = sticky(items, "abc", {}, {}, (), {}, pins)
    assert Counter(plan[item] for item in items[:4]) == {"a": 2, "b": 2}
    assert plan["q.4"] == plan["q.5"] == "c"
    assert moves(sticky(items, "abc", plan, {}, (), {}, pins), plan) == 0


def test_a_name_without_its_start() -> None:
    assert base_name("queue-1-k7f3q2ma") == "queue-1"
    assert base_name("m1") == "m1"
    zones = {"queue-1-aa": "east", "queue-1-bb": "west", "queue-2-cc": "east"}
    assert members_of(Pin(instance="queue-1"), zones) == ("queue-1-aa", "queue-1-bb")
    assert members_of(Pin(zone="east"), zones) == ("queue-1-aa", "queue-2-cc")
    assert members_of(Pin(instance="queue-1-aa"), zones) == ()


# ---- in the group's records ---------------------------------------------------------------------------------------------


def at(rig: Rig, item: str) -> str:
    return owners(rig.view())[item]


def test_a_pinned_item_comes_back_with_the_instance() -> None:
    rig = settled(queue("q", 4))
    commit(rig, pin(rig.view(), KEYS, "q.0", Pin(instance="d")))
    rig.go_on("a", "b", "c", "d")
    assert at(rig, "q.0") == "d"
    rig.members["d"].leave()
    rig.go_on("a", "b", "c", "d")
    assert at(rig, "q.0") in ("a", "b", "c")
    # Another start of it: the suffix is new.
    rig.members["d-2"] = Member(KEYS, "d-2")
    rig.go_on("a", "b", "c", "d-2")
    assert at(rig, "q.0") == "d-2"
    commit(rig, pin(rig.view(), KEYS, "q.0", None))
    before, rounds = owners(rig.view()), number(rig)
    rig.go_on("a", "b", "c", "d-2")
    assert number(rig) == rounds + 1
    assert owners(rig.view()) == before


def test_a_pin_that_changes_nothing_is_not_written() -> None:
    rig = settled(queue("q", 4))
    commit(rig, pin(rig.view(), KEYS, "q.0", Pin(instance="d")))
    assert not pin(rig.view(), KEYS, "q.0", Pin(instance="d")).puts
    assert not pin(rig.view(), KEYS, "q.1", None).puts


@pytest.mark.parametrize(("where", "field"), [(Pin(instance="e"), "instance"), (Pin(zone="east"), "zone")])
def test_a_pin_to_what_is_not_there_is_refused(where: Pin, field: str) -> None:
    rig = settled(queue("q", 4))
    with pytest.raises(SluicewayError, match="there is no instance of") as refused:
        pin(rig.view(), KEYS, "q.0", where)
    assert refused.value.field == field


def test_pins_are_bounded_and_fit_where_a_plan_fits() -> None:
    items = tuple("i" * 180 + str(n) for n in range(MAX_PINS))
    pins = dict.fromkeys(items, Pin(instance="n" * 128))
    resource = Resource(items=items, pins=pins, limits={}, version=10**9)
    assert len(msgspec.json.encode(resource)) < largest_commit(KEYS, items, ())
    rig = settled([*items, "q.0"])
    view = rig.view()
    assert view.resource is not None
    rig.put(msgspec.structs.replace(view.resource, pins=dict.fromkeys(items, Pin(instance="a"))))
    with pytest.raises(SluicewayError, match="500 pins, which is the maximum"):
        pin(rig.view(), KEYS, "q.0", Pin(instance="a"))


def test_a_pin_goes_with_its_item() -> None:
    rig = settled([*queue("p", 2), *queue("q", 2)])
    for item in ("p.0", "q.0"):
        commit(rig, pin(rig.view(), KEYS, item, Pin(instance="a")))
    commit(rig, remove(rig.view(), KEYS, ["q.0"]))
    resource = rig.view().resource
    assert resource is not None
    assert resource.pins == {"p.0": Pin(instance="a")}
    entry = rig.store.read().entries[KEYS.resource]
    assert begin(KEYS, entry, ["p.0", "p.1"], "rounds")[0].pins == {"p.0": Pin(instance="a")}
    assert begin(KEYS, entry, ["p.1"], "rounds")[0].pins == {}


def test_placing_leaves_pins_as_they_are() -> None:
    rig = settled(queue("q", 2))
    commit(rig, pin(rig.view(), KEYS, "q.0", Pin(instance="a")))
    rig.go_on("a", "b", "c", "d")
    commit(rig, place(rig.view(), KEYS, queue("p", 4)))
    resource = rig.view().resource
    assert resource is not None
    assert resource.pins == {"q.0": Pin(instance="a")}


@pytest.mark.parametrize("strategy", ["claims"])
def test_claims_pass_over_pins(strategy: Strategy) -> None:
    rig = settled(queue("q", 8), None, strategy)
    commit(rig, pin(rig.view(), KEYS, "q.0", Pin(instance="a")))
    rig.go_on("a", "b", "c", "d")
    assert Counter(Counter(owners(rig.view()).values()).values()) == {2: 4}


def test_pinned_items_are_not_exchanged_to_level_loads() -> None:
    world = World({"p.0": "a", "p.1": "a", "q.0": "b", "q.1": "b"}, {"a": "", "b": ""})
    loads = {"p.0": 300_000, "p.1": 300_000, "q.0": 0, "q.1": 0}
    reports = world.reports(loads.__getitem__)
    assert exchanges(world.look(), world.resource, world.plan, reports, 6)
    resource = msgspec.structs.replace(world.resource, pins={"p.0": Pin(instance="a"), "p.1": Pin(instance="a")})
    assert not exchanges(world.look(), resource, world.plan, reports, 6)


def test_a_record_of_before_has_no_pins() -> None:
    assert msgspec.json.decode(b'{"items":["q.0"],"strategy":"rounds","era":2,"version":7}', type=Resource).pins == {}
    assert msgspec.json.encode(Pin(zone="east")) == b'{"zone":"east"}'
