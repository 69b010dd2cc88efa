"""`make bench`: produce → lease → complete over HTTP, durable, this design against the row-per-item yardstick, in one run.

Slices of the two alternate, so that a change in the machine's speed meets both; the medians' ratio is the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from sluiceway.bench import scale
from sluiceway.bench.load import Connection, Load, drive
from sluiceway.bench.servers import SLUICEWAY, server

LOADS = [Load(clients, 1_000, 100) for clients in (1, 8)]
SYSTEMS = {"sluiceway": SLUICEWAY, "sqlite-rows": "sluiceway.bench.rows"}
RIVAL = "sqlite-rows"
QUEUE = "bench"
PARTITIONS = 4


async def measure(urls: dict[str, str], load: Load, rounds: int, seconds: float) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(rounds + 1):
        for name, url in urls.items():
            rate = await drive(url, QUEUE, load, seconds)
            if number:  # the first round warms up
                rates[name].append(rate)
    return rates


async def create(url: str) -> None:
    connection = Connection(url)
    await connection.open()
    await connection.post("/v1/queues.create", json.dumps({"queue_name": QUEUE, "requested_partitions": PARTITIONS}).encode())
    await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted slices of each system")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a slice")
    parser.add_argument("--output", type=Path, default=Path("bench/results/latest.json"))
    given = parser.parse_args()
    report: dict[str, object] = {}
    cases: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluiceway-bench-")))
        urls = {name: stack.enter_context(server(module, folder / name)).url for name, module in SYSTEMS.items()}
        for url in urls.values():
            asyncio.run(create(url))
        print(f"produce → lease → complete over HTTP, Arrow, synchronous=FULL, {PARTITIONS} partitions; items/s, median of {given.rounds}")
        for load in LOADS:
            rates = asyncio.run(measure(urls, load, given.rounds, given.seconds))
            cases[load.name] = {
                name: {"items_per_s": round(statistics.median(each)), "min": round(min(each)), "max": round(max(each))}
                for name, each in rates.items()
            }
            ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["sluiceway"], rates[RIVAL], strict=True))
            ratios[load.name] = {RIVAL: round(ratio, 2)}
            for name, case in cases[load.name].items():
                print(f"  {load.name:20} {name:12} {case['items_per_s']:>10,.0f}   ({case['min']:,.0f} to {case['max']:,.0f})")
            print(f"  {load.name:20} {'ratio':12} {ratio:>10.2f}x")
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "cases": cases,
        "ratios": ratios,
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {given.output}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["scale"]:
        sys.exit(scale.main(sys.argv[2:]))
    if sys.argv[1:2] == ["spark"]:
        # Spark is an extra that nothing else here needs.
        from sluiceway.bench import spark

        sys.exit(spark.main(sys.argv[2:]))
    main()
