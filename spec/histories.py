"""Command `python -m spec.histories`: whether the specification of a partition accepts histories of the simulator."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from spec.cluster_histories import cluster_histories
from spec.simulated_histories import histories
from spec.trace_check import TraceCheck

KINDS = {"queues": histories, "clusters": cluster_histories}


class Checked(NamedTuple):
    """A seed's histories: how many partitions and events, and what was rejected."""

    seed: int
    partitions: int
    events: int
    rejected: list[str]


def check(kind: str, seed: int) -> Checked:
    """Run the seed's history and check those of its partitions."""
    recorded = KINDS[kind](seed)
    verdicts = {name: TraceCheck().check(history) for name, history in recorded.items()}
    rejected = [f"partition {name}: {verdict}" for name, verdict in verdicts.items() if verdict is not None]
    return Checked(seed, len(recorded), sum(map(len, recorded.values())), rejected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a history is rejected."""
    parser = argparse.ArgumentParser(prog="python -m spec.histories", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="queues", help="what is simulated (queues)")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many histories (20)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes (1)")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    partitions = events = failed = 0
    for done, each in enumerate(_checked(options.kind, seeds, options.jobs), 1):
        partitions, events, failed = partitions + each.partitions, events + each.events, failed + bool(each.rejected)
        for reason in each.rejected:
            print(f"seed {each.seed}, {reason}", flush=True)
        if done % 50 == 0 or done == len(seeds):
            print(f"{options.kind}: {done} histories of {partitions} partitions, {events:,} events: {failed} rejected", flush=True)
    return int(failed > 0)


def _checked(kind: str, seeds: Sequence[int], jobs: int) -> Iterator[Checked]:
    if jobs == 1:
        yield from map(partial(check, kind), seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(check, kind), seeds)


if __name__ == "__main__":
    sys.exit(main())
