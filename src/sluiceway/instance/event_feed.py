"""Event feed of queues, backends and the cluster: compares their state once a second while there are readers."""

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
from sluiceway.contract.queue_stats import COUNTERS, LEVELS, WAITING, Limit, LogicalQueueStats, QueueStats, handler_ms
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
    "circuit.opened",
    "circuit.closed",
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
"""`queue.paused`: the set of paused verbs has changed, also when a queue is resumed."""

INTERVAL: Final = 1.0
"""Seconds between two looks."""
_AUDIT_OVERLAP: Final = 60_000
"""Milliseconds by which an audit entry may become visible after its timestamp: commits take time, and other clocks may lag."""
_AUDIT_PATIENCE: Final = 5.0
"""Seconds to wait for audit entries: the meta store may hang, and must not hold up the other events."""
_QUEUES_AT_ONCE: Final = 20
"""Queues examined before the event loop gets to serve other tasks."""
ELSEWHERE_AT_ONCE: Final = 50
"""Queues per look for which other instances are asked: each costs one call to each instance with partitions of it."""
_ELSEWHERE_PATIENCE: Final = 3.0
"""Seconds to wait for those answers, so that a hanging instance delays a look no longer than that."""

Counts = dict[str, int]
"""A queue's counts of items, requests and unserved partitions, over all of its partitions."""


class Event(NamedTuple):
    """One event, numbered from 1 in its process. `queue_name` is empty if no queue is concerned; `data` is a JSON object on one line."""

    number: int
    type: EventType
    queue_name: str
    data: bytes


class Ring:
    """Buffer of the latest events. A reader keeps the number of its last event; the ring keeps no state for it."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self.last = 0
        """Number of the newest event."""

    def add(self, type: EventType, queue_name: str = "", **data: object) -> None:
        self.last += 1
        fields = {"queue_name": queue_name, **data} if queue_name else data
        self._events.append(Event(self.last, type, queue_name, msgspec.json.encode(fields)))

    def after(self, number: int) -> list[Event] | None:
        """Return the events after that number; None if some were dropped, or the number was never given."""
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
"""State of a partition that was removed from its queue."""


class Sight(NamedTuple):
    """Result of one look. For some partitions on other instances it repeats an earlier look's."""

    queues: Mapping[str, QueueRecord]
    partitions: Mapping[Place, Condition]
    backends: Mapping[str, str | None]
    """Problem of each backend by name; None: it works."""
    instances: Mapping[str, str] = MappingProxyType({})
    """Addresses by instance name."""
    round: RoundInfo | None = None
    circuits: Set[str] = frozenset()
    """Queues with an open circuit breaker."""


def tell(ring: Ring, before: Sight, after: Sight) -> None:
    """Add the differences between two looks to the ring, as events."""
    for name in before.queues.keys() | after.queues.keys():
        _tell_queue(ring, before.queues.get(name), after.queues.get(name))
    for name in sorted(after.circuits - before.circuits):
        ring.add("circuit.opened", name)
    for name in sorted((before.circuits - after.circuits) & after.queues.keys()):
        ring.add("circuit.closed", name)
    for place, (state, degraded) in after.partitions.items():
        # Partitions of a new queue count as good until observed otherwise.
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
    """Sum the counts of the queue's partitions, under their `queue.stats` names, `not_served`, `circuits_open`,
    `limited_by_concurrency` and `limited_by_rate`."""
    counts = {name: sum(getattr(partition, name) for partition in stats.partitions) for name in (*LEVELS, *COUNTERS)}
    shares = stats.logical_queues if isinstance(stats, QueueStats) else [stats]
    counts |= {name: sum(getattr(share, name) for share in shares) for name in WAITING}
    counts["not_served"] = _not_served(stats)
    counts["handler_p50_ms"], counts["handler_p99_ms"] = handler_ms(shares) or (0, 0)
    counts["circuits_open"] = sum(share.circuit is not None and share.circuit.state != "closed" for share in shares)
    counts |= {f"limited_by_{limit}": sum(share.limited_by == limit for share in shares) for limit in get_args(Limit)}
    return counts


def _not_served(stats: LogicalQueueStats | QueueStats) -> int:
    """Count the partitions that cannot be asked: their owner does not answer, or they are being opened or damaged."""
    return sum(partition.state in (UNHEARD, "error") for partition in stats.partitions)


EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)


class Source(Protocol):
    """State that a watch compares."""

    @property
    def audit(self) -> AuditTrail: ...

    def queues(self) -> list[QueueRecord]: ...

    def stats(self, queue_name: str) -> LogicalQueueStats:
        """Counts of this instance's partitions of the queue."""
        ...

    async def count(self, queue_name: str) -> QueueStats:
        """Counts of all partitions of the queue, on all instances."""
        ...

    @property
    def instances(self) -> Instances: ...

    def backends(self) -> list[BackendInfo]: ...


class Watch:
    """Looks once a second while it has readers, at this instance and through it at the others. Changes made while there was no reader are
    found when there is one again."""

    def __init__(self, source: Source) -> None:
        self.process = system.new_incarnation()
        self.ring = Ring()
        self.counts: Mapping[str, Counts] = {}
        """Counts by queue as of the last look. A queue's dictionary is replaced only if its counts have changed."""
        self._source = source
        self._sight: Sight | None = None
        self._looks = 0
        self._asked: dict[str, int] = {}
        """Number of the look in which other instances were last asked about a queue."""
        self._audit_at = system.now()
        self._audited: set[str] | None = None
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()
        self._begun = asyncio.Event()
        """Set once the first look since the first reader came is over."""

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Register a reader for the duration of the block."""
        self._readers += 1
        if self._task is None:
            self._begun.clear()
            # Counts of queues whose turn comes later would pass for current ones.
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
        """Wait for the first look since readers came; returns at once if there was one."""
        await self._begun.wait()

    async def looked(self) -> None:
        """Wait for the next look, or `wake`."""
        await self._looked.wait()

    def wake(self) -> None:
        """Wake the waiters of `looked`."""
        self._looked.set()
        self._looked = asyncio.Event()

    async def _run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("looking for events failed; retrying in a second")
            self._begun.set()
            await asyncio.sleep(INTERVAL)

    async def look(self) -> None:
        """Find and report changes. The first look is only the baseline."""
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
            # If a queue is deleted meanwhile, the next look reports it.
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
        circuits = {name for name, those in counts.items() if those["circuits_open"]}
        return Sight(queues, partitions, backends, instances, cluster.round, circuits), counts

    async def _ask_others(self, elsewhere: Sequence[str]) -> dict[str, QueueStats]:
        """Count those of the queues that are due, least recently asked first."""
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
            # Without the counts of a silent instance the sums would seem to fall.
            found = {**known, "not_served": _not_served(stats)}
        else:
            found = counts_of(stats)
        return known if known == found else found

    def _known_of(self, queues: Mapping[str, QueueRecord], names: Set[str]) -> dict[Place, Condition]:
        """Conditions of these queues' partitions as of the previous look."""
        before = self._sight.partitions if self._sight is not None else {}
        return {place: each for place, each in before.items() if place[0] in names and queues[place[0]].incarnation == place[1]}

    async def _tell_audit(self) -> None:
        """Report the audit entries of all processes on this meta store, each once."""
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
        """Report a rebalance's step from its audit entry, whichever instance carries it out."""
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
            # An entry about many partitions has only their number.
            named = partitions if isinstance(partitions, list) else []
            self.ring.add("rebalance.step", entry.queue_name, **about, step=step, partitions=named)
