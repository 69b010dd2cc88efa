"""A server and a queue for each engine's tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from sluiceway import testing

_numbers = itertools.count()


@pytest.fixture(scope="package")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


@pytest.fixture
def queue(served: testing.TestServer) -> str:
    """A queue of four partitions, with a dead queue beside it."""
    name = f"e-{next(_numbers)}"
    served.client.create_queue(f"{name}.dead")
    served.client.create_queue(name, dead_queue=f"{name}.dead", requested_partitions=4)
    return name
