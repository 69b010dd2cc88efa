"""Crash rounds on a real server: crash it under load, start it again on the same data, compare it with what its clients were told.

`python -m tests.campaigns.crash ROUNDS` prints progress and one line at the end; exit code 1 if anything was wrong. A crash is kill −9;
with `--power-cut` the disk loses what was not synced as well (Linux and root only). With `--backend postgres` the partitions lie in a
PostgreSQL server of its own, which goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.crash.loop_disk import LoopDisk, LoopDiskError
from tests.campaigns.crash.rounds import Rounds, postgres_config
from tests.servers.postgres_server import PostgresServer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.crash", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000)
    parser.add_argument("--power-cut", action="store_true")
    parser.add_argument("--backend", choices=("sqlite", "postgres"), default="sqlite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sluiceway-crash-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        try:
            disk = stack.enter_context(LoopDisk(folder)) if given.power_cut else None
        except LoopDiskError as error:
            parser.exit(2, f"this machine does not allow a power cut: {error}\n")
        config = postgres_config(stack.enter_context(PostgresServer())) if given.backend == "postgres" else ""
        rounds = Rounds(folder, given.seed, disk=disk, config=config)
        begun = time.monotonic()
        tally = rounds.run(given.rounds, lambda line: print(line, flush=True))
        for example in tally.examples[:20]:
            print(example)
        times = sorted(rounds.times)
        print(
            f"{'FAILED' if tally.faults else 'ok'}: seed {given.seed}, {len(times)} rounds in {time.monotonic() - begun:.0f} s, "
            f"start after a crash {times[len(times) // 2]:.2f} s (median), {times[-1]:.2f} s (most); {tally.summary()}"
        )
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
