"""What is measured of a task queue: its speed, its latency, and what a kill of its worker or server loses."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.processes import PATIENCE, kill_family
from bench.task_queues import brokers, job_record
from bench.task_queues.catalog import TaskQueue
from sluiceway.bench.servers import FamilyMeter

ROOT = Path(__file__).parent.parent.parent
STALLED = 60.0
"""Seconds without a job handled after which a system is stuck."""
RECOVERY = 150.0
"""Seconds after a kill without one of the jobs handled, after which those that are left count as lost."""
TRICKLE = 10.0
"""Jobs a second that are produced meanwhile: some systems look for the jobs of dead workers only while there is traffic."""
TRAFFIC = 6_000
"""Jobs of that, at most."""
LOOK = 0.005
"""Seconds between two looks at the record."""
REDELIVERY = 12
"""Seconds after which the jobs of a dead worker are offered again: the least that all systems can be set to (arq: 11 s)."""
PACE = 200.0
"""Jobs a second of the latency."""
WARM_UP = 100
"""Jobs of the latency that do not count."""
QUIET = 1.0
"""Seconds of rest before the latency."""
WORK = 0.01
"""Seconds that a handler takes while workers are killed: some jobs are in handlers then."""

Row = dict[str, Any]
Times = NDArray[np.float64]


class FailedError(Exception):
    """A system did not do its work."""


class Used(NamedTuple):
    """Processor seconds of the worker and of the server, each with its descendants."""

    worker: float
    server: float

    def since(self, before: Used) -> Used:
        return Used(self.worker - before.worker, self.server - before.server)


class Bench:
    """A system that runs: its server, the record of `jobs` jobs, its worker and its producers."""

    def __init__(self, queue: TaskQueue, folder: Path, broker: brokers.Broker, jobs: int, is_killed: bool) -> None:
        self._queue, self.broker, self._output = queue, broker, folder / "output"
        record = folder / "record"
        job_record.create(record, jobs)
        self.record = job_record.JobRecord(record)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SLUICEWAY_URL": broker.url,
            job_record.RECORD: str(record),
            job_record.BROKER: broker.url,
        }
        self._options = ["--url", broker.url] if queue.environment == "rq" else []
        if is_killed:
            self._environment |= {job_record.SECONDS: str(WORK), job_record.REDELIVERY: str(REDELIVERY)}
            self._options += ["--lease-timeout", f"{REDELIVERY}s"] if queue.environment is None else []
        self._folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        self.worker: subprocess.Popen[bytes] | None = None

    # ---- processes

    def prepare(self) -> None:
        """Do what the system's documentation demands before the first job. Raises FailedError if it fails."""
        if self._producer("prepare").wait(PATIENCE):
            raise FailedError(f"prepare: {self.tail()}")

    def _producer(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(self._queue.bin / "python"), "-m", "bench.task_queues.job_producer", self._queue.module, *arguments]
        return self._run(command, subprocess.PIPE)

    def _run(self, command: list[str], output: int | None = None) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdin=subprocess.DEVNULL, stdout=output or log, stderr=log
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End its worker, and a producer that was interrupted."""
        self.stop_worker()
        for process in self._started:
            if process.poll() is None:
                kill_family(process.pid)
                process.wait(PATIENCE)
            if process.stdout is not None:
                process.stdout.close()

    def start_worker(self) -> None:
        name, *arguments = self._queue.worker
        self.worker = self._run([str(self._queue.bin / name), *arguments, *self._options])

    def kill_worker(self) -> None:
        assert self.worker is not None
        kill_family(self.worker.pid)
        self.worker.wait(PATIENCE)

    def stop_worker(self) -> None:
        if self.worker is None or self.worker.poll() is not None:
            return
        self.worker.terminate()
        try:
            self.worker.wait(PATIENCE / 4)
        except subprocess.TimeoutExpired:
            self.kill_worker()

    def tail(self) -> str:
        """The end of what its processes wrote."""
        return self._output.read_text(errors="replace")[-2_000:].strip()

    # ---- work

    def begin_producing(self, first: int, last: int, pace: float = 0.0) -> subprocess.Popen[bytes]:
        return self._producer(str(first), str(last), *([str(pace)] if pace else []))

    def end_producing(self, producer: subprocess.Popen[bytes]) -> float:
        """Wait for the producer, and return the processor seconds that sending took it."""
        output, _ = producer.communicate(timeout=600)
        if producer.returncode:
            raise FailedError(f"the producer: {self.tail()}")
        return float(json.loads(output.splitlines()[-1])["cpu"])

    def wait_handled(self, first: int, last: int, count: int | None = None) -> None:
        """Wait until `count` of these jobs are handled; all by default. Raises FailedError if none is for STALLED seconds."""
        handled = self.times(first, last)[2]
        wanted, before, since = last - first if count is None else count, 0, time.monotonic()
        while (now := int(np.count_nonzero(handled))) < wanted:
            if now > before:
                before, since = now, time.monotonic()
            if time.monotonic() > since + STALLED:
                raise FailedError(f"{wanted - now} of {wanted} jobs not handled: {self.tail()}")
            time.sleep(LOOK)

    def times(self, first: int, last: int) -> tuple[Times, Times, Times, Times]:
        """The columns of these jobs: produced, confirmed, handled, times handled."""
        record = self.record
        columns: tuple[Any, ...] = (record.produced, record.confirmed, record.handled, record.times_handled)
        produced, confirmed, handled, times = (np.frombuffer(column, np.float64)[first:last] for column in columns)
        return produced, confirmed, handled, times

    def used(self) -> Used:
        assert self.worker is not None
        return Used(FamilyMeter(self.worker.pid).seconds(), FamilyMeter(self.broker.process.pid).seconds())


@contextmanager
def running(queue: TaskQueue, jobs: int, is_killed: bool = False) -> Iterator[Bench]:
    """Start a system's server, on empty data, with a record of so many jobs. With `is_killed`, handlers take WORK seconds, and the jobs of
    dead workers are offered again after REDELIVERY seconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluiceway-jobs-", ignore_cleanup_errors=True)))
        data = folder / "server"
        data.mkdir()
        # A server that refuses to run as root runs as another user, who must be able to reach its folder.
        folder.chmod(0o711)
        broker = stack.enter_context(brokers.running(queue.broker, data))
        bench = Bench(queue, folder, broker, jobs, is_killed)
        stack.callback(bench.close)
        bench.prepare()
        yield bench


def measure_speed(queue: TaskQueue, jobs: int, paced: int) -> Row:
    """Produce all jobs and then work them off; produce and work at the same time; then the latency of `paced` jobs."""
    with running(queue, 2 * jobs + paced) as bench:
        bench.end_producing(bench.begin_producing(0, jobs))
        produced, confirmed, handled, _ = bench.times(0, jobs)
        _check_confirmed(bench, confirmed)
        bench.start_worker()
        bench.wait_handled(0, jobs)
        row: Row = {
            "produce_per_s": jobs / float(confirmed.max() - produced.min()),
            "work_per_s": (jobs - 1) / float(handled.max() - handled.min()),
        }
        before = bench.used()
        producer_cpu = bench.end_producing(bench.begin_producing(jobs, 2 * jobs))
        bench.wait_handled(jobs, 2 * jobs)
        used = bench.used().since(before)
        produced, confirmed, handled, _ = bench.times(jobs, 2 * jobs)
        _check_confirmed(bench, confirmed)
        row["together_per_s"] = jobs / float(handled.max() - produced.min())
        cpu = {"worker_us": used.worker, "server_us": used.server, "producer_us": producer_cpu}
        row |= {name: seconds / jobs * 1e6 for name, seconds in cpu.items()}
        time.sleep(QUIET)
        last = 2 * jobs + paced
        bench.end_producing(bench.begin_producing(2 * jobs, last, PACE))
        bench.wait_handled(2 * jobs, last)
        produced, confirmed, handled, _ = bench.times(2 * jobs, last)
        _check_confirmed(bench, confirmed)
        row |= _delays((handled - produced)[min(WARM_UP, paced // 2) :])
        row["handled_again"] = int(np.count_nonzero(bench.times(0, last)[3] > 1))
        return row


def _delays(delays: Times) -> Row:
    ordered = np.sort(delays)
    return {f"p{part}_ms": float(ordered[len(ordered) * part // 100]) * 1e3 for part in (50, 99)}


def _check_confirmed(bench: Bench, confirmed: Times) -> None:
    if missing := int(np.count_nonzero(confirmed == 0)):
        raise FailedError(f"{missing} jobs could not be produced: {bench.tail()}")


def measure_worker_kill(queue: TaskQueue, jobs: int) -> Row:
    """Kill the worker when a quarter of the jobs is handled, and start another one."""
    with running(queue, jobs + TRAFFIC, is_killed=True) as bench:
        bench.end_producing(bench.begin_producing(0, jobs))
        bench.start_worker()
        bench.wait_handled(0, jobs, jobs // 4)
        bench.kill_worker()
        killed = time.monotonic()
        bench.start_worker()
        return _outcome(bench, jobs, killed)


def measure_server_kill(queue: TaskQueue, jobs: int) -> Row:
    """Kill the server when a third of the jobs is confirmed, while jobs are produced and handled, and start it again."""
    with running(queue, jobs + TRAFFIC, is_killed=True) as bench:
        bench.start_worker()
        producer = bench.begin_producing(0, jobs, PACE)
        confirmed = bench.times(0, jobs)[1]
        while np.count_nonzero(confirmed) < jobs // 3:
            if producer.poll() is not None:
                raise FailedError(f"the producer ended: {bench.tail()}")
            time.sleep(LOOK)
        bench.broker.kill()
        killed = time.monotonic()
        bench.broker.start()
        bench.end_producing(producer)
        return _outcome(bench, jobs, killed)


def _outcome(bench: Bench, jobs: int, killed: float) -> Row:
    """Wait until all confirmed jobs are handled, or none is for RECOVERY seconds. Starts a worker that ends again, as supervisors do."""
    assert bench.worker is not None
    _, confirmed, handled, times = bench.times(0, jobs)
    before, until, restarts = 0, 0.0, 0
    traffic = bench.begin_producing(jobs, jobs + TRAFFIC, TRICKLE)
    while lost := int(np.count_nonzero((confirmed > 0) & (handled == 0))):
        if (now := int(np.count_nonzero(handled))) > before or not until:
            before, until = now, time.monotonic() + RECOVERY
        if time.monotonic() >= until:
            break
        if bench.worker.poll() is not None:
            restarts += 1
            bench.start_worker()
            time.sleep(1)
        time.sleep(LOOK)
    traffic.kill()
    traffic.communicate()
    return {
        "lost": lost,
        "confirmed": int(np.count_nonzero(confirmed)),
        "handled_again": int(np.count_nonzero(times > 1)),
        "recovered_s": float(handled.max() - killed),
        "worker_restarts": restarts,
    }
