"""Backups of a real server at random moments under load, each restored and compared with a ledger of what its clients were told."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from sluiceway.client import CallError, Client, Retry
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess, wait_until

QUEUE, DEAD = "orders", "orders-dead"


@dataclass
class Ledger:
    """What the clients have begun, and what they were told is done. Added to by many threads."""

    begun: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    completing: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    leased: list[str] = field(default_factory=list)
    """Ids of the items in all leases, in order."""


class Traffic:
    """Clients that produce, lease, complete, retry, release, bury and redrive, until the end of the block. `outlives`: the server is killed
    and started again meanwhile."""

    def __init__(self, url: str, seed: int, *, outlives: bool = False) -> None:
        self.ledger = Ledger()
        self._url, self._outlives = url, outlives
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        works = (self._produce, self._produce, self._consume, self._consume, self._redrive)
        self._threads = [threading.Thread(target=self._run, args=(work, seed * 10 + n), daemon=True) for n, work in enumerate(works)]

    def _run(self, work: Callable[[Client, Random, str], None], seed: int) -> None:
        try:
            with Client(self._url, retry_for="30s") as client:
                numbers, random = 0, Random(seed)
                while not self._stop.is_set():
                    numbers += 1
                    try:
                        work(client, random, f"{seed}.{numbers}")
                    except CallError as error:
                        # The ledger has what it has begun.
                        if not self._outlives or error.code not in ("outcome_unknown", "unavailable"):
                            raise
        except BaseException as error:
            self._errors.append(error)

    def _produce(self, client: Client, random: Random, name: str) -> None:
        payloads = [f"{name}.{n}" for n in range(random.randint(1, 20))]
        self.ledger.begun.update(payloads)
        client.produce(QUEUE, payloads)
        self.ledger.stored.update(payloads)
        self._stop.wait(0.02)

    def _consume(self, client: Client, random: Random, name: str) -> None:
        leased = client.lease(QUEUE, batch_size=random.randint(1, 15), lease_timeout="2s", request_timeout="1s", max_partitions=4)
        items = list(leased.items)
        self.ledger.leased += [item.id for item in items]
        cut = sorted(random.randrange(len(items) + 1) for _ in range(3))
        done, dead, again = items[: cut[2]][cut[1] :], items[: cut[0]], items[cut[0] : cut[1]]
        if done:
            texts = [item.payload.decode() for item in done]
            self.ledger.completing.update(texts)
            ids = [item.id for item in done]
            # One whose lease had run out is offered again.
            settled = client.complete(QUEUE, ids)
            ignored = {each.id for each in settled.ignored}
            self.ledger.completed.update(text for text, id in zip(texts, ids, strict=True) if id not in ignored)
        if dead:
            client.retry(QUEUE, [Retry(item.id, dead=True, reason="broken") for item in dead])
        rest = items[cut[2] :]
        if rest and random.random() < 0.9:
            # The others' lease runs out.
            client.release(QUEUE, [item.id for item in rest])
        if again:
            client.retry(QUEUE, [Retry(item.id, retry_after="0s") for item in again])

    def _redrive(self, client: Client, random: Random, name: str) -> None:
        client.redrive(DEAD, limit=50)
        self._stop.wait(0.05)

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not self._errors, self._errors


def command(*arguments: str) -> dict[str, object]:
    """Run a command with --json. Returns what it prints."""
    done = subprocess.run([*COMMAND, *arguments, "--json"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def drained(client: Client) -> Counter[str]:
    """All items of both queues, each as often as it is there. They are completed."""
    found: Counter[str] = Counter()

    def left() -> list[tuple[int, ...]]:
        """Of each partition that is not empty: ready, leased, scheduled items, and those on their way."""
        partitions = [each for name in (QUEUE, DEAD) for each in client.stats(name).partitions]
        assert {each.state for each in partitions} == {"available"}
        counts = [(each.ready, each.total_leased, each.scheduled, each.transferring) for each in partitions]
        return [each for each in counts if any(each)]

    deadline = time.monotonic() + PATIENCE
    while stays := left():
        assert time.monotonic() < deadline, f"items stay: {stays}"
        for name in (QUEUE, DEAD):
            leased = client.lease(name, batch_size=1_000, lease_timeout="1h", request_timeout="5ms", max_partitions=4)
            if items := list(leased.items):
                found.update(item.payload.decode() for item in items)
                assert client.complete(name, [item.id for item in items]).completed == len(items)
    return found


def play_round(
    traffic: Traffic, url: str, target: str, data: Path, disturb: Callable[[Sequence[str]], None] | None = None
) -> dict[str, object]:
    """Back up the server under load, restore it beside into `data`, and compare. Returns what `backup` said. `disturb` is called with the
    restore's command before that runs."""
    ledger = traffic.ledger
    stored, completed = set(ledger.stored), set(ledger.completed)
    made = command("backup", target, "--url", url)
    begun, completing, later = set(ledger.begun), set(ledger.completing), len(ledger.leased)
    wait_until(lambda: len(ledger.leased) > later + 100, "leases after the backup")
    # Not those in the answers that were on their way.
    stale = ledger.leased[later + 50 : later + 100]
    restore = ("restore", target, "--data", str(data))
    if disturb is not None:
        disturb(restore)
    command(*restore)
    with ServerProcess(data) as server, Client(server.url, retry_for="10s") as client:
        assert client.complete(QUEUE, stale).completed == 0, "an id from after the backup names an item"
        client.produce(QUEUE, ["after the restore"])
        found = drained(client)
    assert found.pop("after the restore") == 1
    twice = [payload for payload, times in found.items() if times > 1]
    assert not twice, f"there twice: {twice[:5]}"
    assert not (lost := stored - completing - found.keys()), f"{len(lost)} are lost: {sorted(lost)[:5]}"
    assert not (back := completed & found.keys()), f"{len(back)} came back: {sorted(back)[:5]}"
    assert not (invented := found.keys() - begun), f"{len(invented)} were never produced: {sorted(invented)[:5]}"
    return made


def create_queues(url: str) -> None:
    """Create the queues that the traffic uses."""
    with Client(url) as client:
        client.create_queue(DEAD, requested_partitions=2)
        # Without pauses that grow, for which each round would wait.
        client.create_queue(QUEUE, requested_partitions=4, dead_queue=DEAD, max_attempts=None, retry_backoff=None)


def run(folder: Path, rounds: int, seed: int, workers: int = 1, target: str = "") -> list[dict[str, object]]:
    """Play rounds on one server; its workers are the instances of a cluster. `target`: of the backups, a directory in the folder unless
    given. Returns what each backup said."""
    config = folder / "server.toml"
    config.write_text(f"[server]\nworkers = {workers}\n")
    with ServerProcess(folder / "data", config=config) as server:
        create_queues(server.url)
        with Traffic(server.url, seed) as traffic:
            wait_until(lambda: len(traffic.ledger.completed) > 200, "some load")
            random, made = Random(seed), []
            for number in range(rounds):
                threading.Event().wait(random.random())
                made.append(play_round(traffic, server.url, target or str(folder / "backups"), folder / f"restored-{number}"))
    return made
