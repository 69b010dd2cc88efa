"""Health checks of an instance: its meta store, backends and partitions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence

from sluiceway.adapters.system import stopwatch
from sluiceway.contract.queue_stats import LogicalQueueStats
from sluiceway.kernel.clock import Millis
from sluiceway.local.backend_pool import BackendInfo
from sluiceway.model.health import Check
from sluiceway.ports.meta_store import MetaStore

UNREACHED = ("unavailable", "error")
"""States of a partition that does not serve requests (`core.partition.partition_states`)."""
META_TIMEOUT: Millis = 2_000
"""Timeout of the meta store's check. A slower read is as good as none to the caller of the check."""


async def check_meta(meta: MetaStore, key: str) -> Check:
    """Check that the meta store can be read. Without it no queue can be created or changed; items flow on."""
    began = stopwatch()
    try:
        async with asyncio.timeout(META_TIMEOUT / 1000):
            await meta.read([key])
    except TimeoutError:
        found = f"it did not answer within {META_TIMEOUT} ms"
    except Exception as error:
        found = f"it cannot be read: {error}"
    else:
        return Check("meta store", True, "it can be read", _millis(began))
    return Check("meta store", False, found, _millis(began))


def check_backends(backends: Sequence[BackendInfo]) -> list[Check]:
    """Check that each backend answered its last request."""
    return [
        Check(f"backend {each.name}", each.problem is None, each.problem or f"it serves its {each.partitions} partitions", 0)
        for each in backends
    ]


def check_partitions(queues: Iterable[LogicalQueueStats]) -> Check:
    """Check that every partition can be reached. How a partition is used does not matter here."""
    began = stopwatch()
    states = Counter(partition.state for queue in queues for partition in queue.partitions)
    found = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "there are none"
    return Check("partitions", states.keys().isdisjoint(UNREACHED), found, _millis(began))


def _millis(began: float) -> Millis:
    return round((stopwatch() - began) * 1000)
