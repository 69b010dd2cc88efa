"""The systems that ours is measured against do the work that is counted: on real servers, where this machine has them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluiceway.bench import harness, systems
from sluiceway.bench.work import Served, Work, run
from tests.servers.pids import children

WORK = Work("cycle", "arrow", 50, 100, 4)
SINGLE = Work("cycle", "json", 1, 100, 4)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    name = request.param
    if reason := systems.found(name):
        warnings.warn(f"{name.upper()} IS NOT TESTED: {reason}", stacklevel=2)
        pytest.skip(f"{name.upper()} IS NOT TESTED: {reason}")
    with harness.started([name], pytest.fail) as running:
        served = running[name]
        yield name, served
    assert not [pid for pid in served.pids if Path(f"/proc/{pid}").exists()]


def peers(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("server", names, indirect=True)


def check_cycles(server: tuple[str, Served]) -> None:
    name, served = server
    for work in (WORK, SINGLE):
        done = systems.module(name).drive(name, served.address, work, 0.2)
        assert done.items >= work.batch


@peers("sluiceway-workers-2")
@pytest.mark.slow
def test_ours_as_two_processes(server: tuple[str, Served]) -> None:
    check_cycles(server)
    (parent,) = server[1].pids
    # The harness counts what both of them use: they are the parent's children.
    assert len(children(parent)) == 2


@peers("sluiceway-postgres")
@pytest.mark.slow
def test_ours_on_postgres(server: tuple[str, Served]) -> None:
    check_cycles(server)
    assert len(server[1].pids) == 2


@pytest.mark.slow
@peers("rabbitmq-quorum", "rabbitmq-quorum-raw", "kafka-share", "kafka-share-sync")
def test_a_slow_starter_does_whole_cycles(server: tuple[str, Served]) -> None:
    check_cycles(server)


@peers("postgres")
def test_rows_are_leased_once_and_gone_when_completed(server: tuple[str, Served]) -> None:
    check_cycles(server)
    run(leased_once(server[1].address))


async def leased_once(dsn: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    from bench.systems.postgres_rows import CREATE, RowsClient

    with psycopg.connect(dsn, autocommit=True) as administrator:
        administrator.execute(CREATE)
        clients = [RowsClient(dsn, Work("cycle", "arrow", 50, size, 2)) for size in (100, 100)]
        for client in clients:
            await client.produce()
        (first, ours), (second, theirs) = await asyncio.gather(*(client.lease() for client in clients))
        assert (first, second) == (50, 50)
        assert not set(ours) & set(theirs)
        assert await clients[0].lease() == (0, [])
        for client, leased in zip(clients, (ours, theirs), strict=True):
            await client.complete(leased)
        with pytest.raises(RuntimeError, match="0 of 50"):
            await clients[0].complete(theirs)
        assert administrator.execute("SELECT count(*) FROM queue").fetchone() == (0,)
        for client in clients:
            client.close()
