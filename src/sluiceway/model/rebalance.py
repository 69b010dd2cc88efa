"""A rebalance as the meta store records it: what it is to do, and how far it is."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sluiceway.contract.rebalances import DrainMode, RebalanceState, StepKind
from sluiceway.kernel.clock import Millis


class NewPartition(NamedTuple):
    """A partition that is to be made. Those of `parents` go in its stead."""

    partition: int
    backend: str
    parents: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """What a rebalance does: partitions that are made, those that are drained and removed, and those that stay.

    `reopens` are drained ones that go on after all: only a plan that goes back on another has them. `in_order`: the one partition of a
    queue is replaced by one, so the new one gives out nothing before the old one is gone.
    """

    creates: tuple[NewPartition, ...] = ()
    drains: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    reopens: tuple[int, ...] = ()
    in_order: bool = False

    @property
    def is_empty(self) -> bool:
        """There is nothing to do."""
        return not (self.creates or self.drains or self.reopens)


class StepDone(NamedTuple):
    """A step that was done, by which instance; `partition`: of a removal, which one."""

    kind: StepKind
    at: Millis
    by: str
    partition: int | None = None


class Rebalance(msgspec.Struct, frozen=True):
    """One rebalance of one queue. A queue has one that is open and not `waiting` at most; `QueueRecord.rebalance` names it.

    `step` is the one to be done next. A waiting one has an empty plan: it is made when its turn comes.
    """

    id: str
    queue_name: str
    incarnation: str
    requested_partitions: int
    plan: Plan
    drain: DrainMode
    created_at: Millis
    updated_at: Millis
    actor: str
    request_id: str = ""
    rate: int | None = None
    """Items a second that a drain by copy moves at most; None: as fast as it goes."""
    state: RebalanceState = "running"
    step: StepKind = "create"
    slots: tuple[int, ...] = ()
    """The homes that the keys are to have; (): not decided yet."""
    homes: tuple[int, ...] = ()
    """Those that they had before, which the queue's record does not say of a slot that is MOVING."""
    slots_at_once: int = 0
    """So many slots at most are handed over together; 0: all. Fewer where more are remembered than one message holds."""
    paused: tuple[int, ...] = ()
    """Partitions that it drains and that were paused: they are so again if it is cancelled."""
    done: tuple[StepDone, ...] = ()
    started_at: Millis | None = None
    drain_at: Millis | None = None
    """When draining began, and with how many items."""
    items: int = 0
    moved: int = 0
    """Items that were moved, as far as it is recorded: what a coordinator that died had moved last may be missing."""
    ended_at: Millis | None = None
    after: str | None = None
    """The rebalance of its batch that comes before it."""
    batch: str | None = None
    problem: str = ""
    """Why it does not get on, or has failed, in words."""
    retries: int = 0

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class LeftOut(NamedTuple):
    """A queue of a batch that is not rebalanced, and why, in words."""

    queue_name: str
    reason: str


class RebalanceBatch(NamedTuple):
    """What became of a call for many queues: their rebalances, carried out one after another, in this order."""

    batch: str
    rebalances: list[Rebalance]
    left_out: list[LeftOut]


class RebalanceProgress(NamedTuple):
    """What is left to drain, as counted just now: all items, those of them that are leased or scheduled, and by partition.

    `rate_per_s` is the mean since draining began; `time_left` what follows from it. None where nobody can say. A partition that does not
    answer is not in `by_partition`.
    """

    items_left: int
    leased_left: int
    scheduled_left: int
    by_partition: dict[int, int]
    rate_per_s: float | None = None
    time_left: Millis | None = None


def encode_rebalance(rebalance: Rebalance) -> bytes:
    return msgspec.json.encode(rebalance)


def decode_rebalance(data: bytes) -> Rebalance:
    return msgspec.json.decode(data, type=Rebalance)
