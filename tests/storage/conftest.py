"""What the tests of the stores share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.moto_server import MotoServer
from tests.servers.postgres_server import PostgresServer, server_or_skip
from tests.servers.versity_server import VersityServer, versity_or_skip


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
    with versity_or_skip() as server:
        yield server
