"""What Prometheus is told: names, labels whose number is bounded, counters that never go back, and who may read it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from sluiceway import __version__
from sluiceway.contract.queue_stats import CircuitStats, LogicalQueueStats, PartitionStats
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import Caller, Scope
from sluiceway.model.instances import ClusterInfo, InstanceInfo
from sluiceway.model.queue import PartitionRecord
from sluiceway.server.app import App, Fittings
from sluiceway.server.guard import OpenDoor
from sluiceway.server.http import Request
from sluiceway.server.metric_queues import COUNTERS, OTHER, PARTITION_STATES, QueueCounts, QueueLabels, count_queue
from sluiceway.server.metrics import Metrics, targets_of
from sluiceway.testing.drive import driven
from tests.server.fake_service import RECORD
from tests.server.server_running import Running, eventually, running


def metered(service: Service) -> Fittings:
    metrics = Metrics(service)
    return Fittings(meters=[metrics], pages=metrics.pages())


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(text: str, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def scraped(server: Running) -> str:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text


def test_requests_queues_backends_and_the_process(tmp_path: Path) -> None:
    with running(tmp_path, metered) as server:
        server.ask("queues.create", queue_name="orders", requested_partitions=2)
        server.produce("orders", "a", "b", "c")
        taken = server.lease("orders", batch_size=1)
        server.ask("queue.complete", queue_name="orders", lease_ids=[taken["leases"][0]["lease_id"]])
        server.lease("orders", batch_size=1)
        assert server.post("queue.stats", queue_name="none").status_code == 404
        assert server.http.post("/v1/made-up").status_code == 404
        text = scraped(server)
    expected = {
        ("sluiceway_http_requests_total", "endpoint=/v1/queue.produce status=200"): 1,
        ("sluiceway_http_requests_total", "endpoint=/v1/queue.stats status=404"): 1,
        ("sluiceway_http_requests_total", "endpoint=other status=404"): 1,
        ("sluiceway_http_request_duration_seconds_count", "endpoint=/v1/queue.lease"): 2,
        ("sluiceway_queue_items", "queue=orders state=ready"): 1,
        ("sluiceway_queue_items", "queue=orders state=leased"): 1,
        ("sluiceway_queue_items", "queue=orders state=scheduled"): 0,
        ("sluiceway_queue_leases", "queue=orders"): 1,
        ("sluiceway_queue_partitions", "queue=orders state=available"): 2,
        ("sluiceway_queue_partitions", "queue=orders state=unavailable"): 0,
        ("sluiceway_queue_waiting_requests", "queue=orders call=lease"): 0,
        ("sluiceway_queue_items_produced_total", "queue=orders"): 3,
        ("sluiceway_queue_items_completed_total", "queue=orders"): 1,
        ("sluiceway_queue_partition_failures_total", "queue=orders"): 0,
        ("sluiceway_backend_up", "backend=default"): 1,
        ("sluiceway_build_info", f"version={__version__}"): 1,
    }
    found = {(name, labels): values(text, name, **dict(label.split("=", 1) for label in labels.split(" "))) for name, labels in expected}
    assert found == {place: [value] for place, value in expected.items()}
    (received,) = values(text, "sluiceway_http_request_bytes_total", endpoint="/v1/queue.produce")
    assert received > len("abc")
    assert values(text, "process_resident_memory_bytes") > [0]


def test_names_and_labels_keep_to_the_conventions(tmp_path: Path) -> None:
    with running(tmp_path, metered) as server:
        server.queue()
        text = scraped(server)
    for family in families(text).values():
        assert family.name.startswith(("sluiceway_", "process_")), family.name
        assert family.documentation
        assert not any(sample.name.endswith("_created") for sample in family.samples)
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        elif family.type != "histogram":
            assert not family.name.endswith(("_total", "_count", "_ms", "_milliseconds"))


def test_only_endpoints_of_the_table_become_labels(tmp_path: Path) -> None:
    with running(tmp_path, metered) as server:
        for path in ("/v1/a", "/v1/queue.lease/x", "/metrics/x", "/%0a", "/v1/" + "x" * 500):
            assert server.http.get(path).status_code == 404
        found = {sample.labels["endpoint"] for sample in families(scraped(server))["sluiceway_http_requests"].samples}
        assert found == {"other"}


def test_an_answer_is_at_most_a_second_old(tmp_path: Path) -> None:
    with running(tmp_path, metered) as server:
        name = server.queue()
        scraped(server)
        server.produce(name, "a")
        eventually(lambda: values(scraped(server), "sluiceway_queue_items", queue=name, state="ready") == [1])


def test_handler_times_are_a_histogram_by_outcome(tmp_path: Path) -> None:
    with running(tmp_path, metered) as server:
        name = server.queue()
        for text in "ab":
            server.produce(name, text)
        first, second = (each["items"][0]["id"] for each in (server.lease(name, batch_size=1), server.lease(name, batch_size=1)))
        server.ask("queue.complete", queue_name=name, ids=[first], handler_times=[{"handler_time": "40ms", "items": 1}])
        server.ask("queue.retry", queue_name=name, items=[{"id": second, "handler_time": "2s"}])
        text = scraped(server)
        metric = "sluiceway_queue_handler_duration_seconds"
        assert values(text, f"{metric}_bucket", queue=name, outcome="done", le="0.03") == [0]
        assert values(text, f"{metric}_bucket", queue=name, outcome="done", le="0.05") == [1]
        assert values(text, f"{metric}_sum", queue=name, outcome="failed") == [2]
        (share,) = server.ask("queue.stats", queue_name=name)["logical_queues"]
        assert (share["handled"], share["handler_p50_ms"], share["handler_p99_ms"]) == (2, 50, 2_000)


@driven
async def test_many_at_once_cost_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    await service.start()
    metrics, looks = Metrics(service), 0
    clock = 0.0
    monkeypatch.setattr("sluiceway.server.metrics.stopwatch", lambda: clock)
    queues = service.queues

    def counted() -> object:
        nonlocal looks
        looks += 1
        return queues()

    monkeypatch.setattr(service, "queues", counted)
    for elapsed in (10.0, 10.5, 10.99):
        clock = elapsed
        await metrics.scrape()
    assert looks == 1
    clock = 11.0
    await metrics.scrape()
    assert looks == 2
    await service.stop()


class Doorman(OpenDoor):
    def __init__(self, *scopes: Scope) -> None:
        super().__init__()
        self._scopes = scopes

    async def admit(self, request: Request) -> Caller:
        return Caller("someone", self._scopes)


@pytest.mark.parametrize(
    ("scopes", "status"),
    [
        ([Scope("read", "*")], 200),
        ([Scope("read", "orders-*")], 403),
        ([Scope("read", "orders-*"), Scope("admin")], 403),
        ([Scope("produce", "*")], 403),
        ([], 403),
    ],
)
@driven
async def test_it_names_all_queues_so_it_needs_the_right_to_read_all(tmp_path: Path, scopes: list[Scope], status: int) -> None:
    service = Service(tmp_path)
    await service.start()
    app = App(service, dataclasses.replace(metered(service), guard=Doorman(*scopes)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for page in ("/metrics", "/metrics/targets"):
            answer = await client.get(page)
            assert answer.status_code == status
            assert status == 200 or answer.json()["code"] == "forbidden"
    await service.stop()


def test_where_the_instances_have_their_metrics() -> None:
    known = [("a", "http://127.0.0.1:7001"), ("b", "https://[::1]:7002"), ("joining", "")]
    found = ClusterInfo([InstanceInfo(name, address, name == "a", "alive") for name, address in known], "rounds", 2, 11, 11)
    assert msgspec.to_builtins(targets_of(found)) == [
        {"targets": ["127.0.0.1:7001"], "labels": {"__scheme__": "http", "sluiceway_instance": "a"}},
        {"targets": ["[::1]:7002"], "labels": {"__scheme__": "https", "sluiceway_instance": "b"}},
    ]


@driven
async def test_a_server_that_is_alone_is_scraped_where_it_is(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    assert targets_of(service.instances.cluster()) == []
    await service.stop()


@driven
async def test_a_queue_that_is_deleted_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    await service.start()
    monkeypatch.setattr(service, "queues", lambda: [RECORD])
    with pytest.raises(SluicewayError, match="there is no queue"):
        service.stats(RECORD.queue_name)
    assert not values((await Metrics(service).scrape()).decode(), "sluiceway_queue_items")
    await service.stop()


@driven
async def test_the_event_loop_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.metrics._LAG_INTERVAL", 0.0)
    service = Service(tmp_path)
    await service.start()
    metrics = Metrics(service)
    metrics.start()
    async for text in _scrapes(metrics):
        if values(text, "sluiceway_event_loop_lag_seconds_count")[0] > 3:
            break
    await metrics.stop()
    await service.stop()


async def _scrapes(metrics: Metrics) -> AsyncIterator[str]:
    while True:
        yield (await metrics.scrape()).decode()


# Counts


def stats(state: str = "available", **counts: int) -> LogicalQueueStats:
    return LogicalQueueStats(
        produce_waiting=1,
        lease_waiting=2,
        complete_waiting=3,
        in_flight=4,
        partitions=[
            PartitionStats(partition=0, state=state, **counts),  # type: ignore[arg-type]
            PartitionStats(partition=1, produced=5, completed=5, commit_time_ms=20.0),
        ],
    )


def test_partitions_are_added_up() -> None:
    found = count_queue(RECORD, stats(ready=3, total_leased=2, scheduled=1, transferring=4, produced=20, leases=1, failures=2))
    assert found.items == {"ready": 3, "leased": 2, "scheduled": 1, "transferring": 4}
    assert found.waiting == {"produce": 1, "lease": 2, "settle": 3}
    assert found.partitions == {"available": 2, "preparing": 0, "draining": 0, "paused": 0, "unavailable": 0, "error": 0}
    assert (found.size, found.leases, found.commit_time) == (10, 1, 20.0)
    assert found.counters is not None
    counters = dict(zip(COUNTERS, found.counters, strict=True))
    assert (counters["produced"], counters["completed"], counters["failures"]) == (25, 5, 2)


def test_what_a_partition_that_was_never_open_has_counted_is_not_known() -> None:
    assert count_queue(RECORD, stats("unavailable")).counters is None
    assert count_queue(RECORD, stats("unavailable", produced=1)).counters is not None
    assert count_queue(RECORD, stats("preparing")).counters is not None, "one that was made just now has counted nothing"


def test_what_is_left_to_drain_is_counted() -> None:
    counts: dict[str, Any] = {"total": 6, "ready": 3, "total_leased": 2, "scheduled": 1, "transferring": 4}
    assert count_queue(RECORD, stats(**counts)).draining == 0
    assert count_queue(RECORD, stats("draining", **counts)).draining == 10


def test_keys_are_counted_without_being_named() -> None:
    found = count_queue(RECORD, stats(ready=9, servable=4, keys_waiting=3, keys_blocked=2, keys_limited=1))
    assert (found.servable, found.keys) == (4, (3, 2, 1))
    (other,) = QueueLabels(0, most=0).divide([found, found._replace(incarnation="other")])
    assert (other.servable, other.keys) == (8, (6, 4, 2))


@pytest.mark.parametrize(("state", "open"), [(None, 0), ("closed", 0), ("open", 1), ("half_open", 1)])
def test_an_open_circuit_breaker_is_counted(state: str | None, open: int) -> None:
    circuit = None if state is None else CircuitStats(state=state)
    counted = count_queue(RECORD, LogicalQueueStats(circuit=circuit))
    assert counted.circuits_open == open
    assert QueueLabels(0, most=0).divide([counted, counted._replace(incarnation="other")])[0].circuits_open == 2 * open


def test_a_partition_that_is_removed_takes_nothing_of_what_it_has_counted() -> None:
    labels = QueueLabels(STARTED)
    parts = [PartitionStats(partition=number, produced=10) for number in range(3)]

    def produced(*numbers: int) -> int:
        counted = count_queue(RECORD, LogicalQueueStats(partitions=[parts[number] for number in numbers]))
        (queue,) = labels.divide([counted])
        assert queue.counters is not None
        return queue.counters[0]

    assert produced(0, 1) == 20
    parts[0] = PartitionStats(partition=0, produced=15)
    assert produced(0) == 25, "also what comes after the removal is counted"
    assert produced(0, 2) == 35
    parts[1] = PartitionStats(partition=1, produced=12)
    assert produced(0, 1, 2) == 37, "one that comes back is not counted twice"


@pytest.mark.parametrize("most", [200, 0], ids=["of its own", "among others"])
def test_a_partition_that_moves_between_instances_takes_nothing_along(most: int) -> None:
    labels = QueueLabels(STARTED, most, shared=True)

    def produced(counts: dict[int, int], partitions: int = 3, created_at: int = 0, failures: int = 0) -> int:
        record = msgspec.structs.replace(RECORD, created_at=created_at, partitions=tuple(map(PartitionRecord, range(partitions))))
        parts = [PartitionStats(partition=number, produced=count, failures=failures) for number, count in counts.items()]
        (queue,) = labels.divide([count_queue(record, LogicalQueueStats(partitions=parts))])
        assert queue.counters is not None
        assert queue.counters[-1] >= failures
        return queue.counters[0]

    assert produced({0: 1_000}) == 0, "the process has just started"
    assert produced({0: 1_007}) == 7
    assert produced({0: 1_008, 1: 5_000}, failures=2) == 8, "1 comes"
    assert produced({0: 1_008, 1: 5_002}, failures=2) == 10
    assert produced({1: 5_003}, failures=2) == 11, "0 goes"
    assert produced({}) == 11
    assert produced({0: 9_000}, failures=1) == 11, "and comes back"
    assert produced({0: 9_001, 3: 4}, partitions=4) == 16, "a rebalance has made 3"


def test_a_queue_that_is_new_counts_from_its_beginning_though_its_partitions_move() -> None:
    labels = QueueLabels(STARTED, shared=True)

    def produced(counts: dict[int, int | None]) -> int | None:
        parts = [
            PartitionStats(partition=number, state="unavailable" if count is None else "available", produced=count or 0)
            for number, count in counts.items()
        ]
        (queue,) = labels.divide([count_queue(msgspec.structs.replace(RECORD, created_at=STARTED), LogicalQueueStats(partitions=parts))])
        return None if queue.counters is None else queue.counters[0]

    assert produced({0: None}) is None, "it is not open yet"
    assert produced({0: 5}) == 5
    assert produced({0: 6, 1: None}) == 5, "1 comes"
    assert produced({0: 7, 1: 100}) == 7
    assert produced({0: 7, 1: 101}) == 8


STARTED = 1_000


def queue(number: int, ready: int, produced: int | None = None, created_at: int = 0) -> QueueCounts:
    counters = None if produced is None else (produced,) * len(COUNTERS)
    items = {"ready": ready, "leased": 0, "scheduled": 0, "transferring": 0}
    states = dict.fromkeys(PARTITION_STATES, 0) | {"available": 1}
    return QueueCounts(f"q{number}", f"i{number}", created_at, items, {"produce": 0, "lease": 0, "settle": 0}, states, 0, 0, 0.0, counters)


def told(queues: list[QueueCounts]) -> dict[str, float]:
    return {each.queue_name: math.nan if each.counters is None else each.counters[0] for each in queues}


def test_the_biggest_have_metrics_of_their_own_and_keep_them() -> None:
    labels = QueueLabels(STARTED, most=2)
    first = labels.divide([queue(n, n, 10) for n in range(4)])
    assert told(first) == {"q2": 10, "q3": 10, OTHER: 0}
    assert first[-1].items["ready"] == 1
    assert first[-1].partitions["available"] == 2
    grown = [queue(0, 1000, 15), queue(1, 1, 11), queue(2, 2, 10), queue(3, 3, 12)]
    assert told(labels.divide(grown)) == {"q2": 10, "q3": 12, OTHER: 6}
    # A place is free: the biggest gets it, and what it has added to the others stays with them.
    assert told(labels.divide(grown[:3])) == {"q0": 15, "q2": 10, OTHER: 6}


def test_a_queue_that_is_new_counts_from_its_beginning() -> None:
    labels = QueueLabels(STARTED, most=1)
    assert told(labels.divide([queue(0, 5, 5)])) == {"q0": 5}
    assert told(labels.divide([queue(0, 5, 5), queue(1, 7, 7, created_at=STARTED)])) == {"q0": 5, OTHER: 7}
    assert told(labels.divide([queue(0, 5, 5)])) == {"q0": 5, OTHER: 7}


def test_a_counter_waits_until_it_is_known_and_does_not_go_back() -> None:
    labels = QueueLabels(STARTED)
    (unknown,) = labels.divide([queue(0, 5)])
    assert unknown.counters is None
    for produced, shown in ((100, 100), (90, 100), (None, 100), (101, 101)):
        assert told(labels.divide([queue(0, 5, produced)])) == {"q0": shown}


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 50), st.none() | st.integers(0, 100), st.integers(0, 2_000)),
            max_size=8,
            unique_by=lambda each: each[0],
        ),
        max_size=12,
    )
)
def test_no_counter_ever_goes_back_and_labels_are_bounded(looks: list[list[tuple[int, int, int | None, int]]]) -> None:
    labels = QueueLabels(STARTED, most=3)
    last: dict[str, float] = {}
    for look in looks:
        queues = [queue(*each) for each in look]
        shown = labels.divide(queues)
        assert len(shown) <= 4
        assert sum(each.size for each in shown) == sum(each.size for each in queues)
        now = {each.queue_name: each.counters for each in shown if each.counters is not None}
        present = {each.queue_name for each in queues} | {OTHER}
        for name, counters in now.items():
            assert all(value >= last.get(name, 0) for value in counters)
        last = {name: value for name, value in last.items() if name in present} | {name: min(value) for name, value in now.items()}
