"""A server of each backend for the whole session, or the one at SLUICEWAY_URL."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from conformance.api import Api
from conformance.tested_server import OwnServer, Server
from tests.servers.postgres_server import server_or_skip

GIVEN = os.environ.get("SLUICEWAY_URL", "")


OURS = ["sqlite", pytest.param("memory", marks=pytest.mark.slow), pytest.param("postgres", marks=pytest.mark.slow)]


@pytest.fixture(scope="session", params=["given"] if GIVEN else OURS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    kind = request.param
    if kind == "given":
        yield Server(GIVEN)
    elif kind == "postgres":
        with server_or_skip() as postgres:
            yield from own(OwnServer(kind, tmp_path_factory.mktemp(kind), postgres))
    else:
        yield from own(OwnServer(kind, tmp_path_factory.mktemp(kind)))


def own(server: OwnServer) -> Iterator[Server]:
    yield server
    server.close()


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Api]:
    made = Api(server.url)
    yield made
    made.close()


@pytest.fixture
def restartable(server: Server) -> Server:
    """For what must survive the server's death."""
    if not server.durable:
        pytest.skip("this server cannot be restarted, or forgets")
    return server


@pytest.fixture
def storage(server: Server) -> Iterator[Server]:
    """For what must hold while the storage does not answer."""
    if not server.stoppable:
        pytest.skip("this server's storage cannot be stopped")
    yield server
    server.continue_storage()
