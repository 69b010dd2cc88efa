"""One slice in its own process: `python -m sluiceway.bench.slice_process SYSTEM ADDRESS WORK SECONDS`.

Prints three lines of JSON: at the slice's beginning and end, with the processor time used so far, and its result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

from sluiceway.bench import systems, work


def main(name: str, address: str, case: str, seconds: str) -> None:
    work.listeners.append(lambda moment: print(json.dumps({moment: time.process_time()}), flush=True))
    done = systems.module(name).drive(name, address, work.Work.named(case), float(seconds))
    print(json.dumps(dataclasses.asdict(done)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
