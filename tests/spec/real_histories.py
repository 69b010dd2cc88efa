"""Histories of real servers for the trace check: `sluiceway serve` on SQLite under load, killed and started again, with lost answers.

`python -m tests.spec.real_histories 10`: of so many servers. Each has many partitions, and the history of each partition is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from sluiceway.client import CallError, Client, LeasedItem
from sluiceway.kernel.ids import parse_item_id, parse_lease_id
from spec.partition_fences import READY, SETTLED, Place
from spec.recording_store import HistoryFile, Line, histories, read_lines
from spec.trace_check import Event, TraceCheck
from tests.campaigns.kit.fleet import Instance

QUEUE, PARTITIONS = "orders", 40
LIVES = 4
"""Times that a server is started; each time but the last it is killed."""
LIFE = (0.5, 2.5)
"""Seconds of load before it is killed."""
LOST = 0.03
"""Part of the commits whose answers are lost."""


class Traffic:
    """Clients of one server that note what they are told and what they ask for, until the end of the block."""

    def __init__(self, url: str, path: Path, seed: int) -> None:
        self._url = url
        self._file = HistoryFile(path)
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        works = (self._produce, self._produce, self._consume, self._consume, self._consume)
        self._threads = [threading.Thread(target=self._run, args=(work, seed * 10 + n), daemon=True) for n, work in enumerate(works)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._file.close()
        if self._errors:
            raise self._errors[0]

    def _run(self, work: Callable[[Client, Random], None], seed: int) -> None:
        random = Random(seed)
        try:
            with Client(self._url, retry_for="0s") as client:
                while not self._stop.is_set():
                    try:
                        work(client, random)
                    except CallError:
                        # The server is killed, or a commit has failed: nothing was told.
                        self._stop.wait(0.01)
        except BaseException as error:
            self._errors.append(error)

    def _produce(self, client: Client, random: Random) -> None:
        answer = client.produce(QUEUE, [f"item {n}" for n in range(random.randint(1, 8))], request_timeout="2s")
        self._told(answer.ids, READY)

    def _consume(self, client: Client, random: Random) -> None:
        leased = client.lease(QUEUE, batch_size=random.randint(1, 12), request_timeout="100ms", lease_timeout="400ms", max_partitions=3)
        items = list(leased.items)
        for lease in {item.lease_id for item in items if item.lease_id is not None}:
            self._told([item.origin for item in items if item.lease_id == lease], parse_lease_id(lease).number)
        # The rest is left until its lease runs out.
        random.shuffle(items)
        cut = sorted(random.randrange(len(items) + 1) for _ in range(3))
        self._complete(client, items[: cut[0]])
        for call, some in ((client.retry, items[cut[0] : cut[1]]), (client.release, items[cut[1] : cut[2]])):
            if some:
                self._give_up(some)
                call(QUEUE, [item.id for item in some])

    def _complete(self, client: Client, items: Sequence[LeasedItem]) -> None:
        if items:
            self._give_up(items)
            ignored = {each.id for each in client.complete(QUEUE, [item.id for item in items]).ignored}
            self._told([item.origin for item in items if item.id not in ignored], SETTLED)

    def _told(self, origins: Iterable[str], place: Place) -> None:
        for partition, offsets in _by_partition(origins).items():
            self._file.note(Line(partition, "told", items=offsets, place=place))

    def _give_up(self, items: Iterable[LeasedItem]) -> None:
        for item in items:
            assert item.lease_id is not None
            for partition, offsets in _by_partition([item.origin]).items():
                self._file.note(Line(partition, "gave_up", items=offsets, place=parse_lease_id(item.lease_id).number))


def _by_partition(ids: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for each in map(parse_item_id, ids):
        found.setdefault(f"{each.incarnation}.{each.partition}", []).append(each.offset)
    return found


def play(
    folder: Path, seed: int, lost: float = LOST, lives: int = LIVES, partitions: int = PARTITIONS, flaw: str = "none"
) -> dict[str, list[Event]]:
    """Let a server live that often, under load, and return the histories of its partitions. `flaw`: see `recorded_server`."""
    random, path = Random(seed), folder / "history.jsonl"
    command = [sys.executable, "-m", "tests.spec.recorded_server", str(path), str(lost), flaw]
    server = Instance(folder, "server", lambda _: "", command=command)
    try:
        for life in range(lives):
            server.launch()
            server.await_listening()
            if not life:
                with Client(server.url) as client:
                    client.create_queue(QUEUE, requested_partitions=partitions, retry_backoff=None, max_attempts=None, dead_queue=None)
            with Traffic(server.url, path, seed * 100 + life):
                time.sleep(random.uniform(*LIFE))
                if life < lives - 1:
                    server.kill()
        server.stop()
    finally:
        if server.runs:
            server.kill()
    return histories(read_lines(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a history is not accepted."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec.real_histories", description=__doc__)
    parser.add_argument("servers", type=int)
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    options = parser.parse_args(arguments)
    rejected, events = 0, Counter[str]()
    number = 0
    for seed in range(options.first, options.first + options.servers):
        with tempfile.TemporaryDirectory(prefix="sluiceway-") as folder:
            for name, history in play(Path(folder), seed).items():
                number += 1
                events.update(type(event).__name__ for event in history)
                if (reason := TraceCheck().check(history)) is not None:
                    rejected += 1
                    print(f"seed {seed}, partition {name}: {reason}")
        print(f"{number} histories, {rejected} rejected; {dict(events)}", flush=True)
    return int(rejected > 0)


if __name__ == "__main__":
    sys.exit(main())
