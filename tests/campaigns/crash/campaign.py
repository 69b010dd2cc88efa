"""Crash rounds on a real server: crash it under load, start it again on the same data, compare it with what its clients were told.

`python -m tests.campaigns.crash.campaign ROUNDS` prints progress and one line at the end; exit code 1 if anything was
wrong. A crash is kill −9; with `--power-cut` the disk loses what was not synced as well (Linux and root only). With `--backend postgres`
the partitions lie in a PostgreSQL server of its own, which goes on.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.campaigns.crash.ledger import Ledger, Tally
from tests.campaigns.crash.load import DEAD_QUEUE, LEASE_TIMEOUT, MAX_ATTEMPTS, QUEUE, Address, Load
from tests.campaigns.crash.loop_disk import LoopDisk, LoopDiskError
from tests.server.server_process import COMMAND, wait_until
from tests.servers.postgres_server import PostgresServer

ROUNDS_BETWEEN_DRAINS = 5
Progress = Callable[[str], None]


class Server:
    """`sluiceway serve` as a child process."""

    def __init__(self, data: Path, log: Path, command: list[str], config: str) -> None:
        self._command = [*command, "serve", "--data", str(data), "--listen", "127.0.0.1:0"]
        if config:
            path = log.with_name("sluiceway.toml")
            path.write_text(config)
            self._command += ["--config", str(path)]
        self.log = log
        self._child: subprocess.Popen[str] | None = None
        self.url = ""

    def launch(self) -> None:
        """Begin to start; returns at once."""
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)

    def start(self) -> float:
        """Start and wait until it takes requests. Seconds."""
        begun = time.monotonic()
        self.launch()
        assert self._child is not None
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line.startswith("sluiceway listening on "):
            raise AssertionError(f"the server did not start; the end of its log:\n{self.log.read_text()[-3_000:]}")
        self.url = line.split()[-1]
        return time.monotonic() - begun

    def freeze(self) -> None:
        """Let it do nothing more; returns when that is so."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


class Campaign:
    """A server under load that crashes again and again; with a `disk`, on that disk and together with it.

    `config` is the text of its configuration file, `partitions` the queue's.
    """

    partitions = 3

    def __init__(self, folder: Path, seed: int, command: list[str] = COMMAND, disk: LoopDisk | None = None, config: str = "") -> None:
        self.tally = Tally()
        self.times: list[float] = []
        """Seconds until it served again, by round."""
        self._random = random.Random(seed)
        self._disk = disk
        self._server = Server((disk.mount if disk else folder) / "data", folder / "server.log", command, config)
        self._address = Address()
        self._ledger = Ledger(self.tally)
        self._http = httpx.Client(timeout=120)

    def run(self, rounds: int, progress: Progress) -> Tally:
        load = self._load("0")
        try:
            self._server.start()
            self._create_queues()
            self._address.set(self._server.url)
            load.start()
            for number in range(1, rounds + 1):
                self._round()
                if self.tally.faults:
                    break
                if number % ROUNDS_BETWEEN_DRAINS == 0 or number == rounds:
                    self._drain(load)
                    progress(f"{number}/{rounds} rounds: {self.summary()}")
                    load = self._load(str(number))
                    load.start()
            self._check_log()
        finally:
            self._address.clear()
            load.abandon()
            self._server.kill()
            self._http.close()
        return self.tally

    def _load(self, seed: str) -> Load:
        return Load(self._ledger, self._address, seed)

    def summary(self) -> str:
        counts = self.tally.counts
        good = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()) if kind not in Tally.WRONG)
        return f"{good}; " + ", ".join(f"{counts[kind]} {kind}" for kind in Tally.WRONG)

    # -- rounds ---------------------------------------------------------------------------------

    def _progress(self, count: int) -> None:
        """Wait until so many items more were acknowledged."""
        goal = self._ledger.acknowledged + count
        wait_until(lambda: self._ledger.acknowledged >= goal or self.tally.faults > 0, "progress", 60)

    def _round(self) -> None:
        self._progress(self._random.randint(100, 1_500))
        self._crash()
        if self._random.random() < 0.15:
            self._server.launch()
            threading.Event().wait(self._random.random())
            self._crash()
        self.times.append(self._server.start())
        self._ledger.check_counters(self._counters(QUEUE))
        self._address.set(self._server.url)

    def _crash(self) -> None:
        self._address.clear()
        if self._disk is not None:
            # No process outlives the power; one that did would read what the dead disk makes up.
            self._server.freeze()
            self._disk.cut()
        self._server.kill()
        if self._disk is not None:
            self._disk.restart()
        self.tally.counts["crashes"] += 1

    def _drain(self, load: Load) -> None:
        """Empty the queue with the server up, and judge every item."""
        load.stop_producing()
        wait_until(self._is_empty, "an empty queue", 60)
        load.stop_consuming()
        self._ledger.close(self._counters(QUEUE), self._take_dead(), MAX_ATTEMPTS)

    def _is_empty(self) -> bool:
        threading.Event().wait(0.02)
        counters = self._counters(QUEUE)
        return counters["total"] + counters["transferring"] == 0 or self.tally.faults > 0

    def _take_dead(self) -> list[tuple[str, dict[str, Any]]]:
        """Everything that lies in the dead queue, which is then empty."""
        taken: list[tuple[str, dict[str, Any]]] = []
        while True:
            body = self._ask("queue.lease", DEAD_QUEUE, client_id="undertaker", batch_size=1_000, max_partitions=2)
            if not body["items"]:
                return taken
            taken += [(base64.b64decode(item["bytes"]).decode(), item) for item in body["items"]]
            self._ask("queue.complete", DEAD_QUEUE, lease_ids=[lease["lease_id"] for lease in body["leases"]])

    # -- asking ---------------------------------------------------------------------------------

    def _ask(self, call: str, queue: str, **fields: Any) -> Any:
        answer = self._http.post(f"{self._server.url}/v1/{call}", json={"queue_name": queue, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _create_queues(self) -> None:
        self._ask("queues.create", DEAD_QUEUE, requested_partitions=2)
        limits = {"lease_timeout": f"{LEASE_TIMEOUT}ms", "max_attempts": MAX_ATTEMPTS}
        self._ask("queues.create", QUEUE, requested_partitions=self.partitions, dead_queue=DEAD_QUEUE, **limits)

    def _counters(self, queue: str) -> Counter[str]:
        sums: Counter[str] = Counter()
        for logical_queue in self._ask("queue.stats", queue)["logical_queues"]:
            for partition in logical_queue["partitions"]:
                sums.update({name: value for name, value in partition.items() if isinstance(value, int)})
        return sums

    def _check_log(self) -> None:
        if "Traceback" in self._server.log.read_text():
            self.tally.wrong("other", f"the server's log has a traceback: {self._server.log}")


def postgres_config(server: PostgresServer, name: str = "default", write_timeout: str = "10s") -> str:
    """A backend of that name on that server."""
    return f'[backends.{name}]\nkind = "postgres"\nurl = "{server.dsn()}"\nwrite_timeout = "{write_timeout}"\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--power-cut", action="store_true")
    parser.add_argument("--backend", choices=("sqlite", "postgres"), default="sqlite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluiceway-crash-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        try:
            disk = stack.enter_context(LoopDisk(folder)) if given.power_cut else None
        except LoopDiskError as error:
            parser.exit(2, f"this machine does not allow a power cut: {error}\n")
        config = postgres_config(stack.enter_context(PostgresServer())) if given.backend == "postgres" else ""
        campaign = Campaign(folder, given.seed, disk=disk, config=config)
        begun = time.monotonic()
        tally = campaign.run(given.rounds, lambda line: print(line, flush=True))
        for example in tally.examples[:20]:
            print(example)
        times = sorted(campaign.times)
        print(
            f"{'FAILED' if tally.faults else 'ok'}: seed {given.seed}, {len(times)} rounds in {time.monotonic() - begun:.0f} s, "
            f"start after a crash {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s (most); {campaign.summary()}"
        )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
