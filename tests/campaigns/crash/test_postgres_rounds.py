"""The server on a real PostgreSQL: killed under load, and with PostgreSQL stopped, frozen and started again under it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from tests.campaigns.crash.rounds import QUEUE, Rounds, postgres_config
from tests.server.server_process import wait_until
from tests.servers.postgres_server import PostgresServer, server_or_skip

pytestmark = pytest.mark.crash

Way = Literal["frozen", "stopped"]


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with server_or_skip() as server:
        yield server


class Outage(Rounds):
    """PostgreSQL goes away in mid-load for some seconds, frozen or stopped, and comes back; the server stays."""

    request_timeout = 2_000

    def __init__(
        self, folder: Path, seed: int, postgres: PostgresServer, way: Way, seconds: float, write_timeout: str, more: str = ""
    ) -> None:
        super().__init__(folder, seed, config=more + postgres_config(postgres, "shared" if more else "default", write_timeout))
        self._postgres = postgres
        self._way = way
        self._seconds = seconds

    def _round(self) -> None:
        self.traffic.progress(300)
        go, come = (self._postgres.pause, self._postgres.resume) if self._way == "frozen" else (self._postgres.stop, self._postgres.start)
        go()
        try:
            begun = time.monotonic()
            self.during()
            threading.Event().wait(max(0.0, self._seconds - (time.monotonic() - begun)))
        finally:
            come()
        back = time.monotonic()
        wait_until(self.is_ready, "readiness", 60)
        self.times.append(time.monotonic() - back)
        self.traffic.progress(300)

    def during(self) -> None:
        wait_until(lambda: self.is_named("default"), "a word about it", 60)

    def problems(self) -> list[str]:
        answer = self.traffic.http.get(f"{self._server.url}/readyz", timeout=120)
        return list(answer.json()["problems"]) if answer.status_code == 503 else []

    def is_named(self, backend: str) -> bool:
        """It is said once that the backend is the problem, and not what follows from it."""
        threading.Event().wait(0.01)
        return [problem.split(":")[0] for problem in self.problems()] == [f"backend {backend} does not answer"]

    def is_ready(self) -> bool:
        threading.Event().wait(0.01)
        return not self.problems()


class HalfAnOutage(Outage):
    """Half of the queue's partitions lie elsewhere. A produce with a key has its one home, so none of these has a key."""

    partitions = 4
    ways = ("unkeyed",)

    def during(self) -> None:
        before = self._produced()

        def landed(*partitions: int) -> int:
            now = self._produced()
            return sum(now[partition] - before[partition] for partition in partitions)

        wait_until(lambda: landed(0, 2) >= 300, "produces to the other backend", 60)
        # The emptier of the two takes them all until it is the fuller one.
        wait_until(lambda: landed(0) > 0 and landed(2) > 0, "produces to both partitions there", 60)
        wait_until(lambda: self.is_named("shared"), "a word about it", 60)

    def _produced(self) -> dict[int, int]:
        threading.Event().wait(0.01)
        (logical_queue,) = self.traffic.ask("queue.stats", 0, queue_name=QUEUE)["logical_queues"]
        return {each["partition"]: each["produced"] for each in logical_queue["partitions"]}


def no_progress(_line: str) -> None:
    """The result is enough."""


def kill_rounds(folder: Path, postgres: PostgresServer, seed: int, rounds: int) -> None:
    tally = Rounds(folder, seed, config=postgres_config(postgres)).run(rounds, no_progress)
    assert tally.faults == 0, tally.examples
    assert tally.counts["crashes"] >= rounds
    for kind in ("produced", "completed", "died", "served again"):
        assert tally.counts[kind] > 0, f"nothing was {kind}: {tally.summary()}"


@pytest.mark.slow
def test_a_killed_server_on_postgres_keeps_its_word(tmp_path: Path, postgres: PostgresServer) -> None:
    kill_rounds(tmp_path, postgres, seed=9, rounds=3)


@pytest.mark.slow
def test_a_server_on_postgres_killed_many_times_keeps_its_word(tmp_path: Path, postgres: PostgresServer) -> None:
    kill_rounds(tmp_path, postgres, seed=10, rounds=20)


def judge(outage: Outage, report: Callable[[str], object]) -> None:
    tally = outage.run(1, no_progress)
    report(f"\nserving again after {outage.times[0]:.2f} s; {tally.summary()}\n")
    assert tally.faults == 0, tally.examples
    assert tally.counts["outcome_unknown"] + tally.counts["unavailable"] > 0, "nobody noticed"


@pytest.mark.parametrize("way", ["frozen", "stopped"])
@pytest.mark.slow
def test_every_request_ends_while_postgres_is_away_and_it_serves_again(tmp_path: Path, postgres: PostgresServer, way: Way) -> None:
    judge(Outage(tmp_path, 11, postgres, way, 3, "1s"), sys.stdout.write)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["frozen", "stopped"])
def test_the_same_with_postgres_away_for_20_seconds(tmp_path: Path, postgres: PostgresServer, way: Way) -> None:
    judge(Outage(tmp_path, 12, postgres, way, 20, "10s"), sys.stdout.write)


@pytest.mark.parametrize(
    ("seconds", "write_timeout"), [(3, "1s"), pytest.param(20, "10s", marks=pytest.mark.slow)], ids=["3 seconds", "20 seconds"]
)
@pytest.mark.slow
def test_with_two_backends_produces_land_on_the_one_that_is_there(
    tmp_path: Path, postgres: PostgresServer, seconds: float, write_timeout: str
) -> None:
    judge(HalfAnOutage(tmp_path, 13, postgres, "frozen", seconds, write_timeout, '[backends.default]\nkind = "sqlite"\n'), sys.stdout.write)
