"""The producing process: `python -m bench.task_queues.job_producer MODULE FIRST LAST [PACE]`, or `MODULE prepare` before the first job.

`MODULE` is a system's, which sends jobs by threads or by tasks, `AT_ONCE` of them, each waiting for the confirmation of what it has sent.
With `PACE`, one job is sent at a time, so many a second. A job whose sending fails is not confirmed, and is not sent again: the system's
client has repeated as it does by default. The last line printed has the processor seconds used.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, cast

from bench.task_queues.job_record import RECORD, JobRecord

PAUSE = 0.1
"""Seconds to the next job after one that could not be sent."""


class Sender(Protocol):
    def __call__(self, jobs: list[int]) -> Any:
        """Send jobs; returns, or for `is_async` is awaited, until all are confirmed. Raises an error if they are not."""


class System(Protocol):
    """What a system's module has."""

    AT_ONCE: int
    """Threads or tasks that send."""
    BATCH: int
    """Jobs that a thread or task sends at once: 1 if the system's documentation has no call for several."""
    IS_ASYNC: bool

    @staticmethod
    def prepare() -> None:
        """Do what the documentation demands before the first job, such as creating tables."""

    @staticmethod
    def sending() -> AbstractContextManager[Sender] | AbstractAsyncContextManager[Sender]:
        """Connect. `IS_ASYNC` systems have asynchronous context managers and senders."""


class Schedule:
    """Hands out jobs to the threads or tasks, in order, each with the time at which it is due."""

    def __init__(self, first: int, last: int, batch: int, pace: float) -> None:
        self._parts: Iterator[int] = iter(range(first, last, batch))
        self._first, self._last, self._batch, self._pace = first, last, batch, pace
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def next_part(self) -> tuple[list[int], float] | None:
        """The next jobs, and the seconds until they are due; None after the last."""
        with self._lock:
            begin = next(self._parts, None)
        if begin is None:
            return None
        due = self._began + (begin - self._first) / self._pace if self._pace else 0.0
        return list(range(begin, min(begin + self._batch, self._last))), max(0.0, due - time.monotonic())


def send_blocking(system: System, schedule: Schedule, record: JobRecord) -> None:
    with cast(AbstractContextManager[Sender], system.sending()) as send:

        def run() -> None:
            while part := schedule.next_part():
                jobs, wait = part
                time.sleep(wait)
                _mark(record.produced, jobs)
                try:
                    send(jobs)
                except Exception as error:
                    _tell(error)
                    time.sleep(PAUSE)
                else:
                    _mark(record.confirmed, jobs)

        threads = [threading.Thread(target=run) for _ in range(system.AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def send_async(system: System, schedule: Schedule, record: JobRecord) -> None:
    async with cast(AbstractAsyncContextManager[Sender], system.sending()) as send:

        async def run() -> None:
            while part := schedule.next_part():
                jobs, wait = part
                if wait:
                    await asyncio.sleep(wait)
                _mark(record.produced, jobs)
                try:
                    await send(jobs)
                except Exception as error:
                    _tell(error)
                    await asyncio.sleep(PAUSE)
                else:
                    _mark(record.confirmed, jobs)

        await asyncio.gather(*(run() for _ in range(system.AT_ONCE)))


def _mark(column: memoryview[float], jobs: list[int]) -> None:
    now = time.monotonic()
    for job in jobs:
        column[job] = now


def _tell(error: Exception) -> None:
    print(f"not confirmed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def main() -> None:
    system = cast(System, import_module(f"bench.task_queues.{sys.argv[1]}"))
    if sys.argv[2] == "prepare":
        system.prepare()
        return
    first, last = int(sys.argv[2]), int(sys.argv[3])
    pace = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    record = JobRecord(os.environ[RECORD])
    used = time.process_time()
    schedule = Schedule(first, last, 1 if pace else system.BATCH, pace)
    if system.IS_ASYNC:
        asyncio.run(send_async(system, schedule, record))
    else:
        send_blocking(system, schedule, record)
    print(json.dumps({"cpu": time.process_time() - used}), flush=True)


if __name__ == "__main__":
    main()
