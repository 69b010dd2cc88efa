"""What happens to the queues, their backends and the cluster, as events: found by looking each second while somebody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from sluiceway.adapters import system
from sluiceway.cluster.instance_view import Instances
from sluiceway.contract.queue_stats import COUNTERS, LEVELS, WAITING, LogicalQueueStats, QueueStats
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_AUDIT_TEXT, MAX_EVENTS
from sluiceway.local.audit_trail import AuditTrail, changes
from sluiceway.local.backend_pool import BackendInfo
from sluiceway.model.audit import AuditEntry
from sluiceway.model.instances import RoundInfo
from sluiceway.model.queue import QueueRecord

log = logging.getLogger(__name__)

EventType = Literal[
    "queue.created",
    "queue.updated",
    "queue.paused",
    "queue.deleted",
    "partition.state",
    "backend.down",
    "backend.up",
    "instance.joined",
    "instance.left",
    "round.sealed",
    "rebalance.started",
    "rebalance.step",
    "rebalance.problem",
    "rebalance.ended",
    "config.reloaded",
    "audit",
]
"""`queue.paused`: which verbs are paused has changed. Also of a queue that is resumed."""

INTERVAL: Final = 1.0
"""Seconds between two looks."""
_AUDIT_OVERLAP: Final = 60_000
"""Milliseconds by which an audit entry may be seen later than it says: its commit takes time, and another process's clock may lag."""
_AUDIT_PATIENCE: Final = 5.0
"""Seconds: the meta store may hang, and the rest is still to be told."""
_QUEUES_AT_ONCE: Final = 20
"""Queues that are looked at before others get a turn on the event loop."""
ELSEWHERE_AT_ONCE: Final = 50
"""Queues in each look of which other instances are asked, since they have partitions of them: each is a call of each of those instances."""
_ELSEWHERE_PATIENCE: Final = 3.0
"""Seconds for their answers, so that one that hangs holds up the looks no longer than until it is given up."""

Counts = dict[str, int]
"""A queue's items, requests and partitions that are not served, over all of its partitions."""


class Event(NamedTuple):
    """Events of a process are numbered from 1. `queue_name` is empty where it is about no queue; `data` is a JSON object on one line."""

    number: int
    type: EventType
    queue_name: str
    data: bytes


class Ring:
    """The latest events. Who reads them keeps the number of the last one that it has seen, and nothing is kept for it."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self.last = 0
        """The number of the newest event."""

    def add(self, type: EventType, queue_name: str = "", **data: object) -> None:
        self.last += 1
        fields = {"queue_name": queue_name, **data} if queue_name else data
        self._events.append(Event(self.last, type, queue_name, msgspec.json.encode(fields)))

    def after(self, number: int) -> list[Event] | None:
        """The events after that one; None if some of them are forgotten, or it was never given."""
        first = self.last - len(self._events)
        if not first <= number <= self.last:
            return None
        return [self._events[place] for place in range(number - first, len(self._events))]


Place = tuple[str, str, int]
"""A partition: queue, incarnation and number."""
Condition = tuple[str, bool]
"""A partition's state, and whether it is degraded."""
_GOOD: Final[Condition] = ("available", False)
UNHEARD: Final = "unavailable"
"""The state of a partition whose owner does not answer."""
REMOVED: Final = "removed"
"""That of one that its queue does not have any more."""


class Sight(NamedTuple):
    """What one look has seen. Of some partitions that other instances have it is what an earlier one has."""

    queues: Mapping[str, QueueRecord]
    partitions: Mapping[Place, Condition]
    backends: Mapping[str, str | None]
    """Why it is not served here, by name; None: it is."""
    instances: Mapping[str, str] = MappingProxyType({})
    """Their addresses, by name."""
    round: RoundInfo | None = None


def tell(ring: Ring, before: Sight, after: Sight) -> None:
    """Add to the ring what has changed between two looks."""
    for name in before.queues.keys() | after.queues.keys():
        _tell_queue(ring, before.queues.get(name), after.queues.get(name))
    for place, (state, degraded) in after.partitions.items():
        # Those of a new queue are good unless it is said.
        if before.partitions.get(place, _GOOD) != (state, degraded):
            ring.add("partition.state", place[0], partition=place[2], state=state, degraded=degraded)
    for backend, problem in after.backends.items():
        if (before.backends.get(backend) is None) != (problem is None):
            if problem is None:
                ring.add("backend.up", backend=backend)
            else:
                ring.add("backend.down", backend=backend, problem=problem[:MAX_AUDIT_TEXT])
    _tell_cluster(ring, before, after)


def _tell_cluster(ring: Ring, before: Sight, after: Sight) -> None:
    for name in sorted(before.instances.keys() - after.instances.keys()):
        ring.add("instance.left", instance=name, address=before.instances[name])
    for name in sorted(after.instances.keys() - before.instances.keys()):
        ring.add("instance.joined", instance=name, address=after.instances[name])
    old, new = before.round, after.round
    if new is not None and new.sealed and (old is None or not old.sealed or old.number != new.number):
        ring.add("round.sealed", round=new.number, trigger=new.trigger, participants=new.participants, moved=new.moved, kept=new.kept)


def _tell_queue(ring: Ring, old: QueueRecord | None, new: QueueRecord | None) -> None:
    if old is new:
        return
    if old is not None and (new is None or new.incarnation != old.incarnation):
        ring.add("queue.deleted", old.queue_name, incarnation=old.incarnation)
        old = None
    if new is None:
        return
    if old is None:
        ring.add("queue.created", new.queue_name, incarnation=new.incarnation)
        return
    there = {each.partition for each in new.partitions}
    for each in old.partitions:
        if each.partition not in there:
            ring.add("partition.state", new.queue_name, partition=each.partition, state=REMOVED, degraded=False)
    changed = sorted(changes(old, new))
    if "paused" in changed:
        ring.add("queue.paused", new.queue_name, version=new.version, paused=new.paused)
        changed.remove("paused")
    if changed:
        ring.add("queue.updated", new.queue_name, version=new.version, changed=changed)


def counts_of(stats: LogicalQueueStats | QueueStats) -> Counts:
    """The queue's counts, under the names that `queue.stats` has for a partition's, and `not_served`."""
    counts = {name: sum(getattr(partition, name) for partition in stats.partitions) for name in (*LEVELS, *COUNTERS)}
    shares = stats.logical_queues if isinstance(stats, QueueStats) else [stats]
    counts |= {name: sum(getattr(share, name) for share in shares) for name in WAITING}
    counts["not_served"] = _not_served(stats)
    return counts


def _not_served(stats: LogicalQueueStats | QueueStats) -> int:
    """How many of the queue's partitions nothing can be asked of: their owner does not answer, or they are being opened, or damaged."""
    return sum(partition.state in (UNHEARD, "error") for partition in stats.partitions)


EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)


class Source(Protocol):
    """What is looked at."""

    @property
    def audit(self) -> AuditTrail: ...

    def queues(self) -> list[QueueRecord]: ...

    def stats(self, queue_name: str) -> LogicalQueueStats:
        """Of the partitions that are here."""
        ...

    async def count(self, queue_name: str) -> QueueStats:
        """Of all partitions, wherever they are."""
        ...

    @property
    def instances(self) -> Instances: ...

    def backends(self) -> list[BackendInfo]: ...


class Watch:
    """Looks each second as long as somebody reads, at this instance and by it at the others. What happened while nobody did is found when
    somebody does again."""

    def __init__(self, source: Source) -> None:
        self.process = system.new_incarnation()
        self.ring = Ring()
        self.counts: Mapping[str, Counts] = {}
        """By queue, as of the last look. The counts of a queue are another object exactly if they have changed."""
        self._source = source
        self._sight: Sight | None = None
        self._looks = 0
        self._asked: dict[str, int] = {}
        """The look in which other instances were last asked of a queue."""
        self._audit_at = system.now()
        self._audited: set[str] | None = None
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._begun = asyncio.Event()
        """The first look since somebody reads is over."""

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Somebody reads, until the block ends."""
        self._readers += 1
        if self._task is None:
            self._begun.clear()
            # Of queues whose turn comes later they would be told as what is so now.
            self.counts = {}
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def begun(self) -> None:
        """Returns when there was a look since somebody reads: at once, if others do already."""
        await self._begun.wait()

    async def looked(self) -> None:
        """Returns after the next look, and at `wake`."""
        await self._looked.wait()

    def wake(self) -> None:
        """Whoever waits for the next look waits no longer."""
        self._looked.set()
        self._looked = asyncio.Event()

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking for events failed; the next look is in a second")
            self._begun.set()
            await asyncio.sleep(INTERVAL)

    async def look(self) -> None:
        """Find what has changed. The first look is what the later ones are compared with."""
        sight, counts = await self._see()
        if self._sight is not None:
            tell(self.ring, self._sight, sight)
        self._sight, self.counts = sight, counts
        await self._tell_audit()
        self.wake()

    async def _see(self) -> tuple[Sight, dict[str, Counts]]:
        self._looks += 1
        queues = {record.queue_name: record for record in self._source.queues()}
        found: dict[str, LogicalQueueStats | QueueStats] = {}
        elsewhere: list[str] = []
        for number, (name, record) in enumerate(queues.items(), 1):
            if number % _QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            # One that is deleted in the meantime the next look will tell.
            with contextlib.suppress(SluicewayError):
                found[name] = self._source.stats(name)
                if len(found[name].partitions) < len(record.partitions):
                    elsewhere.append(name)
        for name in elsewhere:
            del found[name]
        found |= await self._ask_others(elsewhere)
        counts = {name: self._counts(name, stats) for name, stats in found.items()}
        counts |= {name: self.counts[name] for name in elsewhere if name in self.counts and name not in counts}
        partitions = self._known_of(queues, set(elsewhere) - found.keys())
        for name, stats in found.items():
            for each in stats.partitions:
                partitions[name, queues[name].incarnation, each.partition] = (each.state, each.degraded)
        cluster = self._source.instances.cluster()
        instances = {each.name: each.address for each in cluster.instances if each.state != "joining"}
        backends = {backend.name: backend.problem for backend in self._source.backends()}
        return Sight(queues, partitions, backends, instances, cluster.round), counts

    async def _ask_others(self, elsewhere: Sequence[str]) -> dict[str, QueueStats]:
        """The counts of those of these queues whose turn it is: who was asked for the longest time ago comes first."""
        due = sorted(elsewhere, key=lambda name: self._asked.get(name, 0))[:ELSEWHERE_AT_ONCE]
        self._asked = {name: self._looks if name in due else self._asked.get(name, 0) for name in elsewhere}
        answers = await asyncio.gather(*map(self._ask, due))
        return {name: stats for name, stats in zip(due, answers, strict=True) if stats is not None}

    async def _ask(self, queue_name: str) -> QueueStats | None:
        try:
            async with asyncio.timeout(_ELSEWHERE_PATIENCE):
                return await self._source.count(queue_name)
        except (TimeoutError, SluicewayError):
            return None

    def _counts(self, name: str, stats: LogicalQueueStats | QueueStats) -> Counts:
        known = self.counts.get(name)
        if known is not None and any(each.state == UNHEARD for each in stats.partitions):
            # Without what an instance does not tell they would seem to fall.
            found = {**known, "not_served": _not_served(stats)}
        else:
            found = counts_of(stats)
        return known if known == found else found

    def _known_of(self, queues: Mapping[str, QueueRecord], names: Set[str]) -> dict[Place, Condition]:
        """What was known of these queues before this look."""
        before = self._sight.partitions if self._sight is not None else {}
        return {place: each for place, each in before.items() if place[0] in names and queues[place[0]].incarnation == place[1]}

    async def _tell_audit(self) -> None:
        """Entries of every process on this meta store, each once."""
        began = system.now()
        try:
            async with asyncio.timeout(_AUDIT_PATIENCE):
                entries = await self._source.audit.since(self._audit_at - _AUDIT_OVERLAP)
        except (TimeoutError, SluicewayError):
            return
        if self._audited is not None:
            for entry in entries:
                if entry.id not in self._audited:
                    self._tell_entry(entry)
        self._audit_at, self._audited = began, {entry.id for entry in entries}

    def _tell_entry(self, entry: AuditEntry) -> None:
        self.ring.add("audit", entry.queue_name, id=entry.id)
        if entry.action == "config.reload":
            who = {"instance": entry.detail["instance"]} if "instance" in entry.detail else {}
            self.ring.add("config.reloaded", changed=entry.detail.get("changed", []), **who)
        elif entry.action == "queue.rebalance" or entry.action.startswith("rebalance."):
            self._tell_rebalance(entry)

    def _tell_rebalance(self, entry: AuditEntry) -> None:
        """Whoever carries it out, each of its steps has an entry."""
        about = {"rebalance": entry.detail.get("rebalance")}
        step = entry.action.removeprefix("rebalance.")
        if entry.action == "queue.rebalance":
            self.ring.add("rebalance.started", entry.queue_name, **about)
        elif step == "problem":
            self.ring.add("rebalance.problem", entry.queue_name, **about, problem=entry.detail.get("problem"))
        elif step in ("finish", "failed"):
            self.ring.add("rebalance.ended", entry.queue_name, **about, state=entry.detail.get("state"))
        else:
            partitions = entry.detail.get("partitions")
            # Of many the entry has no more than how many they were.
            named = partitions if isinstance(partitions, list) else []
            self.ring.add("rebalance.step", entry.queue_name, **about, step=step, partitions=named)
