"""A logical queue whose partitions are drained, held back, shut and emptied, and whose keys move, while requests are under way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sluiceway.contract.rebalances import PartitionState
from sluiceway.core.partition.key_slots import home_of, slots_of, spread
from sluiceway.core.queue.tickets import KeysTaken, Ticket, TransferBegun, TransferEnd
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import GiveKeys, KeysGiven, MoveOut, Shut, Shutted, Shutting, TakeKeys
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.requests import MovedItem, Produce, Produced, ProduceKey
from tests.core.queue_rig import Rig, lease, produce, settle

KEY = ProduceKey("k")
TIMEOUT: Millis = 5_000


def parts(*states: PartitionState) -> tuple[PartitionRecord, ...]:
    return tuple(PartitionRecord(number, state=state) for number, state in enumerate(states))


def shut(rig: Rig, partition: int, shutting: Shutting, cursor: int = 1) -> Ticket:
    return rig.ask(Shut(partition, shutting, cursor, TIMEOUT))


def answer(rig: Rig, ticket: Ticket) -> object:
    rig.end_all()
    return rig.answers[ticket]


# ---- what the record allows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["draining", "preparing", "paused"])
def test_only_available_partitions_take_items(state: PartitionState) -> None:
    rig = Rig(2)
    rig.configure(partitions=parts(state, "available"))
    for _ in range(3):
        ticket = rig.ask(produce())
        rig.end_all()
        assert rig.produced(ticket).partition == 1
    named = rig.ask(Produce(produce().batch, 400, partition=0))
    rig.wait(399)
    assert named not in rig.answers
    rig.configure(partitions=parts("available", "available"))
    rig.end_all()
    assert rig.produced(named).partition == 0


@pytest.mark.parametrize(("state", "gives"), [("available", True), ("draining", True), ("preparing", False), ("paused", False)])
def test_what_a_partition_gives_out_goes_by_its_state(state: PartitionState, gives: bool) -> None:
    rig = Rig(1)
    rig.fill(0, 2)
    rig.configure(partitions=parts(state))
    waiting = rig.ask(lease(timeout=1_000))
    rig.end_all()
    assert (waiting in rig.answers) == gives
    rig.configure(partitions=parts("available"))
    rig.end_all()
    assert rig.grants(waiting)[0].partition == 0


def test_what_is_leased_can_be_settled_in_every_state() -> None:
    rig = Rig(1)
    rig.take(0, 2)
    rig.configure(partitions=parts("paused"))
    done = rig.ask(settle({0: [0, 1]}))
    rig.end_all()
    assert rig.settled(done).completed == 2


def test_a_partition_that_is_held_back_gives_out_nothing_before_those_it_follows_are_gone() -> None:
    rig = Rig(2)
    rig.configure(partitions=(PartitionRecord(0, state="draining"), PartitionRecord(1, parents=(0,), after=(0,))))
    first = rig.ask(produce())
    rig.end_all()
    assert rig.produced(first).partition == 1
    empty = rig.ask(lease())
    rig.end_all()
    assert rig.grants(empty) == []
    waiting = rig.ask(lease(timeout=9_000))
    rig.configure(partitions=(PartitionRecord(1, parents=(0,), after=(0,)),))
    rig.end_all()
    assert [info.partition for info in rig.grants(waiting)] == [1]


def test_what_waits_in_a_executor_looks_elsewhere_when_the_partition_may_not_take_it_any_more() -> None:
    rig = Rig(2)
    rig.ask(Produce(produce().batch, TIMEOUT, partition=0))
    behind = [rig.ask(Produce(produce().batch, TIMEOUT, partition=None)) for _ in range(4)]
    assert rig.queue.executors[0].waiting or rig.queue.executors[1].waiting
    rig.configure(partitions=parts("draining", "available"))
    rig.end_all()
    assert rig.produced(behind[-1]).partition == 1
    assert not rig.queue.executors[0].waiting


def test_requests_keep_their_order_when_they_look_again() -> None:
    rig = Rig(1)
    rig.ask(produce())
    behind = [rig.ask(produce()) for _ in range(3)]
    rig.configure(partitions=parts("paused"))
    rig.end_all()
    late = rig.ask(produce())
    rig.configure(partitions=parts("available"))
    rig.end_all()
    assert [rig.produced(ticket).first_offset for ticket in (*behind, late)] == [1, 2, 3, 4]


def test_a_partition_that_is_not_in_the_record_is_asked_for_nothing() -> None:
    rig = Rig(2)
    rig.fill(1, 1)
    rig.configure(partitions=(PartitionRecord(0),))
    tickets = [rig.ask(produce()) for _ in range(2)]
    rig.end_all()
    assert {rig.produced(ticket).partition for ticket in tickets} == {0}


def test_a_new_partition_that_does_not_open_does_not_hold_up_leases_with_keys() -> None:
    rig = Rig(2, opened=False)
    rig.open(0)
    rig.configure(partitions=parts("available", "preparing"))
    rig.fill(0, 1)
    ticket = rig.ask(lease(key="k"))
    rig.end_all()
    assert len(rig.grants(ticket)) == 1


def test_stats_show_the_recorded_state_of_what_is_served() -> None:
    rig = Rig(5)
    rig.configure(partitions=parts("available", "preparing", "draining", "paused", "draining"))
    rig.queue.stop_executor(4, "damaged", rig.now)
    assert [each.state for each in rig.queue.stats().partitions] == ["available", "preparing", "draining", "paused", "error"]


# ---- shut -----------------------------------------------------------------------------------------------------


def test_a_produce_that_meets_a_shut_partition_goes_elsewhere_at_once() -> None:
    rig = Rig(2)
    rig.ask(Produce(produce().batch, TIMEOUT, partition=0))
    shutting = rig.submit(Shut(0, "read_only", 1, TIMEOUT))
    ticket = Ticket(produce(), rig.now + TIMEOUT)
    rig.queue.submit(ticket)
    del rig.queue.produces[ticket.number]
    rig.queue.executors[0].put(ticket, produce())
    rig.end(0)
    assert rig.queue.wake_at() == rig.now
    rig.cycle()
    rig.end_all()
    assert rig.answers[shutting] == Shutted("read_only", ready=1)
    assert rig.produced(ticket).partition == 1
    assert rig.queue.wake_at() is None


def test_a_produce_that_no_partition_takes_waits_without_a_turn() -> None:
    rig = Rig(1)
    shut(rig, 0, "read_only")
    rig.end_all()
    ticket = rig.ask(produce(timeout=400))
    keyed = rig.ask(produce(timeout=400, key=KEY))
    assert rig.queue.wake_at() == rig.now + 400
    rig.wait(400)
    assert rig.code(ticket) == rig.code(keyed) == "unavailable"


def test_a_partition_stays_shut_for_an_owner_that_knows_nothing_of_it() -> None:
    rig = Rig(2)
    shut(rig, 0, "read_only")
    rig.end_all()
    rig.queue.retry_now([0], rig.now, anew=True)
    rig.cycle()
    rig.open(0)
    ticket = rig.ask(produce())
    rig.end_all()
    assert rig.produced(ticket).partition == 1


def test_a_seal_comes_after_all_else_of_its_turn() -> None:
    rig = Rig(1)
    busy = rig.ask(produce())
    rig.submit(settle({0: [0]}))
    sealing = rig.submit(Shut(0, "sealed", 1, TIMEOUT))
    late = rig.submit(produce())
    assert busy not in rig.answers
    rig.end_all()
    assert rig.answers[sealing] == Shutted("open", ready=2)
    assert rig.produced(late).partition == 0
    taken = rig.ask(lease(2))
    rig.end_all()
    done = rig.submit(settle({0: [0, 1]}))
    again = rig.ask(Shut(0, "sealed", 1, TIMEOUT))
    rig.end_all()
    assert rig.settled(done).completed == len(rig.offsets(taken)) == 2
    assert rig.answers[again] == Shutted("sealed")


@pytest.mark.parametrize("landed", [True, False])
def test_whether_it_is_shut_is_known_when_the_commit_is(landed: bool) -> None:
    rig = Rig(1)
    ticket = shut(rig, 0, "sealed")
    rig.end(0, Outcome.UNKNOWN, landed=landed)
    assert ticket not in rig.answers
    rig.wait(100)
    rig.open(0)
    if landed:
        assert rig.answers[ticket] == Shutted("sealed")
    else:
        assert rig.code(ticket) == "unavailable"
    assert rig.queue.executors[0].partition.admission.shutting == ("sealed" if landed else "open")
    assert rig.queue.executors[0].takes_items != landed


def test_an_old_coordinator_is_refused() -> None:
    rig = Rig(1)
    shut(rig, 0, "read_only", 3)
    rig.end_all()
    old = shut(rig, 0, "open", 2)
    moved = rig.ask(MoveOut(0, 1, 10, 2, TIMEOUT))
    rig.end_all()
    assert rig.code(old) == rig.code(moved) == "version_conflict"


def test_what_is_asked_of_a_partition_that_is_not_open_is_refused_at_once() -> None:
    rig = Rig(1, opened=False)
    for request in (
        Shut(0, "sealed", 1, TIMEOUT),
        GiveKeys(0, (0,), 8, 1, TIMEOUT),
        TakeKeys(0, (0,), 8, 1, {}, TIMEOUT),
        MoveOut(0, 1, 1, 1, TIMEOUT),
    ):
        assert rig.code(rig.ask(request)) == "unavailable"
        assert rig.code(rig.ask(type(request)(7, *(getattr(request, name) for name in request.__slots__[1:])))) == "not_here"


# ---- keys -----------------------------------------------------------------------------------------------------


def record(slots: Sequence[int], *states: PartitionState) -> QueueRecord:
    return QueueRecord("q", "q", 0, 0, parts(*states), slots=tuple(slots))


def test_a_key_is_answered_with_its_first_place_wherever_its_home_has_gone() -> None:
    rig = Rig(2)
    before = record((), "available", "available")
    rig.configure(partitions=before.partitions)
    slots = slots_of(before)
    home = home_of(before, KEY)
    first = rig.ask(produce(key=KEY))
    rig.end_all()
    assert rig.produced(first).partition == home
    other = 1 - home
    mine = tuple(place for place, each in enumerate(slots) if each == home)
    rig.configure(partitions=before.partitions, slots=tuple(MOVING if each == home else each for each in slots))
    waiting = rig.ask(produce(key=KEY))
    assert not rig.commits
    given = answer(rig, rig.ask(GiveKeys(home, mine, len(slots), 1, TIMEOUT)))
    assert isinstance(given, KeysGiven)
    assert (given.partition, list(given.keys)) == (home, ["kk"])
    taken = answer(rig, rig.ask(TakeKeys(other, mine, len(slots), 1, given.keys, TIMEOUT)))
    assert taken == KeysTaken(other, 1)
    assert waiting not in rig.answers
    rig.configure(partitions=before.partitions, slots=(other,) * len(slots))
    rig.end_all()
    assert rig.produced(waiting) == rig.produced(first)._replace(deduplicated=True)
    assert rig.queue.executors[other].partition.log.header.deduplicated == 1


def test_a_home_that_has_given_its_keys_away_takes_none_though_the_record_says_so() -> None:
    rig = Rig(1)
    rig.configure(partitions=parts("available"))
    busy = rig.ask(produce())
    giving = rig.submit(GiveKeys(0, tuple(range(256)), 256, 1, TIMEOUT))
    keyed = rig.submit(produce(timeout=400, key=KEY))
    rig.end_all()
    assert busy in rig.answers
    assert giving in rig.answers
    rig.wait(400)
    assert rig.code(keyed) == "unavailable"


def test_slots_are_divided_with_the_fewest_moves() -> None:
    slots = slots_of(record((), "available", "available", "available"))
    assert len(slots) == 258
    further = spread(slots, [0, 1, 2, 3])
    assert sum(a != b for a, b in zip(slots, further, strict=True)) == 64
    assert spread(further, [0, 1, 2]).count(0) == 86


# ---- items move -----------------------------------------------------------------------------------------------


def move(rig: Rig, partition: int, lives: tuple[MovedItem, ...], number: int = 1, timeout: Millis = TIMEOUT) -> Ticket:
    rows = batch_from_rows([{"payload": b"m", "origin": f"q.9.{n}"} for n in range(sum(life.rows for life in lives))])
    return rig.ask(Produce(rows, timeout, ProduceKey(f"move/q.9/{number}", "move/q.9", number), partition, lives))


def test_a_move_begins_with_what_its_items_have_behind_them() -> None:
    rig = Rig(2)
    rig.take(0, 3)
    retry = rig.ask(settle({0: [0]}))
    rig.fill(0, 2)
    rig.end_all()
    assert rig.settled(retry).completed == 1
    begun = answer(rig, rig.ask(MoveOut(0, 1, 10, 0, TIMEOUT)))
    assert begun == TransferBegun(0, 2, 2)
    (transfer,) = rig.transfers
    assert (transfer.moves_to, transfer.target, transfer.lives) == (1, "#1", (MovedItem(2, rig.now),))
    assert answer(rig, rig.ask(MoveOut(0, 1, 10, 0, TIMEOUT))) == TransferBegun(0, 0, 0)
    assert answer(rig, shut(rig, 0, "sealed")) == Shutted("open", leased=2, transferring=2, moving=2)
    rig.queue.transferred(0, 2, TransferEnd(done=True), rig.now)
    rig.cycle()
    rig.end_all()
    stats = rig.queue.stats().partitions[0]
    assert (stats.moved, stats.transferring, stats.dead, stats.redriven) == (2, 0, 0, 0)


def test_a_limit_of_a_move_is_what_one_produce_may_have() -> None:
    rig = Rig(1)
    for _ in range(2):
        ticket = rig.ask(produce(6_000))
        rig.end_all()
        assert rig.produced(ticket).items == 6_000
    begun = answer(rig, rig.ask(MoveOut(0, 1, 1_000_000, 0, TIMEOUT)))
    assert isinstance(begun, TransferBegun)
    assert begun.items == 10_000


def test_moved_items_come_in_though_the_queue_is_paused_and_the_partition_takes_no_others() -> None:
    rig = Rig(1)
    rig.configure(partitions=parts("draining"), paused=("produce",))
    shut(rig, 0, "read_only")
    rig.end_all()
    ticket = move(rig, 0, (MovedItem(2, rig.now - 5, 3),))
    rig.end_all()
    assert rig.produced(ticket) == Produced(0, 0, 2, False)
    stats = rig.queue.stats().partitions[0]
    assert (stats.moved_in, stats.produced, stats.ready) == (2, 0, 2)


def test_a_sealed_partition_says_what_it_took_and_takes_no_more() -> None:
    rig = Rig(1)
    life = (MovedItem(1, rig.now),)
    first = move(rig, 0, life)
    rig.end_all()
    rig.ask(lease())
    rig.end_all()
    rig.ask(settle({0: [0]}))
    rig.end_all()
    assert answer(rig, shut(rig, 0, "sealed")) == Shutted("sealed")
    again, other = move(rig, 0, life), move(rig, 0, life, 2, 400)
    rig.end_all()
    assert rig.produced(again) == rig.produced(first)._replace(deduplicated=True)
    rig.wait(400)
    assert rig.code(other) == "unavailable"


def test_lives_that_do_not_fit_are_refused() -> None:
    rig = Rig(1)
    ticket = rig.ask(Produce(produce(3).batch, TIMEOUT, ProduceKey("move/q.9/1", "move/q.9", 1), 0, (MovedItem(2, 0),)))
    rig.end_all()
    error = rig.answers[ticket]
    assert isinstance(error, SluicewayError)
    assert error.code == "invalid_request"
    assert rig.durable(0) == (0, 0, 0)


# ---- what waits, and what is being written --------------------------------------------------------------------


def test_a_produce_by_key_that_waits_in_its_home_looks_again_when_the_home_moves() -> None:
    rig = Rig(2)
    slots = [0] * 256
    rig.configure(partitions=parts("available", "available"), slots=tuple(slots))
    busy = rig.ask(Produce(produce().batch, TIMEOUT, partition=0))
    keyed = rig.ask(produce(key=KEY))
    assert [ticket for ticket, _ in rig.queue.executors[0].waiting] == [keyed]
    rig.configure(partitions=parts("available", "available"), slots=(MOVING,) * 256)
    rig.end_all()
    assert busy in rig.answers
    assert keyed not in rig.answers
    rig.configure(partitions=parts("available", "available"), slots=(1,) * 256)
    rig.end_all()
    assert rig.produced(keyed).partition == 1


def test_what_came_first_is_first_also_among_those_that_have_not_had_a_turn() -> None:
    rig = Rig(1)
    rig.ask(produce())
    behind = [rig.ask(produce()) for _ in range(2)]
    last = rig.submit(produce())
    rig.configure(partitions=parts("draining"))
    rig.configure(partitions=parts("available"))
    rig.end_all()
    assert [rig.produced(ticket).first_offset for ticket in (*behind, last)] == [1, 2, 3]


def test_a_lease_passes_over_what_is_held_back() -> None:
    rig = Rig(2)
    rig.fill(0, 2)
    rig.fill(1, 1)
    rig.configure(partitions=parts("paused", "available"))
    ticket = rig.ask(lease(9, most=2))
    rig.end_all()
    assert [(info.partition, info.items) for info in rig.grants(ticket)] == [(1, 1)]


def test_a_lease_does_not_wait_for_the_commit_of_a_partition_that_gives_out_nothing() -> None:
    rig = Rig(1)
    rig.take(0, 1)
    rig.fill(0, 1)
    rig.configure(partitions=parts("paused"))
    rig.ask(settle({0: [0]}))
    assert rig.commits
    ticket = rig.ask(lease())
    assert rig.grants(ticket) == []
