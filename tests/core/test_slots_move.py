"""Slots that move between partitions which keep keys together: what is held back, what is left, and what may be moved."""

from __future__ import annotations

import pytest

from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import explain
from sluiceway.core.partition.records import LeaseState
from sluiceway.core.partition.slot_contents import SlotContents, slot_contents
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import hash_of
from sluiceway.model.requests import DONE, RELEASE, Disposition, Settled
from tests.core.core_model import START, Rig, Row, array_of, batch_of

OF = 8
ORDER = KeyRules(order=True)
FAR = START + 1_000_000


def key_of(slot: int, nth: int = 0) -> str:
    """A key of that slot."""
    found = (key for number in range(10_000) if hash_of(key := f"k{number}") % OF == slot)
    return [next(found) for _ in range(nth + 1)][-1]


A, B, OTHER_A = key_of(1), key_of(2), key_of(1, 1)


def ruled(keys: KeyRules, backoff: RetryBackoff | None = None) -> Rig:
    rig = Rig(backoff=backoff)
    rig.follow(Rules(backoff=backoff, keys=keys))
    return rig


def produce(rig: Rig, *keys: str | None, due: Millis | None = None, now: Millis = START) -> None:
    rig.machine.produce(batch_of([Row(b"x", key=key, enqueue_at=due) for key in keys]), now)
    rig.commit()


def leased(rig: Rig, now: Millis = START, want: int = 100) -> LeaseState | None:
    return rig.machine.lease(want, "c", now + 1_000, now, runs=True)


def settle(rig: Rig, lease: LeaseState, disposition: Disposition = DONE) -> None:
    offsets = [offset for part in lease.parts for offset in range(part.first, part.end)]
    rig.machine.settle_offsets(array_of(offsets), disposition, START, False, Settled())
    rig.commit()


def left(rig: Rig) -> SlotContents:
    rig.reload()
    return slot_contents(rig.machine.log, rig.machine.transfers.by_number.values())


def test_what_is_held_back_is_stored_and_not_served() -> None:
    rig = ruled(ORDER)
    rig.machine.admission.take_keys([1], OF, 5, {}, START, waits=True)
    produce(rig, A, B, None, OTHER_A)
    rig.reload()
    assert rig.machine.servable == 2
    lease = leased(rig)
    assert lease is not None
    assert lease.count == 2
    assert "rebalance" in explain(rig.machine, 0).reason
    rig.machine.admission.serve_slots([1], 6, START)
    rig.commit()
    assert rig.machine.servable == 2
    rig.reload()
    assert rig.machine.servable == 2
    found = leased(rig)
    assert found is not None
    assert found.count == 2


def test_a_word_from_before_the_slots_were_taken_serves_none() -> None:
    rig = ruled(ORDER)
    rig.machine.admission.take_keys([1], OF, 5, {}, START, waits=True)
    produce(rig, A)
    with pytest.raises(SluicewayError, match="outdated"):
        rig.machine.admission.serve_slots([1], 4, START)
    assert not rig.machine.servable


@pytest.mark.parametrize("held", [True, False])
def test_what_a_slot_has_left(held: bool) -> None:
    """Ready, leased, and returned items; of another slot nothing is said, as long as that is at home here."""
    rig = ruled(ORDER, RetryBackoff(10_000, 10_000))
    produce(rig, A, B, None)
    rig.machine.admission.give_keys([1] if held else [2], OF, 5, 0)
    mine = (1,) if held else (2,)
    assert left(rig).busy == mine
    lease = leased(rig)
    assert lease is not None
    assert left(rig).busy == mine
    lease = rig.machine.leases[lease.number]
    settle(rig, lease, Disposition("retry"))
    assert left(rig) == SlotContents(busy=mine), "it holds up its key, so it stays"
    rig.machine.tick(START + 20_000)
    again = leased(rig, START + 20_000)
    assert again is not None
    settle(rig, again)
    assert left(rig) == SlotContents()


def test_scheduled_items_of_a_slot_that_has_gone_are_moved_to_its_home() -> None:
    rig = ruled(ORDER)
    produce(rig, A, B, None, A, due=FAR)
    rig.machine.admission.give_keys([1, 2], OF, 5, 0)
    assert left(rig) == SlotContents(busy=(1, 2), due=(1, 2), movable=3), "what has no key stays in a partition that stays"
    number, items = rig.machine.transfers.move_out(100, 1e9, 7, True, START, frozenset({1}))
    rig.commit()
    assert items == 2
    assert left(rig) == SlotContents(busy=(1, 2), due=(2,), movable=1), "what is on its way is not there yet"
    rig.machine.transfers.end(number)
    rig.commit()
    assert left(rig) == SlotContents(busy=(2,), due=(2,), movable=1)
    rig.machine.admission.shut("read_only", 6)
    assert left(rig).movable == 2
    number, items = rig.machine.transfers.move_out(100, 1e9, 7, True, START, frozenset({2}))
    assert items == 2
    rig.machine.transfers.end(number)
    rig.commit()
    assert left(rig) == SlotContents()
    assert rig.machine.admission.is_empty


def test_a_retry_that_waits_moves_only_where_keys_do_not_wait_for_it() -> None:
    for keys, moves in ((ORDER, 0), (KeyRules(concurrency=2), 1)):
        rig = ruled(keys, RetryBackoff(10_000, 10_000))
        produce(rig, A)
        lease = leased(rig)
        assert lease is not None
        settle(rig, lease, Disposition("retry"))
        rig.machine.admission.give_keys([1], OF, 5, 0)
        rig.commit()
        assert left(rig).movable == moves
        assert rig.machine.transfers.move_out(100, 1e9, 7, True, START, frozenset({1}))[1] == moves


def test_what_no_slot_keeps_together_may_go_anywhere() -> None:
    """Items that were stored while the queue was only fair have any keys."""
    for keys, asked in ((KeyRules(fair=True), None), (ORDER, frozenset({2}))):
        rig = ruled(KeyRules(fair=True))
        produce(rig, A, B, None, due=FAR)
        rig.follow(Rules(keys=keys))
        rig.machine.admission.give_keys([2], OF, 5, 0)
        rig.machine.admission.shut("read_only", 6)
        rig.commit()
        assert left(rig).movable == 3
        assert rig.machine.transfers.move_out(100, 1e9, 7, True, START, asked)[1] == 3


def test_items_that_may_come_back_are_left() -> None:
    """Those that go to another queue do, if that is deleted meanwhile."""
    rig = ruled(ORDER)
    produce(rig, A)
    rig.machine.admission.give_keys([1], OF, 5, 0)
    number, _ = rig.machine.transfers.redrive(array_of([0]), "elsewhere", START, "incarnat")
    rig.commit()
    assert left(rig).busy == (1,)
    rig.machine.transfers.end(number)
    rig.commit()
    assert left(rig).busy == ()


def test_the_rate_of_a_key_that_has_come_begins_without_a_burst() -> None:
    """Its former home may have leased the whole burst just before. Of a key that turns up later, too."""
    machine = ruled(KeyRules(interval=100.0, burst=5)).machine
    machine.tick(START)
    machine.admission.take_keys([1, 2], OF, 5, {}, START, waits=True)
    machine.produce(batch_of([Row(b"x", key=A)] * 9), START)
    later = START + 60_000
    machine.tick(later)
    assert machine.servable == 0
    machine.admission.serve_slots([1, 2], 6, later)
    assert machine.servable == 0
    machine.tick(later + 100)
    assert machine.servable == 1
    machine.produce(batch_of([Row(b"x", key=B)] * 9), later + 150)
    lease = machine.lease(100, "c", FAR, later + 150)
    assert lease is not None
    assert lease.count == 2, "one of each: 150 ms have passed"


def test_a_rate_does_not_wait_for_the_time_that_a_clock_ahead_has_stored() -> None:
    rig = ruled(KeyRules(interval=100.0, burst=5))
    rig.machine.admission.give_keys([1], OF, 5, 0)
    rig.machine.produce(batch_of([Row(b"x", key=B)] * 9), FAR)
    taken = rig.machine.take_changes()
    assert taken is not None
    rig.disk.apply(taken[0])
    machine = rig.loaded()
    machine.tick(START)
    assert machine.next_timer() == START + 100
    machine.tick(START + 100)
    assert machine.servable == 1


def test_rules_that_change_leave_held_slots_held() -> None:
    rig = ruled(ORDER)
    rig.machine.admission.take_keys([1], OF, 5, {}, START, waits=True)
    produce(rig, A, B)
    rig.follow(Rules(keys=KeyRules(order=True, fair=True)))
    assert rig.machine.servable == 1
    rig.follow(Rules())
    assert rig.machine.servable == 2, "nothing goes by keys"
    rig.follow(Rules(keys=ORDER))
    assert rig.machine.servable == 1
    lease = leased(rig)
    assert lease is not None
    settle(rig, lease, RELEASE)
    assert rig.machine.servable == 1
