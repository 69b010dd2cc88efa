"""Supervisor of several processes that serve one address together: starts, restarts and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluiceway.adapters import system
from sluiceway.instance.configuration import Loaded
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.exit_codes import how_it_ended
from sluiceway.server.wiring import Door

log = logging.getLogger("sluiceway.server")

# With -P: modules in the folder where the server was started must not be imported.
COMMAND = (sys.executable, "-P", "-m", "sluiceway.server.worker")
FIRST_DELAY: Millis = 100
LONGEST_DELAY: Millis = 10_000
_SOME = 1 << 12
KILL_AFTER: Millis = 10_000
"""Time beyond `shutdown_timeout`, which is for requests, for a process to close its stores and leave the cluster."""
BEAT: Millis = 1_000
"""Interval of the heartbeats of a worker's event loop to its supervisor, each an empty line."""
MAX_MISSED = 30
"""Consecutive missed heartbeats. An event loop blocked that long does not recover: its process is frozen, or a disk does not answer."""


@dataclass(frozen=True)
class WorkerOrder:
    """Parameters of a worker process. `listeners`: file descriptors of the inherited bound sockets; `seats`: that of the file with the
    workers' connection counts."""

    data: Path
    loaded: Loaded
    door: Door
    listeners: tuple[int, ...]
    seats: int


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """First message of a worker to its supervisor, as a line of JSON: its `url` once it serves, or its error."""

    url: str = ""
    code: str = ""
    """Code of a SluicewayError; a detail without a code is an OSError's."""
    detail: str = ""
    field: str | None = None

    def error(self) -> Exception:
        return SluicewayError(self.code, self.detail, self.field) if self.code else OSError(self.detail)


def next_delay(before: Millis, served: Millis) -> Millis:
    """Return the delay before an ended worker is restarted: doubled each time, reset after it had served for LONGEST_DELAY."""
    return FIRST_DELAY if served >= LONGEST_DELAY else min(max(2 * before, FIRST_DELAY), LONGEST_DELAY)


class Supervisor:
    """Parent of `workers` processes. Each runs `command` and inherits the bound `socks` and the `files`. From its standard input, which
    stays open as long as the parent lives, it reads the `order`, and a pickled `Clock` with the server's time. Used once, in the main
    thread.
    """

    def __init__(
        self,
        workers: int,
        order: bytes,
        socks: Sequence[socket.socket],
        shutdown_timeout: Millis,
        command: Sequence[str] = COMMAND,
        files: Sequence[int] = (),
    ) -> None:
        self._files = files
        self._workers = workers
        self._order = order
        self._socks = socks
        self._patience = (shutdown_timeout + KILL_AFTER) / 1_000
        self._command = command
        self._children: dict[int, Process] = {}
        self._ready: set[int] = set()
        self._outdated: set[int] = set()
        """Workers that may have missed a reload: their configuration is that of the start."""
        self._started = False
        self._stopping = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT, then end all workers within `shutdown_timeout` and KILL_AFTER. Passes SIGHUP on to each of them.

        `ready` is called once all serve. From then on an ended worker is restarted, and an unresponsive one is killed. If one ends before,
        all are ended, and its error is raised: a SluicewayError or an OSError.
        """
        stopping = asyncio.create_task(self._stopping.wait())
        with self._signals():
            keepers = [asyncio.create_task(self._keep(number, ready)) for number in range(1, self._workers + 1)]
            try:
                await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._end(keepers)
        await asyncio.gather(*keepers, stopping)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)
            # Its default would end this process before a graceful stop.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        for child in self._children.values():
            _send(child, number)

    def _reload(self) -> None:
        for number, child in self._children.items():
            # Before the worker serves, the signal would end it.
            if number in self._ready:
                _send(child, signal.SIGHUP)
            else:
                self._outdated.add(number)

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._stop(signal.SIGTERM)
        for sock in self._socks:
            # Once the last worker has closed its copy too, no client can connect any more.
            sock.close()
        _, late = await asyncio.wait(keepers, timeout=self._patience)
        for number, child in self._children.items():
            log.warning("worker %d (process %d) did not stop in time and was killed", number, child.pid)
            _send(child, signal.SIGKILL)
        if late:
            await asyncio.wait(late)

    async def _keep(self, number: int, ready: Callable[[], None]) -> None:
        """Keep the worker running until the server stops."""
        delay = 0
        while True:
            try:
                child = await self._start(number)
            except OSError as error:
                if not self._started:
                    raise
                # Such as for lack of memory: it is no reason to end the others.
                delay = next_delay(delay, 0)
                log.error("worker %d could not be started; trying again in %s: %s", number, format_duration(delay), error)
                if await self._stops_within(delay):
                    return
                continue
            said = await _hear(child)
            began = system.steady()
            if said.url:
                log.info("worker %d (process %d) is ready; other workers reach it at %s", number, child.pid, said.url)
                self._note_ready(number, child, ready)
                await _watch(number, child)
            end = how_it_ended(await child.wait())
            del self._children[number]
            self._ready.discard(number)
            if self._stopping.is_set():
                return
            if not self._started:
                raise said.error() if said.detail else SluicewayError("unavailable", f"worker {number} {end} before all workers served")
            delay = next_delay(delay, system.steady() - began)
            why = f": {said.detail}" if said.detail else ""
            log.error("worker %d (process %d) %s%s; restarting it in %s", number, child.pid, end, why, format_duration(delay))
            self._outdated.add(number)
            if await self._stops_within(delay):
                return

    async def _stops_within(self, delay: Millis) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay / 1_000):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _start(self, number: int) -> Process:
        fds = [*(sock.fileno() for sock in self._socks), *self._files]
        # In its own session it does not get the terminal's signals, which the parent passes on.
        child = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, pass_fds=fds, start_new_session=True)
        assert child.stdin is not None
        # With the server's time: a worker that starts while the machine's clock is wrong has the same as the others.
        child.stdin.write(self._order + pickle.dumps(system.clock()))
        self._children[number] = child
        if self._stopping.is_set():
            _send(child, signal.SIGTERM)
        return child

    def _note_ready(self, number: int, child: Process, ready: Callable[[], None]) -> None:
        self._ready.add(number)
        if number in self._outdated:
            self._outdated.discard(number)
            _send(child, signal.SIGHUP)
        if not self._started and len(self._ready) == self._workers:
            self._started = True
            ready()


async def _hear(child: Process) -> Said:
    """The worker's first message. What else is printed there, such as by a library, is passed over."""
    assert child.stdout is not None
    while True:
        try:
            line = await child.stdout.readline()
            return msgspec.json.decode(line, type=Said) if line else Said()
        except (msgspec.DecodeError, ValueError) as error:
            log.warning("process %d printed what is no message of a worker: %s", child.pid, error)


async def _watch(number: int, child: Process) -> None:
    """Wait until the worker has ended, or kill it if unresponsive: frozen in a commit it would block the partition's other owners."""
    assert child.stdout is not None
    missed = 0
    # Counts beats, not time: while this process is frozen itself, none are missed.
    while missed < MAX_MISSED:
        # Reads the clock, which hears of a jump when the workers do, and so follows it when they do.
        system.now()
        try:
            async with asyncio.timeout(BEAT / 1_000):
                if not await child.stdout.read(_SOME):
                    return
        except TimeoutError:
            missed += 1
        else:
            missed = 0
    log.error("worker %d (process %d) did not respond for %s and was killed", number, child.pid, format_duration(MAX_MISSED * BEAT))
    _send(child, signal.SIGKILL)


def _send(child: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)
