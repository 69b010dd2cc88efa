"""Rebalances as Python sees them, as `answers` has the rest."""

from __future__ import annotations

from datetime import datetime

import msgspec

ENDED = ("done", "cancelled", "failed")
"""The states in which a rebalance ends."""


class OpenRebalance(msgspec.Struct, frozen=True, kw_only=True):
    """The rebalance that a queue has open, in short. What cannot be told at the moment is None."""

    id: str
    state: str | None = None
    step: str | None = None
    items_left: int | None = None


class NewPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that is made, in the stead of its `parents`."""

    partition: int
    backend: str
    parents: list[int] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with the partitions, by their numbers. `reopens` are drained ones that go on after all.

    `in_order`: the new partition gives out nothing before the old one is gone, so the order of the queue stays.
    """

    creates: list[NewPartition] = []
    drains: list[int] = []
    keeps: list[int] = []
    reopens: list[int] = []
    in_order: bool = False

    @property
    def is_empty(self) -> bool:
        """There is nothing to do."""
        return not (self.creates or self.drains or self.reopens)


class PresentPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that the queue has now. `items` None: they cannot be counted at the moment."""

    partition: int
    backend: str
    state: str
    items: int | None = None


class RebalancePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a rebalance would do now. Pass its `plan_id` to `rebalance`, and exactly this is done or nothing."""

    queue_name: str
    plan_id: str
    requested_partitions: int
    plan: Plan
    partitions: list[PresentPartition] = []


class RebalanceStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step that is done, by which instance; `partition`: of the removal of one, which."""

    step: str
    at: datetime
    instance: str
    partition: int | None = None


class DrainingPartition(msgspec.Struct, frozen=True, kw_only=True):
    """What is left in a partition that is being drained."""

    partition: int
    items_left: int


class RebalanceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far draining is, as far as the owners of the partitions answer. `time_left` (such as `3m20s`) is an estimate."""

    items_left: int
    leased_left: int = 0
    scheduled_left: int = 0
    partitions: list[DrainingPartition] = []
    rate_per_s: float | None = None
    time_left: str | None = None


class Rebalance(msgspec.Struct, frozen=True, kw_only=True):
    """A rebalance of a queue, of that `incarnation`. `step` is the one to be done next.

    `state` is waiting, running, cancelling, done, cancelled or failed.

    `items` are those that there were to drain, `moved` those that were moved. `problem` says why it does not get on, or has failed.
    """

    id: str
    queue_name: str
    state: str
    step: str
    requested_partitions: int
    plan: Plan
    drain: str
    created_at: datetime
    updated_at: datetime
    actor: str
    incarnation: str = ""
    request_id: str = ""
    rate: int | None = None
    started_at: datetime | None = None
    drain_at: datetime | None = None
    ended_at: datetime | None = None
    items: int = 0
    moved: int = 0
    steps: list[RebalanceStep] = []
    batch: str | None = None
    after: str | None = None
    problem: str | None = None
    retries: int = 0
    progress: RebalanceProgress | None = None

    @property
    def is_open(self) -> bool:
        return self.state not in ENDED


class RebalancePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some rebalances, newest first; `next` is the pivot of the next, older page, None on the last."""

    items: list[Rebalance]
    next: str | None = None


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A queue of which no rebalance was begun, and why."""

    queue_name: str
    reason: str


class RebalanceBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Rebalances that are carried out one after the other."""

    batch: str
    rebalances: list[Rebalance]
    left_out: list[LeftOut] = []
