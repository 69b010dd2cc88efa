"""What a data directory holds after a crash, as a consumer of an hour later finds it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from sluiceway.adapters import system
from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import Lease
from tests.instance.instance_rig import eventually, payloads, serving

HOUR = 3_600_000


class Aftermath(NamedTuple):
    """Payloads, and how often each is there. A queue that does not exist is empty."""

    waiting: Counter[str]
    dead: Counter[str]


def aftermath(directory: Path, queue: str = "q", dead_queue: str = "dead") -> Aftermath:
    """Start an instance on the directory and take everything: after an hour every lease has run out, and every item is due."""

    async def look() -> Aftermath:
        async with serving(directory) as (service, _):
            await eventually(lambda: not any(each.transferring for each in _partitions(service, queue)))
            return Aftermath(await _all(service, queue), await _all(service, dead_queue))

    now = system.now

    def later() -> int:
        return now() + HOUR

    with mock.patch.object(system, "now", later):
        return asyncio.run(look())


def _partitions(service: Service, queue: str) -> list[PartitionStats]:
    try:
        return list(service.stats(queue).partitions)
    except SluicewayError:
        return []


async def _all(service: Service, queue: str) -> Counter[str]:
    found: Counter[str] = Counter()
    while True:
        try:
            leased = await service.lease(queue, Lease("heir", 10_000, max_partitions=1_000))
        except SluicewayError as error:
            if error.code == "queue_not_found":
                return found
            raise
        if not leased.leases:
            return found
        found.update(payloads(leased.batches))
