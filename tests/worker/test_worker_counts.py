"""What a worker counts, and how it says whether it is ready."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sluiceway.client import DeadItem, RetryItem
from sluiceway.worker.counts import BUCKETS, Counts, Meter, WorkerMetrics, total
from sluiceway.worker.status_page import why_not_ready


def test_handlers_are_counted_by_how_they_end_and_the_counts_of_processes_are_summed() -> None:
    meters = Meter(), Meter()
    for meter in meters:
        for error, items in ((None, 1), (RetryItem(), 1), (DeadItem("no"), 2), (ValueError(), 3)):
            try:
                with meter.handling(items):
                    assert meter.counts.running == items
                    if error is not None:
                        raise error
            except (RetryItem, DeadItem, ValueError) as raised:
                assert raised is error
    counts = total(meter.counts for meter in meters)
    assert {name: (sum(each.buckets), each.items) for name, each in counts.outcomes.items()} == {
        "done": (2, 2),
        "retry": (2, 2),
        "dead": (2, 4),
        "failed": (2, 6),
    }
    assert counts.running == 0
    registry = CollectorRegistry()
    registry.register(WorkerMetrics("q", lambda: [meter.counts for meter in meters]))
    lines = generate_latest(registry).decode().splitlines()
    assert 'sluiceway_worker_items_total{outcome="failed",queue="q"} 6.0' in lines
    assert 'sluiceway_worker_handler_seconds_count{outcome="failed",queue="q"} 2.0' in lines
    assert f'sluiceway_worker_handler_seconds_bucket{{le="{BUCKETS[0]}",outcome="done",queue="q"}} 2.0' in lines


WELL, AWAY, STOPPING = Counts(), Counts(problem="cannot reach http://x"), Counts(stopping=True)


@pytest.mark.parametrize(
    ("processes", "reason"),
    [
        ([], "no process is running"),
        ([WELL], None),
        ([WELL, AWAY], None),
        ([AWAY, AWAY], "cannot reach http://x"),
        ([AWAY, STOPPING], "cannot reach http://x"),
        ([STOPPING, STOPPING], "it is stopping"),
    ],
)
def test_a_worker_is_ready_if_one_of_its_processes_gets_items(processes: list[Counts], reason: str | None) -> None:
    assert why_not_ready(processes) == reason
