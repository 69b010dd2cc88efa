"""Meta stores of every kind, for the tests of what tasks keep in them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from sluiceway.adapters.meta.etcd import EtcdMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.postgres import PostgresMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.ports.meta_store import MetaStore, Stamp, View
from tests.servers.etcd_server import EtcdServer, etcd_or_skip
from tests.servers.postgres_server import PostgresServer, server_or_skip

OpenMeta = Callable[[], AbstractAsyncContextManager[MetaStore]]
"""Opens the meta store of this test for the length of a block, over a connection of its own."""

numbers = itertools.count()


def opener(make: Callable[[], MetaStore]) -> OpenMeta:
    @contextlib.asynccontextmanager
    async def open_meta() -> AsyncIterator[MetaStore]:
        store = make()
        try:
            yield store
        finally:
            await store.close()

    return open_meta


@contextlib.asynccontextmanager
async def _kept(store: MetaStore) -> AsyncIterator[MetaStore]:
    yield store


class OnMemory:
    @pytest.fixture
    def open_meta(self) -> OpenMeta:
        store = MemoryMetaStore()
        return lambda: _kept(store)


class OnSqlite:
    @pytest.fixture
    def open_meta(self, tmp_path: Path) -> OpenMeta:
        return opener(lambda: SqliteMetaStore(tmp_path / "meta.sqlite"))


class OnPostgres:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[PostgresServer]:
        with server_or_skip() as server:
            yield server

    @pytest.fixture
    def open_meta(self, server: PostgresServer) -> OpenMeta:
        schema = f"meta_{next(numbers)}"
        return opener(lambda: PostgresMetaStore(server.dsn(), schema=schema))


class OnEtcd:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[EtcdServer]:
        with etcd_or_skip() as server:
            yield server

    @pytest.fixture
    def open_meta(self, server: EtcdServer) -> OpenMeta:
        name = f"meta-{next(numbers)}"
        return opener(lambda: EtcdMetaStore(server.url(name)))


class Watched:
    """A store that counts what it is asked, and fails or says nothing of changes if it is told so."""

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.asked: list[str] = []
        self.hints = True
        self.watches = 0
        self.before: Callable[[str], Awaitable[None]] = self.nothing
        self.after: Callable[[str], Awaitable[None]] = self.nothing

    async def nothing(self, what: str) -> None:
        return None

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        self.asked.append("read")
        await self.before("read")
        return await self._store.read(keys, prefixes)

    async def refresh(self, view: View, prefix: str) -> View:
        return await self.read(prefixes=[prefix])

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        self.asked.append("commit")
        await self.before("commit")
        stamp = await self._store.commit(checks, unchanged, puts, deletes, hint=hint)
        await self.after("commit")
        return stamp

    def watch(self, prefix: str) -> AsyncIterator[Stamp]:
        return self._watch(self._store.watch(prefix))

    async def _watch(self, hints: AsyncIterator[Stamp]) -> AsyncIterator[Stamp]:
        self.watches += 1
        try:
            async for stamp in hints:
                if self.hints:
                    yield stamp
        finally:
            self.watches -= 1

    async def close(self) -> None:
        await self._store.close()

    def since(self) -> list[str]:
        """What it was asked since this was asked."""
        asked, self.asked = self.asked, []
        return asked
