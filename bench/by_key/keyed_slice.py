"""One slice in its own process: `python -m bench.by_key.keyed_slice SYSTEM ADDRESS KEYS SECONDS [RATE]`.

Without a rate, as many items as the system can do; with one, that many a second. Reports as `sluiceway.bench.slice_process` does.
"""

from __future__ import annotations

import sys

from bench.by_key.keyed_load import KeyedWork, pace, saturate
from bench.by_key.ordered_systems import ORDERED
from sluiceway.bench.slice_process import report
from sluiceway.bench.work import Done, run


def main(name: str, address: str, keys: str, seconds: str, rate: str | None = None) -> None:
    report(lambda: run(drive(name, address, KeyedWork(int(keys)), float(seconds), None if rate is None else float(rate))))


async def drive(name: str, address: str, work: KeyedWork, seconds: float, rate: float | None = None) -> Done:
    async with ORDERED[name].load().clients(name, address, work) as clients:
        if rate is None:
            return await saturate(clients, work, seconds)
        return await pace(clients, work, rate, seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
