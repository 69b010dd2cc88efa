"""A queue's last day, minute by minute: each instance notes its share in the meta store once a minute, and reads what all have noted."""

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
"""After the end of a minute: by then every instance has noted it, and it is shown."""
_LATE: Final[Millis] = 20
"""After the end of a minute that it is looked at, as a timer may be a little early."""
_QUEUES_AT_ONCE: Final = 50
"""Queues that are looked at, or written, before others get a turn on the event loop."""
_LAST_PATIENCE: Final = 2.0
"""Seconds that the last notes may take: the server is about to stop."""


class Source(Protocol):
    """What is looked at."""

    @property
    def meta(self) -> MetaStore: ...

    def queues(self) -> list[QueueRecord]: ...

    def tally(self, queue_name: str) -> Tally:
        """Of the partitions that are here. Raises `queue_not_found`."""
        ...

    async def look_up(self, queue_name: str) -> QueueRecord: ...


class QueueHistory:
    """Looks once a minute, between `start` and `stop`. What the meta store does not take is offered again a minute later."""

    def __init__(self, source: Source) -> None:
        self._source = source
        # New at each start: who wrote a page never changes it again after a restart.
        self._notes = Notes(system.new_incarnation())
        self._task: asyncio.Task[None] | None = None
        self._trimmed = -1
        self._failing = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Look no more, but for a last time; to be called before the service is stopped."""
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
                log.exception("a minute of the queues' history was not noted")

    # ---- writing ----------------------------------------------------------------------------------------------

    async def sample(self, now: Millis) -> None:
        """Note the last minute that has ended, and remove what is too old."""
        minute = now // MINUTE - 1
        await self._see(minute)
        self._notes.looked(minute)
        if await self._write() and self._trimmed != page_of(now):
            await self._trim(page_of(now))

    async def finish(self, now: Millis) -> None:
        """Note what has happened in the minute that has begun. Nobody here will look at its end."""
        await self._see(now // MINUTE, last=True)
        await self._write()

    async def _see(self, minute: Minute, *, last: bool = False) -> None:
        queues = self._source.queues()
        self._notes.keep(record.incarnation for record in queues)
        for number, record in enumerate(queues, 1):
            # One that is deleted in the meantime has no history.
            with contextlib.suppress(SluicewayError):
                self._notes.note(minute, record.incarnation, self._source.tally(record.queue_name), last=last)
            if number % _QUEUES_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _write(self) -> bool:
        """Whether the meta store has everything now."""
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
                log.warning("the queues' history is noted later: %s", error)
            self._failing = True
            return False
        if self._failing:
            log.info("the queues' history is noted again")
        self._failing = False
        return True

    async def _commit(self, puts: dict[str, bytes], names: Sequence[tuple[int, str]]) -> None:
        await self._source.meta.commit(puts=puts)
        self._notes.written(names)

    async def _trim(self, page: int) -> None:
        """Remove what every instance wrote more than a day before, once in each page. What fails is done in the next one."""
        self._trimmed = page
        try:
            old = sorted((await self._source.meta.read(prefixes=prefixes_before(page - KEPT_PAGES))).entries)
            for start in range(0, len(old), MAX_COMMIT_KEYS):
                await self._source.meta.commit(deletes=old[start : start + MAX_COMMIT_KEYS])
        except (MetaUnknownError, StoreUnavailableError) as error:
            log.warning("old minutes of the queues' history stay for now: %s", error)

    # ---- reading ----------------------------------------------------------------------------------------------

    async def read(self, queue_name: str, minutes: int, now: Millis) -> History:
        """The last so many minutes of a queue that have ended, of all its partitions. Raises `queue_not_found`, `unavailable`."""
        record = await self._source.look_up(queue_name)
        first = (now - SETTLED) // MINUTE - minutes
        try:
            view = await self._source.meta.read(prefixes=prefixes_of(record.incarnation, first, minutes))
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error
        entries = {key: entry.value for key, entry in view.entries.items()}
        return history_of(entries, first, minutes, record.created_at // MINUTE)
