"""What a rebalance is to do: the fewest partitions made and drained for the division that the affinities ask for."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.key_slots import SLOTS, home_of, slots_of, spread
from sluiceway.core.queue.backend_placement import place
from sluiceway.core.rebalance.partition_plan import plan
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.requests import ProduceKey

NAMES = ["a", "b", "c", "d"]
affinities_of = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=1).filter(
    lambda those: any(those.values())
)


def queue(*backends: str, first: int = 0, next_partition: int = 0) -> QueueRecord:
    partitions = tuple(PartitionRecord(first + index, backend) for index, backend in enumerate(backends))
    return QueueRecord("orders", "aaaaaaaa", 0, 0, partitions, next_partition=next_partition)


@st.composite
def queues(draw: st.DrawFn) -> QueueRecord:
    numbers = sorted(draw(st.sets(st.integers(0, 30), min_size=1, max_size=12)))
    partitions = tuple(
        PartitionRecord(number, draw(st.sampled_from([*NAMES, "gone"])), draw(st.sampled_from(["available", "paused"])))
        for number in numbers
    )
    given_numbers = draw(st.integers(numbers[-1] + 1, numbers[-1] + 9))
    return msgspec.structs.replace(queue("a"), partitions=draw(st.permutations(partitions).map(tuple)), next_partition=given_numbers)


# ---- how many each backend gets ------------------------------------------------------------------------------------


def test_a_hundred_over_three_equal_backends_are_34_33_33() -> None:
    assert place(100, {"a": 1, "b": 1, "c": 1}) == {"a": 34, "b": 33, "c": 33}


def test_one_over_two_is_one_and_stays_where_it_is() -> None:
    assert place(1, {"a": 1, "b": 1}) == {"a": 1, "b": 0}
    assert place(1, {"a": 1, "b": 1}, {"b": 1}) == {"a": 0, "b": 1}


def test_equal_remainders_go_to_who_has_more() -> None:
    assert place(100, {"a": 1, "b": 1, "c": 1}, {"a": 33, "b": 33, "c": 34}) == {"a": 33, "b": 33, "c": 34}


@given(st.integers(1, MAX_PARTITIONS), affinities_of, st.dictionaries(st.sampled_from([*NAMES, "gone"]), st.integers(0, 100)))
def test_shares_are_within_one_of_what_the_affinities_say_and_none_for_nothing(
    requested: int, affinities: dict[str, float], has: dict[str, int]
) -> None:
    counts = place(requested, affinities, has)
    total = sum(Fraction(each) for each in affinities.values())
    assert sum(counts.values()) == requested
    for name, affinity in affinities.items():
        assert abs(counts[name] - requested * Fraction(affinity) / total) < 1
        assert affinity or counts[name] == 0


# ---- the plan ------------------------------------------------------------------------------------------------------


@given(queues(), st.integers(1, 20), affinities_of)
def test_a_plan_makes_and_drains_the_fewest(record: QueueRecord, requested: int, affinities: dict[str, float]) -> None:
    made = plan(record, requested, affinities)
    has = Counter(each.backend for each in record.partitions)
    counts = place(requested, affinities, has)
    numbers = {each.partition for each in record.partitions}
    backend = {each.partition: each.backend for each in record.partitions}

    assert {*made.keeps} | {*made.drains} == numbers
    assert not {*made.keeps} & {*made.drains}
    after = Counter([*(backend[number] for number in made.keeps), *(each.backend for each in made.creates)])
    assert after == Counter({name: count for name, count in counts.items() if count}), "not the division that is wanted"
    assert len(made.creates) == sum(max(0, count - has[name]) for name, count in counts.items()), "more made than needed"
    assert len(made.drains) == sum(max(0, has[name] - counts.get(name, 0)) for name in has), "more drained than needed"
    assert sum(after.values()) >= 1
    assert not made.reopens


@given(queues(), st.integers(1, 20), affinities_of)
def test_numbers_are_new_and_never_reused(record: QueueRecord, requested: int, affinities: dict[str, float]) -> None:
    new = [each.partition for each in plan(record, requested, affinities).creates]
    assert new == list(range(record.given, record.given + len(new)))


@given(queues(), st.integers(1, 20), affinities_of)
def test_who_is_drained_has_a_replacement_and_who_replaces_has_parents(
    record: QueueRecord, requested: int, affinities: dict[str, float]
) -> None:
    made = plan(record, requested, affinities)
    parents = [parent for each in made.creates for parent in each.parents]
    assert {*parents} <= {*made.drains}
    if made.creates and made.drains:
        assert {*parents} == {*made.drains}
        assert all(each.parents for each in made.creates)
    assert made.in_order == (len(record.partitions) == len(made.creates) == len(made.drains) == 1)


@given(queues(), st.integers(1, 20), affinities_of, st.randoms())
def test_it_is_the_same_whatever_the_order(record: QueueRecord, requested: int, affinities: dict[str, float], random: object) -> None:
    shuffled = list(record.partitions)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    names = list(affinities)
    random.shuffle(names)  # type: ignore[attr-defined]
    other = msgspec.structs.replace(record, partitions=tuple(shuffled))
    assert plan(other, requested, {name: affinities[name] for name in names}) == plan(record, requested, affinities)


@given(queues(), st.integers(1, 20), affinities_of)
def test_once_done_there_is_nothing_left_to_do(record: QueueRecord, requested: int, affinities: dict[str, float]) -> None:
    made = plan(record, requested, affinities)
    stay = [each for each in record.partitions if each.partition in made.keeps]
    new = [PartitionRecord(each.partition, each.backend) for each in made.creates]
    after = msgspec.structs.replace(record, partitions=(*stay, *new), next_partition=record.given + len(new))
    assert plan(after, requested, affinities).is_empty


def test_a_move_of_the_only_partition_keeps_the_order() -> None:
    made = plan(queue("a"), 1, {"a": 0, "b": 1})
    assert made.in_order
    assert made.creates == ((1, "b", (0,)),)
    assert made.drains == (0,)


def test_growing_and_shrinking_does_not() -> None:
    assert not plan(queue("a"), 4, {"a": 1}).in_order
    assert not plan(queue("a", "a"), 1, {"a": 0, "b": 1}).in_order


def test_a_backend_that_is_not_configured_is_vacated() -> None:
    made = plan(queue("gone", "a"), 2, {"a": 1})
    assert made.drains == (0,)
    assert [each.backend for each in made.creates] == ["a"]


@pytest.mark.parametrize("requested", [0, -1, MAX_PARTITIONS + 1])
def test_the_number_is_bounded(requested: int) -> None:
    with pytest.raises(SluicewayError, match="requested_partitions"):
        plan(queue("a"), requested, {"a": 1})


def test_a_queue_with_unique_items_is_not_planned() -> None:
    with pytest.raises(SluicewayError, match="unique"):
        plan(msgspec.structs.replace(queue("a"), unique="until_settled", order="key"), 2, {"a": 1})


def test_without_any_affinity_nothing_can_be_planned() -> None:
    with pytest.raises(SluicewayError, match="partition_affinity"):
        plan(queue("a"), 1, {"a": 0})


# ---- slots ---------------------------------------------------------------------------------------------------------


@given(queues(), st.text(min_size=1, max_size=20))
def test_no_key_loses_its_home_when_slots_are_first_recorded(record: QueueRecord, name: str) -> None:
    slots = slots_of(record)
    assert len(slots) >= SLOTS
    recorded = msgspec.structs.replace(record, slots=slots)
    assert home_of(recorded, ProduceKey(name)) == home_of(record, ProduceKey(name))


@given(queues(), st.sets(st.integers(0, 60), min_size=1, max_size=20))
def test_slots_are_even_and_the_fewest_move(record: QueueRecord, stay: set[int]) -> None:
    before = slots_of(record)
    after = spread(before, stay)
    counts = Counter(after)
    assert {*counts} <= stay
    least, more = divmod(len(before), len(stay))
    assert sorted(counts[number] for number in stay) == [least] * (len(stay) - more) + [least + 1] * more
    lost = Counter(old for old, new in zip(before, after, strict=True) if old != new)
    gained = Counter(new for old, new in zip(before, after, strict=True) if old != new)
    assert not {*lost} & {*gained}, "a partition that gives slots is given none"
    has = Counter(before)
    # The fewest: each could keep as many as it has, up to its part, and the larger parts go to those that have more.
    parts = sorted((min(has[number], least) for number in stay), reverse=True)
    over = sum(has[number] > least for number in stay)
    assert sum(gained.values()) == len(before) - sum(parts) - min(more, over)
