"""Record of a rebalance in the meta store: its plan and its progress."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from sluiceway.contract.rebalances import DrainMode, RebalanceState, StepKind
from sluiceway.kernel.clock import Millis


class NewPartition(NamedTuple):
    """A partition to be created. It replaces `parents`."""

    partition: int
    backend: str
    parents: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """Plan of a rebalance: partitions to create, to drain and remove, and to keep.

    `reopens`: draining partitions to use again; only the plan of a cancellation has them. `in_order`: the queue's one partition is replaced
    by one, which gives out no items before the old one is gone. `by_key`: the queue keeps the items of a key together, so a slot's new home
    serves none of them before the former one has none left.
    """

    creates: tuple[NewPartition, ...] = ()
    drains: tuple[int, ...] = ()
    keeps: tuple[int, ...] = ()
    reopens: tuple[int, ...] = ()
    in_order: bool = False
    by_key: bool = False

    @property
    def drains_naturally(self) -> bool:
        """Whether what is ready stays where it is until consumers take it: elsewhere it would lie behind what was produced since."""
        return self.in_order or self.by_key

    @property
    def is_empty(self) -> bool:
        """Whether the plan changes nothing."""
        return not (self.creates or self.drains or self.reopens)


class StepDone(NamedTuple):
    """A completed step, with the instance that did it. `partition`: the one removed, for a removal."""

    kind: StepKind
    at: Millis
    by: str
    partition: int | None = None


class Rebalance(msgspec.Struct, frozen=True):
    """One rebalance of one queue. A queue has at most one that is open and not `waiting`; `QueueRecord.rebalance` names it.

    `step` is the next one. A waiting rebalance has an empty plan: it is planned when its turn comes.
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
    """Maximum items per second of a drain by copy; None: unlimited."""
    state: RebalanceState = "running"
    step: StepKind = "create"
    slots: tuple[int, ...] = ()
    """New home of each slot; (): not decided yet."""
    homes: tuple[int, ...] = ()
    """Previous home of each slot, which the queue's record lacks while a slot is MOVING."""
    slots_at_once: int = 0
    """Maximum number of slots handed over together; 0: all. Lowered if their keys do not fit into one message."""
    paused: tuple[int, ...] = ()
    """Draining partitions that were paused before; a cancellation pauses them again."""
    done: tuple[StepDone, ...] = ()
    started_at: Millis | None = None
    drain_at: Millis | None = None
    """Start of draining; `items`: their number then."""
    items: int = 0
    moved: int = 0
    """Items moved, as far as recorded: the last moves of a coordinator that died may be missing."""
    ended_at: Millis | None = None
    after: str | None = None
    """Id of the previous rebalance of the batch."""
    batch: str | None = None
    problem: str = ""
    """Reason for a lack of progress, or for the failure, as text."""
    retries: int = 0

    @property
    def is_open(self) -> bool:
        return self.ended_at is None


class LeftOut(NamedTuple):
    """A queue left out of a batch, with the reason as text."""

    queue_name: str
    reason: str


class RebalanceBatch(NamedTuple):
    """Result of a call for many queues: their rebalances, carried out one after another in this order, and the queues left out."""

    batch: str
    rebalances: list[Rebalance]
    left_out: list[LeftOut]


class RebalanceProgress(NamedTuple):
    """Items left to drain, as just counted: in total, leased, scheduled, and by partition.

    `rate_per_s`: mean since draining began; `time_left`: estimate from it. None: unknown. `by_partition` lacks partitions that do not
    answer.
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
