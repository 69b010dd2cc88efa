"""The systems that deliver the items of a key in order, each in a module that is imported only when used."""

from __future__ import annotations

import importlib
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, cast

from bench.by_key.keyed_load import KeyedClient, KeyedWork

OURS = "sluiceway"


class OrderedModule(Protocol):
    """Interface of a system's module."""

    ORDER: str
    """What holds of the order of a key, and what it costs, in one or two sentences."""

    @staticmethod
    def found() -> str | None:
        """Return why the system cannot run on this machine, and a remedy; None if it can."""

    @staticmethod
    def version() -> str:
        """Return the names and versions of the server and of what it runs."""

    @staticmethod
    def clients(name: str, address: str, work: KeyedWork) -> AbstractAsyncContextManager[list[KeyedClient]]:
        """Connect `work.clients` clients to an empty queue."""


class Ordered(NamedTuple):
    """A system: its server, which is one of `sluiceway.bench.systems`, and its module in this package."""

    server: str
    module: str

    def load(self) -> OrderedModule:
        """Raises ImportError if the system's client is not installed."""
        return cast(OrderedModule, importlib.import_module(f"bench.by_key.{self.module}"))

    def missing(self) -> str | None:
        """Return why the system cannot run here; None if it can."""
        try:
            return self.load().found()
        except ImportError as error:
            return f"{error}; `make bench-peers` installs it"


ORDERED = {
    OURS: Ordered("sluiceway", "ordered_sluiceway"),
    "redis-everysec": Ordered("redis-everysec", "ordered_redis"),
    "redis-always": Ordered("redis-always", "ordered_redis"),
    "pgmq": Ordered("postgres", "ordered_pgmq"),
    "pgmq-rr": Ordered("postgres", "ordered_pgmq"),
    "kafka": Ordered("kafka-share", "ordered_kafka"),
    "kafka-sync": Ordered("kafka-share-sync", "ordered_kafka"),
}
