"""A member of a group of tasks by itself: what it reads, stops and says, and when."""

from __future__ import annotations

from typing import TypeVar

import pytest

from sluiceway.core.group.task_member import (
    Alarm,
    Append,
    AskSeeds,
    BrokenOff,
    ChildrenFound,
    Cross,
    Effect,
    Elected,
    Ended,
    Event,
    Folded,
    Going,
    JoinGroup,
    LeaveGroup,
    Open,
    Opened,
    Pace,
    Prepared,
    Reached,
    Read,
    SeedsFound,
    Stop,
    Stopped,
    TaskMember,
    Tick,
)
from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Entry,
    Finish,
    Join,
    Leave,
    Move,
    Reach,
    Record,
    Release,
    Seeds,
    Supersede,
    Term,
)
from sluiceway.model.task_records import AnnouncedPartition, Group

Kind = TypeVar("Kind")
PACE = Pace(repeat_after=100, reopen_after=50, patience=1_000)


class Life:
    """Member b, in a log where a leads and b has p, unless it begins anew."""

    def __init__(self, begun: bool = True, leads: bool = False) -> None:
        self.member = TaskMember("b", pace=PACE)
        self.now = 0
        self.seq = 0
        if begun:
            self.hears(
                Join("a"),
                Join("b"),
                Term(1, "b" if leads else "a", ("a", "b"), 1),
                Seeds(1, "", "first", (AnnouncedPartition("p", start="begin"),)),
            )
            self.tell(Prepared(0))

    def tell(self, event: Event) -> list[Effect]:
        return self.member.step(event, self.now)

    def hears(self, *records: Record) -> list[Effect]:
        entries: list[Entry] = []
        for record in records:
            self.seq += 1
            entries.append((self.seq, record))
        return self.tell(Folded(tuple(entries)))

    def passes(self, time: int) -> list[Effect]:
        self.now += time
        return self.tell(Tick())

    def owns(self) -> int:
        """It is given p, and reads. The grant."""
        term = self.member.state.term
        assert self.hears(Assign(term, {"p": "b"})) == [Open("p", self.seq)]
        grant = self.seq
        assert self.tell(Opened("p", grant, "17")) == [Read("p", grant, "17")]
        return grant


def only(kind: type[Kind], effects: list[Effect]) -> list[Kind]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_it_joins_the_group_only_when_it_has_read_the_log_reaches_the_store_and_has_seen_its_own_record() -> None:
    life = Life(begun=False)
    assert life.hears(Join("a")) == []
    assert life.tell(Prepared(2)) == []
    assert life.hears(Term(1, "a", ("a",))) == [Append(Join("b"))]
    assert life.tell(Tick()) == []
    assert life.passes(100) == [Append(Join("b"))], "it may have been lost"
    assert life.hears(Join("b"), Join("b")) == [JoinGroup()]
    assert life.passes(100) == []


def test_a_partition_that_was_never_committed_begins_where_it_begins() -> None:
    life = Life()
    [opened] = life.hears(Assign(1, {"p": "b"}))
    assert opened == Open("p", 5)
    assert life.tell(Opened("p", 5, None)) == [Read("p", 5, "begin")]


def test_what_has_broken_off_is_not_finished_and_is_opened_again() -> None:
    life = Life()
    grant = life.owns()
    assert life.tell(BrokenOff("p", grant)) == []
    assert life.passes(49) == []
    assert life.passes(1) == [Open("p", grant)]
    assert life.tell(Opened("p", grant, "18")) == [Read("p", grant, "18")]


def test_a_position_that_is_not_known_is_an_alarm_and_never_the_beginning() -> None:
    life = Life()
    grant = life.owns()
    assert life.tell(BrokenOff("p", grant, "unknown")) == [Alarm("p", "the stream does not know the position any more")]
    assert life.passes(10_000) == []
    # Somebody moves it away: it had stopped.
    assert life.hears(Move(1, {"p": "a"})) == [Append(Release("p", grant))]


def test_who_is_fenced_waits_for_the_log_to_say_why() -> None:
    life = Life()
    grant = life.owns()
    assert life.tell(BrokenOff("p", grant, "fenced")) == []
    assert life.passes(10_000) == []
    assert life.hears(Term(2, "a", ("a",))) == [Append(Join("b"))]
    assert life.hears(Join("b"), Term(3, "a", ("a", "b")), Assign(3, {"p": "b"}))[-1] == Open("p", life.seq)


def test_a_move_is_released_when_the_reader_has_stopped() -> None:
    life = Life()
    grant = life.owns()
    assert life.hears(Move(1, {"p": "a"})) == [Stop("p", grant)]
    assert life.passes(1_000) == []
    assert life.tell(Stopped("p", grant)) == [Append(Release("p", grant))]
    assert life.passes(100) == [Append(Release("p", grant))]
    assert life.hears(Release("p", grant), Release("p", grant)) == []


def test_a_move_of_what_it_has_not_opened_yet_is_released_at_once() -> None:
    life = Life()
    effects = life.hears(Assign(1, {"p": "b"}), Move(1, {"p": "a"}))
    assert effects == [Append(Release("p", 5))]


def test_after_a_cancel_it_opens_anew() -> None:
    life = Life()
    old = life.owns()
    assert life.hears(Move(1, {"p": "a"})) == [Stop("p", old)]
    assert life.hears(CancelMove(1, ("p",))) == [], "the reader still goes on under the old grant"
    assert life.tell(Stopped("p", old)) == [Open("p", life.seq)]


def test_a_reader_that_ends_while_it_is_to_stop_says_that_it_has_ended() -> None:
    life = Life()
    grant = life.owns()
    life.hears(Move(1, {"p": "a"}))
    children = (AnnouncedPartition("l", ("p",)),)
    assert life.tell(Ended("p", grant, children, 9)) == [Append(Finish("p", grant, children, 9))]
    assert life.tell(Stopped("p", grant)) == []
    assert life.passes(100) == [Append(Finish("p", grant, children, 9))]
    assert life.hears(Finish("p", grant, children, 9)) == []


def test_at_a_barrier_it_says_so_and_goes_on_when_the_log_shows_that_it_may() -> None:
    life = Life()
    grant = life.owns()
    reached = Reached("p", grant, 5, ("p>q",), ("q>p",))
    said = Append(Reach("p", grant, 5, ("p>q",), ("q>p",)))
    assert life.tell(reached) == [said]
    assert life.passes(99) == []
    assert life.passes(1) == [said], "it may have been lost"
    assert life.hears(Reach("p", grant, 5, ("p>q",), ("q>p",))) == []
    assert life.passes(1_000) == []
    life.hears(Seeds(1, "first", "second", (AnnouncedPartition("q"),)), Assign(1, {"q": "a"}))
    assert life.hears(Reach("q", life.seq, 5, ("q>p",), ("p>q",))) == [Cross("p", grant, 5)]
    assert life.passes(1_000) == []


def test_a_reader_that_comes_to_a_barrier_again_waits_again() -> None:
    life = Life()
    old = life.owns()
    life.tell(Reached("p", old, 5, (), ("q>p",)))
    life.hears(Reach("p", old, 5, (), ("q>p",)))
    assert life.tell(BrokenOff("p", old)) == []
    assert life.passes(50) == [Open("p", old)]
    life.tell(Opened("p", old, "17"))
    assert life.tell(Reached("p", old, 5, (), ("q>p",))) == []
    life.hears(Seeds(1, "first", "second", (AnnouncedPartition("q"),)), Assign(1, {"q": "a"}))
    assert life.hears(Reach("q", life.seq, 5, ("q>p",))) == [Cross("p", old, 5)]
    # One that was crossed by an earlier reader is no wait.
    assert life.tell(Reached("p", old, 5, (), ("q>p",))) == [Cross("p", old, 5)]


def test_a_reader_at_a_barrier_can_be_stopped() -> None:
    life = Life()
    grant = life.owns()
    life.tell(Reached("p", grant, 5, (), ("q>p",)))
    assert life.hears(Reach("p", grant, 5, (), ("q>p",)), Move(1, {"p": "a"})) == [Stop("p", grant)]
    assert life.tell(Stopped("p", grant)) == [Append(Release("p", grant))]


def test_who_is_dropped_stops_and_says_nothing_of_it() -> None:
    life = Life()
    grant = life.owns()
    assert life.hears(Term(2, "a", ("a",))) == [Stop("p", grant), Append(Join("b"))]
    assert life.tell(Ended("p", grant, (), 9)) == []


def test_what_is_told_of_an_older_grant_is_passed_over() -> None:
    life = Life()
    old = life.owns()
    life.hears(Move(1, {"p": "a"}))
    life.hears(CancelMove(1, ("p",)))
    life.tell(Stopped("p", old))
    assert life.tell(Opened("p", old, "16")) == []
    assert life.tell(BrokenOff("p", old)) == []
    assert life.tell(Opened("p", life.seq, "17")) == [Read("p", life.seq, "17")]


def test_it_leaves_when_nothing_is_read_and_nothing_is_to_be_said() -> None:
    life = Life()
    grant = life.owns()
    assert life.tell(Going()) == [Stop("p", grant)]
    [said] = life.tell(Ended("p", grant, (), 9))
    assert said == Append(Finish("p", grant, (), 9))
    assert life.hears(Finish("p", grant, (), 9)) == [Append(Leave("b"))]
    assert life.hears(Leave("b")) == [LeaveGroup()]
    assert life.passes(10_000) == []


def test_a_stream_that_breaks_its_rule_is_an_alarm() -> None:
    life = Life()
    grant = life.owns()
    [alarm] = life.tell(Ended("p", grant, (AnnouncedPartition("l", ("q",)),), 9))
    assert isinstance(alarm, Alarm)
    assert life.passes(10_000) == []


# ---- leading ------------------------------------------------------------------------------------------------------------


def test_whom_the_election_names_calls_for_a_term_of_those_who_have_joined() -> None:
    life = Life()
    group = Group(2, "b", ("a", "b", "not joined"))
    assert only(Append, life.tell(Elected(group))) == [Append(Term(2, "b", ("a", "b"), 2))]
    assert life.passes(100) == [Append(Term(2, "b", ("a", "b"), 2))]
    effects = life.hears(Term(2, "b", ("a", "b"), 2))
    assert only(AskSeeds, effects) == [AskSeeds("first")]
    assert only(Append, effects) == [Append(Assign(2, {"p": "a"}))]


def test_who_was_named_earlier_leaves_a_later_leader_alone_for_a_while() -> None:
    life = Life()
    life.hears(Term(2, "a", ("a", "b"), generation=7))
    assert life.tell(Elected(Group(6, "b", ("a", "b")))) == []
    assert life.passes(999) == []
    # Unless the election has lost its memory.
    assert life.passes(1) == [Append(Term(3, "b", ("a", "b"), 6))]


def test_the_leader_brings_seeds_and_children_to_the_log() -> None:
    life = Life(leads=True)
    life.hears(Assign(1, {"p": "a"}))
    seeds = SeedsFound("first", "second", (AnnouncedPartition("q"),))
    assert life.tell(seeds) == [Append(Seeds(1, "first", "second", (AnnouncedPartition("q"),)))]
    effects = life.hears(Seeds(1, "first", "second", (AnnouncedPartition("q"),)))
    assert only(Append, effects) == [Append(Assign(1, {"q": "b"}))]
    assert life.tell(SeedsFound("second", "second", ())) == []
    children = (AnnouncedPartition("l", ("p",)),)
    assert life.tell(ChildrenFound("p", children)) == [Append(Supersede(1, "p", children))]
    assert only(Append, life.hears(Supersede(1, "p", children))) == []


@pytest.mark.parametrize("leads", [True, False])
def test_only_the_leader_decides(leads: bool) -> None:
    life = Life(leads=leads)
    said = [effect.record for effect in only(Append, life.passes(1_000)) if isinstance(effect.record, Assign)]
    assert bool(said) == leads
