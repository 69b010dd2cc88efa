"""A process with members of captures of a scripted stream: `task_process.py POINT CONFIG…`, each CONFIG a JSON object.

At the POINT of batch 5 of partition p0 it stands still (SIGSTOP), once; `never`: not. It says what became of that batch afterwards, a JSON
text a line. At SIGTERM it leaves in order.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa

from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.capture import CaptureConfig, run_member
from sluiceway.capture.capture_sink import QueueSink
from sluiceway.capture.config import STREAMS
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.client import AsyncClient
from sluiceway.model.task_records import PositionRecord
from sluiceway.ports.position_store import Opening

TOKEN, BATCH = "p0", 5
KIND = "scripted"


def know_the_stream() -> None:
    """The scripted stream is one kind, and chunks are small."""
    STREAMS[KIND] = "tasks_rig"
    defaults = QueueSink.__init__.__kwdefaults__
    assert defaults is not None
    defaults["chunk_items"] = 2


class Point:
    def __init__(self, name: str) -> None:
        self.name = name
        self.passed = False
        self.store: SqliteMetaStore | None = None

    async def __call__(self, name: str) -> None:
        if name == self.name and not self.passed:
            self.passed = True
            assert self.store is not None
            # In the store's own thread, since who stands still in the middle of a transaction keeps all others out of the file. And by a
            # signal to that thread: of one to the process any thread may take note, and this one begin the next transaction meanwhile.
            await self.store._run(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP))

    async def telling(self, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """What becomes of that, if it is after the process stood still."""
        try:
            done = await work()
        except Exception as error:
            self.tell(what, type(error).__name__)
            raise
        self.tell(what, "done")
        return done

    def tell(self, *words: str) -> None:
        if self.passed:
            print(json.dumps(words), flush=True)


def stand_still_at(point: Point) -> None:
    init, commit, write, produce = MetaPositions.__init__, MetaPositions.commit, QueueSink.write, AsyncClient.produce_arrow

    def beginning(self: MetaPositions, store: SqliteMetaStore, name: str) -> None:
        point.store = store
        init(self, store, name)

    async def committing(self: MetaPositions, opening: Opening, kept: PositionRecord) -> None:
        if (opening.token, kept.batch, kept.plan is None) == (TOKEN, BATCH, False):
            await point("plan")
        await point.telling(f"commit {opening.token}", lambda: commit(self, opening, kept))

    async def writing(self: QueueSink, partition: str, batch: int, records: pa.RecordBatch) -> Any:
        if (partition, batch) == (TOKEN, BATCH):
            await point("write")
        return await point.telling(f"write {partition}", lambda: write(self, partition, batch, records))

    async def producing(self: AsyncClient, *given: Any, **fields: Any) -> Any:
        produced = await produce(self, *given, **fields)
        if (fields["idempotency_group"].rpartition("/")[2], fields["idempotency_key"]) == (TOKEN, f"{BATCH}/0"):
            await point("chunk")
        return produced

    for owner, name, stand_in in (
        (MetaPositions, "__init__", beginning),
        (MetaPositions, "commit", committing),
        (QueueSink, "write", writing),
        (AsyncClient, "produce_arrow", producing),
    ):
        setattr(owner, name, stand_in)


async def main(configs: list[dict[str, Any]]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await asyncio.gather(*(run_member(CaptureConfig(**config), stop=stop) for config in configs))


if __name__ == "__main__":
    know_the_stream()
    stand_still_at(Point(sys.argv[1]))
    asyncio.run(main([json.loads(text) for text in sys.argv[2:]]))
