"""Prometheus metrics of answered requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluiceway.kernel.latency import SECONDS, Latencies

_BOUNDS: Final = (*map(str, map(float, SECONDS)), "+Inf")


def add_latencies(family: HistogramMetricFamily, labels: list[str], counted: Iterable[Latencies]) -> None:
    """Add a series of those latencies together."""
    each = list(counted)
    buckets = accumulate(map(sum, zip(*(one.buckets for one in each), strict=True)))
    family.add_metric(labels, list(zip(_BOUNDS, buckets, strict=True)), sum(one.seconds for one in each))


class _Series(Latencies):
    """Requests to one endpoint with one status."""

    __slots__ = ("received", "sent")

    def __init__(self) -> None:
        super().__init__()
        self.received = self.sent = 0


class RequestCounts(Collector):
    """Counters of requests, updated on the event loop and read from any thread."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, int], _Series] = {}

    def answered(self, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request. `path`: the endpoint's, or empty if there is none; `status` 0: the client had gone."""
        series = self._series.get((path, status))
        if series is None:
            series = self._series[path, status] = _Series()
        series.add(seconds)
        series.received += received
        series.sent += sent

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "sluiceway_http_requests", "Answered requests; status 0: the client had disconnected.", labels=["endpoint", "status"]
        )
        durations = HistogramMetricFamily(
            "sluiceway_http_request_duration_seconds",
            "Time from a request's headers to the end of its answer. Includes the time that a lease waits for items.",
            labels=["endpoint"],
        )
        received = CounterMetricFamily("sluiceway_http_request_bytes", "Bytes of request bodies.", labels=["endpoint"])
        sent = CounterMetricFamily("sluiceway_http_response_bytes", "Bytes of answers, without headers.", labels=["endpoint"])
        of_endpoint: dict[str, list[_Series]] = {}
        for (path, status), series in list(self._series.items()):
            of_endpoint.setdefault(path or "other", []).append(series)
            requests.add_metric([path or "other", str(status)], sum(series.buckets))
        for endpoint, all_of_it in of_endpoint.items():
            add_latencies(durations, [endpoint], all_of_it)
            received.add_metric([endpoint], sum(each.received for each in all_of_it))
            sent.add_metric([endpoint], sum(each.sent for each in all_of_it))
        yield from (requests, durations, received, sent)
