"""Every store here passes the suite of its port."""

from __future__ import annotations

from pathlib import Path

import obstore.store
import pytest

from sluiceway.adapters.meta.bucket import BucketMetaStore
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage import bucket
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_objects import BucketObjects
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.adapters.storage.memory import MemoryDisk, MemoryPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import PartitionStore
from sluiceway.testing.drive import OpenStore
from sluiceway.testing.meta_store_suite import MetaStoreSuite
from sluiceway.testing.partition_store_suite import PartitionStoreSuite
from tests.servers.azurite_server import AzuriteServer
from tests.servers.fake_gcs_server import FakeGcsServer
from tests.servers.moto_server import MotoServer
from tests.servers.versity_server import VersityServer


class TestMemoryPartitionStore(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self) -> OpenStore[PartitionStore]:
        disk = MemoryDisk()

        async def open_store() -> PartitionStore:
            return MemoryPartitionStore(disk)

        return open_store


class TestSqlitePartitionStore(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return SqlitePartitionStore(tmp_path / "partitions")

        return open_store


class TestSqlitePartitionStoreWithFewHandles(PartitionStoreSuite):
    """So few that files are closed and opened again all the time."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return SqlitePartitionStore(tmp_path / "partitions", max_open=1, threads=3)

        return open_store


class TestBucketPartitionStore(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self) -> OpenStore[PartitionStore]:
        bucket = obstore.store.MemoryStore()

        async def open_store() -> PartitionStore:
            return BucketPartitionStore(BucketObjects(bucket), 10_000)

        return open_store


class TestBucketPartitionStoreWithCheckpointsAllTheTime(TestBucketPartitionStore):
    @pytest.fixture(autouse=True)
    def checkpoints(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bucket, "CHECKPOINT_ENTRIES", 1)
        # With a new head for each cycle, a reader needs more than 20 looks to find one that stays for the time of a look.
        monkeypatch.setattr(bucket, "WALKS", 1_000)


class TestBucketPartitionStoreInS3(PartitionStoreSuite):
    """In moto's server."""

    @pytest.fixture
    def open_store(self, s3: MotoServer, request: pytest.FixtureRequest) -> OpenStore[PartitionStore]:
        bucket = s3.bucket(prefix=request.node.name)

        async def open_store() -> PartitionStore:
            return BucketPartitionStore(HedgedReads(BucketObjects(bucket)), 10_000)

        return open_store


@pytest.mark.slow
class TestBucketPartitionStoreInVersity(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, versity: VersityServer, request: pytest.FixtureRequest) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return BucketPartitionStore(HedgedReads(versity.objects(request.node.name)), 10_000)

        return open_store


@pytest.mark.slow
class TestBucketPartitionStoreInAzurite(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, azurite: AzuriteServer, request: pytest.FixtureRequest) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return BucketPartitionStore(HedgedReads(azurite.objects(request.node.name)), 10_000)

        return open_store


@pytest.mark.slow
class TestBucketPartitionStoreInGcs(PartitionStoreSuite):
    @pytest.fixture
    def open_store(self, gcs: FakeGcsServer, request: pytest.FixtureRequest) -> OpenStore[PartitionStore]:
        async def open_store() -> PartitionStore:
            return BucketPartitionStore(HedgedReads(gcs.objects(request.node.name)), 10_000)

        return open_store


class TestMemoryMetaStore(MetaStoreSuite):
    @pytest.fixture
    def open_store(self) -> OpenStore[MetaStore]:
        store = MemoryMetaStore()

        async def open_store() -> MetaStore:
            return store

        return open_store


class TestBucketMetaStore(MetaStoreSuite):
    fetches_changes = False

    @pytest.fixture
    def open_store(self) -> OpenStore[MetaStore]:
        bucket = obstore.store.MemoryStore()

        async def open_store() -> MetaStore:
            return BucketMetaStore(BucketObjects(bucket), poll_interval=20)

        return open_store


class TestBucketMetaStoreInS3(MetaStoreSuite):
    """In moto's server."""

    fetches_changes = False

    @pytest.fixture
    def open_store(self, s3: MotoServer, request: pytest.FixtureRequest) -> OpenStore[MetaStore]:
        bucket = s3.bucket(prefix=request.node.name)

        async def open_store() -> MetaStore:
            return BucketMetaStore(HedgedReads(BucketObjects(bucket)), poll_interval=20)

        return open_store


@pytest.mark.slow
class TestBucketMetaStoreInVersity(MetaStoreSuite):
    fetches_changes = False

    @pytest.fixture
    def open_store(self, versity: VersityServer, request: pytest.FixtureRequest) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return BucketMetaStore(HedgedReads(versity.objects(request.node.name)), poll_interval=20)

        return open_store


@pytest.mark.slow
class TestBucketMetaStoreInAzurite(MetaStoreSuite):
    fetches_changes = False

    @pytest.fixture
    def open_store(self, azurite: AzuriteServer, request: pytest.FixtureRequest) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return BucketMetaStore(HedgedReads(azurite.objects(request.node.name)), poll_interval=20)

        return open_store


@pytest.mark.slow
class TestBucketMetaStoreInGcs(MetaStoreSuite):
    fetches_changes = False

    @pytest.fixture
    def open_store(self, gcs: FakeGcsServer, request: pytest.FixtureRequest) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return BucketMetaStore(HedgedReads(gcs.objects(request.node.name)), poll_interval=20)

        return open_store


class TestSqliteMetaStore(MetaStoreSuite):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore[MetaStore]:
        async def open_store() -> MetaStore:
            return SqliteMetaStore(tmp_path / "meta.sqlite", poll_interval=20)

        return open_store
