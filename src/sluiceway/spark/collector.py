"""Garbage collector of Spark's Python workers."""

from __future__ import annotations

import gc

from pyspark import TaskContext

_spared = False


def spare_collector() -> None:
    """In a task: exclude everything loaded so far from this worker's future collections. Elsewhere a no-op.

    Spark's worker collects after each task. Nearly everything it scans is modules, which never go, and that took several times as long as
    reading 10,000 items.
    """
    global _spared
    if not _spared and TaskContext.get() is not None:
        _spared = True
        gc.freeze()
