"""What the tests of the campaigns share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.postgres_server import PostgresServer, server_or_skip


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server
