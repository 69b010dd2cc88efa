"""An asyncio event loop in virtual time, in which several simulated processes run, each with clocks of its own.

Nothing of it waits: when nobody has anything to do, it is the time of the next timer. What happens follows from the seed alone, so code
under test must not depend on the order of a set of strings, or of objects that are hashed by their address: tasks, futures and events are
not.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from simulation.promises import BrokenPromiseError
from simulation.world import START
from sluiceway.adapters import system
from sluiceway.kernel.clock import Clock, Millis
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH

if TYPE_CHECKING:
    # Which has all of the methods, so that a type checker takes the loop for whole.
    _Base = asyncio.BaseEventLoop
else:
    # Which refuses whatever is not here: sockets, pipes, signals.
    _Base = asyncio.AbstractEventLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_STEPS = 2_000_000
"""Callbacks that a history may run: more is a loop without end."""
LAST_STEPS = 10_000
"""Of those, what may happen while everything is cancelled at the end."""


class StuckError(BrokenPromiseError):
    """Everybody waits, and nothing will ever happen; or something happens without end."""


class Process:
    """A simulated process: callbacks that run in their order, and clocks. Frozen it does nothing while time passes; dead, never more.

    `rate`: how fast its clocks run, except the one on the wall, which is `wall_ahead` milliseconds ahead of the true time. `origin`: what
    its steady clock showed at the beginning of the world, in milliseconds.
    """

    def __init__(self, name: str, rate: float = 1.0, origin: Millis = 0) -> None:
        self.name = name
        self.rate = rate
        self.origin = origin
        self.wall_ahead: Millis = 0
        self.frozen = False
        self.dead = False
        self.ready: deque[tuple[int, asyncio.Handle]] = deque()
        self.tasks: dict[_Task, None] = {}
        self._clock: Clock | None = None
        self.context = Context()
        self.context.run(_process.set, self)

    def local(self, true: float) -> float:
        """Seconds on its steady clock at that true time."""
        return self.origin / 1000 + true * self.rate

    def true(self, local: float) -> float:
        return (local - self.origin / 1000) / self.rate

    def steady(self, true: float) -> Millis:
        return int((self.origin / 1000 + true * self.rate) * 1000)

    def wall(self, true: float) -> Millis:
        """What `system.now` says."""
        wall, steady = (START + int(true * 1000) + self.wall_ahead) * 1_000_000, self.steady(true) * 1_000_000
        if self._clock is None:
            self._clock = Clock(wall, steady)
        return self._clock.read(wall, steady)


_process: ContextVar[Process] = ContextVar("process")
_serials = count()
"""Those of the loop that was made last."""


class _Task(asyncio.Task[Any]):
    """Hashed by its number: sets of tasks have one order, in every process that replays a history."""

    def __init__(self, coro: Any, *, loop: Loop, name: str | None, context: Context) -> None:
        self.serial = next(_serials)
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.serial


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: Loop) -> None:
        self.serial = next(_serials)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.serial


class _Event(asyncio.Event):
    def __init__(self) -> None:
        self.serial = next(_serials)
        super().__init__()

    def __hash__(self) -> int:
        return self.serial


class Loop(_Base):
    """Runs one callback after another. Those of one process keep their order; with `shuffle`, whose turn it is follows from `random`.

    What a task raises and nobody hears of, and what a callback raises, ends the run. There are no threads, no files and no sockets.
    """

    def __init__(self, random: Random, *, shuffle: bool = True, most_steps: int = MAX_STEPS) -> None:
        # From the beginning, so that a history is the same whatever was lived before it in this process.
        globals()["_serials"] = count()
        self.random = random
        self.outside = Process("the world")
        """Whatever is in no process: stores, the network, who makes trouble."""
        self.processes: list[Process] = [self.outside]
        self.steps = 0
        self.after_step: Callable[[Process], None] | None = None
        """Looks whether all is well, after each callback of a process."""
        self._shuffle = shuffle
        self._most_steps = most_steps
        self._now = 0.0
        self._order = count()
        self._timers: list[tuple[float, int, asyncio.Handle, Process]] = []
        self._generators: list[AsyncGenerator[Any, Any]] = []
        self._dead: list[Process] = []
        self._failure: BaseException | None = None
        self._running = False
        self._closed = False

    # ---- the simulation ---------------------------------------------------------------------------------------

    @property
    def now(self) -> Millis:
        """The true time since the beginning of the world."""
        return int(self._now * 1000)

    @property
    def seconds(self) -> float:
        """The true time, unrounded."""
        return self._now

    def add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def begin(self, process: Process, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task in that process."""
        return self.create_task(work, context=process.context.copy())

    def after(self, delay: float, act: Callable[[], object]) -> None:
        """Do it outside, after so many true milliseconds."""
        handle = asyncio.Handle(act, (), self, self.outside.context)
        heapq.heappush(self._timers, (self._now + max(0.0, delay) / 1000, next(self._order), handle, self.outside))

    def kill(self, process: Process) -> None:
        """It is gone from this moment on: no callback, no `finally`. Its ports must be dead, too: `process.dead` says so."""
        process.dead = True
        self.processes.remove(process)
        self._dead.append(process)

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts. For checks in code that catches what it calls."""
        if self._failure is None:
            self._failure = error

    @property
    def process(self) -> Process:
        """That of the running code."""
        return _process.get(self.outside)

    # ---- running ----------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until that is done. Raises what it raises; StuckError; what a callback raised, or a task that nobody asked."""
        with self._as_running():
            task = self.begin(self.outside, _awaited(future))
            while not task.done():
                self._step()
        self._check_unheard()
        answer: T = task.result()
        return answer

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        hooks = sys.get_asyncgen_hooks()
        # Kept: one that is collected would be closed at a time that follows from nothing.
        sys.set_asyncgen_hooks(firstiter=self._generators.append, finalizer=None)
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._running = True
        try:
            yield
        finally:
            self._running = False
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)

    def _step(self) -> None:
        process = self._next()
        _, handle = process.ready.popleft()
        if handle._cancelled:
            return
        self.steps += 1
        if self.steps > self._most_steps:
            raise StuckError(f"{self.steps:,} callbacks, and no end; {self._pending()}")
        handle._run()
        if self._failure is None and self.after_step is not None:
            self.after_step(process)
        if self._failure is not None:
            raise self._failure

    def _next(self) -> Process:
        """Whose turn it is; time passes until it is somebody's."""
        while True:
            self._take_due()
            able = [each for each in self.processes if each.ready and not each.frozen]
            if len(able) == 1:
                return able[0]
            if able:
                return self.random.choice(able) if self._shuffle else min(able, key=lambda each: each.ready[0][0])
            if not self._timers:
                raise StuckError(f"nothing will ever happen; {self._pending()}")
            self._now = self._timers[0][0]

    def _take_due(self) -> None:
        timers = self._timers
        while timers:
            at, _, handle, process = timers[0]
            # The attribute, not the method: this runs before each callback.
            gone = handle._cancelled or process.dead
            if not gone and at > self._now:
                return
            heapq.heappop(timers)
            if not gone:
                process.ready.append((next(self._order), handle))

    def _pending(self) -> str:
        waiting = [f"{process.name}: {_name(task)}" for process in self.processes for task in process.tasks if not task.done()]
        return f"{len(waiting)} tasks wait, such as " + ", ".join(waiting[-10:])

    def _check_unheard(self) -> None:
        for process in self.processes:
            for task in process.tasks:
                if task.done() and task._log_traceback:
                    raise task._exception or AssertionError(task)

    # ---- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all that is left, in dead processes too. Everything outside is dead by then, so nothing comes of it."""
        if self._closed:
            return
        self._closed = True
        self.after_step = None
        processes = self.processes + self._dead
        for process in processes:
            process.dead, process.frozen = True, False
        with self._as_running():
            self._cancel(processes)
            for generator in self._generators:
                self.begin(self.outside, _closing(generator))
            self._cancel(processes)
        for process in processes:
            for task in process.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                task._log_traceback = False

    def _cancel(self, processes: list[Process]) -> None:
        self.processes = processes
        last = self.steps + LAST_STEPS
        for process in processes:
            for task in process.tasks:
                task.cancel()
        while self.steps < last and (able := [each for each in processes if each.ready]):
            _, handle = able[0].ready.popleft()
            self.steps += 1
            handle._run()

    # ---- what asyncio asks of a loop --------------------------------------------------------------------------

    def time(self) -> float:
        return _process.get(self.outside).local(self._now)

    def _of(self, context: Context | None) -> Process:
        return _process.get(self.outside) if context is None else context.get(_process, self.outside)

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        handle, process = asyncio.Handle(callback, args, self, context), self._of(context)
        process.ready.append((next(self._order), handle))
        return handle

    def call_soon_threadsafe(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._of(context).local(self._now) + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.TimerHandle:
        handle, process = asyncio.TimerHandle(when, callback, args, self, context), self._of(context)
        heapq.heappush(self._timers, (process.true(when), next(self._order), handle, process))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is left out when its time has come."""

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        process = self._of(context)
        task = _Task(coro, loop=self, name=None if name is None else str(name), context=context or copy_context())
        process.tasks[task] = None
        if len(process.tasks) % 256 == 0:
            process.tasks = {each: None for each in process.tasks if not each.done() or each._log_traceback}
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """At once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self.fail(context.get("exception") or BrokenPromiseError(context["message"]))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed


async def _awaited(future: Any) -> Any:
    return await future


async def _closing(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def _name(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=1)
    where = f" at line {stack[-1].f_lineno}" if stack else ""
    return f"{getattr(task.get_coro(), '__qualname__', '?')}{where}"


@contextmanager
def simulated(loop: Loop) -> Iterator[None]:
    """For the length of a block `adapters.system` answers by the clocks of the simulated process that asks, and by the seed.

    Events are hashed by their number, like tasks and futures.
    """
    random = loop.random
    event = asyncio.Event
    running, outside = _process.get, loop.outside
    stand_ins: dict[str, Callable[[], object]] = {
        "now": lambda: running(outside).wall(loop._now),
        "steady": lambda: running(outside).steady(loop._now),
        "stopwatch": loop.time,
        "cpu_seconds": loop.time,
        "new_incarnation": lambda: "".join(random.choices(INCARNATION_ALPHABET, k=INCARNATION_LENGTH)),
        "new_secret": lambda: f"{random.getrandbits(192):048x}",
        "chance": random.random,
    }
    originals = {name: vars(system)[name] for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(system, name, stand_in)
    asyncio.Event = _Event  # type: ignore[misc]
    try:
        yield
    finally:
        asyncio.Event = event  # type: ignore[misc]
        for name, original in originals.items():
            setattr(system, name, original)
