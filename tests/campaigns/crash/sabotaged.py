"""`sluiceway` with a promise taken out, for control groups: a check that finds nothing wrong with these finds nothing.

`python sabotaged.py FLAW serve …`, where FLAW is `answers-early`, or a setting of SQLite's `synchronous` (`off`, `normal`).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.cli.main import main
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef

COMMAND = [sys.executable, str(Path(__file__).resolve())]


def answer_early() -> None:
    """DONE is said before the commit has begun; the commit follows a little later, in order."""
    honest = SqlitePartitionStore.apply
    last: dict[PartitionRef, asyncio.Task[None]] = {}

    async def apply(self: SqlitePartitionStore, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        before = last.get(ref)

        async def later() -> None:
            if before is not None:
                await before
            await asyncio.sleep(0.02)
            await honest(self, ref, changes, fence)

        last[ref] = asyncio.get_running_loop().create_task(later())
        return Outcome.DONE

    SqlitePartitionStore.apply = apply  # type: ignore[method-assign]


def sync_less(synchronous: str) -> None:
    honest = PartitionFile._set_up

    def set_up(self: PartitionFile) -> None:
        honest(self)
        self._db.pragma("synchronous", synchronous)

    PartitionFile._set_up = set_up  # type: ignore[method-assign]


if __name__ == "__main__":
    flaw = sys.argv.pop(1)
    if flaw == "answers-early":
        answer_early()
    else:
        sync_less(flaw)
    main()
