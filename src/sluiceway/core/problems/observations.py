"""What the judge is told: a sample of an instance's share of a queue, and one of the instance itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sluiceway.core.partition.held_keys import Holder
from sluiceway.kernel.clock import Millis


class QueueFacts(NamedTuple):
    """What is known of a queue besides its counts. `is_dead_queue`: another queue's dead items go there, so nobody need consume it.
    `updated_at`: last change of its settings. `target_age`: 0: none. `order`: whether it is ordered by key."""

    queue_name: str
    paused: tuple[str, ...] = ()
    dead_queue: str | None = None
    is_dead_queue: bool = False
    target_age: Millis = 0
    updated_at: Millis = 0
    incarnation: str = ""
    order: bool = False


class Repeat(NamedTuple):
    """An item that failed again and again. `attempts`: failed ones; `at`: the last failure."""

    partition: int
    offset: int
    attempts: int
    at: Millis


class HeldUp(NamedTuple):
    """A key whose items wait for one of them. `key`: its text; empty: it could not be read."""

    partition: int
    holder: Holder
    key: str = ""


class FailedQuery(NamedTuple):
    """A streaming query that ended with an error."""

    client_id: str
    name: str
    error: str
    told_at: Millis


Lease = tuple[int, int]
"""A lease, by partition and number."""


class QueueSample(NamedTuple):
    """The share at a time. Counts since the share began; `oldest_at`: when the next item was produced. `waiting`: clients whose lease call
    waits; `seen_at`: the last lease call. `held`: open items by client and lease, of the oldest leases. `unserved`: partitions that are not
    open, with the reason. `slowest`: partition with the slowest commit of the last seconds, and its duration."""

    at: Millis
    ready: int = 0
    leased: int = 0
    scheduled: int = 0
    oldest_at: Millis | None = None
    produced: int = 0
    taken: int = 0
    completed: int = 0
    retried: int = 0
    expired: int = 0
    dead: int = 0
    released: int = 0
    waiting: tuple[str, ...] = ()
    seen_at: Millis | None = None
    held: Mapping[str, Mapping[Lease, int]] = MappingProxyType({})
    repeats: tuple[Repeat, ...] = ()
    refused: Mapping[str, int] = MappingProxyType({})
    """Refused produces by error code, since the share began."""
    partitions: int = 1
    unserved: Mapping[int, str] = MappingProxyType({})
    slowest: Millis = 0
    failed_queries: tuple[FailedQuery, ...] = ()
    failure: str = ""
    """Reason of the latest failed attempt of the last minute."""
    circuit_since: Millis | None = None
    """When the circuit breaker opened; None: it is closed, or there is none."""
    blocked: int = 0
    """Ready items that no consumer can get now, because of their keys."""
    held_up: tuple[HeldUp, ...] = ()
    """In order, keys behind items that fail again and again, and the key that most items wait behind of the old leases and the retries that
    are far off."""
    held_keys: Mapping[str, int] = MappingProxyType({})
    """In order, while clients wait and nothing can be leased: the consumers that could have a client's items, up to MIN_HOARD."""

    @property
    def servable(self) -> int:
        return self.ready - self.blocked


class BackendSample(NamedTuple):
    """A backend: why it does not serve (None: it does), and the slowest commit of the last seconds, with its queue."""

    name: str
    problem: str | None
    slowest: Millis = 0
    queue_name: str = ""


class InstanceSample(NamedTuple):
    """The instance itself. `silent`: other instances without a sign of life. `idle`: why it serves no partitions of its own. `disks`:
    disks that are full, with the reason. `throttled`: by whose bucket it is, the share of requests since the last sample that it
    refused because there were too many. `clock`: what is wrong with the clock; empty: nothing. `level`: the compatibility level, and
    `reachable_level` the one that finalizing the upgrade would set."""

    at: Millis
    backends: tuple[BackendSample, ...] = ()
    silent: tuple[str, ...] = ()
    idle: str = ""
    disks: Mapping[str, str] = MappingProxyType({})
    throttled: Mapping[str, float] = MappingProxyType({})
    clock: str = ""
    level: int = 0
    reachable_level: int = 0
