"""What an operation costs, counted in records and bytes rather than in time."""

from __future__ import annotations

import pytest

from sluiceway.core.partition import closed_leases
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import lives_of
from sluiceway.core.partition.transfers import MAX_PIECES
from sluiceway.kernel.limits import MAX_LEASE_BYTES
from sluiceway.model.changes import Changes, RecordKind
from sluiceway.model.requests import Disposition, ProduceKey
from tests.core.core_model import START, Rig, Row, array_of, batch_of

ITEMS = 10_000
PAYLOAD = b"p" * 100


def backlog(batches: int, items: int = 100) -> Rig:
    rig = Rig()
    for _ in range(batches):
        rig.produce([Row(PAYLOAD)] * items)
        rig.commit()
    return rig


def touched(changes: Changes | None) -> int:
    assert changes is not None
    return len(changes.puts) + len(changes.deletes) + len(changes.blobs) + len(changes.dropped_blobs)


@pytest.mark.parametrize("batches", [3, 60])
def test_a_lease_writes_one_record_whatever_the_backlog(batches: int) -> None:
    rig = backlog(batches)
    lease = rig.lease(250)
    changes = rig.commit()
    assert changes is not None
    assert list(changes.puts) == [(RecordKind.LEASE, str(lease.number))]
    assert touched(changes) == 1
    assert len(lease.parts) == 3


@pytest.mark.parametrize("batches", [3, 60])
def test_completing_a_whole_lease_writes_nothing_and_deletes_a_few_records_a_part(batches: int) -> None:
    rig = backlog(batches)
    lease = rig.lease(250)
    rig.commit()
    rig.close(lease)
    changes = rig.commit()
    assert changes is not None
    assert not changes.puts
    # The lease; of the two parts that took their extent whole: extent, blob record, blob.
    assert touched(changes) == 1 + 2 * 3


def test_completing_some_of_a_lease_writes_the_lease_alone() -> None:
    rig = backlog(1, ITEMS)
    rig.lease(ITEMS)
    rig.commit()
    rig.settle(range(0, ITEMS, 2))
    changes = rig.commit()
    assert changes is not None
    assert [kind for kind, _ in changes.puts] == [RecordKind.LEASE]
    assert touched(changes) == 1
    assert sum(map(len, changes.puts.values())) < ITEMS


def put_bytes(rig: Rig) -> int:
    changes = rig.commit()
    assert changes is not None
    assert not changes.blobs
    return sum(map(len, changes.puts.values())) + len(changes.header)


def test_a_large_lease_that_expires_writes_no_payload_and_few_bytes() -> None:
    rig = backlog(1, ITEMS)
    rig.lease(ITEMS, timeout=10)
    rig.commit()
    assert rig.machine.tick(START + 10) == ITEMS
    assert put_bytes(rig) < 0.01 * ITEMS * len(PAYLOAD)
    assert rig.machine.log.ready_count == ITEMS


def test_a_large_lease_with_gaps_that_expires_writes_no_payload_and_few_bytes() -> None:
    rig = backlog(1, ITEMS)
    rig.lease(ITEMS, timeout=10)
    rig.settle(range(0, ITEMS, 3))
    rig.commit()
    assert rig.machine.tick(START + 10) == ITEMS - len(range(0, ITEMS, 3))
    # Two sets of gaps, each a bit map of 64k bits at most: the rows that came back, and what the lease is remembered by.
    assert put_bytes(rig) < 2 * (65_536 // 8 + 100)


def test_a_delayed_retry_of_many_writes_no_payload_and_few_bytes() -> None:
    rig = backlog(1, ITEMS)
    rig.lease(ITEMS)
    rig.commit()
    rig.settle(range(ITEMS), Disposition("retry", retry_after=50))
    assert put_bytes(rig) < 0.01 * ITEMS * len(PAYLOAD)
    rig.machine.tick(START + 50)
    assert put_bytes(rig) < 0.01 * ITEMS * len(PAYLOAD)
    assert rig.machine.log.ready_count == ITEMS


def test_a_dying_lease_of_many_writes_no_payload_and_few_bytes() -> None:
    rig = Rig(keeps_dead=True)
    rig.produce([Row(PAYLOAD)] * ITEMS)
    rig.lease(ITEMS)
    rig.commit()
    rig.settle(range(ITEMS), Disposition("dead"))
    assert put_bytes(rig) < 0.01 * ITEMS * len(PAYLOAD)


def test_a_stray_id_does_not_read_the_line() -> None:
    """A repeated complete is normal traffic; with a long line it must not cost more."""
    rig = backlog(60)
    rig.close(rig.lease(100))
    rig.lease(100)
    rig.commit()
    line = rig.machine.log.ready
    rig.machine.log.ready = Forbidden()  # type: ignore[assignment]
    _, ignored = rig.settle([*range(100), 500, 5_999, 6_000])
    rig.machine.log.ready = line
    assert ignored == [*((offset, "completed") for offset in range(100)), (500, "not_leased"), (5_999, "not_leased"), (6_000, "unknown")]


class Forbidden:
    """Stands for a line that must not be looked at."""

    def __iter__(self) -> object:
        raise AssertionError("the line was read")

    def __len__(self) -> int:
        raise AssertionError("the line was read")


# Time, and what is taken out


def test_items_that_expire_write_two_records_an_extent_and_no_payload() -> None:
    rig = backlog(1, ITEMS)
    rig.follow(Rules(expire_timeout=50, keeps_dead=True))
    rig.produce([Row(PAYLOAD)] * ITEMS)
    rig.commit()
    assert rig.machine.tick(START + 50) == ITEMS
    changes = rig.commit()
    assert changes is not None
    assert sorted(kind for kind, _ in changes.puts) == [RecordKind.EXTENT, RecordKind.LEASE]
    assert touched(changes) == 2
    assert sum(map(len, changes.puts.values())) < 200


@pytest.mark.parametrize("batches", [3, 60])
def test_an_expiry_does_not_cost_more_with_a_long_line_behind(batches: int) -> None:
    rig = Rig(expire_timeout=50)
    rig.produce([Row(PAYLOAD)] * 100)
    rig.commit()
    for turn in range(batches):
        rig.produce([Row(PAYLOAD)] * 100, START + 10 + turn)
        rig.commit()
    assert rig.machine.tick(START + 50) == 100
    # Extent, blob record, blob.
    assert touched(rig.commit()) == 3


@pytest.mark.parametrize("count", [10, ITEMS])
def test_a_lease_that_is_over_is_remembered_by_a_short_record_whatever_its_size(count: int) -> None:
    rig = backlog(1, ITEMS)
    lease = rig.lease(count)
    rig.commit()
    rig.release(lease)
    changes = rig.commit()
    assert changes is not None
    assert len(changes.puts[RecordKind.LEASE, str(lease.number)]) < 100


def test_a_clear_writes_nothing_but_what_it_deletes() -> None:
    rig = backlog(20)
    rig.machine.clear(True, True, START)
    changes = rig.commit()
    assert changes is not None
    assert not changes.puts
    assert touched(changes) == 20 * 3


def test_items_that_are_taken_out_write_one_record_an_extent_and_one_for_all() -> None:
    rig = backlog(60)
    rig.machine.transfers.redrive(array_of([*range(1_000, 1_100, 2), *range(2_050, 2_100)]), "orders", START)
    changes = rig.commit()
    assert changes is not None
    assert touched(changes) == 3
    assert sum(map(len, changes.puts.values())) < 500


def test_leases_that_run_out_over_and_over_leave_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_leases, "MAX_CLOSED_LEASES", 8)
    rig, now = backlog(2), START
    sizes = []
    for _ in range(30):
        rig.lease(1, now, timeout=10)
        now += 10
        rig.machine.tick(now)
        rig.commit()
        sizes.append(sum(kind is RecordKind.LEASE for kind, _ in rig.disk.records))
    assert sizes[7:] == [8] * 23


def test_items_that_move_cost_no_more_than_a_lease_and_a_produce() -> None:
    rig, there = backlog(3, ITEMS // 4), Rig()
    number, items = rig.machine.transfers.move_out(ITEMS, MAX_LEASE_BYTES, 1, False, START)
    changes = rig.commit()
    assert changes is not None
    assert items == 3 * ITEMS // 4
    assert list(changes.puts) == [(RecordKind.LEASE, str(number))]
    assert touched(changes) == 1
    lives = lives_of(rig.machine.transfers.by_number[number], rig.machine.log.bundles)
    assert len(lives) == 3
    there.machine.produce(batch_of([Row(PAYLOAD)] * items), START, ProduceKey("m", "move/q.0", number), lives)
    changes = there.commit()
    # A blob with its record, an extent, and what is remembered of the move.
    assert touched(changes) == 4
    rig.machine.transfers.end(number)
    assert touched(rig.commit()) == 1 + 3 * 3


def test_a_mass_of_scheduled_items_that_moves_leaves_nothing_in_the_line() -> None:
    rig = backlog(1)
    for n in range(MAX_PIECES):
        rig.produce([Row(PAYLOAD, START + 1_000 + n)])
    rig.commit()
    assert rig.machine.transfers.move_out(ITEMS, MAX_LEASE_BYTES, 1, True, START)[1] == MAX_PIECES
    assert len(rig.machine.log.ready) == 1
    rig.commit()


def test_items_that_lie_apart_move_a_few_at_a_time() -> None:
    """Each costs as much as a blob full of neighbours, and clients wait for a turn."""
    rig = backlog(200, 1)
    assert rig.machine.transfers.move_out(ITEMS, MAX_LEASE_BYTES, 1, False, START)[1] == MAX_PIECES
    later = Rig()
    for due_at in range(200):
        later.produce([Row(PAYLOAD, enqueue_at=START + 1_000 + due_at)])
    later.commit()
    assert later.machine.transfers.move_out(ITEMS, MAX_LEASE_BYTES, 1, True, START)[1] == MAX_PIECES
