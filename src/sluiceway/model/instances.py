"""View of a cluster: its instances, how they divide the partitions, and the ownership of one partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluiceway.contract.instance_answers import InstanceState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.compatibility import Levels


@dataclass(slots=True)
class InstanceInfo:
    """An instance. `silent_for`: time since the answering instance last heard of it. `joined_at` None: not known."""

    name: str
    address: str
    here: bool
    state: InstanceState
    silent_for: Millis = 0
    joined_at: Millis | None = None
    partitions: int = 0
    """Number of partitions it owns, over all queues."""
    release: str = ""
    """Its version of Sluiceway; empty: not known."""
    levels: Levels | None = None
    zone: str = ""
    """Its failure domain; empty: none."""
    load: float | None = None
    """What its partitions take of what an instance can do, as it last reported; None: not known. `items`, `bytes`: per second."""
    items: int | None = None
    bytes: int | None = None


@dataclass(slots=True)
class RoundInfo:
    """The last round. Until it is `sealed`, the previous round's plan applies."""

    number: int
    sealed: bool
    trigger: str
    participants: Sequence[str]
    moved: int
    kept: int


class PinInfo(NamedTuple):
    """A pinned partition. `instance`, `zone`: empty unless it is pinned to one."""

    queue_name: str
    partition: int
    instance: str
    zone: str


@dataclass(slots=True)
class ClusterInfo:
    """The instances by name, and the division of the partitions. An instance that is alone has no parameters and no rounds.

    `level`: the compatibility level in use; all instances understand `reachable_level`.
    """

    instances: Sequence[InstanceInfo]
    strategy: str
    era: int
    level: int
    reachable_level: int
    parameters: Mapping[str, Millis] | None = None
    round: RoundInfo | None = None
    load_moves: int | None = None
    """Partitions that may move in a minute to level loads; None: no cluster."""
    pins: Sequence[PinInfo] = ()


@dataclass(slots=True)
class Belonging:
    """Ownership of a partition, with its reason. `waits_for`: instances that may still serve it, and have to stop first."""

    reason: str
    """As text."""
    owner: str | None = None
    address: str | None = None
    era: int = 1
    grant: int | None = None
    waits_for: Sequence[str] = field(default=())
    pinned_instance: str = ""
    pinned_zone: str = ""
