"""Connections of Spark's tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from sluiceway.client import connections
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import task_clients
from sluiceway.spark.options import Server as Address
from sluiceway.spark.server_calls import Client
from sluiceway.spark.task_clients import MAX_KEPT, client_of_task
from tests.spark.spark_world import Server, server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[connections.Connection]]:
    """The connections that are made."""
    monkeypatch.setattr(task_clients, "_kept", {})
    found: list[connections.Connection] = []

    class Noted(connections.Connection):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            found.append(self)

    monkeypatch.setattr(connections, "Connection", Noted)
    yield found
    TaskContext._setTaskContext(None)
    for client in task_clients._kept.values():
        client.close()


def open_ones(made: list[connections.Connection]) -> int:
    return sum(each._socket.fileno() >= 0 for each in made)


def ask(world: Server, queue: str = "q") -> None:
    """A task's call."""
    with client_of_task(Address(world.url, queue, 10_000)) as client:
        client.call("/v1/queues.list", {})


def test_a_worker_keeps_its_connection_from_task_to_task(world: Server, made: list[connections.Connection]) -> None:
    for _ in range(3):
        TaskContext._setTaskContext(TaskContext())
        ask(world)
    assert (len(made), open_ones(made)) == (1, 1)


def test_outside_of_a_task_nothing_is_left_open(world: Server, made: list[connections.Connection]) -> None:
    ask(world)
    ask(world)
    assert (len(made), open_ones(made)) == (2, 0)


def test_after_a_failure_a_task_begins_with_a_new_client(world: Server, made: list[connections.Connection]) -> None:
    TaskContext._setTaskContext(TaskContext())
    ask(world)
    with pytest.raises(SluicewayError), client_of_task(Address(world.url, "q", 10_000)) as client:
        client.call("/v1/queues.info", {"queue_name": "nowhere"})
    assert (len(made), open_ones(made)) == (1, 0)
    ask(world)
    assert (len(made), open_ones(made)) == (2, 1)


def test_a_worker_with_many_queues_keeps_few_connections(world: Server, made: list[connections.Connection]) -> None:
    TaskContext._setTaskContext(TaskContext())
    for number in range(MAX_KEPT + 3):
        ask(world, f"q{number}")
    ask(world, f"q{MAX_KEPT}")
    assert (len(made), open_ones(made)) == (MAX_KEPT + 3, MAX_KEPT)


def test_two_readers_at_once_have_a_client_each(world: Server, made: list[connections.Connection]) -> None:
    TaskContext._setTaskContext(TaskContext())
    address = Address(world.url, "q", 10_000)
    clients: list[Client] = []
    with client_of_task(address) as one, client_of_task(address) as other:
        clients += [one, other]
    assert one is not other
    assert not made
