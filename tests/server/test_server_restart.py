"""Kill −9 of a server in mid-load, again and again, on one data directory: the ledger balances.

What a producer was told is stored is served, what a consumer was told is complete is gone, and nothing is there twice.
"""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.server_process import PATIENCE
from tests.server.server_running import balances, eventually

PRODUCERS, CONSUMERS, KILLS = 3, 3, 3
PER_ROUND = 400
"""Items that are acknowledged, and completed, between two kills, so that each kill meets both kinds of work."""


class Process:
    """`sluiceway serve` as a child, on a port that stays the same over restarts."""

    def __init__(self, data: Path) -> None:
        self._data = data
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._listen = f"127.0.0.1:{free.getsockname()[1]}"
        self.url = f"http://{self._listen}"
        self._child: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "sluiceway.cli.main", "serve", "--data", str(self._data), "--listen", self._listen]
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._child.stdout is not None
        assert self.url in self._child.stdout.readline()

    def end(self, number: signal.Signals) -> int:
        assert self._child is not None
        self._child.send_signal(number)
        self._child.communicate(timeout=PATIENCE)
        return self._child.returncode


class Load:
    """Producers and consumers that go on over every failure, and what they were told."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._mutex = threading.Lock()
        self.stop_producing = threading.Event()
        self.stop_consuming = threading.Event()
        self.stored: dict[str, str] = {}
        """Payload → origin, of every item that a producer was told is stored."""
        self.served: dict[str, set[str]] = {}
        """Payload → the origins under which it was served."""
        self.completed: dict[str, str] = {}
        """Origin → the id under which a consumer was told that it completed it."""
        self.wrong: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(self._produce, n)) for n in range(PRODUCERS)]
        self.threads += [threading.Thread(target=self._run, args=(self._consume, n)) for n in range(CONSUMERS)]

    def _run(self, work: Callable[[httpx.Client, int], None], number: int) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=PATIENCE) as http:
                work(http, number)
        except Exception as error:
            self.wrong.append(f"{work.__name__} {number}: {error!r}")

    def _call(self, http: httpx.Client, call: str, fields: dict[str, Any]) -> Any:
        """The answer, or None where the outcome is unknown or the call may be repeated."""
        try:
            answer = http.post(f"/v1/{call}", json=fields)
        except httpx.TransportError:
            threading.Event().wait(0.02)
            return None
        if answer.status_code != 200:
            assert answer.json()["retryable"], answer.text
            return None
        return answer.json()

    def _produce(self, http: httpx.Client, number: int) -> None:
        sequence = 0
        while not self.stop_producing.is_set():
            sequence += 1
            key = f"{number}-{sequence}"
            texts = [f"{key}-{n}" for n in range(1 + sequence % 20)]
            fields = {"queue_name": "q", "items": [{"utf8": text} for text in texts], "idempotency_key": key}
            # A request once sent is repeated to its end: only then is it known which items there must be.
            while (answer := self._call(http, "queue.produce", fields)) is None:
                pass
            place, _, first = answer["first_id"].rpartition(".")
            with self._mutex:
                self.stored.update((text, f"{place}.{int(first) + n}") for n, text in enumerate(texts))

    def _consume(self, http: httpx.Client, number: int) -> None:
        want = {"queue_name": "q", "client_id": f"c{number}", "batch_size": 15, "request_timeout": "200ms"}
        while not self.stop_consuming.is_set():
            leased = self._call(http, "queue.lease", want)
            if not leased or not leased["items"]:
                continue
            origins = {item["id"]: item["origin"] for item in leased["items"]}
            with self._mutex:
                for item in leased["items"]:
                    self.served.setdefault(base64.b64decode(item["bytes"]).decode(), set()).add(item["origin"])
                    if item["origin"] in self.completed:
                        self.wrong.append(f"{item['id']} was served after {self.completed[item['origin']]} was completed")
            done = self._call(http, "queue.complete", {"queue_name": "q", "ids": list(origins)})
            if done is None:
                continue
            ignored = {entry["id"] for entry in done["ignored"]}
            if done["completed"] != len(origins) - len(ignored):
                self.wrong.append(f"completed {done['completed']} of {len(origins)}, ignored {len(ignored)}")
            with self._mutex:
                self.completed.update((origin, text) for text, origin in origins.items() if text not in ignored)


def totals(url: str) -> dict[str, int]:
    answer = httpx.post(f"{url}/v1/queue.stats", json={"queue_name": "q"}, timeout=PATIENCE).raise_for_status().json()
    partitions = answer["logical_queues"][0]["partitions"]
    return {name: sum(each[name] for each in partitions) for name in partitions[0] if name not in ("state", "backend")}


@pytest.mark.crash
@pytest.mark.slow
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path) -> None:
    server = Process(tmp_path / "data")
    server.start()
    wanted = {"queue_name": "q", "requested_partitions": 4, "lease_timeout": "2s"}
    httpx.post(f"{server.url}/v1/queues.create", json=wanted, timeout=PATIENCE).raise_for_status()
    load = Load(server.url)
    try:
        for thread in load.threads:
            thread.start()
        for kill in range(1, KILLS + 1):
            eventually(lambda n=kill: load.wrong or min(len(load.stored), len(load.completed)) >= n * PER_ROUND)  # type: ignore[misc]
            server.end(signal.SIGKILL)
            server.start()
        load.stop_producing.set()
        for thread in load.threads[:PRODUCERS]:
            thread.join(PATIENCE)
        eventually(lambda: load.wrong or totals(server.url)["total"] == 0)
        load.stop_consuming.set()
        for thread in load.threads:
            thread.join(PATIENCE)
        sums = totals(server.url)
    finally:
        load.stop_producing.set()
        load.stop_consuming.set()
        code = server.end(signal.SIGTERM)
    assert load.wrong == []
    assert code == 0
    assert len(load.stored) >= KILLS * PER_ROUND
    assert load.served == {text: {origin} for text, origin in load.stored.items()}
    assert balances(sums)
    assert (sums["produced"], sums["completed"], sums["total"], sums["dead"]) == (len(load.stored), len(load.stored), 0, 0)
    assert set(load.completed) <= set(load.stored.values())
