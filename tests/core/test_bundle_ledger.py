"""Counts of bundles: random histories of several partitions beside a model that keeps one object an item; and a driver that reads them at
different moments, crashes at any step, and is answered by former owners."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from pyroaring import BitMap

from sluiceway.core.bundles import lifecycle
from sluiceway.core.bundles.lifecycle import KEPT_FOR, LATEST, OPEN_FOR, REACH, SOONEST, decide, due, wants
from sluiceway.core.partition.blob_values import BlobValues
from sluiceway.core.partition.bundle_ledger import BundleLedger
from sluiceway.core.partition.compaction import open_rows
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.partition.queries import lives_of, load, open_slices
from sluiceway.core.partition.records import REDRIVEN, by_part, rows_of_part, to_array, unpack_blob
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.changes import RecordKind
from sluiceway.model.item_keys import NO_KEY, hash_of
from sluiceway.model.leased_items import take_rows
from sluiceway.model.requests import (
    DONE,
    MOVE_GROUP,
    RELEASE,
    BundleCount,
    BundleCounts,
    CountBundles,
    Disposition,
    Offsets,
    ProduceKey,
    Settled,
)
from tests.core.core_model import START, Rig, array_of, batch_of, either_form, rows_of

PARTITIONS = 3
BUNDLES = ("a", "b", "c")
BLOCKS = 6


@dataclass
class Thing:
    """An item. `ended`: how; None: it has not."""

    bundle: str | None
    ended: str | None = None


@dataclass
class Told:
    """What is known of all items, by their payload; and of the bundles."""

    things: dict[str, Thing] = field(default_factory=dict)
    closed: set[tuple[int, str]] = field(default_factory=set)
    """The partitions in which a bundle is closed."""

    def count(self, bundle: str) -> BundleCount:
        those = [each for each in self.things.values() if each.bundle == bundle]
        ended = Counter(each.ended for each in those)
        return BundleCount(len(those), ended["completed"], ended["dead"], ended["dropped"])


class World:
    """Partitions of a queue. Each act is one transaction of one of them, which may be lost."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = START
        self.keeps_dead = self.random.random() < 0.5
        self.rules = Rules(self.random.choice([0, 3]), self.keeps_dead, self.random.choice([0, 0, 500]), None, "dead")
        self.rigs = [Rig() for _ in range(PARTITIONS)]
        for rig in self.rigs:
            rig.follow(self.rules)
        self.told = Told()
        self.moves: dict[tuple[int, int], int] = {}
        """The moves under way: by source and transfer number, the target."""
        self.arrived: set[tuple[int, int]] = set()
        self.keys = 0
        self.acts = [
            self.produce,
            self.produce,
            self.lease,
            self.settle,
            self.settle,
            self.settle,
            self.tick,
            self.drop,
            self.redrive,
            self.end_transfer,
            self.move,
            self.arrive,
            self.arrive,
        ]

    def live(self, acts: int) -> None:
        for _ in range(acts):
            self.act()

    def act(self) -> None:
        number = self.random.randrange(PARTITIONS)
        rig, before = self.rigs[number], (copy.deepcopy(self.told), dict(self.moves), set(self.arrived))
        alive = self.alive(number)
        how = self.random.choice(self.acts)(number)
        if self.random.random() < 0.15:
            # The transaction is lost: what is loaded is what was before.
            rig.machine = rig.loaded()
            self.told, self.moves, self.arrived = before
        else:
            rig.commit()
            for name in alive - self.alive(number):
                if how != "moved":
                    assert self.told.things[name].ended is None
                    self.told.things[name].ended = how
        if self.random.random() < 0.05:
            rig.compact()
        self.check()

    def check(self) -> None:
        for bundle in BUNDLES:
            assert self.count(bundle) == self.told.count(bundle), bundle

    def count(self, bundle: str) -> BundleCount:
        total = BundleCounts()
        for rig in self.rigs:
            total.add(rig.machine.count_bundles(CountBundles(0, (hash_of(bundle),))))
        return total.counts[hash_of(bundle)]

    def alive(self, number: int) -> Counter[str]:
        """The items of a partition that have not ended: those that are dead may still be on their way out. One that has come back is there
        twice while its move away has not ended."""
        rig = self.rigs[number]
        machine = rig.machine
        rows = open_rows(machine, list(machine.log.blobs))
        for transfer in machine.transfers.by_number.values():
            if transfer.moves_to is None and transfer.transfer != REDRIVEN:
                for part, chosen in by_part(transfer, transfer.open_positions()):
                    rows[part.extent.blob.number] -= rows_of_part(part, chosen)
        return Counter(name for blob, those in rows.items() for name in self.names(rig, blob, those))

    def names(self, rig: Rig, blob: int, rows: BitMap) -> list[str]:
        if not rows:
            return []
        return [each.decode() for each in take_rows(rig.disk.rows(blob), to_array(rows)).column("payload").to_pylist()]

    # ---- acts: each returns how the items that are gone have ended --------------------------------------------------

    def produce(self, number: int) -> str:
        self.store(number, self.random.choice([None, *BUNDLES]))
        return "none"

    def store(self, number: int, bundle: str | None) -> None:
        names = [f"{len(self.told.things) + at}" for at in range(self.random.choice([1, 2, 5]))]
        self.keys += 1
        key = ProduceKey(f"k{self.keys}") if self.random.random() < 0.5 else None
        rows = rows_of(*names)
        if self.random.random() < 0.3:
            rows = [row._replace(enqueue_at=self.now + self.random.choice([0, 50])) for row in rows]
        machine = self.rigs[number].machine
        for again in range(1 if key is None else self.random.choice([1, 2])):
            assert machine.produce(either_form(rows), self.now, key, bundle=bundle).repeated is (again > 0)
        member = None if bundle is not None and (number, bundle) in self.told.closed else bundle
        self.told.things.update({name: Thing(member) for name in names})

    def lease(self, number: int) -> str:
        self.rigs[number].machine.lease(self.random.choice([1, 3, 10]), "c", self.now + 100, self.now)
        return "none"

    def settle(self, number: int) -> str:
        machine = self.rigs[number].machine
        if not machine.leases:
            return "none"
        lease = self.random.choice(list(machine.leases.values()))
        # Of those that are retried, some die.
        retry = Disposition("retry", retry_after=self.random.choice([0, 30]))
        outcomes = [("completed", DONE), ("dead", Disposition("dead")), ("none", RELEASE), ("dead", retry)]
        how, disposition = self.random.choice(outcomes)
        if how == "completed" and self.random.random() < 0.5:
            machine.close_lease(lease, self.now, Settled())
        else:
            offsets = [offset for piece in open_slices(lease) for offset in piece.offsets.tolist()]
            chosen = self.random.sample(offsets, self.random.randint(1, len(offsets)))
            machine.settle_offsets(array_of(chosen), disposition, self.now, False, Settled())
        # One that expires while it is put back dies.
        return "dead" if how == "none" else how

    def tick(self, number: int) -> str:
        self.now += self.random.choice([10, 60, 200])
        self.rigs[number].machine.tick(self.now)
        return "dead"

    def drop(self, number: int) -> str:
        machine = self.rigs[number].machine
        if self.random.random() < 0.3:
            machine.clear(True, self.random.random() < 0.5, self.now)
        else:
            machine.log.drop(self.some(number), self.now)
        return "dropped"

    def some(self, number: int) -> Offsets:
        """Offsets of some items, waiting or not."""
        end = self.rigs[number].machine.log.header.next
        return array_of(self.random.sample(range(end), min(end, 4)))

    def redrive(self, number: int) -> str:
        self.rigs[number].machine.transfers.redrive(self.some(number), "other", self.now, scheduled=self.random.random() < 0.5)
        return "none"

    def end_transfer(self, number: int) -> str:
        transfers = self.rigs[number].machine.transfers
        known = [each for each in transfers.by_number.values() if each.moves_to is None]
        if not known:
            return "none"
        transfer = self.random.choice(known)
        if transfer.transfer == REDRIVEN and self.random.random() < 0.3:
            transfers.call_back(transfer.number)
            return "none"
        transfers.end(transfer.number)
        return "dropped"

    def move(self, number: int) -> str:
        target = self.random.choice([each for each in range(PARTITIONS) if each != number])
        moved, _ = self.rigs[number].machine.transfers.move_out(
            self.random.choice([1, 10]), 1e9, target, self.random.random() < 0.3, self.now
        )
        if moved:
            self.moves[number, moved] = target
        return "none"

    def arrive(self, number: int) -> str:
        """A move's items are stored in the target, perhaps again; or the source learns of it."""
        coming = [move for move, target in self.moves.items() if target == number]
        ending = [move for move in self.moves if move[0] == number and move in self.arrived]
        if ending and self.random.random() < 0.5:
            self.rigs[number].machine.transfers.end(ending[0][1])
            del self.moves[ending[0]]
            return "moved"
        if coming:
            source, transfer = coming[0]
            machine = self.rigs[source].machine
            lease = machine.transfers.by_number[transfer]
            rows = [self.names(self.rigs[source], piece.blob, BitMap(piece.rows.tolist())) for piece in open_slices(lease)]
            batch = batch_of(rows_of(*(name for names in rows for name in names)))
            group = f"{MOVE_GROUP}{source}.{transfer}"
            self.rigs[number].machine.produce(batch, self.now, ProduceKey("m", group, 1), lives_of(lease, machine.log.bundles))
            self.arrived.add((source, transfer))
        return "none"


def run(seeds: range) -> None:
    for seed in seeds:
        world = World(seed)
        world.live(world.random.choice([20, 120]))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_counts_agree_with_a_model_of_items(block: int) -> None:
    run(range(4 * block, 4 * block + 4))


@pytest.mark.slow
def test_counts_agree_with_a_model_of_items_in_a_thousand_worlds() -> None:
    run(range(1_000))


# ---- the driver -----------------------------------------------------------------------------------------------------


class Driven(World):
    """A world in which bundles are closed, and driven by instances that read the partitions one after the other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.records = {each: _record(each) for each in BUNDLES}
        self.closed_at: dict[str, set[str]] = {}
        """What belongs to a bundle when it is closed."""
        self.follow_ups: dict[str, list[BundleCount]] = {each: [] for each in BUNDLES}
        self.remembered: set[str] = set()
        """What the home of the groups remembers."""
        self.former: list[Partition | None] = [None] * PARTITIONS
        self.passes: dict[str, tuple[int, BundleCounts]] = {}
        """By bundle: the next partition to be read, and the sum so far."""
        self.acts += [self.close, self.replace_owner]
        self.drives = True

    def act(self) -> None:
        super().act()
        if self.drives:
            for _ in range(self.random.choice([0, 1, 2])):
                self.drive(self.random.choice(BUNDLES))

    def check(self) -> None:
        """Bundles that are over are not counted any more."""
        for bundle in BUNDLES:
            if self.records[bundle].ended_at is None:
                assert self.count(bundle) == self.told.count(bundle), bundle

    def produce(self, number: int) -> str:
        """A client that has closed a bundle produces no more of it; but a call of another one may come late."""
        bundle = self.random.choice([None, *BUNDLES])
        if bundle is not None and bundle in self.closed_at and (self.records[bundle].ended_at is not None or self.random.random() < 0.8):
            bundle = None
        self.store(number, bundle)
        return "none"

    def close(self, number: int) -> str:
        self.close_bundle(self.random.choice(BUNDLES))
        return "none"

    def close_bundle(self, bundle: str) -> None:
        if bundle not in self.closed_at:
            self.closed_at[bundle] = {name for name, each in self.told.things.items() if each.bundle == bundle}
            self.records[bundle] = _record(bundle, state="closed", closed_at=self.now)

    def replace_owner(self, number: int) -> str:
        """The present owner goes on answering, in the state in which it was."""
        self.former[number] = load(self.rigs[number].disk.snapshot())
        return "none"

    def drive(self, bundle: str) -> None:
        """The driver's next step: read one more partition, or decide."""
        if self.random.random() < 0.05:
            self.passes.pop(bundle, None)
        record = self.records[bundle]
        step = wants(record, self.now)
        if step is None:
            return
        number, total = self.passes.pop(bundle, (0, BundleCounts()))
        if number < PARTITIONS:
            counts = self.ask(number, CountBundles(0, (record.hashed,), step))
            if counts is not None:
                total.add(counts)
                self.passes[bundle] = number + 1, total
            return
        count = total.counts[record.hashed]
        action = decide(record, count, self.now)
        if action == "finish":
            if bundle not in self.remembered:
                self.remembered.add(bundle)
                self.follow_ups[bundle].append(count)
                left = [name for name in self.closed_at[bundle] if self.told.things[name].ended is None]
                assert not left, f"the follow-up of {bundle} comes before {left} have ended"
            if self.random.random() < 0.7:
                # Otherwise it has crashed before the record.
                self.records[bundle] = _record(bundle, state="done", closed_at=self.now, ended_at=self.now, count=count)

    def ask(self, number: int, request: CountBundles) -> BundleCounts | None:
        """None: no answer, for the store refuses the transaction."""
        rig, former = self.rigs[number], self.former[number]
        bundle = next(each for each in BUNDLES if hash_of(each) in request.bundles)
        if former is not None and self.random.random() < 0.3:
            counts = former.count_bundles(request)
            # It may answer only what it need not write.
            written = former.take_changes() is not None
            self.former[number] = None if written else former
            return None if written else counts
        counts = rig.machine.count_bundles(request)
        if self.random.random() < 0.1:
            rig.machine = rig.loaded()
            return None
        rig.commit()
        if request.step == "close":
            self.told.closed.add((number, bundle))
        return counts

    def settle_everything(self) -> None:
        """Until all items have ended, all bundles are over, and nothing is remembered of them."""
        for bundle in BUNDLES:
            self.close_bundle(bundle)
        for _ in range(3_000):
            self.acts = [self.lease, self.settle, self.settle, self.tick, self.end_transfer, self.arrive, self.drop]
            self.act()
            for bundle in BUNDLES:
                self.drive(bundle)
            if all(record.ended_at for record in self.records.values()) and not any(len(rig.machine.log.bundles) for rig in self.rigs):
                return
        raise AssertionError("some bundle is not over")


def _record(id: str, **fields: object) -> BundleRecord:
    made = {"id": id, "queue_name": "q", "queue_incarnation": "i", "follow_up": None, "items": None, "created_at": START}
    return BundleRecord(**{**made, **fields})  # type: ignore[arg-type]


def drive(seeds: range) -> None:
    for seed in seeds:
        world = Driven(seed)
        world.live(world.random.choice([30, 150]))
        world.settle_everything()
        for bundle, counts in world.follow_ups.items():
            (count,) = counts
            assert count.left == 0
            ended = Counter(world.told.things[name].ended for name in world.closed_at[bundle])
            assert count.stored >= ended.total()
            # More than these are of calls that came late.
            assert count.stored > ended.total() or count[1:] == (ended["completed"], ended["dead"], ended["dropped"])
        for rig in world.rigs:
            assert not [key for kind, key in rig.disk.records if kind is RecordKind.BUNDLE]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_follow_up_comes_once_and_after_all_items(block: int) -> None:
    drive(range(3 * block, 3 * block + 3))


@pytest.mark.slow
def test_a_follow_up_comes_once_and_after_all_items_in_a_thousand_worlds() -> None:
    drive(range(1_000))


def test_an_item_that_moves_while_the_partitions_are_read_is_missed_by_none() -> None:
    """Read in the target before it arrives, and in the source when it has gone: it is open in neither."""
    source, target = Rig(), Rig()
    bundle = hash_of("a")
    source.machine.produce(batch_of(rows_of("x")), START, bundle="a")
    total = target.machine.count_bundles(CountBundles(0, (bundle,), "close"))
    number, _ = source.machine.transfers.move_out(1, 1e9, 1, False, START)
    move = source.machine.transfers.by_number[number]
    lives = lives_of(move, source.machine.log.bundles)
    target.machine.produce(batch_of(rows_of("x")), START, ProduceKey("m", f"{MOVE_GROUP}q.0", number), lives)
    source.machine.transfers.end(number)
    total.add(source.machine.count_bundles(CountBundles(0, (bundle,), "close")))
    assert not source.machine.log.extents
    assert total.counts == {bundle: BundleCount(1)}
    target.commit()
    lease = target.lease(1)
    assert not target.machine.admission.is_empty
    target.close(lease)
    total = target.machine.count_bundles(CountBundles(0, (bundle,)))
    total.add(source.machine.count_bundles(CountBundles(0, (bundle,))))
    assert total.counts == {bundle: BundleCount(1, 1)}
    assert not target.machine.admission.is_empty, "it still has the count"
    target.machine.count_bundles(CountBundles(0, (bundle,), "forget"))
    assert target.machine.admission.is_empty


def test_what_is_left_of_a_bundle_that_is_over_leaves_no_count_where_it_moves_to() -> None:
    """As of a bundle that was cancelled: nobody would ever have the target forget its count, and the target could not be removed."""
    source, target = Rig(), Rig()
    source.machine.produce(batch_of(rows_of("x")), START, bundle="a")
    source.machine.count_bundles(CountBundles(0, (hash_of("a"),), "forget"))
    number, _ = source.machine.transfers.move_out(1, 1e9, 1, False, START)
    lives = lives_of(source.machine.transfers.by_number[number], source.machine.log.bundles)
    target.machine.produce(batch_of(rows_of("x")), START, ProduceKey("m", f"{MOVE_GROUP}q.0", number), lives)
    target.commit()
    target.close(target.lease(1))
    assert target.machine.admission.is_empty


def test_settling_a_lease_costs_a_step_for_each_run_of_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for bundle in ("a", None, "b"):
        rig.machine.produce(batch_of(rows_of(*map(str, range(1_000)))), START, bundle=bundle)
    rig.commit()
    counted: list[tuple[int, int]] = []
    count = BlobValues.count

    def noted(self: BlobValues, rows: BitMap) -> list[tuple[int, int]]:
        found = list(count(self, rows))
        counted.extend(found)
        return found

    monkeypatch.setattr(BlobValues, "count", noted)
    rig.close(rig.lease(3_000))
    assert counted == [(hash_of("a"), 1_000), (hash_of("b"), 1_000)]
    rig.commit()


def test_items_without_a_bundle_have_no_record_of_one() -> None:
    rig = Rig()
    rig.produce(rows_of("x", "y"))
    rig.commit()
    assert unpack_blob(rig.disk.records[RecordKind.BLOB, "0"]).bundles == b""
    assert not [key for kind, key in rig.disk.records if kind is RecordKind.BUNDLE]


def test_a_close_that_partitions_do_not_record_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group: a former owner does not know of the last items."""
    monkeypatch.setattr(BundleLedger, "close", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        drive(range(100))


def test_a_move_that_counts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control group: an item that arrives is stored a second time."""
    monkeypatch.setattr(BundleLedger, "arrive", lambda self, bundle: self.store(bundle, 1) if bundle != NO_KEY else None)
    with pytest.raises(AssertionError):
        run(range(20))


# ---- lifecycle ------------------------------------------------------------------------------------------------------

OPEN = _record("x")
CLOSED = _record("x", state="closed", closed_at=START + 50)
DONE_RECORD = _record("x", state="done", closed_at=START, ended_at=START + 70)
EVEN, UNEVEN = BundleCount(3, 1, 1, 1), BundleCount(3, 1, 1, 0)


@pytest.mark.parametrize(
    ("record", "count", "now", "step"),
    [
        (OPEN, UNEVEN, START + OPEN_FOR, "wait"),
        (OPEN, EVEN, START, "wait"),
        (OPEN, EVEN, START + OPEN_FOR + 1, "expire"),
        (_record("x", items=4), EVEN, START, "wait"),
        (_record("x", items=3), UNEVEN, START, "close"),
        (_record("x", items=0), BundleCount(), START, "close"),
        (CLOSED, UNEVEN, START, "wait"),
        (CLOSED, EVEN, START, "finish"),
        (CLOSED, BundleCount(), START, "finish"),
        (CLOSED, EVEN, START + 50 + REACH, "finish"),
        (CLOSED, EVEN, START + 51 + REACH, "expire"),
        (DONE_RECORD, EVEN, START + 70 + KEPT_FOR, "wait"),
        (DONE_RECORD, EVEN, START + 71 + KEPT_FOR, "delete"),
    ],
)
def test_steps(record: BundleRecord, count: BundleCount, now: Millis, step: str) -> None:
    assert decide(record, count, now) == step


def test_a_bundle_that_waits_is_looked_at_after_a_tenth_of_its_age() -> None:
    assert due(CLOSED, START + 50) == START + 50 + SOONEST
    assert due(CLOSED, START + 20_050) == START + 20_050 + 2_000
    assert due(CLOSED, START + 10 * LATEST + 10_000) == START + 10 * LATEST + 10_000 + LATEST
    assert due(OPEN, START + 7) == START + OPEN_FOR + 1
    assert due(DONE_RECORD, START + 70) == START + 70 + KEPT_FOR + 1


def test_a_follow_up_comes_no_later_than_its_group_is_remembered() -> None:
    assert GROUP_KEEP - lifecycle.REACH == lifecycle.DAY
    assert wants(_record("x", items=1), START + OPEN_FOR + 1) is None
