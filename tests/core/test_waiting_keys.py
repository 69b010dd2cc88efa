"""What a partition says of keys that wait: to people who ask why an item is not served, and which keys are behind."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from sluiceway.core.partition import queries
from sluiceway.core.partition.item_listing import from_place, in_line
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.core.queue.key_ranking import busiest, oldest, together
from sluiceway.kernel.clock import Millis
from sluiceway.model.inspection import Place
from sluiceway.model.item_keys import NO_KEY, hash_of
from sluiceway.model.peers import KeyCount
from sluiceway.model.requests import Disposition
from tests.core.core_model import START, Rig, Row, array_of

LATER = Disposition("retry", retry_after=60_000)


def rig_of(**rules: int) -> Rig:
    rig = Rig()
    rig.follow(Rules(keys=KeyRules(**rules)))  # type: ignore[arg-type]
    return rig


def produce(rig: Rig, *keys: str | None, at: Millis = START) -> None:
    rig.produce([Row(b"x", key=key) for key in keys], at)
    rig.commit()


def lease(rig: Rig, want: int, runs: bool = False) -> int:
    """Lease items, and return the first offset."""
    found = rig.machine.lease(want, "c", START + 60_000, START, runs=runs)
    assert found is not None
    rig.commit()
    return found.parts[0].first


def why(rig: Rig, offset: int) -> str:
    return queries.explain(rig.machine, offset).reason


def counted(rig: Rig, limit: int = 20) -> dict[int, KeyCount]:
    return {count.hash: count for count, _ in queries.key_counts(rig.machine, limit)}


# ---- explain ----------------------------------------------------------------------------------------------------------


def test_an_item_waits_for_an_earlier_one_of_its_key_that_is_leased() -> None:
    rig = rig_of(order=True)
    produce(rig, "a", "a", "a", "b")
    assert why(rig, 0) == "it is the next of its key"
    lease(rig, 1)
    assert why(rig, 1) == "an earlier item of its key is leased"
    found = queries.explain(rig.machine, 2)
    assert (found.reason, found.ahead) == ("an earlier item of its key is leased; 1 item of its key is served before it", 1)
    assert why(rig, 3) == "it is the next of its key"


def test_an_item_waits_for_the_retry_of_an_earlier_one_of_its_key() -> None:
    rig = rig_of(order=True)
    produce(rig, "a", "a")
    rig.settle([lease(rig, 1)], LATER, START)
    assert why(rig, 1) == "an earlier item of its key waits for its retry"
    assert why(rig, 0) == "it is not due yet; attempt 1 failed; later items of its key wait for it"


def test_a_retry_holds_up_nothing_where_order_does_not_matter() -> None:
    rig = rig_of(concurrency=1)
    produce(rig, "a", "a")
    rig.settle([lease(rig, 1)], LATER, START)
    assert why(rig, 1) == "it is the next of its key"
    assert why(rig, 0) == "it is not due yet; attempt 1 failed"


def test_an_item_waits_because_its_key_is_at_its_limit() -> None:
    rig = rig_of(concurrency=5)
    produce(rig, *["a"] * 7)
    lease(rig, 7)
    assert why(rig, 5) == "its key is at its limit of 5"
    assert why(rig, 6) == "its key is at its limit of 5; 1 item of its key is served before it"


def test_items_without_a_key_wait_for_one_another() -> None:
    rig = rig_of(fair=True)
    produce(rig, None, "a", None, None)
    assert why(rig, 0) == "it is the next without a key"
    assert why(rig, 3) == "2 items without a key are served before it"


def test_deleted_items_are_not_before_another() -> None:
    rig = rig_of(order=True)
    produce(rig, *["a"] * 4)
    rig.machine.log.drop(array_of([0, 2]), START)
    rig.commit()
    assert why(rig, 1) == "it is the next of its key"
    assert why(rig, 3) == "1 item of its key is served before it"


# ---- counts -----------------------------------------------------------------------------------------------------------


def test_the_counts_of_a_partition_have_its_keys() -> None:
    rig = rig_of(order=True)
    produce(rig, None, "a", "a", "b", "b", "c")
    for offset in (lease(rig, 1), lease(rig, 1), lease(rig, 1)):
        if offset == 1:
            rig.settle([offset], LATER, START)
    stats = queries.stats_of(rig.machine, 0)
    assert (stats.ready, stats.servable, stats.total_leased, stats.scheduled) == (3, 1, 2, 1)
    assert (stats.keys_waiting, stats.keys_blocked, stats.keys_limited) == (3, 2, 0)
    rig.reload()
    assert queries.stats_of(rig.machine, 0) == stats


def test_a_key_at_its_limit_counts_also_if_nothing_of_it_waits() -> None:
    rig = rig_of(concurrency=1)
    produce(rig, "a", "b", "b")
    lease(rig, 3)
    stats = queries.stats_of(rig.machine, 0)
    assert (stats.servable, stats.keys_waiting, stats.keys_blocked, stats.keys_limited) == (0, 1, 1, 2)


def test_a_queue_that_does_not_look_at_keys_has_none() -> None:
    rig = Rig()
    produce(rig, "a", "a")
    stats = queries.stats_of(rig.machine, 0)
    assert (stats.ready, stats.servable, stats.keys_waiting) == (2, 2, 0)
    assert counted(rig) == {}


def test_the_busiest_and_the_oldest_of_many_keys_are_found() -> None:
    rig = rig_of(fair=True)
    produce(rig, "old", at=START)
    for number in range(50):
        produce(rig, f"k{number}", at=START + 10)
    produce(rig, *["busy"] * 9, None, at=START + 20)
    found = counted(rig, 1)
    assert set(found) == {hash_of("old"), hash_of("busy")}
    assert found[hash_of("busy")] == (hash_of("busy"), 9, 0, 0, START + 20, None, None)
    assert found[hash_of("old")].oldest_at == START
    assert len(counted(rig, 100)) == 53
    assert counted(rig, 100)[NO_KEY].waiting == 1


def test_the_busiest_and_the_oldest_of_thousands_are_found() -> None:
    """So many that they are compared by block."""
    rig, random = rig_of(fair=True), Random(1)
    sizes = {f"k{n}": random.randint(1, 9) for n in range(5_000)}
    for at, some in enumerate(batched(random.sample(sorted(sizes), len(sizes)), 1_000)):
        produce(rig, *(key for key in some for _ in range(sizes[key])), at=START + 10 - at)
    rig.machine.log.drop(array_of(range(2_000)), START)
    rig.commit()
    every = list(counted(rig, 10_000).values())
    assert len(every) < 5_000
    for limit in (1, 3):
        found = list(counted(rig, limit).values())
        assert sorted(each.waiting for each in busiest(found, limit)) == sorted(each.waiting for each in busiest(every, limit))
        assert [each.oldest_at for each in oldest(found, limit)] == [each.oldest_at for each in oldest(every, limit)]


def batched(keys: list[str], size: int) -> Iterator[list[str]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def test_a_key_is_as_old_as_its_first_item_that_still_waits() -> None:
    rig = rig_of(order=True)
    for at, key in enumerate(["a", "b", "a", "c", "c", "c"]):
        produce(rig, key, at=START + at)
    rig.machine.log.drop(array_of([0]), START)
    rig.commit()
    assert counted(rig)[hash_of("a")].oldest_at == START + 2
    assert set(counted(rig, 1)) == {hash_of("b"), hash_of("c")}, "of these, b waits longest"


def test_an_item_says_what_its_key_is() -> None:
    rig = rig_of(order=True)
    produce(rig, "a", "a", "b")
    lease(rig, 1)
    ((_, item),) = [each for each in queries.key_counts(rig.machine, 20) if each[0].hash == hash_of("a")]
    assert (item.blob, item.rows.tolist(), item.offsets.tolist()) == (0, [1], [1])


# ---- ranking ----------------------------------------------------------------------------------------------------------


def test_the_counts_of_a_key_in_several_partitions_are_added() -> None:
    found = together(
        [
            KeyCount(1, 2, 1, 0, START + 5, "limit", "a"),
            KeyCount(2, 1, 0, 0, START, None, "b"),
            KeyCount(1, 4, 0, 1, START + 3, "retry", "a"),
        ]
    )
    assert list(found) == [KeyCount(1, 6, 1, 1, START + 3, "limit", "a"), KeyCount(2, 1, 0, 0, START, None, "b")]
    assert [each.text for each in busiest(found, 5)] == ["a", "b"]
    assert [each.text for each in oldest(found, 1)] == ["b"]
    (free,) = together([KeyCount(1, 1, 0, 0, START, "lease"), KeyCount(1, 1, 0, 0, START, None)])
    assert free.blocked_by is None, "one of its items can be leased"


# ---- listings ---------------------------------------------------------------------------------------------------------


def test_a_page_of_a_listing_leaves_out_nothing_between_leased_items() -> None:
    """Where keys decide, ready items are between leased ones, and a page goes on after the last offset of the one before."""
    rig = rig_of(order=True)
    produce(rig, "a", "a", "b", "b", "b", "c", "d", "d")
    lease(rig, 4)
    for limit in (1, 2, 3, 100):
        listed, start = [], 0
        while page := in_line(rig.machine, start, limit):
            listed += [offset for each in page for offset in each.piece.offsets.tolist()]
            start = listed[-1] + 1
        assert listed == list(range(8))
    found = list(from_place(rig.machine, ("leased", "ready"), Place(at=1), ()))
    assert [offset for each in found for offset in each.listed.piece.offsets.tolist()] == list(range(1, 8))
    assert [each.place.at for each in found] == [each.listed.piece.offsets[0] for each in found]
