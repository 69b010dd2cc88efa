"""`sluiceway demo`: prepares the folders, runs, and reports. The exit code is 0 only if the ledger balances."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec

from sluiceway.demo.books import Ledger
from sluiceway.demo.crashes import parse_kills
from sluiceway.demo.inputs import FLIGHTS, detect, queue_name, unpack_flights
from sluiceway.demo.picture import draw_delays, draw_rates
from sluiceway.demo.run import Failure, Run
from sluiceway.demo.screen import Screen
from sluiceway.demo.work import Job, Work
from sluiceway.kernel.errors import SluicewayError, invalid

RESULTS = Path("sluiceway-demo-results")
"""In the current folder. Replaced by each run."""

_MARK = "# Written by `sluiceway demo`: this folder is replaced by its next run.\n*\n"
_NOT_BALANCED, _WRONG_USAGE, _INTERRUPTED, _SIGNALLED = 1, 2, 130, 128


def run_demo(input_: str | None, kill: str | None, data: Path | None, *, limit: int | None = None) -> int:
    """Run the demo and return its exit code: 0 the ledger balances, 1 it does not, 2 wrong usage, 130 interrupted.

    `input_`: the user's file or folder instead of the flights; `kill`: names of crashes. `data`: folder for the data, checkpoint and
    results, from which an interrupted run continues. `limit`: approximate number of flights.
    """
    try:
        with _signals(), _work(data) as work:
            kills = parse_kills(kill)
            job = _job(work, input_, limit)
            with Screen() as screen, Run(work, job, kills, screen) as run:
                ledger = run.go()
            _draw(work, job, run)
            _report(work, job, ledger, kept=data)
            for missed in run.missed:
                print(f"requested, but the moment never came: {missed.victim} killed {missed.when}", file=sys.stderr)
            return _NOT_BALANCED if ledger.problems() or run.missed else 0
    except SluicewayError as error:
        print(f"error: {error.detail}", file=sys.stderr)
        return _WRONG_USAGE if error.code == "invalid_request" else _NOT_BALANCED
    except Failure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return _NOT_BALANCED
    except KeyboardInterrupt:
        again = "" if data is None else f"; the same command with --data {data} continues from here"
        print(f"interrupted; all started processes are stopped{again}", file=sys.stderr)
        return _INTERRUPTED


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """End the run on any stop signal as on Ctrl-C; a second signal does not disturb the cleanup."""
    wishes = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in wishes:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(_SIGNALLED + number)

    before = {number: signal.signal(number, stop) for number in wishes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _work(data: Path | None) -> Iterator[Work]:
    """Folders of the run: all in `data`, or in a temporary folder that is deleted, with the results in the current folder."""
    if data is not None:
        root = data.expanduser().absolute()
        if root.exists() and any(root.iterdir()) and not (root / "notes").is_dir():
            raise invalid("data", f"{data} has other files; name an empty folder, or that of an earlier demo")
        work = Work(root, root / "results")
        work.make()
        yield work
        return
    results = RESULTS.absolute()
    mark = results / ".gitignore"
    if results.exists():
        if not (mark.exists() and mark.read_text() == _MARK):
            raise invalid("data", f"{results} exists and is not from a demo; move it away")
        shutil.rmtree(results)
    root = Path(tempfile.mkdtemp(prefix="sluiceway-demo-"))
    try:
        work = Work(root, results)
        work.make()
        mark.write_text(_MARK)
        yield work
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _job(work: Work, input_: str | None, limit: int | None) -> Job:
    """Determine the job; in the folder of an earlier run, that run's job."""
    begun = work.read("job")
    if input_ is None and begun is not None:
        return msgspec.convert(begun, Job)
    if input_ is None:
        job = Job(unpack_flights(work.root, limit), FLIGHTS)
    else:
        source = detect(input_)
        job = Job(source, queue_name(source))
    if begun not in (None, msgspec.to_builtins(job)):
        raise invalid("data", "the demo ran in that folder with another input; name an empty folder")
    work.note("job", msgspec.to_builtins(job))
    return job


def _draw(work: Work, job: Job, run: Run) -> None:
    if job.input.kind == FLIGHTS:
        draw_delays(work.read("delays"), work.delays)
    draw_rates(run.samples, run.killed, work.rates)


def _report(work: Work, job: Job, ledger: Ledger, kept: Path | None) -> None:
    text = "\n".join(ledger.lines())
    (work.results / "ledger.txt").write_text(text + "\n")
    print(text)
    print()
    by = ", by month" if job.input.kind == FLIGHTS else ""
    if job.input.kind == FLIGHTS:
        print(f"heat map      {work.delays}")
    print(f"rates         {work.rates}")
    print(f"table         {work.table}  (Parquet{by})")
    if ledger.check.dead:
        print(f"dead letters  {work.dead_letters}  (a copy; the items are in {job.dead_queue})")
    print(f"ledger, logs  {work.results / 'ledger.txt'}, {work.logs}")
    print("\ntry next:")
    print("  make demo KILL=all          kill the server twice and Spark once in mid-work; the ledger must balance")
    print("  make demo INPUT=your.csv    the same path on your own CSV, JSON lines, Parquet or text")
    if kept:
        print(f"  sluiceway serve --data {work.server_data}")
        print(f"  sluiceway lease {job.dead_queue} -n 3      in another terminal: the dead letters are still there")
    else:
        print("  sluiceway dev               a server to try things with")
