"""The calls on rebalances and single partitions: how each is written."""

from __future__ import annotations

from typing import Literal

from sluiceway.client.answers import QueueInfo
from sluiceway.client.protocol import Call, call, given
from sluiceway.contract.rebalances import Rebalance, RebalanceBatch, RebalancePage, RebalancePlan

Drain = Literal["natural", "copy"]


def plan_rebalance(queue_name: str, requested_partitions: int | None) -> Call[RebalancePlan]:
    return call("/v1/rebalances.plan", RebalancePlan, given(queue_name=queue_name, requested_partitions=requested_partitions))


def rebalance(queue_name: str, requested_partitions: int | None, drain: Drain, rate: int | None, plan_id: str | None) -> Call[Rebalance]:
    fields = given(queue_name=queue_name, requested_partitions=requested_partitions, drain=drain, rate=rate, plan_id=plan_id)
    # Repeated after it took effect, it would find its own rebalance open.
    return call("/v1/queue.rebalance", Rebalance, fields, repeatable=False)


def rebalance_many(match: str, requested_partitions: int | None, drain: Drain, rate: int | None) -> Call[RebalanceBatch]:
    fields = given(match=match, requested_partitions=requested_partitions, drain=drain, rate=rate)
    # As above: it would leave out all queues, and the answer would not name what the first attempt began.
    return call("/v1/queues.rebalance", RebalanceBatch, fields, repeatable=False)


def get_rebalance(id: str) -> Call[Rebalance]:
    return call("/v1/rebalances.get", Rebalance, {"id": id})


def list_rebalances(queue_name: str | None, only_open: bool, pivot: str | None, limit: int | None) -> Call[RebalancePage]:
    fields = given(queue_name=queue_name, open=only_open or None, pivot=pivot, limit=limit)
    return call("/v1/rebalances.list", RebalancePage, fields)


def cancel_rebalance(id: str) -> Call[Rebalance]:
    # Repeated after it took effect, it could be refused for that.
    return call("/v1/rebalances.cancel", Rebalance, {"id": id}, repeatable=False)


def set_partition(queue_name: str, partition: int, paused: bool) -> Call[QueueInfo]:
    path = "/v1/partition.pause" if paused else "/v1/partition.resume"
    return call(path, QueueInfo, {"queue_name": queue_name, "partition": partition})
