"""Command `python -m simulation`: runs many histories, replays one, or hunts the planted bugs."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import islice
from typing import NamedTuple, TypeVar

from simulation.bank import (
    BANK,
    BUCKET_BANK,
    CLUSTER_BANK,
    DEMAND_BANK,
    GROUP_BANK,
    KEY_BANK,
    LIMIT_BANK,
    MEMBER_BANK,
    PRIORITY_BANK,
    REBALANCE_BANK,
    SEEDS_PER_BUG,
    TASK_BANK,
    UNIQUE_BANK,
    Found,
    hunt,
)
from simulation.bucket_world import BucketWorld
from simulation.cluster import ClusterWorld
from simulation.cluster_by_key import world_by_key
from simulation.cluster_by_limit import world_by_limit
from simulation.cluster_by_priority import PriorityWorld
from simulation.cluster_group import MemberWorld
from simulation.cluster_rebalances import RebalanceWorld
from simulation.cluster_unique import UniqueWorld
from simulation.demand_world import DemandWorld
from simulation.group import GroupWorld
from simulation.planting import Bug, planted
from simulation.queue_run import History
from simulation.task_world import TasksWorld
from simulation.world import EventLog

PROGRESS_EVERY = 5.0
"""Progress report interval in seconds."""


T = TypeVar("T")
R = TypeVar("R")
Life = tuple[Callable[[], None], Callable[[], int]]
"""Runs a history, and counts its events afterwards."""


class Storey(NamedTuple):
    """Kind of history: its world, its command-line flag, its bugs."""

    name: str
    flag: str
    begin: Callable[[int, EventLog | None], Life]
    bank: Sequence[Bug]
    share: int = 1
    """Runs one of this many seeds, unless only this kind is requested: slower kinds run fewer histories."""


def _queues(seed: int, log: EventLog | None) -> Life:
    history = History(seed, log)
    return history.live, lambda: history.world.happened


def _groups(seed: int, log: EventLog | None) -> Life:
    world = GroupWorld(seed, log)
    return world.live, lambda: world.happened


def _members(seed: int, log: EventLog | None) -> Life:
    world = MemberWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _demand(seed: int, log: EventLog | None) -> Life:
    world = DemandWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _cluster(seed: int, log: EventLog | None) -> Life:
    world = ClusterWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _rebalances(seed: int, log: EventLog | None) -> Life:
    world = RebalanceWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _keys(seed: int, log: EventLog | None) -> Life:
    world = world_by_key(seed, log)
    return world.live, lambda: world.loop.steps


def _priorities(seed: int, log: EventLog | None) -> Life:
    world = PriorityWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _unique(seed: int, log: EventLog | None) -> Life:
    world = UniqueWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _limits(seed: int, log: EventLog | None) -> Life:
    world = world_by_limit(seed, log)
    return world.live, lambda: world.loop.steps


def _tasks(seed: int, log: EventLog | None) -> Life:
    world = TasksWorld(seed, log)
    return world.live, lambda: world.happened


def _buckets(seed: int, log: EventLog | None) -> Life:
    world = BucketWorld(seed, log)
    return world.live, lambda: world.loop.steps


QUEUES = Storey("queues", "", _queues, BANK)
OTHERS = (
    Storey("groups", "--group", _groups, GROUP_BANK),
    Storey("tasks", "--tasks", _tasks, TASK_BANK),
    Storey("buckets", "--bucket", _buckets, BUCKET_BANK),
    Storey("members", "--members", _members, MEMBER_BANK, 4),
    Storey("demand", "--demand", _demand, DEMAND_BANK, 4),
    Storey("cluster", "--cluster", _cluster, CLUSTER_BANK, 10),
    Storey("rebalances", "--rebalance", _rebalances, REBALANCE_BANK, 10),
    Storey("keys", "--keys", _keys, KEY_BANK, 10),
    Storey("priorities", "--priorities", _priorities, PRIORITY_BANK, 10),
    Storey("unique", "--unique", _unique, UNIQUE_BANK, 10),
    Storey("limits", "--limits", _limits, LIMIT_BANK, 10),
)


STOREYS = (QUEUES, *OTHERS)
BUGS = {(storey.name, bug.name): bug for storey in STOREYS for bug in storey.bank}


class Task(NamedTuple):
    """One history. Storey and planted bug are names, so that the task can be pickled for a worker process."""

    storey: str
    seed: int
    plant: str | None


class Lived(NamedTuple):
    """Result of a history: event count, CPU seconds, and the error that ended it."""

    events: int
    seconds: float
    error: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 after a broken promise or a missed bug, else 0."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description="Real machines in a simulated world.")
    parser.add_argument("--seeds", type=_positive, default=200, metavar="N", help="how many histories (200)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="J", help="worker processes (1)")
    only = parser.add_mutually_exclusive_group()
    for storey in OTHERS:
        only.add_argument(storey.flag, action="store_const", const=storey, dest="only", help=f"histories of the storey {storey.name} only")
    parser.add_argument("--seed", type=int, metavar="S", help="one history only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--plant", metavar="BUG", help="plant this bug of the storey's bank in each history")
    parser.add_argument("--bank", action="store_true", help=f"plant each bug of the bank and find it, within {SEEDS_PER_BUG} seeds")
    options = parser.parse_args(arguments)
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    if options.plant is not None and ((options.only or QUEUES).name, options.plant) not in BUGS:
        parser.error(f"the bank of the storey {(options.only or QUEUES).name} has no bug {options.plant}")
    # Each bug belongs to one storey.
    storeys: Sequence[Storey] = (options.only or QUEUES,) if options.only or options.plant else STOREYS
    if options.bank:
        return _bank([(storey.name, bug.name) for storey in storeys for bug in storey.bank], options.jobs)
    if options.seed is not None:
        return _replay(Task((options.only or QUEUES).name, options.seed, options.plant), options.trace)
    seeds = {storey: _seeds(options, storey) for storey in storeys}
    # One list for all storeys, so that no worker idles at the end of each.
    tasks = [Task(storey.name, seed, options.plant) for storey in storeys for seed in seeds[storey]]
    with closing(_in_order(_live, tasks, options.jobs)) as lives:
        return max([_run(storey, seeds[storey], islice(lives, len(seeds[storey])), options.plant) for storey in storeys])


def _seeds(options: argparse.Namespace, storey: Storey) -> range:
    seeds = options.seeds if options.only is storey else -(-options.seeds // storey.share)
    return range(options.first, options.first + seeds)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return int(text)


# ---- worker processes -----------------------------------------------------------------------------------------


def _in_order(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Generator[R, None, None]:
    """Yield the results in the order of the tasks, from `jobs` worker processes, or from this process if `jobs` is 1."""
    if jobs == 1:
        with _rare_collections():
            yield from map(work, tasks)
        return
    # Spawned: a fork would copy the locks of Arrow's threads.
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _tune_gc)
    try:
        yield from pool.map(work, tasks)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely: nearly all objects of a history live to its end. `_live` collects after each history."""
    before = gc.get_threshold()
    _tune_gc()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _tune_gc() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000)


def _live(task: Task) -> Lived:
    began = time.process_time()
    error = None
    with _plant(task):
        live, happened = _storey(task).begin(task.seed, None)
        try:
            live()
        except Exception as broken:
            error = f"{type(broken).__name__}: {broken}"
    lived = Lived(happened(), 0.0, error)
    del live, happened
    gc.collect()
    return lived._replace(seconds=time.process_time() - began)


def _storey(task: Task) -> Storey:
    return next(storey for storey in STOREYS if storey.name == task.storey)


def _plant(task: Task) -> AbstractContextManager[None]:
    return nullcontext() if task.plant is None else planted(BUGS[task.storey, task.plant])


# ---- modes of the command -------------------------------------------------------------------------------------


def _run(storey: Storey, seeds: range, lives: Iterable[Lived], plant: str | None) -> int:
    events = failed = 0
    seconds, told = 0.0, time.monotonic()
    for done, (seed, lived) in enumerate(zip(seeds, lives, strict=True), 1):
        if lived.error is not None:
            failed += 1
            planting = f"--plant {plant}" if plant is not None else ""
            replay = " ".join(f"python -m simulation {storey.flag} {planting} --seed {seed} --trace".split())
            print(f"seed {seed}: {lived.error}\n  replay it: {replay}", flush=True)
        events += lived.events
        seconds += lived.seconds
        if time.monotonic() - told > PROGRESS_EVERY or done == len(seeds):
            told = time.monotonic()
            rate = events / max(seconds, 0.001)
            print(
                f"{storey.name}: {done} of {len(seeds)} seeds, {failed} failed; {events:,} events, {rate:,.0f} a second of one core",
                flush=True,
            )
    return 1 if failed else 0


def _replay(task: Task, trace: bool) -> int:
    log = EventLog()
    broken: Exception | None = None
    with _plant(task):
        live, happened = _storey(task).begin(task.seed, log)
        try:
            live()
        except Exception as error:
            broken = error
    if trace:
        print("\n".join(log.lines))
    print(f"seed {task.seed}: {happened():,} events, log {log.digest()}")
    if broken is None:
        return 0
    print(f"seed {task.seed}: {type(broken).__name__}: {broken}")
    return 1


def _hunt(name: tuple[str, str]) -> Found | None:
    return hunt(BUGS[name], range(SEEDS_PER_BUG))


def _bank(names: Sequence[tuple[str, str]], jobs: int) -> int:
    found = 0
    bugs = [BUGS[name] for name in names]
    width = max(len(bug.name) for bug in bugs)
    for bug, result in zip(bugs, _in_order(_hunt, names, jobs), strict=True):
        if result is not None and result.is_crash_of_plant:
            print(f"{bug.name:<{width}}     -  NOT FOUND, as it cannot be called: {result.how}", flush=True)
            continue
        found += result is not None
        seeds, how = ("-", f"NOT FOUND: {bug.what}") if result is None else (str(result.seed + 1), result.how)
        print(f"{bug.name:<{width}}  {seeds:>4}  {how}", flush=True)
    print(f"found {found} of {len(bugs)} planted bugs (second column: seeds needed, of {SEEDS_PER_BUG})")
    return 0 if found == len(bugs) else 1
