"""Real group members, driven by `cluster/group_member.py` in virtual time: processes freeze and die, the meta store is behind bad links.

`group.py` drives the state machine alone, and far faster. Here handlers are slow or fail, leases expire while the driver waits, and
asynchronous steps interleave in every order that they may have.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from simulation.group import HEARTBEAT, LINGERING, parameters_of
from simulation.group_checks import Tokens, check_overlap, check_rest
from simulation.logs import listening
from simulation.loop import Loop, Process, simulated
from simulation.meta import SharedMeta, SimMetaStore
from simulation.network_link import DIRECTIONS, Direction, Link, Roads
from simulation.planting import Bug, planted
from simulation.promises import BrokenPromiseError, InjectedMistakeError, check
from simulation.world import EventLog
from sluiceway.cluster.group_member import Change, Gained, GroupMember, define
from sluiceway.core.group import heartbeats, member, rounds
from sluiceway.core.group.group_records import Keys, Strategy, Token, read_group
from sluiceway.kernel.clock import Millis

KEYS = Keys("g")
CALM: Millis = 26_000
"""Fault-free time at the end, in milliseconds, within which the group must come to rest."""
QUIET: Millis = 10_000
"""Last part of the calm time, in which only heartbeats may happen."""
MAX_MEMBERS = 12
LARGE = [Bug("large", "Groups of two members are large.", module, "FEW", lambda _few: 1) for module in (heartbeats, member, rounds)]
GRACE: Millis = 2_000
"""Total time in which a member's handler must have been told of a lapse, in milliseconds."""


@dataclass
class Weather:
    """Faults of a history other than the links'. Counts are of the whole traffic phase, the others probabilities."""

    kills: int = 0
    freezes: int = 0
    cuts: int = 0
    leaves: int = 0
    joins: int = 0
    changes: int = 0
    slow_handlers: float = 0.0
    mistakes: float = 0.0


def weather_of(random: Random) -> Weather:
    pick = random.choice
    return Weather(
        kills=pick([0, 0, 1, 3]),
        freezes=pick([0, 3, 8]),
        cuts=pick([0, 2, 6]),
        leaves=pick([0, 1, 3]),
        joins=pick([0, 2, 5]),
        changes=pick([0, 2, 6]),
        slow_handlers=pick([0, 0, 0.05, 0.3]),
        mistakes=pick([0, 0, 0.1]),
    )


def roads_of(random: Random) -> Roads:
    pick = random.choice
    return Roads(
        slow=pick([1, 5, 50, 150]),
        refused=pick([0, 0, 0.05]),
        lost=pick([0, 0.03, 0.1]),
        late=pick([0, 0.03, 0.1]),
        unheard=pick([0, 0.03, 0.1]),
        latest=pick([3_000, 8_000]),
    )


@dataclass(eq=False)
class Actor:
    """Process with one member."""

    process: Process
    link: Link
    store: SimMetaStore
    member: GroupMember = field(init=False)
    using: dict[str, Token] = field(default_factory=dict)
    """Items that the handler was told are gained, until its call about the loss has returned."""
    seen: dict[str, Token] = field(default_factory=dict)
    """Items owned at the last check."""
    lapsed_at: Millis | None = None
    leaving: bool = False
    busy: bool = False
    """Whether a handler call is running."""

    @property
    def alive(self) -> bool:
        return not self.process.dead

    def owns(self) -> dict[str, Token]:
        return self.process.context.run(lambda: self.member.items) if self.alive else {}


class MemberWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        self.log = log
        self.loop = Loop(self.random)
        self.weather = weather_of(self.random)
        self.roads = roads_of(self.random)
        self.shared = SharedMeta()
        self.operator = SimMetaStore(self.shared, Link(self.loop, self.loop.outside, Roads()))
        self.actors: list[Actor] = []
        self.names = count(1)
        self.tokens = Tokens()
        self.is_large = seed % 3 == 2
        """Whether two members already go by the rules of large groups."""
        self.traffic = self.random.choice([8_000, 15_000, 25_000])
        self.items = [f"i{n:02}" for n in range(self.random.choice([0, 1, 5, 12, 24]))]
        self.strategy: Strategy = self.random.choice(["rounds", "rounds", "claims"])

    def live(self) -> None:
        with ExitStack() as stack:
            for rule in LARGE if self.is_large else ():
                stack.enter_context(planted(rule))
            self._live()

    def _live(self) -> None:
        with simulated(self.loop), listening(lambda line: self._note(line), self.loop.fail):
            self.loop.after_step = self._look
            try:
                self.loop.run_until_complete(self._history())
            finally:
                self.loop.close()

    # ---- the script -------------------------------------------------------------------------------------------

    async def _history(self) -> None:
        await self._define()
        for _ in range(self.random.randrange(1, 6)):
            self.loop.after(self.random.randrange(500), self._join)
        weather = self.weather
        script = (
            (weather.kills, self._kill),
            (weather.freezes, self._freeze),
            (weather.cuts, self._cut),
            (weather.leaves, self._leave),
            (weather.joins, self._join),
            (weather.changes, self._change),
        )
        for times, act in script:
            for _ in range(times):
                self.loop.after(self.random.randrange(self.traffic), act)
        await asyncio.sleep(self.traffic / 1000)
        self._calm()
        await asyncio.sleep((CALM - QUIET) / 1000)
        begun = self._rounds()
        await asyncio.sleep(QUIET / 1000)
        rounds = self._rounds() - begun
        check(rounds <= 1 + QUIET // HEARTBEAT, f"{rounds} rounds at rest")
        alive = self._alive()
        check_rest(self.shared.view, KEYS, {actor.member.name: actor.owns() for actor in alive})
        for actor in alive:
            check(actor.using == actor.owns(), f"{actor.process.name} was told of {actor.using}, and owns {actor.owns()}")

    def _note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.add(self.loop.now, parts)

    def _rounds(self) -> int:
        look = read_group(self.shared.view, KEYS, 0)
        return look.round.number if look.round else 0

    async def _define(self) -> None:
        self._note("the group divides", *self.items, "by", self.strategy)
        await define(self.operator, "g", self.items, strategy=self.strategy, parameters=parameters_of(self.random))

    def _calm(self) -> None:
        self._note("calm")
        self.roads.calm()
        self.weather = Weather()
        for actor in self.actors:
            actor.link.free(*DIRECTIONS)
        if all(actor.leaving for actor in self._alive()):
            self._join()

    def _alive(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive]

    def _some(self, most: int = 1) -> list[Actor]:
        alive = self._alive()
        return self.random.sample(alive, min(len(alive), self.random.randrange(1, most + 1)))

    def _join(self) -> None:
        if len(self.actors) >= MAX_MEMBERS:
            return
        rate = self.random.choice([0.9, 1.1, self.random.uniform(0.9, 1.1)])
        process = self.loop.add(Process(f"m{next(self.names)}", rate, self.random.randrange(10_000, 10_000_000)))
        link = Link(self.loop, process, self.roads)
        actor = Actor(process, link, SimMetaStore(self.shared, link))
        self._note(process.name, "joins")

        async def begin() -> None:
            actor.member = GroupMember(actor.store, "g", lambda change: self._handle(actor, change), name=process.name)
            self.actors.append(actor)
            await actor.member.join()

        self.loop.begin(process, begin())

    def _end(self, actor: Actor) -> None:
        if actor.alive:
            actor.seen = {}
            actor.using.clear()
            self.loop.kill(actor.process)

    def _kill(self) -> None:
        for actor in self._some():
            self._note(actor.process.name, "is killed")
            self._end(actor)

    def _leave(self) -> None:
        """Stop a member, in order or at once."""
        for actor in self._some():
            if actor.leaving:
                continue
            actor.leaving = True
            orderly = self.random.random() < 0.7
            self._note(actor.process.name, "leaves" if orderly else "stops")
            self.loop.begin(actor.process, self._go(actor, orderly=orderly))

    async def _go(self, actor: Actor, *, orderly: bool) -> None:
        await (actor.member.leave() if orderly else actor.member.stop())
        check(not actor.using and not actor.member.items, f"{actor.process.name} has gone and was not told that it lost {actor.using}")
        self._note(actor.process.name, "has gone")
        self.loop.after(0, lambda: self._end(actor))

    def _span(self) -> Millis:
        """Draw a fault's duration in milliseconds, near one of the timeouts that it may exceed."""
        span = self.random.choice([300, 1_000, 2_000, 2_600, 3_000, 3_600, 6_000, 7_500]) * self.random.uniform(0.9, 1.1)
        return min(int(span), self.traffic + LINGERING - self.loop.now)

    def _freeze(self) -> None:
        span = self._span()
        for actor in self._some(3):
            self._note(actor.process.name, "freezes for", span)
            actor.process.frozen = True
            self.loop.after(span, partial(self._thaw, actor))

    def _thaw(self, actor: Actor) -> None:
        actor.process.frozen = False
        actor.lapsed_at = None

    def _cut(self) -> None:
        span = self._span()
        ways: tuple[Direction, ...] = self.random.choice([DIRECTIONS, ("there",), ("back",)])
        for actor in self._some(3):
            self._note(actor.process.name, "is cut off for", span, *ways)
            actor.link.cut.update(ways)
            self.loop.after(span, partial(actor.link.free, *ways))

    def _change(self) -> None:
        kind = self.random.choice(["items", "there and back", "strategy", "times"])
        if kind == "strategy":
            self.strategy = self.random.choice(["rounds", "claims"])
        elif kind == "items":
            changed = {f"i{self.random.randrange(40):02}" for _ in range(self.random.randrange(1, 8))}
            self.items = sorted(changed.symmetric_difference(self.items))
        elif kind == "there and back" and self.items:
            before = self.items
            self.items = sorted(self.random.sample(before, len(before) // 3))
            self.loop.after(self.random.randrange(1, 1_500), lambda: self._put_back(before))
        self.loop.begin(self.loop.outside, self._define())

    def _put_back(self, items: list[str]) -> None:
        self.items = items
        self.loop.begin(self.loop.outside, self._define())

    # ---- handler ----------------------------------------------------------------------------------------------

    async def _handle(self, actor: Actor, change: Change) -> None:
        name = actor.process.name
        self._note(name, type(change).__name__.lower(), change.item)
        if isinstance(change, Gained):
            self._check(change.item not in actor.using, f"{name} gains {change.item} twice")
            self._check_alone(actor, change.item)
            actor.using[change.item] = change.token
        else:
            self._check(change.item in actor.using, f"{name} loses {change.item}, which it did not have")
        actor.busy = True
        try:
            if self.random.random() < self.weather.slow_handlers:
                await asyncio.sleep(self.random.choice([0.0, 0.05, 0.4, 1.2, 4.0]))
            if self.random.random() < self.weather.mistakes:
                raise InjectedMistakeError("the handler fails")
        finally:
            actor.busy = False
            if not isinstance(change, Gained):
                actor.using.pop(change.item, None)

    def _check_alone(self, actor: Actor, item: str) -> None:
        """Check that no other member with a live lease still uses the item. A gain may be reported late, after the own lease has
        expired."""
        for other in self._alive():
            alone = other is actor or item not in other.using or not (self._holds_lease(actor) and self._holds_lease(other))
            self._check(alone, f"{actor.process.name} gains {item} while {other.process.name} still uses it")

    def _holds_lease(self, actor: Actor) -> bool:
        return actor.process.steady(self.loop.seconds) < actor.member._lease_deadline

    def _check(self, holds: bool, promise: str) -> None:
        """End the run from outside: a member catches what its handler raises."""
        if not holds:
            self.loop.fail(BrokenPromiseError(promise))

    # ---- invariant checks -------------------------------------------------------------------------------------

    def _look(self, process: Process) -> None:
        """After each callback of a member's process: check that it owns its items alone, and that its tokens rise."""
        for actor in self.actors:
            if actor.process is process and actor.alive:
                owns = actor.owns()
                if owns != actor.seen:
                    self._note(process.name, "owns", *owns)
                    actor.seen = owns
                    check_overlap(((each.process.name, each.owns()) for each in self.actors), self.loop.now)
                    self.tokens.serve(actor.member.name, owns)
                self._check_lapse(actor, owns)

    def _check_lapse(self, actor: Actor, owns: dict[str, Token]) -> None:
        """Check that a member that owns nothing any more is told so in time."""
        if owns or not actor.using or actor.busy:
            actor.lapsed_at = None
        elif actor.lapsed_at is None:
            actor.lapsed_at = self.loop.now
        else:
            check(
                self.loop.now - actor.lapsed_at < GRACE, f"{actor.process.name} owns nothing, and was not told that it lost {actor.using}"
            )


def run_members(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    MemberWorld(seed, log).live()
