"""Backups as docs/guides/backup.md has them: a copy of a stopped server's directory, and one of a single moment."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sluiceway.client import CallError, Client, Item
from tests.server.server_process import PATIENCE, ServerProcess, wait_until


@contextmanager
def served(data: Path) -> Iterator[tuple[ServerProcess, Client]]:
    with ServerProcess(data) as server, Client(server.url, retry_for="0s") as client:
        yield server, client


def counts(client: Client, queue_name: str) -> tuple[int, int, int]:
    partitions = client.stats(queue_name).partitions
    assert {partition.state for partition in partitions} == {"available"}
    ready, leased = sum(partition.ready for partition in partitions), sum(partition.total_leased for partition in partitions)
    return ready, leased, sum(partition.scheduled for partition in partitions)


def test_a_copy_of_a_stopped_server_is_as_it_was_at_the_copy(tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    with served(data) as (server, client):
        client.create_queue("orders", requested_partitions=4)
        client.produce("orders", [str(number) for number in range(100)])
        client.produce("orders", [Item("later", enqueue_at=datetime.now(UTC) + timedelta(hours=1))])
        leased = client.lease("orders", batch_size=10, lease_timeout="1h")
        assert server.interrupt() == 0
    shutil.copytree(data, backup)
    with served(data) as (server, client):
        client.produce("orders", ["after the backup"])
        client.complete("orders", ids=leased.ids)
        client.create_queue("newer")
        server.interrupt()
    shutil.rmtree(data)
    shutil.copytree(backup, data)
    with served(data) as (_, client):
        assert [queue.queue_name for queue in client.list_queues().items if not queue.queue_name.endswith("-dead")] == ["orders"]
        assert counts(client, "orders") == (90, 10, 1)
        assert client.complete("orders", ids=leased.ids).completed == 10
        client.produce("orders", ["after the restore"])
        assert counts(client, "orders") == (91, 0, 1)


def test_a_copy_of_one_moment_under_load_has_what_was_acknowledged(tmp_path: Path) -> None:
    """A suspended process changes no file: so a copy of that time is of one moment, as a snapshot of a file system is."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    acknowledged = 0
    stop = threading.Event()

    with served(data) as (server, client):
        client.create_queue("orders", requested_partitions=4)

        def produce() -> None:
            nonlocal acknowledged
            with Client(server.url, retry_for="0s", generate_keys=False) as producer:
                while not stop.is_set():
                    try:
                        acknowledged += producer.produce("orders", ["x"] * 10).count
                    except CallError:
                        return

        load = threading.Thread(target=produce, daemon=True)
        load.start()
        wait_until(lambda: acknowledged > 1_000, "some load")
        server.process.send_signal(signal.SIGSTOP)
        before = acknowledged
        shutil.copytree(data, backup)
        server.process.send_signal(signal.SIGCONT)
        stop.set()
        load.join(PATIENCE)
        assert not load.is_alive()
    with served(backup) as (_, client):
        ready, leased, scheduled = counts(client, "orders")
        assert (leased, scheduled) == (0, 0)
        # The call in flight may have been stored.
        assert before <= ready <= before + 20
