"""The simulated store: what survives, and who may write."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from simulation.promises import BrokenPromiseError
from simulation.store import Store
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.queries import stats_of
from sluiceway.model.changes import Changes, RecordKind
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import ProduceKey

NOW = 1_000


def opened() -> tuple[Store, Partition]:
    store = Store()
    store.open((1, 1))
    return store, store.load()


def produce(partition: Partition, *payloads: str, now: int = NOW) -> Changes:
    partition.produce(batch_from_rows([{"payload": payload.encode()} for payload in payloads]), now)
    taken = partition.take_changes()
    assert taken is not None
    return taken[0]


def payloads(store: Store) -> list[str]:
    return list(store.scene().alive)


def test_what_is_synced_survives_a_loss_of_power() -> None:
    store, partition = opened()
    assert store.apply(produce(partition, "a", "b"), (1, 1))
    store.lose_power()
    assert payloads(store) == ["a", "b"]


def test_what_is_only_written_does_not() -> None:
    store, partition = opened()
    changes = produce(partition, "a")
    assert store.write(changes, (1, 1))
    store.lose_power()
    assert not store.sync(changes)
    assert payloads(store) == []


def test_an_opening_makes_durable_what_was_written_before() -> None:
    store, partition = opened()
    assert store.write(produce(partition, "a"), (1, 1))
    store.open((1, 2))
    store.lose_power()
    assert payloads(store) == ["a"]


def test_a_lower_fence_is_shut_out() -> None:
    store, partition = opened()
    store.open((2, 1))
    assert not store.write(produce(partition, "a"), (1, 1))
    assert payloads(store) == []


def test_a_change_set_that_does_not_follow_is_noticed() -> None:
    store, partition = opened()
    produce(partition, "lost")
    with pytest.raises(BrokenPromiseError, match="does not follow"):
        store.apply(produce(partition, "a"), (1, 1))


def with_history() -> tuple[Store, Changes]:
    """A key, two items that wait again after their lease ran out, which is remembered, and one that is leased again."""
    store, partition = opened()
    partition.produce(batch_from_rows([{"payload": payload} for payload in (b"a", b"b", b"c")]), NOW, ProduceKey("k"))
    partition.lease(3, "c", NOW + 10, NOW)
    partition.tick(NOW + 10)
    partition.lease(1, "c", NOW + 99, NOW + 10)
    taken = partition.take_changes()
    assert taken is not None
    return store, taken[0]


def test_what_only_says_what_happened_makes_no_difference_to_where_items_are() -> None:
    store, changes = with_history()
    assert store.apply(changes, (1, 1))
    seen, whole = store.look(), store.load()
    assert whole.keys.records
    assert whole.closed.why_lease(1) == "expired"
    assert stats_of(seen, 0) == stats_of(whole, 0)
    assert seen.log.blobs == whole.log.blobs
    assert seen.log.extents == whole.log.extents
    assert seen.leases == whole.leases


@pytest.mark.parametrize("kind", [RecordKind.KEY, RecordKind.LEASE, RecordKind.EXTENT])
def test_a_record_that_cannot_be_read_is_seen_when_it_lands(kind: RecordKind) -> None:
    store, changes = with_history()
    key = next(key for key in changes.puts if key[0] is kind)
    broken = dataclasses.replace(changes, puts={**changes.puts, key: b"\x93\xc0"})

    def land_and_look() -> None:
        store.apply(broken, (1, 1))
        store.look()

    with pytest.raises(msgspec.DecodeError):
        land_and_look()
