"""One slice in its own process: `python -m sluiceway.bench.slice_process SYSTEM ADDRESS WORK SECONDS`.

Prints three lines of JSON: at the slice's beginning and end, with the processor time used so far, and its result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable

from sluiceway.bench import systems, work


def main(name: str, address: str, case: str, seconds: str) -> None:
    report(lambda: systems.module(name).drive(name, address, work.Work.named(case), float(seconds)))


def report(drive: Callable[[], work.Done]) -> None:
    """Do a slice, and print what the harness reads of it."""
    work.listeners.append(lambda moment: print(json.dumps({moment: time.process_time()}), flush=True))
    print(json.dumps(dataclasses.asdict(drive())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
