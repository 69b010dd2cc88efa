"""What a query leases while partitions are away: each item in one batch, and nothing left behind. Random histories, with planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from sluiceway.spark import batch_leases, source
from sluiceway.spark.batch_leases import BatchLeases, close
from sluiceway.spark.offsets import HeldLease, Offset, Part
from tests.spark.outage_world import START, Clock, World

STEPS = 40
NAMED = {"partitions": "0,1,2"}
"""A query that reads partitions by number."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(batch_leases, "time", made)
    return made


@pytest.mark.parametrize("options", [{}, NAMED], ids=["queue", "partitions"])
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 400), marks=pytest.mark.slow)], ids=["some", "many"])
def test_each_item_is_in_one_batch_whatever_is_away(options: dict[str, str], seeds: range) -> None:
    """The first histories show ten of the twelve planted bugs below, the others one more."""
    for seed in seeds:
        World(seed, **options).live(STEPS)


@pytest.mark.parametrize("options", [{}, NAMED], ids=["queue", "partitions"])
@pytest.mark.parametrize("seeds", [(61, 75), pytest.param(range(200), marks=pytest.mark.slow)], ids=["some", "many"])
def test_each_item_is_in_one_batch_whatever_the_limits_after_a_restart(options: dict[str, str], seeds: Iterable[int]) -> None:
    for seed in seeds:
        world = World(seed, **options)
        world.limits_change = True
        world.live(STEPS)


def forgets_what_is_unanswered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchLeases, "unanswered", ())


def forgets_what_is_unclosed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(source, "close", lambda *args, **more: (close(*args, **more)[0], ()))


def leases_alone_under_the_keys_of_the_whole_queue(patch: pytest.MonkeyPatch) -> None:
    key = BatchLeases._key
    patch.setattr(BatchLeases, "_key", lambda self, part, number: key(self, part._replace(alone=False), number))


def forgets_that_there_were_earlier_drivers(patch: pytest.MonkeyPatch) -> None:
    begin = BatchLeases._begin

    def begins(self: BatchLeases, at: Offset) -> None:
        begin(self, at)
        self._is_first, self._divided = False, set()

    patch.setattr(BatchLeases, "_begin", begins)


def forgets_its_own_calls_to_single_partitions(patch: pytest.MonkeyPatch) -> None:
    whole = BatchLeases._take_whole

    def takes(self: BatchLeases, *args: Any) -> list[HeldLease]:
        self._divided = set()
        return whole(self, *args)

    patch.setattr(BatchLeases, "_take_whole", takes)


def takes_no_answer_for_no_leases(patch: pytest.MonkeyPatch) -> None:
    attempt = BatchLeases._try

    def tries(self: BatchLeases, part: Part, call: Callable[[], list[HeldLease]]) -> list[HeldLease]:
        return attempt(self, part, call) or []

    patch.setattr(BatchLeases, "_try", tries)


def notes_only_the_last_unanswered_key(patch: pytest.MonkeyPatch) -> None:
    note = BatchLeases._note

    def notes(self: BatchLeases, part: Part) -> None:
        note(self, part)
        if part in self._unanswered:
            self._unanswered[part] = self._unanswered[part][-1:]

    patch.setattr(BatchLeases, "_note", notes)


def notes_nothing_that_it_has_not_asked_for(patch: pytest.MonkeyPatch) -> None:
    begin = BatchLeases._begin

    def begins(self: BatchLeases, at: Offset) -> None:
        begin(self, at)
        self._is_first = False

    patch.setattr(BatchLeases, "_begin", begins)


def forgets_what_it_has_asked_for(patch: pytest.MonkeyPatch) -> None:
    attempt = BatchLeases._attempt

    def attempts(self: BatchLeases, *args: Any) -> None:
        self._asked = set()
        attempt(self, *args)

    patch.setattr(BatchLeases, "_attempt", attempts)


def takes_a_completion_for_confirmed(patch: pytest.MonkeyPatch) -> None:
    take = BatchLeases.take

    def takes(self: BatchLeases, *args: Any) -> dict[Part, list[HeldLease]]:
        taken = take(self, *args)
        self.closed = self.closed or {}
        return taken

    patch.setattr(BatchLeases, "take", takes)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, str], int]] = [
    (forgets_what_is_unanswered, {}, 0),
    (forgets_what_is_unanswered, NAMED, 0),
    (forgets_what_is_unclosed, {}, 1),
    (leases_alone_under_the_keys_of_the_whole_queue, {}, 0),
    (forgets_that_there_were_earlier_drivers, {}, 3),
    (forgets_its_own_calls_to_single_partitions, {}, 4),
    (takes_no_answer_for_no_leases, NAMED, 0),
    (notes_only_the_last_unanswered_key, {}, 0),
    (notes_nothing_that_it_has_not_asked_for, {}, 0),
    (notes_nothing_that_it_has_not_asked_for, NAMED, 82),
    (forgets_what_it_has_asked_for, {}, 1_087),
    (takes_a_completion_for_confirmed, {}, 14),
]
"""Each with the options of its query, and a seed that has shown it."""


@pytest.mark.parametrize(
    ("plant", "options", "known"), BUGS, ids=[f"{bug[0].__name__}-{'partitions' if bug[1] else 'queue'}" for bug in BUGS]
)
def test_a_planted_bug_of_the_batches_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], options: dict[str, str], known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in (known, *range(1_000)):
        try:
            World(seed, **options).live(STEPS)
        except AssertionError:
            return
    pytest.fail("not found")


def test_a_batch_is_leased_partition_by_partition_while_nobody_knows_what_one_holds() -> None:
    world = World(0)
    for number in range(3):
        world.fill(number, 4)
    world.lose(2)
    world.restart()
    assert world.trigger()
    batch = Offset.parse(world.start)
    assert {number for number, _ in world.read[5]} == {0, 1}
    assert batch.unanswered == ((Part("q"), (5,)), (Part("q", 2, True), (5,)))
    world.fill(0, 2)
    assert world.trigger()
    assert Offset.parse(world.start).unanswered == batch.unanswered, "an outage adds nothing, however many batches it lasts"
    world.bring_back(2)
    while world.trigger():
        assert not Offset.parse(world.start).unanswered
    world.check()


@pytest.mark.parametrize("options", [{}, NAMED], ids=["queue", "partitions"])
def test_a_restart_with_lower_limits_leaves_no_lease_behind(options: dict[str, str]) -> None:
    """The first driver dies after it has leased, and before Spark has logged what. Its items would wait until `holdFor` is over."""
    world = World(0, **options)
    for _ in range(3):
        world.fill(0, 4)
        world.driver.latestOffset(world.start, ReadMaxRows(300))
    world.driver = world.new_driver()
    world.fill(1, 5)
    assert world.trigger()
    assert len(world.read[5]) >= 12
    while world.trigger():
        pass
    world.check()


def test_a_batch_is_closed_when_its_partitions_are_back() -> None:
    world = World(0)
    for number in range(3):
        world.fill(number, 1)
    assert world.trigger()
    assert {number for number, _ in world.read[5]} == {0, 1, 2}
    world.lose(1)
    world.fill(0, 3)
    assert world.trigger()
    left = Offset.parse(world.start).unclosed
    assert {lease.lease_id.split(".")[1] for lease in left} == {"1"}
    # The next driver closes them, too.
    world.driver = world.new_driver()
    world.bring_back(1)
    while world.trigger():
        assert not Offset.parse(world.start).unclosed
    world.check()


def test_a_query_without_any_open_partition_fails_after_its_patience(clock: Clock) -> None:
    world = World(0)
    for number in range(3):
        world.lose(number)
    world.restart()
    driver = world.driver
    assert not world.trigger()
    assert world.driver is not driver
    assert world.start == START
    assert clock.now >= 1


def test_offsets_say_what_is_unanswered_and_unclosed_only_if_something_is() -> None:
    plain = Offset("n", 3, (HeldLease("q.0.L1", 2),))
    assert plain.to_dict().keys() == {"leases", "nonce", "rows_per_task", "sequence"}
    parts = (Part("q"), (2, 3)), (Part("q", 7, True), (3,)), (Part("a.b-c", 0), (1,))
    full = Offset("n", 3, plain.leases, unanswered=parts, unclosed=(HeldLease("q.1.L4", 5), HeldLease("r.1.L4", 5, "r")))
    told = full.to_dict()
    assert list(told) == sorted(told)
    assert Offset.parse(told) == full
    assert Offset.parse(plain.to_dict()) == plain
