"""Records that are cut into parts: each fits into a log, all of them count together, and a part of a snapshot is no snapshot."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from simulation.tasks_cost import Fleet
from sluiceway.core.group.task_fold import fold, judge, restore, trimmable
from sluiceway.core.group.task_parts import cut, cut_owners, cut_seeds, cut_snapshot, cut_tokens, encoded_size
from sluiceway.core.group.task_state import Assign, Entry, Finish, Join, Record, Seeds, State, Term, decode, encode
from sluiceway.model.task_records import AnnouncedPartition


class Log:
    """A group of a and b, led by a."""

    def __init__(self) -> None:
        self.state = State()
        self.entries: list[Entry] = []
        for record in (Join("a"), Join("b"), Term(1, "a", ("a", "b"), 1)):
            assert self.say(record)

    def say(self, record: Record) -> bool:
        """Whether it counts."""
        seq = self.state.seq + 1
        counts = isinstance(judge(self.state, seq, record), State)
        self.state = fold(self.state, seq, record)
        self.entries.append((seq, record))
        return counts


def seeds(*numbers: int) -> tuple[AnnouncedPartition, ...]:
    return tuple(AnnouncedPartition(f"p{number}", since=10) for number in numbers)


@given(st.lists(st.text(max_size=20)), st.integers(1, 60))
def test_parts_have_everything_in_order_and_none_is_larger_than_it_must_be(tokens: list[str], most: int) -> None:
    parts = cut(tokens, encoded_size, most)
    assert list(itertools.chain(*parts)) == tokens
    assert all(len(part) == 1 or sum(map(encoded_size, part)) <= most for part in parts if part)
    assert all(sum(map(encoded_size, [*one, other[0]])) > most for one, other in itertools.pairwise(parts))
    owners = dict.fromkeys(tokens, "a")
    assert {token: owner for part in cut_owners(owners, most) for token, owner in part.items()} == owners
    assert not list(cut_tokens((), most))
    assert not list(cut_owners({}, most))
    assert cut_seeds((), most) == [()]


def test_seeds_count_when_their_last_part_is_there() -> None:
    log = Log()
    assert log.say(Seeds(1, "", "first", seeds(1, 2), 0, 3))
    assert not log.state.partitions
    assert not log.say(Seeds(1, "", "first", seeds(1, 2), 0, 3)), "it is there"
    assert not log.say(Seeds(1, "", "first", seeds(5), 2, 3)), "one is missing"
    assert log.say(Seeds(1, "", "first", seeds(3, 4), 1, 3))
    assert log.say(Seeds(1, "", "first", seeds(5), 2, 3))
    assert sorted(log.state.partitions) == ["p1", "p2", "p3", "p4", "p5"]
    assert (log.state.sown, log.state.staged, log.state.sowing) == ("first", (), ("", 0))
    assert not log.say(Seeds(1, "", "first", seeds(5), 2, 3))


def test_a_leader_that_knows_of_a_later_point_begins_anew() -> None:
    log = Log()
    assert log.say(Seeds(1, "", "first", seeds(1, 2), 0, 2))
    assert log.say(Seeds(1, "", "second", seeds(1), 0, 2))
    assert not log.say(Seeds(1, "", "first", seeds(3), 1, 2))
    assert log.say(Seeds(1, "", "second", seeds(2, 3, 4), 1, 2))
    assert (log.state.sown, sorted(log.state.partitions)) == ("second", ["p1", "p2", "p3", "p4"])


def test_a_snapshot_counts_when_its_last_part_is_there_whoever_wrote_the_others() -> None:
    log = Log()
    assert log.say(Seeds(1, "", "first", seeds(*range(20))))
    assert log.say(Assign(1, {"p1": "a"}))
    kept = log.state
    parts = cut_snapshot(kept, 300)
    assert len(parts) > 3
    assert log.say(parts[0])
    assert log.say(Finish("p1", kept.partitions["p1"].grant, (), 20))
    assert not log.say(parts[2]), "one is missing"
    for part in parts[1:]:
        assert trimmable(log.state) == 0
        assert not log.say(parts[0])
        assert log.say(part)
    assert trimmable(log.state) == kept.seq
    left = [entry for entry in log.entries if entry[0] > kept.seq]
    assert restore(left) == restore(log.entries) == log.state


def test_what_there_is_of_a_snapshot_is_passed_over() -> None:
    log = Log()
    earlier = cut_snapshot(log.state, 300)
    assert log.say(Seeds(1, "", "first", seeds(*range(20))))
    begun = cut_snapshot(log.state, 300)
    for part in (*earlier, *begun[:-1]):
        assert log.say(part)
    left = [entry for entry in log.entries if entry[0] > trimmable(log.state)]
    assert len(left) < len(log.entries)
    assert restore(left) == log.state
    # A later one that is begun ends the wait for the rest of it.
    assert log.say(cut_snapshot(log.state, 300)[0])
    assert not log.say(begun[-1])


def test_no_record_of_a_large_capture_is_too_large_for_a_log() -> None:
    fleet = Fleet(4, 20_000)
    owners = [each.owner for each in fleet.state.partitions.values()]
    assert {owners.count(name) for name in fleet.members} == {5_000}
    fleet.lose_one()
    fleet.gain_one()
    assert 100_000 < fleet.largest < 1_000_000
    assert max(len(encode(part)) for part in cut_snapshot(fleet.state)) < 1_000_000


def test_seeds_from_before_there_were_parts_are_whole() -> None:
    record = decode(b'["seeds",1,"","first",[["p",[],"begin",5]]]')
    assert record == Seeds(1, "", "first", (AnnouncedPartition("p", (), "begin", 5),), 0, 1)
