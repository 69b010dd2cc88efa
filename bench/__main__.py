"""`python -m bench`: a part of the benchmarks by its name, or the comparison with the peers."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise

from sluiceway.bench.__main__ import PARTS
from sluiceway.bench.__main__ import main as compare


def main(arguments: Sequence[str]) -> int:
    """Run a part and return its exit code. Its dependencies are imported with it."""
    # The other cases compare queues call by call. This one compares task queues, and has options of its own.
    for at, pair in enumerate(pairwise(arguments)):
        if pair == ("--cases", "workers"):
            arguments = ["workers", *arguments[:at], *arguments[at + 2 :]]
    part, rest = (arguments[0] if arguments else ""), arguments[1:]
    if part not in PARTS:
        return compare(arguments)
    code: int = importlib.import_module(f"bench.{part}").main(rest)
    return code


if __name__ == "__main__":
    # A terminated benchmark also stops the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
