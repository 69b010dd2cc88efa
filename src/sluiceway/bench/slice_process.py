"""One slice in a process of its own: `python -m sluiceway.bench.slice_process SYSTEM ADDRESS WORK SECONDS`.

It prints three lines of JSON: when the slice begins and when it ends, each with the processor time used so far, and what was done.
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
