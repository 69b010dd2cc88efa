"""A consumer whose handlers' dependency goes down and comes back, on a queue with a circuit breaker.

The ten minutes of `tests/instance/test_outage.py`, against a real server and a real clock: `MINUTES=10 pytest -m slow -s` on this file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from sluiceway import testing
from sluiceway.cli.main import cli
from sluiceway.client import CircuitBreaker, Client, LeasedItem
from tests.server.server_process import PATIENCE, ServerProcess
from tests.server.server_running import eventually

ITEMS = 300


class Dependency:
    """What handlers need. They fail while it is down."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.refused = 0
        self.done: list[bytes] = []
        self._lock = threading.Lock()

    def handle(self, item: LeasedItem) -> None:
        with self._lock:
            if not self.is_up.is_set():
                self.refused += 1
                raise ConnectionError("the database is down")
            self.done.append(item.payload)


@contextlib.contextmanager
def consumers(url: str, queue: str, dependency: Dependency, count: int = 2, lease_timeout: str = "1m") -> Iterator[None]:
    """Consumers in threads; stopped at the end."""
    clients = [Client(url) for _ in range(count)]
    running = [client.consumer(queue, prefetch=200, lease_timeout=lease_timeout) for client in clients]
    with ThreadPoolExecutor(count) as threads:
        ended = [threads.submit(each.run, dependency.handle, signals=False) for each in running]
        try:
            yield
        finally:
            for each in running:
                each.stop()
            for end in ended:
                end.result(PATIENCE)
            for client in clients:
                client.close()


def circuit(client: Client, queue: str) -> str:
    (share,) = client.stats(queue).logical_queues
    assert share.circuit is not None
    return share.circuit.state


def _is_shown_as_open(served: testing.TestServer, queue: str) -> None:
    (peeked,) = served.client.peek(queue, limit=1)
    assert "circuit breaker is open" in served.client.explain(queue, peeked.id).reason
    scraped = httpx.get(f"{served.url}/metrics").text
    assert f'sluiceway_queue_circuit_open{{queue="{queue}"}} 1.0' in scraped.splitlines()
    said = CliRunner().invoke(cli, ["stats", queue, "--url", served.url])
    assert "Circuit open since" in said.stderr
    eventually(lambda: "circuit open" in httpx.get(f"{served.url}/ui/queues").text)


def total(client: Client, queue: str) -> int:
    return sum(part.total + part.transferring for part in client.stats(queue).partitions)


def test_nothing_dies_of_a_dependency_that_is_down_and_all_is_done_once_it_is_back() -> None:
    dependency = Dependency()
    with testing.server() as served:
        client = served.client
        client.create_queue("dead")
        breaker = CircuitBreaker(0.5, 10)
        client.create_queue("q", max_attempts=2, retry_backoff=None, dead_queue="dead", circuit_breaker=breaker)
        client.produce("q", [f"i{n}" for n in range(ITEMS)])
        # Longer than all the time that is skipped: the consumers extend by clocks of their own.
        with consumers(served.url, "q", dependency, lease_timeout="1h"):
            eventually(lambda: circuit(client, "q") == "open")
            _is_shown_as_open(served, "q")
            for _ in range(8):
                refused = dependency.refused
                served.clock.advance("1m")
                eventually(lambda refused=refused: dependency.refused > refused)  # type: ignore[misc]
                eventually(lambda: circuit(client, "q") == "open")
            dependency.is_up.set()
            served.clock.advance("1m")
            eventually(lambda: not total(client, "q"))
        assert circuit(client, "q") == "closed"
        assert total(client, "dead") == 0
        assert sorted(dependency.done) == sorted(f"i{n}".encode() for n in range(ITEMS))


def test_a_server_that_starts_again_leases_at_once_and_finds_out_anew(tmp_path: Path) -> None:
    dependency = Dependency()
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        client.create_queue("q", retry_backoff=None, circuit_breaker=CircuitBreaker(0.5, 10))
        client.produce("q", [f"i{n}" for n in range(ITEMS)])
        with consumers(server.url, "q", dependency, 1):
            eventually(lambda: circuit(client, "q") == "open")
        server.kill()
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        assert circuit(client, "q") == "closed"
        with consumers(server.url, "q", dependency, 1):
            eventually(lambda: circuit(client, "q") == "open")
            dependency.is_up.set()
            eventually(lambda: not total(client, "q"))


@pytest.mark.slow
def test_an_outage_by_the_clock(tmp_path: Path) -> None:
    """At most one item in a hundred dies, and the queue recovers within its longest wait. Prints its figures."""
    outage, items, dependency = 60 * float(os.environ.get("MINUTES", "0.5")), 2_000, Dependency()
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        client.create_queue("dead")
        client.create_queue("q", max_attempts=3, retry_backoff=None, dead_queue="dead", circuit_breaker=CircuitBreaker(0.5))
        for first in range(0, items, 1_000):
            client.produce("q", [f"i{n}" for n in range(first, first + 1_000)])
        with consumers(server.url, "q", dependency, 4):
            time.sleep(outage)
            dependency.is_up.set()
            back = time.monotonic()
            eventually(lambda: not total(client, "q"))
            recovered = time.monotonic() - back
        dead = total(client, "dead")
    print(
        f"{outage:.0f} s down: {dead} of {items} dead, {dependency.refused} handled in vain, all done {recovered:.1f} s after it was back"
    )
    assert dead <= items / 100
    assert len(dependency.done) == items - dead
    assert recovered < min(outage, 60) + 30
