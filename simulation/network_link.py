"""Link from a simulated process to another one or to a store: it delays and loses messages, and can be cut in either direction."""

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
    """The other end was unreachable. Certainly nothing was done."""


class NoAnswerError(Exception):
    """The request was sent and no answer came. It may have been done, or may still be."""


@dataclass
class Roads:
    """Fault rates of links. A delivery takes up to twice `slow` milliseconds; the others are probabilities per call."""

    slow: Millis = 1
    refused: float = 0.0
    lost: float = 0.0
    """The request never arrives."""
    late: float = 0.0
    """The request is delayed by up to `latest` milliseconds, perhaps beyond the caller's timeout."""
    unheard: float = 0.0
    """The request is done and its answer is lost."""
    twice: float = 0.0
    """The request is done twice, which TCP itself would not do."""
    latest: Millis = 15_000

    def calm(self) -> None:
        """End all faults."""
        self.slow = 1
        self.refused = self.lost = self.late = self.unheard = self.twice = 0.0


class Link:
    """Calls from one process to another, or to a store outside of all processes (`target` None).

    Without `withdraws` a call that has begun runs to its end. With it, the other end cancels a call that the caller has given up.
    """

    def __init__(self, loop: Loop, caller: Process, roads: Roads, target: Process | None = None, *, withdraws: bool = False) -> None:
        self._loop = loop
        self._caller = caller
        self._target = target or loop.outside
        self._withdraws = withdraws
        self.roads = roads
        self.cut: set[Direction] = set()
        """Directions that are cut. A message sent meanwhile is lost, or arrives after the cut."""
        self._held: dict[Direction, list[Callable[[], object]]] = {"there": [], "back": []}
        self._unanswered: dict[asyncio.Future[Any], None] = {}

    async def call(self, work: Callable[[], Awaitable[T]], patience: Millis) -> T:
        """Run `work` at the other end. `patience`: timeout by the caller's clock. Raises its exception, NotSentError, NoAnswerError."""
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
        """Send the caller a hint, which may be late or lost."""
        if not self._chance(self.roads.lost):
            late = self._loop.random.random() * self.roads.latest if self._chance(self.roads.late) else 0.0
            self._carry("back", self.delay() + late, act)

    async def _a_moment(self) -> None:
        await asyncio.sleep(self.delay() / 1000)

    def free(self, *directions: Direction) -> None:
        """End the cut of these directions. Held messages arrive now or after up to a second."""
        for direction in directions:
            self.cut.discard(direction)
            held, self._held[direction] = self._held[direction], []
            for arrive in held:
                self._loop.after(self.delay() + self._loop.random.choice([0, 1_000]), arrive)

    def break_off(self) -> None:
        """Fail some of the unanswered calls with NoAnswerError, because the other end is gone."""
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
