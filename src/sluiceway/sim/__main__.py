"""`python -m sluiceway.sim`: many histories, one replayed, or the bank of planted bugs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sluiceway.sim.bank import BANK, GROUP_BANK, SEEDS_PER_BUG, hunt
from sluiceway.sim.group import GroupWorld
from sluiceway.sim.history import History
from sluiceway.sim.planting import Bug
from sluiceway.sim.world import EventLog

PROGRESS_EVERY = 5.0
"""Seconds."""


class Storey(NamedTuple):
    """A kind of history."""

    name: str
    flag: str
    begin: Callable[[int, EventLog | None], tuple[Callable[[], None], Callable[[], int]]]
    """From a seed to what lives the history, and what then says how many events there were."""


def _queues(seed: int, log: EventLog | None) -> tuple[Callable[[], None], Callable[[], int]]:
    history = History(seed, log)
    return history.live, lambda: history.world.happened


def _groups(seed: int, log: EventLog | None) -> tuple[Callable[[], None], Callable[[], int]]:
    world = GroupWorld(seed, log)
    return world.live, lambda: world.happened


QUEUES, GROUPS = STOREYS = (Storey("queues", "", _queues), Storey("groups", " --group", _groups))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if all is well, 1 if a promise was broken or a planted bug not found."""
    parser = argparse.ArgumentParser(prog="python -m sluiceway.sim", description="Real machines in a simulated world.")
    parser.add_argument("--seeds", type=_positive, default=200, metavar="N", help="how many histories (200)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--group", action="store_true", help="histories of groups only; without it, of queues and then of groups")
    parser.add_argument("--seed", type=int, metavar="S", help="one history only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--bank", action="store_true", help=f"plant each bug of the bank and find it, within {SEEDS_PER_BUG} seeds")
    options = parser.parse_args(arguments)
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    if options.bank:
        return _bank(GROUP_BANK if options.group else BANK + GROUP_BANK)
    if options.seed is not None:
        return _replay(GROUPS if options.group else QUEUES, options.seed, options.trace)
    seeds = range(options.first, options.first + options.seeds)
    return max([_run(storey, seeds) for storey in STOREYS if storey is GROUPS or not options.group])


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
            replay = f"python -m sluiceway.sim{storey.flag} --seed {seed} --trace"
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
