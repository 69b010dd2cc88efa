"""What can be seen of a cluster: its instances, how they divide the partitions, and why one lies where it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluiceway.contract.instance_answers import InstanceState
from sluiceway.kernel.clock import Millis


@dataclass(slots=True)
class InstanceInfo:
    """An instance. `silent_for`: for how long the one that answers has not heard of it. `joined_at` None: not known."""

    name: str
    address: str
    here: bool
    state: InstanceState
    silent_for: Millis = 0
    joined_at: Millis | None = None
    partitions: int = 0
    """How many are given to it, of all queues."""


@dataclass(slots=True)
class RoundInfo:
    """The last round. While it is not `sealed`, the plan is that of the one before."""

    number: int
    sealed: bool
    trigger: str
    participants: Sequence[str]
    moved: int
    kept: int


@dataclass(slots=True)
class ClusterInfo:
    """The instances by name, and how they divide the partitions. An instance that is alone has no parameters and no rounds."""

    instances: Sequence[InstanceInfo]
    strategy: str
    era: int
    parameters: Mapping[str, Millis] | None = None
    round: RoundInfo | None = None


@dataclass(slots=True)
class Belonging:
    """Whose a partition is, and why. `waits_for` are instances that may still serve it, and have to stop first."""

    reason: str
    """In words."""
    owner: str | None = None
    address: str | None = None
    era: int = 1
    grant: int | None = None
    waits_for: Sequence[str] = field(default=())
