"""Command `python -m spec.histories`: whether the specifications accept histories of the simulator."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from spec.bucket_histories import bucket_histories
from spec.bucket_trace import BucketTraceCheck
from spec.bucket_trace import Event as BucketEvent
from spec.cluster_histories import cluster_histories
from spec.group_histories import group_histories, member_histories
from spec.group_trace import GroupHistory, check_claims, check_rounds
from spec.keys_histories import keys_histories
from spec.keys_trace import Event as KeysEvent
from spec.keys_trace import KeysTraceCheck
from spec.rejected import Rejected
from spec.removal_histories import removal_histories
from spec.removal_trace import Event as RemovalEvent
from spec.removal_trace import RemovalTraceCheck
from spec.simulated_histories import histories
from spec.task_histories import task_histories
from spec.task_trace import TaskHistory, TaskTraceCheck
from spec.trace_check import Event, TraceCheck


class Checked(NamedTuple):
    """A seed's histories: how many they are, their events, and what was rejected."""

    seed: int
    histories: int
    events: int
    rejected: list[str]


def _partition(name: str, history: Sequence[Event]) -> tuple[int, Rejected[Any] | None]:
    return len(history), TraceCheck().check(history)


def _group(name: str, history: GroupHistory) -> tuple[int, Rejected[Any] | None]:
    return len(history.events), check_rounds(history) if name == "rounds" else check_claims(history)


def _bucket(name: str, history: Sequence[BucketEvent]) -> tuple[int, Rejected[Any] | None]:
    return len(history), BucketTraceCheck().check(history)


def _tasks(name: str, history: TaskHistory) -> tuple[int, Rejected[Any] | None]:
    return len(history.events), TaskTraceCheck(history.parents, history.records).check(history.events)


def _removal(name: str, history: Sequence[RemovalEvent]) -> tuple[int, Rejected[Any] | None]:
    return len(history), RemovalTraceCheck().check(history)


def _keys(name: str, history: Sequence[KeysEvent]) -> tuple[int, Rejected[Any] | None]:
    return len(history), KeysTraceCheck().check(history)


KINDS: dict[str, tuple[str, Callable[[int], Mapping[str, Any]], Callable[[str, Any], tuple[int, Any]]]] = {
    "queues": ("partitions", histories, _partition),
    "clusters": ("partitions", cluster_histories, _partition),
    "groups": ("groups", group_histories, _group),
    "members": ("groups", member_histories, _group),
    "buckets": ("partitions", bucket_histories, _bucket),
    "tasks": ("groups", task_histories, _tasks),
    "removal": ("queues", removal_histories, _removal),
    "keys": ("queues", keys_histories, _keys),
}
"""What is simulated: what its histories are of, how they are recorded, and how one is checked, which counts its events."""


def check(kind: str, seed: int) -> Checked:
    """Run the seed's history and check what was recorded of it."""
    _, record, verify = KINDS[kind]
    # Of faults that the simulator makes, and the code reports.
    logging.disable()
    try:
        recorded = record(seed)
    finally:
        logging.disable(logging.NOTSET)
    verdicts = {name: verify(name, history) for name, history in recorded.items()}
    rejected = [f"{name}: {verdict}" for name, (_, verdict) in verdicts.items() if verdict is not None]
    return Checked(seed, len(recorded), sum(events for events, _ in verdicts.values()), rejected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a history is rejected."""
    parser = argparse.ArgumentParser(prog="python -m spec.histories", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="queues", help="what is simulated (queues)")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many histories (20)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="worker processes (1)")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    of, number, events, failed = KINDS[options.kind][0], 0, 0, 0
    for done, each in enumerate(_checked(options.kind, seeds, options.jobs), 1):
        number, events, failed = number + each.histories, events + each.events, failed + bool(each.rejected)
        for reason in each.rejected:
            print(f"seed {each.seed}, {reason}", flush=True)
        if done % 50 == 0 or done == len(seeds):
            print(f"{options.kind}: {done} histories of {number} {of}, {events:,} events: {failed} rejected", flush=True)
    return int(failed > 0)


def _checked(kind: str, seeds: Sequence[int], jobs: int) -> Iterator[Checked]:
    if jobs == 1:
        yield from map(partial(check, kind), seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(check, kind), seeds)


if __name__ == "__main__":
    sys.exit(main())
