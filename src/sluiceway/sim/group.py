"""A group in a simulated world: members with clocks of their own, a meta store that is slow, deaf or away, crashes and pauses.

The invariants: no two members serve an item at one time; an item's grants rise with each change of owner; and once the weather is
calm, every item is served, evenly, by who the plan says.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

import msgspec

from sluiceway.core.assignment.group import Keys, Parameters, Resource, Strategy, Writes, read_group
from sluiceway.core.assignment.member import Member
from sluiceway.kernel.clock import Millis
from sluiceway.ports.meta_store import Entry, Stamp, View
from sluiceway.sim.checks import check

KEYS = Keys("g")
CALM: Millis = 60_000
"""Time without faults at the end, in which everything must come to rest."""


class ModelStore:
    """What a MetaStore does, at once and without a fault."""

    def __init__(self) -> None:
        self.stamp: Stamp = 0
        self.entries: dict[str, Entry] = {}
        self.touched: dict[str, Stamp] = {}

    def read(self) -> View:
        return View(self.stamp, dict(self.entries))

    def commit(self, writes: Writes) -> bool:
        for key, stamp in writes.checks.items():
            entry = self.entries.get(key)
            if (entry.stamp if entry else None) != stamp:
                return False
        for prefix, since in writes.unchanged.items():
            if any(key.startswith(prefix) and at > since for key, at in self.touched.items()):
                return False
        self.stamp += 1
        for key, value in writes.puts.items():
            self.entries[key] = Entry(value, self.stamp)
        for key in writes.deletes:
            self.entries.pop(key, None)
        self.touched.update(dict.fromkeys([*writes.puts, *writes.deletes], self.stamp))
        return True


@dataclass
class Actor:
    """A process with a member in it. Its clock runs at its own rate from its own beginning."""

    member: Member
    rate: float
    offset: Millis
    served: dict[str, int] = field(default_factory=dict)
    deadline: Millis = 0
    dead: bool = False
    left: bool = False
    paused_until: Millis = 0
    cut_until: Millis = 0
    """Its way to the store is cut: what it asks has no answer, though it may land."""

    def clock(self, now: Millis) -> Millis:
        return self.offset + int(now * self.rate)

    def serves(self, now: Millis) -> dict[str, int]:
        return {} if self.dead or self.clock(now) >= self.deadline else self.served


@dataclass
class Faults:
    """How bad the weather is. `drift`: how far clocks may run from the true rate; leases must outlast twice as much."""

    slow: Millis = 5
    unknown: float = 0.0
    kills: int = 0
    pauses: int = 0
    cuts: int = 0
    leaves: int = 0
    joins: int = 0
    changes: int = 0
    drift: float = 0.05


def faults_of(random: Random) -> Faults:
    pick = random.choice
    return Faults(
        slow=pick([1, 5, 50, 400]),
        unknown=pick([0.0, 0.05, 0.3]),
        kills=pick([0, 1, 3]),
        pauses=pick([0, 2, 6]),
        cuts=pick([0, 2, 5]),
        leaves=pick([0, 1, 3]),
        joins=pick([0, 1, 4]),
        changes=pick([0, 1, 4]),
    )


def parameters_of(random: Random) -> Parameters:
    lease_timeout = random.choice([2_000, 2_000, 4_000])
    return Parameters(
        settle_timeout=random.choice([0, 50, 200]),
        round_interval=random.choice([0, 100, 1_000]),
        heartbeat_interval=15_000,
        beat_interval=random.choice([200, 500, 900]),
        lease_timeout=lease_timeout,
        member_timeout=lease_timeout * random.choice([5, 5, 6]) // 4,
    )


class GroupWorld:
    """One history, wholly determined by its seed. `make` makes the members; `run` raises a BrokenPromiseError at what must not be."""

    def __init__(self, seed: int, make: Callable[[Keys, str], Member] = Member) -> None:
        self.random = Random(seed)
        self.faults = faults_of(self.random)
        self.make = make
        self.store = ModelStore()
        self.now: Millis = 0
        self.heap: list[tuple[Millis, int, Callable[[], None]]] = []
        self.order = count()
        self.names = count(1)
        self.actors: list[Actor] = []
        self.grants: dict[str, tuple[tuple[int, int], str]] = {}
        self.events = 0
        self.traffic = self.random.choice([5_000, 20_000, 60_000])
        items = tuple(f"i{n:02}" for n in range(self.random.choice([0, 1, 5, 24])))
        strategy: Strategy = self.random.choice(["rounds", "claims"])
        self._put_resource(Resource(items=items, strategy=strategy, parameters=parameters_of(self.random)))

    # ---- the script -------------------------------------------------------------------------------------------

    def run(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.at(self.random.randrange(500), self._join)
        script = (
            (self.faults.kills, self._kill),
            (self.faults.pauses, self._pause),
            (self.faults.cuts, self._cut),
            (self.faults.leaves, self._leave),
            (self.faults.joins, self._join),
            (self.faults.changes, self._change),
        )
        for times, act in script:
            for _ in range(times):
                self.at(self.random.randrange(self.traffic), act)
        self.at(self.traffic, self._calm)
        self._until(self.traffic + CALM)
        self._check_rest()

    def at(self, when: Millis, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, next(self.order), act))

    def _until(self, end: Millis) -> None:
        while self.heap and self.heap[0][0] <= end:
            self.now, _, act = heapq.heappop(self.heap)
            self.events += 1
            act()
            self._check_overlap()

    def _calm(self) -> None:
        self.faults = Faults(slow=5)
        if not any(self._alive()):
            self._join()

    def _alive(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead and not actor.left]

    def _some(self) -> Actor | None:
        alive = self._alive()
        return self.random.choice(alive) if alive else None

    def _join(self) -> None:
        drift = self.faults.drift
        actor = Actor(
            self.make(KEYS, f"m{next(self.names)}"), self.random.uniform(1 - drift, 1 + drift), self.random.randrange(10_000, 10_000_000)
        )
        self.actors.append(actor)
        self._ask(actor)

    def _kill(self) -> None:
        if actor := self._some():
            actor.dead = True

    def _leave(self) -> None:
        if actor := self._some():
            actor.member.leave()

    def _pause(self) -> None:
        if actor := self._some():
            actor.paused_until = self.now + self.random.choice([500, 2_500, 4_000, 15_000])

    def _cut(self) -> None:
        if actor := self._some():
            actor.cut_until = self.now + self.random.choice([300, 2_000, 4_000, 10_000])

    def _change(self) -> None:
        entry = self.store.entries[KEYS.resource]
        resource = msgspec.json.decode(entry.value, type=Resource)
        items = set(resource.items)
        items ^= {f"i{self.random.randrange(40):02}" for _ in range(self.random.randrange(1, 8))}
        era, strategy = resource.era, resource.strategy
        if self.random.random() < 0.3:
            era, strategy = era + 1, self.random.choice(["rounds", "claims"])
        version = resource.version + 1
        self._put_resource(msgspec.structs.replace(resource, items=tuple(sorted(items)), version=version, era=era, strategy=strategy))

    def _put_resource(self, resource: Resource) -> None:
        writes = Writes()
        writes.put(KEYS.resource, resource)
        check(self.store.commit(writes), "the resource is written")

    # ---- a member's loop --------------------------------------------------------------------------------------

    def _delay(self) -> Millis:
        return self.random.randrange(1, 2 * self.faults.slow)

    def _awake(self, actor: Actor, act: Callable[[], None]) -> None:
        """Do it now, or when the process runs again; never if it is dead."""
        if actor.dead:
            return
        if actor.paused_until > self.now:
            self.at(actor.paused_until, lambda: self._awake(actor, act))
            return
        act()

    def _ask(self, actor: Actor) -> None:
        """Read the group; the view is of some moment between the question and its coming."""
        if actor.cut_until > self.now:
            self.at(self.now + 200, lambda: self._awake(actor, lambda: self._ask(actor)))
            return

        def read() -> None:
            view = self.store.read()
            self.at(self.now + self._delay(), lambda: self._awake(actor, lambda: self._saw(actor, view)))

        self.at(self.now + self._delay(), read)

    def _saw(self, actor: Actor, view: View) -> None:
        now = actor.clock(self.now)
        look = read_group(view, KEYS, now)
        decision = actor.member.look(look)
        actor.served, actor.deadline = dict(decision.owned), decision.lease_deadline
        self._check_grants(actor, look.resource)
        if decision.left:
            actor.left = True
            actor.served = {}
            return
        if decision.writes is not None:
            self._commit(actor, decision.writes)
            return
        wait = max(1, int((decision.wake_at - now) / actor.rate) + 1)
        # Hints come, or not.
        hint = self.random.randrange(1, wait + 1) if self.random.random() < 0.5 else wait
        self.at(self.now + hint, lambda: self._awake(actor, lambda: self._ask(actor)))

    def _commit(self, actor: Actor, writes: Writes) -> None:
        def again() -> None:
            self._awake(actor, lambda: self._ask(actor))

        if self.random.random() < self.faults.unknown or actor.cut_until > self.now:
            # It lands, or not, now or much later; the member is told nothing.
            if self.random.random() < 0.6:
                self.at(self.now + self.random.choice([1, 100, 3_000, 8_000]), lambda: void(self.store.commit(writes)))
            self.at(self.now + self._delay() + 100, again)
            return
        self.at(self.now + self._delay(), lambda: void(self.store.commit(writes)))
        self.at(self.now + 2 * self.faults.slow + self._delay(), again)

    # ---- what must hold ---------------------------------------------------------------------------------------

    def _check_overlap(self) -> None:
        serving: dict[str, str] = {}
        for actor in self.actors:
            for item in actor.serves(self.now):
                other = serving.setdefault(item, actor.member.name)
                check(other == actor.member.name, f"{item} is served by {other} and {actor.member.name} at {self.now}")

    def _check_grants(self, actor: Actor, resource: Resource | None) -> None:
        if resource is None or actor.clock(self.now) >= actor.deadline:
            return
        for item, grant in actor.served.items():
            token = (resource.era, grant)
            highest, owner = self.grants.get(item, ((0, 0), actor.member.name))
            promise = f"{actor.member.name} has {item} under {token}, after {owner} under {highest}"
            check(token > highest or (token == highest and owner == actor.member.name), promise)
            self.grants[item] = (token, actor.member.name)

    def _check_rest(self) -> None:
        alive = self._alive()
        if not alive:
            return
        resource = msgspec.json.decode(self.store.entries[KEYS.resource].value, type=Resource)
        counts = {actor.member.name: len(actor.serves(self.now)) for actor in alive}
        served = [item for actor in alive for item in actor.serves(self.now)]
        check(sorted(served) == list(resource.items), f"served at rest: {sorted(served)} of {resource.items}")
        check(max(counts.values()) - min(counts.values()) <= 1, f"uneven at rest: {counts}")


def void(_: object) -> None:
    """For calls whose answer nobody hears."""
