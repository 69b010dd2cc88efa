"""What a worker counts, and how it says whether it is ready."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Self

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sluiceway.client import DeadItem, RetryItem
from sluiceway.worker import Options, process
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


NAMED = {"a": DeadItem("no"), "b": RetryItem(), "c": DeadItem("no")}
ROWS = pa.table({"id": ["a", "b", "c", "d"], "outcome": ["dead", "retry", "dead", "done"]})


class Running:
    """In place of a client, and of its consumer, which gives the handler five items."""

    problem, is_stopping = None, False
    returned: object = None

    def consumer(self, *_: object, **__: object) -> Self:
        return self

    def run(self, handler: Callable[[object], Any], **_: object) -> Any:
        returned = handler(["a", "b", "c", "d", "e"])
        if not inspect.isawaitable(returned):
            self.returned = returned
            return None
        return self._later(returned)

    async def _later(self, returned: Awaitable[object]) -> None:
        self.returned = await returned

    run_batches = run_tables = run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("given", [NAMED, ROWS, ROWS.to_reader])
def test_items_that_get_another_outcome_by_what_a_handler_returns_are_not_counted_as_done(
    monkeypatch: pytest.MonkeyPatch, given: Any, is_async: bool
) -> None:
    def handle(_: object) -> object:
        # A reader can be read once.
        return given() if callable(given) else given

    async def handle_async(_: object) -> object:
        return handle(_)

    running = Running()
    monkeypatch.setattr(process, "AsyncClient" if is_async else "Client", lambda **_: running)
    worker = process.WorkerProcess(handle_async if is_async else handle, Options(queue_name="q", batch_size=5, tables=given is not NAMED))
    worker.run()
    assert running.returned == (NAMED if given is NAMED else ROWS)
    counts = worker.counts().outcomes
    assert {name: each.items for name, each in counts.items()} == {"done": 2, "retry": 1, "dead": 2, "failed": 0}
    assert {name: sum(each.buckets) for name, each in counts.items()} == {"done": 1, "retry": 0, "dead": 0, "failed": 0}


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
