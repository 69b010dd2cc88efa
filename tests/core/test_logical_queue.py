"""Produce, settle and failure through a logical queue, one decision at a time."""

from __future__ import annotations

import pytest

from sluiceway.core.queue import logical_queue
from sluiceway.core.queue.logical_queue import TRANSFER_RETRY
from sluiceway.core.queue.partition_executor import SOON
from sluiceway.core.queue.tickets import Commit, Open, TransferEnd
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Extend, Extended, Produced, ProduceKey, Selection, Settle
from tests.core.queue_rig import Rig, lease, produce, settle

REFUSED, UNKNOWN = Outcome.REFUSED, Outcome.UNKNOWN
HOME_OF_K = 0
"""Of two partitions, the home of the key `key-0`."""
KEY = ProduceKey("key-0")


# ---- where a produce goes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("waiting", "chosen"), [([50, 30, 100], 1), ([20, 100, 100], 0)])
def test_a_produce_goes_whole_to_the_emptiest_partition(waiting: list[int], chosen: int) -> None:
    rig = Rig(3)
    for number, count in enumerate(waiting):
        rig.fill(number, count)
    ticket = rig.ask(produce(10))
    assert list(rig.commits) == [chosen]
    rig.end(chosen)
    assert rig.produced(ticket) == Produced(chosen, waiting[chosen], 10, False)


def test_a_partition_is_chosen_until_another_is_emptier() -> None:
    rig = Rig(3)
    for number, count in enumerate([20, 100, 100]):
        rig.fill(number, count)
    chosen = []
    for _ in range(6):
        ticket = rig.ask(produce(20))
        rig.end_all()
        chosen.append(rig.produced(ticket).partition)
    # At 100 each, the one that was never chosen by a request has its turn.
    assert chosen == [0, 0, 0, 0, 1, 2]


def test_leased_and_scheduled_items_break_a_tie() -> None:
    rig = Rig(2)
    rig.take(0, 5)
    ticket = rig.ask(produce())
    rig.end_all()
    assert rig.produced(ticket).partition == 1


def test_requests_that_arrive_while_a_commit_is_in_flight_share_the_next() -> None:
    rig = Rig()
    tickets = [rig.ask(produce()) for _ in range(20)]
    assert not rig.answers
    rig.end(0)
    assert [*rig.answers] == tickets[:1]
    rig.end(0)
    assert [*rig.answers] == tickets
    assert rig.commit_count == 2


def test_a_slow_partition_holds_up_nobody_else() -> None:
    rig = Rig(2)
    slow = rig.ask(produce())
    rig.now += SOON + 1
    quick = rig.ask(produce())
    rig.end(1)
    assert quick in rig.answers
    assert slow not in rig.answers


def test_nobody_is_answered_before_the_commit() -> None:
    rig = Rig()
    ticket = rig.ask(produce())
    rig.land(0)
    rig.wait(100)
    assert ticket not in rig.answers


# ---- refused and unknown --------------------------------------------------------------------------------------


def test_a_refused_produce_is_tried_elsewhere() -> None:
    rig = Rig(2)
    ticket = rig.ask(produce(4))
    rig.end(0, REFUSED)
    assert not rig.answers
    assert list(rig.commits) == [1]
    rig.end(1)
    assert rig.produced(ticket) == Produced(1, 0, 4, False)


@pytest.mark.parametrize("landed", [True, False])
def test_an_unknown_produce_is_tried_nowhere_until_it_is_known_what_became_of_it(landed: bool) -> None:
    rig = Rig(2)
    ticket = rig.ask(produce(4))
    rig.end(0, UNKNOWN, landed=landed)
    assert not rig.commits, "it went to another partition although it may be in the first"
    rig.open(0)
    if not landed:
        assert len(rig.commits) == 1
        rig.end_all()
    assert rig.produced(ticket).items == 4
    assert rig.durable(0)[0] + rig.durable(1)[0] == 4


def test_an_unknown_produce_is_unknown_at_its_timeout_and_nothing_follows() -> None:
    rig = Rig(2)
    ticket = rig.ask(produce(4, timeout=300))
    rig.end(0, UNKNOWN, landed=False)
    rig.wait(299)
    assert not rig.answers
    rig.wait(1)
    assert rig.code(ticket) == "outcome_unknown"
    rig.open(0)
    assert not rig.commits, "the client was told unknown: it is not for us to try again"


def test_a_produce_that_was_not_begun_is_surely_not_done_at_its_timeout() -> None:
    rig = Rig()
    rig.ask(produce())
    ticket = rig.ask(produce(timeout=300))
    rig.wait(300)
    assert rig.code(ticket) == "unavailable"
    rig.end_all()
    assert rig.durable(0)[0] == 1


def test_a_produce_waits_for_a_partition_to_open() -> None:
    rig = Rig(opened=False)
    ticket = rig.ask(produce())
    assert not rig.commits
    rig.open(0)
    rig.end(0)
    assert rig.produced(ticket).items == 1


def test_no_partition_in_time() -> None:
    rig = Rig(2, opened=False)
    ticket = rig.ask(produce(timeout=1_000))
    for _ in range(20):
        for number in list(rig.opens):
            rig.open(number, SluicewayError("unavailable", "no disk"))
        rig.wait(60)
    assert rig.code(ticket) == "unavailable"


def test_a_partition_that_opens_but_takes_no_commit_is_not_opened_without_a_pause() -> None:
    rig = Rig()
    rig.ask(produce(timeout=20_000))
    opened = 0
    until = rig.now + 20_000
    while rig.now < until:
        if rig.commits:
            rig.end(0, REFUSED)
        elif rig.opens:
            rig.open(0)
            opened += 1
        else:
            rig.wait(10)
        assert opened < 30
    assert opened > 3


def test_answers_of_an_earlier_opening_are_not_heard() -> None:
    rig = Rig()
    rig.ask(produce())
    stale = rig.commits[0]
    rig.end(0, UNKNOWN, landed=False)
    first = rig.opens[0].opening
    rig.queue.committed(0, stale.opening, Outcome.DONE, rig.now)
    rig.queue.opened(0, first, SluicewayError("unavailable", "later"), rig.now)
    rig.opens.clear()
    rig.wait(100)
    second = rig.opens[0].opening
    assert second > first > stale.opening - 1
    rig.queue.opened(0, first, rig.stores[0].load(), rig.now)
    rig.cycle()
    assert not rig.commits
    assert not rig.answers


@pytest.mark.parametrize("step", ["produce", "take_changes"])
def test_a_mistake_of_ours_is_told_and_the_partition_is_loaded_anew(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(2)
    monkeypatch.setattr(rig.queue.executors[0].partition, step, _raise)
    ticket = rig.ask(produce())
    assert rig.code(ticket) == "internal"
    assert [fault.partition for fault in rig.faults] == [0]
    other = rig.ask(produce())
    rig.end_all()
    assert rig.produced(other).partition == 1, "the others go on"
    rig.wait(100)
    rig.open(0)
    again = rig.ask(produce())
    rig.end_all()
    assert rig.produced(again) == Produced(0, 0, 1, False)


def _raise(*_: object) -> None:
    raise ZeroDivisionError("planted")


# ---- keys -----------------------------------------------------------------------------------------------------


def test_a_key_waits_for_its_home_though_another_partition_is_open() -> None:
    rig = Rig(2, opened=False)
    rig.open(1 - HOME_OF_K)
    ticket = rig.ask(produce(2, key=KEY))
    assert not rig.commits
    rig.open(HOME_OF_K)
    rig.end(HOME_OF_K)
    assert rig.produced(ticket) == Produced(HOME_OF_K, 0, 2, False)


@pytest.mark.parametrize("landed", [True, False])
def test_a_repetition_after_an_unknown_outcome_adds_nothing(landed: bool) -> None:
    rig = Rig(2)
    first = rig.ask(produce(2, key=KEY, timeout=100))
    rig.end(HOME_OF_K, UNKNOWN, landed=landed)
    rig.wait(100)
    assert rig.code(first) == "outcome_unknown"
    second = rig.ask(produce(2, key=KEY))
    rig.open(HOME_OF_K)
    rig.end_all()
    assert rig.produced(second) == Produced(HOME_OF_K, 0, 2, landed)
    assert rig.durable(HOME_OF_K)[0] == 2


def test_repetitions_in_one_turn_add_nothing() -> None:
    rig = Rig(2)
    tickets = [rig.submit(produce(2, key=KEY)) for _ in range(3)]
    conflict = rig.submit(produce(2, key=KEY, text="other"))
    rig.cycle()
    assert not rig.answers, "the conflict depends on the commit, too"
    rig.end(HOME_OF_K)
    assert [rig.produced(ticket).deduplicated for ticket in tickets] == [False, True, True]
    assert rig.code(conflict) == "key_conflict"
    assert rig.durable(HOME_OF_K)[0] == 2


# ---- settle ---------------------------------------------------------------------------------------------------


def test_a_settle_over_several_partitions_is_done_when_all_are() -> None:
    rig = Rig(3)
    for number in range(3):
        rig.take(number, 4)
    ticket = rig.ask(settle({number: range(4) for number in range(3)}))
    rig.end(2)
    rig.end(0)
    assert ticket not in rig.answers
    rig.end(1)
    assert rig.settled(ticket).completed == 12


def test_a_settle_fails_at_once_when_a_partition_is_down_and_keeps_what_was_done() -> None:
    rig = Rig(2)
    for number in range(2):
        rig.take(number, 4)
    rig.ask(produce())
    rig.end(0, REFUSED)
    rig.end(1)
    ticket = rig.ask(settle({0: range(4), 1: range(4)}))
    rig.end(1)
    assert rig.code(ticket) == "unavailable"
    assert rig.durable(1)[1] == 0
    rig.open(0)
    again = rig.ask(settle({0: range(4), 1: range(4)}))
    rig.end_all()
    answer = rig.settled(again)
    assert answer.completed == 4
    assert answer.ignored == [(f"q.1.{offset}", "completed") for offset in range(4)]


@pytest.mark.parametrize(("landed", "code"), [(True, None), (False, "unavailable")])
def test_a_settle_whose_outcome_was_unknown_is_told_what_became_of_it(landed: bool, code: str | None) -> None:
    rig = Rig()
    rig.take(0, 4)
    ticket = rig.ask(settle({0: range(4)}))
    rig.end(0, UNKNOWN, landed=landed)
    assert not rig.answers.keys() & {ticket}
    rig.open(0)
    if code is None:
        assert rig.settled(ticket).completed == 4
    else:
        assert rig.code(ticket) == code


def test_a_settle_that_waits_behind_a_hung_commit_was_not_begun_at_its_timeout() -> None:
    rig = Rig()
    rig.take(0, 4)
    rig.ask(produce())
    ticket = rig.ask(settle({0: range(4)}, timeout=200))
    rig.wait(200)
    assert rig.code(ticket) == "unavailable"
    rig.end_all()
    assert rig.durable(0)[1] == 4


def test_ids_that_cannot_be_are_ignored_without_a_commit() -> None:
    rig = Rig()
    rig.fill(0, 1)
    commits = rig.commit_count
    ticket = rig.ask(Settle({0: settle({0: [0, 99]}).selections[0]}, 1_000, foreign=["z.0.1"]))
    assert rig.settled(ticket).ignored == [("z.0.1", "unknown"), ("q.0.0", "not_leased"), ("q.0.99", "unknown")]
    alone = rig.ask(Settle({}, 1_000, foreign=["z.0.1"]))
    assert rig.settled(alone).ignored == [("z.0.1", "unknown")]
    assert rig.commit_count == commits


def test_a_lease_is_closed_once() -> None:
    rig = Rig()
    number = rig.take(0, 3).number
    rig.ask(settle({0: [1]}, Disposition("retry"), stage=True))
    rig.end(0)
    close = Settle({0: [Selection(Disposition("done"), lease=number)]}, 1_000)
    first, second = rig.submit(close), rig.submit(close)
    rig.cycle()
    rig.end(0)
    assert (rig.settled(first).completed, rig.settled(first).retried) == (2, 1)
    assert rig.settled(second).ignored == [(f"q.0.L{number}", "completed")]


def test_extend_counts_from_when_it_was_asked() -> None:
    rig = Rig()
    number = rig.take(0, 3).number
    rig.ask(produce())
    ticket = rig.ask(Extend([(0, number), (0, 77)], 5_000, 30_000, foreign=["z.0.L1"]))
    asked_at = rig.now
    rig.wait(100)
    rig.end_all()
    answer = rig.answers[ticket]
    assert isinstance(answer, Extended)
    assert answer.leases == [(0, number, 3, asked_at + 30_000)]
    assert answer.ignored == [("z.0.L1", "unknown"), ("q.0.L77", "unknown")]
    assert rig.stores[0].look().leases[number].deadline == asked_at + 30_000


# ---- cancel, limits, the end ----------------------------------------------------------------------------------


def test_a_cancelled_produce_that_was_not_begun_is_not_begun() -> None:
    rig = Rig()
    rig.ask(produce())
    ticket = rig.ask(produce())
    rig.queue.cancel(ticket)
    rig.end_all()
    assert ticket not in rig.answers
    assert rig.durable(0)[0] == 1


def test_a_cancelled_produce_in_flight_is_not_tried_again() -> None:
    rig = Rig(2)
    ticket = rig.ask(produce())
    rig.queue.cancel(ticket)
    rig.end(0, REFUSED)
    assert not rig.commits
    assert not rig.answers


def test_too_many_requests_wherever_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logical_queue, "MAX_WAITING", 3)
    rig = Rig()
    rig.ask(produce())
    rig.ask(produce())  # waits in the executor, behind the commit
    third = rig.ask(lease(timeout=1_000))
    with pytest.raises(SluicewayError, match="3 requests, the maximum, already wait") as refused:
        rig.submit(produce())
    assert refused.value.code == "too_many_requests"
    rig.queue.cancel(third)
    rig.queue.cancel(third)
    last = rig.ask(produce())
    rig.end_all()
    assert rig.produced(last).items == 1


def test_close_answers_what_waits_and_at_last_what_is_in_flight() -> None:
    rig = Rig(2, opened=False)
    rig.open(0)
    flying, behind = rig.ask(produce()), rig.ask(settle({0: [0]}))
    waits = [rig.ask(lease(timeout=9_000)), rig.ask(lease(timeout=9_000, key="k")), rig.ask(produce(key=ProduceKey("key-4")))]
    rig.queue.close(final=False)
    rig.cycle()
    assert rig.grants(waits[0]) == []
    assert [rig.code(ticket) for ticket in waits[1:]] == ["unavailable"] * 2
    assert not rig.answers.keys() & {flying, behind}
    rig.end(0, UNKNOWN)
    rig.queue.close(final=True)
    rig.cycle()
    assert rig.code(flying) == "outcome_unknown"
    assert rig.code(behind) == "unavailable"


def test_a_stopped_partition_takes_nothing_and_the_others_go_on() -> None:
    rig = Rig(2)
    rig.take(0, 2)
    hung = rig.ask(produce(timeout=400))
    rig.end(1)
    behind = rig.ask(settle({0: [0]}))
    rig.queue.stop_executor(0, "blob 7 is damaged", rig.now)
    rig.cycle()
    ticket = rig.ask(settle({0: [0]}))
    assert rig.code(ticket) == "partition_damaged"
    produced = rig.ask(produce())
    rig.end_all()
    assert rig.produced(produced).partition == 1
    rig.wait(100_000)
    assert not rig.opens, "only a person may open it again"
    assert [each.state for each in rig.queue.stats().partitions] == ["error", "available"]
    assert (hung in rig.answers, behind in rig.answers) == (True, True)


def test_stats_say_where_requests_are() -> None:
    rig = Rig(2, opened=False)
    rig.open(1)
    rig.ask(lease(timeout=9_000))
    rig.ask(produce(key=KEY))
    assert rig.queue.stats().produce_waiting == 1
    rig.ask(produce(3))
    rig.ask(settle({1: [0]}))
    stats = rig.queue.stats()
    assert (stats.produce_waiting, stats.complete_waiting, stats.in_flight) == (1, 1, 2)
    assert [each.state for each in stats.partitions] == ["unavailable", "available"]
    assert stats.partitions[1].produced == 3


# ---- dead items -----------------------------------------------------------------------------------------------


def kill(rig: Rig, partition: int, offsets: list[int]) -> None:
    rig.ask(settle({partition: offsets}, Disposition("dead", reason="bad")))
    rig.end_all()


def test_transfers_of_a_partition_go_one_by_one_in_order() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 3)
    kill(rig, 0, [2])
    kill(rig, 0, [0])
    assert [len(effect.slices) for effect in rig.transfers] == [1]
    first = rig.transfers[0]
    rig.queue.transferred(0, first.number, TransferEnd(done=True), rig.now)
    rig.cycle()
    assert len(rig.transfers) == 1, "the second must not pass the first in the store"
    rig.end(0)
    assert [effect.slices[0].offsets.tolist() for effect in rig.transfers] == [[2], [0]]
    assert rig.transfers[1].number > first.number


def test_a_transfer_that_failed_is_tried_again_later() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 1)
    kill(rig, 0, [0])
    rig.queue.transferred(0, rig.transfers[0].number, TransferEnd(), rig.now)
    rig.wait(TRANSFER_RETRY - 1)
    assert len(rig.transfers) == 1
    rig.wait(1)
    assert rig.transfers[1] == rig.transfers[0]


def test_a_transfer_is_begun_again_when_its_partition_is_opened_again() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 1)
    kill(rig, 0, [0])
    first = rig.transfers[0].number
    rig.ask(produce())
    rig.end(0, UNKNOWN, landed=True)
    rig.open(0)
    assert [effect.number for effect in rig.transfers] == [first, first]
    # Both end well; the second has nothing left to do.
    for _ in range(2):
        rig.queue.transferred(0, first, TransferEnd(done=True), rig.now)
        rig.cycle()
        rig.end_all()
    assert not rig.stores[0].look().transfers.by_number
    assert len(rig.transfers) == 2


def test_effects_name_what_they_are_about() -> None:
    rig = Rig(2, opened=False)
    assert rig.opens == {0: Open(0, 1), 1: Open(1, 1)}
    rig.open(0)
    rig.ask(produce(3))
    commit = rig.commits[0]
    assert isinstance(commit, Commit)
    assert (commit.opening, commit.changes.txn) == (1, 1)
    assert {number: rows.num_rows for number, rows in commit.fresh.items()} == {0: 3}
