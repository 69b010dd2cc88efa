"""The campaign of backups: rounds under load, and kills, into a directory and into a bucket.

python -m tests.server.backup_campaign 20 --target s3
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from tests.server import backup_kills, backup_rounds
from tests.servers.moto_server import REGION, MotoServer

BACKUPS, KILLS = 5, 6
"""Of each seed."""


def bucket_url(server: MotoServer, folder: str) -> str:
    """The URL of a folder in the server's bucket, with its keys."""
    server.bucket("tests")
    return f"s3://tests/{folder}?region={REGION}&endpoint={server.endpoint}&access_key_id=tests&secret_access_key=tests"


@contextmanager
def target_of(kind: str, folder: Path) -> Iterator[str]:
    """Where backups go, for the length of a block."""
    if kind == "directory":
        yield str(folder / "backups")
        return
    with MotoServer() as server:
        yield bucket_url(server, "backups")


def main() -> None:
    """Play the seeds, and print a line for each, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int)
    parser.add_argument("--target", choices=["directory", "s3"], help="of the backups; by default, in turns")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    kills = Counter[str]()
    for seed in range(given.first, given.first + given.seeds):
        kind = given.target or ("directory", "s3")[seed // 2 % 2]
        with tempfile.TemporaryDirectory() as name, target_of(kind, Path(name)) as target:
            for part in ("rounds", "kills"):
                (Path(name) / part).mkdir()
            began, workers = time.monotonic(), seed % 2 * 2 + 1
            told = backup_rounds.run(Path(name) / "rounds", BACKUPS, seed, workers, target)
            kinds = Random(seed).choices(backup_kills.KINDS, k=KILLS)
            killed = backup_kills.run(Path(name) / "kills", kinds, seed, target)
            print(
                f"seed {seed}, {kind}, workers: {workers}: {BACKUPS} backups, restored and compared, {told[-1]}; then killed before their "
                f"end: {dict(killed)} of {KILLS} in {time.monotonic() - began:.0f} s",
                flush=True,
            )
            kills.update(killed)
    of = ", ".join(f"{number} of {kind}" for kind, number in sorted(kills.items()))
    print(f"ok: {given.seeds * BACKUPS} backups restored and compared; {kills.total()} kills before the end of what was killed ({of})")


if __name__ == "__main__":
    main()
