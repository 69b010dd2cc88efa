"""Encoders of the calls on rebalances and single partitions."""

from __future__ import annotations

from typing import Literal

from sluiceway.client.answers import PartitionPin, QueueInfo
from sluiceway.client.protocol import Call, call, given
from sluiceway.contract.rebalances import Rebalance, RebalanceBatch, RebalancePage, RebalancePlan

Drain = Literal["natural", "copy"]


def plan_rebalance(queue_name: str, requested_partitions: int | None) -> Call[RebalancePlan]:
    return call("/v1/rebalances.plan", RebalancePlan, given(queue_name=queue_name, requested_partitions=requested_partitions))


def rebalance(queue_name: str, requested_partitions: int | None, drain: Drain, rate: int | None, plan_id: str | None) -> Call[Rebalance]:
    fields = given(queue_name=queue_name, requested_partitions=requested_partitions, drain=drain, rate=rate, plan_id=plan_id)
    # A repeat after a success would fail, because the call's own rebalance is open.
    return call("/v1/queue.rebalance", Rebalance, fields, repeatable=False)


def rebalance_many(match: str, requested_partitions: int | None, drain: Drain, rate: int | None) -> Call[RebalanceBatch]:
    fields = given(match=match, requested_partitions=requested_partitions, drain=drain, rate=rate)
    # A repeat after a success would leave out all queues, and its answer would not name the rebalances that the first attempt started.
    return call("/v1/queues.rebalance", RebalanceBatch, fields, repeatable=False)


def get_rebalance(id: str) -> Call[Rebalance]:
    return call("/v1/rebalances.get", Rebalance, {"id": id})


def list_rebalances(queue_name: str | None, only_open: bool, pivot: str | None, limit: int | None) -> Call[RebalancePage]:
    fields = given(queue_name=queue_name, open=only_open or None, pivot=pivot, limit=limit)
    return call("/v1/rebalances.list", RebalancePage, fields)


def cancel_rebalance(id: str) -> Call[Rebalance]:
    # A repeat after a success could be refused, because the rebalance is already cancelled.
    return call("/v1/rebalances.cancel", Rebalance, {"id": id}, repeatable=False)


def pin_partition(queue_name: str, partition: int, instance: str | None, zone: str | None) -> Call[PartitionPin]:
    fields = {"queue_name": queue_name, "partition": partition} | given(instance=instance, zone=zone)
    return call("/v1/partition.pin", PartitionPin, fields)


def unpin_partition(queue_name: str, partition: int) -> Call[PartitionPin]:
    return call("/v1/partition.unpin", PartitionPin, {"queue_name": queue_name, "partition": partition})


def set_partition(queue_name: str, partition: int, paused: bool) -> Call[QueueInfo]:
    path = "/v1/partition.pause" if paused else "/v1/partition.resume"
    return call(path, QueueInfo, {"queue_name": queue_name, "partition": partition})
