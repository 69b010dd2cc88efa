"""`python -m bench key_costs`: what order and fairness by key, and priorities, cost in bulk, as ratios to the same work without, in turns.

A cycle is: produce 1,000 items of 100 bytes, lease 1,000, complete them by their leases; eight clients, Arrow. Also: how much memory a
million waiting keys take in a partition.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.client import AsyncClient
from sluiceway.core.partition.key_flows import KeyRules
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.partition_policy import Rules
from sluiceway.model.item_keys import hash_of

CLIENTS = 8
BATCH = 1_000
ROUNDS, SECONDS = 5, 3.0
MEMORY_KEYS = 1_000_000


class Kind(NamedTuple):
    """Keys of a batch (0: none), the queue's settings, the aim: its time for a cycle, compared with that of no keys, and the
    priorities that its items have in turn (none: not given)."""

    about: str
    keys: int
    settings: dict[str, Any]
    aim: float | None = None
    priorities: Sequence[int] = ()


KINDS = (
    Kind("no keys", 0, {}),
    Kind("100 keys, no setting", 100, {}),
    Kind("order, 1 key", 1, {"order": "key"}, 1.3),
    Kind("order, 100 keys", 100, {"order": "key"}, 1.3),
    Kind("order, 1,000 keys", 1_000, {"order": "key"}, 3.0),
    Kind("fair, 100 keys", 100, {"fair": "key"}, 1.3),
    Kind("fair, 1,000 keys", 1_000, {"fair": "key"}, 3.0),
    Kind("priority, all the same", 0, {"priority": "strict"}, 1.3, [4]),
    Kind("priority, 10 levels", 0, {"priority": "strict"}, 1.3, range(10)),
)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench key_costs", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each kind in each round")
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    figures = [figure for count in given.partitions for figure in asyncio.run(_bulk(count, given.rounds, given.seconds))]
    figures.append(_memory())
    print(json.dumps([figure.document() for figure in figures], indent=2) if given.json else table(figures))
    return any(figure.missed for figure in figures)


async def _bulk(partitions: int, rounds: int, seconds: float) -> list[Figure]:
    rates: dict[str, list[float]] = {kind.about: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="sluiceway-keys-") as folder, server(SLUICEWAY, Path(folder) / "data") as started:
        async with AsyncClient(started.url) as client:
            for kind in KINDS:
                await client.create_queue(_queue(kind), requested_partitions=partitions, dead_queue=None, **kind.settings)
            for number in range(rounds + 1):
                for kind in KINDS:
                    progress(f"{partitions} partitions, round {number}: {kind.about}")
                    rate = await _rate(started.url, kind, partitions, seconds if number else 1.0)
                    if number:
                        rates[kind.about].append(rate)
    base = rates[KINDS[0].about]
    figures = [Figure(f"{partitions} partitions", "items a second without keys, median", statistics.median(base), "1/s")]
    for kind in KINDS[1:]:
        ratio = statistics.median(theirs / mine for theirs, mine in zip(base, rates[kind.about], strict=True))
        figures.append(Figure(f"{partitions} partitions", f"{kind.about}: time, compared with no keys", ratio, "×", kind.aim))
    return figures


def _queue(kind: Kind) -> str:
    return kind.about.replace(",", "").replace(" ", "-")


async def _rate(url: str, kind: Kind, partitions: int, seconds: float) -> float:
    """Items a second through all three calls."""
    payload = pa.array([b"x" * 100] * BATCH, pa.binary())
    until = time.perf_counter() + seconds

    waiting = 0

    async def work(number: int) -> int:
        nonlocal waiting
        items = 0
        keys = pa.array([f"customer-{number}-{row % kind.keys}" for row in range(BATCH)]) if kind.keys else None
        columns = {"payload": payload} if keys is None else {"payload": payload, "key": keys}
        if kind.priorities:
            columns["priority"] = pa.array([kind.priorities[row % len(kind.priorities)] for row in range(BATCH)], pa.int8())
        rows = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
        async with AsyncClient(url) as client:
            while time.perf_counter() < until:
                if waiting < CLIENTS * BATCH:
                    # Together they keep as many waiting.
                    waiting += (await client.produce_arrow(_queue(kind), rows)).count
                leased = await client.lease_arrow(
                    _queue(kind), batch_size=BATCH, max_partitions=partitions, runs=True, request_timeout="100ms"
                )
                if leased.leases:
                    done = (await client.complete(_queue(kind), lease_ids=leased.lease_ids)).completed
                    items += done
                    waiting -= done
        return items

    began = time.perf_counter()
    items = sum(await asyncio.gather(*map(work, range(CLIENTS))))
    return items / (time.perf_counter() - began)


def _memory() -> Figure:
    """A million keys with an item each in one partition, its blobs aside, which are on disk."""
    partition = Partition()
    partition.follow(Rules(keys=KeyRules(order=True)))
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, MEMORY_KEYS, BATCH):
        keys = pa.array([f"customer-{start + at}" for at in range(BATCH)])
        partition.produce(pa.RecordBatch.from_arrays([pa.array([b"x"] * BATCH, pa.binary()), keys], ["payload", "key"]), 0)
        partition.take_changes()
    hash_of.cache_clear()
    gc.collect()
    each = (tracemalloc.get_traced_memory()[0] - before) / MEMORY_KEYS
    tracemalloc.stop()
    return Figure("memory", "of each of a million waiting keys", each, "B", 300)
