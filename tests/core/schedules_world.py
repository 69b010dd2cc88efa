"""A simulated world for `core.schedules.firings`: instances that crash and freeze, the queues' memory of what was fired, and a naive model
of what has to be fired."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sluiceway.adapters.time_zones import find_zone
from sluiceway.contract.schedule_answers import CatchUp
from sluiceway.core.schedules.cron import parse_cron
from sluiceway.core.schedules.firings import MISSED_AFTER, REACH, Firing, Firings
from sluiceway.core.schedules.timetable import Timetable
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import GROUP_KEEP, MAX_CATCH_UP

SECOND, HOUR, DAY = 1_000, 3_600_000, 86_400_000
BEGIN: Millis = 1_803_000_000_000
"""In February 2027: a month of a change of clocks follows."""
TAKEOVER = 8 * SECOND


@dataclass
class Schedule:
    name: str
    table: Timetable
    catch_up: CatchUp
    pauses: list[tuple[Millis, Millis]] = field(default_factory=list)
    after: Millis = BEGIN


class Queue:
    """What partitions remember: the last sequence of each group, until GROUP_KEEP after its last use."""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[Millis, Millis]] = {}
        self.items: dict[str, list[Millis]] = {}

    def produce(self, group: str, sequence: Millis, now: Millis) -> None:
        known, until = self.groups.get(group, (-1, 0))
        if until > now and sequence <= known:
            return
        self.groups[group] = sequence, now + GROUP_KEEP
        self.items.setdefault(group, []).append(sequence)


class Instance:
    """One that fires schedules. `recorded`: what is durable of how far they have come."""

    def __init__(self, queue: Queue, schedules: Sequence[Schedule], recorded: dict[str, Millis]) -> None:
        self.firings, self._queue, self._recorded = Firings(), queue, recorded
        self._of = {each.name: each for each in schedules}
        for each in schedules:
            self.hold(each)

    def hold(self, schedule: Schedule) -> None:
        through = max(schedule.after, self._recorded.get(schedule.name, 0))
        self.firings.hold(schedule.name, schedule.name, schedule.table, schedule.catch_up, through)

    def run(self, now: Millis, until: Millis) -> None:
        """Fire all that is due until then, each at its time."""
        while (due := self.firings.due()) is not None and due < until:
            now = max(now, due)
            for firing in self.firings.begin(now, 256):
                self._queue.produce(firing.key, firing.at, now)
                self.firings.fired(firing)

    def record(self) -> None:
        for name in self.firings.touched:
            if name in self.firings:
                self._recorded[name] = self.firings.through(name)
        self.firings.touched = {}

    def crash(self, now: Millis, chance: random.Random) -> list[Firing]:
        """Stop in the middle: of what is due, some was produced, of which nobody was told. Returns what else was sent, and may arrive."""
        begun = self.firings.begin(now, 256)
        landed = [firing for firing in begun if chance.random() < 0.5]
        for firing in landed:
            self._queue.produce(firing.key, firing.at, now)
        return [firing for firing in begun if firing not in landed]


CRONS = [
    "*/20 * * * *",
    "@hourly",
    "15,45 */3 * * *",
    "30 2 * * *",
    "0 9 * * mon-fri",
    "@daily",
    "0 4 * * sun",
    "@monthly",
    "0 12 1,15 * *",
]
WEIGHTS = [1, 2, 3, 20, 20, 20, 15, 10, 10]
ZONES = ["UTC", "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]


def some_schedules(chance: random.Random, count: int, prefix: str, end: Millis) -> list[Schedule]:
    found = []
    for number in range(count):
        cron, zone = chance.choices(CRONS, WEIGHTS)[0], chance.choice(ZONES)
        name = f"{prefix}-{number}"
        table = Timetable(parse_cron(cron), find_zone(zone), name, chance.choice([0, 0, 45 * SECOND, 2 * HOUR]))
        schedule = Schedule(name, table, chance.choice(["last", "skip", "all"]))
        if chance.random() < 0.05:
            first = chance.randrange(BEGIN, end)
            schedule.pauses.append((first, first + chance.randrange(HOUR, 3 * DAY)))
        found.append(schedule)
    return found


class Run:
    """One instance's schedules through its crashes: what the queue got, and what the model wants of it."""

    def __init__(self, seed: str, schedules: int, crashes: int, *, end: Millis = BEGIN + 30 * DAY, record: bool = True) -> None:
        self._chance = random.Random(seed)
        self._end, self._record = end, record
        self._every = some_schedules(self._chance, schedules, seed, end)
        self.queue = Queue()
        self._recorded: dict[str, Millis] = {}
        self._instance: Instance | None = Instance(self.queue, self._every, self._recorded)
        self._frozen: Instance | None = None
        """One that was replaced, and has not heard of it. Until its ownership runs out it fires, too."""
        self._frozen_until = 0
        self._late: list[Firing] = []
        self._outages: list[tuple[Millis, Millis]] = []
        """When nobody fired, not even a frozen instance."""
        self._paused: set[str] = set()
        self._simulate(some_outages(self._chance, crashes, end))
        self.wanted = {each.name: list(expected(each, self._outages, end)) for each in self._every}

    def _simulate(self, outages: Sequence[tuple[Millis, Millis]]) -> None:
        events: list[tuple[Millis, int, str, Schedule | None]] = [(at, 0, "crash", None) for at, _ in outages]
        events += [(back, 2, "start", None) for _, back in outages]
        events += [(at, 1, "pause", each) for each in self._every for at, _ in each.pauses]
        events += [(at, 1, "resume", each) for each in self._every for _, at in each.pauses]
        now = BEGIN
        for at, _, what, which in [*sorted(events, key=lambda event: event[:2]), (self._end, 3, "end", None)]:
            if at > self._end:
                continue
            self._go_on(now, at)
            now = at
            if what == "crash":
                self._crash(now)
            elif what == "start":
                self._start(now)
            elif which is not None:
                self._change(which, now, paused=what == "pause")

    def _go_on(self, now: Millis, until: Millis) -> None:
        if self._frozen is not None:
            self._frozen.run(now, min(until, self._frozen_until))
            if until >= self._frozen_until:
                self._thaw(self._frozen_until)
        if self._instance is not None:
            self._instance.run(now, until)
            if self._record and self._chance.random() < 0.7:
                self._instance.record()

    def _thaw(self, at: Millis) -> None:
        """The frozen one has heard of everything. If nobody has replaced it yet, nobody fires from now on."""
        if self._frozen is not None and self._instance is None:
            self._outages.append((at, self._end))
        self._frozen = None

    def _crash(self, now: Millis) -> None:
        self._thaw(now)
        instance, self._instance = self._instance, None
        assert instance is not None
        if self._chance.random() < 0.3:
            self._frozen, self._frozen_until = instance, now + 120 * SECOND
        else:
            self._late = instance.crash(now, self._chance)
            self._outages.append((now, self._end))

    def _start(self, now: Millis) -> None:
        if self._outages and self._outages[-1][1] == self._end and self._frozen is None:
            self._outages[-1] = (self._outages[-1][0], now)
        self._instance = Instance(self.queue, [each for each in self._every if each.name not in self._paused], self._recorded)
        self._instance.run(now, now + 1)
        for firing in self._late:
            # What the crashed one had sent arrives only now.
            self.queue.produce(firing.key, firing.at, now)
        self._late = []

    def _change(self, schedule: Schedule, now: Millis, *, paused: bool) -> None:
        self._thaw(now)
        if paused:
            self._paused.add(schedule.name)
            if self._instance is not None:
                self._instance.firings.drop(schedule.name)
        else:
            self._paused.discard(schedule.name)
            schedule.after = now
            if self._instance is not None:
                self._instance.hold(schedule)


def some_outages(chance: random.Random, crashes: int, end: Millis) -> list[tuple[Millis, Millis]]:
    """When the schedules have nobody, apart from one another."""
    found: list[tuple[Millis, Millis]] = []
    for at in sorted(chance.sample(range(BEGIN, end - 5 * DAY), crashes)):
        back = at + chance.choice([TAKEOVER, TAKEOVER, 90 * SECOND, HOUR, chance.randrange(4 * DAY)])
        if not found or at > found[-1][1]:
            found.append((at, back))
    return found


def expected(schedule: Schedule, outages: Sequence[tuple[Millis, Millis]], end: Millis) -> Iterator[Millis]:
    """The moments that are fired: written down from the guide, without a heap or a memory."""
    pending: dict[Millis, list[Millis]] = {}
    at = schedule.table.after(BEGIN)
    while at is not None and schedule.table.due(at) < end:
        due = schedule.table.due(at)
        decided = next((back for out, back in outages if out <= due < back), due)
        if decided < end and not any(at <= resumed and decided >= paused for paused, resumed in schedule.pauses):
            pending.setdefault(decided, []).append(at)
        at = schedule.table.after(at)
    for decided, moments in pending.items():
        yield from chosen(schedule, decided, moments)


def chosen(schedule: Schedule, now: Millis, moments: list[Millis]) -> Iterator[Millis]:
    """Of moments that are due when somebody is back."""
    due = schedule.table.due
    while moments and now - due(moments[0]) < MISSED_AFTER:
        yield moments.pop(0)
    moments = [at for at in moments if now - at <= REACH]
    if moments and schedule.catch_up == "all":
        yield from moments[-MAX_CATCH_UP:]
    elif moments and (schedule.catch_up == "last" or now - due(moments[-1]) < MISSED_AFTER):
        yield moments[-1]
