"""What a member shows of its group to the process that it is in: each look, and that one has been carried out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import msgspec
import pytest

from simulation.group import ModelStore
from sluiceway.cluster.group_member import Change
from sluiceway.core.group.group_records import (
    GroupReader,
    GroupView,
    Keys,
    MemberRecord,
    Resource,
    Round,
    Strategy,
    Writes,
    owners,
    put_member,
    read_group,
)
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.item_placement import place, remove
from sluiceway.core.group.member import Member
from sluiceway.group import GroupMember, MetaStore, define
from sluiceway.kernel.compatibility import Levels
from sluiceway.model.meta import View
from sluiceway.ports.meta_store import Stamp
from tests.group.test_group_member import ITEMS, QUICK, Notes, group_of, until
from tests.server.server_process import PATIENCE

KEYS = Keys("exporters")


async def changed(store: MetaStore, placed: list[str], removed: list[str]) -> Stamp:
    """Place those and remove these, by a process that is no member."""
    look = read_group(await store.read(prefixes=[KEYS.prefix]), KEYS, 0)
    writes = place(look, KEYS, placed) if placed else remove(look, KEYS, removed)
    assert writes.puts.keys() != {KEYS.resource} or writes.deletes
    return await store.commit(writes.checks, puts=writes.puts, deletes=writes.deletes)


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_when_it_has_refreshed_its_handler_has_been_told(strategy: Strategy) -> None:
    async def story() -> None:
        async with group_of("memory:", 0) as group:
            await define(group.store, "exporters", ITEMS, strategy=strategy)
            await group.join(2)
            await until(lambda: group.divided(0, 1))
            for n in range(5):
                stamp = await changed(group.store, [f"new-{n}", f"newer-{n}"], [])
                await asyncio.gather(*(member.refresh(stamp) for member in group.members))
                assert {f"new-{n}", f"newer-{n}"} <= group.told().keys()
            stamp = await changed(group.store, [], ["new-3"])
            await asyncio.gather(*(member.refresh(stamp) for member in group.members))
            assert "new-3" not in group.told()
            await group.members[0].refresh(0)

    asyncio.run(story())


def test_who_waits_for_a_look_is_let_go_when_the_member_stops() -> None:
    async def story() -> None:
        async with group_of("memory:", 1) as group:
            waiting = asyncio.create_task(group.members[0].refresh(10**9))
            await asyncio.sleep(0)
            await group.members[0].stop()
            async with asyncio.timeout(PATIENCE):
                await waiting
                await group.members[0].refresh(10**9)

    asyncio.run(story())


def test_each_look_that_shows_something_new_is_told_before_what_follows_from_it() -> None:
    shown: list[GroupView] = []

    async def story() -> None:
        async with group_of("memory:", 1) as group:
            told: list[str] = []

            def tell(change: Change) -> None:
                # It is known here already who has it.
                assert owners(shown[-1]).get(change.item) == member.name
                told.append(change.item)

            member = GroupMember(group.store, "exporters", tell, address="http://here:1", on_look=shown.append)
            await member.join()
            await until(lambda: bool(told))
            assert member.look is not None
            assert member.look.members[member.name].address == "http://here:1"
            pairs = list(itertools.pairwise(shown))
            assert all(
                one.plan != two.plan or one.resource != two.resource or one.members.keys() != two.members.keys() for one, two in pairs
            )
            # It beats, which is nothing new.
            count, stamp = len(shown), member.look.view.stamp
            await until(lambda: member.look is not None and member.look.view.stamp >= stamp + 4)
            assert len(shown) == count
            await member.stop()

    asyncio.run(story())


def test_what_is_called_at_each_look_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    def fails(look: GroupView) -> None:
        raise ValueError("not today")

    async def story() -> None:
        async with group_of("memory:", 0) as group:
            notes = Notes()
            member = GroupMember(group.store, "exporters", notes, on_look=fails)
            await member.join()
            await until(lambda: notes.items.keys() == set(ITEMS))
            assert "not today" in caplog.text
            await member.stop()

    asyncio.run(story())


def test_what_a_member_has_whose_lease_has_run_out_is_expected_by_those_that_then_get_it() -> None:
    async def story() -> None:
        async with group_of("memory:", 0) as group:
            await define(group.store, "exporters", ITEMS, parameters=msgspec.structs.replace(QUICK, member_timeout=600_000))
            expected: list[set[str]] = [set(), set(), set()]
            for each in expected:
                group.notes.append(Notes())
                group.members.append(GroupMember(group.store, "exporters", group.notes[-1], on_expect=each.update))
                await group.members[-1].join()
            await until(lambda: group.divided(0, 1, 2))
            had = [set(notes.items) for notes in group.notes]
            await group.members[0].stop()
            await until(lambda: expected[1] | expected[2] == had[0])
            assert group.divided(1, 2) is False, "it is not given up"
            await define(group.store, "exporters", ITEMS, parameters=QUICK)
            await until(lambda: group.divided(1, 2))
            assert [set(notes.items) - before for notes, before in zip(group.notes, had, strict=True)][1:] == expected[1:]
            assert expected[0] == set()

    asyncio.run(story())


def test_after_a_time_without_looks_nobody_is_taken_for_dead_at_once() -> None:
    """When the meta store comes back, each member sees the others' old records first."""
    resource = Resource(items=tuple(ITEMS), parameters=QUICK)
    there = {name: MemberRecord(beat=1, lease_timeout=QUICK.lease_timeout) for name in ("here", "there")}
    beating = Beating(KEYS, "here")

    def look(at: int) -> frozenset[str]:
        seen = GroupView(View(at, {}), at, resource, None, None, there, frozenset(), {})
        beating.note(seen)
        return beating.lapsed(seen)

    step, lease = QUICK.lease_timeout // 2, QUICK.lease_timeout
    assert [look(at) for at in range(0, lease + 1, step)] == [frozenset(), frozenset(), {"there"}]
    back = 10 * lease
    assert [look(at) for at in range(back, back + lease + 1, step)] == [frozenset(), frozenset(), {"there"}]


def test_who_has_marked_itself_in_an_open_round_stays_until_it_is_sealed_without_it() -> None:
    """Otherwise the plan could name a member that has gone."""
    there = MemberRecord(beat=1, lease_timeout=QUICK.lease_timeout)
    resource = Resource(items=tuple(ITEMS), parameters=QUICK)
    member = Member(KEYS, "here")

    def writes(at: int, marks: frozenset[str]) -> tuple[list[str], bool]:
        current = Round(number=2, sealed=not marks, trigger="another has joined", participants=("another",))
        look = GroupView(View(at, {}), at, resource, current, None, {"here": there, "another": there}, marks, {})
        found = member.look(look).writes
        assert found is not None
        return found.deletes, KEYS.member("here") in found.puts

    member.leave()
    # It says that it is leaving, so that the seal leaves it out.
    assert writes(0, frozenset({"here", "another"})) == ([], True)
    assert writes(1, frozenset()) == (KEYS.all_of("here"), False)


def test_a_member_that_says_nothing_any_more_is_late_long_before_it_is_given_up() -> None:
    async def story() -> None:
        async with group_of("memory:", 0) as group:
            await define(group.store, "exporters", ITEMS, parameters=msgspec.structs.replace(QUICK, member_timeout=600_000))
            await group.join(2)
            assert group.members[1].late() == frozenset()
            await until(lambda: group.divided(0, 1))
            await group.members[0].stop()
            await until(lambda: group.members[1].late() == {group.members[0].name})
            assert group.members[1].look is not None
            assert group.members[0].name in group.members[1].look.members

    asyncio.run(story())


def test_after_a_restore_tokens_are_greater_than_any_before() -> None:
    async def story() -> None:
        async with group_of("memory:", 0) as group:
            before = await define(group.store, "exporters", ITEMS)
            restored = await define(group.store, "exporters", ITEMS, restored=True)
            assert restored.era > before.era + 1
            assert restored.parameters == QUICK
            await group.join()
            await until(lambda: group.divided(0))
            assert {token.era for token in group.told().values()} == {restored.era}

    asyncio.run(story())


def test_a_member_is_read_from_one_record_of_before_or_from_two() -> None:
    whole = MemberRecord(
        beat=7,
        lease_timeout=2,
        applied=3,
        era=4,
        leaving=True,
        address="http://a",
        joined_at=5,
        levels=Levels(11, 12),
        release="1",
        zone="z",
    )
    store = ModelStore()
    reader = GroupReader(KEYS)

    def members() -> Mapping[str, MemberRecord]:
        return reader.read(store.read(), 0).members

    before = Writes()
    before.put(KEYS.member("before"), whole)
    assert store.commit(before)
    joins = Writes()
    put_member(joins, KEYS, "now", whole, joins=True)
    assert joins.puts.keys() == {KEYS.member("now"), KEYS.about("now")}
    assert len(joins.puts[KEYS.member("now")]) < 24
    assert store.commit(joins)
    assert members() == {"before": whole, "now": whole}
    beats = Writes()
    later = msgspec.structs.replace(whole, beat=8, leaving=False)
    put_member(beats, KEYS, "now", later, joins=False)
    assert beats.puts.keys() == {KEYS.member("now")}
    assert store.commit(beats)
    assert members() == {"before": whole, "now": later}
    # It comes back with another address.
    again = Writes()
    moved = msgspec.structs.replace(later, address="http://b")
    put_member(again, KEYS, "now", moved, joins=True)
    assert store.commit(again)
    assert members()["now"] == moved
    assert store.commit(Writes(deletes=KEYS.all_of("now")))
    assert members() == {"before": whole}
    assert store.read().entries.keys() == {KEYS.member("before")}
