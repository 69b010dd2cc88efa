"""`python -m sluiceway.sim`: many histories, one replayed, or the bank of planted bugs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sluiceway.sim.bank import BANK, CLUSTER_BANK, GROUP_BANK, MEMBER_BANK, REBALANCE_BANK, SEEDS_PER_BUG, TASK_BANK, hunt
from sluiceway.sim.cluster import ClusterWorld
from sluiceway.sim.cluster_group import MemberWorld
from sluiceway.sim.cluster_rebalances import RebalanceWorld
from sluiceway.sim.group import GroupWorld
from sluiceway.sim.history import History
from sluiceway.sim.planting import Bug
from sluiceway.sim.tasks import TasksWorld
from sluiceway.sim.world import EventLog

PROGRESS_EVERY = 5.0
"""Seconds."""


Life = tuple[Callable[[], None], Callable[[], int]]
"""What lives a history, and what then says how many events there were."""


class Storey(NamedTuple):
    """A kind of history."""

    name: str
    flag: str
    begin: Callable[[int, EventLog | None], Life]
    bank: Sequence[Bug]
    share: int = 1
    """One of so many seeds, unless histories of this kind only are asked for: they take longer."""


def _queues(seed: int, log: EventLog | None) -> Life:
    history = History(seed, log)
    return history.live, lambda: history.world.happened


def _groups(seed: int, log: EventLog | None) -> Life:
    world = GroupWorld(seed, log)
    return world.live, lambda: world.happened


def _members(seed: int, log: EventLog | None) -> Life:
    world = MemberWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _cluster(seed: int, log: EventLog | None) -> Life:
    world = ClusterWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _rebalances(seed: int, log: EventLog | None) -> Life:
    world = RebalanceWorld(seed, log)
    return world.live, lambda: world.loop.steps


def _tasks(seed: int, log: EventLog | None) -> Life:
    world = TasksWorld(seed, log)
    return world.live, lambda: world.happened


QUEUES = Storey("queues", "", _queues, BANK)
OTHERS = (
    Storey("groups", "--group", _groups, GROUP_BANK),
    Storey("tasks", "--tasks", _tasks, TASK_BANK),
    Storey("members", "--members", _members, MEMBER_BANK, 4),
    Storey("cluster", "--cluster", _cluster, CLUSTER_BANK, 10),
    Storey("rebalances", "--rebalance", _rebalances, REBALANCE_BANK, 10),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if all is well, 1 if a promise was broken or a planted bug not found."""
    parser = argparse.ArgumentParser(prog="python -m sluiceway.sim", description="Real machines in a simulated world.")
    parser.add_argument("--seeds", type=_positive, default=200, metavar="N", help="how many histories (200)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    only = parser.add_mutually_exclusive_group()
    for storey in OTHERS:
        only.add_argument(storey.flag, action="store_const", const=storey, dest="only", help=f"histories of the storey {storey.name} only")
    parser.add_argument("--seed", type=int, metavar="S", help="one history only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--bank", action="store_true", help=f"plant each bug of the bank and find it, within {SEEDS_PER_BUG} seeds")
    options = parser.parse_args(arguments)
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    storeys: Sequence[Storey] = (QUEUES, *OTHERS) if options.only is None else (options.only,)
    if options.bank:
        return _bank([bug for storey in storeys for bug in storey.bank])
    if options.seed is not None:
        return _replay(options.only or QUEUES, options.seed, options.trace)
    return max([_run(storey, _seeds(options, storey)) for storey in storeys])


def _seeds(options: argparse.Namespace, storey: Storey) -> range:
    seeds = options.seeds if options.only is storey else -(-options.seeds // storey.share)
    return range(options.first, options.first + seeds)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return int(text)


def _run(storey: Storey, seeds: range) -> int:
    events = failed = 0
    began, told = time.process_time(), time.monotonic()
    for done, seed in enumerate(seeds, 1):
        live, happened = storey.begin(seed, None)
        try:
            live()
        except Exception as error:
            failed += 1
            replay = " ".join(f"python -m sluiceway.sim {storey.flag} --seed {seed} --trace".split())
            print(f"seed {seed}: {type(error).__name__}: {error}\n  replay it: {replay}", flush=True)
        events += happened()
        if time.monotonic() - told > PROGRESS_EVERY or done == len(seeds):
            told = time.monotonic()
            rate = events / max(time.process_time() - began, 0.001)
            print(
                f"{storey.name}: {done} of {len(seeds)} seeds, {failed} failed; {events:,} events, {rate:,.0f} a second of one core",
                flush=True,
            )
    return 1 if failed else 0


def _replay(storey: Storey, seed: int, trace: bool) -> int:
    log = EventLog()
    live, happened = storey.begin(seed, log)
    broken: Exception | None = None
    try:
        live()
    except Exception as error:
        broken = error
    if trace:
        print("\n".join(log.lines))
    print(f"seed {seed}: {happened():,} events, log {log.digest()}")
    if broken is None:
        return 0
    print(f"seed {seed}: {type(broken).__name__}: {broken}")
    return 1


def _bank(bugs: Sequence[Bug]) -> int:
    found = 0
    width = max(len(bug.name) for bug in bugs)
    for bug in bugs:
        result = hunt(bug, range(SEEDS_PER_BUG))
        found += result is not None
        seeds, how = ("-", f"NOT FOUND: {bug.what}") if result is None else (str(result.seed + 1), result.how)
        print(f"{bug.name:<{width}}  {seeds:>4}  {how}", flush=True)
    print(f"found {found} of {len(bugs)} planted bugs (second column: seeds needed, of {SEEDS_PER_BUG})")
    return 0 if found == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
