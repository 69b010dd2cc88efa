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
    """A queue's open rebalance, in short. Unknown fields are null."""

    id: Annotated[str, about("Id of the rebalance.")]
    state: Annotated[Annotated[str, one_of(RebalanceState)] | None, about("As in `rebalances.get`; null: not known at the moment.")] = None
    step: Annotated[Annotated[str, one_of(StepKind)] | None, about("As in `rebalances.get`; null: not known at the moment.")] = None
    items_left: Annotated[int | None, about("Items left in draining partitions; null: not counted, or not known.")] = None


class NewPartition(Answer, frozen=True, kw_only=True):
    """A partition that a rebalance creates. It replaces its `parents`."""

    partition: int
    backend: str
    parents: Annotated[list[int], about("Partitions that it replaces.")] = []


class Plan(Answer, frozen=True, kw_only=True):
    """What a rebalance does with each partition, by number."""

    creates: Annotated[list[NewPartition], about("New partitions.")] = []
    drains: Annotated[list[int], about("Partitions that are drained, and removed once empty.")] = []
    keeps: Annotated[list[int], about("Partitions that stay.")] = []
    reopens: Annotated[list[int], about("Drained partitions that are used again, after a cancellation.")] = []
    in_order: Annotated[
        bool, about("The queue stays ordered: one partition replaces the only one, and serves no items before the old one is removed.")
    ] = False
    by_key: Annotated[
        bool,
        about(
            "The queue keeps the items of a key together: the new partition of a key that moves serves none of them before its former one "
            "has served all of its own."
        ),
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
    items: Annotated[int | None, about("Number of its items; null: not known at the moment.")] = None


class RebalancePlan(Answer, frozen=True, kw_only=True):
    """What a rebalance would do now. `queue.rebalance` with this `plan_id` does exactly this, or nothing."""

    queue_name: QueueName
    plan_id: Annotated[str, about("Id of exactly this plan.")]
    requested_partitions: int
    plan: Annotated[Plan, about("The plan for each partition.")]
    partitions: list[PresentPartition] = []


class RebalanceStep(Answer, frozen=True, kw_only=True):
    """A completed step."""

    step: Annotated[str, one_of(StepKind), about("The step.")]
    at: Time
    instance: Annotated[str, about("The instance that completed it.")]
    partition: Annotated[int | None, about("The removed partition, if the step removes one.")] = None


class DrainingPartition(Answer, frozen=True, kw_only=True):
    """What is left in a partition that is being drained."""

    partition: int
    items_left: int


class RebalanceProgress(Answer, frozen=True, kw_only=True):
    """Progress of the drain, from the partitions whose owners answered."""

    items_left: Annotated[int, about("Items left in draining partitions.")]
    leased_left: Annotated[int, about("Leased items among them.")] = 0
    scheduled_left: Annotated[int, about("Scheduled items among them.")] = 0
    partitions: Annotated[list[DrainingPartition], about("The draining partitions whose owners answered.")] = []
    rate_per_s: Annotated[float | None, about("Average number of items drained per second; null: not known.")] = None
    time_left: Annotated[Duration | None, about("Estimated time until the partitions are drained; null: not known.")] = None


class Rebalance(Answer, frozen=True, kw_only=True):
    """A rebalance of a queue."""

    id: Annotated[str, about("Id of the rebalance. Later rebalances have greater ids.")]
    queue_name: QueueName
    incarnation: str = ""
    state: Annotated[
        str,
        one_of(RebalanceState),
        about("`waiting` (for the one before it in its batch), `running`, `cancelling`, or how it ended: `done`, `cancelled`, `failed`."),
    ]
    step: Annotated[str, one_of(StepKind), about("The next step: `create`, `flip`, `shut`, `keys`, `drain`, `finish`.")]
    requested_partitions: int
    plan: Annotated[Plan, about("The plan for each partition.")]
    drain: Annotated[str, one_of(DrainMode)]
    rate: Annotated[int | None, about("Maximum number of items moved per second; null: no limit.")] = None
    actor: str
    request_id: Annotated[str, about("Id of the request, to find it in the server's log.")] = ""
    created_at: Annotated[Time, about("When it was requested.")]
    updated_at: Annotated[Time, about("When its record last changed.")]
    started_at: Annotated[Time | None, about("When its first step started; null: not yet.")] = None
    drain_at: Annotated[Time | None, about("When draining started; null: not yet.")] = None
    ended_at: Annotated[Time | None, about("When it ended; null: it is open.")] = None
    items: Annotated[int, about("Items to drain when draining started.")] = 0
    moved: Annotated[int, about("Items moved to other partitions.")] = 0
    steps: Annotated[list[RebalanceStep], about("The completed steps, in order.")] = []
    batch: Annotated[str | None, about("Id shared by all rebalances of one call.")] = None
    after: Annotated[str | None, about("The previous rebalance of its batch, which it waits for; null: none.")] = None
    problem: Annotated[str | None, about("Why it makes no progress or has failed; null: no problem.")] = None
    retries: Annotated[int, about("Number of retried steps.")] = 0
    progress: Annotated[RebalanceProgress | None, about("Progress of the drain; null: not requested, or not draining.")] = None

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

    batch: Annotated[str, about("Id shared by all rebalances of one call.")]
    rebalances: Annotated[list[Rebalance], about("The started rebalances, in order.")]
    left_out: Annotated[list[LeftOut], about("Queues without a new rebalance.")] = []
