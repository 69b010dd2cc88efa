"""A queue's minutes, as machines: what is folded into pages is what is read from them, however many write and whatever fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.owned_queue import OwnedQueue
from sluiceway.core.queue.queue_history import (
    KEPT_PAGES,
    LOOKS,
    PER_PAGE,
    PREFIX,
    Notes,
    history_of,
    key_of,
    page_of,
    prefixes_before,
    prefixes_of,
)
from sluiceway.core.queue.tickets import Commit, Effect, Open, Ticket
from sluiceway.kernel.ids import INCARNATION_LENGTH
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.queue_minutes import COUNTS, LEVELS, MAX_MINUTES, MINUTE, NO_COUNTS, OLDEST, Minute, Tally
from sluiceway.model.requests import Produce

QUEUES = ("aaaaaaaa", "bbbbbbbb")
START: Minute = 29_000_000
Act = Literal["looks", "is busy", "fails", "fails in between", "dies"]


def tally(ready: int = 0, *, oldest_at: int | None = None, **counts: int) -> Tally:
    return Tally((ready, 0, 0), oldest_at, tuple(counts.get(name, 0) for name in COUNTS))


def written(notes: Notes, *, most: int = 1_000) -> dict[str, bytes]:
    """What the store is told, of at most so many keys, and takes."""
    found = list(notes.unwritten())[:most]
    notes.written([name for name, _, _ in found])
    return {key: value for _, key, value in found}


# ---- what was seen is read ------------------------------------------------------------------------------------------


@dataclass
class Instance:
    """What one has seen of its shares so far."""

    notes: Notes
    sums: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in QUEUES})


seen = st.tuples(st.sampled_from([0, 0, 3, 7, 70_000]), st.sampled_from([0, 0, 1, 300]), st.sampled_from([0, 1, 90_000]))
acts: st.SearchStrategy[Act] = st.sampled_from(("looks", "looks", "looks", "is busy", "fails", "fails in between", "dies"))
minutes_of_three = st.lists(st.lists(st.tuples(acts, st.tuples(seen, seen)), min_size=1, max_size=3), min_size=1, max_size=75)


@given(minutes_of_three, st.integers(-40, 60), st.integers(1, 100), st.integers(0, 20))
def test_what_instances_saw_is_what_is_read(
    minutes: list[list[tuple[Act, tuple[tuple[int, int, int], ...]]]], ahead: int, length: int, created: int
) -> None:
    store: dict[str, bytes] = {}
    instances = [Instance(Notes(f"w{n}")) for n in range(3)]
    begun = 3
    looked: set[Minute] = set()
    expected: dict[tuple[str, str, Minute], int] = {}
    for minute, acting in enumerate(minutes, START):
        for number, (act, shares) in enumerate(acting):
            instance = instances[number]
            if act == "is busy":
                continue
            if act == "dies":
                # All that it had noted was taken; what happened since it looked last is lost with it.
                store |= written(instance.notes)
                instances[number] = Instance(Notes(f"w{begun}"))
                begun += 1
                continue
            for queue, (ready, age, produced) in zip(QUEUES, shares, strict=True):
                instance.sums[queue]["produced"] += produced
                since = (minute + 1) * MINUTE - age * 1_000 if ready else None
                instance.notes.note(minute, queue, tally(ready, oldest_at=since, **instance.sums[queue]))
                for name, more in (("ready", ready), ("produced", produced)):
                    expected[name, queue, minute] = expected.get((name, queue, minute), 0) + more
                if ready:
                    expected[OLDEST, queue, minute] = max(expected.get((OLDEST, queue, minute), 0), age)
            instance.notes.looked(minute)
            looked.add(minute)
            if act != "fails":
                store |= written(instance.notes, most=1 if act == "fails in between" else 1_000)
    for instance in instances:
        store |= written(instance.notes)
        assert not written(instance.notes)
    first = START + ahead
    for queue in QUEUES:
        prefixes = tuple(prefixes_of(queue, first, length))
        found = history_of({key: value for key, value in store.items() if key.startswith(prefixes)}, first, length, START + created)
        assert found.first == first
        assert set(found.series) == {*LEVELS, OLDEST, *COUNTS}
        for at, minute in enumerate(range(first, first + length)):
            if minute < START + created:
                assert found.series["leased"][at] is None or minute in looked
                continue
            known = minute in looked
            assert found.series["ready"][at] == (expected.get(("ready", queue, minute), 0) if known else None)
            assert found.series["produced"][at] == (expected.get(("produced", queue, minute), 0) if known else None)
            assert found.series[OLDEST][at] == expected.get((OLDEST, queue, minute))
            assert found.series["dead"][at] == (0 if known else None)


def test_what_stands_still_is_written_once_a_page_and_what_is_empty_never() -> None:
    notes = Notes("w")
    keys: Counter[str] = Counter()
    for minute in range(START // PER_PAGE * PER_PAGE, (START // PER_PAGE + 2) * PER_PAGE):
        notes.note(minute, "aaaaaaaa", tally(5, oldest_at=7, produced=9))
        notes.note(minute, "bbbbbbbb", tally())
        notes.looked(minute)
        keys.update(key.split("/")[2] for key in written(notes))
    assert keys == {"aaaaaaaa": 2, LOOKS: 2 * PER_PAGE}


def test_before_a_queue_was_there_nobody_looked_at_it() -> None:
    notes = Notes("w")
    for minute in range(START, START + 3):
        notes.looked(minute)
    found = history_of(written(notes), START, 3, START + 1)
    assert [found.series[name] for name in ("ready", "produced", OLDEST)] == [[None, 0, 0], [None, 0, 0], [None, None, None]]


def test_the_last_note_has_counts_and_no_items_as_whoever_comes_after_has_those() -> None:
    notes, later = Notes("w"), Notes("x")
    notes.note(START, "aaaaaaaa", tally(5, produced=5))
    notes.looked(START)
    notes.note(START + 1, "aaaaaaaa", tally(8, produced=8), last=True)
    store = written(notes)
    assert history_of(store, START, 2).series["ready"] == [5, None]
    assert history_of(store, START, 2).series["produced"] == [5, 3]
    later.note(START + 1, "aaaaaaaa", tally(8, produced=1))
    later.looked(START + 1)
    store |= written(later)
    assert history_of(store, START, 2).series["ready"] == [5, 8]
    assert history_of(store, START, 2).series["produced"] == [5, 4]


def test_of_a_deleted_queue_nothing_more_is_written() -> None:
    notes = Notes("w")
    for queue in QUEUES:
        notes.note(START, queue, tally(5))
    notes.keep(QUEUES[:1])
    notes.looked(START)
    assert [key.split("/")[2] for key in written(notes)] == [QUEUES[0], LOOKS]
    notes.keep([])
    notes.looked(START + 1)
    assert [key.split("/")[2] for key in written(notes)] == [LOOKS]


def test_what_the_store_never_takes_is_given_up_after_a_day() -> None:
    notes = Notes("w")
    for minute in range(START, START + 3 * MAX_MINUTES):
        notes.note(minute, "aaaaaaaa", tally(minute))
        notes.looked(minute)
    pages = {key.split("/")[1] for _, key, _ in notes.unwritten()}
    assert len(pages) == KEPT_PAGES
    assert max(map(int, pages)) == (START + 3 * MAX_MINUTES - 1) // PER_PAGE


# ---- keys -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 99_999_999), st.integers(0, 99_999_999))
def test_older_pages_are_those_and_no_others(page: int, other: int) -> None:
    for each in (other, page - 1, page, page + 1):
        if 0 <= each <= 99_999_999:
            assert key_of(each, "aaaaaaaa", "w").startswith(tuple(prefixes_before(page))) == (each < page)


def test_a_page_is_half_an_hour_and_its_key_sorts_by_time() -> None:
    keys = [key_of(page_of(at), LOOKS, "w") for at in range(0, 4_102_444_800_000, 123_456_789_012)]
    assert keys == sorted(keys)
    assert page_of(3_600_000) == page_of(0) + 2
    assert len(LOOKS) != INCARNATION_LENGTH
    assert keys[0].startswith(PREFIX)


# ---- counts, when partitions come and go ----------------------------------------------------------------------------

HAD = 1_000
"""What the partition has counted long before."""


class Moving:
    """One partition that goes from share to share, and what of it is durable."""

    def __init__(self) -> None:
        self.produced, self.txn = HAD, 7
        self.shares = [OwnedQueue("q", 60_000), OwnedQueue("q", 60_000)]
        for share in self.shares:
            share.configure(QueueRecord("q", "q", 0, 0, (PartitionRecord(0),)))
        self.at, self.now = 0, 1_000_000
        self.flying: Commit | None = None
        self.share.gain(0)
        self.cycle()

    @property
    def share(self) -> OwnedQueue:
        return self.shares[self.at]

    def cycle(self) -> None:
        self.carry_out(self.share.cycle(self.now))

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Open):
                loaded = Partition()
                loaded.txn, loaded.log.header.produced = self.txn, self.produced
                loaded.log.header.next = loaded.log.header.head = self.produced
                self.share.opened(0, effect.opening, loaded, self.now)
                self.cycle()
            elif isinstance(effect, Commit):
                self.flying = effect

    def produce(self) -> None:
        self.share.submit(Ticket(Produce(batch_from_rows([{"payload": b"a"}]), 1_000_000), self.now + 1_000_000))
        self.cycle()

    def land(self, outcome: Outcome, *, landed: bool) -> None:
        commit, self.flying = self.flying, None
        assert commit is not None
        if landed:
            self.produced, self.txn = self.share.executors[0].partition.log.header.produced, commit.changes.txn
        self.share.committed(0, commit.opening, outcome, self.now)
        # It is opened again after a while.
        self.now += 2_000
        self.cycle()

    def move(self) -> None:
        assert self.share.lose(0)
        self.cycle()
        self.at = 1 - self.at
        self.share.gain(0)
        self.cycle()


steps = st.lists(st.sampled_from(("done", "refused", "landed", "lost", "move", "look")), max_size=30)


@given(steps)
def test_each_item_is_counted_once_whatever_becomes_of_commits_and_partitions(steps: list[str]) -> None:
    moving = Moving()
    notes = [Notes("w0"), Notes("w1")]
    minutes = iter(range(START, START + 10_000))

    def look() -> None:
        minute = next(minutes)
        for share, each in zip(moving.shares, notes, strict=True):
            each.note(minute, "aaaaaaaa", share.tally())

    for step in steps:
        if step == "look":
            look()
        elif step == "move":
            moving.move()
        else:
            moving.produce()
            # Seen before anybody knows what becomes of it.
            look()
            if step == "done":
                moving.land(Outcome.DONE, landed=True)
            else:
                outcome = Outcome.REFUSED if step == "refused" else Outcome.UNKNOWN
                moving.land(outcome, landed=step == "landed")
                if moving.flying is not None:
                    # It is tried again.
                    moving.land(Outcome.DONE, landed=True)
    look()
    length = next(minutes) - START
    store = {key: value for each in notes for key, value in written(each).items()}
    produced = [each or 0 for each in history_of(store, START, length).series["produced"]]
    assert sum(produced) == moving.produced - HAD == sum(step in ("done", "refused", "landed", "lost") for step in steps)
    assert min(produced) >= 0


def test_what_a_partition_counted_before_it_came_is_none_of_its_share() -> None:
    moving = Moving()
    assert moving.share.tally() == Tally((0, 0, 0), None, NO_COUNTS)
    moving.produce()
    moving.land(Outcome.DONE, landed=True)
    assert moving.share.tally() == Tally((1, 0, 0), 1_000_000, (1, *NO_COUNTS[1:]))
    moving.move()
    assert [share.tally().counts[0] for share in moving.shares] == [1, 0]
