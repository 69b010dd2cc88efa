"""Two partitions of a queue: items and homes of keys move between them, both crash whenever they like, and old coordinators repeat things.

What is durable decides: each step is committed, or lost, or committed without anybody hearing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from sluiceway.core.partition.key_slots import slot
from sluiceway.core.partition.partition import Partition, Placed
from sluiceway.core.partition.queries import lives_of, open_slices
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.peers import Shutting
from sluiceway.model.requests import DONE, MOVE_GROUP, RELEASE, Disposition, ProduceKey, Settled
from tests.core.core_model import START, Rig, array_of
from tests.core.partition_spots import Spot, spots_of

T = TypeVar("T")
Luck = Literal["heard", "unheard", "lost"]
LUCK = st.sampled_from(["heard", "heard", "heard", "unheard", "lost"])
SIDE = st.integers(0, 1)
LATER = st.sampled_from([True, True, False])
DISPOSITIONS = st.sampled_from(
    [DONE, RELEASE, Disposition("retry"), Disposition("retry", retry_after=30), Disposition("retry", retry_after=9)]
)
SLOTS = 4
EXPIRE: Millis = 1_000_000
HEADERS = [("trace", "t1")]


@dataclass(frozen=True)
class Fact:
    """What must be true of an item wherever it is."""

    origin: str
    kind: str | None
    enqueued_at: Millis
    expires_at: Millis
    attempts: int = 0
    due_at: Millis | None = None


class HandOver(NamedTuple):
    """Keys of these slots go from one side to the other, or stay after all."""

    slots: frozenset[int]
    giver: int
    taker: int
    cursor: int
    back: bool = False


class Found(NamedTuple):
    side: int
    payload: bytes
    spot: Spot
    origin: str
    kind: str | None
    headers: list[tuple[str, str]] | None


class TwoPartitions(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.rigs = (Rig(expire_timeout=EXPIRE), Rig(expire_timeout=EXPIRE))
        self.now, self.cursor = START, 1
        self.facts: dict[bytes, Fact] = {}
        self.produced, self.finished = 0, 0
        self.first: dict[ProduceKey, tuple[int, int, int]] = {}
        self.bodies: dict[ProduceKey, list[dict[str, object]]] = {}
        self.homes: list[int | None] = [0, 1, 0, 1]
        self.former: list[set[int]] = [{0}, {1}, {0}, {1}]
        self.hand_over: HandOver | None = None
        self.given: dict[str, bytes] | None = None
        self.past: list[tuple[HandOver, dict[str, bytes] | None]] = []
        self.shuts: list[tuple[int, Shutting, int]] = []
        for side in (0, 1):
            self.produce(side, 4, None, "heard")
            self.produce(side, 4, 60, "heard")

    def _do(self, side: int, luck: str, step: Callable[[Partition], T]) -> T | None:
        """What the step has answered, if it is durable."""
        rig = self.rigs[side]
        answer = step(rig.machine)
        if luck == "lost":
            rig.machine = rig.loaded()
            return None
        rig.reload() if luck == "unheard" else rig.commit()
        return answer

    # ---- clients ----------------------------------------------------------------------------------------------

    def _rows(self, count: int, delay: Millis | None) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for _ in range(count):
            self.produced += 1
            rows.append({"payload": b"%d" % self.produced, "kind": "k" if self.produced % 3 else None, "headers": HEADERS})
            if delay is not None:
                rows[-1]["enqueue_at"] = self.now + delay
        return rows

    def _note(self, side: int, rows: list[dict[str, Any]], placed: Placed) -> None:
        for offset, row in enumerate(rows, placed.first_offset):
            due_at = row.get("enqueue_at")
            due_at = due_at if due_at is not None and due_at > self.now else None
            self.facts[row["payload"]] = Fact(f"q.{side}.{offset}", row["kind"], self.now, (due_at or self.now) + EXPIRE, due_at=due_at)

    @rule(side=SIDE, count=st.integers(1, 5), delay=st.none() | st.sampled_from([0, 10, 60, 60]), luck=LUCK)
    def produce(self, side: int, count: int, delay: Millis | None, luck: str) -> None:
        for each in (side, 1 - side):
            machine = self.rigs[each].machine
            assert machine.admission.refuses(None) == (machine.admission.shutting != "open")
        side = 1 - side if self.rigs[side].machine.admission.refuses(None) else side
        if self.rigs[side].machine.admission.refuses(None):
            return
        rows = self._rows(count, delay)
        placed = self._do(side, luck, lambda machine: machine.produce(batch_from_rows(rows), self.now))
        if placed is not None:
            self._note(side, rows, placed)

    @rule(
        name=st.sampled_from("abc"),
        group=st.sampled_from([None, "g", "transfer/x"]),
        stale=st.sampled_from([None, None, 0, 1]),
        count=st.integers(1, 3),
        luck=LUCK,
    )
    def produce_keyed(self, name: str, group: str | None, stale: int | None, count: int, luck: str) -> None:
        """To the home of the key, or, from somebody who is behind, to one that was its home."""
        key = ProduceKey(name, group, 1)
        place = slot(key, SLOTS)
        side = self.homes[place] if stale not in self.former[place] else stale
        if side is None:
            return
        machine = self.rigs[side].machine
        if machine.admission.refuses(key):
            assert side != self.homes[place] or machine.admission.shutting != "open", "nobody takes the key"
            return
        rows = self.bodies.setdefault(key, self._rows(count, None))
        placed = self._do(side, luck, lambda machine: machine.produce(batch_from_rows(rows), self.now, key))
        if placed is None:
            return
        answer = (side if placed.partition is None else placed.partition, placed.first_offset, placed.items)
        assert placed.repeated == (key in self.first), "a key is forgotten, or known before it was used"
        assert self.first.setdefault(key, answer) == answer
        if not placed.repeated:
            self._note(side, rows, placed)

    @rule(side=SIDE, want=st.integers(1, 6), disposition=DISPOSITIONS)
    def handle(self, side: int, want: int, disposition: Disposition) -> None:
        self.lease(side, want, "heard")
        self.settle(side, 1, disposition, "heard")

    @rule(side=SIDE, want=st.integers(1, 6), luck=LUCK)
    def lease(self, side: int, want: int, luck: str) -> None:
        self._do(side, luck, lambda machine: machine.lease(want, "c", self.now + EXPIRE, self.now))

    @rule(
        side=SIDE,
        part=st.integers(1, 4),
        disposition=DISPOSITIONS,
        luck=LUCK,
    )
    def settle(self, side: int, part: int, disposition: Disposition, luck: str) -> None:
        leased = [found for found in self._found(side) if found.spot.place == "leased"][:: max(1, part - 2)]
        offsets = [found.spot.offset or 0 for found in leased]

        def step(machine: Partition) -> bool:
            ignored = machine.settle_offsets(array_of(offsets), disposition, self.now, False, Settled())
            assert not ignored
            return True

        if not self._do(side, luck, step):
            return
        for found in leased:
            fact = self.facts[found.payload]
            if disposition is DONE:
                del self.facts[found.payload]
                self.finished += 1
            else:
                due_at = self.now + disposition.retry_after if disposition.retry_after else None
                self.facts[found.payload] = replace(fact, attempts=fact.attempts + (disposition is not RELEASE), due_at=due_at)

    @rule(step=st.sampled_from([1, 8, 20, 60]), luck=LUCK)
    def time_passes(self, step: Millis, luck: str) -> None:
        self.now += step
        for side in (0, 1):
            self._do(side, luck, lambda machine: machine.tick(self.now))

    # ---- items move -------------------------------------------------------------------------------------------

    @rule(side=SIDE, limit=st.integers(1, 7), scheduled=st.booleans(), small=st.booleans(), luck=LUCK)
    def move_out(self, side: int, limit: int, scheduled: bool, small: bool, luck: str) -> None:
        if self.rigs[1 - side].machine.admission.shutting == "open":
            room = 1 if small else 1 << 30
            self._do(side, luck, lambda machine: machine.transfers.move_out(limit, room, 1 - side, scheduled, self.now))

    def _move_key(self, side: int, number: int) -> ProduceKey:
        group = f"{MOVE_GROUP}q.{side}"
        return ProduceKey(f"{group}/{number}", group, number)

    @rule(side=SIDE, limit=st.integers(1, 7), scheduled=st.booleans(), there=LUCK, here=LUCK)
    def move(self, side: int, limit: int, scheduled: bool, there: str, here: str) -> None:
        """From the line of one into that of the other."""
        self.move_out(side, limit, scheduled, False, "heard")
        self.carry(side, there, here)

    @precondition(lambda self: any(rig.machine.transfers.by_number for rig in self.rigs))
    @rule(side=SIDE, there=LUCK, here=LUCK)
    def carry(self, side: int, there: str, here: str) -> None:
        """One transfer after the other. That it has arrived may not be heard: then it is sent again."""
        transfers = self.rigs[side].machine.transfers.by_number
        if not transfers:
            return
        number, transfer = next(iter(transfers.items()))
        rows = []
        for piece in open_slices(transfer):
            for row, offset in zip(piece.rows.tolist(), piece.offsets.tolist(), strict=True):
                found = next(each for each in self._found(side) if each.spot.offset == offset and each.spot.place == "dying")
                assert found.spot.origin == piece.blob + row
                rows.append({"payload": found.payload, "kind": found.kind, "headers": found.headers, "origin": found.origin})
        key, lives = self._move_key(side, number), lives_of(transfer, self.rigs[side].machine.log.bundles)
        assert not self.rigs[1 - side].machine.admission.refuses(key), "what is on its way must arrive"
        arrived = self._do(1 - side, there, lambda machine: machine.produce(batch_from_rows(rows), self.now, key, lives))
        if arrived is not None and there == "heard":
            self._do(side, here, lambda machine: machine.transfers.end(number))

    @rule(side=SIDE, luck=LUCK)
    def call_back(self, side: int, luck: str) -> None:
        """Only what surely has not arrived."""
        numbers = [number for number in self.rigs[side].machine.transfers.by_number if not self._has_arrived(side, number)]
        if numbers and numbers[0] == next(iter(self.rigs[side].machine.transfers.by_number)):
            # Its number never comes again, so neither can what is still under way be taken later than this.
            self._do(side, luck, lambda machine: machine.transfers.call_back(numbers[0]))

    def _has_arrived(self, side: int, number: int) -> bool:
        return self.rigs[1 - side].machine.keys.has(self._move_key(side, number))

    # ---- partitions are shut ----------------------------------------------------------------------------------

    @rule(side=SIDE, shutting=st.sampled_from(["open", "open", "open", "read_only", "sealed", "sealed"]), later=LATER, luck=LUCK)
    def shut(self, side: int, shutting: Shutting, later: bool, luck: str) -> None:
        machine, other = self.rigs[side].machine, self.rigs[1 - side].machine
        if shutting == "sealed" and (machine.admission.shutting == "open" or other.transfers.by_number):
            return  # as a coordinator does
        self.cursor += later
        was, cursor, empty = machine.admission.shutting, machine.log.header.shut_cursor, machine.admission.is_empty
        order = ["open", "read_only", "sealed"]
        wanted = shutting if shutting != "sealed" or empty else was
        if cursor == self.cursor:
            wanted = max(wanted, was, key=order.index)

        def step(machine: Partition) -> bool:
            machine.admission.shut(shutting, self.cursor)
            return True

        if self._do(side, luck, step):
            assert self.rigs[side].machine.admission.shutting == wanted
            self.shuts.append((side, shutting, self.cursor))

    @rule(side=SIDE, left=st.sampled_from(["nothing", "nothing", "ready", "due", "leased", "moving"]), luck=LUCK)
    def vacate(self, side: int, left: str, luck: str) -> None:
        """Empty a partition, but for something perhaps, and seal it. With something left it is not."""
        self.shut(side, "read_only", True, "heard")
        if left != "leased":
            self.settle(side, 1, DONE, "heard")
        if self.rigs[1 - side].machine.admission.shutting != "open":
            return
        for scheduled in (True, False):
            if left == ("due" if scheduled else "ready"):
                continue
            while self.rigs[side].machine.transfers.by_number:
                self.carry(side, "heard", "heard")
            self.move_out(side, 100, scheduled, False, "heard")
        while left != "moving" and self.rigs[side].machine.transfers.by_number:
            self.carry(side, "heard", "heard")
        while self.rigs[1 - side].machine.transfers.by_number:
            self.carry(1 - side, "heard", "heard")
        self.shut(side, "sealed", False, luck)

    @precondition(lambda self: self.shuts)
    @rule(pick=st.integers(0, 30))
    def an_old_coordinator_shuts(self, pick: int) -> None:
        side, shutting, cursor = self.shuts[pick % len(self.shuts)]
        machine = self.rigs[side].machine
        if shutting == "sealed" and self.rigs[1 - side].machine.transfers.by_number:
            return
        before = (machine.log.header.shut, machine.log.header.shut_cursor)
        try:
            machine.admission.shut(shutting, cursor)
        except SluicewayError as error:
            assert error.code == "version_conflict"
            assert cursor < before[1]
            assert (machine.log.header.shut, machine.log.header.shut_cursor) == before
        else:
            assert machine.log.header.shut >= before[0]
        self.rigs[side].commit()

    # ---- keys move --------------------------------------------------------------------------------------------

    @rule(giver=SIDE, some=st.sets(st.integers(0, SLOTS - 1), min_size=2), key=st.sampled_from("abc"), end=LUCK)
    def hand_over_all(self, giver: int, some: set[int], key: str, end: Luck) -> None:
        """Begun and ended at one go, with a key that was used before it, and is used again after it."""
        group = "g" if giver else None
        self.produce_keyed(key, group, None, 1, "heard")
        if self.hand_over is None:
            self.begin_hand_over(giver, some | {slot(ProduceKey(key, group), SLOTS)})
        if self.hand_over is not None:
            self.give("heard")
            self.take(end)
        self.produce_keyed(key, group, giver, 1, "heard")

    @precondition(lambda self: self.hand_over is None)
    @rule(giver=SIDE, some=st.sets(st.integers(0, SLOTS - 1), min_size=1))
    def begin_hand_over(self, giver: int, some: set[int]) -> None:
        slots = frozenset(each for each in some if self.homes[each] == giver)
        if slots:
            self.cursor += 1
            self.hand_over, self.given = HandOver(slots, giver, 1 - giver, self.cursor), None
            for each in slots:
                self.homes[each] = None

    @precondition(lambda self: self.hand_over is not None)
    @rule(luck=LUCK)
    def give(self, luck: str) -> None:
        now = self.hand_over
        assert now is not None
        given = self._do(now.giver, luck, lambda machine: machine.admission.give_keys(now.slots, SLOTS, now.cursor, now.giver))
        if given is not None and luck == "heard":
            assert self.given in (None, given), "a repetition gives another answer"
            self.given = given

    @precondition(lambda self: self.given is not None)
    @rule(luck=LUCK)
    def take(self, luck: str) -> None:
        now, given = self.hand_over, None if self.hand_over is None or self.hand_over.back else self.given
        assert now is not None

        def step(machine: Partition) -> bool:
            machine.admission.take_keys(now.slots, SLOTS, now.cursor, given)
            return True

        if self._do(now.taker, luck, step) and luck == "heard":
            for each in now.slots:
                self.homes[each] = now.taker
                # Nobody was told of one that gives back what it never was to have; but then it must take as little as a former home.
                self.former[each] |= {now.taker, now.giver}
            self.past.append((now, given))
            self.hand_over, self.given = None, None

    @precondition(lambda self: self.hand_over is not None and not self.hand_over.back)
    @rule()
    def cancel_hand_over(self) -> None:
        """The former home stays it. The other, which may have taken the keys without a word, is never to be it by that."""
        now = self.hand_over
        assert now is not None
        self.past.append((now, self.given))
        self.cursor += 1
        self.hand_over, self.given = HandOver(now.slots, now.taker, now.giver, self.cursor, back=True), None

    @precondition(lambda self: self.hand_over is None)
    @rule(giver=SIDE, key=st.sampled_from("abc"), taken=LUCK)
    def hand_over_and_cancel(self, giver: int, key: str, taken: Luck) -> None:
        """All of it at one go; and what the cancelled one has asked last arrives only then."""
        self.begin_hand_over(giver, {slot(ProduceKey(key), SLOTS)})
        if self.hand_over is None:
            return
        self.give("heard")
        if taken != "heard":
            self.take(taken)
        self.cancel_hand_over()
        self.give("heard")
        self.take("heard")
        self.an_old_coordinator_hands_over(len(self.past) - 2, takes=True)
        for side in (1 - giver, giver):
            self.produce_keyed(key, None, side, 1, "heard")

    @precondition(lambda self: self.past)
    @rule(pick=st.integers(0, 30), takes=st.booleans())
    def an_old_coordinator_hands_over(self, pick: int, takes: bool) -> None:
        old, given = self.past[pick % len(self.past)]
        if takes and (given is not None or old.back):
            self.rigs[old.taker].machine.admission.take_keys(old.slots, SLOTS, old.cursor, given)
            self.rigs[old.taker].commit()
        elif not takes:
            try:
                self.rigs[old.giver].machine.admission.give_keys(old.slots, SLOTS, old.cursor, old.giver)
            except SluicewayError as error:
                assert error.code == "version_conflict"
            self.rigs[old.giver].commit()

    # ---- what must hold ---------------------------------------------------------------------------------------

    def _found(self, side: int) -> Iterator[Found]:
        rig = self.rigs[side]
        blobs = {number: rig.disk.rows(number) for number in rig.machine.log.blobs}
        rows = {number: blob.to_pylist() for number, blob in blobs.items() if isinstance(blob, pa.RecordBatch)}
        starts = sorted(rows)
        for spot in spots_of(rig.machine):
            blob = max(number for number in starts if number <= spot.origin)
            row = rows[blob][spot.origin - blob]
            origin = row.get("origin") or f"q.{side}.{spot.origin}"
            yield Found(side, row["payload"], spot, origin, row.get("kind"), row.get("headers"))

    @invariant()
    def each_item_is_in_one_place_and_as_it_was(self) -> None:
        if not hasattr(self, "rigs"):
            return
        there: list[bytes] = []
        for found in (*self._found(0), *self._found(1)):
            spot = found.spot
            if spot.place == "dying" and self._has_arrived(found.side, spot.number or 0):
                continue  # It is at the other side's now, whatever becomes of it there.
            there.append(found.payload)
            fact = self.facts[found.payload]
            told = (found.origin, found.kind, found.headers, spot.enqueued_at, spot.attempts)
            assert told == (fact.origin, fact.kind, HEADERS, fact.enqueued_at, fact.attempts)
            assert spot.expires_at == fact.expires_at
            if spot.due_at is None:
                assert fact.due_at is None or fact.due_at <= self.now
            else:
                assert spot.due_at == fact.due_at
        assert sorted(there) == sorted(self.facts), "an item is lost, or is there twice"

    @invariant()
    def what_is_sealed_is_empty(self) -> None:
        for rig in self.rigs if hasattr(self, "rigs") else ():
            assert rig.machine.admission.shutting != "sealed" or not list(spots_of(rig.machine))

    def teardown(self) -> None:
        if not hasattr(self, "rigs"):
            return
        for side in (0, 1):
            while self.rigs[side].machine.transfers.by_number:
                self.carry(side, "heard", "heard")
        self.time_passes(100, "heard")
        for side in (0, 1):
            while self.rigs[side].machine.log.ready_count:
                self.lease(side, 6, "heard")
            self.settle(side, 1, DONE, "heard")
        self.each_item_is_in_one_place_and_as_it_was()
        assert not self.facts
        totals = [rig.machine.log.header for rig in self.rigs]
        assert sum(header.moved for header in totals) == sum(header.moved_in for header in totals)
        assert sum(header.produced for header in totals) == sum(header.completed for header in totals) == self.finished
        assert all(rig.machine.admission.is_empty for rig in self.rigs)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        TwoPartitions, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, report_multiple_bugs=False)
    )


def test_items_and_keys_move_and_nothing_is_lost() -> None:
    run(80, 50)


@pytest.mark.slow
def test_items_and_keys_move_and_nothing_is_lost_in_many_long_histories() -> None:
    run(2_000, 70)
