"""How items come back: released, in ever smaller leases, after a back-off; and when they have waited too long."""

from __future__ import annotations

import pytest

from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import open_slices
from sluiceway.model.changes import RecordKind
from sluiceway.model.requests import DONE, RELEASE, Disposition, Settled
from tests.core.core_model import START, Rig, Row, Served, array_of, rows_of

RETRY = Disposition("retry")


def filled(bodies: str, **options: int) -> Rig:
    """A partition with a blob for each word, of one row a letter."""
    rig = Rig(
        max_attempts=options.get("max_attempts", 0),
        keeps_dead=bool(options.get("keeps_dead", 0)),
        expire_timeout=options.get("expire_timeout", 0),
    )
    for body in bodies.split():
        rig.produce(rows_of(*body))
        rig.commit()
    return rig


def dying(rig: Rig) -> list[tuple[str | None, list[bytes]]]:
    return [
        (each.transfer, [served.payload for served in rig.served(open_slices(each))]) for each in rig.machine.transfers.by_number.values()
    ]


# Release


def test_released_items_come_back_at_the_tail_and_their_attempt_is_not_counted() -> None:
    rig = filled("abcd", max_attempts=1)
    lease = rig.lease(3)
    assert rig.settle([1], RELEASE) == (Settled(released=1), [])
    assert rig.release(lease) == Settled(released=2)
    rig.reload()
    assert rig.ready() == [Served(3, 3, 0, b"d"), Served(4, 1, 0, b"b"), Served(5, 0, 0, b"a"), Served(6, 2, 0, b"c")]
    assert rig.machine.lease_of(lease.number, None) == "released"
    assert (rig.machine.log.header.released, rig.machine.log.header.leased) == (3, 3)


def test_a_lease_that_is_released_drops_its_staged_dispositions() -> None:
    rig = filled("ab")
    lease = rig.lease(2)
    rig.settle([0], Disposition("dead"), stage=True)
    rig.commit()
    assert rig.release(lease) == Settled(released=2)
    rig.commit()
    assert [served.payload for served in rig.ready()] == [b"a", b"b"]


# Ever smaller leases


def test_items_of_a_lease_that_ran_out_come_back_in_halves_until_each_is_alone() -> None:
    rig = filled("abcdefgh ij")
    now = START
    sizes: list[list[int]] = []
    rig.lease(8, now, timeout=10)
    for _ in range(3):
        now += 10
        rig.machine.tick(now)
        rig.reload()
        sizes.append([])
        while rig.machine.log.ready_count:
            sizes[-1].append(rig.lease(100, now, timeout=10).count)
    # Two that never failed are leased together with as many of the others as those bear.
    assert sizes == [[4, 4, 2], [2, 2, 2, 2, 1, 1], [1] * 10]
    assert rig.machine.log.header.expired == 8 + 10 + 10


def test_what_may_be_leased_together_counts_only_what_was_open() -> None:
    rig = filled("abcdefghij")
    rig.lease(10, timeout=10)
    rig.settle(range(5))
    rig.machine.tick(START + 10)
    assert rig.lease(10).count == 2


def test_a_retry_says_that_the_consumer_lives() -> None:
    rig = filled("abcd")
    rig.lease(4, timeout=10)
    rig.machine.tick(START + 10)
    (lease,) = [rig.lease(4, START + 10, timeout=90)]
    assert lease.count == 2
    rig.settle([4, 5], RETRY, START + 20)
    rig.lease(2, START + 20)
    rig.commit()
    assert rig.lease(4, START + 20).count == 2


def test_a_release_does_not_say_that_the_consumer_lives() -> None:
    rig = filled("abcd")
    rig.lease(4, timeout=10)
    rig.machine.tick(START + 10)
    for _ in range(2):
        lease = rig.lease(4, START + 10)
        assert lease.count == 2
        rig.release(lease, START + 10)
        rig.reload()


# Back-off


def assert_backed_off(waits: list[int]) -> None:
    """These are the delays of RetryBackoff(100, 500), shortened by up to a fifth, and not all by the same part."""
    parts = [wait / longest for wait, longest in zip(waits, [100, 200, 400, 500, 500], strict=True)]
    assert all(0.8 <= part <= 1 for part in parts), waits
    assert len(set(parts)) > 3, waits


def test_a_retry_without_a_time_waits_twice_as_long_each_time_up_to_a_limit() -> None:
    rig = filled("a")
    rig.follow(Rules(backoff=RetryBackoff(100, 500)))
    now, waits = START, []
    for _ in range(5):
        (served,) = rig.served(open_slices(rig.lease(1, now)))
        rig.settle([served.offset], RETRY, now)
        rig.reload()
        timer = rig.machine.next_timer()
        assert timer is not None
        waits.append(timer - now)
        now = timer
        rig.machine.tick(now)
        rig.commit()
    assert_backed_off(waits)


@pytest.mark.parametrize(("disposition", "wait"), [(Disposition("retry", retry_after=7), 7), (Disposition("retry", retry_at=START + 9), 9)])
def test_a_retry_with_a_time_of_its_own_does_not_back_off(disposition: Disposition, wait: int) -> None:
    rig = filled("a")
    rig.follow(Rules(backoff=RetryBackoff(100, 500)))
    rig.lease(1)
    rig.settle([0], disposition)
    assert rig.machine.next_timer() == START + wait


def test_a_release_does_not_back_off() -> None:
    rig = filled("ab")
    rig.follow(Rules(backoff=RetryBackoff(100, 500)))
    rig.lease(2)
    rig.settle([0, 1], RELEASE)
    rig.commit()
    assert (rig.machine.log.ready_count, rig.machine.log.scheduled_count) == (2, 0)


def test_a_lease_that_runs_out_backs_off_as_a_retry_does() -> None:
    rig = filled("a")
    rig.follow(Rules(backoff=RetryBackoff(100, 500)))
    now, waits = START, []
    for _ in range(5):
        rig.lease(1, now, timeout=10)
        rig.reload()
        now += 10
        assert rig.machine.tick(now) == 1
        assert rig.machine.log.ready_count == 0
        rig.reload()
        timer = rig.machine.next_timer()
        assert timer is not None
        waits.append(timer - now)
        now = timer
        rig.machine.tick(now)
    assert_backed_off(waits)
    assert rig.machine.log.header.expired == 5


def test_without_a_back_off_a_lease_that_runs_out_is_offered_again_at_once() -> None:
    rig = filled("ab")
    rig.lease(2, timeout=10)
    assert rig.machine.tick(START + 10) == 2
    rig.commit()
    assert (rig.machine.log.ready_count, rig.machine.log.scheduled_count) == (2, 0)


def test_leases_are_halved_also_where_items_back_off() -> None:
    """The poison item is alone after as many rounds as without a back-off, also if the partition is opened anew while its items wait."""
    rig = filled("abcdefgh")
    rig.follow(Rules(backoff=RetryBackoff(100, 100)))
    now, sizes = START, []
    for _ in range(4):
        lease = rig.lease(8, now, timeout=10)
        sizes.append(lease.count)
        now += 10
        rig.machine.tick(now)
        rig.reload()
        now += 100
        rig.machine.tick(now)
        rig.reload()
        while (ready := rig.machine.log.ready[0]).max_lease_size != max(1, sizes[-1] // 2):
            rig.close(rig.lease(ready.max_lease_size or 8, now), now)
    assert sizes == [8, 4, 2, 1]


def test_a_mass_expiry_with_a_back_off_is_scheduled_by_ranges() -> None:
    rig = filled("x" * 10_000)
    rig.follow(Rules(backoff=RetryBackoff(100, 500)))
    rig.lease(10_000, timeout=10)
    rig.commit()
    rig.machine.tick(START + 10)
    changes = rig.commit()
    assert changes is not None
    assert len(rig.machine.log.dues) == 1
    assert sum(map(len, changes.puts.values())) < 500
    assert rig.machine.tick(START + 110) == 10_000
    rig.commit()
    assert len(rig.machine.log.extents) == 1


# Many small leases


@pytest.mark.parametrize("backoff", [None, RetryBackoff(100, 500)])
def test_neighbours_whose_small_leases_run_out_come_back_as_one(backoff: RetryBackoff | None) -> None:
    rig = filled("x" * 500)
    rig.follow(Rules(backoff=backoff))
    for _ in range(500):
        rig.lease(1, timeout=10)
    rig.reload()
    assert rig.machine.tick(START + 10, 500) == 500
    changes = rig.commit()
    assert changes is not None
    assert sum(kind in (RecordKind.EXTENT, RecordKind.DUE) for kind, _ in changes.puts) == 1
    rig.machine.tick(START + 110)
    assert [(extent.count, extent.max_lease_size) for extent in rig.machine.log.ready] == [(500, 1)]
    rig.commit()
    assert rig.lease(9, START + 110).count == 1, "each was alone in its lease, and is so again"


def test_what_comes_back_in_several_turns_is_one_extent_as_well() -> None:
    rig = filled("x" * 90)
    for _ in range(90):
        rig.lease(1, timeout=10)
    while rig.machine.leases:
        rig.machine.tick(START + 10, 7)
        rig.reload()
    assert [extent.count for extent in rig.machine.log.extents.values()] == [90]


def test_what_comes_back_with_other_attempts_is_not_joined() -> None:
    rig = filled("ab")
    rig.lease(1, timeout=10)
    rig.machine.tick(START + 10)
    rig.lease(1, START + 10)
    rig.settle([1], Disposition("retry", retry_after=0), START + 10)
    rig.commit()
    assert [(served.payload, served.attempts) for served in rig.ready()] == [(b"a", 1), (b"b", 1)]
    rig.lease(1, START + 20, timeout=10)
    rig.lease(1, START + 20, timeout=20)
    rig.machine.tick(START + 30)
    rig.settle([3], RELEASE, START + 30)
    rig.commit()
    assert [(served.payload, served.attempts) for served in rig.ready()] == [(b"a", 2), (b"b", 1)]


def test_leases_that_are_over_are_found_no_more_and_take_no_room_for_long() -> None:
    rig = filled("x" * 4_000)
    for _ in range(4_000):
        rig.lease(1, timeout=10)
    assert rig.machine.tick(START + 10, 3_500) == 3_500
    spans = rig.machine.leases.spans
    assert spans.at(3_400) is None
    assert spans.at(3_600) is not None
    assert len(spans._starts) <= 2 * len(rig.machine.leases) + 1_000
    assert [(len(run), place is None) for run, place in spans.split(array_of([3_498, 3_499, 3_500]))][-1] == (1, False)


# Items that expire


@pytest.mark.parametrize("keeps_dead", [0, 1])
def test_an_item_that_waited_too_long_dies(keeps_dead: int) -> None:
    rig = filled("ab c", expire_timeout=50, keeps_dead=keeps_dead)
    rig.lease(1)
    rig.settle([0])
    rig.reload()
    assert rig.machine.next_timer() == START + 50
    assert rig.machine.tick(START + 49) == 0
    assert rig.machine.tick(START + 50) == 2
    rig.reload()
    assert rig.ready() == []
    assert dying(rig) == ([("expired", [b"b"]), ("expired", [b"c"])] if keeps_dead else [])
    assert rig.machine.log.header.dead == (0 if keeps_dead else 2)
    for number in list(rig.machine.transfers.by_number):
        rig.machine.transfers.end(number)
    rig.commit()
    assert not rig.disk.blobs


def test_a_scheduled_item_expires_so_long_after_it_was_due() -> None:
    rig = Rig(expire_timeout=50)
    rig.produce([Row(b"a", START + 30), Row(b"b")])
    rig.reload()
    assert [rig.machine.tick(START + at) for at in (30, 50, 79, 80)] == [1, 1, 0, 1]
    rig.commit()
    assert rig.machine.log.header.dead == 2


def test_a_live_lease_is_not_taken_away_and_what_it_puts_back_too_late_dies() -> None:
    rig = filled("abcd", expire_timeout=50, keeps_dead=1)
    lease = rig.lease(4, timeout=100)
    rig.reload()
    assert rig.machine.tick(START + 99) == 0
    lease = rig.machine.leases[lease.number]
    rig.settle([0], RETRY, START + 50)
    rig.settle([1], RELEASE, START + 60)
    rig.settle([2], DONE, START + 60)
    rig.machine.tick(START + 100)
    rig.reload()
    late = "expired while it was leased"
    assert dying(rig) == [(late, [b"a"]), (late, [b"b"]), (f"{late}: the lease expired", [b"d"])]
    assert (rig.machine.log.header.completed, rig.machine.log.header.retried, rig.machine.log.header.released) == (1, 0, 0)


def test_a_retry_keeps_the_time_at_which_the_item_expires() -> None:
    rig = filled("a", expire_timeout=50)
    rig.lease(1, START + 40)
    rig.settle([0], RETRY, START + 40)
    rig.reload()
    assert rig.machine.next_timer() == START + 50


def test_an_item_that_is_due_after_it_has_expired_is_not_offered() -> None:
    rig = filled("a", expire_timeout=50)
    rig.lease(1)
    rig.settle([0], Disposition("retry", retry_after=70))
    rig.commit()
    rig.machine.tick(START + 70)
    rig.commit()
    assert rig.ready() == []
    assert rig.machine.log.header.dead == 1


def test_items_that_expire_leave_nothing_in_memory_though_nobody_leases() -> None:
    rig = Rig(expire_timeout=5)
    for turn in range(50):
        rig.produce(rows_of("a", "b"), START + turn)
        rig.machine.tick(START + turn)
        rig.commit()
    assert len(rig.machine.log.ready) == len(rig.machine.log.extents) == 5
    assert len(rig.machine.log.expiries) == 5


def test_what_is_gone_has_no_timer() -> None:
    rig = filled("ab cd", expire_timeout=50)
    rig.lease(3, timeout=1_000)
    rig.machine.clear(True, False, START)
    assert rig.machine.next_timer() == START + 1_000
    rig.commit()


def test_what_is_on_its_way_to_another_queue_has_no_timer() -> None:
    rig = filled("a")
    rig.follow(Rules(expire_timeout=50))
    rig.produce(rows_of("b"))
    rig.commit()
    assert rig.machine.next_timer() == START + 50
    rig.machine.transfers.redrive(array_of([1]), "orders", START)
    assert rig.machine.next_timer() is None
    rig.commit()
