"""A process of a worker with several. Its supervisor writes its assignment to stdin, and reads its reports from the pipe in argv[1]."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

import msgspec

from sluiceway.kernel.errors import SluicewayError
from sluiceway.worker.counts import Counts
from sluiceway.worker.handlers import load_handler
from sluiceway.worker.log_setup import configure_logs
from sluiceway.worker.process import WorkerProcess
from sluiceway.worker.supervisor import REFUSED, Assignment, Report

REPORT_EVERY = 1.0
"""Seconds."""


def main() -> int:
    """Return the exit code: 0 after a stop, REFUSED if it cannot work at all."""
    reports = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    os.set_inheritable(reports.fileno(), False)
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    configure_logs(assignment.options.log_level, assignment.options.log_json, assignment.number)
    threading.Thread(target=_stop_with_supervisor, daemon=True).start()
    error: SluicewayError | None = None
    has_ended = threading.Event()
    try:
        worker = WorkerProcess(load_handler(assignment.handler), assignment.options)
    except SluicewayError as refused:
        _report(reports.fileno(), Report(Counts(), refused.code, refused.detail))
        return REFUSED

    def report() -> None:
        while not has_ended.wait(REPORT_EVERY):
            _report(reports.fileno(), Report(worker.counts()))

    reporting = threading.Thread(target=report, daemon=True)
    reporting.start()
    try:
        worker.run()
    except SluicewayError as refused:
        error = refused
    except KeyboardInterrupt:
        pass
    has_ended.set()
    reporting.join()
    _report(reports.fileno(), Report(worker.counts(), error.code if error else None, error.detail if error else ""))
    return 0 if error is None else REFUSED


def _report(file: int, report: Report) -> None:
    # A supervisor that was killed reads nothing.
    with contextlib.suppress(BrokenPipeError):
        os.write(file, msgspec.json.encode(report) + b"\n")


def _stop_with_supervisor() -> None:
    """Stop this process when the supervisor has ended, however it did: its end of stdin closes."""
    # Not through sys.stdin, whose lock a daemon thread must not hold when the interpreter ends.
    while os.read(0, 1):
        pass
    # To the main thread: the system may give a signal to the process to any thread, and only the main one would wake up from its wait.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
