"""PostgreSQL under pgbench, captured into a queue while the database and the tasks are killed; then the tables are made from the queue."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sluiceway.client import Client
from tests.campaigns.kit.report import Report
from tests.campaigns.tasks.bank import PUBLICATION, Bank, apply_changes, differences
from tests.campaigns.tasks.processes import Config, SparkTasks, Tasks, running
from tests.campaigns.tasks.records import take_all
from tests.campaigns.tasks.shards import LEFT, Make, look
from tests.server.server_process import ServerProcess
from tests.servers import pids
from tests.servers.postgres_server import PostgresServer

QUEUE, NAME = "changes", "bank"
TASKS = 2
SETTINGS = {"wal_level": "logical", "synchronous_commit": "on", "wal_writer_delay": "200ms"}
"""What a capture is to see must be flushed, so it is flushed soon."""


def run_tables(report: Report, folder: Path, make: Make, seconds: float, seed: int) -> None:
    chosen = random.Random(seed)
    with _captured(report, folder, make) as (server, bank, tasks, client, meta):
        database = strikes = 0
        deadline, pause = time.monotonic() + seconds, threading.Event()
        while time.monotonic() < deadline:
            pause.wait(chosen.uniform(4, 10))
            if chosen.random() < 0.5:
                server.kill()
                server.start()
                database += 1
            else:
                strikes += _strike(tasks, chosen)
        bank.stop()
        before = _position(bank)
        with bank.connected() as connection:
            connection.execute("UPDATE accounts SET note = 'the last' WHERE id = 1")
        began = time.monotonic()
        _until(lambda: _has_come_beyond(bank, meta, before), folder)
        report.say(f"{database} kills of the database, {strikes} of tasks, {bank.runs} runs of pgbench; tables {bank.rows()}; seed {seed}")
        report.say(f"all had arrived {time.monotonic() - began:.1f} s after the last")
        for line in tasks.check_logs():
            report.fail(line)
        taken = take_all(client, QUEUE)
        _judge(report, bank, [item.payload for item in taken], folder)
        report.figure(f"{len(taken):,} changes, {database} kills of the database, {strikes} of tasks ({tasks.kind})")
        if not (database and strikes):
            report.fail("nothing was killed")


def _judge(report: Report, bank: Bank, payloads: list[str], folder: Path) -> None:
    for line in apply_changes(bank, payloads)[:10]:
        report.fail(f"{line}; logs and data: {folder}")
    for line in differences(bank)[:10]:
        report.fail(f"{line}; logs and data: {folder}")


def _strike(tasks: Tasks, chosen: random.Random) -> int:
    """Kill the driver, alone or with all of its own, and start it again; or one of the tasks that somebody else starts again."""
    if isinstance(tasks, SparkTasks):
        tasks.kill_driver(alone=chosen.random() < 0.5)
        tasks.start()
        return 1
    if workers := tasks.workers():
        pids.kill(chosen.choice(workers))
    return len(workers[:1])


@contextlib.contextmanager
def _captured(report: Report, folder: Path, make: Make) -> Iterator[tuple[PostgresServer, Bank, Tasks, Client, str]]:
    with PostgresServer(settings=SETTINGS) as server, ServerProcess(folder / "server") as queues, Client(queues.url) as client:
        server.administer("ALTER ROLE sluiceway REPLICATION")
        client.create_queue(QUEUE, requested_partitions=1)
        bank = Bank(server, folder)
        bank.create()
        meta = f"sqlite:{folder / 'meta.sqlite'}"
        config: Config = {
            "name": NAME,
            "meta": meta,
            "stream": "postgres",
            "options": {"publications": PUBLICATION, "dsn_env": "SLUICEWAY_CAMPAIGN_DSN"},
            "url": queues.url,
            "queue": QUEUE,
            "limit": 1_000,
        }
        tasks = make(folder, config, TASKS, {"SLUICEWAY_CAMPAIGN_DSN": server.dsn()})
        with running(tasks):
            try:
                _until(lambda: _is_read(meta), folder)
                bank.fill()
                bank.start()
                report.say(f"{TASKS} tasks in {tasks.kind} read what pgbench writes")
                yield server, bank, tasks, client, meta
            finally:
                bank.stop()


def _is_read(meta: str) -> bool:
    """Then the slot is there: what is written from now on is captured."""
    with contextlib.suppress(RuntimeError):
        return bool(look(meta, NAME)["state_of"]["owned"] == 1)
    return False


def _position(bank: Bank) -> str:
    with bank.connected() as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def _has_come_beyond(bank: Bank, meta: str, position: str) -> bool:
    (partition,) = look(meta, NAME)["partitions"]
    if partition["position"] is None or partition["planned"] is not None:
        return False
    with bank.connected() as connection:
        row = connection.execute("SELECT %s::pg_lsn > %s::pg_lsn", (partition["position"], position)).fetchone()
    assert row is not None
    return bool(row[0])


def _until(holds: Callable[[], bool], folder: Path) -> None:
    deadline, pause = time.monotonic() + LEFT, threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LEFT:.0f} s; logs and data: {folder}")
        pause.wait(0.2)
