"""asyncio event loop in virtual time, which runs several simulated processes, each with its own clocks.

The loop never waits: when no callback is ready, it advances the time to the next timer. A run is a function of its seed alone. So code
under test must not depend on the iteration order of a set of strings, or of objects that are hashed by address. Tasks, futures and events
are hashed by serial number instead.
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
    # It has all methods, so a type checker accepts the loop as complete.
    _Base = asyncio.BaseEventLoop
else:
    # It rejects everything that is not implemented here: sockets, pipes, signals.
    _Base = asyncio.AbstractEventLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_STEPS = 2_000_000
"""Maximum callbacks of a history: more is an endless loop."""
LAST_STEPS = 10_000
"""Maximum further callbacks while everything is cancelled at the end."""


class StuckError(BrokenPromiseError):
    """Deadlock (all tasks wait, and no timer is left) or livelock (callbacks without end)."""


class Process:
    """Simulated process: callbacks in order, and clocks of its own. A frozen process runs nothing while time passes; a dead one never runs
    again.

    `rate`: speed of its clocks relative to true time. It does not apply to the wall clock, which is `wall_ahead` milliseconds ahead of true
    time. `origin`: the steady clock's value at the beginning of the world, in milliseconds.
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
        """Convert true time to its steady clock, in seconds."""
        return self.origin / 1000 + true * self.rate

    def true(self, local: float) -> float:
        return (local - self.origin / 1000) / self.rate

    def steady(self, true: float) -> Millis:
        return int((self.origin / 1000 + true * self.rate) * 1000)

    def wall(self, true: float) -> Millis:
        """Value of `system.now` at true time `true` (seconds)."""
        wall, steady = (START + int(true * 1000) + self.wall_ahead) * 1_000_000, self.steady(true) * 1_000_000
        if self._clock is None:
            self._clock = Clock(wall, steady)
        return self._clock.read(wall, steady)


_process: ContextVar[Process] = ContextVar("process")
_serials = count()
"""Serial numbers of the most recently created loop."""


class _Task(asyncio.Task[Any]):
    """Hashed by serial number, so sets of tasks iterate in the same order in every process that replays a history."""

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
    """Runs one callback at a time. Callbacks of one process keep their order; with `shuffle`, `random` chooses the next process.

    An exception in a callback, or in a task that is never awaited, ends the run. There are no threads, files or sockets.
    """

    def __init__(self, random: Random, *, shuffle: bool = True, most_steps: int = MAX_STEPS) -> None:
        # Restarted, so that a history does not depend on earlier histories of this interpreter.
        globals()["_serials"] = count()
        self.random = random
        self.outside = Process("the world")
        """Pseudo-process of everything outside the simulated processes: stores, the network, fault injection."""
        self.processes: list[Process] = [self.outside]
        self.steps = 0
        self.after_step: Callable[[Process], None] | None = None
        """Invariant check, called after each callback of a process."""
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
        """True time since the beginning of the world, in milliseconds."""
        return int(self._now * 1000)

    @property
    def seconds(self) -> float:
        """True time in seconds, not rounded."""
        return self._now

    def add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def begin(self, process: Process, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start `work` as a task of the process."""
        return self.create_task(work, context=process.context.copy())

    def after(self, delay: float, act: Callable[[], object]) -> None:
        """Call `act` outside of all processes, after `delay` true milliseconds."""
        handle = asyncio.Handle(act, (), self, self.outside.context)
        heapq.heappush(self._timers, (self._now + max(0.0, delay) / 1000, next(self._order), handle, self.outside))

    def kill(self, process: Process) -> None:
        """Kill the process at once: no further callback, no `finally`. Its ports must check `process.dead` and fail too."""
        process.dead = True
        self.processes.remove(process)
        self._dead.append(process)

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first error wins. For checks inside code that catches exceptions."""
        if self._failure is None:
            self._failure = error

    @property
    def process(self) -> Process:
        """The process of the running code."""
        return _process.get(self.outside)

    # ---- running ----------------------------------------------------------------------------------------------

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Return the future's result. Raises its exception, StuckError, or that of a callback or a task that was never awaited."""
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
        # Kept alive: the garbage collector would close a generator at an arbitrary time.
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
        """Choose the next process, advancing time until one is ready."""
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
            # The attributes instead of the method: this runs before each callback.
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

    # ---- closing ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all remaining tasks, also of dead processes. Every process is marked dead first, so their ports have no effect."""
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

    # ---- asyncio loop interface -------------------------------------------------------------------------------

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
        """No-op: `_take_due` drops a cancelled timer when it is due."""

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
        """Run `func` synchronously."""
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
    """For the length of the block, `adapters.system` reads the clocks of the calling simulated process and draws from the seed.

    Events are hashed by serial number, like tasks and futures.
    """
    random = loop.random
    event = asyncio.Event
    running, outside = _process.get, loop.outside
    stand_ins: dict[str, Callable[[], object]] = {
        "now": lambda: running(outside).wall(loop._now),
        "steady": lambda: running(outside).steady(loop._now),
        "stopwatch": loop.time,
        # Never short of processor time.
        "cpu_seconds": lambda: 0.0,
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
