"""A recording of a partition's stored records equals what the store has, at whatever moments they were read and commits were noted."""

from __future__ import annotations

from random import Random

import pytest

from sluiceway.core.partition.recording import Recording
from sluiceway.model.changes import Changes, RecordKey, RecordKind, Snapshot


class Stored:
    """What a store has of a partition, commit by commit."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.txn = 0
        self.records: dict[RecordKey, bytes] = {}

    def commit(self) -> Changes:
        self.txn += 1
        names = [(RecordKind.EXTENT, str(number)) for number in range(6)]
        self.random.shuffle(names)
        cut = self.random.randrange(6)
        puts = dict.fromkeys(names[:cut], b"%d" % self.txn)
        deletes = set(names[cut : self.random.randint(cut, 6)])
        self.records = {name: value for name, value in {**self.records, **puts}.items() if name not in deletes}
        return Changes(self.txn, b"header %d" % self.txn, puts, deletes)

    def read(self) -> Snapshot:
        return Snapshot(self.txn, b"header %d" % self.txn if self.txn else None, dict(self.records))


@pytest.mark.parametrize("seed", range(200))
def test_it_equals_the_store_whenever_the_records_were_read(seed: int) -> None:
    stored, recording = Stored(seed), Recording()
    random = stored.random
    for _ in range(random.randrange(10)):
        stored.commit()
    noted_late: list[Changes] = []
    read: Snapshot | None = None
    reads_at, begins_at = sorted(random.choices(range(20), k=2))
    for step in range(20):
        noted_late.append(stored.commit())
        if step == reads_at:
            read = stored.read()
        # The store may be ahead of what the instance knows to be done.
        while noted_late and random.random() < 0.7:
            recording.note(noted_late.pop(0))
        if step == begins_at:
            assert read is not None
            recording.begin(read)
    for changes in noted_late:
        recording.note(changes)
    assert recording.after(stored.txn) == stored.read()


def test_a_commit_that_landed_and_was_never_noted_is_found_missing() -> None:
    stored, recording = Stored(0), Recording()
    recording.begin(stored.read())
    recording.note(stored.commit())
    assert recording.after(stored.txn) == stored.read()
    stored.commit()
    assert recording.after(stored.txn) is None
    recording.note(stored.commit())
    assert recording.after(stored.txn) is None


def test_a_commit_that_did_not_land_is_followed_by_another_one_with_its_number() -> None:
    stored, recording = Stored(0), Recording()
    recording.begin(stored.read())
    failed = Stored(1).commit()
    recording.note(stored.commit())
    assert failed.txn == stored.txn
    assert recording.after(stored.txn) == stored.read()


def test_there_is_nothing_before_the_records_were_read() -> None:
    assert Recording().after(0) is None
