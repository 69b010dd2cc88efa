"""`python -m sluiceway.sim`: many histories, one replayed, or the bank of planted bugs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from sluiceway.sim.bank import BANK, SEEDS_PER_BUG, hunt
from sluiceway.sim.history import History
from sluiceway.sim.world import EventLog

PROGRESS_EVERY = 5.0
"""Seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 if all is well, 1 if a promise was broken or a planted bug not found."""
    parser = argparse.ArgumentParser(prog="python -m sluiceway.sim", description="Real machines in a simulated world.")
    parser.add_argument("--seeds", type=_positive, default=200, metavar="N", help="how many histories (200)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="the first seed (0)")
    parser.add_argument("--seed", type=int, metavar="S", help="one history only")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--bank", action="store_true", help=f"plant each bug of the bank and find it, within {SEEDS_PER_BUG} seeds")
    options = parser.parse_args(arguments)
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    if options.bank:
        return _bank()
    if options.seed is not None:
        return _replay(options.seed, options.trace)
    return _run(range(options.first, options.first + options.seeds))


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("expected 1 or more")
    return int(text)


def _run(seeds: range) -> int:
    events = failed = 0
    began, told = time.process_time(), time.monotonic()
    for done, seed in enumerate(seeds, 1):
        history = History(seed)
        try:
            history.live()
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}\n  replay it: python -m sluiceway.sim --seed {seed} --trace", flush=True)
        events += history.world.happened
        if time.monotonic() - told > PROGRESS_EVERY or done == len(seeds):
            told = time.monotonic()
            rate = events / max(time.process_time() - began, 0.001)
            print(f"{done} of {len(seeds)} seeds, {failed} failed; {events:,} events, {rate:,.0f} a second of one core", flush=True)
    return 1 if failed else 0


def _replay(seed: int, trace: bool) -> int:
    log = EventLog()
    history = History(seed, log)
    broken: Exception | None = None
    try:
        history.live()
    except Exception as error:
        broken = error
    if trace:
        print("\n".join(log.lines))
    print(f"seed {seed}: {history.world.happened:,} events, log {log.digest()}")
    if broken is None:
        return 0
    print(f"seed {seed}: {type(broken).__name__}: {broken}")
    return 1


def _bank() -> int:
    found = 0
    width = max(len(bug.name) for bug in BANK)
    for bug in BANK:
        result = hunt(bug, range(SEEDS_PER_BUG))
        found += result is not None
        seeds, how = ("-", f"NOT FOUND: {bug.what}") if result is None else (str(result.seed + 1), result.how)
        print(f"{bug.name:<{width}}  {seeds:>4}  {how}", flush=True)
    print(f"found {found} of {len(BANK)} planted bugs (second column: seeds needed, of {SEEDS_PER_BUG})")
    return 0 if found == len(BANK) else 1


if __name__ == "__main__":
    sys.exit(main())
