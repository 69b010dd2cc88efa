"""Calls of the Python client, which have keys, go where any others go: seen from outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.client import Client
from sluiceway.core.queue import executor_health, executor_index
from sluiceway.core.queue.logical_queue import MIN_TOLERANCE
from sluiceway.instance.service import Service
from sluiceway.model.backends import SqliteBackend
from sluiceway.ports.partition_store import PartitionRef
from tests.instance.instance_rig import PATIENCE, Store, fine
from tests.server.server_running import Running, eventually, running

BACKENDS = {"a": SqliteBackend(write_timeout=2_000), "b": SqliteBackend(write_timeout=600_000)}


class Served:
    """A server on two backends, one of which can be frozen."""

    def __init__(self, server: Running, store: Store) -> None:
        self.server = server
        self._store = store
        self._thaw = threading.Event()

    def freeze(self) -> None:
        async def hangs(_: PartitionRef) -> None:
            while not self._thaw.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)

        self._store.on_apply = self._store.on_open = self._store.on_read = hangs

    def thaw(self) -> None:
        self._store.on_apply, self._store.on_open, self._store.on_read = fine, fine, fine
        self._thaw.set()

    def ready(self, queue_name: str) -> dict[int, int]:
        stats = self.server.ask("queue.stats", queue_name=queue_name)
        return {each["partition"]: each["total"] for part in stats["logical_queues"] for each in part["partitions"]}

    def backlogs(self, *waiting: int) -> str:
        """A queue whose partitions have so many items."""
        queue_name = self.server.queue(requested_partitions=len(waiting))
        for _ in waiting:
            # Without keys: each goes to the emptiest.
            self.server.produce(queue_name, *["x"] * max(waiting))
        for number, count in enumerate(waiting):
            if count < max(waiting):
                lease = self.server.lease(queue_name, max(waiting) - count, partition=number)
                self.server.ask("queue.complete", queue_name=queue_name, ids=[item["id"] for item in lease["items"]])
        assert self.ready(queue_name) == dict(enumerate(waiting))
        return queue_name


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    stores = {name: Store(tmp_path / name) for name in BACKENDS}
    make = lambda data: Service(data, BACKENDS, open_store=lambda name, *_: stores[name])  # noqa: E731
    with running(tmp_path / "data", make=make) as server:
        given = Served(server, stores["b"])
        try:
            yield given
        finally:
            given.thaw()


def test_the_clients_calls_land_where_there_is_least(served: Served) -> None:
    queue_name = served.backlogs(1_000, 1_000, 0, 0)
    with Client(served.server.url) as client:
        for _ in range(400):
            client.produce(queue_name, ["y"])
    landed = served.ready(queue_name)
    assert (landed[0], landed[1]) == (1_000, 1_000)
    # Homes are chosen at random, for some milliseconds each. One takes no more than so many beyond the emptiest.
    assert abs(landed[2] - landed[3]) <= MIN_TOLERANCE + 1


def test_a_producer_fills_the_emptiest_partitions(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a commit may take 100 ms, and its partition is then set aside as slow, whatever it holds.
    for module in (executor_health, executor_index):
        monkeypatch.setattr(module, "DEGRADED", (600_000, 4))
    queue_name = served.backlogs(1_000, 1_000, 0, 0)
    with Client(served.server.url) as client, client.producer(queue_name, max_batch=100) as producer:
        for number in range(1_600):
            producer.send(f"y{number}")
    landed = served.ready(queue_name)
    assert landed[0] + landed[1] <= 2_100
    assert abs(landed[2] - landed[3]) <= 200


def test_a_producer_goes_on_while_one_of_two_backends_is_frozen(served: Served) -> None:
    queue_name = served.server.queue(requested_partitions=4)
    with Client(served.server.url) as client, client.producer(queue_name, max_batch=20, max_in_flight=12) as producer:
        producer.send("before")
        producer.flush()
        served.freeze()
        sent = [producer.send(f"y{number}") for number in range(1_000)]
        # Those whose calls were being written by the frozen backend when that was seen are not known to be stored.
        eventually(lambda: sum(each.done() for each in sent) >= 750, 20.0)
        served.thaw()
        assert len({each.result(PATIENCE) for each in sent}) == 1_000
    assert sum(served.ready(queue_name).values()) == 1_001


def test_keys_are_recognised_after_their_targets_were_removed(served: Served) -> None:
    ask, queue_name = served.server.ask, served.backlogs(50, 50, 0)
    keys = [f"key {number}" for number in range(30)]
    first = [served.server.produce(queue_name, key, idempotency_key=key) for key in keys]
    assert sum(served.ready(queue_name).values()) == 130
    leased = ask("queue.lease", queue_name=queue_name, client_id="c", batch_size=1_000, max_partitions=3)
    ask("queue.complete", queue_name=queue_name, ids=[item["id"] for item in leased["items"]])
    ask("queue.rebalance", queue_name=queue_name, requested_partitions=1)
    eventually(lambda: len(served.ready(queue_name)) == 1, PATIENCE)
    again = [served.server.produce(queue_name, key, idempotency_key=key) for key in keys]
    assert all(each["deduplicated"] for each in again)
    assert [each["first_id"] for each in again] == [each["first_id"] for each in first]
    assert sum(served.ready(queue_name).values()) == 0
