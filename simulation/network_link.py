"""The way from a simulated process to another, or to a store: it takes time, loses things, and is cut, in one direction or both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from simulation.loop import Loop, Process
from simulation.promises import BrokenPromiseError
from sluiceway.kernel.clock import Millis

T = TypeVar("T")
Direction = Literal["there", "back"]
DIRECTIONS: tuple[Direction, Direction] = ("there", "back")


class NotSentError(Exception):
    """The other end could not be reached: surely nothing was done."""


class NoAnswerError(Exception):
    """It was sent, and no answer came: it may be done, or be done yet."""


@dataclass
class Roads:
    """How bad the ways are: how long one takes, at most twice `slow`; how often a call fails in this way or that."""

    slow: Millis = 1
    refused: float = 0.0
    lost: float = 0.0
    """It never arrives."""
    late: float = 0.0
    """It arrives when the caller has given up, perhaps."""
    unheard: float = 0.0
    """It is done, and the answer is lost."""
    twice: float = 0.0
    """It is done twice: not what TCP does."""
    latest: Millis = 15_000

    def calm(self) -> None:
        """From now on all is well."""
        self.slow = 1
        self.refused = self.lost = self.late = self.unheard = self.twice = 0.0


class Link:
    """The calls of one process to one other, or (`target` None) to a store, which is outside of all.

    Without `withdraws` a call that has begun is carried to its end; with it, one whose caller gives up is cancelled at the other end.
    """

    def __init__(self, loop: Loop, caller: Process, roads: Roads, target: Process | None = None, *, withdraws: bool = False) -> None:
        self._loop = loop
        self._caller = caller
        self._target = target or loop.outside
        self._withdraws = withdraws
        self.roads = roads
        self.cut: set[Direction] = set()
        """Directions in which nothing passes. What is sent meanwhile is lost, or arrives once the way is free."""
        self._held: dict[Direction, list[Callable[[], object]]] = {"there": [], "back": []}
        self._unanswered: dict[asyncio.Future[Any], None] = {}

    async def call(self, work: Callable[[], Awaitable[T]], patience: Millis) -> T:
        """Do that at the other end: what it returns, or raises. `patience` is by the caller's clock. Raises NotSentError, NoAnswerError."""
        loop = self._loop
        if self._caller.dead or self._chance(self.roads.refused) or ("there" in self.cut and self._chance(0.5)):
            await self._a_moment()
            raise NotSentError
        answer: asyncio.Future[T] = loop.create_future()
        self._unanswered[answer] = None
        begun: list[asyncio.Task[None]] = []
        for _ in range(2 if self._chance(self.roads.twice) else 1):
            if not self._chance(self.roads.lost):
                late = loop.random.random() * self.roads.latest if self._chance(self.roads.late) else 0.0
                self._carry("there", self.delay() + late, lambda: begun.extend(self._begin(work, answer)))
            elif self._chance(0.5):
                loop.after(self.delay(), partial(_end, answer, NoAnswerError()))
        try:
            async with asyncio.timeout(patience / 1000):
                return await answer
        except TimeoutError:
            raise NoAnswerError from None
        finally:
            del self._unanswered[answer]
            answer.cancel()
            if self._withdraws:
                self._carry("there", self.delay(), lambda: [task.cancel() for task in begun])

    def hint(self, act: Callable[[], object]) -> None:
        """Something is told to the caller, which may come late, or not."""
        if not self._chance(self.roads.lost):
            late = self._loop.random.random() * self.roads.latest if self._chance(self.roads.late) else 0.0
            self._carry("back", self.delay() + late, act)

    async def _a_moment(self) -> None:
        await asyncio.sleep(self.delay() / 1000)

    def free(self, *directions: Direction) -> None:
        """What waited on the way arrives soon, or later."""
        for direction in directions:
            self.cut.discard(direction)
            held, self._held[direction] = self._held[direction], []
            for arrive in held:
                self._loop.after(self.delay() + self._loop.random.choice([0, 1_000]), arrive)

    def break_off(self) -> None:
        """The other end is gone: some of those who wait for an answer hear that there will be none."""
        for answer in self._unanswered:
            if self._chance(0.7):
                self._loop.after(self.delay(), partial(_end, answer, NoAnswerError()))

    def delay(self) -> float:
        return self._loop.random.random() * 2 * self.roads.slow

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self._loop.random.random() < probability

    def _carry(self, direction: Direction, delay: float, arrive: Callable[[], object]) -> None:
        def reach() -> None:
            if direction not in self.cut:
                arrive()
            elif self._chance(0.5):
                self._held[direction].append(arrive)

        self._loop.after(delay, reach)

    def _begin(self, work: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> list[asyncio.Task[None]]:
        if self._withdraws and answer.done():
            return []
        return [self._loop.begin(self._target, self._serve(work, answer))]

    async def _serve(self, work: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> None:
        try:
            result = await work()
        except BrokenPromiseError as error:
            self._loop.fail(error)
        except Exception as error:
            self._reply(partial(_end, answer, error))
        else:
            self._reply(partial(_end, answer, None, result))

    def _reply(self, tell: Callable[[], object]) -> None:
        if not self._chance(self.roads.unheard):
            self._carry("back", self.delay(), tell)


def _end(answer: asyncio.Future[Any], error: Exception | None, result: object = None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
