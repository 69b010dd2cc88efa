"""Simulated group: members with their own clocks, a meta store that is slow, silent or unreachable, crashes and pauses.

Faults are timed to hurt. Each lasts about as long as a lease or the member timeout, several may strike at once, and half of the pauses
strike just after a member's read or just before its commit. `group_checks` has the invariants.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Literal

import msgspec

from simulation.group_checks import Overlap, Tokens, check_commit, check_placing, check_rest
from simulation.group_loads import BALANCE, ItemLoads
from simulation.promises import check
from simulation.world import EventLog
from sluiceway.core.group import item_placement
from sluiceway.core.group.group_records import (
    GroupReader,
    GroupView,
    Keys,
    LoadReport,
    Parameters,
    Pin,
    Resource,
    Strategy,
    Token,
    Writes,
    decode_record,
    read_group,
)
from sluiceway.core.group.load_balance import Balancer, decides, noticeable, open_round, reports_of
from sluiceway.core.group.member import Member
from sluiceway.core.group.plan import queue_of
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.meta_store import Entry, Stamp, View

KEYS = Keys("g")
CALM: Millis = 26_000
"""Fault-free time at the end, in milliseconds, within which the group must come to rest."""
QUIET: Millis = 10_000
"""Last part of the calm time, in which only heartbeats may happen."""
LINGERING: Millis = 3_000
"""How far into the calm time earlier faults may last, in milliseconds."""
HEARTBEAT: Millis = 15_000
MAX_ACTORS = 15
PLAIN = frozenset({59, 242})
"""Histories without zones, loads and pins: they show planted bugs that hardly any other shows."""

Moment = Literal["look", "commit", "landed"]
MOMENTS: tuple[Moment, ...] = ("look", "commit", "landed")


class ModelStore:
    """Synchronous, fault-free model of a MetaStore."""

    def __init__(self) -> None:
        self.stamp: Stamp = 0
        self.entries: dict[str, Entry] = {}
        self.touched: dict[str, Stamp] = {}
        self.born: dict[str, Stamp] = {}
        """Stamp of each key's creation."""
        self._view = View(0, {})

    def read(self) -> View:
        """Return the current content. All readers between two commits share the view, and must not change it."""
        if self._view.stamp != self.stamp:
            self._view = View(self.stamp, dict(self.entries))
        return self._view

    def commit(self, writes: Writes) -> bool:
        for key, stamp in writes.checks.items():
            entry = self.entries.get(key)
            if (entry.stamp if entry else None) != stamp:
                return False
        for prefix, since in writes.unchanged.items():
            if any(key.startswith(prefix) and at > since for key, at in self.touched.items()):
                return False
        check(writes.puts.keys().isdisjoint(writes.deletes), "a commit writes a key twice")
        self.stamp += 1
        self.born.update(dict.fromkeys(writes.puts.keys() - self.entries.keys(), self.stamp))
        for key, value in writes.puts.items():
            self.entries[key] = Entry(value, self.stamp)
        for key in writes.deletes:
            self.entries.pop(key, None)
        self.touched.update(dict.fromkeys([*writes.puts, *writes.deletes], self.stamp))
        return True


class Looks:
    """Caches the decoded Look of each store state for all members and checks, which must not change it."""

    def __init__(self) -> None:
        self._reader = GroupReader(KEYS)
        self._looks: dict[Stamp, GroupView] = {}

    def of(self, view: View, seen_at: Millis) -> GroupView:
        look = self._looks.get(view.stamp)
        if look is None:
            look = self._looks[view.stamp] = self._reader.read(view, 0)
        return replace(look, seen_at=seen_at)

    def check_unchanged(self, view: View) -> None:
        """Check that no reader has changed a record or a look in place. Raises BrokenPromiseError."""
        check(self.of(view, 0) == read_group(view, KEYS, 0), "a member has changed a record in place")


@dataclass
class Actor:
    """Process with one member. Its clock has its own rate and origin."""

    member: Member
    rate: float
    offset: Millis
    served: dict[str, Token] = field(default_factory=dict)
    deadline: Millis = 0
    dead: bool = False
    leaving: bool = False
    left: bool = False
    paused_until: Millis = 0
    cut_until: Millis = 0
    """Until then it is cut off from the store: its commits may land, but it hears nothing."""
    mute_until: Millis = 0
    """Until then its reads work, and its commits may land but get no answer."""
    balancer: Balancer = field(default_factory=lambda: Balancer(BALANCE))
    reported: LoadReport | None = None
    doom: tuple[Moment, Millis] | None = None
    """Moment of the next round trip at which the process is paused, and for how long."""

    @property
    def name(self) -> str:
        return self.member.name

    def clock(self, now: Millis) -> Millis:
        return self.offset + int(now * self.rate)

    def serves(self, now: Millis) -> dict[str, Token]:
        # Cheap checks first: this runs for each actor after every event.
        return {} if not self.served or self.dead or self.clock(now) >= self.deadline else self.served


@dataclass
class Weather:
    """Faults of a history: counts, probabilities, and `slow` in milliseconds. `drift`: maximum relative error of a clock's rate."""

    slow: Millis = 5
    unknown: float = 0.0
    hang: float = 0.0
    kills: int = 0
    pauses: int = 0
    cuts: int = 0
    leaves: int = 0
    joins: int = 0
    changes: int = 0
    kinds: tuple[str, ...] = ("items", "there and back", "era", "times")
    """Kinds of resource change to draw from."""
    places: int = 0
    """Number of placements or removals of items without a round."""
    limits: int = 0
    """Number of changes to a queue's member limit."""
    zones: int = 1
    """Number of zones that members are in."""
    pins: int = 0
    """Number of changes to the pins of items."""
    loads: bool = False
    """Whether items have loads, which members report and level."""
    drift: float = 0.1


def weather_of(random: Random) -> Weather:
    pick = random.choice
    theme = random.random()
    if theme < 0.1:
        # The parameters change repeatedly, with processes paused at those moments.
        return Weather(slow=pick([1, 5, 50]), pauses=pick([4, 12]), joins=2, changes=10, kinds=("times",))
    if theme < 0.2:
        # Whole groups leave and others join; items are removed and come back.
        kinds = ("there and back", "items")
        return Weather(
            slow=pick([50, 200]), hang=pick([0.0, 0.2]), pauses=4, leaves=6, joins=6, changes=8, kinds=kinds, places=pick([0, 8])
        )
    if theme < 0.3:
        # Many processes place and remove items at once, while members join and leave.
        return Weather(slow=pick([5, 50, 200]), hang=pick([0.0, 0.2]), pauses=4, leaves=4, joins=6, changes=pick([0, 6]), places=30)
    if theme < 0.4:
        # Processes repeatedly change the queues' member limits.
        return Weather(slow=pick([5, 50, 200]), hang=pick([0.0, 0.2]), pauses=4, leaves=2, joins=4, places=20, limits=20)
    return Weather(
        slow=pick([1, 5, 50, 200]),
        unknown=pick([0.0, 0.05, 0.3]),
        hang=pick([0.0, 0.05, 0.2]),
        kills=pick([0, 0, 1, 3]),
        pauses=pick([0, 4, 12]),
        cuts=pick([0, 2, 6]),
        leaves=pick([0, 1, 4]),
        joins=pick([0, 2, 6]),
        changes=pick([0, 4, 10]),
        places=pick([0, 4, 16]),
        limits=pick([0, 0, 8]),
    )


def parameters_of(random: Random) -> Parameters:
    lease_timeout = random.choice([2_000, 2_000, 3_000, 6_000])
    return Parameters(
        settle_timeout=random.choice([0, 0, 50, 200]),
        round_interval=random.choice([0, 0, 100, 1_000]),
        heartbeat_interval=HEARTBEAT,
        beat_interval=random.choice([200, 500, 900]),
        lease_timeout=lease_timeout,
        member_timeout=lease_timeout * random.choice([5, 5, 6]) // 4,
    )


def run_group(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    GroupWorld(seed, log).live()


class GroupWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        # Of its own, so that histories without zones are as they were before there were any.
        self.zoning = Random(f"zones {seed}")
        zones, loads = self.zoning.choice([1, 1, 1, 2, 3]), self.zoning.choice([False, False, True])
        pins = self.zoning.choice([0, 0, 0, 12])
        self.weather = weather_of(self.random)
        if seed not in PLAIN:
            self.weather = replace(self.weather, zones=zones, loads=loads, pins=pins)
        self.log = log
        self.store = ModelStore()
        self.now: Millis = 0
        self.heap: list[tuple[Millis, int, Callable[[], None]]] = []
        self.order = count()
        self.names = count(1)
        self.placed = count(1)
        self.removed: set[str] = set()
        self.actors: list[Actor] = []
        self.tokens = Tokens()
        self.overlap = Overlap()
        self.looks = Looks()
        self.happened = 0
        self.traffic = self.random.choice([8_000, 15_000, 25_000])
        items = tuple(f"i{n:02}" for n in range(self.random.choice([0, 1, 5, 12, 24])))
        strategy: Strategy = self.random.choice(["rounds", "rounds", "claims"])
        most = self.zoning.choice([4, 12])
        self._put_resource(Resource(items=items, strategy=strategy, parameters=parameters_of(self.random), load_moves=most))
        self.loads = ItemLoads(seed if self.weather.loads else None)

    # ---- the script -------------------------------------------------------------------------------------------

    def live(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.at(self.random.randrange(500), self._join)
        weather = self.weather
        script = (
            (weather.kills, self._kill),
            (weather.pauses, self._pause),
            (weather.cuts, self._cut),
            (weather.leaves, self._leave),
            (weather.joins, self._join),
            (weather.changes, self._change),
            (weather.places, self._place),
            (weather.places // 2, self._remove),
            (weather.limits, self._limit),
        )
        for times, act in script:
            for _ in range(times):
                self.at(self.random.randrange(self.traffic), act)
        for _ in range(weather.pins):
            self.at(self.zoning.randrange(self.traffic), self._pin)
        self.at(self.traffic, self._calm)
        self._until(self.traffic + CALM - QUIET)
        begun = self._rounds()
        self._until(self.traffic + CALM)
        self.looks.check_unchanged(self.store.read())
        check(self._rounds() - begun <= 1 + QUIET // HEARTBEAT, f"{self._rounds() - begun} rounds at rest")
        self.loads.check_rest(self.looks.of(self.store.read(), 0))
        alive = {actor.name: actor.serves(self.now) for actor in self._alive()}
        check_rest(self.store.read(), KEYS, alive, {actor.name: actor.member.zone for actor in self._alive()})

    def at(self, when: Millis, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, next(self.order), act))

    def _until(self, end: Millis) -> None:
        while self.heap and self.heap[0][0] <= end:
            self.now, _, act = heapq.heappop(self.heap)
            self.happened += 1
            act()
            self.overlap.check([(actor.member.name, owned) for actor in self.actors if (owned := actor.serves(self.now))], self.now)

    def _note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.add(self.now, parts)

    def _rounds(self) -> int:
        look = self.looks.of(self.store.read(), 0)
        return look.round.number if look.round else 0

    def _calm(self) -> None:
        self._note("calm")
        self.weather = Weather(slow=5)
        for actor in self.actors:
            actor.doom = None
            actor.cut_until = actor.mute_until = 0
        if all(actor.leaving for actor in self._alive()):
            self._join()

    def _alive(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.dead and not actor.left]

    def _some(self, most: int = 1) -> list[Actor]:
        """Pick between one and `most` of the live actors."""
        alive = self._alive()
        return self.random.sample(alive, min(len(alive), self.random.randrange(1, most + 1)))

    def _join(self) -> None:
        drift = self.weather.drift
        rate = self.random.choice([1 - drift, 1 + drift, self.random.uniform(1 - drift, 1 + drift)])
        name, zone = f"m{next(self.names)}", self.zoning.randrange(self.weather.zones)
        member = Member(KEYS, name, zone=f"z{zone}" if zone else "")
        actor = Actor(member, rate, self.random.randrange(10_000, 10_000_000))
        self._note(actor.name, "joins")
        self.actors.append(actor)
        self._ask(actor)
        if self.loads:
            self._weigh(actor)

    def _kill(self) -> None:
        """Kill one process, or all of its zone where others remain."""
        some = self._some()
        zone = [actor for actor in self._alive() if some and actor.member.zone == some[0].member.zone]
        whole = self.weather.zones > 1 and self.zoning.random() < 0.5 and len(zone) < len(self._alive())
        for actor in zone if whole else some:
            self._note(actor.name, "is killed")
            actor.dead = True

    def _leave(self) -> None:
        """One member leaves; or all do, and another one joins."""
        everybody = self.random.random() < 0.3
        for actor in self._alive() if everybody else self._some():
            self._note(actor.name, "wants to leave")
            actor.leaving = True
            actor.member.leave()
        if everybody:
            self.at(self.now + self.random.randrange(1, 1_500), self._join)

    def _span(self) -> Millis:
        """Draw a fault's duration: near the lease timeout or the member timeout."""
        parameters = self._resource().parameters
        lease, given_up, slow = parameters.lease_timeout, parameters.member_timeout, self.weather.slow
        some = self.random.uniform
        kinds = (lease * some(0.2, 1.0), lease * some(1.0, 1.2), given_up * some(1.0, 1.15) + slow * some(0, 8), given_up * some(1.0, 2.0))
        return min(int(self.random.choice(kinds)), self.traffic + LINGERING - self.now)

    def _pause(self) -> None:
        """Pause up to three processes, now or within their next round trip, so that they resume at about the same time."""
        span, at_once = self._span(), self.random.random() < 0.5
        for actor in self._some(3):
            if at_once:
                self._note(actor.name, "is paused for", span)
                actor.paused_until = self.now + span
            else:
                actor.doom = (self.random.choice(MOMENTS), span)

    def _strike(self, actor: Actor, moment: Moment) -> None:
        if actor.doom is not None and actor.doom[0] == moment:
            actor.paused_until = self.now + actor.doom[1]
            self._note(actor.name, "is paused at", *actor.doom)
            actor.doom = None

    def _cut(self) -> None:
        span, mute = self._span(), self.random.random() < 0.4
        for actor in self._some(3):
            self._note(actor.name, "cannot commit for" if mute else "is cut off for", span)
            if mute:
                actor.mute_until = self.now + span
            else:
                actor.cut_until = self.now + span

    def _change(self) -> None:
        """Change the resource: its items, some of which come back at once, its strategy, or its parameters."""
        before = self._resource()
        kind = self.random.choice(self.weather.kinds)
        if kind in ("items", "there and back"):
            some = [item for item in before.items if item.startswith("i")]
            items = set(some) ^ {self._some_item() for _ in range(self.random.randrange(1, 8))}
            if kind == "there and back":
                items = set(self.random.sample(some, len(some) // 3))
                self.at(self.now + self.random.randrange(1, 1_500), lambda: self._put_items(some))
            self._put_items(items)
        elif kind == "era":
            self._put_strategy(self.random.choice(["rounds", "claims", "static"]))
        else:
            self._put_changed(parameters=parameters_of(self.random))
        if self.random.random() < 0.5:
            self._pause()

    def _some_item(self) -> str:
        """Pick one of the items that are repeatedly added and removed."""
        return f"i{self.random.randrange(40):02}"

    def _put_items(self, some: Iterable[str]) -> None:
        """Replace all items except placed ones: a placed item, once removed, never comes back."""
        before = self._resource()
        items = tuple(sorted([*some, *(item for item in before.items if item.startswith("p"))]))
        queues = {queue_of(item) for item in items}
        # As every writer of a resource does: a queue's limit goes with its last item, and a pin with its item.
        limits = {queue: most for queue, most in before.limits.items() if queue in queues}
        self._put_changed(items=items, limits=limits, pins={item: pin for item, pin in before.pins.items() if item in items})

    def _put_strategy(self, strategy: Strategy) -> None:
        self._put_changed(era=self._resource().era + 1, strategy=strategy)
        if strategy == "static":
            back: Strategy = self.random.choice(["rounds", "claims"])
            self.at(self.now + self.random.randrange(1, LINGERING), lambda: self._put_strategy(back))

    def _put_changed(self, **fields: object) -> None:
        before = self._resource()
        self._put_resource(msgspec.structs.replace(before, version=before.version + 1, **fields))

    def _resource(self) -> Resource:
        return decode_record(self.store.entries[KEYS.resource].value, Resource)

    def _put_resource(self, resource: Resource) -> None:
        self._note("the resource:", resource)
        writes = Writes()
        writes.put(KEYS.resource, resource)
        check(self.store.commit(writes), "the resource is written")

    # ---- placement ------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Place new items, or items that may have existed before."""
        number = self.random.choice([1, 1, 2, 4, 9])
        known = self.random.random() < 0.4
        queue = self.random.choice([*self._queues()[:3], f"p{next(self.placed):03}"])
        new = [self._some_item() if known else f"{queue}.{next(self.placed)}" for _ in range(number)]
        limits = {queue: self.random.choice([1, 2, 3])} if queue not in self._queues() and self.random.random() < 0.5 else {}

        def decide(actor: Actor, look: GroupView) -> Writes:
            late = actor.member.late(look, look.seen_at)
            writes = item_placement.place(look, KEYS, [item for item in new if item not in self.removed], late, limits)
            check_placing(look, writes, KEYS)
            return writes

        for actor in self._some():
            self._try(actor, decide, 4)

    def _remove(self) -> None:
        share = self.random.choice([0.1, 0.5, 1.0])

        def decide(actor: Actor, look: GroupView) -> Writes:
            assert look.resource is not None
            gone = [item for item in look.resource.items if item.startswith("p") and self.random.random() < share]
            self.removed.update(gone)
            return item_placement.remove(look, KEYS, gone)

        for actor in self._some():
            self._try(actor, decide, 4)

    def _limit(self) -> None:
        """Lower, raise or remove the member limit of a placed queue."""
        queue, most = self.random.choice(self._queues() or [""]), self.random.choice([1, 1, 2, 3, 5, None])
        for actor in self._some():
            self._try(actor, lambda _, look: item_placement.limit(look, KEYS, queue, most), 4)

    def _pin(self) -> None:
        """Pin an item to a member that may have gone, or to a zone; or unpin one."""
        resource, pick = self._resource(), self.zoning.choice
        if not resource.items or not self.actors:
            return
        item, member = pick(resource.items), pick(self.actors).member
        where = pick([None, Pin(instance=member.name), Pin(instance=member.name), Pin(zone=member.zone)])

        def decide(_: Actor, look: GroupView) -> Writes:
            # One that has gone, or an item that has, is refused.
            with contextlib.suppress(SluicewayError):
                if look.resource is not None and item in look.resource.items:
                    return item_placement.pin(look, KEYS, item, where)
            return Writes()

        for actor in self._some():
            self._try(actor, decide, 4)

    def _queues(self) -> list[str]:
        """Return the placed queues in random order."""
        names = {queue_of(item) for item in self._resource().items if item.startswith("p")}
        return self.random.sample(sorted(names), len(names))

    def _try(self, actor: Actor, decide: Callable[[Actor, GroupView], Writes], tries: int) -> None:
        """Read, decide and commit, then repeat up to `tries` times, because the process never learns a commit's outcome."""

        def saw(actor: Actor, view: View) -> None:
            writes = decide(actor, self.looks.of(view, actor.clock(self.now)))
            if writes.puts and tries:
                self._strike(actor, "commit")
                self._awake(actor, lambda: self._commit(actor, writes, lambda: self._try(actor, decide, tries - 1)))

        self._read(actor, saw)

    # ---- loads ----------------------------------------------------------------------------------------------------

    def _weigh(self, actor: Actor) -> None:
        """Report the loads and decide on moves from time to time, as the load balancer of each instance does."""
        if actor.left:
            return
        self.at(self.now + BALANCE.look, lambda: self._awake(actor, lambda: self._weigh(actor)))

        def saw(actor: Actor, view: View) -> None:
            look = self.looks.of(view, actor.clock(self.now))
            actor.balancer.note(look.seen_at, look)
            report = self.loads.report(actor.serves(self.now), look)
            if noticeable(actor.reported, report):
                actor.reported = report
                actor.member.report(report)
            swaps = actor.balancer.decide(look.seen_at, look, reports_of(view, KEYS)) if decides(look, actor.name) else ()
            if swaps:
                self._note(actor.name, "levels loads:", *swaps)
                writes = open_round(look, KEYS, swaps)
                self._awake(actor, lambda: self._commit(actor, writes, lambda: None))

        self._read(actor, saw)

    # ---- member loop ------------------------------------------------------------------------------------------

    def _delay(self) -> Millis:
        return self.random.randrange(1, 2 * self.weather.slow + 1)

    def _awake(self, actor: Actor, act: Callable[[], None]) -> None:
        """Run `act` now, or when the process resumes; never if it is dead."""
        if actor.dead:
            return
        if actor.paused_until > self.now:
            self.at(actor.paused_until, lambda: self._awake(actor, act))
            return
        act()

    def _ask(self, actor: Actor) -> None:
        self._read(actor, self._saw)

    def _read(self, actor: Actor, saw: Callable[[Actor, View], None]) -> None:
        """Read the group. The view is from a moment between request and answer."""
        if actor.cut_until > self.now:
            self.at(self.now + 200, lambda: self._awake(actor, lambda: self._read(actor, saw)))
            return

        def read() -> None:
            view = self.store.read()
            self._strike(actor, "look")
            self.at(self.now + self._delay(), lambda: self._awake(actor, lambda: saw(actor, view)))

        self.at(self.now + self._delay(), read)

    def _saw(self, actor: Actor, view: View) -> None:
        now = actor.clock(self.now)
        decision = actor.member.look(self.looks.of(view, now))
        actor.served, actor.deadline = dict(decision.owned), decision.lease_deadline
        self._note(actor.name, "serves", *actor.served, "for", actor.deadline - now)
        if now < actor.deadline:
            self.tokens.serve(actor.name, actor.served)
        if decision.left:
            self._note(actor.name, "has left")
            actor.left = True
            actor.served = {}
            return
        if decision.writes is not None:
            writes = decision.writes
            self._strike(actor, "commit")
            # The process may be paused between deciding and sending.
            self._awake(actor, lambda: self._commit(actor, writes, lambda: self._ask(actor)))
            return
        wait = max(1, int((decision.wake_at - now) / actor.rate) + 1)
        # A hint may wake the member earlier.
        hint = self.random.randrange(1, wait + 1) if self.random.random() < 0.5 else wait
        self.at(self.now + hint, lambda: self._awake(actor, lambda: self._ask(actor)))

    def _commit(self, actor: Actor, writes: Writes, then: Callable[[], None]) -> None:
        def again() -> None:
            self._awake(actor, then)

        land = self._delay()
        answer = land + self._delay()
        if self.random.random() < self.weather.hang * (3 if KEYS.round in writes.puts else 1):
            # The store hangs and the member waits. Another member may join meanwhile.
            land += self._span()
            if self.weather.joins and len(self.actors) < MAX_ACTORS and self.random.random() < 0.3:
                self.at(self.now + self.random.randrange(land), self._join)
            answer = land + self._delay()
        elif self.random.random() < self.weather.unknown or max(actor.cut_until, actor.mute_until) > self.now:
            # The commit lands now, much later or never; the member gets no answer.
            land = self.random.choice([1, 100, self._span(), self._span(), -1, -1])
            answer = self._delay() + 100
        if land >= 0:
            self.at(self.now + land, lambda: self._land(actor, writes))
        self.at(self.now + answer, again)

    def _land(self, actor: Actor, writes: Writes) -> None:
        before = self.store.read()
        landed = self.store.commit(writes)
        self._note(actor.name, "commits" if landed else "is refused", *writes.puts, "and removes", *writes.deletes)
        if landed:
            looked_at = writes.unchanged.get(KEYS.marks, before.stamp)
            unseen = {key.removeprefix(KEYS.members) for key in before.prefix(KEYS.members) if self.store.born[key] > looked_at}
            was, is_ = self.looks.of(before, 0), self.looks.of(self.store.read(), 0)
            check_commit(was, is_, KEYS, unseen)
            self.loads.check_moves(was, is_, self.now)
            self._strike(actor, "landed")
