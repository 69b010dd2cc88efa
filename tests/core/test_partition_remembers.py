"""What a partition can tell of an id: what became of it, and where its item is."""

from __future__ import annotations

from random import Random

import pytest
from pyroaring import BitMap

from sluiceway.core.partition import closed_leases
from sluiceway.core.partition.closed_leases import ClosedLeases, unknown_extent
from sluiceway.core.partition.queries import explain
from sluiceway.core.partition.records import LeaseState, Part
from sluiceway.model.changes import RecordKind
from sluiceway.model.requests import RELEASE, Disposition, Settled
from tests.core.core_model import START, Rig, Row, array_of, rows_of

RETRY, DEAD = Disposition("retry"), Disposition("dead", reason="bad")


def filled(*bodies: str, keeps_dead: bool = False, max_attempts: int = 0) -> Rig:
    rig = Rig(keeps_dead=keeps_dead, max_attempts=max_attempts)
    for body in bodies:
        rig.produce(rows_of(*body))
        rig.commit()
    return rig


def reasons(rig: Rig, *offsets: int) -> list[str]:
    result, ignored = rig.settle(offsets)
    assert result == Settled()
    assert [offset for offset, _ in ignored] == [*offsets]
    return [reason for _, reason in ignored]


# Closed leases


def test_each_item_of_a_closed_lease_is_told_apart_also_by_another_owner() -> None:
    rig = filled("abcde")
    lease = rig.lease(5, timeout=10)
    rig.settle([0])
    for offset, disposition in enumerate([RETRY, RELEASE, DEAD], 1):
        rig.settle([offset], disposition)
    assert reasons(rig, 0, 1, 2, 3) == ["completed", "retried", "released", "dead"], "while the lease lives"
    rig.machine.tick(START + 10)
    rig.reload()
    assert reasons(rig, 0, 1, 2, 3, 4) == ["completed", "retried", "released", "dead", "expired"]
    assert rig.machine.lease_of(lease.number, None) == "expired"


def test_a_lease_that_was_completed_whole_is_forgotten_with_its_owner() -> None:
    rig = filled("ab")
    lease = rig.lease(2)
    rig.close(lease)
    rig.commit()
    assert reasons(rig, 0, 1) == ["completed", "completed"]
    rig.reload()
    assert reasons(rig, 0, 1) == ["settled", "settled"]
    assert rig.machine.lease_of(lease.number, None) == "settled"
    assert not rig.disk.records


def test_a_lease_that_ran_out_is_not_called_completed_though_all_its_items_died_of_it() -> None:
    rig = filled("ab", max_attempts=1)
    lease = rig.lease(2, timeout=10)
    rig.machine.tick(START + 10)
    rig.reload()
    assert rig.machine.lease_of(lease.number, None) == "expired"
    assert reasons(rig, 0, 1) == ["expired", "expired"]


def test_a_partition_of_which_only_a_closed_lease_is_left_can_be_loaded() -> None:
    rig = filled("a")
    rig.lease(1)
    rig.settle([0], DEAD)
    rig.reload()
    assert not rig.machine.log.extents
    assert reasons(rig, 0) == ["dead"]


def test_only_the_last_closed_leases_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_leases, "MAX_CLOSED_LEASES", 3)
    rig = filled("abcde")
    for offset in range(5):
        rig.lease(1)
        rig.settle([offset], DEAD)
        rig.commit()
        assert sum(kind is RecordKind.LEASE for kind, _ in rig.disk.records) <= 3
    assert reasons(rig, 0, 1, 2, 3, 4) == ["settled", "settled", "dead", "dead", "dead"]
    rig.reload()
    assert reasons(rig, 1, 2) == ["settled", "dead"]


@pytest.mark.parametrize("seed", range(20))
def test_who_has_completed_a_later_lease_is_known_for_those_that_are_remembered(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And perhaps for longer, but not for ever."""
    monkeypatch.setattr(closed_leases, "MAX_CLOSED_LEASES", 8)
    random, memory, ended = Random(seed), ClosedLeases(), list[tuple[int, str, bool]]()
    numbers = list(range(1, 60))
    # They close in another order than they were taken in.
    for number in sorted(numbers, key=lambda each: each + random.randrange(10)):
        client, whole = random.choice("aaabc"), random.random() < 0.7
        lease = LeaseState(number, [Part(unknown_extent(number, 1), 0, 1, 0)], 1, client, None)
        if not whole:
            lease.tell(random.choice(["expired", "released"]), BitMap([0]))
        memory.add(lease)
        ended.append((number, client, whole))
        for name in "abcd":
            for before in numbers:
                later = [each for each, of, ended_well in ended if of == name and ended_well and each > before]
                known = memory.was_completed_after(before, name)
                assert known or not set(later) & {each for each, _, _ in ended[-8:]}
                assert later or not known
    for number in range(60, 68):
        memory.add(LeaseState(number, [Part(unknown_extent(number, 1), 0, 1, 0)], 1, "z", None))
    assert not any(memory.was_completed_after(0, name) for name in "abcd")
    assert memory.was_completed_after(66, "z")
    assert not memory.was_completed_after(67, "z")


# Cleared and redriven items


def test_clear_leaves_what_is_leased_and_takes_no_payload_along() -> None:
    rig = filled("abc", "def")
    lease = rig.lease(2)
    rig.produce([Row(b"later", START + 50)])
    rig.commit()
    assert rig.machine.clear(True, False, START) == (4, 0)
    rig.reload()
    assert (rig.machine.log.ready_count, rig.machine.leased_count, rig.machine.log.scheduled_count) == (0, 2, 1)
    assert rig.disk.blobs.keys() == {0, 6}
    assert rig.machine.clear(True, True, START) == (0, 1)
    rig.commit()
    rig.close(rig.machine.leases[lease.number])
    rig.commit()
    assert not rig.disk.blobs
    assert rig.machine.log.header.cleared == 5


def test_the_line_goes_on_after_a_clear() -> None:
    rig = filled("abc")
    rig.machine.clear(True, False, START)
    assert not rig.machine.log.ready
    rig.produce(rows_of("d"))
    rig.reload()
    assert [(served.offset, served.payload) for served in rig.ready()] == [(3, b"d")]


def test_items_are_taken_out_of_the_middle_of_the_line_and_the_rest_is_leased_in_order() -> None:
    rig = filled("abcdef", "ghi")
    number, taken = rig.machine.transfers.redrive(array_of([1, 2, 5, 6, 8, 50]), "orders", START)
    assert taken.tolist() == [1, 2, 5, 6, 8]
    rig.reload()
    transfer = rig.machine.transfers.by_number[number]
    assert (transfer.target, transfer.transfer, transfer.open) == ("orders", "", 5)
    assert [served.payload for served in rig.ready()] == [b"a", b"d", b"e", b"h"]
    lease = rig.lease(3)
    assert [(part.first, part.count) for part in lease.parts] == [(0, 1), (3, 2)]
    rig.machine.transfers.call_back(number)
    rig.reload()
    assert [served.offset for served in rig.ready()] == [7, 9, 10, 11, 12, 13]
    assert [served.payload for served in rig.ready()] == [b"h", b"b", b"c", b"f", b"g", b"i"]


# Explain


def test_explain_says_where_an_item_is() -> None:
    rig = filled("abcdef", keeps_dead=True)
    rig.produce([Row(b"later", START + 50)])
    lease = rig.lease(4, client="c", timeout=30)
    rig.settle([0])
    rig.settle([1], RETRY)
    rig.settle([2], DEAD)
    rig.commit()
    told = {offset: explain(rig.machine, offset) for offset in range(-1, 9)}
    assert {offset: each.state for offset, each in told.items()} == {
        -1: "unknown",
        0: "gone",
        1: "gone",
        2: "dying",
        3: "leased",
        4: "ready",
        5: "ready",
        6: "scheduled",
        7: "ready",
        8: "unknown",
    }
    assert (told[3].client_id, told[3].lease, told[3].lease_deadline, told[3].attempts) == ("c", lease.number, START + 30, 1)
    assert [told[offset].ahead for offset in (4, 5, 7)] == [0, 1, 2]
    assert told[6].due_at == START + 50
    assert told[2].reason == "it is on its way to the dead queue: bad"
    assert told[7].reason == "2 items of its partition are served before it; attempt 1 failed"
    rig.machine.max_attempts = 5
    assert explain(rig.machine, 7).reason.endswith("; attempt 1 of 5 failed")
    rig.machine.tick(START + 30)
    rig.reload()
    assert explain(rig.machine, 2).state == "dying"
    assert explain(rig.machine, 3).reason.startswith("its lease ran out")
    assert "at most 1 such item" in explain(rig.machine, 8).reason


def test_a_closed_lease_over_neighbours_is_remembered_as_one_part() -> None:
    rig = Rig()
    for _ in range(1_000):
        rig.produce(rows_of("x"))
        rig.machine.take_changes()
    taken = rig.lease(1_000)
    assert len(taken.parts) == 1_000
    rig.settle([500], Disposition("retry"))
    rig.close(taken)
    assert [part.first for _, part in rig.machine.closed._spans.places_from(0)] == [0]
    assert [rig.machine.closed.why_offset(offset) for offset in (0, 499, 501, 999)] == ["completed"] * 4
    assert [rig.machine.closed.why_offset(offset) for offset in (500, 1_000)] == ["retried", None]


def test_a_closed_lease_over_a_gap_is_remembered_as_what_it_was() -> None:
    rig = Rig()
    rig.produce(rows_of(*"abcdef"))
    rig.commit()
    rig.machine.transfers.redrive(array_of([2, 3]), "elsewhere", START)
    taken = rig.lease(4)
    assert [(part.first, part.count) for part in taken.parts] == [(0, 2), (4, 2)]
    rig.settle([1, 5], Disposition("retry"))
    rig.close(taken)
    rig.commit()
    told = ["completed", "retried", None, None, "completed", "retried"]
    for machine in (rig.machine, rig.loaded()):
        assert [machine.closed.why_offset(offset) for offset in range(6)] == told
