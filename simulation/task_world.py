"""Simulated task group: a change stream, a log that loses, delays and duplicates appended records, and an election.

Processes are killed, paused as a whole, or paused while their readers keep running. Two members may be elected leader at once, some fold
slowly, and snapshots and trimming of the log happen at any time. `tasks_checks` has the invariants.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from simulation.promises import check
from simulation.tasks_actor import Actor
from simulation.tasks_checks import TruthLog
from simulation.tasks_stream import POINTS, Positions, Stream
from simulation.world import EventLog
from sluiceway.core.group.task_member import ChildrenFound, Elected, Going, Pace, Prepared, Preset, SeedsFound, TaskMember
from sluiceway.core.group.task_parts import RECORD_BYTES, cut_snapshot
from sluiceway.core.group.task_state import CancelMove, Move, Record
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import Group

PACE = Pace(repeat_after=150, reopen_after=60, patience=1_500)
SESSION: Millis = 250
"""The election drops a member after this long without contact, in milliseconds."""
TURN: Millis = 30
SWEEP: Millis = 60
CALM: Millis = 12_000
"""Maximum fault-free time, in milliseconds, until the group rests, or commits more of the stream: barriers are crossed one by one."""
QUIET: Millis = 500
"""Milliseconds without an appended record that count as rest."""
MAX_ACTORS = 12


@dataclass
class Weather:
    """Faults of a history: counts, probabilities, and `slow` in milliseconds."""

    lost: float = 0.0
    doubled: float = 0.0
    slow: Millis = 5
    kills: int = 0
    freezes: int = 0
    deafs: int = 0
    leaves: int = 0
    joins: int = 0
    rivals: float = 0.0
    whims: int = 0
    """Number of arbitrary moves that the leader decides, most of them soon cancelled."""
    snapshots: int = 0
    forgetful: float = 0.0
    """Probability that the election forgets its generation."""
    laggards: float = 0.0
    early: float = 0.2
    """Share of partitions whose children are known before they end."""
    steps: int = 0
    """Minimum number of splits and merges."""
    breaks: bool = False
    """Whether readers break off, openings fail and positions are unknown."""


def weather_of(random: Random) -> Weather:
    pick = random.choice
    theme = random.random()
    if theme < 0.15:
        # Members come and go while records about them are in flight.
        return Weather(slow=150, lost=pick([0.0, 0.2]), kills=2, leaves=9, joins=11, laggards=0.8, early=0.1, steps=16)
    if theme < 0.3:
        # Old records arrive again.
        return Weather(slow=pick([50, 150]), doubled=0.9, freezes=pick([0, 2]), snapshots=4, early=1.0)
    if theme < 0.4:
        # Two members are repeatedly told that they lead.
        return Weather(slow=150, joins=6, leaves=3, kills=1, freezes=2, rivals=0.8, whims=20, forgetful=pick([0.0, 0.3]))
    return Weather(
        lost=pick([0.0, 0.1, 0.4]),
        doubled=pick([0.0, 0.2, 0.6]),
        slow=pick([1, 5, 50, 150]),
        kills=pick([0, 0, 1, 3]),
        freezes=pick([0, 2, 6]),
        deafs=pick([0, 2, 6]),
        leaves=pick([0, 1, 3]),
        joins=pick([0, 2, 5]),
        rivals=pick([0.0, 0.3]),
        whims=pick([0, 0, 20]),
        snapshots=pick([0, 4, 12]),
        forgetful=pick([0.0, 0.0, 0.1]),
        laggards=pick([0.0, 0.4]),
        breaks=pick([False, True]),
    )


def run_tasks(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    TasksWorld(seed, log).live()


class TasksWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        self.events = log
        self.weather = weather_of(self.random)
        moves = Random(f"moves {seed}")
        self.stream = Stream(self.random, self.weather.early, self.weather.steps, moves if moves.random() < 0.5 else None)
        self.positions = Positions()
        self.log = TruthLog(self.stream, self.positions)
        self.record_bytes = moves.choice([200, 1_000, RECORD_BYTES])
        """Where records are cut into parts."""
        self.preset: Preset = self.random.choice(["log-leader", "finisher-hint"])
        self.traffic: Millis = self.random.choice([500, 1_500, 3_000])
        self.now: Millis = 0
        self.happened = 0
        self.heap: list[tuple[Millis, int, Callable[[], None]]] = []
        self.order = count()
        self.names = count(1)
        self.news = count(1)
        self.actors: list[Actor] = []
        self.group: dict[str, Millis] = {}
        """Members of the election, and when each was last heard from."""
        self.generation = 0
        self.leader = ""
        self.appended_at: Millis = 0

    # ---- the script -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        weather, at = self.weather, self.random.randrange
        self.note(weather, self.preset)
        for _ in range(at(1, 5)):
            self.after(at(200), self._start)
        script = (
            (weather.kills, self._kill),
            (weather.freezes, self._freeze),
            (weather.deafs, self._deafen),
            (weather.leaves, self._leave),
            (weather.joins, self._join),
            (weather.whims, self._whim),
            (weather.snapshots, self._snapshot),
            (weather.snapshots, self._trim),
            (sum(part.early for part in self.stream.parts.values()), self._tell_children),
            (1 if self.random.random() < 0.5 else 0, self._tell_seeds),
        )
        for times, act in script:
            for _ in range(times):
                self.after(at(self.traffic), act)
        self.after(0, self._sweep)
        self._until(self.traffic)
        self._calm()
        self._rest()
        self.note("all may end")
        self.stream.held = False
        self._tell_seeds()
        self._rest()
        self._check_end()

    def _check_end(self) -> None:
        left = sorted(self.log.state.partitions)
        check(not left, f"L2: {left} are left at the end of the stream")
        missing = sorted(self.stream.parts.keys() - self.log.finished)
        check(not missing, f"L1: {missing} have not finished")
        state = self.log.state
        check(not state.given and not state.awaited, f"L7: handoffs are left: {state.given} given, {state.awaited} awaited")
        self.log.check_restore()

    def after(self, delay: Millis, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.order), act))

    def _until(self, end: Millis) -> None:
        while self.heap and self.heap[0][0] <= end:
            self.now, _, act = heapq.heappop(self.heap)
            self.happened += 1
            act()
        self.now = end

    def _calm(self) -> None:
        self.note("calm")
        self.weather = Weather()
        for actor in self.actors:
            actor.frozen_until = actor.deaf_until = 0
            actor.lagging, actor.most = False, 100
        if all(actor.going for actor in self.alive()):
            self._start()
        self._change_group()

    def _rest(self) -> None:
        """Run until the group is at rest. Raises BrokenPromiseError if it does not get there."""
        deadline, done = self.now + CALM, self._done()
        unrest: str | None = "it has only begun"
        while unrest is not None or self.now - self.appended_at < QUIET:
            check(self.now < deadline, unrest or "B1: records are appended without end")
            self._until(self.now + 100)
            if self._done() > done:
                deadline, done = self.now + CALM, self._done()
            end = len(self.log.history) - 1
            unrest = self.log.unrest({actor.name: actor.member.state.seq == end for actor in self.alive()})
            if unrest is None and not self.stream.held and self.log.state.partitions:
                unrest = f"L2: {sorted(self.log.state.partitions)} are left"

    def _done(self) -> int:
        """How much of the stream is committed: records, and partitions at their end."""
        return sum(self.log.positions.committed.values()) + len(self.log.finished)

    # ---- fault injection --------------------------------------------------------------------------------------------

    def alive(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead and not actor.left]

    def _one(self) -> list[Actor]:
        alive = self.alive()
        return [self.random.choice(alive)] if alive else []

    def _join(self) -> None:
        if len(self.actors) < MAX_ACTORS:
            self._start()

    def _start(self) -> None:
        member = TaskMember(f"m{next(self.names)}", self.preset, PACE, record_bytes=self.record_bytes)
        most = self.random.choice([1, 3, 100])
        actor = Actor(member, len(self.log.history) - 1, most, lagging=self.random.random() < self.weather.laggards)
        self.note(actor.name, "starts")
        self.actors.append(actor)
        self.call(actor, Prepared(actor.began_end))
        self._turn(actor)

    def _turn(self, actor: Actor) -> None:
        if not actor.dead and not actor.left:
            actor.turn(self)
            self.after(self.random.randrange(TURN // 2, TURN * 2), lambda: self._turn(actor))

    def _kill(self) -> None:
        for actor in self._one():
            self.note(actor.name, "is killed")
            actor.dead = True

    def _freeze(self) -> None:
        for actor in self._one():
            actor.frozen_until = self.now + self.random.choice([50, SESSION, 2 * SESSION, 4 * SESSION])
            self.note(actor.name, "stands still until", actor.frozen_until)

    def _deafen(self) -> None:
        for actor in self._one():
            actor.deaf_until = self.now + self.random.choice([50, SESSION, 2 * SESSION, 4 * SESSION])
            self.note(actor.name, "hears nothing and reads on until", actor.deaf_until)

    def _leave(self) -> None:
        for actor in self._one():
            self.note(actor.name, "is to leave")
            actor.going = True
            actor.mail.append(Going())

    def _whim(self) -> None:
        """Append an arbitrary move, and often its cancellation soon after."""
        state = self.log.state
        owned = [token for token, each in state.partitions.items() if each.owner]
        if not owned or not state.leader:
            return
        token, to = self.random.choice(owned), self.random.choice(state.members)
        self.append(state.leader, Move(state.term, {token: to}))
        if self.random.random() < 0.7:
            cancel = CancelMove(state.term, (token,))
            self.after(self.some(3 * TURN), lambda: self.append(state.leader, cancel))

    def _snapshot(self) -> None:
        for actor in self._one():
            parts = cut_snapshot(actor.member.state, self.record_bytes)
            # One call appends them: in order, all or some.
            parts = [part for part in parts if not self.chance(self.weather.lost / len(parts))]
            self.after(self.some(self.weather.slow + 1), partial(self._land_all, actor.name, parts))

    def _trim(self) -> None:
        self.note("the log is trimmed up to", self.log.trim())
        self.log.check_restore()

    def _tell_children(self) -> None:
        """Announce the children of a partition that has not ended yet."""
        parts = [self.stream.parts[token] for token in self.log.state.unfinished()]
        early = [part.token for part in parts if part.early and part.children]
        if early:
            token = self.random.choice(early)
            for actor in self.alive():
                actor.mail.append(ChildrenFound(token, self.stream.children(token)))

    def _tell_seeds(self) -> None:
        """Announce seeds without a request."""
        self.stream.late_known = self.stream.late
        upto, seeds = self.stream.seeds(POINTS[1])
        for actor in self.alive():
            actor.mail.append(SeedsFound(POINTS[1], upto, seeds))

    # ---- election ---------------------------------------------------------------------------------------------------

    def joins_group(self, actor: Actor) -> None:
        self.note(actor.name, "joins")
        actor.in_group = True
        self.group[actor.name] = self.now
        self._change_group()

    def leaves_group(self, actor: Actor) -> None:
        self.note(actor.name, "has left")
        if self.group.pop(actor.name, None) is not None:
            self._change_group()

    def _sweep(self) -> None:
        """Drop members that were not heard from; members that are back join again."""
        self.after(SWEEP, self._sweep)
        changed = False
        for actor in self.actors:
            heard = actor.in_group and not actor.dead and not actor.left and self.now >= max(actor.frozen_until, actor.deaf_until)
            if heard:
                changed = changed or actor.name not in self.group
                self.group[actor.name] = self.now
        for name in [name for name, at in self.group.items() if self.now - at > SESSION]:
            del self.group[name]
            changed = True
        if changed:
            self._change_group()

    def _change_group(self) -> None:
        self.generation = 1 if self.chance(self.weather.forgetful) else self.generation + 1
        members = tuple(self.group)
        if members and (self.leader not in members or self.chance(0.2)):
            self.leader = self.random.choice(members)
        rival = self.random.choice(members) if members and self.chance(self.weather.rivals) else ""
        self.note("generation", self.generation, self.leader, "leads", members, "rival:", rival)
        for actor in self.alive():
            if actor.name in members:
                led_by = actor.name if actor.name == rival else self.leader
                self._tell(actor, next(self.news), Group(self.generation, led_by, members))

    def _tell(self, actor: Actor, number: int, group: Group) -> None:
        def lands() -> None:
            if number > actor.told:
                actor.told = number
                actor.mail.append(Elected(group))

        self.call(actor, lands)

    # ---- environment of the processes -----------------------------------------------------------------------------

    def append(self, author: str, record: Record) -> None:
        if self.chance(self.weather.lost):
            return
        self.after(self.some(self.weather.slow + 1), lambda: self._lands(author, record))
        if self.chance(self.weather.doubled):
            self.after(self.some(self.random.choice([1, 1, 20]) * self.weather.slow + 1), lambda: self._lands(author, record))

    def _land_all(self, author: str, records: Sequence[Record]) -> None:
        for record in records:
            self._lands(author, record)

    def _lands(self, author: str, record: Record) -> None:
        self.appended_at = self.now
        counts = self.log.append(author, record)
        self.note(len(self.log.history) - 1, "of", author, "counts:" if counts else "does not count:", record)
        if type(record).__name__ == "Release" and counts:
            self._check_drained(record.token, record.grant)  # type: ignore[union-attr]

    def _check_drained(self, token: str, grant: int) -> None:
        self.log.released.add((token, grant))
        for actor in self.alive():
            check((token, grant) not in actor.runs, f"S12: {actor.name} still reads {token} under {grant}, which is released")

    def call(self, actor: Actor, done: object) -> None:
        """Complete an asynchronous call. An event goes to the process; a callback runs in any case."""
        act = done if callable(done) else lambda: actor.mail.append(done)  # type: ignore[arg-type]
        self.after(1 + self.some(self.weather.slow + 1), act)

    def later(self, done: Callable[[], object]) -> None:
        """Complete an abandoned call: its effect comes late, and its result goes nowhere."""

        def lands() -> None:
            done()
            self.log.check_watermark()

        self.after(self.some(20 * self.weather.slow + 1), lands)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def breaks(self, probability: float) -> bool:
        return self.weather.breaks and self.chance(probability)

    def some(self, most: int) -> int:
        return self.random.randrange(most)

    def alarm(self, actor: Actor, token: str, why: str) -> None:
        """Act as the operator: restart the process."""
        self.note(actor.name, "raises an alarm about", token, why)
        actor.dead = True
        self._start()

    def note(self, *parts: object) -> None:
        if self.events is not None:
            self.events.add(self.now, parts)
