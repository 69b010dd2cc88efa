"""What is browsed is what the partition had at one moment, whatever becomes of it meanwhile; and it is kept no longer than that takes."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest

from sluiceway.contract.item_answers import BrowseState
from sluiceway.core.partition.partition_snapshot import runs_of, take
from sluiceway.core.partition.snapshots import Snapshot
from sluiceway.kernel.clock import Millis
from sluiceway.model.changes import Changes
from sluiceway.model.inspection import Standing
from sluiceway.model.requests import DONE, Disposition
from tests.core.core_model import START, Disk, Rig, Row, Served, rows_of

ALL: tuple[BrowseState, ...] = get_args(BrowseState)
EVERYTHING = 1_000_000
Seen = list[tuple[Served, int, Standing]]


class PinnedDisk(Disk):
    """One that may have blobs that nothing refers to but a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()

    def _referred(self) -> set[int]:
        return super()._referred() | self.pinned


class PinnedRig(Rig):
    """As `Rig`; but who loads the partition drops what is pinned, so the two machines are not compared while anything is."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: PinnedDisk = PinnedDisk()

    def commit(self) -> Changes | None:
        taken = self.machine.take_changes()
        self.disk.pinned = {number for number, blob in self.machine.log.blobs.items() if blob.pins}
        if taken is not None:
            self.disk.apply(taken[0])
        return taken[0] if taken else None

    def pin(self, until: Millis, states: tuple[BrowseState, ...] = ALL) -> Snapshot:
        snapshot = take(self.machine, states)
        snapshot.until = snapshot.latest = until
        self.machine.log.pin("snapshot", snapshot)
        return snapshot

    def seen(self, snapshot: Snapshot, page: int = EVERYTHING) -> Seen:
        found: Seen = []
        while some := snapshot.listed(len(found), page):
            rows = [(row, each.lease, each.standing) for each in some for row in self.served([each.piece])]
            assert 0 < len(rows) <= page
            found += rows
        return found


def anything(rig: Rig, chance: Random, now: Millis) -> None:
    """One transition of many kinds."""
    machine = rig.machine
    which = chance.randrange(9)
    live = sorted(machine.leases)
    if which < 2:
        due = [None if chance.random() < 0.7 else now + chance.randrange(1, 400) for _ in range(chance.randrange(1, 9))]
        rig.produce([Row(str(chance.random()).encode(), enqueue_at=each) for each in due], now)
    elif which < 4 and machine.log.ready_count:
        rig.lease(chance.randrange(1, 7), now, timeout=chance.randrange(1, 300))
    elif which == 4 and live:
        rig.close(machine.leases[chance.choice(live)], now)
    elif which == 5 and live:
        offsets = [each.piece.offsets[0] for each in take(machine, ["leased"]).listed(0, EVERYTHING)]
        rig.settle(
            chance.sample(offsets, 1),
            chance.choice([DONE, Disposition("retry"), Disposition("retry", retry_after=50), Disposition("dead")]),
            now,
        )
    elif which == 6:
        found = take(machine, ["ready", "scheduled"]).listed(0, EVERYTHING)
        if found:
            machine.log.drop(chance.choice(found).piece.offsets[::2], now)
    elif which == 7 and chance.random() < 0.2:
        machine.clear(True, True, now)
    else:
        machine.tick(now)


@pytest.mark.parametrize("seed", range(40))
def test_what_a_snapshot_shows_does_not_change_whatever_happens(seed: int) -> None:
    chance, rig, now = Random(seed), PinnedRig(), START
    for _ in range(chance.randrange(5, 60)):
        now += chance.randrange(20)
        anything(rig, chance, now)
        rig.commit()
    counts = (rig.machine.leased_count, rig.machine.log.ready_count, rig.machine.log.scheduled_count)
    snapshot = rig.pin(START + 1_000_000)
    before = rig.seen(snapshot)
    waiting = [row for row, lease, standing in before if not lease and standing.due_at is None]
    due = [standing for _, _, standing in before if standing.due_at is not None]
    assert (sum(lease > 0 for _, lease, _ in before), len(waiting), len(due)) == counts
    assert waiting == rig.ready()
    for _ in range(60):
        now += chance.randrange(20)
        anything(rig, chance, now)
        rig.commit()
    assert rig.seen(snapshot, chance.randrange(1, 9)) == before
    # Let go, everything that is only pinned goes in one commit.
    rig.machine.tick(START + 1_000_000)
    rig.commit()
    assert not rig.disk.pinned
    assert rig.machine.log.snapshots == {}


def test_what_is_completed_stays_until_it_is_let_go_and_not_longer() -> None:
    rig = PinnedRig()
    rig.produce(rows_of("a", "b"))
    rig.commit()
    rig.produce(rows_of("c"), START + 1)
    rig.commit()
    rig.pin(START + 500, ("ready",))
    rig.close(rig.lease(3, START + 2), START + 2)
    rig.commit()
    assert sorted(rig.disk.blobs) == [0, 2]
    assert rig.machine.next_timer() == START + 500
    rig.machine.tick(START + 499)
    assert not rig.machine.is_changed
    rig.machine.tick(START + 500)
    rig.commit()
    assert rig.disk.blobs == {}
    assert rig.machine.next_timer() is None


def test_two_snapshots_keep_the_same_until_both_are_let_go() -> None:
    rig = PinnedRig()
    rig.produce(rows_of("a"))
    rig.commit()
    first = rig.pin(START + 500)
    second = take(rig.machine, ALL)
    second.until = START + 900
    rig.machine.log.pin("second", second)
    rig.close(rig.lease(1))
    rig.machine.tick(START + 500)
    rig.commit()
    assert rig.seen(second) == rig.seen(first)
    rig.machine.tick(START + 900)
    rig.commit()
    assert rig.disk.blobs == {}


def test_who_loads_the_partition_removes_what_was_kept() -> None:
    rig = PinnedRig()
    rig.produce(rows_of("a"))
    rig.produce(rows_of("b"), START + 1)
    rig.commit()
    rig.pin(START + 500)
    rig.close(rig.lease(1))
    rig.commit()
    rig.machine = rig.loaded()
    assert rig.machine.is_changed
    rig.commit()
    assert [served.payload for served in rig.ready()] == [b"b"]
    assert len(rig.disk.blobs) == 1
    rig.machine = rig.loaded()
    assert not rig.machine.is_changed


def test_an_item_that_is_not_settled_yet_is_not_dropped_with_its_snapshot() -> None:
    rig = PinnedRig()
    rig.produce(rows_of("a"))
    rig.commit()
    rig.pin(START + 500)
    rig.machine.tick(START + 500)
    assert rig.commit() is None
    assert [served.payload for served in rig.ready()] == [b"a"]


def test_runs_are_counted_before_they_are_looked_at() -> None:
    rig = PinnedRig()
    for at in range(5):
        rig.produce([Row(b"a"), Row(b"b", enqueue_at=START + 1_000)], START + at)
        rig.commit()
    rig.lease(2)
    expected: dict[BrowseState, int] = {"leased": 2, "ready": 3, "scheduled": 5}
    for state, runs in expected.items():
        assert runs_of(rig.machine, [state]) == len(take(rig.machine, [state]).runs) == runs
    assert runs_of(rig.machine, ALL) == 10


def test_a_place_outside_is_the_nearest_one_or_has_nothing() -> None:
    rig = PinnedRig()
    rig.produce(rows_of("a", "b"))
    rig.commit()
    snapshot = rig.pin(START + 500)
    assert rig.served(each.piece for each in snapshot.listed(-(2**62), 5)) == rig.ready()
    assert snapshot.listed(2, 5) == snapshot.listed(2**62, 5) == []
    assert snapshot.listed(0, 0) == snapshot.listed(0, -(2**62)) == []
