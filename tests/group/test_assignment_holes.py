"""Holes of the group's protocol that were found and closed, each as the shortest history that shows it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from simulation import bugs_placing
from simulation.bugs_group import RARE
from simulation.group import ModelStore
from simulation.planting import Bug, planted
from sluiceway.core.group.group_records import (
    MAX_TOLD,
    Decision,
    GroupView,
    Keys,
    Parameters,
    Plan,
    Resource,
    Round,
    Strategy,
    Writes,
    largest_commit,
    read_group,
)
from sluiceway.core.group.item_placement import place
from sluiceway.core.group.member import Member
from sluiceway.core.group.packed_items import pack_owners
from sluiceway.core.group.rounds import next_plan, told
from sluiceway.ports.meta_store import Entry, View

KEYS = Keys("g")
QUICK = Parameters(settle_timeout=0, round_interval=0, beat_interval=500, lease_timeout=2_000, member_timeout=2_500)
LONG = msgspec.structs.replace(QUICK, lease_timeout=20_000, member_timeout=25_000)


class Rig:
    """Members that look and commit only when they are told to. All clocks show the same."""

    def __init__(self, items: tuple[str, ...], strategy: Strategy = "rounds", parameters: Parameters = QUICK) -> None:
        self.store = ModelStore()
        self.now = 1_000
        self.members: dict[str, Member] = {}
        self.put(Resource(items=items, strategy=strategy, parameters=parameters))

    def put(self, resource: Resource) -> None:
        writes = Writes()
        writes.put(KEYS.resource, resource)
        assert self.store.commit(writes)

    def view(self) -> GroupView:
        return read_group(self.store.read(), KEYS, self.now)

    def plan(self) -> Plan:
        plan = self.view().plan
        assert plan is not None
        return plan

    def look(self, name: str) -> Decision:
        self.now += 10
        return self.members.setdefault(name, Member(KEYS, name)).look(self.view())

    def go_on(self, *names: str, rounds: int = 40) -> None:
        """Let those look and commit, in turns."""
        for _ in range(rounds):
            for name in names:
                writes = self.look(name).writes
                if writes is not None:
                    self.store.commit(writes)


def test_an_item_that_was_out_of_the_plan_waits_for_who_may_still_serve_it() -> None:
    rig = Rig(("x",), parameters=LONG)
    rig.go_on("a", "b")
    assert rig.look("a").owned.keys() == {"x"}
    rig.members["a"].leave()
    rig.members["b"].leave()
    rig.go_on("a", rounds=1)
    assert rig.view().members["a"].leaving
    # A does not look for a while and goes on serving. B seals a plan without owners and goes; then C comes.
    rig.go_on("b")
    assert not rig.plan().owners
    rig.go_on("c")
    assert "x" in rig.plan().owners["c"]
    assert not rig.look("c").owned
    rig.go_on("a", "c")
    assert rig.look("c").owned.keys() == {"x"}


def test_a_shorter_lease_binds_from_when_it_is_asked_for() -> None:
    rig = Rig(("x",), parameters=LONG)
    rig.go_on("a")
    rig.put(Resource(items=("x",), parameters=QUICK, version=2))
    decision = rig.look("a")
    assert decision.writes is not None
    assert decision.owned
    assert decision.lease_deadline <= rig.now + QUICK.lease_timeout
    # It is not known whether that was recorded.
    assert rig.look("a").lease_deadline <= rig.now + QUICK.lease_timeout


def test_a_member_that_has_not_seen_the_shorter_times_is_judged_by_the_longer_ones() -> None:
    rig = Rig(("x", "y"), parameters=LONG)
    rig.go_on("a", "b")
    deadline = rig.look("a").lease_deadline
    rig.put(Resource(items=("x", "y"), parameters=QUICK, version=2))
    while rig.now < deadline - 100:
        rig.go_on("b", rounds=1)
    assert "a" in rig.view().members


def test_what_was_given_back_in_vain_is_not_served_again_under_the_same_token() -> None:
    rig = Rig(("x", "y"), "claims")
    rig.go_on("a", rounds=5)
    before = rig.look("a").owned
    rig.go_on("b", rounds=1)
    giving = rig.look("a")
    (given,) = before.keys() - giving.owned.keys()
    assert giving.writes is not None
    # B goes, so there is no reason any more; but the commit may land yet.
    writes = Writes(deletes=[KEYS.member("b")])
    assert rig.store.commit(writes)
    assert rig.look("a").owned.keys() == giving.owned.keys()
    rig.store.commit(giving.writes)
    rig.go_on("a", rounds=5)
    assert rig.look("a").owned[given] > before[given]


def test_a_member_whose_record_may_yet_go_serves_nothing() -> None:
    rig = Rig(("x", "y"))
    rig.go_on("b")
    # A joins, and marks itself in the round that it opens. That is on its way while it decides to go.
    rig.go_on("a", rounds=1)
    while (marking := rig.look("a").writes) is None or not any(key.startswith(KEYS.marks) for key in marking.puts):
        rig.now += 100
        if marking is not None:
            rig.store.commit(marking)
    rig.members["a"].leave()
    going = rig.look("a")
    assert going.writes is not None
    assert going.writes.deletes == KEYS.all_of("a")
    assert rig.store.commit(marking)
    rig.go_on("b", rounds=5)
    assert "a" in rig.plan().owners
    assert not rig.store.commit(going.writes)
    again = rig.look("a")
    assert not again.owned
    assert again.writes is not None
    assert rig.store.commit(again.writes)
    rig.go_on("b")
    assert rig.look("b").owned.keys() == {"x", "y"}


def test_a_beat_that_was_not_recorded_is_no_lease() -> None:
    rig = Rig(("x",))
    rig.go_on("a")
    deadline = rig.look("a").lease_deadline
    while rig.now < deadline - 20:
        assert rig.look("a").lease_deadline == deadline


def test_a_member_that_beats_after_all_is_not_given_up() -> None:
    rig = Rig(("x", "y"))
    rig.go_on("a", "b")
    rig.now += QUICK.beat_interval
    beat = rig.look("a").writes
    assert beat is not None
    assert beat.puts.keys() == {KEYS.member("a")}
    # It is on its way for so long that B goes on without A.
    while (sealing := rig.look("b").writes) is None or KEYS.plan not in sealing.puts:
        if sealing is not None:
            rig.store.commit(sealing)
    assert KEYS.member("a") in sealing.deletes
    assert rig.store.commit(beat)
    assert not rig.store.commit(sealing)


def test_what_a_dead_member_had_goes_to_those_who_expect_it_though_a_newcomer_is_there() -> None:
    """They are prepared for it. The newcomer gets its share a round later."""
    rig = Rig(("v", "w", "x", "y"))
    rig.go_on("a", "b")
    theirs = rig.plan().owners["a"].keys()
    expected = set[str]()
    while "a" in rig.view().members:
        rig.go_on("b", "c", rounds=1)
        expected |= rig.look("b").expected
        assert not rig.look("c").expected
    assert expected == theirs
    assert rig.plan().owners.keys() == {"b"}
    rig.go_on("b", "c")
    assert {name: len(items) for name, items in rig.plan().owners.items()} == {"b": 2, "c": 2}


def test_newcomers_take_over_where_nobody_else_is_left() -> None:
    rig = Rig(("x",))
    rig.go_on("a")
    while "a" in rig.view().members:
        rig.go_on("b", rounds=1)
    assert rig.plan().owners.keys() == {"b"}


def test_who_had_an_item_before_the_last_owner_is_waited_for() -> None:
    rig = Rig(("x",), parameters=LONG)
    rig.go_on("a", "b", "c")
    assert rig.look("a").owned.keys() == {"x"}
    rig.members["a"].leave()
    rig.go_on("a", rounds=1)
    # A says nothing for a while and goes on serving; B gets the item, cannot serve it yet, and leaves too.
    rig.go_on("b", "c")
    assert "b" in rig.plan().owners
    assert not rig.look("b").owned
    rig.members["b"].leave()
    rig.go_on("b", "c")
    assert rig.plan().owners["c"].keys() == {"x"}
    assert not rig.look("c").owned
    rig.go_on("a", "c")
    assert rig.look("c").owned.keys() == {"x"}


def test_nothing_is_claimed_from_a_member_that_is_back() -> None:
    rig = Rig(("x",), "claims")
    rig.go_on("a")
    rig.go_on("b", rounds=5)
    while "a" in rig.view().members:
        rig.go_on("b", rounds=1)
    claiming = rig.look("b").writes
    assert claiming is not None
    assert KEYS.claims + "x" in claiming.puts
    rig.go_on("a", rounds=2)
    assert rig.look("a").owned.keys() == {"x"}
    assert not rig.store.commit(claiming)


def test_an_item_that_is_placed_again_waits_for_who_may_still_serve_it() -> None:
    rig = Rig(("x", "y", "z"), parameters=LONG)
    rig.go_on("a", "b")
    assert "x" in rig.look("a").owned
    rig.put(Resource(items=("y", "z"), parameters=LONG, version=2))
    while "a" not in rig.view().marks:
        rig.go_on("a", "b", rounds=1)
    # A says nothing for a while and goes on serving.
    rig.go_on("b", rounds=5)
    assert "x" not in rig.plan().owners["a"]
    assert rig.store.commit(place(rig.view(), KEYS, ["w", "x"]))
    rig.go_on("b", rounds=5)
    assert "x" in rig.plan().owners["b"]
    assert "x" not in rig.look("b").owned
    rig.go_on("a", rounds=5)
    assert "x" not in rig.look("a").owned
    assert "x" in rig.look("b").owned


def test_an_item_that_is_placed_again_has_a_greater_token() -> None:
    rig = Rig(("x", "y"))
    rig.go_on("a")
    rig.go_on("a", "b")
    (item, token), *_ = rig.look("b").owned.items()
    rig.put(Resource(items=tuple({"x", "y"} - {item}), parameters=QUICK, version=2))
    rig.go_on("a", "b")
    # Nobody is waited for any more after another round.
    rig.go_on("a", "b", "c")
    writes = place(rig.view(), KEYS, [item])
    assert KEYS.plan in writes.puts
    assert rig.store.commit(writes)
    owned = {**rig.look("a").owned, **rig.look("b").owned, **rig.look("c").owned}
    assert owned[item] > token


SHOWN_BY = {
    "begins_with_the_first_grant": test_an_item_that_is_placed_again_has_a_greater_token,
    "claims_from_a_member_that_is_back": test_nothing_is_claimed_from_a_member_that_is_back,
    "forgets_who_serves_what_is_not_in_the_plan": test_an_item_that_was_out_of_the_plan_waits_for_who_may_still_serve_it,
    "serves_by_its_old_lease_after_asking_for_a_shorter_one": test_a_shorter_lease_binds_from_when_it_is_asked_for,
    "forgets_that_a_beat_may_end_its_lease": test_a_shorter_lease_binds_from_when_it_is_asked_for,
    "keeps_what_it_was_giving_back": test_what_was_given_back_in_vain_is_not_served_again_under_the_same_token,
    "stays_when_it_was_going": test_a_member_whose_record_may_yet_go_serves_nothing,
    "takes_every_beat_for_recorded": test_a_beat_that_was_not_recorded_is_no_lease,
    "gives_up_a_member_that_beats_after_all": test_a_member_that_beats_after_all_is_not_given_up,
    "forgets_who_had_it_before_the_last_owner": test_who_had_an_item_before_the_last_owner_is_waited_for,
    "waits_for_nobody_from_an_earlier_plan": test_who_had_an_item_before_the_last_owner_is_waited_for,
}


@pytest.mark.parametrize("bug", [*RARE, *bugs_placing.RARE], ids=lambda bug: bug.name)
def test_each_rare_bug_is_shown_by_its_history(bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        SHOWN_BY[bug.name]()


def _look(members: Iterable[str], marks: Iterable[str], plan: Plan, resource: Resource) -> GroupView:
    rig = Rig(resource.items)
    view = rig.store.read()
    record = msgspec.json.encode({"beat": 1, "lease_timeout": 1, "applied": 0})
    entries = dict(view.entries) | {KEYS.member(name): Entry(record, 1) for name in members}
    entries |= {KEYS.mark(10**9, name): Entry(b"", 1) for name in marks}
    entries[KEYS.plan] = Entry(msgspec.json.encode(plan), 1)
    entries[KEYS.round] = Entry(msgspec.json.encode(Round(number=10**9, sealed=False, trigger="x" * 300)), 1)
    return read_group(View(1, entries), KEYS, 1)


def test_the_largest_commit_is_as_large_as_it_may_get() -> None:
    items, before = [tuple(f'{kind}"\\{n:060}' for n in range(2_000)) for kind in "ab"]
    old, new = [[f"{kind}{n:03}".ljust(140, "-") for n in range(100)] for kind in "on"]
    plan = Plan(
        round=10**9 - 1, era=1, resource_version=1, owners={name: dict.fromkeys(before[at::100], 10**9 - 2) for at, name in enumerate(old)}
    )
    resource = Resource(items=items)
    look = _look([*old, *new], [*old, *new], plan, resource)
    after, moved = next_plan(look, resource, 10**9, new, [])
    assert moved == len(items)
    assert sum(map(len, after.waits.values())) == len(before)
    keys = [KEYS.mark(10**9, name) for name in [*old, *new]] + [KEYS.member(name) for name in old]
    packed = pack_owners(after.owners, after.waits)
    size = len(msgspec.msgpack.encode(packed)) + sum(map(len, keys)) + sum(len(name) + 3 for name in new)
    noted = len(msgspec.json.encode(tuple(told(plan, after))))
    assert MAX_TOLD - 400 < noted <= MAX_TOLD + 2
    assert size + noted < largest_commit(KEYS, items, before) < 3 * size
