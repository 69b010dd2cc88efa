"""Parts of calls that were divided by their items' keys: however homes move, a repetition stores what is missing, and nothing twice."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from sluiceway.cluster.produce_by_key import parts_of
from sluiceway.core.partition import idempotency_keys
from sluiceway.core.partition.idempotency_keys import PART, places_of
from sluiceway.core.partition.partition import Partition, Placed
from sluiceway.core.rebalance import steps
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.peers import KeysGiven
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance
from sluiceway.model.requests import CallPart, Produce, ProduceKey
from tests.core.core_model import START, Rig

SLOTS = 8
Places = dict[int, tuple[int, int]]
"""By number in the call: where the item is."""


class World:
    """Partitions that take the parts of calls, and slots that move between them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rigs = [Rig() for _ in range(3)]
        slots = tuple(self.random.randrange(3) for _ in range(SLOTS))
        self.record = QueueRecord("q", "aaaaaaaa", 0, 0, tuple(PartitionRecord(n) for n in range(3)), order="key", slots=slots, cursor=1)
        self.stored: dict[tuple[int, int], tuple[str, int]] = {}
        """Every item: of which call, and its number there."""
        self.places: dict[str, Places] = {}
        self.now = START

    def machine(self, number: int) -> Partition:
        return self.rigs[number].machine

    def produce(self, name: str, request: Produce) -> None:
        """The call, of which some parts may not come through."""
        known = self.places.setdefault(name, {})
        for division, part in parts_of(self.record, request):
            if self.random.random() < 0.4:
                continue
            partition, rig = division.place, self.rigs[division.place]
            assert part.part is not None
            before = rig.machine.log.header.next
            placed = rig.machine.produce_part(part.batch, self.now, part.key, part.part)
            rig.commit()
            told = dict(zip(division.numbers, spread(placed, partition), strict=True))
            for number, place in told.items():
                if place[0] == partition and place[1] >= before:
                    assert place not in self.stored
                    assert number not in known, f"item {number} of {name} is stored twice"
                    self.stored[place] = name, number
                    known[number] = place
            assert told == {number: known[number] for number in told}, "a repetition has another answer"
            assert placed.repeated == (rig.machine.log.header.next == before)

    def move(self) -> None:
        """Give some slots to other partitions, as a rebalance does, and lose answers on the way."""
        before, after = self.record.slots, list(self.record.slots)
        for slot in self.random.sample(range(SLOTS), self.random.randint(1, 4)):
            after[slot] = self.random.randrange(3)
        moved = [slot for slot in range(SLOTS) if before[slot] != after[slot]]
        self.record = msgspec.structs.replace(self.record, slots=tuple(after), cursor=self.record.cursor + 1)
        heard = steps.StepReplies()
        for giver in {before[slot] for slot in moved}:
            slots = [slot for slot in moved if before[slot] == giver]
            for _ in range(self.random.randint(1, 2)):
                given = self.machine(giver).admission.give_keys(slots, SLOTS, self.record.cursor, giver)
            heard.given[giver] = KeysGiven(giver, given)
            self.rigs[giver].commit()
        asked = Rebalance("r", "q", "aaaaaaaa", 3, Plan(), "natural", 0, 0, "me", slots=tuple(after), homes=before)
        for taker in {after[slot] for slot in moved}:
            keys = steps.keys_by_taker(asked, moved, heard)[taker]
            for _ in range(self.random.randint(1, 2)):
                slots = [slot for slot in moved if after[slot] == taker]
                self.machine(taker).admission.take_keys(slots, SLOTS, self.record.cursor, keys)
            self.rigs[taker].commit()
        self.record = msgspec.structs.replace(self.record, cursor=self.record.cursor + 1)


def spread(placed: Placed, partition: int) -> list[tuple[int, int]]:
    runs = placed.runs or ((placed.partition, placed.first_offset, placed.items),)
    return [(partition if at is None else at, first + row) for at, first, rows in runs for row in range(rows)]


def call(chance: Random, name: str, group: bool) -> Produce:
    keys = [chance.choice([None, *"abcdefghijkl"]) for _ in range(chance.randint(2, 30))]
    rows = batch_from_rows([{"payload": f"{name}.{number}".encode(), "key": key} for number, key in enumerate([*keys, "a"])])
    return Produce(rows, 1_000, ProduceKey(name, "g", 1) if group else ProduceKey(name))


@pytest.mark.parametrize("seed", range(40))
def test_a_repetition_stores_what_is_missing_and_nothing_twice(seed: int) -> None:
    world = World(seed)
    calls = {f"c{number}": call(world.random, f"c{number}", bool(number % 2)) for number in range(6)}
    for _ in range(40):
        name = world.random.choice(list(calls))
        world.produce(name, calls[name])
        if world.random.random() < 0.3:
            world.move()
        if world.random.random() < 0.1:
            world.rigs[world.random.randrange(3)].reload()
    for name, request in calls.items():
        for _ in range(30):
            world.produce(name, request)
        assert sorted(world.places[name]) == list(range(request.batch.num_rows))


def test_a_key_that_was_used_for_other_items_is_recognised_at_the_next_home() -> None:
    """By the digest of the whole call, however either is divided."""
    world = World(0)
    world.random = Random(0)
    one, other = call(Random(1), "k", group=False), call(Random(2), "k", group=False)
    for division, part in parts_of(world.record, one):
        assert part.part is not None
        world.machine(division.place).produce_part(part.batch, START, part.key, part.part)
    for _ in range(5):
        world.move()
    conflicts = 0
    for division, part in parts_of(world.record, other):
        assert part.part is not None
        try:
            world.machine(division.place).produce_part(part.batch, START, part.key, part.part)
        except SluicewayError as error:
            conflicts += error.code == "key_conflict"
    assert conflicts


def test_a_closed_slot_takes_no_part() -> None:
    """Whatever the slot of the call's idempotency key is."""
    world = World(3)
    (division, part), *_ = parts_of(world.record, call(Random(1), "k", group=False))
    assert part.part is not None
    admission = world.machine(division.place).admission
    assert not admission.refuses(part.key, part.part)
    others = [slot for slot in range(SLOTS) if slot not in {slot for slot, _ in part.part.slots}]
    admission.give_keys(others, SLOTS, 2, division.place)
    assert not admission.refuses(part.key, part.part)
    admission.give_keys([part.part.slots[-1][0]], SLOTS, 3, division.place)
    assert admission.refuses(part.key, part.part)


def test_taking_a_slot_does_not_touch_what_other_slots_have_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a home that takes 200 slots of each of 6,000 calls works for minutes, and its process answers nobody meanwhile."""
    giver, taker, slots = Rig(), Rig(), 200
    rows = batch_from_rows([{"payload": b"x", "key": f"{number}"} for number in range(slots)])
    giver.machine.produce_part(rows, START, ProduceKey("k"), CallPart(b"d", tuple((slot, 1) for slot in range(slots))))
    given = giver.machine.admission.give_keys(range(slots), 256, 1, 0)
    assert len(given) == slots
    built: list[int] = []
    monkeypatch.setattr(idempotency_keys, "SlotRows", lambda *fields: built.append(1))
    taker.machine.admission.take_keys(range(slots), 256, 1, given)
    assert not built
    places = places_of(taker.machine.keys.find(ProduceKey("k"), PART))
    assert [places[slot][:4] for slot in range(slots)] == [(slot, slot, 1, 0) for slot in range(slots)]
