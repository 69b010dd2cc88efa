"""A small world for the machine of a rebalance: partitions that do what `model.peers` promises, records that change whole or not at all,
coordinators that die, sleep and say late what they meant to say long ago, and clients who know the queue as it is or as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import msgspec

from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.partition.key_slots import home_of, slot, slot_of_name
from sluiceway.core.partition.partition_states import allows
from sluiceway.core.rebalance import steps as machine
from sluiceway.core.rebalance.partition_plan import plan
from sluiceway.core.rebalance.steps import AskFor, Change, StepReplies
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import WHOLE, GiveKeys, KeyPiece, KeysGiven, Moved, MoveOut, ServeSlots, Shut, Shutted, Shutting, TakeKeys
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance
from sluiceway.model.requests import ProduceKey

_ORDER: list[Shutting] = ["open", "read_only", "sealed"]


def conflict() -> SluicewayError:
    return SluicewayError("version_conflict", "the cursor is lower")


def slot_of(item: str) -> int | None:
    """The slot of an item's key; None: it has none."""
    return int(item.removeprefix("slot ").partition(":")[0]) if item.startswith("slot ") else None


class Partition:
    """What one partition durably is. Whatever it is asked is one transaction."""

    most_bytes = MAX_KEYS_BYTES

    def __init__(self, number: int) -> None:
        self.number = number
        self.shut: Shutting = "open"
        self.shut_cursor = self.given = self.taken = 0
        self.closed: set[int] = set()
        self.held: set[int] = set()
        self.of = 0
        self.ready: list[str] = []
        self.scheduled: list[str] = []
        self.leased: list[str] = []
        self.keys: dict[str, bytes] = {}
        self.moves = 0
        self.away: tuple[int, int, list[str], bool] | None = None
        """The move that is under way: its target and number, its items, whether they were scheduled."""
        self.arrived: set[tuple[int, int]] = set()

    @property
    def items(self) -> list[str]:
        return [*self.ready, *self.scheduled, *self.leased, *(self.away[2] if self.away else ())]

    def answer(self, request: Any) -> Any:
        if isinstance(request, Shut):
            return self._shut(request)
        if isinstance(request, GiveKeys):
            return self._give(request)
        if isinstance(request, TakeKeys):
            return self._take(request)
        if isinstance(request, ServeSlots):
            return self._serve(request)
        return self._move(request)

    def _shut(self, request: Shut) -> Shutted:
        if request.cursor < self.shut_cursor:
            raise conflict()
        later = request.cursor > self.shut_cursor
        self.shut_cursor = request.cursor
        further = later or _ORDER.index(request.shutting) > _ORDER.index(self.shut)
        if further and not (request.shutting == "sealed" and self.items):
            self.shut = request.shutting
        moving = len(self.away[2]) if self.away else 0
        busy = {slot_of(item) for item in self.items} & self.closed
        movable = [item for item in self.scheduled if self._may_go(item)]
        due = {slot for item in movable if (slot := slot_of(item)) is not None}
        return Shutted(
            self.shut,
            len(self.ready),
            len(self.leased),
            len(self.scheduled),
            moving,
            moving,
            movable=len(movable),
            busy=tuple(sorted(slot for slot in busy if slot is not None)),
            due=tuple(sorted(due)),
        )

    def _may_go(self, item: str) -> bool:
        """Items with a key go with their slot, others from a partition that is shut."""
        slot = slot_of(item)
        return self.shut != "open" if slot is None else slot in self.closed

    def _give(self, request: GiveKeys) -> KeysGiven:
        if request.cursor < self.given or request.cursor <= self.taken:
            raise conflict()
        self.given = request.cursor
        self.closed |= {*request.slots}
        self.of = request.of
        keys = {name: self.keys[name] for name in self._keys_in(request.slots, request.of, request.piece)}
        if sum(len(name) + len(data) for name, data in keys.items()) > self.most_bytes:
            raise SluicewayError("too_many_items", "too many keys")
        return KeysGiven(self.number, keys)

    def _keys_in(self, slots: tuple[int, ...], of: int, piece: KeyPiece) -> set[str]:
        number, pieces = piece
        mine = {name for name in self.keys if slot_of_name(name[1:], of) in slots}
        return {name for name in mine if (crc32(name.encode()) >> 16) % pieces == number}

    def _take(self, request: TakeKeys) -> int:
        if request.cursor > self.taken and request.cursor >= self.given:
            self.of = request.of
            if request.keys is not None:
                mine = self._keys_in(request.slots, request.of, request.piece or WHOLE)
                self.keys = {name: data for name, data in self.keys.items() if name not in mine} | request.keys
            if request.piece is not None:
                self.given = request.cursor
                self.closed |= {*request.slots}
                return len(request.keys or ())
            self.taken = request.cursor
            self.closed -= {*request.slots}
            self.held |= {*request.slots} if request.waits else set()
        return len(request.keys or ())

    def _serve(self, request: ServeSlots) -> int:
        if request.cursor < self.taken:
            raise conflict()
        self.held -= {*request.slots}
        return len(request.slots)

    def _move(self, request: MoveOut) -> Moved:
        if request.cursor < self.shut_cursor:
            raise conflict()
        line = self.scheduled if request.scheduled else self.ready
        if self.away is not None or not line:
            return Moved(0, 0)
        slots = request.slots
        able = [item for item in line if slots is None or (self._may_go(item) and slot_of(item) in (None, *slots))]
        out = able[: min(request.limit, 2)]
        if not out:
            return Moved(0, 0)
        self.moves += 1
        for item in out:
            line.remove(item)
        self.away = (request.target, self.moves, out, request.scheduled)
        return Moved(len(out), 0)


@dataclass
class Coordinator:
    """One that goes by what it has read, whether that is still so or not."""

    name: str
    number: int
    rebalance: Rebalance
    stamps: tuple[int, int]
    record: QueueRecord
    heard: StepReplies = field(default_factory=StepReplies)


@dataclass
class World:
    record: QueueRecord
    rebalance: Rebalance | None = None
    stamp: int = 1
    rebalance_stamp: int = 0
    elected: int = 0
    partitions: dict[int, Partition] = field(default_factory=dict)
    records: list[QueueRecord] = field(default_factory=list)
    """All that there ever were: who has not heard of a change goes by an old one."""
    produced: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    consumed: list[str] = field(default_factory=list)
    places: dict[str, bytes] = field(default_factory=dict)
    """What was answered under each idempotency key."""
    original: QueueRecord | None = None
    one_at_a_time: bool = False
    """Of several requests one is answered before the rest is asked."""

    def __post_init__(self) -> None:
        self.partitions = {each.partition: Partition(each.partition) for each in self.record.partitions}
        self.records.append(self.record)

    # ---- records ----------------------------------------------------------------------------------------------

    def begin(self, requested: int, affinities: dict[str, float], drain: DrainMode) -> bool:
        made = plan(self.record, requested, affinities)
        if made.is_empty:
            return False
        self.original = self.record
        id = f"r{self.stamp}"
        asked = Rebalance(id, "orders", self.record.incarnation, requested, made, drain, 0, 0, "me")
        self._write(machine.begin(self.record, asked, made, 0))
        return True

    def cancel(self) -> bool:
        assert self.rebalance is not None
        try:
            self._write(machine.cancelled(self.record, self.rebalance, 0))
        except SluicewayError:
            return False
        return True

    def _write(self, change: Change) -> None:
        self.stamp += 1
        for number in change.placed:
            assert number not in self.partitions
            assert number >= self.record.given
            self.partitions[number] = Partition(number)
        for each in change.removed:
            self._remove(each)
        if change.record is not None:
            assert change.record.given >= self.record.given
            self.record = change.record
            self.records.append(change.record)
        self.rebalance, self.rebalance_stamp = change.rebalance, self.stamp
        self.check()

    def _remove(self, each: PartitionRecord) -> None:
        gone = self.partitions.pop(each.partition)
        assert gone.shut == "sealed" or each.state == "preparing", "it was not sealed"
        assert not gone.items, "items were removed with it"
        under_way = [other.number for other in self.partitions.values() if other.away and other.away[0] == each.partition]
        assert not under_way, f"a move from {under_way} to it was under way"

    def commit(self, by: Coordinator, change: Change) -> bool:
        """As the meta store does: only if nothing has changed since the coordinator read."""
        if by.number != self.elected or by.stamps != (self.stamp, self.rebalance_stamp):
            return False
        self._write(change)
        return True

    def elect(self) -> Coordinator:
        """Another takes it over, and reads."""
        assert self.rebalance is not None
        self.elected += 1
        return Coordinator(f"c{self.elected}", self.elected, self.rebalance, (self.stamp, self.rebalance_stamp), self.record)

    def read(self, coordinator: Coordinator) -> None:
        """What it has heard in another step is of no use."""
        assert self.rebalance is not None
        before = coordinator.rebalance, coordinator.record.cursor
        coordinator.rebalance, coordinator.record = self.rebalance, self.record
        coordinator.stamps = (self.stamp, self.rebalance_stamp)
        if (before[0].step, before[0].state, before[0].slots_at_once, before[1]) != (
            self.rebalance.step,
            self.rebalance.state,
            self.rebalance.slots_at_once,
            self.record.cursor,
        ):
            coordinator.heard = StepReplies()

    # ---- what goes between --------------------------------------------------------------------------------------

    def deliver(self, request: Any) -> Any:
        """What the partition's owner answers, or an error."""
        there = self.partitions.get(request.partition)
        if there is None:
            return SluicewayError("unavailable", "it is gone")
        try:
            return there.answer(request)
        except SluicewayError as error:
            return error

    def hear(self, coordinator: Coordinator, ask: AskFor, answer: Any) -> None:
        if isinstance(answer, SluicewayError):
            coordinator.heard.refuse(ask, answer)
        else:
            coordinator.heard.hear(ask, answer)

    def arrive(self, source: Partition, settle: bool = True) -> None:
        """The items of the move that is under way come to their target: as often as it is tried, and yet once."""
        if source.away is None:
            return
        number, move, items, scheduled = source.away
        assert number in self.partitions, "its target is gone"
        target = self.partitions[number]
        assert target.shut != "sealed", "its target is sealed"
        if (source.number, move) not in target.arrived:
            target.arrived.add((source.number, move))
            (target.scheduled if scheduled else target.ready).extend(items)
            source.away = (number, move, [], scheduled)
            self._in_flight = items
        if settle:
            source.away = None

    # ---- clients ------------------------------------------------------------------------------------------------

    def produce(self, item: str, record: QueueRecord, number: int, *, scheduled: bool = False) -> bool:
        """By somebody who knows that record."""
        each = record.partition(number)
        there = self.partitions.get(number)
        if each is None or there is None or not allows(record, each).produce or there.shut != "open":
            return False
        (there.scheduled if scheduled else there.ready).append(item)
        self.produced[item] += 1
        return True

    def produce_keyed(self, item: str, name: str, record: QueueRecord) -> bool:
        key = ProduceKey(name)
        home = home_of(record, key)
        there = self.partitions.get(home)
        if home == MOVING or there is None or (there.of and slot(key, there.of) in there.closed):
            return False
        remembered = there.keys.get("k" + name)
        if remembered is not None:
            assert remembered == self.places[name], "another answer to the same key"
            return True
        if not self.produce(item, record, home):
            return False
        assert name not in self.places, "the key was used before, and its home does not know of it"
        self.places[name] = there.keys["k" + name] = f"{home}:{item}".encode()
        return True

    def produce_in_slot(self, item: str, slot: int, record: QueueRecord, *, scheduled: bool = False) -> bool:
        """An item with a key of that slot, by somebody who knows that record."""
        home = record.slots[slot]
        there = self.partitions.get(home)
        if home == MOVING or there is None or slot in there.closed:
            return False
        return self.produce(f"slot {slot}: {item}", record, home, scheduled=scheduled)

    def lease(self, record: QueueRecord, number: int) -> bool:
        each = record.partition(number)
        there = self.partitions.get(number)
        if each is None or there is None or not allows(record, each).lease:
            return False
        busy = {slot_of(item) for item in there.leased} - {None}
        item = next((item for item in there.ready if slot_of(item) not in busy | there.held), None)
        if item is None:
            return False
        self._check_alone(item, there)
        there.ready.remove(item)
        there.leased.append(item)
        return True

    def _check_alone(self, item: str, there: Partition) -> None:
        """What is left of its slot in another partition comes before it, unless it is held back there."""
        slot = slot_of(item)
        for other in self.partitions.values():
            left = [each for each in other.items if slot_of(each) == slot is not None and slot not in other.held]
            assert other is there or not left, f"{item} is leased, and {left} are left in partition {other.number}"

    def complete(self, number: int) -> None:
        there = self.partitions[number]
        item = there.leased.pop(0)
        self.done[item] += 1
        self.consumed.append(item)

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        here = Counter(item for each in self.partitions.values() for item in each.items)
        assert here + self.done == self.produced, "items were lost or doubled"
        numbers = {each.partition for each in self.record.partitions}
        assert {*self.partitions} == numbers
        assert {*self.record.slots} <= numbers | {MOVING}

    def step(self, coordinator: Coordinator) -> bool:
        """One action of a coordinator to whom nothing happens; False: there is none."""
        self.read(coordinator)
        if not coordinator.rebalance.is_open:
            return False
        change = machine.change(coordinator.rebalance, coordinator.record, coordinator.heard, 0, coordinator.name)
        if change is not None:
            assert self.commit(coordinator, change)
            return True
        asks = machine.asks(coordinator.rebalance, coordinator.record, coordinator.heard)
        assert asks, "it neither changes nor asks anything"
        for ask in asks[:1] if self.one_at_a_time and coordinator.rebalance.step != "drain" else asks:
            self.hear(coordinator, ask, self.deliver(ask.request))
        return True

    def consume(self) -> None:
        """Everything that is offered is taken and done, and what is under way arrives."""
        for there in list(self.partitions.values()):
            self.arrive(there)
            while self.lease(self.record, there.number):
                pass
            while there.leased:
                self.complete(there.number)

    def finish(self, coordinator: Coordinator, *, consuming: bool = True) -> None:
        """It is carried out to its end."""
        for _ in range(2_000):
            if not self.step(coordinator):
                break
            if consuming:
                self.consume()
            else:
                for there in self.partitions.values():
                    self.arrive(there)
        else:
            raise AssertionError("it does not end")
        self.check_ended()

    def check_ended(self) -> None:
        """The record is as planned, and the queue is in use."""
        assert self.rebalance is not None
        assert self.original is not None
        assert self.record.rebalance is None
        there = {(each.partition, each.backend): each for each in self.record.partitions}
        made = self.rebalance.plan
        if self.rebalance.state == "cancelled":
            assert {*there} == {(each.partition, each.backend) for each in self.original.partitions}
            assert [each.state for each in self.record.partitions] == [each.state for each in self.original.partitions]
        else:
            assert self.rebalance.state == "done"
            stay = {(each.partition, each.backend) for each in self.original.partitions if each.partition in made.keeps}
            assert {*there} == stay | {(each.partition, each.backend) for each in made.creates}
        assert MOVING not in self.record.slots
        assert {*self.record.slots} <= {each.partition for each in self.record.partitions}
        counts = Counter(self.record.slots)
        if self.rebalance.state == "done":
            assert max(counts.values()) - min(counts[each.partition] for each in self.record.partitions) <= 1, "homes are not even"
        for name, place in self.places.items():
            # Every key is still remembered, and every home takes new ones.
            home = self.partitions[home_of(self.record, ProduceKey(name))]
            assert home.keys["k" + name] == place
        for each in self.record.partitions:
            there_now = self.partitions[each.partition]
            assert there_now.shut == "open", f"partition {each.partition} takes nothing any more"
            mine = {place for place, home in enumerate(self.record.slots) if home == each.partition}
            assert not there_now.held, f"partition {each.partition} holds slots back"
            assert not mine & there_now.closed, f"partition {each.partition} takes no keys of its slots"
        self.check()


def small_queue(*backends: str, by_key: bool = False) -> QueueRecord:
    partitions = tuple(PartitionRecord(number, backend) for number, backend in enumerate(backends))
    # Few slots, so that a history is not mostly about them.
    slots = tuple(number % len(backends) for number in range(12))
    return QueueRecord("orders", "aaaaaaaa", 0, 0, partitions, slots=slots, order="key" if by_key else None)


def with_state(record: QueueRecord, number: int, state: Any) -> QueueRecord:
    changed = tuple(msgspec.structs.replace(each, state=state) if each.partition == number else each for each in record.partitions)
    return msgspec.structs.replace(record, partitions=changed)
