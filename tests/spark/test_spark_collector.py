"""Python's collector in Spark's workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pyspark import TaskContext

from sluiceway.spark import collector


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is frozen, before or after."""
    monkeypatch.setattr(collector, "_spared", False)
    gc.unfreeze()
    yield
    TaskContext._setTaskContext(None)
    gc.unfreeze()


@pytest.mark.usefixtures("collecting")
def test_a_worker_passes_over_what_it_loaded_from_its_first_task_on() -> None:
    TaskContext._setTaskContext(TaskContext())
    loaded = len(gc.get_objects())
    collector.spare_collector()
    frozen = gc.get_freeze_count()
    assert frozen >= loaded * 0.9
    # What a later task leaves behind is collected as ever.
    collector.spare_collector()
    for _ in range(100):
        circle: list[object] = []
        circle.append(circle)
    # Fewer, if some of it was let go of meanwhile; more only if they were added.
    assert gc.get_freeze_count() <= frozen
    assert gc.collect() >= 99


@pytest.mark.usefixtures("collecting")
def test_the_drivers_collector_is_left_alone() -> None:
    collector.spare_collector()
    assert gc.get_freeze_count() == 0
