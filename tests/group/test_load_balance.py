"""Loads are levelled by a few exchanges, and then nothing moves: numbers, zones and limits stay as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.group.group_records import (
    LOAD_MOVES,
    GroupView,
    LoadReport,
    MemberRecord,
    Move,
    Plan,
    Resource,
    Round,
    read_group,
)
from sluiceway.core.group.load_balance import (
    INSTANCE,
    PACE,
    Balancer,
    decides,
    exchanges,
    is_uneven,
    noticeable,
    open_round,
    reports_of,
    totals_of,
)
from sluiceway.core.group.member import Member
from sluiceway.core.group.plan import queue_of, sticky
from sluiceway.core.group.rounds import next_plan
from sluiceway.kernel.clock import Millis
from sluiceway.model.meta import Entry, View
from tests.group.test_assignment_holes import KEYS, Rig
from tests.group.test_assignment_limits import queue

TENTH = INSTANCE // 10


class World:
    """A group whose rounds are sealed as soon as they are opened. The loads are the items' own, wherever they are."""

    def __init__(
        self, owners: Mapping[str, str], zones: Mapping[str, str], limits: Mapping[str, int] | None = None, most: int = LOAD_MOVES
    ) -> None:
        self.resource = Resource(items=tuple(sorted(owners)), limits=dict(limits or {}), load_moves=most)
        self.members = {name: MemberRecord(beat=1, lease_timeout=2_000, applied=10**6, zone=zone) for name, zone in zones.items()}
        grants: dict[str, dict[str, int]] = {}
        for item, owner in owners.items():
            grants.setdefault(owner, {})[item] = 1
        self.plan = Plan(round=1, era=1, resource_version=1, owners=grants)
        self.round = Round(number=1, sealed=True, trigger="", participants=tuple(sorted(zones)))
        self.now: Millis = 0
        self.moved: list[tuple[Millis, int]] = []

    def look(self) -> GroupView:
        return GroupView(View(1, {}), self.now, self.resource, self.round, self.plan, self.members, frozenset(), {})

    def reports(self, loads: Callable[[str], int]) -> dict[str, LoadReport]:
        return {
            name: LoadReport(loads={item: loads(item) for item in self.plan.owners.get(name, ())}, round=self.round.number)
            for name in self.members
        }

    def owners(self) -> dict[str, str]:
        return {item: name for name, grants in self.plan.owners.items() for item in grants}

    def make(self, swaps: tuple[Move, ...]) -> None:
        """The round that these moves open."""
        number = self.round.number + 1
        self.round = msgspec.structs.replace(self.round, number=number, sealed=False, swaps=swaps)
        self.plan, moved = next_plan(self.look(), self.resource, number, [*self.members], ())
        self.round = msgspec.structs.replace(self.round, sealed=True, swaps=())
        assert moved == len(swaps), "a plan keeps what was exchanged, and moves nothing else"
        self.moved.append((self.now, moved))

    def live(self, balancer: Balancer, minutes: int, loads: Callable[[str], int]) -> None:
        for _ in range(minutes * 60_000 // PACE.look):
            self.now += PACE.look
            balancer.note(self.now, self.look())
            swaps = balancer.decide(self.now, self.look(), self.reports(loads))
            if swaps:
                self.make(swaps)

    def totals(self, loads: Callable[[str], int]) -> dict[str, int]:
        return totals_of(self.plan, self.members, self.reports(loads))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, dict[str, int]]:
    zones = {f"m{n}": draw(st.sampled_from(["", "east", "west"])) for n in range(draw(st.integers(1, 7)))}
    queues = {f"q{n}": draw(st.integers(1, 9)) for n in range(draw(st.integers(1, 9)))}
    limits = {name: draw(st.integers(1, 5)) for name in queues if draw(st.integers(0, 3)) == 0}
    items = [item for name, partitions in queues.items() for item in queue(name, partitions)]
    owners = sticky(items, zones, {item: draw(st.sampled_from(sorted(zones))) for item in items}, limits, (), zones)
    loads = {item: draw(st.sampled_from([0, 0, 0, 5_000, TENTH, 4 * TENTH])) for item in items}
    return World(owners, zones, limits, draw(st.sampled_from([1, 2, 6, 20]))), loads


@given(worlds())
def test_constant_loads_are_levelled_and_then_nothing_moves(state: tuple[World, dict[str, int]]) -> None:
    world, loads = state
    before, shares = world.totals(loads.__getitem__), Counter(Counter(world.owners().values()).values())
    balancer = Balancer()
    world.live(balancer, 60, loads.__getitem__)
    rounds, after = world.round.number, world.totals(loads.__getitem__)
    assert sorted(after.values(), reverse=True) <= sorted(before.values(), reverse=True)
    assert Counter(Counter(world.owners().values()).values()) == shares
    world.live(balancer, 30, loads.__getitem__)
    assert world.round.number == rounds
    if is_uneven(after):
        assert not exchanges(world.look(), world.resource, world.plan, world.reports(loads.__getitem__), world.resource.load_moves)


@given(worlds())
def test_what_was_exchanged_is_a_plan_that_rounds_keep(state: tuple[World, dict[str, int]]) -> None:
    """Numbers, zones and limits hold, so the next round, whatever it is for, moves nothing back."""
    world, loads = state
    swaps = exchanges(world.look(), world.resource, world.plan, world.reports(loads.__getitem__), 20)
    after = world.owners() | {move.item: move.owner for move in swaps}
    zones = {name: record.zone for name, record in world.members.items()}
    assert all(world.owners()[move.item] == move.before for move in swaps)
    assert len({move.item for move in swaps}) == len(swaps)
    assert sticky(world.resource.items, world.members, after, world.resource.limits, (), zones) == after


@given(worlds(), st.integers(0, 2**32))
def test_no_more_than_so_many_move_in_a_minute(state: tuple[World, dict[str, int]], seed: int) -> None:
    """Even if the loads change all the time, and another member decides each time."""
    world, _ = state
    rng = Random(seed)
    balancers = [Balancer() for _ in range(3)]
    for nth in range(400):
        world.now += rng.choice([1_000, 5_000, PACE.look])
        for balancer in balancers:
            balancer.note(world.now, world.look())
        loads = {item: rng.choice([0, 9 * TENTH]) if nth % 40 == 0 else 5 * TENTH * (len(item) % 2) for item in world.resource.items}
        swaps = rng.choice(balancers).decide(world.now, world.look(), world.reports(loads.__getitem__))
        if swaps:
            world.make(swaps)
    for at, _ in world.moved:
        assert sum(moved for then, moved in world.moved if at - PACE.minute < then <= at) <= world.resource.load_moves


def four(**loads: int) -> tuple[World, dict[str, int]]:
    """Two queues of eight on four members; the loads of some items are given by name, as `p_0`; the others have little."""
    items = [*queue("p", 8), *queue("q", 8)]
    world = World(sticky(items, "abcd", {}), dict.fromkeys("abcd", ""))
    return world, dict.fromkeys(items, 10_000) | {name.replace("_", "."): load for name, load in loads.items()}


def test_two_busy_partitions_of_one_instance_are_parted() -> None:
    world, loads = four(p_0=4 * TENTH, p_4=4 * TENTH)
    assert world.owners()["p.0"] == world.owners()["p.4"] == "a"
    world.live(Balancer(), 5, loads.__getitem__)
    assert world.owners()["p.0"] != world.owners()["p.4"]
    assert [moved for _, moved in world.moved] == [2]


def test_loads_that_are_uneven_for_a_moment_move_nothing() -> None:
    world, calm = four()
    _, uneven = four(p_0=4 * TENTH, p_4=4 * TENTH)
    balancer = Balancer()
    for _ in range(20):
        for loads, looks in ((uneven, PACE.looks - 1), (calm, 1)):
            for _ in range(looks):
                world.now += PACE.look
                balancer.note(world.now, world.look())
                assert not balancer.decide(world.now, world.look(), world.reports(loads.__getitem__))


def test_noise_below_the_threshold_moves_nothing() -> None:
    rng = Random(1)
    world, loads = four(**{f"{name}_{n}": TENTH for name in "pq" for n in range(8)})
    world.live(Balancer(), 600, lambda item: round(loads[item] * rng.uniform(0.8, 1.2)))
    assert not world.moved


def test_noise_after_loads_were_levelled_moves_nothing_back() -> None:
    """They are levelled to well below the threshold."""
    rng = Random(2)
    world, loads = four(p_0=4 * TENTH, p_4=4 * TENTH, p_1=3 * TENTH, p_2=3 * TENTH, q_1=3 * TENTH)
    balancer = Balancer()
    world.live(balancer, 30, loads.__getitem__)
    moved = len(world.moved)
    world.live(balancer, 600, lambda item: round(loads[item] * rng.uniform(0.93, 1.07)))
    assert len(world.moved) == moved


def test_small_loads_are_left_uneven() -> None:
    world, loads = four(p_0=TENTH // 4, p_4=TENTH // 4)
    world.live(Balancer(), 30, loads.__getitem__)
    assert not world.moved


def test_nothing_moves_if_it_is_turned_off() -> None:
    world, loads = four(p_0=4 * TENTH, p_4=4 * TENTH)
    world.resource = msgspec.structs.replace(world.resource, load_moves=0)
    world.live(Balancer(), 30, loads.__getitem__)
    assert not world.moved


def test_a_member_that_has_just_come_moves_nothing_for_a_minute() -> None:
    """It does not know what has moved before it came."""
    world, _ = four()
    balancer = Balancer()
    for _ in range(PACE.minute // PACE.look):
        assert balancer.budget(world.now, world.look(), 6) == 0
        balancer.note(world.now, world.look())
        world.now += PACE.look
    assert balancer.budget(world.now, world.look(), 6) == 6


def test_a_member_that_has_not_reported_since_the_round_is_waited_for() -> None:
    world, loads = four(p_0=4 * TENTH, p_4=4 * TENTH)
    balancer = Balancer()
    for _ in range(20):
        world.now += PACE.look
        balancer.note(world.now, world.look())
        reports = world.reports(loads.__getitem__)
        reports["d"] = msgspec.structs.replace(reports["d"], round=0)
        assert not balancer.decide(world.now, world.look(), reports)
    del reports["d"]
    assert not balancer.decide(world.now, world.look(), reports)


def test_the_one_partition_that_an_instance_has_more_may_be_given_away_alone() -> None:
    world = World({"p.0": "a", "p.1": "a", "q.0": "b"}, {"a": "", "b": ""})
    loads = {"p.0": 3 * TENTH, "p.1": 3 * TENTH, "q.0": 0}
    world.live(Balancer(), 5, loads.__getitem__)
    assert Counter(world.owners().values()) == {"a": 1, "b": 2}


def test_one_busy_partition_stays_where_it_is() -> None:
    """It would be as busy elsewhere."""
    world = World({"p.0": "a", "q.0": "b"}, {"a": "", "b": ""})
    world.live(Balancer(), 30, {"p.0": 9 * TENTH, "q.0": 0}.__getitem__)
    assert not world.moved


def test_partitions_of_a_limited_queue_are_exchanged_for_each_other() -> None:
    owners = {f"q.{n}": "ab"[n // 4] for n in range(8)} | {"p.0": "c", "p.1": "c", "p.2": "c", "p.3": "c"}
    world = World(owners, dict.fromkeys("abc", ""), {"q": 2, "p": 1})
    loads = dict.fromkeys(owners, 0) | {"q.0": 4 * TENTH, "q.1": 4 * TENTH}
    world.live(Balancer(), 5, loads.__getitem__)
    assert {world.owners()["q.0"], world.owners()["q.1"]} == {"a", "b"}
    assert {queue_of(item) for item, owner in world.owners().items() if owner == "c"} == {"p"}


def test_exchanges_between_zones_leave_each_zone_its_part() -> None:
    """The queues' parts in the zones are fixed here, so only partitions of the same queue change places."""
    zones = {"a": "east", "b": "west"}
    items = [*queue("p", 2), *queue("q", 2)]
    world = World(sticky(items, zones, {}, {}, (), zones), zones)
    busy = [item for item, owner in world.owners().items() if owner == "a"]
    world.live(Balancer(), 5, lambda item: 3 * TENTH if item in busy else 0)
    owners = world.owners()
    assert len({owners[item] for item in busy}) == 2
    assert {queue_of(item) for item, owner in owners.items() if owner == "a"} == {"p", "q"}


@pytest.mark.parametrize("members", [2, 200])
def test_ten_thousand_partitions(members: int) -> None:
    rng = Random(3)
    names = {f"m{n:03}": f"z{n % 3}" for n in range(members)}
    items = [f"q{n // 8}.{n % 8}" for n in range(10_000)]
    world = World(sticky(items, names, {}, {}, (), names), names, None, 20)
    loads = {item: int(rng.paretovariate(1.2) * INSTANCE / 1_000) for item in items}
    before = max(world.totals(loads.__getitem__).values())
    swaps = exchanges(world.look(), world.resource, world.plan, world.reports(loads.__getitem__), 20)
    if swaps:
        world.make(swaps)
    assert max(world.totals(loads.__getitem__).values()) <= before


# ---- reports and rounds -------------------------------------------------------------------------------------------------


def test_only_noticeable_changes_are_reported() -> None:
    report = LoadReport(loads={"a": 3 * TENTH, "b": TENTH}, round=1)
    assert noticeable(None, LoadReport(loads={}))
    assert noticeable(report, msgspec.structs.replace(report, round=2))
    assert not noticeable(report, msgspec.structs.replace(report, loads={"a": 3 * TENTH + 30_000, "b": TENTH}))
    assert noticeable(report, msgspec.structs.replace(report, loads={"a": 3 * TENTH + 50_000, "b": TENTH}))
    assert noticeable(report, msgspec.structs.replace(report, loads={"a": 3 * TENTH}))
    quiet = LoadReport(loads={"a": 1_000}, round=1)
    assert not noticeable(quiet, msgspec.structs.replace(quiet, loads={}))


def test_the_first_member_that_stays_decides() -> None:
    world, _ = four()
    assert [name for name in "abcd" if decides(world.look(), name)] == ["a"]
    world.members["a"] = msgspec.structs.replace(world.members["a"], leaving=True)
    assert [name for name in "abcd" if decides(world.look(), name)] == ["b"]
    world.round = msgspec.structs.replace(world.round, sealed=False)
    assert not any(decides(world.look(), name) for name in "abcd")


def reported(rig: Rig) -> dict[str, LoadReport]:
    return reports_of(rig.store.read(), KEYS)


def test_a_report_goes_with_a_beat_and_with_its_member() -> None:
    rig = Rig(tuple(queue("q", 4)))
    rig.go_on("a", "b")
    rig.members["a"].report(LoadReport(loads={"q.0": 5}, round=1))
    commits = rig.store.stamp
    rig.go_on("a", rounds=60)
    assert reported(rig) == {"a": LoadReport(loads={"q.0": 5}, round=1)}
    assert all(entry.stamp <= commits + 3 for key, entry in rig.store.entries.items() if key.startswith(KEYS.loads))
    rig.members["a"].leave()
    rig.go_on("a", "b")
    assert not reported(rig)


def test_a_report_whose_commit_failed_is_sent_again() -> None:
    rig = Rig(("x",))
    rig.go_on("a")
    rig.members["a"].report(LoadReport(loads={"x": 5}))
    while not (writes := rig.look("a").writes):
        rig.now += 100
    assert KEYS.load("a") in writes.puts
    rig.go_on("a", rounds=60)
    assert reported(rig) == {"a": LoadReport(loads={"x": 5})}


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_the_report_of_a_dead_member_goes_with_its_record(strategy: str) -> None:
    rig = Rig(tuple(queue("q", 4)), strategy)  # type: ignore[arg-type]
    rig.go_on("a", "b")
    rig.members["b"].report(LoadReport(loads={"q.0": 5}))
    rig.go_on("a", "b", rounds=60)
    assert reported(rig).keys() == {"b"}
    rig.go_on("a", rounds=600)
    assert "b" not in rig.view().members
    assert not reported(rig)


def test_a_round_makes_the_moves_that_it_was_opened_for_where_they_fit() -> None:
    rig = Rig(tuple(queue("q", 4)))
    rig.go_on("a", "b")
    plan = rig.plan()
    mine, other = sorted(plan.owners["a"])[0], sorted(plan.owners["b"])[0]
    swaps = (Move(mine, "a", "b"), Move(other, "b", "a"), Move("q.9", "a", "b"), Move(sorted(plan.owners["b"])[1], "a", "gone"))
    writes = open_round(rig.view(), KEYS, swaps)
    assert rig.store.commit(writes)
    assert not rig.store.commit(writes)
    rig.go_on("a", "b")
    after = rig.plan()
    assert mine in after.owners["b"]
    assert other in after.owners["a"]
    assert after.swapped == 2
    current = rig.view().round
    assert current is not None
    assert (current.sealed, current.moved, current.swaps, current.trigger) == (True, 2, (), "loads are uneven")


def test_records_of_before_have_neither_moves_nor_a_bound() -> None:
    look = read_group(
        View(
            1,
            {
                KEYS.resource: Entry(b'{"items":["q.0"],"strategy":"rounds","era":2,"version":7}', 1),
                KEYS.round: Entry(b'{"number":3,"sealed":true,"trigger":"x"}', 1),
                KEYS.plan: Entry(b'{"round":3,"era":2,"resource_version":7,"owners":{}}', 1),
            },
        ),
        KEYS,
        0,
    )
    assert look.resource is not None
    assert look.round is not None
    assert look.plan is not None
    assert (look.resource.load_moves, look.round.swaps, look.plan.swapped) == (LOAD_MOVES, (), 0)


def test_members_report_through_their_beats_only_what_is_new() -> None:
    member = Member(KEYS, "a")
    rig = Rig(("x",))
    rig.members = {"a": member}
    rig.go_on("a", rounds=80)
    assert not reported(rig)
