"""What the tests of the stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.azurite_server import AzuriteServer
from tests.servers.fake_gcs_server import FakeGcsServer
from tests.servers.moto_server import MotoServer
from tests.servers.postgres_server import PostgresServer, server_or_skip
from tests.servers.versity_server import VersityServer


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


@pytest.fixture(scope="module")
def s3() -> Iterator[MotoServer]:
    with MotoServer(mended=False) as server:
        yield server


@pytest.fixture(scope="module")
def versity() -> Iterator[VersityServer]:
    with VersityServer.started_or_skipped() as server:
        yield server


@pytest.fixture(scope="module")
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer.started_or_skipped() as server:
        yield server


@pytest.fixture(scope="module")
def gcs() -> Iterator[FakeGcsServer]:
    with FakeGcsServer.started_or_skipped() as server:
        yield server
