"""A server under load that crashes again and again, and serves again what its clients were told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from tests.campaigns.crash.loop_disk import LoopDisk
from tests.campaigns.kit.fleet import Fleet, Instance
from tests.campaigns.kit.ledger import Tally
from tests.campaigns.kit.load import REQUEST_TIMEOUT, WAYS, Address, Load
from tests.campaigns.kit.traffic import Traffic, loaded
from tests.server.server_process import COMMAND
from tests.servers.postgres_server import PostgresServer

QUEUE = "q"
ROUNDS_BETWEEN_DRAINS = 5
Progress = Callable[[str], None]


class GatedTraffic(Traffic):
    """No call is begun while the address is not set, so that a server that has just started has nothing but what it was left with."""

    def __init__(self, fleet: Fleet, partitions: int, ways: Sequence[str], request_timeout: int) -> None:
        super().__init__(fleet, {QUEUE: partitions})
        self.address = Address()
        self._ways = ways
        self._request_timeout = request_timeout

    def _load(self, queue: str, home: int) -> Load:
        return Load(self.ledgers[queue], self.address, queue, self._who(queue, home), self._request_timeout, self._ways)

    def end(self) -> None:
        self.address.clear()
        super().end()


class Rounds:
    """A server under load that crashes again and again; with a `disk`, on that disk and together with it.

    `config` is the text of its configuration file, `partitions` the queue's.
    """

    partitions: ClassVar[int] = 3
    ways: ClassVar[Sequence[str]] = WAYS
    request_timeout: ClassVar[int] = REQUEST_TIMEOUT

    def __init__(self, folder: Path, seed: int, command: Sequence[str] = COMMAND, disk: LoopDisk | None = None, config: str = "") -> None:
        self.times: list[float] = []
        """Seconds until it served again, by round."""
        self._random = random.Random(seed)
        self._disk = disk
        self._server = Instance(folder, "server", lambda _: config, command=command, data=(disk.mount if disk else folder) / "data")
        self.traffic = GatedTraffic(Fleet([self._server]), self.partitions, self.ways, self.request_timeout)

    def run(self, rounds: int, progress: Progress) -> Tally:
        traffic = self.traffic
        with loaded(traffic):
            traffic.address.set(self._server.url)
            traffic.start()
            for number in range(1, rounds + 1):
                self._round()
                if traffic.tally.faults:
                    break
                if number % ROUNDS_BETWEEN_DRAINS == 0 or number == rounds:
                    traffic.drain(0)
                    progress(f"{number}/{rounds} rounds: {traffic.tally.summary()}")
                    if number < rounds:
                        traffic.start()
            for line in traffic.fleet.check_logs():
                traffic.tally.wrong("other", line)
        return traffic.tally

    def _round(self) -> None:
        self.traffic.progress(self._random.randint(100, 1_500))
        self._crash()
        if self._random.random() < 0.15:
            self._server.launch()
            threading.Event().wait(self._random.random())
            self._crash()
        begun = time.monotonic()
        self.traffic.fleet.restart(self._server)
        self.times.append(time.monotonic() - begun)
        self.traffic.ledgers[QUEUE].check_counters(self.traffic.counters(QUEUE, 0))
        self.traffic.address.set(self._server.url)

    def _crash(self) -> None:
        self.traffic.address.clear()
        if self._disk is not None:
            # No process outlives the power; one that did would read what the dead disk makes up.
            self._server.freeze()
            self._disk.cut()
        self._server.kill()
        if self._disk is not None:
            self._disk.restart()
        self.traffic.tally.counts["crashes"] += 1


def postgres_config(server: PostgresServer, name: str = "default", write_timeout: str = "10s") -> str:
    """A backend of that name on that server."""
    return f'[backends.{name}]\nkind = "postgres"\nurl = "{server.dsn()}"\nwrite_timeout = "{write_timeout}"\n'
