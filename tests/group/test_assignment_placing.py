"""Items that join a group and leave it without a round; how a group begins, and goes from one strategy to another."""

from __future__ import annotations

import string
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.group import ModelStore
from sluiceway.core.group.group_records import (
    Claim,
    GroupReader,
    GroupView,
    Keys,
    MemberRecord,
    Parameters,
    Plan,
    Resource,
    Round,
    Strategy,
    Token,
    Writes,
    owners,
    read_group,
    rounds_of,
)
from sluiceway.core.group.item_placement import MAX_CLAIM_WRITES, begin, era_of, place, remove
from sluiceway.core.group.plan import moves, sticky
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS
from tests.group.test_assignment_holes import KEYS, QUICK, Rig

SOME = ("x1", "x2", "x3", "x4", "x5")


def settled(*names: str, items: tuple[str, ...] = SOME, strategy: Strategy = "rounds") -> Rig:
    rig = Rig(items, strategy)
    rig.go_on(*names)
    assert owned(rig, *names).keys() == set(items)
    return rig


def owned(rig: Rig, *names: str) -> dict[str, tuple[str, Token]]:
    """What each of those would serve now."""
    return {item: (name, token) for name in names for item, token in rig.look(name).owned.items()}


def commit(rig: Rig, writes: Writes) -> None:
    assert writes.puts
    assert rig.store.commit(writes)


def number(rig: Rig) -> int:
    current = rig.view().round
    assert current is not None
    return current.number


# ---- placing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_new_items_are_owned_at_once_and_nothing_else_moves(strategy: Strategy) -> None:
    rig = settled("a", "b", "c", strategy=strategy)
    before = owned(rig, "a", "b", "c")
    commit(rig, place(rig.view(), KEYS, ["n1", "n2", "n3", "n4"]))
    after = owned(rig, "a", "b", "c")
    assert after.keys() == {*SOME, "n1", "n2", "n3", "n4"}
    assert {item: after[item] for item in SOME} == before
    assert sorted(Counter(name for name, _ in after.values()).values()) == [3, 3, 3]
    assert len({after[item][0] for item in ("n1", "n2", "n3")}) == 3


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_removed_items_are_nobody_s_at_the_next_look(strategy: Strategy) -> None:
    rig = settled("a", "b", strategy=strategy)
    before = owned(rig, "a", "b")
    commit(rig, remove(rig.view(), KEYS, ["x1", "x4", "never there"]))
    assert owned(rig, "a", "b") == {item: owner for item, owner in before.items() if item in ("x2", "x3", "x5")}


def test_neither_is_a_reason_for_a_round() -> None:
    rig = settled("a", "b", "c")
    rounds = number(rig)
    commit(rig, place(rig.view(), KEYS, ["n1", "n2"]))
    rig.go_on("a", "b", "c")
    commit(rig, remove(rig.view(), KEYS, ["x2"]))
    rig.go_on("a", "b", "c")
    assert number(rig) == rounds


def test_a_placed_item_that_moves_gets_a_greater_token() -> None:
    rig = settled("a")
    commit(rig, place(rig.view(), KEYS, ["n1"]))
    before = owned(rig, "a")
    rig.members["a"].leave()
    rig.go_on("b", "a")
    after = owned(rig, "b")
    assert after.keys() == before.keys()
    assert all(after[item][1] > token for item, (_, token) in before.items())


def test_placing_while_a_round_is_open_is_followed_by_it() -> None:
    rig = settled("a", "b")
    current = rig.view().round
    assert current is not None
    writes = Writes(checks={KEYS.round: rig.view().stamp(KEYS.round)})
    writes.put(KEYS.round, Round(number=current.number + 1, sealed=False, trigger="a test", participants=current.participants))
    commit(rig, writes)
    commit(rig, place(rig.view(), KEYS, ["n1"]))
    assert "n1" in owned(rig, "a", "b")
    rig.go_on("a", "b")
    assert rig.plan().round == current.number + 1
    assert "n1" in owned(rig, "a", "b")


def test_a_plan_that_was_made_meanwhile_is_not_overwritten() -> None:
    rig = settled("a", "b")
    writes = place(rig.view(), KEYS, ["n1"])
    rig.go_on("a", "b", "c")
    assert not rig.store.commit(writes)


def test_what_was_placed_meanwhile_is_not_overwritten_by_a_seal() -> None:
    rig = settled("a", "b")
    rig.look("c")
    sealing: Writes | None = None
    while sealing is None:
        for name in ("a", "b", "c"):
            writes = rig.look(name).writes
            if writes is not None and KEYS.plan in writes.puts:
                sealing = writes
                break
            if writes is not None:
                rig.store.commit(writes)
    commit(rig, place(rig.view(), KEYS, ["n1"]))
    assert not rig.store.commit(sealing)


def test_without_a_plan_the_round_gives_the_items_away() -> None:
    rig = Rig(SOME)
    writes = place(rig.view(), KEYS, ["n1"])
    assert writes.puts.keys() == {KEYS.resource}
    commit(rig, writes)
    rig.go_on("a")
    assert "n1" in owned(rig, "a")


def test_a_plan_of_another_version_of_the_resource_is_left_to_the_round() -> None:
    rig = settled("a")
    rig.put(Resource(items=(*SOME, "other"), parameters=QUICK, version=2))
    assert place(rig.view(), KEYS, ["n1"]).puts.keys() == {KEYS.resource}
    assert remove(rig.view(), KEYS, ["x1"]).puts.keys() == {KEYS.resource}


def test_who_leaves_gets_nothing_new() -> None:
    rig = settled("a", "b", items=("x1", "x2", "x3"))
    rig.members["b"].leave()
    while not rig.view().members["b"].leaving:
        rig.go_on("b", rounds=1)
    # B has fewer.
    commit(rig, place(rig.view(), KEYS, ["n1"]))
    assert owners(rig.view())["n1"] == "a"


def test_who_has_not_been_seen_for_a_while_gets_nothing_new_while_there_are_others() -> None:
    rig = settled("a", "b", items=("x1", "x2", "x3"))
    for _ in range(QUICK.lease_timeout // 2 // 10 + 1):
        rig.go_on("a", rounds=1)
    look = rig.view()
    late = rig.members["a"].late(look, rig.now)
    assert late == {"b"}
    assert "n1" in read_plan(place(look, KEYS, ["n1"], late)).owners["a"]
    assert "n1" in read_plan(place(look, KEYS, ["n1"], ["a", "b"])).owners["b"]


def test_what_it_has_already_is_not_written() -> None:
    rig = settled("a")
    assert not place(rig.view(), KEYS, ["x1", "x2"]).puts
    assert not remove(rig.view(), KEYS, ["n1"]).puts


def read_plan(writes: Writes) -> Plan:
    return msgspec.json.decode(writes.puts[KEYS.plan], type=Plan)


def read_resource(writes: Writes) -> Resource:
    return msgspec.json.decode(writes.puts[KEYS.resource], type=Resource)


names_of_items = st.sets(st.integers(0, 99).map(lambda n: f"q{n // 4:02}.{n % 4}"), max_size=60)


@st.composite
def looks(draw: st.DrawFn) -> GroupView:
    """A group at rest after a round, and after some placing and removing."""
    members = [f"m{n}" for n in range(draw(st.integers(1, 9)))]
    items = sorted(draw(names_of_items))
    current = {item: draw(st.sampled_from(members)) for item in items}
    if draw(st.booleans()):
        current = sticky(items, members, current)
    given_to: dict[str, dict[str, int]] = {}
    for item, name in current.items():
        given_to.setdefault(name, {})[item] = draw(st.integers(1, 7))
    store = ModelStore()
    writes = Writes()
    writes.put(KEYS.resource, Resource(items=tuple(items), version=5, parameters=QUICK))
    writes.put(KEYS.plan, Plan(round=7, era=1, resource_version=5, owners=given_to))
    writes.put(KEYS.round, Round(number=7, sealed=True, trigger="x", participants=tuple(members)))
    for name in members:
        writes.put(KEYS.member(name), MemberRecord(beat=1, lease_timeout=QUICK.lease_timeout, applied=7, era=1))
    assert store.commit(writes)
    return read_group(store.read(), KEYS, 1_000)


def after(look: GroupView, writes: Writes) -> GroupView:
    store = ModelStore()
    store.stamp, store.entries = look.view.stamp, dict(look.view.entries)
    assert store.commit(writes)
    return read_group(store.read(), KEYS, 1_000)


def spread(look: GroupView) -> int:
    has = Counter(owners(look).values())
    counts = [has[name] for name in look.members]
    return max(counts) - min(counts)


@given(looks(), st.sets(st.integers(0, 60).map(lambda n: f"new{n:02}"), min_size=1))
def test_placing_keeps_what_is_even_even_and_moves_nothing(before: GroupView, new: set[str]) -> None:
    placed = after(before, place(before, KEYS, sorted(new)))
    had, has = owners(before), owners(placed)
    assert before.resource is not None
    assert placed.resource is not None
    assert placed.plan is not None
    assert {item: has[item] for item in had} == had
    assert has.keys() == had.keys() | new == set(placed.resource.items)
    assert placed.plan.resource_version == placed.resource.version == before.resource.version + 1
    assert placed.plan.round == 7
    assert spread(placed) <= max(spread(before), 1)
    given_now = Counter(has[item] for item in new)
    counts = [given_now[name] for name in placed.members]
    assert max(counts) - min(counts) <= 1
    if spread(placed) <= 1:
        assert moves(sticky(placed.resource.items, placed.members, has), has) == 0


@given(looks(), names_of_items)
def test_removing_moves_nothing(before: GroupView, gone: set[str]) -> None:
    had = owners(before)
    writes = remove(before, KEYS, gone)
    if not writes.puts:
        assert had.keys().isdisjoint(gone)
        return
    left = after(before, writes)
    assert left.resource is not None
    assert left.plan is not None
    assert owners(left) == {item: name for item, name in had.items() if item not in gone}
    assert sorted(owners(left)) == list(left.resource.items)
    assert left.plan.resource_version == left.resource.version
    assert all(left.plan.owners.values())


# ---- bounds -----------------------------------------------------------------------------------------------------


def test_more_items_than_a_plan_can_hold_are_refused() -> None:
    rig = settled("a", items=())
    commit(rig, place(rig.view(), KEYS, [f"{n:016}" for n in range(30_000)]))
    with pytest.raises(SluicewayError, match=r"items.*a commit holds 1048576.*divide"):
        place(rig.view(), KEYS, [f"x{n:015}" for n in range(5_000)])


def test_a_bad_item_is_refused() -> None:
    rig = settled("a")
    with pytest.raises(SluicewayError, match="items"):
        place(rig.view(), KEYS, ["n\n"])


def test_a_commit_that_would_be_too_large_is_left_to_the_round() -> None:
    rig = settled("a", "b", items=())
    letters, random = string.ascii_letters + string.digits + "!#$%&()*+-.:", Random(1)
    # Both records have the names, which compression makes hardly smaller.
    long = ["".join(random.choices(letters, k=200)) for _ in range(3_600)]
    placing = place(rig.view(), KEYS, long)
    assert placing.puts.keys() == {KEYS.resource}
    commit(rig, placing)
    rig.go_on("a", "b")
    look = rig.view()
    assert look.plan is not None
    assert sum(map(len, look.plan.owners.values())) == len(long)
    assert place(rig.view(), KEYS, ["n1"]).puts.keys() == {KEYS.resource}
    assert remove(rig.view(), KEYS, long[:1]).puts.keys() == {KEYS.resource}


def test_placing_and_removing_leave_room_in_the_commit() -> None:
    many = [f"{n:016}" for n in range(1_000)]
    rig = settled("a", items=("x",), strategy="claims")
    placing = place(rig.view(), KEYS, many)
    assert len(placing.puts) == MAX_CLAIM_WRITES + 1 < MAX_COMMIT_KEYS
    commit(rig, placing)
    rig.go_on("a")
    assert owned(rig, "a").keys() == {"x", *many}
    removing = remove(rig.view(), KEYS, many)
    assert len(removing.deletes) == MAX_CLAIM_WRITES


def test_both_records_of_a_full_group_fit_into_one_commit() -> None:
    rig = settled("a", items=())
    writes = place(rig.view(), KEYS, [f"{n:016}" for n in range(30_000)])
    assert writes.puts.keys() == {KEYS.resource, KEYS.plan}
    assert sum(map(len, writes.puts.values())) < MAX_COMMIT_BYTES


# ---- claims -----------------------------------------------------------------------------------------------------


def test_removed_items_leave_no_claims_behind() -> None:
    rig = settled("a", "b", strategy="claims")
    commit(rig, remove(rig.view(), KEYS, SOME))
    rig.go_on("a", "b")
    assert not rig.view().claims


def test_an_item_that_is_removed_while_it_is_claimed_leaves_no_claim_behind() -> None:
    rig = Rig(("x",), "claims")
    while (claiming := rig.look("a").writes) is None or KEYS.claims + "x" not in claiming.puts:
        if claiming is not None:
            rig.store.commit(claiming)
    commit(rig, remove(rig.view(), KEYS, ["x"]))
    assert not rig.store.commit(claiming)
    rig.go_on("a")
    assert not rig.view().claims


def test_a_claim_that_is_there_is_left_to_the_members() -> None:
    rig = settled("a", "b", strategy="claims")
    rig.put(Resource(items=SOME[1:], strategy="claims", parameters=QUICK, version=2))
    rig.go_on("a", "b")
    before = rig.view().claims["x1"]
    commit(rig, place(rig.view(), KEYS, ["x1"]))
    assert rig.view().claims["x1"] == before
    rig.go_on("a", "b")
    assert rig.view().claims["x1"].grant > before.grant


# ---- beginning --------------------------------------------------------------------------------------------------


def begun(store: ModelStore, strategy: Strategy, items: tuple[str, ...] = SOME, **options: bool | int) -> Resource:
    entry = store.read().entries.get(KEYS.resource)
    resource, writes = begin(KEYS, entry, items, strategy, **options)  # type: ignore[arg-type]
    if writes.puts:
        assert store.commit(writes)
    assert era_of(store.read().entries[KEYS.resource]) == resource.era
    return resource


def test_each_change_of_strategy_begins_an_era() -> None:
    store = ModelStore()
    assert era_of(None) == 1
    assert begun(store, "rounds", first_era=2).era == 2
    assert begun(store, "rounds", first_era=2).era == 2
    assert begun(store, "static").era == 3
    assert begun(store, "claims").era == 4
    assert begun(store, "claims", ("other",)).era == 4


def test_what_is_so_already_is_not_written_but_checked() -> None:
    store = ModelStore()
    begun(store, "rounds")
    entry = store.read().entries[KEYS.resource]
    resource, writes = begin(KEYS, entry, SOME, "rounds")
    assert (writes.puts, writes.checks) == ({}, {KEYS.resource: entry.stamp})
    assert resource.version == 1


def test_a_restore_begins_an_era_that_no_change_before_it_can_have_reached() -> None:
    store = ModelStore()
    begun(store, "rounds", first_era=2)
    restored = begun(store, "rounds", restored=True)
    assert restored.era >= 2 + 100
    assert restored.version == 2
    assert begun(store, "claims", restored=True).era > restored.era


def test_the_times_stay_as_they_are_unless_others_are_given() -> None:
    store = ModelStore()
    writes = begin(KEYS, None, SOME, "rounds", QUICK)[1]
    store.commit(writes)
    assert begun(store, "static").parameters == QUICK
    assert begin(KEYS, None, SOME, "rounds")[0].parameters == Parameters()


def test_static_gives_nobody_anything_and_the_way_back_is_a_new_era() -> None:
    rig = settled("a", "b")
    before = owned(rig, "a", "b")
    begun(rig.store, "static")
    assert not owned(rig, "a", "b")
    assert not owners(rig.view())
    commit(rig, place(rig.view(), KEYS, ["n1"]))
    commit(rig, remove(rig.view(), KEYS, ["x1"]))
    rig.go_on("a", "b")
    assert not owned(rig, "a", "b")
    begun(rig.store, "rounds", (*SOME, "n1"))
    rig.go_on("a", "b")
    again = owned(rig, "a", "b")
    assert again.keys() == {*SOME, "n1"}
    assert all(again[item][1] > token for item, (_, token) in before.items())


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_a_member_of_a_static_group_can_leave(strategy: Strategy) -> None:
    rig = settled("a", "b", strategy=strategy)
    begun(rig.store, "static")
    rig.go_on("a", "b", rounds=1)
    rig.members["a"].leave()
    rig.go_on("a", rounds=3)
    assert rig.look("a").left
    begun(rig.store, strategy)
    rig.go_on("b")
    assert owned(rig, "b").keys() == set(SOME)


# ---- looking ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_owners_are_those_who_serve_once_all_is_at_rest(strategy: Strategy) -> None:
    rig = settled("a", "b", "c", strategy=strategy)
    assert owners(rig.view()) == {item: name for item, (name, _) in owned(rig, "a", "b", "c").items()}
    gone = Writes(deletes=[KEYS.member("b")])
    rig.store.commit(gone)
    assert "b" not in owners(rig.view()).values()
    assert len(owners(rig.view())) < len(SOME)


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_the_plan_of_another_era_has_no_owners(strategy: Strategy) -> None:
    rig = settled("a", strategy="rounds")
    begun(rig.store, "claims")
    begun(rig.store, strategy)
    assert owners(rig.view()) == {}
    assert owners(read_group(ModelStore().read(), KEYS, 0)) == {}


def test_a_record_is_decoded_again_only_if_it_has_changed() -> None:
    rig = settled("a", "b", strategy="claims")
    reader = GroupReader(KEYS)
    first = reader.read(rig.store.read(), 1)
    writes = Writes()
    writes.put(KEYS.claims + "x1", Claim(owner="b", grant=9))
    rig.store.commit(writes)
    rig.store.commit(Writes(deletes=[KEYS.claims + "x2"]))
    second = reader.read(rig.store.read(), 2)
    assert second == read_group(rig.store.read(), KEYS, 2)
    assert second.resource is first.resource
    assert second.members["a"] is first.members["a"]
    assert second.claims["x3"] is first.claims["x3"]
    assert second.claims["x1"] == Claim(owner="b", grant=9)
    assert "x2" not in second.claims


def test_the_last_hundred_rounds_are_kept() -> None:
    rig = settled("a", "b")
    rounds = rounds_of(rig.store.read(), KEYS)
    assert [(noted.number, noted.trigger, noted.moved, noted.kept) for noted in rounds][-1] == (1, "the group is new", 5, 0)
    assert rounds[0].participants == ("a", "b")
    assert rounds[0].sealed_by in ("a", "b")
    assert all(noted.duration >= 0 for noted in rounds)
    for version in range(2, 130):
        rig.put(Resource(items=SOME[: 1 + version % 5], parameters=QUICK, version=version))
        rig.go_on("a", "b", rounds=5)
    rounds = rounds_of(rig.store.read(), KEYS)
    assert [noted.number for noted in rounds] == list(range(number(rig), number(rig) - 100, -1))
    assert not any(key.startswith(KEYS.prefix) for key in rig.store.read().prefix(KEYS.history))


def test_two_groups_do_not_mix_their_histories() -> None:
    assert not Keys("ga").history.startswith(Keys("g").history)
