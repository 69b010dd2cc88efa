"""beanstalkd, through a hand-written client: its Python clients wait for each answer before they send the next command.

It has only commands for a single job, so a batch is that many commands in one write, whose answers are awaited together. A batch is at
most PIPELINE jobs: each job is synced by itself, so longer ones are no faster, and a single one could outlast the slice.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.pipeline import Pipeline
from bench.processes import free_port, listening, output_of, program, stopped_at_the_end
from sluiceway.bench.work import Client, Done, Served, Work, repeat, run

GUARANTEES = {"beanstalkd": "A job is confirmed when it is in the log (-b), which is synced at every write (-f0)."}
PIPELINE = 50
PATIENCE = 5
"""Seconds that a reserve waits for a job."""


def found() -> str | None:
    return None if program("beanstalkd") else "no beanstalkd (Debian: beanstalkd)"


def version() -> str:
    return output_of("beanstalkd", "-v")


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Served]:
    port = free_port()
    command = [str(program("beanstalkd")), "-l", "127.0.0.1", "-p", str(port), "-b", str(folder), "-f0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with stopped_at_the_end(process):
        listening(port, process)
        yield Served(str(port), [process.pid])


def drive(name: str, address: str, work: Work, seconds: float) -> Done:
    return run(_drive(int(address), replace(work, batch=min(work.batch, PIPELINE)), seconds))


async def _drive(port: int, work: Work, seconds: float) -> Done:
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: Beanstalk(work), "127.0.0.1", port))[1] for _ in range(work.clients)]
    tube = secrets.token_hex(4)
    for each in clients:
        await each.use(tube)
    done = await repeat(clients, work, seconds)
    for each in clients:
        each.close()
    return done


class Beanstalk(Pipeline[bytes], Client):
    """The subset of the protocol that this work needs."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self._rest = b""
        self._size = 0
        self._puts = (b"put 0 0 60 %d\r\n" % work.payload + b"x" * work.payload + b"\r\n") * work.batch
        self._reserves = b"reserve-with-timeout %d\r\n" % PATIENCE * work.batch

    def read(self, data: bytes) -> list[bytes]:
        data, at = self._rest + data, 0
        answers = []
        while (end := data.find(b"\r\n", at)) >= 0:
            line = data[at:end]
            after = end + 2
            if line.startswith(b"RESERVED"):
                size = int(line[line.rindex(b" ") :])
                if len(data) < after + size + 2:
                    break
                self._size += size
                after += size + 2
            answers.append(line)
            at = after
        self._rest = data[at:]
        return answers

    async def use(self, tube: str) -> None:
        """Use a fresh tube for each slice, so that no slice meets another one's jobs."""
        name = tube.encode()
        await self.call(b"use %s\r\nwatch %s\r\nignore default\r\n" % (name, name), 3)

    async def produce(self) -> None:
        for answer in await self.call(self._puts, self._work.batch):
            if not answer.startswith(b"INSERTED"):
                raise RuntimeError(f"put: {answer!r}")

    async def lease(self) -> tuple[int, Any]:
        self._size = 0
        return self._jobs(await self.call(self._reserves, self._work.batch))

    async def complete_and_lease(self, leased: Any) -> tuple[int, Any]:
        self._size, count = 0, len(leased)
        answers = await self.call(self._deletes(leased) + self._reserves, count + self._work.batch)
        _check_deleted(answers[:count])
        return self._jobs(answers[count:])

    def _jobs(self, answers: list[bytes]) -> tuple[int, Any]:
        jobs = [answer.split(b" ", 2)[1] for answer in answers if answer.startswith(b"RESERVED")]
        if self._size != len(jobs) * self._work.payload:
            raise RuntimeError(f"{self._size} bytes of payload reserved in {len(jobs)} jobs")
        return len(jobs), jobs

    async def complete(self, leased: Any) -> None:
        _check_deleted(await self.call(self._deletes(leased), len(leased)))

    def _deletes(self, leased: list[bytes]) -> bytes:
        return b"".join([b"delete %s\r\n" % job for job in leased])


def _check_deleted(answers: list[bytes]) -> None:
    if answers != [b"DELETED"] * len(answers):
        raise RuntimeError("not all deleted")
