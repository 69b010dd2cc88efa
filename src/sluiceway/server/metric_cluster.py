"""Prometheus metrics of the cluster, as this instance sees it, and of its requests to other instances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluiceway.contract.instance_answers import InstanceState
from sluiceway.core.group.load_balance import INSTANCE
from sluiceway.instance.service import Service


class ClusterMetrics(Collector):
    """Snapshot of the cluster's metrics. Call `look` on the event loop that serves. A server that is alone reports itself."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics: list[Metric] = []

    def look(self) -> None:
        self._metrics = [*self._ownership(), *self._calls()]

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def _ownership(self) -> Iterator[Metric]:
        instances = self._service.instances
        seen = instances.cluster()
        owned = sum(each.partitions for each in seen.instances if each.here)
        yield _gauge("partitions", "Partitions assigned to this instance.", owned)
        yield _gauge("ownership_holds", "1: this instance owns its assigned partitions; 0: it only forwards requests.", instances.holds)
        lapses = CounterMetricFamily(
            "sluiceway_cluster_ownership_lapses", "Losses of ownership because the meta store did not confirm it in time."
        )
        lapses.add_metric([], instances.lapses)
        yield lapses
        yield _gauge("round", "Number of the last assignment round.", seen.round.number if seen.round else 0)
        balancer = self._service.load_balancer
        load = 0 if balancer is None else balancer.load / INSTANCE
        yield _gauge("load", "What this instance's partitions take of what an instance can do: 1 is all of it.", load)
        moves = CounterMetricFamily("sluiceway_cluster_load_moves", "Partitions that the cluster has moved to level loads.")
        look = self._service.ownership.look
        moves.add_metric([], look.plan.swapped if look is not None and look.plan is not None else 0)
        yield moves
        members = GaugeMetricFamily("sluiceway_cluster_instances", "Instances by state, as seen by this instance.", labels=["state"])
        for state in get_args(InstanceState):
            members.add_metric([state], sum(each.state == state for each in seen.instances))
        yield members

    def _calls(self) -> Iterator[Metric]:
        counted = self._service.peer_calls
        calls = CounterMetricFamily("sluiceway_peer_requests", "Requests to other instances.", labels=["request", "outcome"])
        seconds = CounterMetricFamily(
            "sluiceway_peer_request_seconds", "Total duration of requests to other instances. Polls wait.", labels=["request"]
        )
        leases = CounterMetricFamily("sluiceway_peer_leases_fetched", "Leases fetched from other instances for this instance's consumers.")
        if counted is not None:
            for (request, outcome), count in sorted(counted.calls.items()):
                calls.add_metric([request, outcome], count)
            for request, taken in sorted(counted.seconds.items()):
                seconds.add_metric([request], taken)
        leases.add_metric([], counted.leases if counted is not None else 0)
        yield from (calls, seconds, leases)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sluiceway_cluster_{name}", documentation, value=value)
