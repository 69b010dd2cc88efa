"""The compared systems, each in a module that is imported only when used: not every machine has all clients.

The peers are in `bench/systems/`, beside the package: only a checkout has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from sluiceway.bench.work import Done, Served, Work

MODULES = {
    "sluiceway": "sluiceway.bench.systems.sluiceway",
    "sluiceway-client": "sluiceway.bench.systems.sluiceway",
    "sluiceway-consumer": "sluiceway.bench.systems.sluiceway",
    "sluiceway-workers-2": "sluiceway.bench.systems.sluiceway",
    "sluiceway-postgres": "bench.systems.postgres_rows",
    "redis-everysec": "bench.systems.redis",
    "redis-everysec-raw": "bench.systems.redis",
    "redis-always": "bench.systems.redis",
    "redis-always-raw": "bench.systems.redis",
    "nats": "bench.systems.nats",
    "nats-sync-always": "bench.systems.nats",
    "rabbitmq-quorum": "bench.systems.rabbitmq",
    "rabbitmq-quorum-raw": "bench.systems.rabbitmq",
    "postgres": "bench.systems.postgres_rows",
    "kafka-share": "bench.systems.kafka_share",
    "kafka-share-sync": "bench.systems.kafka_share",
    "beanstalkd": "bench.systems.beanstalkd",
    "in-process": "sluiceway.bench.systems.floors",
    "in-memory": "sluiceway.bench.systems.floors",
    "disk": "sluiceway.bench.systems.floors",
}
"""Module of each system, by the system's name."""


class System(Protocol):
    """Interface of a system's module."""

    GUARANTEES: Mapping[str, str]
    """Guarantee of each of the module's systems once it has confirmed an item, as a sentence."""

    @staticmethod
    def found() -> str | None:
        """Return why the system cannot run on this machine, and a remedy; None if it can."""

    @staticmethod
    def version() -> str:
        """Return the server's name and version."""

    @staticmethod
    def serve(name: str, folder: Path) -> AbstractContextManager[Served]:
        """Run a private, durable server on loopback, on a free port, with its data in the empty folder, until the block ends."""

    @staticmethod
    def drive(name: str, address: str, work: Work, seconds: float) -> Done:
        """Do the work for `seconds`, in the client's own process. Its setup is not part of the slice (`work.timed`)."""


def module(name: str) -> System:
    """Import the system's module. Raises KeyError for an unknown system, ImportError if its client is not installed."""
    return cast(System, importlib.import_module(MODULES[name]))


def found(name: str) -> str | None:
    """Return why the system cannot run here; None if it can."""
    try:
        return module(name).found()
    except ImportError as error:
        return f"{error}; `make bench-peers` in a checkout installs it"
