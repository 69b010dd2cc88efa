"""Python's garbage collector in Spark's workers."""

from __future__ import annotations

import gc

from pyspark import TaskContext

_spared = False


def spare_collector() -> None:
    """In a task: from now on, collections in this worker pass over what it has loaded so far. Elsewhere nothing happens.

    Spark's worker collects after each task. Nearly all that it then looks through is modules, which never go, and that took several times
    as long as to read 10,000 items.
    """
    global _spared
    if not _spared and TaskContext.get() is not None:
        _spared = True
        gc.freeze()
