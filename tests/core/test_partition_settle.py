"""Complete, retry, dead, staged dispositions, and transfers."""

from __future__ import annotations

import pytest

from sluiceway.core.partition.queries import open_slices
from sluiceway.model.changes import RecordKind
from sluiceway.model.requests import DONE, Disposition, Settled
from tests.core.core_model import START, Rig, Row, Served, rows_of

RETRY = Disposition("retry")


def filled(*bodies: str, **options: int) -> Rig:
    """A partition with a blob for each body, of one row a letter."""
    rig = Rig(max_attempts=options.get("max_attempts", 0), keeps_dead=bool(options.get("keeps_dead", 0)))
    for body in bodies:
        rig.produce(rows_of(*body))
        rig.commit()
    return rig


# Complete


def test_completing_part_of_a_lease_leaves_the_rest_open() -> None:
    rig = filled("abcd")
    lease = rig.lease(4)
    result, ignored = rig.settle([1, 3])
    rig.reload()
    assert (result, ignored) == (Settled(completed=2), [])
    lease = rig.machine.leases[lease.number]
    assert [served.payload for served in rig.served(open_slices(lease))] == [b"a", b"c"]
    assert (rig.machine.leased_count, rig.machine.log.header.completed) == (2, 2)


def test_completing_all_of_a_lease_leaves_nothing_behind() -> None:
    rig = filled("ab", "cd")
    rig.lease(4)
    rig.settle([0, 1, 2])
    rig.reload()
    rig.settle([3])
    rig.commit()
    assert not rig.disk.records
    assert not rig.disk.blobs


def test_offsets_of_several_leases_are_settled_in_one_call() -> None:
    rig = filled("abc", "def")
    leases = [rig.lease(2), rig.lease(2), rig.lease(2)]
    result, ignored = rig.settle([0, 1, 2, 5])
    rig.commit()
    assert (result, ignored) == (Settled(completed=4), [])
    assert list(rig.machine.leases) == [leases[1].number, leases[2].number]


def test_each_ignored_offset_has_its_reason() -> None:
    rig = filled("abcdef")
    rig.lease(2)
    rig.lease(1)
    rig.settle([0])
    rig.settle([2])
    result, ignored = rig.settle([-1, 0, 1, 2, 3, 5, 6, 99])
    assert result == Settled(completed=1)
    assert ignored == [
        (-1, "unknown"),
        (0, "completed"),
        (2, "completed"),
        (3, "not_leased"),
        (5, "not_leased"),
        (6, "unknown"),
        (99, "unknown"),
    ]
    rig.commit()


def test_completing_twice_is_ignored_the_second_time_and_writes_nothing() -> None:
    rig = filled("abc")
    rig.lease(3)
    rig.settle([0, 1])
    rig.commit()
    assert rig.settle([0, 1]) == (Settled(), [(0, "completed"), (1, "completed")])
    assert rig.commit() is None
    rig.settle([2])
    rig.commit()
    assert rig.settle([0, 1, 2]) == (Settled(), [(0, "completed"), (1, "completed"), (2, "completed")])
    assert rig.commit() is None


def test_a_stale_id_does_not_touch_the_items_newer_life() -> None:
    rig = filled("a")
    rig.lease(1)
    rig.settle([0], RETRY)
    rig.lease(1)
    assert rig.settle([0]) == (Settled(), [(0, "retried")])
    assert rig.machine.leased_count == 1
    assert rig.settle([1]) == (Settled(completed=1), [])
    rig.commit()


@pytest.mark.parametrize("disposition", [DONE, RETRY, Disposition("dead")])
def test_an_item_that_is_dying_can_no_longer_be_settled(disposition: Disposition) -> None:
    rig = filled("ab", keeps_dead=1)
    rig.lease(2)
    rig.settle([0], Disposition("dead", reason="bad"))
    rig.reload()
    assert rig.settle([0], disposition) == (Settled(), [(0, "dead")])
    assert rig.machine.log.header.completed == 0


def test_closing_a_lease_completes_what_is_open() -> None:
    rig = filled("abc")
    lease = rig.lease(3)
    rig.settle([1], RETRY)
    assert rig.close(lease) == Settled(completed=2)
    rig.commit()
    assert rig.ready() == [Served(3, 1, 1, b"b")]
    assert rig.machine.lease_of(lease.number, None) == "completed"


# Retry and dead


def test_retried_items_come_back_in_order_at_the_tail_with_their_origin() -> None:
    rig = filled("abc", "de")
    rig.lease(4)
    assert rig.settle([0, 2, 3], RETRY)[0] == Settled(retried=3)
    rig.reload()
    assert rig.ready() == [Served(4, 4, 0, b"e"), Served(5, 0, 1, b"a"), Served(6, 2, 1, b"c"), Served(7, 3, 1, b"d")]
    lease = rig.lease(4)
    assert [served.attempts for served in rig.served(open_slices(lease))] == [1, 2, 2, 2]
    rig.settle([5, 7])
    rig.reload()
    assert rig.served(open_slices(rig.machine.leases[lease.number])) == [Served(4, 4, 1, b"e"), Served(6, 2, 2, b"c")]


@pytest.mark.parametrize(
    ("disposition", "due_at"),
    [
        (Disposition("retry", retry_after=30), START + 30),
        (Disposition("retry", retry_at=START + 40), START + 40),
    ],
)
def test_a_delayed_retry_waits_beside_the_line(disposition: Disposition, due_at: int) -> None:
    rig = filled("ab")
    rig.lease(2)
    assert rig.settle([0], disposition)[0] == Settled(retried=1)
    rig.reload()
    assert (rig.machine.log.scheduled_count, rig.machine.log.ready_count) == (1, 0)
    assert rig.machine.tick(due_at - 1) == 0
    assert rig.machine.tick(due_at) == 1
    rig.commit()
    assert rig.ready() == [Served(2, 0, 1, b"a")]


@pytest.mark.parametrize(
    "disposition", [Disposition("retry", retry_at=START - 1), Disposition("retry", retry_at=START), Disposition("retry", retry_after=0)]
)
def test_a_retry_at_a_time_that_has_come_is_at_once(disposition: Disposition) -> None:
    rig = filled("a")
    rig.lease(1)
    rig.settle([0], disposition)
    assert rig.machine.log.ready_count == 1
    rig.commit()


def test_a_retry_of_the_last_attempt_is_death() -> None:
    rig = filled("ab", max_attempts=2, keeps_dead=1)
    rig.lease(1)
    rig.settle([0], RETRY)
    rig.lease(2)
    assert rig.settle([1, 2], Disposition("retry", retry_after=30, reason="timeout"))[0] == Settled(retried=1, dead=1)
    rig.reload()
    (transfer,) = rig.machine.transfers.by_number.values()
    assert transfer.transfer == "max_attempts 2 reached: timeout"
    assert rig.served(open_slices(transfer)) == [Served(2, 0, 2, b"a")]
    assert rig.machine.log.scheduled_count == 1


def test_a_dead_item_waits_in_a_transfer_until_it_has_arrived() -> None:
    rig = filled("abc", "de", keeps_dead=1)
    lease = rig.lease(5)
    assert rig.settle([1, 4], Disposition("dead", reason="bad"))[0] == Settled(dead=2)
    rig.close(lease)
    rig.reload()
    (number,) = rig.machine.transfers.by_number
    transfer = rig.machine.transfers.by_number[number]
    assert (transfer.transfer, transfer.deadline, transfer.open) == ("bad", None, 2)
    assert rig.served(open_slices(transfer)) == [Served(1, 1, 1, b"b"), Served(4, 4, 1, b"e")]
    assert rig.machine.log.header.dead == 0
    assert rig.machine.next_timer() is None
    rig.machine.transfers.end(number)
    rig.machine.transfers.end(number)
    rig.commit()
    assert rig.machine.log.header.dead == 2
    assert not rig.disk.blobs
    assert rig.disk.records.keys() == {(RecordKind.LEASE, str(lease.number))}, "remembered, to tell what became of stale ids"


def test_a_dead_item_without_a_reason_is_called_rejected() -> None:
    rig = filled("a", keeps_dead=1)
    rig.lease(1)
    rig.settle([0], Disposition("dead"))
    assert [transfer.transfer for transfer in rig.machine.transfers.by_number.values()] == ["rejected"]


def test_without_a_dead_queue_a_dead_item_is_dropped_and_counted() -> None:
    rig = filled("ab", max_attempts=1)
    rig.lease(2)
    assert rig.settle([0], Disposition("dead"))[0] == Settled(dead=1)
    assert rig.settle([1], RETRY)[0] == Settled(dead=1)
    rig.commit()
    assert (rig.machine.log.header.dead, len(rig.machine.transfers.by_number)) == (2, 0)
    assert not rig.disk.blobs


def test_a_transfer_is_neither_completed_nor_extended_by_a_client() -> None:
    rig = filled("ab", keeps_dead=1)
    rig.lease(2)
    rig.settle([0], Disposition("dead"))
    (number,) = rig.machine.transfers.by_number
    assert rig.machine.lease_of(number, None) == "settled"
    rig.machine.transfers.end(next(iter(rig.machine.leases)))
    assert rig.machine.leased_count == 1


# Staged dispositions


def test_a_staged_disposition_takes_effect_when_the_lease_is_closed() -> None:
    rig = filled("abcdef", keeps_dead=1)
    lease = rig.lease(6)
    assert rig.settle([0], DONE, stage=True) == (Settled(completed=1), [])
    assert rig.settle([1, 2], Disposition("retry", retry_after=50), stage=True) == (Settled(retried=2), [])
    assert rig.settle([3], Disposition("dead", reason="bad"), stage=True) == (Settled(dead=1), [])
    rig.reload()
    lease = rig.machine.leases[lease.number]
    assert lease.open == 6
    assert rig.close(lease, START + 10) == Settled(completed=3, retried=2, dead=1)
    rig.reload()
    assert [due.due_at for due in rig.machine.log.dues.values()] == [START + 60]
    assert [transfer.transfer for transfer in rig.machine.transfers.by_number.values()] == ["bad"]


def test_a_disposition_that_is_staged_anew_replaces_the_first() -> None:
    rig = filled("abc", keeps_dead=1)
    lease = rig.lease(3)
    rig.settle([0, 1, 2], RETRY, stage=True)
    rig.settle([1], Disposition("dead"), stage=True)
    rig.settle([2], DONE, stage=True)
    rig.settle([1], Disposition("dead", reason="worse"), stage=True)
    rig.commit()
    assert rig.close(lease) == Settled(completed=1, retried=1, dead=1)
    assert [transfer.transfer for transfer in rig.machine.transfers.by_number.values()] == ["worse"]
    assert [served.origin for served in rig.ready()] == [0]
    rig.commit()


def test_an_item_that_is_settled_outright_does_not_meet_its_staged_disposition() -> None:
    rig = filled("ab")
    lease = rig.lease(2)
    rig.settle([0, 1], RETRY, stage=True)
    rig.settle([0], DONE)
    rig.reload()
    assert rig.close(rig.machine.leases[lease.number]) == Settled(retried=1)
    assert [served.origin for served in rig.ready()] == [1]


def test_staging_ignores_what_is_not_leased_and_then_writes_nothing() -> None:
    rig = filled("abc")
    rig.lease(2)
    rig.settle([0])
    rig.commit()
    assert rig.settle([0, 2, 9], RETRY, stage=True) == (Settled(), [(0, "completed"), (2, "not_leased"), (9, "unknown")])
    assert rig.commit() is None


def test_staged_dispositions_are_dropped_when_the_lease_expires() -> None:
    rig = filled("ab", keeps_dead=1)
    rig.lease(2, timeout=10)
    rig.settle([0], Disposition("dead"), stage=True)
    rig.reload()
    rig.machine.tick(START + 10)
    rig.commit()
    assert not rig.machine.transfers.by_number
    assert [(served.origin, served.attempts) for served in rig.ready()] == [(0, 1), (1, 1)]


def test_a_lease_outlives_an_extent_that_it_has_settled() -> None:
    rig = filled("ab", "cd")
    lease = rig.lease(4)
    rig.settle([0, 1])
    changes = rig.commit()
    assert changes is not None
    assert (RecordKind.EXTENT, "0") in changes.deletes
    assert changes.dropped_blobs == {0}
    rig.reload()
    lease = rig.machine.leases[lease.number]
    assert rig.settle([0, 1]) == (Settled(), [(0, "completed"), (1, "completed")])
    assert rig.settle([2], RETRY)[0] == Settled(retried=1)
    assert rig.close(lease) == Settled(completed=1)
    rig.reload()
    assert rig.ready() == [Served(4, 2, 1, b"c")]


def test_a_scheduled_item_is_not_settled_by_its_id() -> None:
    rig = Rig()
    rig.produce([Row(b"a"), Row(b"b", START + 50)])
    rig.commit()
    assert rig.settle([0, 1]) == (Settled(), [(0, "not_leased"), (1, "not_leased")])
    rig.lease(1)
    assert rig.settle([1])[0] == Settled()
    assert rig.machine.log.scheduled_count == 1


def test_rows_that_follow_one_another_but_differ_in_attempts_do_not_join() -> None:
    rig = Rig()
    rig.produce([Row(b"a"), Row(b"b", START + 5)])
    rig.lease(1)
    rig.settle([0], RETRY)
    rig.machine.tick(START + 5)
    rig.commit()
    assert rig.ready() == [Served(2, 0, 1, b"a"), Served(3, 1, 0, b"b")]
