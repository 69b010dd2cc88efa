"""What happens to the queues and their backends, as events: found by looking at the instance each second while somebody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from sluiceway.adapters import system
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_AUDIT_TEXT, MAX_EVENTS
from sluiceway.model.audit import AuditEntry
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import QueueStats
from sluiceway.node.audit import AuditTrail, changes
from sluiceway.node.backend_pool import BackendInfo

log = logging.getLogger(__name__)

EventType = Literal[
    "queue.created",
    "queue.updated",
    "queue.paused",
    "queue.deleted",
    "partition.state",
    "backend.down",
    "backend.up",
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

Counts = dict[str, int]
"""A queue's items and requests, over all of its partitions."""


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


class Sight(NamedTuple):
    """What one look has seen."""

    queues: Mapping[str, QueueRecord]
    partitions: Mapping[Place, Condition]
    backends: Mapping[str, str | None]
    """Why it is not served, by name; None: it is."""


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
    changed = sorted(changes(old, new))
    if "paused" in changed:
        ring.add("queue.paused", new.queue_name, version=new.version, paused=new.paused)
        changed.remove("paused")
    if changed:
        ring.add("queue.updated", new.queue_name, version=new.version, changed=changed)


def counts_of(stats: QueueStats) -> Counts:
    """The queue's counts, under the names that `queue.stats` has for a partition's."""
    counts = dict.fromkeys(_SUMMED, 0)
    for partition in stats.partitions:
        for name, attribute in _SUMMED.items():
            counts[name] += getattr(partition, attribute)
    for name in _WAITING:
        counts[name] = getattr(stats, name)
    return counts


_SUMMED: Final = {
    **{name: name for name in ("total", "ready", "scheduled", "transferring", "leases", "failures")},
    **{name: name for name in ("produced", "deduplicated", "leased", "completed", "retried", "expired", "dead")},
    **{name: name for name in ("released", "cleared", "redriven")},
    "total_leased": "leased_now",
}
_WAITING: Final = ("produce_waiting", "lease_waiting", "complete_waiting", "in_flight")
EVENT_TYPES: Final[tuple[EventType, ...]] = get_args(EventType)


class Source(Protocol):
    """What is looked at."""

    @property
    def audit(self) -> AuditTrail: ...

    def queues(self) -> list[QueueRecord]: ...

    def stats(self, queue_name: str) -> QueueStats: ...

    def backends(self) -> list[BackendInfo]: ...


class Watch:
    """Looks at an instance each second as long as somebody reads. What happened while nobody did is found when somebody does again."""

    def __init__(self, source: Source) -> None:
        self.process = system.new_incarnation()
        self.ring = Ring()
        self.counts: Mapping[str, Counts] = {}
        """By queue, as of the last look. The counts of a queue are another object exactly if they have changed."""
        self._source = source
        self._sight: Sight | None = None
        self._audit_at = system.now()
        self._audited: set[str] | None = None
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._looked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Somebody reads, until the block ends."""
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

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
        queues = {record.queue_name: record for record in self._source.queues()}
        partitions: dict[Place, Condition] = {}
        counts: dict[str, Counts] = {}
        for number, (name, record) in enumerate(queues.items(), 1):
            if number % _QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                stats = self._source.stats(name)
            except SluicewayError:
                # Deleted in the meantime, which the next look will tell.
                continue
            found, known = counts_of(stats), self.counts.get(name)
            counts[name] = known if known == found else found
            for each in stats.partitions:
                partitions[name, record.incarnation, each.partition] = (each.state, each.degraded)
        return Sight(queues, partitions, {backend.name: backend.problem for backend in self._source.backends()}), counts

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
            self.ring.add("config.reloaded", changed=entry.detail.get("changed", []))
