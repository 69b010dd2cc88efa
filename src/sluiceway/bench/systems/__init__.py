"""The systems that are compared, each in a module that is imported when the system is used: not every machine has all clients.

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
"""The module of each system, by the system's name."""


class System(Protocol):
    """What a module here has."""

    GUARANTEES: Mapping[str, str]
    """Of each system of the module: what is certain when it has confirmed an item; a sentence."""

    @staticmethod
    def found() -> str | None:
        """Why it cannot run on this machine, and what would help; None: it can."""

    @staticmethod
    def version() -> str:
        """The server's name and version."""

    @staticmethod
    def serve(name: str, folder: Path) -> AbstractContextManager[Served]:
        """A server of its own on loopback, on a free port, durable, with its data in that folder, which is empty; stopped at the end."""

    @staticmethod
    def drive(name: str, address: str, work: Work, seconds: float) -> Done:
        """Do the work for so long; runs in the client's own process. Setting up is not a part of it (`work.timed`)."""


def module(name: str) -> System:
    """The module of the system of that name. Raises KeyError if there is none such, ImportError if a client of it is not installed."""
    return cast(System, importlib.import_module(MODULES[name]))


def found(name: str) -> str | None:
    """Why that system cannot run here; None: it can."""
    try:
        return module(name).found()
    except ImportError as error:
        return f"{error}; `make bench-peers` in a checkout installs it"
