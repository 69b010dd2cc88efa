"""Lease, extend, the lease key, and what a lease shows."""

from __future__ import annotations

from sluiceway.core.partition.queries import open_slices, ready_slices, stats_of
from sluiceway.kernel.limits import BLOB_BYTES, MAX_LEASE_BYTES
from sluiceway.model.requests import Disposition, Settled
from tests.core.core_model import START, Rig, Row, Served, rows_of

LARGE = BLOB_BYTES * 3


def test_a_lease_takes_the_oldest_across_extents_and_blobs() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    rig.commit()
    rig.produce(rows_of("c", "d", "e"))
    rig.commit()
    first, second = rig.lease(3), rig.lease(10)
    rig.commit()
    assert rig.served(open_slices(first)) == [Served(0, 0, 1, b"a"), Served(1, 1, 1, b"b"), Served(2, 2, 1, b"c")]
    assert rig.served(open_slices(second)) == [Served(3, 3, 1, b"d"), Served(4, 4, 1, b"e")]
    assert [(part.first, part.count, part.base) for part in first.parts] == [(0, 2, 0), (2, 1, 2)]
    assert (rig.machine.log.ready_count, rig.machine.leased_count) == (0, 5)


def test_a_lease_ends_before_the_offset_that_it_names() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b", "c"))
    rig.commit()
    rig.produce(rows_of("d"))
    machine = rig.machine
    first = machine.lease(10, "c", START + 1, START, before=2)
    assert first is not None
    assert rig.served(open_slices(first)) == [Served(0, 0, 1, b"a"), Served(1, 1, 1, b"b")]
    # What comes back goes to the tail.
    machine.release(first, START, Settled())
    rig.commit()
    assert machine.lease(10, "c", START + 1, START, before=2) is None
    second = machine.lease(10, "c", START + 1, START, before=4)
    assert second is not None
    assert [served.payload for served in rig.served(open_slices(second))] == [b"c", b"d"]
    assert machine.lease(10, "c", START + 1, START, before=4) is None
    assert machine.log.ready_count == 2


def test_nothing_ready_is_no_lease_and_no_change() -> None:
    rig = Rig()
    assert rig.machine.lease(1, "c", START + 1, START) is None
    rig.produce([Row(b"a", START + 10)])
    assert rig.machine.lease(1, "c", START + 1, START) is None
    rig.commit()
    assert rig.commit() is None


def test_what_is_leased_is_nobody_elses() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    rig.lease(1)
    rig.reload()
    assert [served.payload for served in rig.ready()] == [b"b"]
    rig.lease(5)
    assert rig.machine.lease(1, "d", START + 1, START) is None


def test_a_produce_after_a_lease_of_part_of_the_same_extent_joins_it() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    lease = rig.lease(1)
    rig.produce(rows_of("c"))
    rig.commit()
    assert len(rig.machine.log.extents) == 1
    rig.close(lease)
    rig.reload()
    assert [served.offset for served in rig.ready()] == [1, 2]


def test_a_lease_stops_before_it_has_too_many_bytes() -> None:
    rig = Rig()
    for _ in range(MAX_LEASE_BYTES // LARGE + 2):
        rig.produce([Row(b"x" * LARGE)])
    lease = rig.lease(100)
    rig.commit()
    assert sum(len(served.payload) for served in rig.served(open_slices(lease))) <= MAX_LEASE_BYTES
    assert lease.count == MAX_LEASE_BYTES // LARGE
    assert rig.lease(100).count == 2
    rig.commit()


def test_a_large_item_behind_small_ones_waits_for_the_next_lease() -> None:
    rig = Rig()
    rig.produce([Row(b"x" * (MAX_LEASE_BYTES // 2))])
    rig.produce([Row(b"y" * (MAX_LEASE_BYTES // 2 + 1000))])
    assert rig.lease(10).count == 1
    assert rig.lease(10).count == 1


def test_an_item_larger_than_a_lease_may_be_is_leased_alone() -> None:
    rig = Rig()
    for _ in range(2):
        rig.produce([Row(b"x" * (MAX_LEASE_BYTES + 1))])
    assert rig.lease(10).count == 1
    assert rig.machine.log.ready_count == 1


def test_a_lease_key_finds_the_live_leases_taken_under_it() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b", "c", "d"))
    one, two = rig.lease(1, key="k"), rig.lease(1, key="k")
    rig.lease(1, client="d", key="k")
    rig.lease(1)
    assert rig.machine.keyed("c", "k") == [one, two]
    rig.close(one)
    rig.reload()
    assert [lease.number for lease in rig.machine.keyed("c", "k")] == [two.number]
    rig.machine.tick(START + 100)
    assert rig.machine.keyed("c", "k") == []
    assert not rig.machine.by_key


def test_extend_moves_the_deadline_either_way() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    lease = rig.lease(1, timeout=100)
    rig.commit()
    rig.machine.extend(lease, START + 500)
    assert rig.machine.next_timer() == START + 500
    rig.machine.extend(lease, START + 50)
    rig.reload()
    assert rig.machine.next_timer() == START + 50
    rig.machine.extend(rig.machine.leases[lease.number], START + 500)
    assert rig.machine.tick(START + 499) == 0
    assert rig.machine.tick(START + 500) == 1


def test_a_lease_is_found_by_its_number_and_for_its_client() -> None:
    rig = Rig()
    rig.produce(rows_of("a"))
    lease = rig.lease(1, client="c")
    assert rig.machine.lease_of(lease.number, None) is lease
    assert rig.machine.lease_of(lease.number, "c") is lease
    assert rig.machine.lease_of(lease.number, "d") == "not_yours"
    assert [rig.machine.lease_of(number, None) for number in (-1, 0, 2)] == ["unknown"] * 3


def test_a_look_at_a_lease_counts_positions_from_its_beginning() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    rig.commit()
    rig.produce(rows_of("c", "d"))
    lease = rig.lease(4)
    rig.settle([1])
    rig.reload()
    lease = rig.machine.leases[lease.number]
    assert [served.payload for served in rig.served(open_slices(lease))] == [b"a", b"c", b"d"]
    assert [served.payload for served in rig.served(open_slices(lease, 1))] == [b"c", b"d"]
    assert [served.payload for served in rig.served(open_slices(lease, 0, 3))] == [b"a", b"c"]
    assert open_slices(lease, 4) == open_slices(lease, 9) == open_slices(lease, 1, 1) == []


def test_a_look_at_what_comes_next_takes_nothing() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b", "c"))
    rig.lease(1)
    rig.settle([0], Disposition("retry"))
    rig.commit()
    assert rig.served(ready_slices(rig.machine, 1)) == [Served(1, 1, 0, b"b")]
    assert rig.served(ready_slices(rig.machine, 3)) == [Served(1, 1, 0, b"b"), Served(2, 2, 0, b"c"), Served(3, 0, 1, b"a")]
    assert ready_slices(rig.machine, 0) == []
    assert rig.machine.log.ready_count == 3


def test_the_counts_balance() -> None:
    rig = Rig(max_attempts=2, keeps_dead=True)
    rig.produce([*rows_of("a", "b", "c", "d", "e", "f"), Row(b"later", START + 1_000)])
    rig.lease(5)
    rig.settle([0])
    rig.settle([1], Disposition("retry"))
    rig.settle([2], Disposition("dead"))
    rig.machine.tick(START + 100)
    rig.lease(1, START + 100)
    stats = stats_of(rig.machine, 3)
    assert (stats.partition, stats.ready, stats.total_leased, stats.scheduled, stats.transferring, stats.leases) == (3, 3, 1, 1, 1, 1)
    assert (stats.produced, stats.leased, stats.completed, stats.retried, stats.expired, stats.dead) == (7, 6, 1, 1, 2, 0)
    assert stats.produced == stats.completed + stats.dead + stats.total + stats.transferring
    rig.commit()


def test_an_offset_is_never_given_twice() -> None:
    rig = Rig()
    rig.produce(rows_of("a", "b"))
    given = {0, 1}
    for turn in range(20):
        now = START + turn * 100
        leases = [rig.lease(1, now, timeout=100) for _ in "ab"]
        rig.reload()
        rig.machine.tick(now + 100)
        fresh = {served.offset for served in rig.ready()}
        assert len(fresh) == 2
        assert not fresh & given
        given |= fresh
        assert [lease.number for lease in leases] == [2 * turn + 1, 2 * turn + 2]
    assert {served.attempts for served in rig.ready()} == {20}
    assert {served.origin for served in rig.ready()} == {0, 1}
