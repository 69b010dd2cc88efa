"""A run of the demo: starts the server and the Spark driver, restarts them when they die, and makes the ledger."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from types import TracebackType
from typing import Self

import msgspec

from sluiceway.client import Client, PartitionStats
from sluiceway.demo.books import Ledger
from sluiceway.demo.check import Check
from sluiceway.demo.children import Child, wait_until
from sluiceway.demo.crashes import Kill, View
from sluiceway.demo.picture import Sample
from sluiceway.demo.screen import Screen
from sluiceway.demo.work import Job, Work
from sluiceway.kernel.errors import SluicewayError

PARTITIONS = 4
DEAD_PARTITIONS = 2

_START_TIMEOUT = 60.0
_MOST_RESTARTS = 3
_LOOK_AFTER, _LOOK_CLOSELY_AFTER = 0.25, 0.02
"""Seconds between two looks; short while a crash is to hit the right moment."""


_STAGES = (
    ("ingest-began", "ingesting: Spark writes each row as an item"),
    ("process-began", "processing: a streaming query leases the items and writes Parquet"),
    ("process-ended", "comparing what came out with the input, row by row"),
)
"""Notes, with the message shown when they appear."""


class Failure(Exception):
    """The run cannot continue; the text gives the reason."""


class Run:
    """A run. Use as a context manager: at its end all child processes are stopped."""

    def __init__(self, work: Work, job: Job, kills: list[Kill], screen: Screen) -> None:
        self._work = work
        self._job = job
        self._pending = list(kills)
        self._screen = screen
        self._children: dict[str, Child] = {}
        self._restarts: Counter[str] = Counter()
        self._port = 0
        self._began = time.monotonic()
        self._client: Client | None = None
        self._to_tell = [stage for stage in _STAGES if work.read(stage[0]) is None]
        self.samples: list[Sample] = []
        self.killed: list[tuple[float, str]] = []
        self.events: list[str] = []
        self._own_doing: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._client is not None:
            self._client.close()
        # The driver first: it would only wait for a stopped server.
        for name in ("driver", "server"):
            if name in self._children:
                self._children[name].stop()

    @property
    def missed(self) -> list[Kill]:
        """Crashes whose moment never came."""
        return self._pending

    def go(self) -> Ledger:
        """Run until all is processed and checked. Raises `Failure`, or SluicewayError for an unusable input."""
        self._start_server()
        self._create_queues()
        self._screen.say("starting Spark…")
        self._start_driver()
        while not self._is_over():
            view = self._look()
            if view is not None:
                self._screen.show(view.produced, view.settled, view.rows)
                self._kill_what_is_due(view)
            self._tell_stages()
            time.sleep(_LOOK_CLOSELY_AFTER if self._pending else _LOOK_AFTER)
        return self._ledger()

    def _is_over(self) -> bool:
        """Whether the driver is done. Restarts a process that has died."""
        if (code := self._children["server"].exit_code) is not None:
            self._tell_death("server", _how(code), "starting it again with the same data")
            self._start_server()
        code = self._children["driver"].exit_code
        if code == 0:
            return True
        if code is not None:
            error = self._work.read("error")
            if error and error["final"]:
                raise SluicewayError("invalid_request", error["reason"])
            self._tell_death("driver", error["reason"] if error else _how(code), "starting it again, to go on from where it was")
            self._children["driver"].kill()
            self._start_driver()
        return False

    def _tell_death(self, name: str, how: str, then: str) -> None:
        event = self._own_doing.pop(name, f"{name} died ({how})")
        self.events.append(event)
        self._screen.say(f"{event}; {then}")

    def _start_server(self) -> None:
        began = time.monotonic()
        url_file = self._work.root / "url"
        url_file.unlink(missing_ok=True)
        arguments = ["serve", "--data", str(self._work.server_data), "--listen", f"127.0.0.1:{self._port}", "--url-file", str(url_file)]
        server = self._start("server", "sluiceway.cli.main", arguments)
        wait_until(lambda: url_file.exists() or server.exit_code is not None, _START_TIMEOUT)
        if not url_file.exists():
            raise Failure(f"the server did not start:\n{self._end_of_log('server')}")
        url = url_file.read_text().strip()
        self._port = int(url.rpartition(":")[2])
        self._work.note("url", url)
        if self._client is None:
            self._client = Client(url, retry_for="0s")
            self._screen.say(f"server listening on {url}, data in {self._work.server_data}")
        else:
            self._screen.say(f"server listening again after {time.monotonic() - began:.1f} s")

    def _start_driver(self) -> None:
        self._work.note("error", None)
        self._start("driver", "sluiceway.demo.pipeline", [str(self._work.root), str(self._work.results)])

    def _start(self, name: str, module: str, arguments: list[str]) -> Child:
        if name in self._children:
            self._restarts[name] += 1
            if self._restarts[name] > _MOST_RESTARTS:
                raise Failure(f"the {name} died once too often:\n{self._end_of_log(name)}")
        child = Child(module, arguments, self._work.logs / f"{name}.log", self._work.scratch)
        self._children[name] = child
        return child

    def _create_queues(self) -> None:
        job = self._job
        with contextlib.closing(Client(str(self._work.read("url")))) as client:
            for name, partitions, dead in ((job.dead_queue, DEAD_PARTITIONS, None), (job.queue, PARTITIONS, job.dead_queue)):
                try:
                    client.create_queue(name, requested_partitions=partitions, dead_queue=dead)
                except SluicewayError as error:
                    if error.code != "queue_exists":
                        raise
        self._screen.say(f"queue {job.queue} with {PARTITIONS} partitions, dead queue {job.dead_queue} with {DEAD_PARTITIONS}")

    def _partitions(self, queue: str) -> list[PartitionStats]:
        assert self._client is not None
        return self._client.stats(queue).partitions

    def _look(self) -> View | None:
        """Look at the progress; None while the server does not answer, or the rows are not counted yet."""
        counts = self._work.read("rows")
        if counts is None:
            return None
        try:
            partitions = self._partitions(self._job.queue)
        except SluicewayError:
            return None
        produced = sum(part.produced for part in partitions)
        settled = sum(part.completed + part.dead for part in partitions)
        now = time.monotonic() - self._began
        if not self.samples or now - self.samples[-1].at >= _LOOK_AFTER:
            self.samples.append(Sample(now, produced, settled))
        rows = sum(count for _, count in counts)
        is_batch_open = bool(self._pending) and self._work.batches().is_open
        return View(rows, produced, settled, self._work.is_done("ingest"), is_batch_open)

    def _kill_what_is_due(self, view: View) -> None:
        due = next((kill for kill in self._pending if kill.is_due(view)), None)
        if due is None:
            return
        self._children[due.victim].kill()
        if due.victim == "driver" and not self._work.batches().is_open:
            # The batch ended in the meantime; the crash waits for the next one.
            return
        self._pending.remove(due)
        self.killed.append((time.monotonic() - self._began, due.victim))
        done = f"{view.settled:,} of {view.rows:,} items processed" if view.is_ingested else f"{view.produced:,} of {view.rows:,} items in"
        self._own_doing[due.victim] = f"{due.victim} killed (SIGKILL) {due.when}, with {done}"

    def _tell_stages(self) -> None:
        while self._to_tell and self._work.read(self._to_tell[0][0]) is not None:
            self._screen.say(self._to_tell.pop(0)[1])

    def _ledger(self) -> Ledger:
        batches = self._work.batches()
        return Ledger(
            queue=self._job.queue,
            dead_queue=self._job.dead_queue,
            partitions=self._partitions(self._job.queue),
            dead_partitions=self._partitions(self._job.dead_queue),
            check=msgspec.convert(self._work.read("check"), Check),
            batches=batches.count,
            replayed=batches.replayed,
            redelivered=batches.redelivered,
            seconds_in=self._work.seconds("ingest"),
            seconds_out=self._work.seconds("process"),
            rate_later=batches.rate,
            events=self.events,
        )

    def _end_of_log(self, name: str) -> str:
        path = self._work.logs / f"{name}.log"
        end = "\n".join(path.read_text(errors="replace").splitlines()[-15:])
        return f"{end}\n(the whole log: {path})"


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
