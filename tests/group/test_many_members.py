"""Groups of a thousand members: a round's commits are no larger than the meta store takes, and what one does not do the next does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from simulation.group import ModelStore, run_group
from sluiceway.adapters.meta.commit import check_commit
from sluiceway.adapters.meta.etcd import MAX_OPS
from sluiceway.core.group import group_records, rounds
from sluiceway.core.group.group_records import (
    MAX_CLEARED,
    MAX_GIVEN_UP,
    MAX_MEMBER_NAME,
    MAX_MEMBERS,
    MAX_NAMES,
    GroupView,
    Keys,
    MemberRecord,
    Parameters,
    Resource,
    Writes,
    is_full,
    largest_commit,
    read_group,
)
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.load_balance import open_round
from sluiceway.core.group.member import Member
from sluiceway.core.group.rounds import Rounds

KEYS = Keys("partitions")
PARAMETERS = Parameters(settle_timeout=100, round_interval=200, beat_interval=500, lease_timeout=3_000, member_timeout=4_000)
ITEMS = tuple(sorted(f"k7f3q2ma.{number}" for number in range(3_000)))
CROWD = [f"instance-{number:04}-k7f3q2ma" for number in range(MAX_MEMBERS)]


class Crowd:
    """A group in which all members but one do only what they are told to; the first one opens and seals the rounds."""

    def __init__(self) -> None:
        self.store = ModelStore()
        self.beating = Beating(KEYS, CROWD[0])
        self.rounds = Rounds(self.beating)
        self.now = 0
        self.resource = Resource(items=ITEMS, parameters=PARAMETERS)
        writes = Writes()
        writes.put(KEYS.resource, self.resource)
        for name in CROWD:
            writes.put(KEYS.member(name), MemberRecord(beat=1, lease_timeout=PARAMETERS.lease_timeout))
        assert self.store.commit(writes)

    def look(self, later: int = 0) -> GroupView:
        self.now += later
        look = read_group(self.store.read(), KEYS, self.now)
        self.beating.note(look)
        return look

    def commit(self, writes: Writes) -> Writes:
        """Commit, with a beat, what a meta store takes."""
        writes = self.beating.beat(self.look(), self.resource, writes)
        check_commit(writes.puts, writes.deletes)
        assert self.store.commit(writes)
        return writes

    def mark(self, names: Iterable[str]) -> None:
        """Those mark themselves in the open round, and say that they have applied the plan."""
        look = self.look()
        assert look.round is not None
        writes = Writes()
        for name in names:
            writes.puts[KEYS.mark(look.round.number, name)] = b""
            applied = look.plan.round if look.plan else 0
            beat = look.members[name].beat + 1
            writes.put(KEYS.member(name), MemberRecord(beat=beat, lease_timeout=PARAMETERS.lease_timeout, applied=applied))
        assert self.store.commit(writes)

    def round(self, names: Iterable[str]) -> Writes:
        """A round in which those mark themselves, and that is sealed. Returns the seal."""
        self.commit(self.rounds._open(self.look(), "a test"))
        self.mark(names)
        look = self.look()
        assert look.round is not None
        return self.commit(self.rounds._seal(look, self.resource, look.round))

    def marks(self) -> Counter[str]:
        """The number of marks of each round."""
        return Counter(key.split("/")[3] for key in self.store.read().prefix(KEYS.marks))


def test_a_round_of_a_thousand_is_sealed_and_the_next_one_clears_its_marks() -> None:
    crowd = Crowd()
    crowd.round(CROWD)
    look = crowd.look()
    assert look.plan is not None
    assert {name: len(items) for name, items in look.plan.owners.items()} == dict.fromkeys(CROWD, 3)
    assert crowd.marks() == {"000000000001": MAX_MEMBERS - MAX_CLEARED}
    for number in (2, 3):
        crowd.round(CROWD)
        assert crowd.marks() == {f"{number:012}": MAX_MEMBERS - MAX_CLEARED}
    # So does one that is opened to level loads.
    opening = open_round(crowd.look(), KEYS, ())
    assert opening.deletes == [*crowd.store.read().prefix(KEYS.marks)]
    assert crowd.look().marks == frozenset()


def test_those_who_seal_look_for_marks_as_often_as_a_round_settles() -> None:
    """With rare beats an eighth of one is longer, and all members wait for the seal."""
    times = Parameters(settle_timeout=100, round_interval=200, beat_interval=2_000, lease_timeout=12_000, member_timeout=16_000)
    resource = Resource(items=ITEMS, parameters=times)
    crowd = Crowd()
    crowd.commit(crowd.rounds._open(crowd.look(), "a test"))
    crowd.mark([CROWD[0], CROWD[500]])
    look = crowd.look()
    assert crowd.rounds.next(look, resource) == (None, look.seen_at + times.settle_timeout)
    another = Beating(KEYS, CROWD[500])
    another.note(look)
    writes, wake_at = Rounds(another).next(look, resource)
    assert writes is None
    assert wake_at > look.seen_at + times.beat_interval


def test_a_mark_is_a_beat_so_a_round_is_a_commit_of_each_member() -> None:
    crowd = Crowd()
    member = Member(KEYS, CROWD[5])
    crowd.commit(crowd.rounds._open(crowd.look(), "a test"))
    decision = member.look(crowd.look(10))
    assert decision.writes is not None
    assert {*decision.writes.puts} >= {KEYS.mark(1, CROWD[5]), KEYS.member(CROWD[5])}
    assert crowd.store.commit(decision.writes)
    look = crowd.look(10)
    decision = member.look(look)
    # The next one comes a beat later.
    assert decision.writes is None
    assert decision.wake_at >= look.seen_at + PARAMETERS.beat_interval - 10


def test_of_many_that_are_silent_each_round_gives_up_some_and_waits_for_the_rest() -> None:
    crowd = Crowd()
    crowd.round(CROWD)
    crowd.round(CROWD)
    left, dead = CROWD[:850], set(CROWD[850:])
    crowd.look(10_000)
    sealed = 0
    while dead & crowd.look().members.keys():
        before = crowd.look()
        writes = crowd.round(left)
        sealed += 1
        assert len(writes.checks) + 3 <= MAX_OPS, "etcd compares them in one transaction"
        look = crowd.look()
        assert look.plan is not None
        assert len(before.members) - len(look.members) == min(MAX_GIVEN_UP, len(dead & before.members.keys()))
        assert look.plan.owners.keys() == {*left}
        # Nothing that a member may still serve is served: it was not given up, though it is silent.
        awaited = {item for name in dead & look.members.keys() for item in look.plan.waits[name]}
        assert len(awaited) == 3 * len(dead & look.members.keys())
        served = [item for name in left for item in Rounds(Beating(KEYS, name)).owned(look, crowd.resource)]
        assert not awaited.intersection(served)
        assert {*served, *awaited} == {*ITEMS}
    assert sealed == -(-len(dead) // MAX_GIVEN_UP)


def test_with_very_many_items_nothing_is_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd()
    crowd.round(CROWD)
    for _ in range(3):
        crowd.look(PARAMETERS.lease_timeout // 2)
    assert crowd.rounds.expected(crowd.look(), crowd.resource)
    monkeypatch.setattr(rounds, "MAX_EXPECTED", len(ITEMS) - 1)
    assert not crowd.rounds.expected(crowd.look(), crowd.resource)


def test_the_largest_commit_of_the_most_members_is_within_its_bound() -> None:
    crowd = Crowd()
    crowd.round(CROWD)
    crowd.look(10_000)
    writes = crowd.round(CROWD[: MAX_MEMBERS - MAX_GIVEN_UP])
    size = sum(len(key) + len(value) for key, value in writes.puts.items()) + sum(map(len, writes.deletes))
    assert size < largest_commit(KEYS, ITEMS, ITEMS)


def test_a_group_is_full_by_its_members_or_by_their_names() -> None:
    assert not is_full(CROWD[:-1])
    assert is_full(CROWD)
    long = [f"{number:03}".ljust(MAX_MEMBER_NAME, "-") for number in range(MAX_NAMES // MAX_MEMBER_NAME)]
    # The last that joins may have the longest name.
    assert not is_full(long[:-1])
    assert is_full(long)


@pytest.mark.parametrize("seed", range(16))
def test_no_promise_is_broken_when_each_round_does_little(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_GIVEN_UP", 1)
    for module in (rounds, group_records):
        monkeypatch.setattr(module, "MAX_CLEARED", 1)
    run_group(seed)
