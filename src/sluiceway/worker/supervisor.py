"""Runs a worker: in this process, or in several processes that are started again when they end or their code changes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sluiceway.client.consumer_common import shutdown_millis
from sluiceway.client.stop_signals import StopSignals
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.exit_codes import how_it_ended
from sluiceway.worker.counts import Counts, total
from sluiceway.worker.handlers import load_handler
from sluiceway.worker.process import WorkerProcess
from sluiceway.worker.status_page import StatusPage
from sluiceway.worker.worker_options import Options

log = logging.getLogger("sluiceway.worker")

STARTED = 10.0
"""Seconds after which a process is taken to have started well, so that the pause before the next start is short again."""
PAUSES = (0.5, 30.0)
"""Seconds before an ended process is started again: at first, and at most (doubling)."""
MARGIN = 10.0
"""Seconds that a process has beyond `shutdown_timeout` to send its outcomes, before it is killed."""
LOOK_EVERY = 0.2
REFUSED = 3
"""Exit code of a process that cannot work at all, such as one whose queue does not exist. It is not started again."""


def work(handler: str, options: Options) -> None:
    """Run the handler `module:function` on the items of a queue until SIGTERM or SIGINT; block until all is finished or released.

    Raises `invalid_request` for a handler that is not there, and the error that stopped the worker, if any.
    """
    if options.processes < 1:
        raise invalid("processes", "expected at least 1")
    if options.processes > 1 or options.reload:
        Supervisor(handler, options).run()
        return
    worker = WorkerProcess(load_handler(handler), options)
    try:
        with _status_page(options, worker):
            worker.run()
    finally:
        _tell_end(worker.counts())


def _tell_end(counts: Counts) -> None:
    """Log what a worker did: `stopped: 1,204 items done, 3 failed`."""
    did = [f"{times.items:,} {_ENDED[name]}" for name, times in counts.outcomes.items() if times.items]
    log.info("stopped: %s", ", ".join(did) or "no items were handled")


_ENDED = {"done": "items done", "retry": "put back", "dead": "sent to the dead queue", "failed": "failed"}
"""What a log says of the outcomes (`OUTCOMES`)."""


@contextlib.contextmanager
def _status_page(options: Options, worker: WorkerProcess | Supervisor) -> Iterator[None]:
    if options.listen is None:
        yield
        return
    with StatusPage(options.listen, options.queue_name, worker.running_counts, worker.ended_counts) as page:
        log.info("health and metrics at %s/healthz, /readyz, /metrics", page.url)
        yield


class Supervisor:
    """Keeps `processes` processes running, each with a consumer of its own, until it is stopped."""

    def __init__(self, handler: str, options: Options) -> None:
        self._options = options
        self._children = [Child(handler, number, options) for number in range(1, options.processes + 1)]
        self._ended = Counts()
        self._is_stopping = threading.Event()
        self._error: SluicewayError | None = None
        self._patience = shutdown_millis(options.shutdown_timeout) / 1000 + MARGIN

    def running_counts(self) -> list[Counts]:
        return [child.counts for child in self._children if child.is_running]

    def ended_counts(self) -> Counts:
        return self._ended

    def run(self) -> None:
        """Block until it was stopped and all processes have ended. Raises the error of a process that cannot work at all."""
        files = PythonFiles(Path.cwd()) if self._options.reload else None
        with _status_page(self._options, self), StopSignals(self._is_stopping.set, self._ask_to_stop):
            while not self._is_stopping.wait(LOOK_EVERY):
                if files is not None and (changed := files.changed()):
                    log.info("%s changed: starting again", ", ".join(changed))
                    self._stop_all()
                    for child in self._children:
                        child.forget_failures()
                for child in self._children:
                    self._look_after(child)
            self._stop_all()
            _tell_end(self._ended)
        if self._error is not None:
            raise self._error

    def _look_after(self, child: Child) -> None:
        """Start the child if it does not run. One that failed is started again after a pause, or with `reload`, after a change."""
        code = child.ended()
        if code is not None:
            self._ended = total([self._ended, child.counts])
            if code == REFUSED and not self._options.reload:
                self._error = child.error or SluicewayError("internal", "a process of the worker ended without an error")
                self._is_stopping.set()
                return
            what = "starts again when the code changes" if self._options.reload else "starts again"
            how = f"ended: {child.error.detail}" if child.error else how_it_ended(code)
            log.warning("process %d %s. It %s", child.number, how, what)
        if child.may_start(self._options.reload):
            try:
                child.start()
            except OSError as error:
                # Such as for lack of memory: it is no reason to end the others.
                log.error("process %d could not be started, trying again in %.0f s: %s", child.number, PAUSES[1], error)

    def _stop_all(self) -> None:
        self._ask_to_stop()
        deadline = time.monotonic() + self._patience
        for child in self._children:
            child.wait(deadline - time.monotonic())
            if child.ended() is not None:
                self._ended = total([self._ended, child.counts])

    def _ask_to_stop(self) -> None:
        for child in self._children:
            child.stop()


class Report(msgspec.Struct):
    """A line that a process writes to its supervisor."""

    counts: Counts
    code: str | None = None
    """With `detail`: the error that ended the process."""
    detail: str = ""


class Assignment(msgspec.Struct):
    """The line that a supervisor writes to its process. It then keeps the pipe open: a process whose supervisor was killed sees its end."""

    handler: str
    number: int
    options: Options


class Child:
    """One process of a worker, and the ones started in its place."""

    def __init__(self, handler: str, number: int, options: Options) -> None:
        self.number = number
        names = {} if options.client_id is None else {"client_id": f"{options.client_id}-{number}"}
        self._assignment = Assignment(handler, number, msgspec.structs.replace(options, listen=None, **names))
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread()
        self._started_at = self._not_before = 0.0
        self._failures = 0
        self.counts = Counts()
        self.error: SluicewayError | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start the process. Raises OSError if the system cannot: then it may be tried again after a pause."""
        self._not_before = time.monotonic() + PAUSES[1]
        reading, writing = os.pipe()
        # Its own process group, so that Ctrl-C in a terminal reaches it through its supervisor alone.
        command = [sys.executable, "-m", "sluiceway.worker", str(writing)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writing], process_group=0)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._started_at = self._not_before = time.monotonic()
        self.counts, self.error = Counts(), None
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(self._assignment) + b"\n")
            self._process.stdin.flush()

    def ended(self) -> int | None:
        """The exit code, once after each start; None if the process is running or was not started."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # What it has written is complete once the reader ends, unless a process that the handler started holds the pipe.
        self._reader.join(1.0)
        self._process = None
        self._failures = 1 if time.monotonic() - self._started_at > STARTED else self._failures + 1
        self.counts.running = 0
        return code

    def may_start(self, only_once: bool) -> bool:
        """Whether it is time to start the process; with `only_once`, not if it failed."""
        if self._process is not None or (only_once and self._failures):
            return False
        # Bounded: a power of a thousand failures is beyond a float.
        pause = min(PAUSES[0] * 2 ** min(self._failures - 1, 16), PAUSES[1]) if self._failures else 0.0
        return time.monotonic() >= max(self._started_at + pause, self._not_before)

    def forget_failures(self) -> None:
        self._failures = 0

    def stop(self) -> None:
        """Ask the process to stop; if it was asked before, to stop at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, patience: float) -> None:
        """Wait until the process has ended. Kill it after `patience` seconds."""
        if self._process is not None:
            try:
                self._process.wait(max(0.0, patience))
            except subprocess.TimeoutExpired:
                log.warning("process %d did not stop in time: killed", self.number)
                self._process.kill()
                self._process.wait()

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                report = msgspec.json.decode(line, type=Report)
                self.counts = report.counts
                if report.code is not None:
                    self.error = SluicewayError(report.code, report.detail)


class PythonFiles:
    """The Python files below a folder, without hidden folders and virtual environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = self._look()

    def changed(self) -> list[str]:
        """The files that changed, came or went since the last call."""
        before, self._seen = self._seen, self._look()
        return sorted(path for path in before.keys() | self._seen.keys() if before.get(path) != self._seen.get(path))

    def _look(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for folder, folders, names in os.walk(self._folder):
            folders[:] = [
                name
                for name in folders
                if not name.startswith((".", "__pycache__", "node_modules")) and not Path(folder, name, "pyvenv.cfg").exists()
            ]
            for name in names:
                if name.endswith(".py"):
                    path = Path(folder, name)
                    with contextlib.suppress(OSError):
                        found[str(path.relative_to(self._folder))] = path.stat().st_mtime_ns
        return found
