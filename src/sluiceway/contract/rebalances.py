"""Rebalances, as the server answers them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from sluiceway.contract.fields import Answer, Duration, QueueName, Time, about, one_of

DrainMode = Literal["natural", "copy"]
"""How the backlog of a draining partition goes: consumers take it, or it is moved to other partitions, each item once. Scheduled items
and delayed retries are moved in both, so that no drain waits for a due time; what is leased is finished where it is."""

PartitionState = Literal["available", "preparing", "draining", "paused"]
"""What a partition is for, as recorded; `core.partition.partition_states` says what each allows."""

RebalanceState = Literal["waiting", "running", "cancelling", "done", "cancelled", "failed"]
"""`waiting`: for the one before it in its batch. `cancelling`: it goes back to how it was. The last three are its ends."""

StepKind = Literal["create", "flip", "shut", "keys", "drain", "finish"]
"""The steps, in their order.

* create: the new partitions are recorded, placed and opened; nothing uses them yet.
* flip: in one commit the old ones are `draining`, and the new ones are `available` (of a queue that keeps its order: after `keys`).
* shut: the old ones durably refuse to take items, whichever instance owns them and whatever it knows.
* keys: idempotency keys get their new homes, and these are told what the former ones remember.
* drain: each old one is emptied, shut for good while it is seen to be empty, and removed.
* finish: the rebalance is closed.
"""

ENDED: Final = ("done", "cancelled", "failed")
"""The states in which a rebalance ends."""


class OpenRebalance(Answer, frozen=True, kw_only=True):
    """The rebalance that a queue has open, in short. What cannot be told at the moment is null."""

    id: Annotated[str, about("Names the rebalance.")]
    state: Annotated[Annotated[str, one_of(RebalanceState)] | None, about("As in `rebalances.get`; null: not known at the moment.")] = None
    step: Annotated[Annotated[str, one_of(StepKind)] | None, about("As in `rebalances.get`; null: not known at the moment.")] = None
    items_left: Annotated[int | None, about("Items left in the partitions that are drained; null: not counted, or not known.")] = None


class NewPartition(Answer, frozen=True, kw_only=True):
    """A partition that a rebalance makes. It replaces its `parents`."""

    partition: int
    backend: str
    parents: Annotated[list[int], about("Partitions that it replaces.")] = []


class Plan(Answer, frozen=True, kw_only=True):
    """What a rebalance does with each partition, by number."""

    creates: Annotated[list[NewPartition], about("Partitions that are made.")] = []
    drains: Annotated[list[int], about("Partitions that are drained, and removed when they are empty.")] = []
    keeps: Annotated[list[int], about("Partitions that stay.")] = []
    reopens: Annotated[list[int], about("Drained partitions that go on after all: of a rebalance that was cancelled.")] = []
    in_order: Annotated[
        bool, about("One partition replaces the only one, and gives out nothing before the old one is gone: the queue keeps its order.")
    ] = False

    @property
    def is_empty(self) -> bool:
        """There is nothing to do."""
        return not (self.creates or self.drains or self.reopens)


class PresentPartition(Answer, frozen=True, kw_only=True):
    """A partition that the queue has now."""

    partition: int
    backend: str
    state: Annotated[str, one_of(PartitionState), about("`available`, `preparing`, `draining` or `paused`.")]
    items: Annotated[int | None, about("Items in it; null: they cannot be counted at the moment.")] = None


class RebalancePlan(Answer, frozen=True, kw_only=True):
    """What a rebalance would do now. `rebalance` with its `plan_id` does exactly this or nothing."""

    queue_name: QueueName
    plan_id: Annotated[str, about("Stands for exactly this plan.")]
    requested_partitions: int
    plan: Annotated[Plan, about("What is done with each partition.")]
    partitions: list[PresentPartition] = []


class RebalanceStep(Answer, frozen=True, kw_only=True):
    """A step that is done."""

    step: Annotated[str, one_of(StepKind), about("Which one.")]
    at: Time
    instance: Annotated[str, about("The instance that did it.")]
    partition: Annotated[int | None, about("Of the removal of a partition: which one.")] = None


class DrainingPartition(Answer, frozen=True, kw_only=True):
    """What is left in a partition that is being drained."""

    partition: int
    items_left: int


class RebalanceProgress(Answer, frozen=True, kw_only=True):
    """How far draining is, as far as the owners of the partitions answer."""

    items_left: Annotated[int, about("Items left in the partitions that are drained.")]
    leased_left: Annotated[int, about("Those of them that are leased.")] = 0
    scheduled_left: Annotated[int, about("Those of them that are scheduled.")] = 0
    partitions: Annotated[list[DrainingPartition], about("The partitions that are drained, and answer.")] = []
    rate_per_s: Annotated[float | None, about("Items a second that were drained, on average; null: not known.")] = None
    time_left: Annotated[Duration | None, about("How long draining will take at this rate; null: not known.")] = None


class Rebalance(Answer, frozen=True, kw_only=True):
    """A rebalance of a queue."""

    id: Annotated[str, about("Names the rebalance; a later one has a greater id.")]
    queue_name: QueueName
    incarnation: str = ""
    state: Annotated[
        str,
        one_of(RebalanceState),
        about("`waiting` (for the one before it in its batch), `running`, `cancelling`, or how it ended: `done`, `cancelled`, `failed`."),
    ]
    step: Annotated[str, one_of(StepKind), about("The step to be done next: `create`, `flip`, `shut`, `keys`, `drain`, `finish`.")]
    requested_partitions: int
    plan: Annotated[Plan, about("What is done with each partition.")]
    drain: Annotated[str, one_of(DrainMode)]
    rate: Annotated[int | None, about("Items moved in a second at most; null: as fast as it goes.")] = None
    actor: str
    request_id: Annotated[str, about("Finds the request that asked for it in the server's log.")] = ""
    created_at: Annotated[Time, about("When it was asked for.")]
    updated_at: Annotated[Time, about("When its record last changed.")]
    started_at: Annotated[Time | None, about("When its first step was begun; null: not yet.")] = None
    drain_at: Annotated[Time | None, about("When draining began; null: not yet.")] = None
    ended_at: Annotated[Time | None, about("When it ended; null: it is open.")] = None
    items: Annotated[int, about("Items that there were to drain when draining began.")] = 0
    moved: Annotated[int, about("Items that it has moved to other partitions.")] = 0
    steps: Annotated[list[RebalanceStep], about("The steps that are done, in their order.")] = []
    batch: Annotated[str | None, about("Those that were begun by one call have the same.")] = None
    after: Annotated[str | None, about("The one before it in its batch, which it waits for; null: none.")] = None
    problem: Annotated[str | None, about("Why it makes no progress, or has failed; null: nothing is wrong.")] = None
    retries: Annotated[int, about("How often a step had to be tried again.")] = 0
    progress: Annotated[
        RebalanceProgress | None, about("How far it is; null where it is not asked for, or there is nothing under way.")
    ] = None

    @property
    def is_open(self) -> bool:
        """It has not ended."""
        return self.state not in ENDED


class RebalancePage(Answer, frozen=True, kw_only=True):
    """Some rebalances, newest first."""

    items: Annotated[list[Rebalance], about("The rebalances of this page.")]
    next: Annotated[str | None, about("The pivot of the next, older page; null on the last.")] = None


class LeftOut(Answer, frozen=True, kw_only=True):
    """A queue of which no rebalance was begun, and why."""

    queue_name: QueueName
    reason: Annotated[str, about("Why.")]


class RebalanceBatch(Answer, frozen=True, kw_only=True):
    """Rebalances that are carried out one after another."""

    batch: Annotated[str, about("Those that were begun by one call have the same.")]
    rebalances: Annotated[list[Rebalance], about("Those that were begun, in their order.")]
    left_out: Annotated[list[LeftOut], about("Queues of which none was begun.")] = []
