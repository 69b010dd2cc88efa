"""Several processes that serve one address together: who starts them, starts them again, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from sluiceway.server.wiring import Door

log = logging.getLogger("sluiceway.server")

# Not from the folder in which the server was started, whatever lies there.
COMMAND = (sys.executable, "-P", "-m", "sluiceway.server.worker")
FIRST_DELAY: Millis = 100
LONGEST_DELAY: Millis = 10_000
_SOME = 1 << 12
KILL_AFTER: Millis = 10_000
"""Beyond `shutdown_timeout`, which is for requests: what a process may take to close its stores and to leave the cluster."""
BEAT: Millis = 1_000
"""How often a worker that serves tells its supervisor that its event loop runs, with a line that is empty."""
MAX_MISSED = 30
"""Beats in a row. What holds up an event loop for so long does not end by itself: a frozen process, or a disk that does not answer."""


@dataclass(frozen=True)
class WorkerOrder:
    """What a process that is one of several needs to know. `listeners`: the bound sockets that it has inherited; `seats`: the file in which
    they note how many connections they have."""

    data: Path
    loaded: Loaded
    door: Door
    listeners: tuple[int, ...]
    seats: int


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker tells its supervisor first, as a line of JSON: its `url` now that it serves, or why it cannot."""

    url: str = ""
    code: str = ""
    """Of a SluicewayError; a detail without a code is that of an OSError."""
    detail: str = ""
    field: str | None = None

    def error(self) -> Exception:
        return SluicewayError(self.code, self.detail, self.field) if self.code else OSError(self.detail)


def next_delay(before: Millis, served: Millis) -> Millis:
    """How long to wait until a worker that has ended is started again: twice as long each time, unless it had served for a while."""
    return FIRST_DELAY if served >= LONGEST_DELAY else min(max(2 * before, FIRST_DELAY), LONGEST_DELAY)


class Supervisor:
    """The parent of so many processes. Each runs `command`, inherits the bound `socks` and the `files`, and reads the `order` from its
    standard input, which stays open as long as the parent lives. Used once, in the main thread.
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
        """Those whose configuration is that of the start, although it may have been read again since."""
        self._started = False
        self._stopping = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT, then end all within `shutdown_timeout` and KILL_AFTER. SIGHUP goes to each of them.

        `ready` is called once all serve. From then on a worker that ends is started again, and one that stands still is killed. If one
        ends before, all are ended, and what it said is raised: a SluicewayError or an OSError.
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
            # Its default would end the process before it has ended in good order.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping.set()
        for child in self._children.values():
            _send(child, number)

    def _reload(self) -> None:
        for number, child in self._children.items():
            # Before it serves, the signal would end it.
            if number in self._ready:
                _send(child, signal.SIGHUP)
            else:
                self._outdated.add(number)

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        self._stop(signal.SIGTERM)
        for sock in self._socks:
            # Once the last worker has closed it too, nobody can connect any more.
            sock.close()
        _, late = await asyncio.wait(keepers, timeout=self._patience)
        for number, child in self._children.items():
            log.warning("worker %d (process %d) did not end in time, and is killed", number, child.pid)
            _send(child, signal.SIGKILL)
        if late:
            await asyncio.wait(late)

    async def _keep(self, number: int, ready: Callable[[], None]) -> None:
        """Have that worker run until the server stops."""
        delay = 0
        while True:
            child = await self._start(number)
            said = await _hear(child)
            began = system.steady()
            if said.url:
                log.info("worker %d (process %d) serves; the others reach it at %s", number, child.pid, said.url)
                self._note_ready(number, child, ready)
                await _watch(number, child)
            end = _how_it_ended(await child.wait())
            del self._children[number]
            self._ready.discard(number)
            if self._stopping.is_set():
                return
            if not self._started:
                raise said.error() if said.detail else SluicewayError("unavailable", f"worker {number} {end} before all served")
            delay = next_delay(delay, system.steady() - began)
            why = f": {said.detail}" if said.detail else ""
            log.error("worker %d (process %d) %s%s; it is started again in %s", number, child.pid, end, why, format_duration(delay))
            self._outdated.add(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay / 1_000):
                    await self._stopping.wait()
                    return

    async def _start(self, number: int) -> Process:
        fds = [*(sock.fileno() for sock in self._socks), *self._files]
        # In a session of its own it does not get the signals of the terminal, which are for the parent to pass on.
        child = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, stdout=PIPE, pass_fds=fds, start_new_session=True)
        assert child.stdin is not None
        child.stdin.write(self._order)
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
    assert child.stdout is not None
    line = await child.stdout.readline()
    return msgspec.json.decode(line, type=Said) if line else Said()


async def _watch(number: int, child: Process) -> None:
    """Returns when it has ended, or was killed because it stood still: frozen in a commit it would keep others from that partition."""
    assert child.stdout is not None
    missed = 0
    # Beats and not time: while this process is frozen itself, nobody misses any.
    while missed < MAX_MISSED:
        try:
            async with asyncio.timeout(BEAT / 1_000):
                if not await child.stdout.read(_SOME):
                    return
        except TimeoutError:
            missed += 1
        else:
            missed = 0
    log.error("worker %d (process %d) has stood still for %s, and is killed", number, child.pid, format_duration(MAX_MISSED * BEAT))
    _send(child, signal.SIGKILL)


def _send(child: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
