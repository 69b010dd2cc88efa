"""Prometheus metrics: requests, queues, backends and their buckets, the event loop and the process."""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sluiceway import __version__
from sluiceway.adapters.system import clock_ahead, now, stopwatch
from sluiceway.core.queue.handler_times import BOUNDS
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.instances import ClusterInfo
from sluiceway.server.endpoints import Page, Reply
from sluiceway.server.http import Request
from sluiceway.server.metric_buckets import BucketMetrics
from sluiceway.server.metric_cluster import ClusterMetrics
from sluiceway.server.metric_queues import COUNTERS, QueueCounts, QueueLabels, count_queue
from sluiceway.server.metric_requests import RequestCounts

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_FRESH: Final = 1.0
"""Seconds for which scrapes get the text of the last one, so that many scrapers cost as much as one."""
_SLICE: Final = 200
"""Partitions counted in one step: about a millisecond, during which the event loop serves no requests."""
_HANDLER_BOUNDS: Final = (*(str(bound / 1000) for bound in BOUNDS), "+Inf")
_LAG_INTERVAL: Final = 0.5
"""Seconds between two measurements of the event loop's lag."""
_LAG_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


class ScrapeTarget(msgspec.Struct, frozen=True):
    """An instance, in the form of Prometheus' HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]


class Metrics:
    """Meter of requests, with the page `/metrics`, and one that lists the metrics addresses of all instances.

    Call `start` and `stop` on the event loop that serves.
    Label values are bounded: an endpoint is one of the table, or `other`; for queues see QueueLabels.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests = RequestCounts()
        self._lag = Histogram(
            "sluiceway_event_loop_lag_seconds",
            "Lag of the event loop, measured twice per second.",
            buckets=_LAG_SECONDS,
            registry=None,
        )
        self._queues = _Queues()
        self._cluster = ClusterMetrics(service)
        self._labels = QueueLabels(now(), shared=not service.ownership.is_alone)
        self._registry = CollectorRegistry()
        buckets = BucketMetrics(service.bucket_requests)
        for collector in (
            self._requests,
            _Quiet(self._lag),
            self._queues,
            buckets,
            self._cluster,
            _Build(),
            ProcessCollector(registry=None),
        ):
            self._registry.register(collector)
        self._scraping = asyncio.Lock()
        self._text = b""
        self._fresh_until = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch_loop())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        self._requests.answered(path, status, seconds, received, sent)

    def pages(self) -> list[Page]:
        return [
            Page("/metrics", "read", self._page, "Metrics of this instance, for Prometheus", content_types=("text/plain",)),
            Page(
                "/metrics/targets",
                "read",
                self._targets,
                "Metrics addresses of all instances, for Prometheus service discovery",
                answer=list[ScrapeTarget],
            ),
        ]

    async def _page(self, request: Request) -> Reply:
        _check_right(request)
        return Reply(await self.scrape(), CONTENT_TYPE)

    async def _targets(self, request: Request) -> Reply:
        _check_right(request)
        return Reply(msgspec.json.encode(targets_of(self._service.instances.cluster())))

    async def scrape(self) -> bytes:
        """Return the metrics as text, at most a second old. Yields to other requests meanwhile."""
        async with self._scraping:
            if stopwatch() >= self._fresh_until:
                self._queues.divided = self._labels.divide(await self._look())
                self._queues.problems = [(each.kind, each.severity, each.queue_name) for each in self._service.watch.here().found]
                self._queues.backends = {state.name: state.problem is None for state in self._service.backends()}
                self._queues.disks = {name: (disk.free, disk.is_low) for name, disk in self._service.room.disks.items()}
                self._cluster.look()
                self._text = await asyncio.to_thread(generate_latest, self._registry)
                self._fresh_until = stopwatch() + _FRESH
            return self._text

    async def _look(self) -> list[QueueCounts]:
        found, counted, rebalances = [], 0, 0
        for record in self._service.queues():
            rebalances += record.rebalance is not None
            try:
                stats, handled = self._service.stats(record.queue_name), self._service.handler_times(record.queue_name)
                found.append(count_queue(record, stats, *self._service.consumers.told(record), handled))
            except SluicewayError:
                # Deleted while other queues were counted.
                continue
            counted += len(record.partitions)
            if counted >= _SLICE:
                counted = 0
                await asyncio.sleep(0)
        self._queues.rebalances = rebalances
        return found

    async def _watch_loop(self) -> None:
        while True:
            began = stopwatch()
            await asyncio.sleep(_LAG_INTERVAL)
            self._lag.observe(max(0.0, stopwatch() - began - _LAG_INTERVAL))


def _check_right(request: Request) -> None:
    if not request.caller.may_all("read"):
        raise SluicewayError("forbidden", "the metrics name all queues, so they need a key with the scope read:*")


def targets_of(cluster: ClusterInfo) -> list[ScrapeTarget]:
    """List the instances with a known address. A server that is alone has none, and needs no discovery."""
    found = ((each, urlsplit(each.address)) for each in cluster.instances if each.address)
    return [ScrapeTarget([url.netloc], {"__scheme__": url.scheme, "sluiceway_instance": each.name}) for each, url in found]


class _Quiet(Collector):
    """Drops the creation times of series, which are not used."""

    def __init__(self, own: Collector) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        for metric in self._own.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Build(Collector):
    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            "sluiceway_build", "Version of the server and of Python.", {"version": __version__, "python": platform.python_version()}
        )
        yield GaugeMetricFamily(
            "sluiceway_clock_ahead_seconds", "Difference between the machine's clock and the server's time.", value=clock_ahead() / 1000
        )


class _Queues(Collector):
    """Metrics of the last look at queues, backends and disks."""

    def __init__(self) -> None:
        self.divided: list[QueueCounts] = []
        self.rebalances = 0
        self.backends: dict[str, bool] = {}
        self.disks: dict[str, tuple[int, bool]] = {}
        self.problems: list[tuple[str, str, str]] = []
        """Kind, severity and queue."""

    def collect(self) -> Iterator[Metric]:
        yield self._gauges("items", "Items in the queue.", "state", [each.items for each in self.divided])
        servable = "Ready items that can be leased now; fewer than are ready where keys are blocked by order or by a limit."
        yield self._gauge("servable_items", servable, [each.servable for each in self.divided])
        yield self._gauge(
            "keys_waiting", "Keys with ready items; 0: the queue does not look at keys.", [each.keys.waiting for each in self.divided]
        )
        yield self._gauge(
            "keys_blocked", "Keys with ready items of which none can be leased now.", [each.keys.blocked for each in self.divided]
        )
        yield self._gauge("keys_limited", "Keys with as many leased items as they may have.", [each.keys.limited for each in self.divided])
        yield self._gauges("waiting_requests", "Requests waiting in the queue.", "call", [each.waiting for each in self.divided])
        yield self._gauges("partitions", "Partitions of the queue.", "state", [each.partitions for each in self.divided])
        yield self._gauge("leases", "Live leases.", [each.leases for each in self.divided])
        yield self._gauge(
            "degraded_partitions", "Partitions whose commits are far slower than their peers'.", [each.degraded for each in self.divided]
        )
        opened = "1: the queue's circuit breaker is open on this instance, and only probes are leased; 0: it is closed, or there is none."
        yield self._gauge("circuit_open", opened, [each.circuits_open for each in self.divided])
        documentation = "Queues with an open rebalance, as known to this instance."
        yield GaugeMetricFamily("sluiceway_rebalances_open", documentation, value=self.rebalances)
        yield self._gauge("draining_items", "Items left in draining partitions.", [each.draining for each in self.divided])
        asked = "Clients that requested items of the queue from this instance within the last minute."
        yield self._gauge("consumers", asked, [each.consumers for each in self.divided])
        yield self._gauges("queries", "Spark queries that report to this instance.", "state", [each.queries for each in self.divided])
        rate = "Items per second of the running queries' last batches."
        yield self._gauge("query_items_per_second", rate, [each.query_rate for each in self.divided])
        longest = [each.query_duration / 1000 for each in self.divided]
        yield self._gauge("query_batch_duration_seconds", "Duration of the longest last batch of the running queries.", longest)
        slowest = [each.commit_time / 1000 for each in self.divided]
        yield self._gauge("commit_duration_seconds", "Moving average of the commit duration of the slowest partition.", slowest)
        yield self._handled()
        for at, (name, documentation) in enumerate(COUNTERS.items()):
            metric = "partition_failures" if name == "failures" else f"items_{name}"
            counter = CounterMetricFamily(f"sluiceway_queue_{metric}", documentation, labels=["queue"])
            for each in self.divided:
                if each.counters is not None:
                    counter.add_metric([each.queue_name], each.counters[at])
            yield counter
        up = GaugeMetricFamily(
            "sluiceway_backend_up", "1: the backend's partitions are served; 0: the backend does not answer.", labels=["backend"]
        )
        for name, answers in self.backends.items():
            up.add_metric([name], answers)
        yield up
        free = GaugeMetricFamily("sluiceway_disk_free_bytes", "Free space on the disk.", labels=["disk"])
        low = GaugeMetricFamily("sluiceway_disk_low", "1: only the reserve is free, and produces are refused.", labels=["disk"])
        for name, (left, is_low) in self.disks.items():
            free.add_metric([name], left)
            low.add_metric([name], is_low)
        yield from (free, low)
        found = "1: the instance or its partitions have this problem now. Empty queue: none in particular."
        problem = GaugeMetricFamily("sluiceway_problem", found, labels=["kind", "severity", "queue"])
        for labels in dict.fromkeys(self.problems):
            problem.add_metric(labels, 1)
        yield problem

    def _handled(self) -> Metric:
        documentation = "Handler times that consumers reported to this instance; outcome: done or failed."
        family = HistogramMetricFamily("sluiceway_queue_handler_duration_seconds", documentation, labels=["queue", "outcome"])
        for each in self.divided:
            for outcome, times in () if each.handled is None else (("done", each.handled.done), ("failed", each.handled.failed)):
                buckets = list(zip(_HANDLER_BOUNDS, accumulate(times.buckets), strict=True))
                family.add_metric([each.queue_name, outcome], buckets, times.total / 1000)
        return family

    def _gauge(self, name: str, documentation: str, values: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(f"sluiceway_queue_{name}", documentation, labels=["queue"])
        for each, value in zip(self.divided, values, strict=True):
            family.add_metric([each.queue_name], value)
        return family

    def _gauges(self, name: str, documentation: str, label: str, values: Sequence[dict[str, int]]) -> Metric:
        family = GaugeMetricFamily(f"sluiceway_queue_{name}", documentation, labels=["queue", label])
        for each, counts in zip(self.divided, values, strict=True):
            for value, count in counts.items():
                family.add_metric([each.queue_name, value], count)
        return family
