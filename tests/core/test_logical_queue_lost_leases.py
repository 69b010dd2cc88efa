"""Leases nobody was told of come back; items that are cleared, or sent to another queue."""

from __future__ import annotations

import pytest

from sluiceway.core.partition.partition import Partition
from sluiceway.core.queue.lease_scheduler import LEASE_PATIENCE
from sluiceway.core.queue.logical_queue import TRANSFER_RETRY
from sluiceway.core.queue.partition_executor import ExecutorState
from sluiceway.core.queue.tickets import TakeOut, Ticket, TransferBegun, TransferEnd
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Clear, Cleared
from tests.core.core_model import array_of
from tests.core.queue_rig import Rig, array, lease, produce


def filled(*counts: int) -> Rig:
    rig = Rig(len(counts))
    for number, count in enumerate(counts):
        rig.fill(number, count)
    return rig


def attempts(rig: Rig, ticket: Ticket) -> list[int]:
    answer = rig.answers[ticket]
    assert isinstance(answer, list)
    return [piece.attempts for grant in answer for piece in grant.slices]


# ---- given back -----------------------------------------------------------------------------------------------


def test_a_client_that_goes_away_gives_back_what_it_was_about_to_get() -> None:
    rig = filled(3)
    gone = rig.ask(lease(3, 1_000))
    rig.queue.cancel(gone)
    rig.end_all()
    assert rig.durable(0) == (3, 0, 0)
    assert gone not in rig.answers
    after = rig.ask(lease(3))
    rig.end_all()
    assert attempts(rig, after) == [1], "it does not count as an attempt"
    assert rig.queue.stats().partitions[0].released == 3


def test_a_client_that_goes_away_gives_back_what_is_durable_already_while_another_partition_is_awaited() -> None:
    rig = filled(2, 2)
    gone = rig.ask(lease(4, 1_000, most=2))
    rig.end(0)
    rig.queue.cancel(gone)
    rig.cycle()
    rig.end_all()
    assert [rig.durable(number) for number in (0, 1)] == [(2, 0, 0), (2, 0, 0)]


def test_a_client_with_a_lease_key_finds_its_leases_when_it_comes_again() -> None:
    rig = filled(2, 2)
    request = lease(4, 1_000, most=2, key="k")
    gone = rig.ask(request)
    rig.end(0)
    rig.queue.cancel(gone)
    rig.cycle()
    rig.end_all()
    again = rig.ask(request)
    assert [(info.partition, info.items) for info in rig.grants(again)] == [(0, 2), (1, 2)]


def test_a_client_that_was_answered_keeps_its_leases_though_it_hangs_up() -> None:
    rig = filled(3)
    told = rig.ask(lease(3))
    rig.end_all()
    assert rig.grants(told)
    rig.queue.cancel(told)
    rig.cycle()
    rig.end_all()
    assert rig.durable(0) == (0, 3, 0)


def test_a_lease_that_lands_after_its_client_was_told_unknown_comes_back() -> None:
    rig = filled(3)
    late = rig.ask(lease(3, 100))
    rig.wait(100 + LEASE_PATIENCE)
    assert rig.code(late) == "outcome_unknown"
    rig.end_all()
    assert rig.durable(0) == (3, 0, 0)


def test_the_driver_gives_back_a_lease_that_it_could_not_deliver() -> None:
    rig = Rig(2)
    info = rig.take(0, 3)
    rig.queue.give_back(0, info.number)
    rig.queue.give_back(0, 99)
    rig.cycle()
    rig.end_all()
    assert rig.durable(0) == (3, 0, 0)
    rig.queue.give_back(0, info.number)
    rig.cycle()
    assert not rig.commits, "it is over"


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.UNKNOWN])
def test_what_is_given_back_comes_back_although_its_commit_fails(outcome: Outcome, landed: bool) -> None:
    """The store that did not return the items of a lease often takes no commit at that moment either."""
    rig = Rig()
    info = rig.take(0, 3)
    rig.queue.give_back(0, info.number)
    rig.cycle()
    rig.end(0, outcome, landed=landed and outcome is Outcome.UNKNOWN)
    rig.open(0)
    rig.end_all()
    assert rig.durable(0) == (3, 0, 0)
    assert rig.queue.stats().partitions[0].released == 3
    rig.cycle()
    assert not rig.commits, "it is over"


def test_what_is_given_back_while_its_partition_is_away_comes_back_with_it() -> None:
    rig = Rig()
    info = rig.take(0, 3)
    away = rig.ask(produce())
    rig.end(0, Outcome.UNKNOWN)
    rig.queue.give_back(0, info.number)
    rig.cycle()
    rig.open(0)
    rig.end_all()
    assert rig.durable(0) == (4, 0, 0)
    assert rig.produced(away).items == 1


def test_what_is_given_back_is_forgotten_when_the_store_is_read_anew() -> None:
    """It may be another one, with other leases under these numbers."""
    rig = Rig()
    info = rig.take(0, 3)
    rig.queue.retry_now([0], rig.now, anew=True)
    rig.queue.give_back(0, info.number)
    rig.queue.retry_now([0], rig.now, anew=True)
    rig.cycle()
    rig.open(0)
    assert not rig.commits
    assert rig.durable(0) == (0, 3, 0)


def test_a_lease_that_cannot_be_taken_back_does_not_stop_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    info = rig.take(0, 3)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "release", fail)
        rig.queue.give_back(0, info.number)
        rig.cycle()
        rig.cycle()
        rig.open(0)
    assert len(rig.faults) == 1
    assert rig.queue.executors[0].state is ExecutorState.READY
    assert not rig.commits


def test_what_is_given_back_wakes_who_waits() -> None:
    rig = filled(3)
    gone, waiter = rig.ask(lease(3, 1_000)), rig.ask(lease(5, 1_000))
    rig.queue.cancel(gone)
    rig.end(0)
    rig.end(0)
    assert rig.grants(waiter)[0].items == 3


# ---- clear ----------------------------------------------------------------------------------------------------


def cleared(rig: Rig, ticket: Ticket) -> tuple[int, int]:
    answer = rig.answers[ticket]
    assert isinstance(answer, Cleared), answer
    return answer.ready, answer.scheduled


@pytest.mark.parametrize(
    ("ready", "scheduled", "left", "dropped"),
    [
        (True, False, (0, 2, 4), (6, 0)),
        (False, True, (3, 2, 0), (0, 8)),
        (True, True, (0, 2, 0), (6, 8)),
        (False, False, (3, 2, 4), (0, 0)),
    ],
)
def test_clear_drops_what_waits_in_every_partition_and_leaves_what_is_leased(
    ready: bool, scheduled: bool, left: tuple[int, int, int], dropped: tuple[int, int]
) -> None:
    rig = Rig(2)
    for number in range(2):
        rig.take(number, 2)
    for number in range(2):
        rig.fill(number, 3)
        rig.queue.executors[number].put(Ticket(produce(), rig.now), produce(4, due=rig.now + 5_000))
        rig.cycle()
        rig.end_all()
    ticket = rig.ask(Clear(1_000, ready, scheduled))
    assert ticket not in rig.answers
    rig.end_all()
    assert cleared(rig, ticket) == dropped
    assert [rig.durable(number) for number in range(2)] == [left, left]
    assert sum(each.cleared for each in rig.queue.stats().partitions) == sum(dropped)


def test_clear_with_a_partition_down_clears_the_others_and_is_told_to_be_repeated() -> None:
    rig = filled(2, 3, 4)
    rig.queue.executors[1].put(Ticket(produce(), rig.now + 1_000), produce())
    rig.cycle()
    rig.end(1, Outcome.REFUSED)
    rig.end_all()
    ticket = rig.ask(Clear(1_000))
    rig.end_all()
    assert rig.code(ticket) == "unavailable"
    assert [rig.durable(number)[0] for number in (0, 2)] == [0, 0]
    rig.open(1)
    rig.end_all()
    again = rig.ask(Clear(1_000))
    rig.end_all()
    assert cleared(rig, again)[0] >= 3
    assert rig.durable(1) == (0, 0, 0)


# ---- to another queue -----------------------------------------------------------------------------------------


def begun(rig: Rig, ticket: Ticket) -> TransferBegun:
    answer = rig.answers[ticket]
    assert isinstance(answer, TransferBegun), answer
    return answer


def test_ready_items_that_are_taken_out_are_durably_on_their_way_and_then_gone() -> None:
    rig = filled(1, 6)
    ticket = rig.ask(TakeOut(1, array([1, 2, 4, 99]), "orders", 1_000))
    assert not rig.transfers, "not before it is durable"
    rig.end(1)
    (transfer,) = rig.transfers
    assert begun(rig, ticket) == (1, transfer.number, 3, ())
    assert (transfer.partition, transfer.target, transfer.reason) == (1, "orders", "")
    assert [offset for piece in transfer.slices for offset in piece.offsets.tolist()] == [1, 2, 4]
    assert rig.queue.stats().partitions[1].transferring == 3
    rig.queue.transferred(1, transfer.number, TransferEnd(done=True), rig.now)
    rig.cycle()
    rig.end(1)
    stats = rig.queue.stats().partitions[1]
    assert (stats.redriven, stats.transferring, stats.ready, stats.dead) == (3, 0, 3, 0)
    other = rig.ask(lease(9, most=2))
    rig.end_all()
    assert rig.offsets(other) == [0, 0, 3, 5]


def test_items_that_are_not_ready_any_more_are_not_taken_out() -> None:
    rig = Rig()
    rig.take(0, 2)
    commits = rig.commit_count
    ticket = rig.ask(TakeOut(0, array([0, 1]), "orders", 1_000))
    assert begun(rig, ticket) == (0, 0, 0, ())
    assert rig.commit_count == commits


def test_a_redrive_that_failed_is_tried_again_and_one_that_has_nowhere_to_go_comes_back() -> None:
    rig = filled(3)
    rig.ask(TakeOut(0, array([0, 2]), "orders", 1_000))
    rig.end(0)
    first = rig.transfers[0]
    rig.queue.transferred(0, first.number, TransferEnd(), rig.now)
    rig.wait(TRANSFER_RETRY)
    assert [(effect.number, effect.target) for effect in rig.transfers] == [(first.number, "orders")] * 2
    rig.queue.transferred(0, first.number, TransferEnd(nowhere=True), rig.now)
    rig.cycle()
    rig.end(0)
    assert rig.durable(0) == (3, 0, 0)
    assert len(rig.transfers) == 2
    ticket = rig.ask(lease(9))
    rig.end(0)
    assert rig.offsets(ticket) == [1, 3, 4]
    assert attempts(rig, ticket) == [1, 1]


def test_items_that_are_taken_out_go_on_though_the_server_stops_in_between() -> None:
    rig = filled(3)
    rig.ask(TakeOut(0, array([1]), "orders", 1_000))
    rig.end(0)
    after = Rig(opened=False)
    after.stores = rig.stores
    after.open(0)
    assert [(effect.number, effect.target) for effect in after.transfers] == [(rig.transfers[0].number, "orders")]


def test_what_was_seen_before_a_partition_was_opened_anew_is_not_taken_out_of_it() -> None:
    rig = Rig()
    seen = rig.queue.executors[0].opening
    lost = rig.ask(produce(1, 200, text="lost"))
    rig.end(0, Outcome.REFUSED)
    rig.wait(200)
    rig.open(0)
    rig.end_all()
    rig.fill(0, 1)
    stale = rig.ask(TakeOut(0, array_of([0]), "elsewhere", 1_000, seen))
    assert rig.code(stale) == "unavailable"
    assert rig.code(lost) == "unavailable"
    assert rig.durable(0) == (1, 0, 0)
    fresh = rig.ask(TakeOut(0, array_of([0]), "elsewhere", 1_000, rig.queue.executors[0].opening))
    rig.end_all()
    begun = rig.answers[fresh]
    assert isinstance(begun, TransferBegun)
    assert begun.items == 1
