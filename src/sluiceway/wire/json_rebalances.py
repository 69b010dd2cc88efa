"""JSON calls on rebalances, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sluiceway.kernel.clock import Millis, format_duration, format_time
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.model import rebalance as model
from sluiceway.model.access import check_pattern
from sluiceway.model.queue import QueueRecord
from sluiceway.model.rebalance import DrainMode, RebalanceBatch, RebalanceProgress, RebalanceState, StepKind
from sluiceway.wire.decoding import Call, JsonDecoder, PartitionNumber, given_queue, given_text
from sluiceway.wire.shapes import Duration, Label, Pattern, QueueName, Shape, Time

MAX_LISTED = 100
MAX_RATE = 1_000_000_000
_SECOND = 1_000
"""An estimate has no milliseconds."""
PartitionCount = Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)]
Rate = Annotated[int, Meta(ge=1, le=MAX_RATE)]


# -- calls ------------------------------------------------------------------------------------------------------------


class PlanCall(Call):
    requested_partitions: PartitionCount | None = None


class RebalanceCall(Call):
    requested_partitions: PartitionCount | None = None
    drain: DrainMode = "natural"
    rate: Rate | None = None
    plan_id: Label | None = None

    def checked(self) -> RebalanceCall:
        _check_rate(self.drain, self.rate)
        given_text(self.plan_id, "plan_id")
        return self


class RebalanceManyCall(msgspec.Struct, forbid_unknown_fields=True):
    """Of all queues whose names match, or of `all`: one of the two."""

    match: Pattern | None = None
    all: bool = False
    requested_partitions: PartitionCount | None = None
    drain: DrainMode = "natural"
    rate: Rate | None = None

    def pattern(self) -> str:
        _check_rate(self.drain, self.rate)
        if self.all == (self.match is not None):
            raise invalid("match", "say which queues: a pattern of names such as orders-*, or else all")
        return "*" if self.match is None else check_pattern(self.match, "match")


class RebalanceIdCall(msgspec.Struct, forbid_unknown_fields=True):
    """`rebalances.get` and `rebalances.cancel`."""

    id: Label

    def checked(self) -> str:
        given_text(self.id, "id")
        return self.id


class RebalancesListCall(msgspec.Struct, forbid_unknown_fields=True):
    """`pivot`: the id of the rebalance to go on after, which is to say before in time."""

    queue_name: QueueName | None = None
    open: bool = False
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    pivot: Label | None = None

    def checked(self) -> RebalancesListCall:
        given_queue(self.queue_name, "queue_name")
        given_text(self.pivot, "pivot")
        return self


class PartitionCall(Call):
    """`partition.pause` and `partition.resume`."""

    partition: PartitionNumber


def _check_rate(drain: DrainMode, rate: int | None) -> None:
    if rate is not None and drain != "copy":
        raise invalid("rate", "goes with drain copy: a natural drain is as fast as the consumers are")


decode_plan = JsonDecoder(PlanCall)
decode_rebalance = JsonDecoder(RebalanceCall)
decode_many = JsonDecoder(RebalanceManyCall)
decode_id = JsonDecoder(RebalanceIdCall)
decode_list = JsonDecoder(RebalancesListCall)
decode_partition = JsonDecoder(PartitionCall)


# -- answers ----------------------------------------------------------------------------------------------------------


class NewPartitionInfo(Shape):
    """A partition that is made, in the stead of its parents."""

    partition: int
    backend: str
    parents: list[int]


class PlanInfo(Shape):
    """What is done with the partitions, by their numbers."""

    creates: list[NewPartitionInfo]
    drains: list[int]
    keeps: list[int]
    reopens: list[int]
    in_order: bool


class PresentPartition(Shape):
    """A partition that the queue has now."""

    partition: int
    backend: str
    state: str
    items: int | None


class RebalancePlan(Shape):
    """What a rebalance would do now. With nothing to do it makes and drains none."""

    queue_name: QueueName
    plan_id: str
    requested_partitions: int
    plan: PlanInfo
    partitions: list[PresentPartition]


class StepInfo(Shape):
    """A step that is done."""

    step: StepKind
    at: Time
    instance: str
    partition: int | None


class DrainingPartition(Shape):
    """What is left in a partition that is being drained."""

    partition: int
    items_left: int


class ProgressInfo(Shape):
    """How far draining is, as far as the owners of the partitions answer."""

    items_left: int
    leased_left: int
    scheduled_left: int
    partitions: list[DrainingPartition]
    rate_per_s: float | None
    time_left: Duration | None


class RebalanceInfo(Shape):
    """A rebalance of a queue."""

    id: str
    queue_name: QueueName
    incarnation: str
    state: RebalanceState
    step: StepKind
    requested_partitions: int
    plan: PlanInfo
    drain: DrainMode
    rate: int | None
    actor: str
    request_id: str
    created_at: Time
    updated_at: Time
    started_at: Time | None
    drain_at: Time | None
    ended_at: Time | None
    items: int
    moved: int
    steps: list[StepInfo]
    batch: str | None
    after: str | None
    problem: str | None
    retries: int
    progress: ProgressInfo | None


class RebalancePage(Shape):
    """Some rebalances, newest first. `next` is the pivot of the page with older ones."""

    items: list[RebalanceInfo]
    next: str | None


class LeftOut(Shape):
    """A queue of which no rebalance was begun, and why."""

    queue_name: QueueName
    reason: str


class BatchInfo(Shape):
    """Rebalances that are carried out one after the other."""

    batch: str
    rebalances: list[RebalanceInfo]
    left_out: list[LeftOut]


class Planned(NamedTuple):
    """A plan and what it was made for; `items` by partition, of those that are known."""

    plan_id: str
    plan: model.Plan
    requested_partitions: int
    record: QueueRecord
    items: Mapping[int, int]


def planned(found: Planned) -> bytes:
    present = [
        PresentPartition(each.partition, each.backend, each.state, found.items.get(each.partition)) for each in found.record.partitions
    ]
    return msgspec.json.encode(
        RebalancePlan(found.record.queue_name, found.plan_id, found.requested_partitions, _plan(found.plan), present)
    )


def _plan(plan: model.Plan) -> PlanInfo:
    creates = [NewPartitionInfo(each.partition, each.backend, list(each.parents)) for each in plan.creates]
    return PlanInfo(creates, list(plan.drains), list(plan.keeps), list(plan.reopens), plan.in_order)


def rebalance(found: model.Rebalance, progress: RebalanceProgress | None = None) -> bytes:
    return msgspec.json.encode(_rebalance(found, progress))


def _rebalance(found: model.Rebalance, progress: RebalanceProgress | None = None) -> RebalanceInfo:
    return RebalanceInfo(
        id=found.id,
        queue_name=found.queue_name,
        incarnation=found.incarnation,
        state=found.state,
        step=found.step,
        requested_partitions=found.requested_partitions,
        plan=_plan(found.plan),
        drain=found.drain,
        rate=found.rate,
        actor=found.actor,
        request_id=found.request_id,
        created_at=format_time(found.created_at),
        updated_at=format_time(found.updated_at),
        started_at=_time(found.started_at),
        drain_at=_time(found.drain_at),
        ended_at=_time(found.ended_at),
        items=found.items,
        moved=found.moved,
        steps=[StepInfo(each.kind, format_time(each.at), each.by, each.partition) for each in found.done],
        batch=found.batch,
        after=found.after,
        problem=found.problem or None,
        retries=found.retries,
        progress=None if progress is None else _progress(progress),
    )


def _progress(progress: RebalanceProgress) -> ProgressInfo:
    return ProgressInfo(
        progress.items_left,
        progress.leased_left,
        progress.scheduled_left,
        [DrainingPartition(partition, left) for partition, left in sorted(progress.by_partition.items())],
        None if progress.rate_per_s is None else round(progress.rate_per_s, 1),
        None if progress.time_left is None else format_duration(-(-progress.time_left // _SECOND) * _SECOND),
    )


def _time(at: Millis | None) -> str | None:
    return None if at is None else format_time(at)


def page(found: Sequence[model.Rebalance], limit: int) -> bytes:
    """The first `limit` of them; whether there are more says whether there is a next page."""
    following = found[limit - 1].id if len(found) > limit else None
    return msgspec.json.encode(RebalancePage([_rebalance(each) for each in found[:limit]], following))


def batch(found: RebalanceBatch) -> bytes:
    return msgspec.json.encode(
        BatchInfo(found.batch, _all(found.rebalances), [LeftOut(queue_name, reason) for queue_name, reason in found.left_out])
    )


def _all(rebalances: Iterable[model.Rebalance]) -> list[RebalanceInfo]:
    return [_rebalance(each) for each in rebalances]
