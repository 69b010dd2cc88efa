"""Unique items: random histories of a partition beside a model that keeps one object an item, loaded anew at any moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import pytest

from sluiceway.contract.queue_settings import Unique
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition import Placed
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import hash_of as bundle_hash
from sluiceway.model.requests import DONE, MOVE_GROUP, CallPart, Disposition, MovedItem, ProduceKey
from sluiceway.model.small_batch import Rows, digest
from sluiceway.model.unique_keys import hash_of
from tests.core.core_model import START, Rig, Row, array_of, batch_of, either_form
from tests.core.test_key_order import KINDS, Thing
from tests.core.test_key_order import World as KeyWorld

Form = Callable[[Sequence[Row]], Rows]
UNTIL_SETTLED: Unique = "until_settled"
WHILE_WAITING: Unique = "while_waiting"
SEEDS = 15
"""Histories of a block."""


class Name(NamedTuple):
    """What is unique of an item."""

    unique_key: str
    key: str | None


class Call(NamedTuple):
    rows: Sequence[Row]
    key: ProduceKey
    part: CallPart
    answer: Placed


class World(KeyWorld):
    """A partition whose items have unique keys, beside the keys of `KeyWorld`, whose model says which items wait and which are leased."""

    unique: Unique | None = UNTIL_SETTLED

    def __init__(self, seed: int) -> None:
        self.named: dict[str, Name] = {}
        """What is unique of items that were stored while items were kept unique."""
        self.calls: list[Call] = []
        self.numbers = count()
        self.left_out = 0
        self.away: dict[int, list[str]] = {}
        """The items of transfers."""
        super().__init__(seed)
        self.unique = self.random.choice([UNTIL_SETTLED, WHILE_WAITING])
        self.follow(KeyRules() if self.random.random() < 0.5 else self.keys)

    def follow(self, keys: KeyRules) -> None:
        self.rig.commit()
        self.keys = keys
        self.rig.follow(Rules(self.max_attempts, backoff=self.backoff, keys=keys, unique=self.unique))

    def live(self) -> None:
        acts = [self.produce] * 4 + [self.lease] * 3 + [self.settle] * 4 + [self.end, self.end, self.tick, self.drop]
        acts += [self.repeat, self.send, self.move, self.arrive]
        for _ in range(self.random.choice([20, 80])):
            self.random.choice(acts)()
            if self.random.random() < 0.3:
                self.rig.commit()
            if self.random.random() < 0.1:
                self.rig.reload()
            if not self.leases and self.random.random() < 0.1:
                self.rig.compact()
            if self.random.random() < 0.03:
                self.unique = self.random.choice([UNTIL_SETTLED, WHILE_WAITING, None])
                self.follow(self.random.choice([KeyRules(), *KINDS]))
            uniques = self.rig.machine.log.uniques
            assert (None if uniques is None else uniques.picture()) == self.holders()

    def holders(self) -> dict[bytes, list[int]] | None:
        """The places of the items that hold each key."""
        if self.unique is None:
            return None
        found: dict[bytes, list[int]] = {}
        for name, what in self.named.items():
            state = self.things[name].state
            if state in ("waiting", "scheduled", "back") or (state == "leased" and self.unique == UNTIL_SETTLED):
                found.setdefault(hash_of(*what), []).append(self.things[name].place)
        return {hashed: sorted(places) for hashed, places in found.items()}

    # ---- acts -------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        rows = self.rows(self.random.choice([1, 2, 5, 12, 20]))
        leaves_out = self.random.random() < 0.9
        key = ProduceKey(f"call {len(self.calls)}") if leaves_out and self.random.random() < 0.4 else None
        first = self.rig.machine.log.header.next
        expected, stored = [], 0
        holders = self.holders() or {}
        for at, row in enumerate(rows):
            place = first + stored
            if self.unique is not None and row.unique_key is not None:
                those = holders.setdefault(hash_of(row.unique_key, row.key), [])
                if leaves_out and those:
                    expected.append((at, those[0]))
                    continue
                those.append(place)
            self.note(row, place)
            stored += 1
        if leaves_out:
            part = part_of(rows, *sorted(self.random.sample(range(len(rows)), min(len(rows), 3))))
            answer = self.rig.machine.produce_part(either_form(rows), self.now, key, part)
        else:
            answer = self.rig.machine.produce(either_form(rows), self.now)
        assert answer == Placed(first, len(rows), False, duplicates=tuple(expected))
        assert self.rig.machine.log.header.next == first + stored
        self.left_out += len(expected)
        assert self.rig.machine.log.header.duplicates == self.left_out
        if key is not None:
            self.calls.append(Call(rows, key, part, answer))

    def repeat(self) -> None:
        """A repeated call has the answer of the first, whatever has become of the items."""
        if self.calls:
            rows, key, part, answer = self.random.choice(self.calls)
            assert self.rig.machine.produce_part(either_form(rows), self.now, key, part) == answer._replace(repeated=True)

    def arrive(self) -> None:
        """Items that were moved here are not left out: they would be lost."""
        rows = [row._replace(enqueue_at=None) for row in self.rows(3)]
        first = self.rig.machine.log.header.next
        for at, row in enumerate(rows):
            self.note(row, first + at)
        key = ProduceKey(f"move {first}", f"{MOVE_GROUP}q.9", first)
        self.rig.machine.produce(batch_of(rows), self.now, key, (MovedItem(3, self.now),))

    def send(self) -> None:
        """Waiting items go to another queue, or those on their way there come back."""
        self.rig.commit()
        transfers = self.rig.machine.transfers
        if self.away:
            number, names = self.away.popitem()
            # In order, what comes back from among others of its key does not always get its place again before a restart.
            back = not self.keys.order and self.random.random() < 0.5
            transfers.call_back(number) if back else transfers.end(number)
            for name in names:
                self.things[name].state = "waiting" if back else "gone"
            return
        chosen = {each.offset: each.payload.decode() for each in self.rig.ready() if self.random.random() < 0.3}
        number, _ = transfers.redrive(array_of(chosen), "other", self.now)
        if number:
            self.away[number] = [*chosen.values()]
        for name in chosen.values():
            self.things[name].state = "away"

    def move(self) -> None:
        """Waiting items go to another partition."""
        self.rig.commit()
        transfers = self.rig.machine.transfers
        number, items = transfers.move_out(self.random.choice([1, 5]), math.inf, 9, self.random.random() < 0.3, self.now)
        self.rig.commit()
        if number:
            names = self.names(transfers.by_number[number])
            assert len(names) == items
            for name in names:
                self.things[name].state = "away"
            transfers.end(number)

    def rows(self, items: int) -> list[Row]:
        found = []
        for _ in range(items):
            name, key = f"t{next(self.numbers)}", self.random.choice([None, "a", "b"])
            due_at = self.now + self.random.choice([10, 60]) if self.random.random() < 0.1 else None
            unique_key = self.random.choice([None, "x", "y", *(f"u{self.random.randrange(30)}" for _ in range(3))])
            found.append(Row(name.encode(), due_at, key=key, unique_key=unique_key))
        if self.random.random() < 0.7:
            found.sort(key=lambda row: row.key or "")
        return found

    def note(self, row: Row, place: int) -> None:
        name, due_at = row.payload.decode(), row.enqueue_at or 0
        self.things[name] = Thing(place, row.key if self.keys else None, "scheduled" if due_at else "waiting", due_at)
        if self.unique is not None and row.unique_key is not None:
            self.named[name] = Name(row.unique_key, row.key)


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 8))])
def test_random_histories_beside_a_model(block: int) -> None:
    """The first history shows each of the simulator's planted bugs of unique items that a partition by itself can show."""
    for seed in range(block * SEEDS, (block + 1) * SEEDS):
        try:
            World(seed).live()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def part_of(rows: Sequence[Row], *edges: int) -> CallPart:
    """These rows as a whole call, of slots that begin at these rows (and at the first)."""
    begins = sorted({0, *edges})
    ends = [*begins[1:], len(rows)]
    slots = tuple((10 + at, end - begin) for at, (begin, end) in enumerate(zip(begins, ends, strict=True)))
    return CallPart(digest(batch_of(rows)), slots)


def produce(rig: Rig, rows: Sequence[Row], now: int = START, key: ProduceKey | None = None, form: Form = either_form) -> Placed:
    """Produce these rows, as a call whose keys are all of one slot."""
    return rig.machine.produce_part(form(rows), now, key, part_of(rows))


def rig_of(unique: Unique | None = UNTIL_SETTLED, **rules: object) -> Rig:
    rig = Rig()
    rig.follow(Rules(unique=unique, **rules))  # type: ignore[arg-type]
    return rig


def stored(rig: Rig, unique_key: str, now: int = START, **fields: object) -> bool:
    """Whether an item with that unique key is stored."""
    row = Row(b"x", unique_key=unique_key, **fields)  # type: ignore[arg-type]
    return not produce(rig, [row], now).duplicates


@pytest.mark.parametrize("unique", [UNTIL_SETTLED, WHILE_WAITING])
def test_a_key_is_free_again_when_the_setting_says_so(unique: Unique) -> None:
    rig = rig_of(unique)
    assert stored(rig, "k")
    assert not stored(rig, "k")
    lease = rig.lease(1)
    assert stored(rig, "k") is (unique == WHILE_WAITING)
    rig.reload()
    assert not stored(rig, "k")
    rig.close(rig.machine.leases[lease.number])
    assert stored(rig, "k") is (unique == UNTIL_SETTLED), "otherwise the second one waits"


@pytest.mark.parametrize("disposition", [DONE, Disposition("dead")])
def test_a_key_is_free_when_its_item_is_completed_or_dies(disposition: Disposition) -> None:
    rig = rig_of(keeps_dead=True, dead_queue="dead")
    assert stored(rig, "k")
    lease = rig.lease(1)
    rig.settle([lease.parts[0].first], disposition)
    assert stored(rig, "k")
    assert not stored(rig, "k")


@pytest.mark.parametrize("disposition", [Disposition("retry"), Disposition("retry", retry_after=50), Disposition("release")])
@pytest.mark.parametrize("unique", [UNTIL_SETTLED, WHILE_WAITING])
def test_an_item_that_comes_back_holds_its_key(disposition: Disposition, unique: Unique) -> None:
    rig = rig_of(unique)
    assert stored(rig, "k")
    rig.settle([rig.lease(1).parts[0].first], disposition)
    rig.reload()
    assert not stored(rig, "k")


def test_a_scheduled_item_holds_its_key_also_when_it_becomes_due() -> None:
    rig = rig_of()
    assert stored(rig, "k", enqueue_at=START + 10)
    assert not stored(rig, "k")
    rig.machine.tick(START + 10)
    assert not stored(rig, "k", START + 10)


def test_an_expired_item_does_not_hold_its_key() -> None:
    rig = rig_of(expire_timeout=10)
    assert stored(rig, "k")
    rig.machine.tick(START + 10)
    assert stored(rig, "k", START + 10)


def test_an_item_is_unique_among_those_of_its_key() -> None:
    rig = rig_of()
    assert [stored(rig, "k", key=key) for key in (None, "a", "b", None, "a")] == [True, True, True, False, False]
    assert stored(rig, "ak"), "neither text runs into the other"


@pytest.mark.parametrize("form", [batch_of, either_form])
def test_of_one_call_the_first_is_stored_and_the_others_are_said_to_be_it(form: Form) -> None:
    rig = rig_of()
    stored(rig, "a")
    rows = [Row(b"%d" % at, unique_key=key) for at, key in enumerate(["b", "a", None, "b", "c", "c", None])]
    answer = produce(rig, rows, form=form)
    assert (answer.items, answer.duplicates) == (7, ((1, 0), (3, 1), (5, 3)))
    again = produce(rig, rows[:2], form=form)
    assert again.duplicates == ((0, 1), (1, 0))
    rig.commit()
    assert [each.payload for each in rig.ready()] == [b"x", b"0", b"2", b"4", b"6"]


def test_the_id_that_is_told_is_the_first_one_of_the_item() -> None:
    rig = rig_of()
    stored(rig, "other")
    stored(rig, "k")
    for _ in range(3):
        rig.settle([rig.lease(2).parts[-1].end - 1], Disposition("retry"))
    answer = produce(rig, [Row(b"y", unique_key="k")])
    assert answer.duplicates == ((0, 1),)


def test_a_repeated_call_has_the_first_answer_after_a_restart() -> None:
    rig = rig_of()
    stored(rig, "k")
    rows, key = [Row(b"a", unique_key="k"), Row(b"b", unique_key="l")], ProduceKey("call")
    first = produce(rig, rows, key=key)
    assert first.duplicates == ((0, 0),)
    rig.commit()
    rig.close(rig.lease(5))
    rig.reload()
    assert produce(rig, rows, key=key) == first._replace(repeated=True)
    with pytest.raises(SluicewayError) as raised:
        produce(rig, rows[:1], key=key)
    assert raised.value.code == "key_conflict"
    assert stored(rig, "l"), "nothing was stored again"


def test_what_is_remembered_of_a_slot_has_its_duplicates_wherever_the_slot_goes() -> None:
    """As after `unique` was turned off, and the queue was rebalanced."""
    rig, there = rig_of(), rig_of(None)
    stored(rig, "k")
    rows = [Row(b"%d" % at, unique_key=name) for at, name in enumerate("abkckad")]
    key, part = ProduceKey("call"), part_of(rows, 2, 4, 6)
    first = rig.machine.produce_part(batch_of(rows), START, key, part)
    assert (first.first_offset, first.duplicates) == (1, ((2, 0), (4, 0), (5, 1)))
    given = rig.machine.admission.give_keys([11, 12], 256, 1, 7)
    there.machine.admission.take_keys([11, 12], 256, 1, given, START)
    there.reload()
    moved = there.machine.produce_part(batch_of(rows[2:6]), START, key, part._replace(slots=part.slots[1:3]))
    assert moved == Placed(3, 4, True, 7, duplicates=((0, 0), (2, 0), (3, 1)))
    for slot, answer in ((11, Placed(3, 2, True, 7, duplicates=((0, 0),))), (12, Placed(4, 2, True, 7, duplicates=((0, 0), (1, 1))))):
        rows_of = rows[2:4] if slot == 11 else rows[4:6]
        assert there.machine.produce_part(batch_of(rows_of), START, key, part._replace(slots=((slot, 2),))) == answer


def test_a_repetition_that_stores_what_is_missing_has_the_duplicates_of_both() -> None:
    rig = rig_of()
    stored(rig, "k")
    rows = [Row(b"%d" % at, unique_key=name) for at, name in enumerate("akbk")]
    key, part = ProduceKey("call"), part_of(rows, 2)
    rig.machine.produce_part(batch_of(rows[2:]), START, key, part._replace(slots=part.slots[1:]))
    stored(rig, "other")
    answer = rig.machine.produce_part(batch_of(rows), START, key, part)
    assert answer == Placed(3, 4, False, None, ((None, 3, 2), (None, 1, 2)), ((1, 0), (3, 0)))
    assert rig.machine.produce_part(batch_of(rows), START, key, part) == answer._replace(repeated=True)


def test_a_duplicate_does_not_belong_to_the_bundle_of_its_call() -> None:
    rig, rows = rig_of(), [Row(b"%d" % at, unique_key=name) for at, name in enumerate("kak")]
    stored(rig, "k")
    for _ in range(2):
        rig.machine.produce_part(batch_of(rows), START, None, part_of(rows), "bundle")
    assert rig.machine.log.bundles.count(bundle_hash("bundle")).stored == 1
    rig.settle([rig.lease(2).parts[0].first], DONE)
    assert rig.machine.log.bundles.count(bundle_hash("bundle")).completed == 0, "the item that was there does not belong to it either"


def test_that_nothing_is_stored_is_written_so_that_a_former_owner_cannot_say_it() -> None:
    rig = rig_of()
    stored(rig, "k")
    rig.commit()
    assert not stored(rig, "k")
    assert rig.machine.is_changed


def test_a_queue_that_keeps_nothing_unique_notes_no_unique_keys() -> None:
    rig = rig_of(None)
    assert stored(rig, "k")
    assert stored(rig, "k")
    rig.commit()
    assert all(blob.uniques is None for blob in rig.machine.log.blobs.values())
