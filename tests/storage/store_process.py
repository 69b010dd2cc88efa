"""A partition store in a child process, which does as it is told: another owner of the same partitions."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from sluiceway.adapters.storage.postgres import PostgresPartitionStore
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.ports.partition_store import Fence, PartitionRef, PartitionStore
from sluiceway.testing.partition_store_suite import REF, cycle
from tests.server.server_process import PATIENCE


class StoreProcess:
    """`where` is `sqlite:DIRECTORY` or `postgres:SCHEMA:URL`. Leaving the context kills it."""

    def __init__(self, where: str) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # What hangs ends the test, not the day.
        self._watch = threading.Timer(PATIENCE, self._process.kill)
        self._watch.start()
        assert self.hear() == "ready"

    def tell(self, *words: object) -> None:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)

    def ask(self, *words: object) -> str:
        """`open GRANT`, `apply GRANT TXN`, `read BLOB`, `browse` or `drop`, of REF or of another partition with `N:` before it."""
        self.tell(*words)
        return self.hear()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.cancel()
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def store_at(where: str) -> PartitionStore:
    kind, _, rest = where.partition(":")
    if kind == "sqlite":
        return SqlitePartitionStore(Path(rest), shared=True)
    schema, _, url = rest.partition(":")
    return PostgresPartitionStore(url, schema=schema)


async def answer(store: PartitionStore, words: list[str]) -> str:
    ref = REF
    if words[0].endswith(":"):
        ref = PartitionRef(REF.incarnation, int(words.pop(0).removesuffix(":")))
    verb, *numbers = words[0], *map(int, words[1:])
    if verb == "open":
        return str((await store.open(ref, Fence(2, numbers[0], 1))).txn)
    if verb == "apply":
        return (await store.apply(ref, cycle(numbers[1]), Fence(2, numbers[0], 1))).name
    if verb == "read":
        return str(await store.read(ref, numbers))
    if verb == "browse":
        return str((await store.browse(ref)).txn)
    assert verb == "drop"
    await store.drop(ref)
    return "dropped"


async def main(where: str) -> None:
    store = store_at(where)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            print(await answer(store, line.split()), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
