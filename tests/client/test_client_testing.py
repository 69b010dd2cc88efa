"""What users are given for their own tests, and that the page about it is true."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sluiceway import testing
from sluiceway.client import CallError, Client, Item
from tests.server.server_process import PATIENCE
from tests.server.server_running import eventually


def test_the_example_in_the_docs_passes(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "guides" / "testing.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "test_example.py").write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_what_falls_due_has_happened_when_the_clock_was_moved() -> None:
    with testing.server() as server:
        client = server.client
        client.create_queue("dead")
        client.create_queue("q", lease_timeout="30d", max_attempts=1, dead_queue="dead")
        client.produce("q", [Item("later", enqueue_at=datetime.now(UTC) + timedelta(days=2)), "now"])
        assert [item.payload for item in client.lease("q", batch_size=2)] == [b"now"]
        server.clock.advance("47h")
        assert client.lease("q").items == []
        server.clock.advance(timedelta(hours=2))
        assert [item.payload for item in client.lease("q")] == [b"later"]
        server.clock.advance("31d")
        assert sum(part.total for part in client.stats("q").partitions) == 0
        assert sorted(item.payload for item in client.lease("dead", batch_size=2)) == [b"later", b"now"]


def test_many_leases_run_out_in_one_step() -> None:
    with testing.server() as server:
        client = server.client
        client.create_queue("q", requested_partitions=2, lease_timeout="1m")
        client.produce("q", ["x"] * 600)
        client.produce("q", ["x"] * 600)
        held = 0
        while leased := len(client.lease("q", batch_size=1)):
            held += leased
        assert held == 1_200
        server.clock.advance("61s")
        assert sum(part.ready for part in client.stats("q").partitions) == 1_200


def test_servers_are_apart_in_queues_and_in_time() -> None:
    with testing.server() as one, testing.server() as other:
        for server in (one, other):
            server.client.create_queue("q", lease_timeout="1h")
            server.client.produce("q", ["x"])
            assert len(server.client.lease("q")) == 1
        one.clock.advance("2h")
        assert len(one.client.lease("q")) == 1
        assert len(other.client.lease("q")) == 0


def test_a_waiting_lease_wakes_up_when_the_clock_is_moved() -> None:
    with testing.server() as server, ThreadPoolExecutor(1) as thread, Client(server.url) as client:
        client.create_queue("q", lease_timeout="1h")
        client.produce("q", ["x"])
        assert len(client.lease("q")) == 1
        waiting = thread.submit(client.lease, "q", request_timeout="15m")
        eventually(lambda: client.stats("q").logical_queues[0].lease_waiting)
        server.clock.advance("10m")
        assert not waiting.done()
        server.clock.advance("51m")
        # Both fall due in that step; which of them comes first is the queue's to say.
        assert len(waiting.result(PATIENCE)) + len(client.lease("q")) == 1


def test_a_server_that_has_ended_is_gone() -> None:
    with testing.server() as server:
        url = server.url
    with Client(url, retry_for="0s") as client:
        try:
            client.list_queues()
        except CallError as error:
            assert error.code == "unavailable"
        else:
            raise AssertionError("somebody still answers")
