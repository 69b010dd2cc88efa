"""The simulated store: what survives, and who may write."""

from __future__ import annotations

import pytest

from sluiceway.core.partition import Partition
from sluiceway.model.changes import Changes
from sluiceway.model.items import batch_from_rows
from sluiceway.sim.checks import BrokenPromiseError
from sluiceway.sim.store import Store

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
