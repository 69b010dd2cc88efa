"""JSON codec of the calls on rebalances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from sluiceway.contract import rebalances as answers
from sluiceway.contract.fields import Label, Pattern, QueueName, time_field
from sluiceway.contract.instance_answers import PartitionPin
from sluiceway.contract.rebalances import DrainMode
from sluiceway.core.group.group_records import Pin
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name, check_zone
from sluiceway.model import rebalance as model
from sluiceway.model.access import check_pattern
from sluiceway.model.queue import QueueRecord
from sluiceway.model.rebalance import RebalanceBatch, RebalanceProgress
from sluiceway.wire.decoding import Call, JsonDecoder, PartitionNumber, given_queue, given_text

MAX_LISTED = 100
MAX_RATE = 1_000_000_000
_SECOND = 1_000
"""In milliseconds. Estimated times are rounded up to whole seconds."""
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
        """The call itself, once it is checked. Raises `invalid_request`."""
        _check_rate(self.drain, self.rate)
        given_text(self.plan_id, "plan_id")
        return self


class RebalanceManyCall(msgspec.Struct, forbid_unknown_fields=True):
    """Rebalance the queues whose names match `match`, or all queues with `all`. Give exactly one of the two."""

    match: Pattern | None = None
    all: bool = False
    requested_partitions: PartitionCount | None = None
    drain: DrainMode = "natural"
    rate: Rate | None = None

    def pattern(self) -> str:
        """The pattern of queue names. Raises `invalid_request`."""
        _check_rate(self.drain, self.rate)
        if self.all == (self.match is not None):
            raise invalid("match", "give either match, a pattern of queue names such as orders-*, or all")
        return "*" if self.match is None else check_pattern(self.match, "match")


class RebalanceIdCall(msgspec.Struct, forbid_unknown_fields=True):
    """`rebalances.get` and `rebalances.cancel`."""

    id: Label

    def checked(self) -> str:
        """The checked id. Raises `invalid_request`."""
        given_text(self.id, "id")
        return self.id


class RebalancesListCall(msgspec.Struct, forbid_unknown_fields=True):
    """List rebalances, newest first. `pivot`: the id of the previous page's last one; the page continues with older ones."""

    queue_name: QueueName | None = None
    open: bool = False
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED)] = 20
    pivot: Label | None = None

    def checked(self) -> RebalancesListCall:
        """The call itself, once its texts are checked. Raises `invalid_request`."""
        given_queue(self.queue_name, "queue_name")
        given_text(self.pivot, "pivot")
        return self


class PartitionCall(Call):
    """`partition.pause` and `partition.resume`."""

    partition: PartitionNumber


class PartitionPinCall(Call):
    """Pin a partition to one of the two."""

    partition: PartitionNumber
    instance: str | None = None
    zone: str | None = None

    def pin(self) -> Pin:
        """The checked pin. Raises `invalid_request`."""
        if (self.instance is None) == (self.zone is None):
            raise invalid("instance", "give either instance or zone")
        if self.instance is not None:
            return Pin(instance=check_queue_name(self.instance, "instance"))
        zone = check_zone(self.zone)
        if not zone:
            raise invalid("zone", "the name of a zone is required")
        return Pin(zone=zone)


def _check_rate(drain: DrainMode, rate: int | None) -> None:
    if rate is not None and drain != "copy":
        raise invalid("rate", "requires drain copy: a natural drain proceeds at the consumers' pace")


decode_plan = JsonDecoder(PlanCall)
decode_rebalance = JsonDecoder(RebalanceCall)
decode_many = JsonDecoder(RebalanceManyCall)
decode_id = JsonDecoder(RebalanceIdCall)
decode_list = JsonDecoder(RebalancesListCall)
decode_partition = JsonDecoder(PartitionCall)
decode_pin = JsonDecoder(PartitionPinCall)


def partition_pin(queue_name: str, partition: int, pin: Pin | None) -> bytes:
    """A partition's pin, or that it has none, as JSON."""
    instance, zone = ("", "") if pin is None else (pin.instance, pin.zone)
    return msgspec.json.encode(PartitionPin(queue_name=queue_name, partition=partition, instance=instance or None, zone=zone or None))


# -- answers ----------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A rebalance plan and the queue that it is for. `items`: item counts by partition, where they are known."""

    plan_id: str
    plan: model.Plan
    requested_partitions: int
    record: QueueRecord
    items: Mapping[int, int]


def planned(found: Planned) -> bytes:
    """A rebalance plan as JSON."""
    return msgspec.json.encode(
        answers.RebalancePlan(
            queue_name=found.record.queue_name,
            plan_id=found.plan_id,
            requested_partitions=found.requested_partitions,
            plan=_plan(found.plan),
            partitions=[
                answers.PresentPartition(
                    partition=each.partition, backend=each.backend, state=each.state, items=found.items.get(each.partition)
                )
                for each in found.record.partitions
            ],
        )
    )


def _plan(plan: model.Plan) -> answers.Plan:
    return answers.Plan(
        creates=[answers.NewPartition(partition=each.partition, backend=each.backend, parents=list(each.parents)) for each in plan.creates],
        drains=list(plan.drains),
        keeps=list(plan.keeps),
        reopens=list(plan.reopens),
        in_order=plan.in_order,
        by_key=plan.by_key,
    )


def rebalance(found: model.Rebalance, progress: RebalanceProgress | None = None) -> bytes:
    """One rebalance as JSON. `progress`: its drain so far; None: not known or not draining."""
    return msgspec.json.encode(_rebalance(found, progress))


def _rebalance(found: model.Rebalance, progress: RebalanceProgress | None = None) -> answers.Rebalance:
    return answers.Rebalance(
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
        created_at=time_field(found.created_at),
        updated_at=time_field(found.updated_at),
        started_at=time_field(found.started_at),
        drain_at=time_field(found.drain_at),
        ended_at=time_field(found.ended_at),
        items=found.items,
        moved=found.moved,
        steps=[
            answers.RebalanceStep(step=each.kind, at=time_field(each.at), instance=each.by, partition=each.partition) for each in found.done
        ],
        batch=found.batch,
        after=found.after,
        problem=found.problem or None,
        retries=found.retries,
        progress=None if progress is None else _progress(progress),
    )


def _progress(progress: RebalanceProgress) -> answers.RebalanceProgress:
    return answers.RebalanceProgress(
        items_left=progress.items_left,
        leased_left=progress.leased_left,
        scheduled_left=progress.scheduled_left,
        partitions=[answers.DrainingPartition(partition=each, items_left=left) for each, left in sorted(progress.by_partition.items())],
        rate_per_s=None if progress.rate_per_s is None else round(progress.rate_per_s, 1),
        time_left=None if progress.time_left is None else format_duration(-(-progress.time_left // _SECOND) * _SECOND),
    )


def page(found: Sequence[model.Rebalance], limit: int) -> bytes:
    """The first `limit` of the rebalances as JSON. Pass one more than `limit` to say that there is a next page."""
    following = found[limit - 1].id if len(found) > limit else None
    return msgspec.json.encode(answers.RebalancePage(items=[_rebalance(each) for each in found[:limit]], next=following))


def batch(found: RebalanceBatch) -> bytes:
    """The rebalances that one call started, and the queues that it left out with their reasons, as JSON."""
    left_out = [answers.LeftOut(queue_name=queue_name, reason=reason) for queue_name, reason in found.left_out]
    rebalances = [_rebalance(each) for each in found.rebalances]
    return msgspec.json.encode(answers.RebalanceBatch(batch=found.batch, rebalances=rebalances, left_out=left_out))
