"""History recorder: each instance writes its shares' minutes to the meta store once a minute, and reads those of all instances."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final, Protocol

from sluiceway.adapters import system
from sluiceway.core.queue.queue_history import KEPT_PAGES, Notes, history_of, page_of, prefixes_before, prefixes_of
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import QueueRecord
from sluiceway.model.queue_minutes import MINUTE, History, Minute, Tally
from sluiceway.ports.meta_store import MAX_COMMIT_BYTES, MAX_COMMIT_KEYS, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

SETTLED: Final[Millis] = 5_000
"""Delay after the end of a minute until it is shown; by then every instance has recorded it."""
_LATE: Final[Millis] = 20
"""Delay of a look after the end of its minute, since a timer may fire a little early."""
_QUEUES_AT_ONCE: Final = 50
"""Queues examined or written before the event loop gets to serve other tasks."""
_LAST_PATIENCE: Final = 2.0
"""Seconds for the last write, as the server is about to stop."""


class Source(Protocol):
    """The queues and counts that are recorded."""

    @property
    def meta(self) -> MetaStore: ...

    def queues(self) -> list[QueueRecord]: ...

    def tally(self, queue_name: str) -> Tally:
        """Counts of this instance's partitions of the queue. Raises `queue_not_found`."""
        ...

    async def look_up(self, queue_name: str) -> QueueRecord: ...


class QueueHistory:
    """Recorder of the queues' history, once a minute between `start` and `stop`. A failed write is repeated a minute later."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # New at each start, so that a restarted process never changes a page it wrote before.
        self._notes = Notes(system.new_incarnation())
        self._task: asyncio.Task[None] | None = None
        self._trimmed = -1
        self._failing = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Record a last time and stop. Call it before the service is stopped."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        try:
            async with asyncio.timeout(_LAST_PATIENCE):
                await self.finish(system.now())
        except TimeoutError:
            log.warning("the last minute of the queues' history is lost: the meta store did not answer in time")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep((MINUTE + _LATE - system.now() % MINUTE) / 1_000)
            try:
                await self.sample(system.now())
            except Exception:
                log.exception("a minute of the queues' history was not recorded")

    # ---- writing ----------------------------------------------------------------------------------------------

    async def sample(self, now: Millis) -> None:
        """Record the last completed minute, and remove the oldest pages."""
        minute = now // MINUTE - 1
        await self._see(minute)
        self._notes.looked(minute)
        if await self._write() and self._trimmed != page_of(now):
            await self._trim(page_of(now))

    async def finish(self, now: Millis) -> None:
        """Record the current, incomplete minute: this process will not see its end."""
        await self._see(now // MINUTE, last=True)
        await self._write()

    async def _see(self, minute: Minute, *, last: bool = False) -> None:
        queues = self._source.queues()
        self._notes.keep(record.incarnation for record in queues)
        for number, record in enumerate(queues, 1):
            # A queue deleted meanwhile has no history.
            with contextlib.suppress(SluicewayError):
                self._notes.note(minute, record.incarnation, self._source.tally(record.queue_name), last=last)
            if number % _QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _write(self) -> bool:
        """Write the unwritten pages. Returns whether all of them were written."""
        puts: dict[str, bytes] = {}
        names: list[tuple[int, str]] = []
        size = 0
        try:
            for number, (name, key, value) in enumerate(self._notes.unwritten(), 1):
                if number % _QUEUES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if len(puts) == MAX_COMMIT_KEYS or size + len(key) + len(value) > MAX_COMMIT_BYTES:
                    await self._commit(puts, names)
                    puts, names, size = {}, [], 0
                puts[key] = value
                names.append(name)
                size += len(key) + len(value)
            if puts:
                await self._commit(puts, names)
        except (MetaUnknownError, StoreUnavailableError) as error:
            if not self._failing:
                log.warning("the queues' history was not stored, will retry: %s", error)
            self._failing = True
            return False
        if self._failing:
            log.info("the queues' history is stored again")
        self._failing = False
        return True

    async def _commit(self, puts: dict[str, bytes], names: Sequence[tuple[int, str]]) -> None:
        await self._source.meta.commit(puts=puts)
        self._notes.written(names)

    async def _trim(self, page: int) -> None:
        """Remove all instances' pages that are older than a day, once per page. The next page repeats a failed removal."""
        self._trimmed = page
        try:
            old = sorted((await self._source.meta.read(prefixes=prefixes_before(page - KEPT_PAGES))).entries)
            for start in range(0, len(old), MAX_COMMIT_KEYS):
                await self._source.meta.commit(deletes=old[start : start + MAX_COMMIT_KEYS])
        except (MetaUnknownError, StoreUnavailableError) as error:
            log.warning("old minutes of the queues' history were not removed, will retry: %s", error)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def read(self, queue_name: str, minutes: int, now: Millis) -> History:
        """Return the queue's last `minutes` completed minutes, over all partitions. Raises `queue_not_found`, `unavailable`."""
        record = await self._source.look_up(queue_name)
        first = (now - SETTLED) // MINUTE - minutes
        try:
            view = await self._source.meta.read(prefixes=prefixes_of(record.incarnation, first, minutes))
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        entries = {key: entry.value for key, entry in view.entries.items()}
        return history_of(entries, first, minutes, record.created_at // MINUTE)
