"""Prometheus metrics of answered requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BOUNDS: Final = (*map(str, map(float, _SECONDS)), "+Inf")


class _Series:
    """Requests to one endpoint with one status. Plain numbers: the library's counters, each with a lock, take three times as long."""

    __slots__ = ("buckets", "received", "seconds", "sent")

    def __init__(self) -> None:
        self.buckets = [0] * len(_BOUNDS)
        self.seconds = 0.0
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
        series.buckets[bisect_left(_SECONDS, seconds)] += 1
        series.seconds += seconds
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
            buckets = accumulate(map(sum, zip(*(each.buckets for each in all_of_it), strict=True)))
            durations.add_metric([endpoint], list(zip(_BOUNDS, buckets, strict=True)), sum(each.seconds for each in all_of_it))
            received.add_metric([endpoint], sum(each.received for each in all_of_it))
            sent.add_metric([endpoint], sum(each.sent for each in all_of_it))
        yield from (requests, durations, received, sent)
