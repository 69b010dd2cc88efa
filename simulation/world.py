"""Virtual time: an event heap, fault rates, and a wall clock that a fault can set."""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from simulation.promises import check
from sluiceway.core.queue.tickets import Ticket
from sluiceway.kernel.clock import Millis
from sluiceway.model.requests import Produce

START: Millis = 1_000_000_000_000
MAX_JUMP = 30_000
"""Maximum distance, in milliseconds, to which a fault sets the wall clock ahead of or behind true time."""

MAX_CYCLES_AT_ONCE = 1_000


@dataclass
class Weather:
    """Fault rates of a history. `kills` to `redrives` are counts over the traffic phase, `slow` a latency in milliseconds, the others
    probabilities per operation. All zero: no faults."""

    refused: float = 0
    unknown: float = 0
    hang: float = 0
    open_fails: float = 0
    transfer_fails: float = 0
    cancels: float = 0
    lost_replies: float = 0
    kills: int = 0
    stops: int = 0
    power_cuts: int = 0
    outages: int = 0
    damages: int = 0
    jumps: int = 0
    mistakes: int = 0
    hangs: int = 0
    ghosts: int = 0
    pauses: int = 0
    updates: int = 0
    redrives: int = 0
    slow: Millis = 10


def weather_of(random: Random) -> Weather:
    pick = random.choice
    return Weather(
        refused=pick([0, 0, 0.02, 0.2]),
        unknown=pick([0, 0.02, 0.1, 0.3]),
        hang=pick([0, 0, 0.01, 0.03]),
        open_fails=pick([0, 0, 0.3, 0.7]),
        transfer_fails=pick([0, 0.2, 0.5]),
        cancels=pick([0, 0, 0.05, 0.2]),
        lost_replies=pick([0, 0, 0.05]),
        kills=pick([0, 0, 1, 3]),
        stops=pick([0, 1, 2]),
        power_cuts=pick([0, 0, 1, 3]),
        outages=pick([0, 0, 1]),
        damages=pick([0, 0, 1, 3]),
        jumps=pick([0, 0, 1, 4]),
        mistakes=pick([0, 0, 1, 2]),
        hangs=pick([0, 0, 1, 3]),
        ghosts=pick([0, 0, 1]),
        pauses=pick([0, 0, 1]),
        updates=pick([0, 0, 2]),
        redrives=pick([0, 3, 8]),
        slow=pick([1, 10, 10, 200]),
    )


class EventLog:
    """Event trace as text: the last `keep` lines (None: all), and a hash of every line."""

    def __init__(self, keep: int | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=keep)
        self._hash = hashlib.sha256()

    def add(self, at: Millis, parts: Iterable[object]) -> None:
        line = f"{at:>7} " + " ".join(map(_text, parts))
        self.lines.append(line)
        self._hash.update(line.encode() + b"\n")

    def digest(self) -> str:
        return self._hash.hexdigest()


def _text(part: object) -> str:
    if isinstance(part, Ticket):
        return f"{type(part.request).__name__.lower()} {part.number}"
    return f"{part.batch.num_rows} items, key {part.key}" if isinstance(part, Produce) else str(part)


class Actor(Protocol):
    """Takes a cycle after events, and at its own wake-up time."""

    dirty: bool
    """Whether anything has happened to it since its last cycle."""
    wake: Millis | None
    """Time of its next timer, in true milliseconds. None without one."""

    def cycle(self) -> None: ...


class World:
    """True time and the future events of a history. All randomness comes from the seed."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.weather = weather_of(self.random)
        self.log = log
        self.now = START
        self.wall_ahead: Millis = 0
        self.actors: tuple[Actor, ...] = ()
        self.ambush: list[Callable[[], None]] = []
        """Faults that strike at the next moment in which a commit is written but neither durable nor answered."""
        self.happened = 0
        """Events so far: heap events, and cycles caused by an actor's timer."""
        self._events: list[tuple[Millis, int, Callable[[], None]]] = []
        self._count = 0
        self._cycles_now = 0
        # The driver batches requests of one moment into a cycle. Commits that end together may each get a cycle.
        self._eager = self.random.random() < 0.3
        self.note(self.weather)

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.add(self.now - START, parts)

    def after(self, delay: Millis, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def latency(self) -> Millis:
        """Draw the duration of a store operation, in milliseconds."""
        if self.chance(self.weather.hang):
            return self.random.randint(1_000, 45_000)
        return int(self.random.random() * (self.weather.slow + 1))

    def spring(self) -> None:
        if self.ambush:
            self.after(0, self.ambush.pop())

    def set_wall_clock(self, ahead: Millis) -> None:
        self.note("the wall clock is set to", ahead, "ms ahead")
        self.wall_ahead = ahead

    # ---- passage of time --------------------------------------------------------------------------------------

    def run(self, until: Millis) -> None:
        """Run all events due until `until`. Every moment with an event ends with the cycles of the actors that it affected."""
        while True:
            moment = self._next_moment()
            if moment > until:
                self.now = max(self.now, until)
                return
            self._pass_to(moment)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
                self.happened += 1
                if self._eager:
                    self._cycles()
            self._cycles()

    def _next_moment(self) -> Millis:
        moment = self._events[0][0] if self._events else self.now + 10**12
        for actor in self.actors:
            if actor.dirty:
                return self.now
            if actor.wake is not None and actor.wake < moment:
                moment = actor.wake
        return max(self.now, moment)

    def _pass_to(self, moment: Millis) -> None:
        self._cycles_now = self._cycles_now + 1 if moment == self.now else 0
        check(self._cycles_now < MAX_CYCLES_AT_ONCE, "a queue runs cycles without end")
        self.now = moment

    def _cycles(self) -> None:
        for actor in self.actors:
            if actor.dirty:
                actor.cycle()
            elif actor.wake is not None and actor.wake <= self.now:
                self.happened += 1
                actor.cycle()
