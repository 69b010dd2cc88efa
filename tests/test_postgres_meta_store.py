"""PostgresMetaStore: the suite of its port, and what becomes of a commit whose line is cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from postgres_server import PostgresServer, server_or_skip
from sluiceway.adapters.meta.commit import HISTORY
from sluiceway.adapters.meta.postgres import PostgresMetaStore
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.testing.drive import Opened, OpenStore, driven
from sluiceway.testing.meta_store_suite import MetaStoreSuite, next_hint

numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture
def open_store(server: PostgresServer) -> OpenStore[MetaStore]:
    schema = f'Odd "{next(numbers)}"; DROP SCHEMA public; --'

    async def open_store() -> MetaStore:
        return PostgresMetaStore(server.dsn(), schema=schema)

    return open_store


class TestPostgresMetaStore(MetaStoreSuite):
    @pytest.fixture
    def open_store(self, open_store: OpenStore[MetaStore]) -> OpenStore[MetaStore]:
        return open_store
