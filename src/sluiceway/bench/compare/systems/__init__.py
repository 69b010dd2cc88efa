"""The systems that are compared, each in a module that is imported when the system is used: not everybody has all clients."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from sluiceway.bench.compare.work import Done, Served, Work

MODULES = {
    "sluiceway": "sluiceway",
    "sluiceway-client": "sluiceway",
    "sluiceway-workers-2": "sluiceway",
    "sluiceway-postgres": "postgres",
    "redis-everysec": "redis",
    "redis-everysec-raw": "redis",
    "redis-always": "redis",
    "redis-always-raw": "redis",
    "nats": "nats",
    "nats-sync-always": "nats",
    "rabbitmq-quorum": "rabbitmq",
    "rabbitmq-quorum-raw": "rabbitmq",
    "postgres": "postgres",
    "kafka-share": "kafka_share",
    "kafka-share-sync": "kafka_share",
    "beanstalkd": "beanstalkd",
    "in-process": "floors",
    "in-memory": "floors",
    "disk": "floors",
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
    return cast(System, importlib.import_module(f"{__name__}.{MODULES[name]}"))


def found(name: str) -> str | None:
    """Why that system cannot run here; None: it can."""
    try:
        return module(name).found()
    except ImportError as error:
        return f"{error}; `make bench-peers` installs it"
