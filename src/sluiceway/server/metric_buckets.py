"""Prometheus metrics of the requests to buckets."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluiceway.adapters.storage.bucket_requests import BucketRequests
from sluiceway.server.metric_requests import add_latencies


class BucketMetrics(Collector):
    """The counts of each backend in a bucket, and of the meta store if it is in one."""

    def __init__(self, requests: BucketRequests) -> None:
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("sluiceway_bucket_requests", "Requests to the bucket.", labels=["backend", "request", "outcome"])
        durations = HistogramMetricFamily(
            "sluiceway_bucket_request_duration_seconds", "Duration of requests to the bucket.", labels=["backend", "request"]
        )
        read = CounterMetricFamily("sluiceway_bucket_read_bytes", "Bytes of objects read from the bucket.", labels=["backend"])
        written = CounterMetricFamily("sluiceway_bucket_written_bytes", "Bytes of objects written to the bucket.", labels=["backend"])
        dollars = CounterMetricFamily(
            "sluiceway_bucket_request_dollars",
            "Estimated price of the requests to the bucket, without storage and traffic, at the list prices of that class of storage.",
            labels=["backend", "prices"],
        )
        for backend, counts in list(self._requests.backends.items()):
            for (request, outcome), count in list(counts.outcomes.items()):
                requests.add_metric([backend, request, outcome], count)
            for request, latencies in list(counts.latencies.items()):
                add_latencies(durations, [backend, request], [latencies])
            read.add_metric([backend], counts.read)
            written.add_metric([backend], counts.written)
            dollars.add_metric([backend, counts.prices.name], counts.dollars)
        yield from (requests, durations, read, written, dollars)
