"""A step that is caught in its commit: it is done or not done, as the test says, and whoever comes after it goes on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sluiceway.adapters.meta.postgres import PostgresMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.contract.rebalances import RebalanceState, StepKind
from sluiceway.model.rebalance import Plan, Rebalance, StepDone, encode_rebalance
from sluiceway.ports.meta_store import MetaUnknownError
from tests.campaigns.rebalance.holding import PostgresSteps, SqliteSteps, Step
from tests.server.server_process import wait_until
from tests.servers.postgres_server import PostgresServer


@pytest.fixture
def dsn(postgres: PostgresServer, request: pytest.FixtureRequest) -> str:
    """A database of the test's own with the tables of a meta store."""
    name = f"t{abs(hash(request.node.name))}"
    postgres.administer(f"CREATE DATABASE {name} OWNER sluiceway")
    found = make_conninfo(postgres.dsn(), dbname=name)
    assert conninfo_to_dict(found)["dbname"] == name
    asyncio.run(_read(found))
    return found


async def _read(dsn: str) -> None:
    store = PostgresMetaStore(dsn)
    await store.read()
    await store.close()


def record(done: int, step: StepKind = "flip", state: RebalanceState = "running", queue: str = "q", moved: int = 0) -> Rebalance:
    steps = tuple(StepDone("drain", number, "i0", number) for number in range(done))
    return Rebalance(
        id="000-k7f3q2ma",
        queue_name=queue,
        incarnation="k7f3q2ma",
        requested_partitions=1,
        plan=Plan(),
        drain="natural",
        created_at=1,
        updated_at=1,
        actor="me",
        state=state,
        step=step,
        done=steps,
        moved=moved,
    )


def commit(dsn: str, each: Rebalance, writer: str = "i0.1") -> str:
    async def work() -> str:
        store = PostgresMetaStore(f"{dsn} application_name={writer}")
        kind = "open" if each.is_open else "ended"
        try:
            await store.commit(puts={f"rebalance/{kind}/{each.id}": encode_rebalance(each), "other": b"{"})
        except MetaUnknownError:
            return "unknown"
        finally:
            await store.close()
        return "done"

    return asyncio.run(work())


def test_marks_are_the_steps_and_states_and_nothing_else(dsn: str) -> None:
    with closing(PostgresSteps(dsn)) as steps:
        for each in (
            record(0),
            record(0, moved=7),
            record(1),
            record(1, "keys"),
            record(1, "keys", "cancelling"),
            record(1, "keys", queue="q"),
        ):
            commit(dsn, each, "i2.3")
        rebalance = record(0).id
        assert steps.taken(rebalance) == [
            Step(rebalance, "running", "flip", 0, "i2.3"),
            Step(rebalance, "running", "flip", 1, "i2.3"),
            Step(rebalance, "running", "keys", 1, "i2.3"),
            Step(rebalance, "cancelling", "keys", 1, "i2.3"),
            Step(rebalance, "running", "keys", 1, "i2.3"),
        ]
        assert steps.taken("another") == []


@pytest.mark.parametrize("way", ["let", "undone"])
def test_the_step_that_is_armed_waits_and_then_it_is_done_or_never_was(dsn: str, way: str) -> None:
    with closing(PostgresSteps(dsn)) as steps, ThreadPoolExecutor(1) as pool:
        with steps.armed("q", 2):
            assert commit(dsn, record(0)) == "done"
            assert commit(dsn, record(0, moved=1)) == "done"
            assert steps.held() is None
            waiting = pool.submit(commit, dsn, record(1), "i1.4")
            wait_until(lambda: steps.held() is not None, "a commit that waits")
            held = steps.held()
            assert held is not None
            assert held.writer == "i1.4"
            assert not waiting.done()
            if way == "let":
                steps.let(held)
                assert waiting.result() == "done"
            else:
                steps.undo(held)
                assert waiting.result() == "unknown"
        assert [step.done for step in steps.taken(record(0).id)] == ([0, 1] if way == "let" else [0])
        # Nobody waits any more.
        assert commit(dsn, record(1)) == "done"
        assert commit(dsn, record(2)) == "done"
        assert [step.done for step in steps.taken(record(0).id)] == [0, 1, 2]


def test_a_rebalance_of_another_queue_does_not_wait(dsn: str) -> None:
    with closing(PostgresSteps(dsn)) as steps, steps.armed("q", 1):
        assert commit(dsn, record(0, queue="other")) == "done"
        assert steps.held() is None


def test_in_a_file_nothing_is_committed_once_the_step_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    committed = []
    go_on = threading.Event()

    async def work() -> None:
        store = SqliteMetaStore(path)
        for done in range(5):
            await store.commit(puts={f"rebalance/open/{record(0).id}": encode_rebalance(record(done))})
            committed.append(done)
        await store.close()
        go_on.set()

    asyncio.run(_create(path))
    with SqliteSteps(path).catching("q", 3, ()) as catch:
        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        step = catch()
        assert step is not None
        assert step.done >= 2
        assert not go_on.wait(0.2) or step.done == 4
        seen = step.done
        assert len(committed) <= seen + 1
    thread.join()
    assert committed == [0, 1, 2, 3, 4]
    with SqliteSteps(path).catching("q", 1, ()) as catch:
        assert catch() == Step(record(0).id, "running", "flip", 4)


async def _create(path: Path) -> None:
    await SqliteMetaStore(path).close()
