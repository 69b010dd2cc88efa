"""Live leases as columns: they are found as objects are, whatever was packed, and an opening makes no object for each."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from sluiceway.core.partition import lease_columns, lease_loading, lease_table
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.lease_columns import ClientTally
from sluiceway.core.partition.lease_table import LeaseTable
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import load, open_slices
from sluiceway.core.partition.records import Blob, Extent, LeaseRecord, LeaseState, Part, pack, unpack_lease
from sluiceway.core.queue.consumer_activity import ConsumerBook, Tally
from sluiceway.kernel.limits import PACKED_AT_ONCE, UNPACKED_LEASES
from sluiceway.model.changes import RecordKind, Snapshot
from sluiceway.model.requests import DONE, RELEASE, Disposition, Settled
from tests.core.core_model import START, Rig, Row, array_of, picture, rows_of

ITEMS = 600


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the newest leases are packed, a few at a time."""
    monkeypatch.setattr(lease_table, "UNPACKED_LEASES", 0)
    monkeypatch.setattr(lease_table, "PACKED_AT_ONCE", 3)
    monkeypatch.setattr(lease_table, "_ROWS", 4)
    monkeypatch.setattr(lease_loading, "MIN_PACKED", 1)


class Twin:
    """A lease table, and the same leases in a dict. Items are leased in order, or (`is_mixed`) in any order."""

    def __init__(self, seed: int, is_mixed: bool) -> None:
        self.random = Random(seed)
        blob = Blob(0, ITEMS, 0, START, 0)
        self.extents = {first: Extent(first, 100, blob, first, None, 0, 100) for first in range(0, ITEMS, 100)}
        self.table = LeaseTable(self.extents)
        self.leases: dict[int, LeaseState] = {}
        self.runs = [(first, self.random.choice([1, 1, 2])) for first in range(0, ITEMS, 2)]
        if is_mixed:
            self.random.shuffle(self.runs)
        self.number = 0

    def enter(self) -> None:
        if not self.runs:
            return
        first, count = self.runs.pop(0)
        self.number += self.random.choice([1, 1, 3])
        extent = self.extents[first - first % 100]
        client, deadline = self.random.choice("abc"), START + self.random.randrange(20)
        lease = LeaseState(
            self.number, [Part(extent, first - extent.first, count, 0)], count, client, deadline, self.random.choice([None, "k"])
        )
        lease.leased_at = START + self.number
        if self.random.random() < 0.1:
            lease.settled.add(0)
        self.leases[lease.number] = lease
        self.table.enter(lease)

    def some(self) -> int | None:
        return self.random.choice(list(self.leases)) if self.leases else None

    def step(self) -> None:
        act, number = self.random.random(), self.some()
        if act < 0.5 or number is None:
            self.enter()
        elif act < 0.65:
            del self.leases[number]
            self.table.remove(number)
        elif act < 0.8:
            deadline = START + self.random.randrange(20)
            self.leases[number].deadline = deadline
            self.table.extend(number, deadline)
        elif act < 0.85:
            self.table.unpack(number).staged[RELEASE] = self.leases[number].settled.copy()
            self.leases[number].staged[RELEASE] = self.leases[number].settled.copy()
        else:
            self.table.pack()

    def compare(self) -> None:
        table, leases = self.table, self.leases
        assert len(table) == len(leases)
        assert list(table) == sorted(leases)
        assert list(table.values()) == [leases[number] for number in sorted(leases)]
        assert [table.find(number) for number in range(self.number + 2)] == [leases.get(number) for number in range(self.number + 2)]
        assert table.next_deadline() == min(((each.deadline, each.number) for each in leases.values()), default=None)
        there = {offset: lease for lease in leases.values() for part in lease.parts for offset in range(part.first, part.end)}
        for offset in self.random.sample(range(ITEMS), 20):
            place = table.at(offset)
            assert (None if place is None else place[0]) == there.get(offset)
        offsets = array_of(self.random.sample(range(ITEMS), 60))
        found = {offset: None if place is None else place[0] for run, place in table.split(offsets) for offset in run.tolist()}
        assert found == {offset: there.get(offset) for offset in offsets.tolist()}
        self.compare_places(there)
        self.compare_tallies()

    def compare_places(self, there: dict[int, LeaseState]) -> None:
        start = self.random.randrange(ITEMS)
        places = list(self.table.places_from(start))
        firsts = [part.first for _, part in places]
        assert firsts == sorted(firsts)
        assert {offset for _, part in places for offset in range(part.first, part.end) if offset >= start} == {
            offset for offset in there if offset >= start
        }
        assert sum(1 for _ in self.table.places_from(0)) == self.table.parts == len(self.leases)
        packed = {number for columns in self.table.columns for number in columns.numbers()}
        assert self.table.packed == len(packed)
        begin, end = start // 2, start
        assert sorted(self.table.packed_offsets(begin, end).tolist()) == sorted(
            offset for offset, lease in there.items() if lease.number in packed and begin <= offset < end
        )

    def compare_tallies(self) -> None:
        tally = Tally(ConsumerBook(), (), START)
        for columns in self.table.columns:
            tally.add_packed(columns.tally())
        tally.add(self.table.objects())
        leases, items = Counter[str](), Counter[str]()
        for lease in self.leases.values():
            leases[lease.client_id] += 1
            items[lease.client_id] += lease.open
        assert {each.client_id: each.leases for each in tally.consumers()} == leases
        assert Counter({each.client_id: each.items for each in tally.consumers()}) == items
        for each in tally.consumers():
            assert each.lease_deadline == min(lease.deadline or 0 for lease in self.leases.values() if lease.client_id == each.client_id)


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_packed_leases_are_found_as_the_others_are(seed: int, is_mixed: bool, small: None) -> None:
    twin = Twin(seed, is_mixed)
    for _ in range(60):
        for _ in range(4):
            twin.step()
        twin.compare()
    for number in list(twin.leases):
        del twin.leases[number]
        twin.table.remove(number)
    twin.compare()
    assert not twin.table.columns


def test_leases_whose_time_is_over_come_in_order_of_deadline_and_number(small: None) -> None:
    twin = Twin(3, False)
    for _ in range(200):
        twin.step()
    expected = sorted((each.deadline, each.number) for each in twin.leases.values())
    found = []
    while (first := twin.table.next_deadline()) is not None:
        found.append(first)
        twin.table.remove(first[1])
    assert found == expected


def test_of_columns_whose_leases_have_mostly_ended_the_rows_are_dropped() -> None:
    table = LeaseTable({0: Extent(0, 5_000, Blob(0, 5_000, 0, START, 0), 0, None, 0, 5_000)})
    leases = [LeaseState(n, [Part(table._extents[0], n, 1, 0)], 1, "c", START + n) for n in range(1_000)]
    table.restore(*lease_columns.rows_of(leases))
    for number in range(999):
        table.remove(number)
    [columns] = table.columns
    assert len(columns._is_live) < 10
    assert columns.tally() == [ClientTally("c", 1, 1, START + 999)]
    assert table.next_deadline() == (START + 999, 999)
    assert table.at(999) is not None


# ---- in a partition -------------------------------------------------------------------------------------------


def filled(items: int, **settings: Any) -> Rig:
    rig = Rig(**settings)
    rig.produce([Row(b"x")] * items)
    return rig


def loaded(snapshot: Snapshot) -> Partition:
    return load(Snapshot(snapshot.txn, snapshot.header, dict(snapshot.records)))


def test_what_a_partition_has_leased_for_long_is_packed_a_bounded_number_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "UNPACKED_LEASES", 100)
    monkeypatch.setattr(lease_table, "PACKED_AT_ONCE", 20)
    rig = filled(500)
    for _ in range(500):
        rig.machine.lease(1, "c", START + 100, START)
    sizes = []
    for _ in range(30):
        rig.machine.log.record_time(START)
        rig.machine.take_changes()
        sizes.append(rig.machine.leases.packed)
    assert max(np.diff([0, *sizes])) == 20
    assert sizes[-1] == 400
    assert len(rig.machine.leases) == rig.machine.leased_count == 500


def test_leases_by_key_are_not_packed_while_they_are_made(small: None) -> None:
    rig = Rig()
    rig.follow(Rules(keys=KeyRules(order=True)))
    rig.produce([Row(b"x", key=f"k{n}") for n in range(20)])
    for _ in range(20):
        rig.lease(1)
    rig.commit()
    assert not rig.machine.leases.packed


def test_the_default_bounds_are_what_the_limits_say() -> None:
    table = LeaseTable({})
    assert (table.unpacked_leases, table.packed_at_once) == (UNPACKED_LEASES, PACKED_AT_ONCE)


def test_an_opening_makes_no_object_for_a_plain_lease(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = filled(50)
    for number in range(40):
        rig.machine.lease(1, f"c{number % 3}", START + 100 + number % 7, START, "k" if number % 5 == 0 else None)
    rig.machine.lease(5, "many", START + 100, START)
    rig.settle([42], DONE)
    rig.commit()
    made: list[LeaseState] = []
    original = LeaseState

    def noting(*arguments: Any, **named: Any) -> LeaseState:
        made.append(original(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(lease_columns, "LeaseState", noting)
    machine = rig.loaded()
    assert machine.next_timer() == START + 100
    assert len(machine.leases) == 41
    assert not made
    assert [lease.client_id for lease in machine.leases.objects()] == ["many"]
    assert picture(machine) == picture(rig.machine)
    assert len(made) >= 40


@pytest.mark.parametrize("timeout", [10, 20])
def test_packed_leases_run_out_as_the_others_do(timeout: int, small: None) -> None:
    rig = filled(300, max_attempts=2, keeps_dead=True)
    for _ in range(2):
        for _ in range(300):
            rig.lease(1, timeout=timeout)
        rig.reload()
        assert rig.machine.leases.packed == 300
        assert [rig.machine.tick(START + timeout - 1), rig.machine.tick(START + timeout, 100)] == [0, 100]
        rig.reload()
        assert rig.machine.tick(START + timeout, 1_000) == 200
        rig.commit()
    assert sum(lease.open for lease in rig.machine.transfers.by_number.values()) == 300
    assert rig.machine.log.header.expired == 300


def test_an_expired_lease_that_was_not_handled_yet_is_settled_as_ever(small: None) -> None:
    """A settlement after the deadline counts as long as no timer has ended the lease."""
    rig = filled(6)
    numbers = [rig.lease(1, timeout=10).number for _ in range(6)]
    rig.reload()
    assert rig.machine.leases.packed == 6
    rig.settle([0], DONE, START + 50)
    lease = rig.machine.lease_of(numbers[1], "c")
    assert isinstance(lease, LeaseState)
    rig.close(lease, START + 50)
    rig.machine.extend(rig.machine.leases[numbers[2]], START + 100)
    assert rig.machine.tick(START + 50) == 3
    assert rig.machine.lease_of(numbers[3], "c") == "expired"
    assert rig.settle([3], DONE, START + 50)[1] == [(3, "expired")]
    assert list(rig.machine.leases) == [numbers[2]]
    rig.reload()
    assert rig.machine.next_timer() == START + 100


@pytest.mark.parametrize("disposition", [DONE, RELEASE, Disposition("retry"), Disposition("dead", reason="bad")])
@pytest.mark.parametrize("stage", [False, True])
def test_what_is_settled_of_packed_leases_is_kept(disposition: Disposition, stage: bool, small: None) -> None:
    rig = filled(12)
    lease, whole = rig.lease(4), rig.lease(3)
    rig.lease(5)
    rig.reload()
    assert rig.machine.leases.packed == 3
    rig.settle([1, 4, 5, 6], disposition, stage=stage)
    rig.reload()
    kept = rig.machine.leases[lease.number]
    assert kept.open == (4 if stage else 3)
    assert (whole.number in rig.machine.leases) == stage
    rig.settle([0, 1, 2, 3])
    rig.commit()
    assert lease.number not in rig.machine.leases


def test_records_that_only_look_like_plain_ones_are_decoded_one_by_one(small: None) -> None:
    rig = filled(8)
    first, second = rig.lease(2), rig.lease(1)
    rig.commit()
    name = (RecordKind.LEASE, str(first.number))
    plain = unpack_lease(rig.disk.records[name])
    # The bytes at the end of the last bit map are those of a plain lease's fields.
    bits = b"\x01" + bytes(4) + lease_loading._TAIL[:5]
    odd = pack(LeaseRecord(plain.ranges, "c", plain.deadline, None, None, b"", [], [("expired", bits)]))
    assert odd.endswith(lease_loading._TAIL)
    assert odd.startswith(lease_loading._HEAD)
    rig.disk.records[name] = odd
    machine = rig.loaded()
    assert [lease.number for lease in machine.leases.objects()] == [first.number]
    assert "expired" in machine.leases[first.number].dispositions
    assert machine.leases.packed == 1
    assert second.number in machine.leases


def test_leases_with_long_names_and_large_numbers_are_loaded(small: None) -> None:
    rig = Rig()
    rig.machine.log.header.head = rig.machine.log.header.next = 1 << 33
    rig.machine.log.header.lease_number = 70_000
    rig.produce([Row(b"x")] * 40)
    for client in ("", "é", "c" * 31, "c" * 32, "c" * 300, "c" * 60_000):
        for key in (None, "", "k", "k" * 40):
            rig.machine.lease(1, client, START + 100, START, key)
    rig.machine.lease(1, "c" * 70_000, START + 100, START)
    rig.commit()
    machine = rig.loaded()
    assert (len(machine.leases), machine.leases.packed) == (25, 24)


def test_records_of_earlier_versions_are_loaded(small: None) -> None:
    """They have fewer fields."""
    rig = filled(3)
    numbers = [rig.lease(1).number for _ in range(3)]
    rig.commit()
    for number in numbers[:2]:
        name = (RecordKind.LEASE, str(number))
        record = unpack_lease(rig.disk.records[name])
        rig.disk.records[name] = pack([record.ranges, record.client_id, record.deadline, None, None, b"", []])
    machine = loaded(rig.disk.snapshot())
    assert list(machine.leases) == numbers
    assert machine.leases.packed == 1
    assert machine.leased_count == 3


def test_packed_records_are_whole_again() -> None:
    rig = filled(5)
    for _ in range(5):
        rig.lease(1)
    rig.commit()
    plain = rig.disk.snapshot()
    leases = [(int(key), data) for (kind, key), data in plain.records.items() if kind is RecordKind.LEASE]
    rest = {name: data for name, data in plain.records.items() if name[0] is not RecordKind.LEASE}
    packed = Snapshot(plain.txn, plain.header, rest, [lease_loading.packed_records(leases[:2]), lease_loading.packed_records(leases[2:])])
    assert packed.size == plain.size == len(plain.records)
    assert packed.whole() == plain
    assert picture(load(packed)) == picture(load(plain))


def test_packed_leases_keep_the_blobs_of_their_items(small: None) -> None:
    rig = Rig()
    rig.produce(rows_of(*"abcdefgh"))
    leases = [rig.lease(1) for _ in range(8)]
    rig.reload()
    for lease in leases[1:7]:
        result = Settled()
        rig.machine.close_lease(rig.machine.leases[lease.number], START, result)
        assert result.completed == 1
    assert rig.compact() == 1
    rig.reload()
    assert [served.payload for lease in rig.machine.leases.values() for served in rig.served(open_slices(lease))] == [b"a", b"h"]


def test_leases_under_a_key_keep_their_order_when_only_some_of_them_are_packed(small: None) -> None:
    """One that has items of two blobs is no row of the columns."""
    rig = Rig()
    rig.produce(rows_of(*"ab"))
    rig.commit()
    rig.produce(rows_of(*"cd"))
    numbers = [rig.lease(want, key="k").number for want in (3, 1)]
    rig.reload()
    assert [lease.number for lease in rig.machine.keyed("c", "k")] == numbers
