"""Backend pool: the configured backends, and their replacement at run time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.core.queue.backend_placement import check_backends, interleave, place
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local.backend import OPEN_TIMEOUT, Backend
from sluiceway.local.disk_room import BACKEND, DiskRoom
from sluiceway.local.partition_openings import Openings, record_existing
from sluiceway.local.storage_identity import identify, record_of
from sluiceway.local.stores import directory_of
from sluiceway.model.backends import BackendSettings, BucketBackend, MemoryBackend, PostgresBackend, SqliteBackend, kind_of
from sluiceway.model.queue import PartitionRecord
from sluiceway.ports.meta_store import ConflictError, MetaStore
from sluiceway.ports.partition_store import PartitionRef, PartitionStore

log = logging.getLogger(__name__)

OpenStore = Callable[[str, BackendSettings, Path], PartitionStore]

_NO_PARTITION = PartitionRef("none", 0)


@dataclass(frozen=True)
class BackendInfo:
    """One backend, for operators. Not configured (`kind` None): partitions are recorded on it."""

    name: str
    kind: str | None
    partition_affinity: float
    write_timeout: Millis
    partitions: int
    problem: str | None
    """Why it does not serve, in words."""


@dataclass
class Replacement:
    """New backends, opened and ready; either switched to or discarded. With the switch, commit `puts` and `deletes` to the meta store,
    which has none of the keys of `puts`."""

    settings: Mapping[str, BackendSettings]
    opened: dict[str, PartitionStore] = field(default_factory=dict)
    puts: dict[str, bytes] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()

    async def discard(self) -> None:
        for store in self.opened.values():
            await store.close()


class BackendPool:
    """The backends of one data directory. Used in one event loop: `start` before use, `close` after.

    Raises `invalid_request` for backends that cannot be configured together.
    """

    def __init__(self, data: Path, settings: Mapping[str, BackendSettings], open_store: OpenStore, room: DiskRoom | None = None) -> None:
        check_backends(settings)
        self._data = data
        self._settings = settings
        self._open_store = open_store
        self._room = room
        self._backends: dict[str, Backend] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._openings: Openings | None = None

    @property
    def keeps_nothing(self) -> bool:
        """Whether the backends are in memory and do not outlive the process."""
        return any(isinstance(each, MemoryBackend) for each in self._settings.values())

    async def start(self, meta: MetaStore) -> None:
        """Open the stores. A changed directory is not served, and reported as a problem. Raises as `open_store`, `record_existing` do."""
        await record_existing(meta)
        self._openings = Openings(meta)
        for name, settings in self._settings.items():
            self._backends[name] = await self._open(name, settings, meta)

    async def _open(self, name: str, settings: BackendSettings, meta: MetaStore) -> Backend:
        if isinstance(settings, SqliteBackend):
            problem = await self._recognise(name, settings, meta)
            if problem is not None:
                log.error("backend %s is not served: %s", name, problem)
                return Backend(name, None, 0, problem)
        store = self._open_store(name, settings, self._data)
        self._watch(name, settings)
        # A directory is recognised before opening, which would create a missing one.
        is_recognised = isinstance(settings, SqliteBackend)
        backend = Backend(name, store, settings.write_timeout, openings=self.openings, is_recognised=is_recognised)
        backend.verify_soon()
        return backend

    def _watch(self, name: str, settings: BackendSettings) -> None:
        if self._room is not None and isinstance(settings, SqliteBackend):
            directory = directory_of(name, settings, self._data)
            # A custom store may have no directory.
            if directory.is_dir():
                self._room.watch(BACKEND + name, directory, lambda: self._backends[name].owed if name in self._backends else 0)

    def note_room(self) -> None:
        """Tell each backend whether its disk is low."""
        for name, backend in self._backends.items():
            backend.is_low = self._room is not None and self._room.is_low(name)

    async def _recognise(self, name: str, settings: SqliteBackend, meta: MetaStore) -> str | None:
        """Why its directory must not be served, in words; None if it may be."""
        while True:
            problem, record = await identify(name, directory_of(name, settings, self._data), meta)
            if not record:
                return problem
            # Of instances starting concurrently one records it, and the others retry.
            with contextlib.suppress(ConflictError):
                await meta.commit(dict.fromkeys(record), puts=record)

    @property
    def openings(self) -> Openings:
        """The records of the partitions' storage."""
        assert self._openings is not None, "the pool is started first"
        return self._openings

    def get(self, name: str) -> Backend:
        """The backend of that name; if none is configured, one that does not serve."""
        return self._backends.setdefault(name, Backend(name, None, 0, openings=self._openings))

    def place(self, requested: int) -> tuple[PartitionRecord, ...]:
        """The partitions of a new queue, divided by the affinities."""
        counts = place(requested, self.affinities())
        return tuple(PartitionRecord(number, backend) for number, backend in enumerate(interleave(counts)))

    def affinities(self) -> dict[str, float]:
        """The affinity of each configured backend."""
        return {name: settings.partition_affinity for name, settings in self._settings.items()}

    def problems(self) -> list[str]:
        """Backends that hold partitions and do not serve them, in words."""
        return [backend.problem for backend in self._backends.values() if backend.problem is not None]

    def infos(self) -> list[BackendInfo]:
        """The configured backends, and unconfigured ones that hold partitions, by name."""
        found = []
        for name, backend in sorted(self._backends.items()):
            settings = self._settings.get(name)
            if settings is not None:
                kind, affinity = kind_of(settings), settings.partition_affinity
                found.append(BackendInfo(name, kind, affinity, settings.write_timeout, backend.partitions, backend.why_down))
            elif backend.partitions:
                found.append(BackendInfo(name, None, 0, 0, backend.partitions, backend.why_down))
        return found

    # ---- replacement ------------------------------------------------------------------------------------------

    async def prepare(self, settings: Mapping[str, BackendSettings], meta: MetaStore) -> Replacement:
        """Open the backends that `settings` adds, and check that they answer. Running ones are not touched.

        Raises `invalid_request` for unusable settings, `unavailable` for a store that does not answer.
        """
        check_backends(settings)
        removed = [name for name in self._settings if name not in settings]
        replacement = Replacement(settings, deletes=tuple(map(record_of, removed)))
        try:
            for name, wanted in settings.items():
                if name not in self._settings:
                    await self._prepare_new(name, wanted, replacement, meta)
                elif isinstance(wanted, PostgresBackend | BucketBackend) and wanted.write_timeout != self._settings[name].write_timeout:
                    # Its store has the old time-outs, so it gets a new one. Two may use one schema, or one bucket, at once.
                    replacement.opened[name] = self._open_store(name, wanted, self._data)
        except BaseException:
            await replacement.discard()
            raise
        return replacement

    async def _prepare_new(self, name: str, wanted: BackendSettings, replacement: Replacement, meta: MetaStore) -> None:
        where = f"backends.{name}"
        try:
            if isinstance(wanted, SqliteBackend):
                problem, record = await identify(name, directory_of(name, wanted, self._data), meta)
                if problem is not None:
                    raise invalid(where, problem)
                replacement.puts |= record
            store = replacement.opened[name] = self._open_store(name, wanted, self._data)
            async with asyncio.timeout(OPEN_TIMEOUT / 1000):
                await store.browse(_NO_PARTITION)
        except SluicewayError:
            raise
        except TimeoutError:
            raise SluicewayError("unavailable", f"{where}: no answer within {OPEN_TIMEOUT} ms", where) from None
        except (OSError, DirectoryInUseError) as error:
            raise invalid(where, f"it cannot be used: {error}") from error
        except Exception as error:
            raise SluicewayError("unavailable", f"{where}: it does not answer: {error}", where) from error

    def switch(self, replacement: Replacement) -> None:
        """Switch to the replacement. Removed backends must hold no partitions."""
        for name in set(self._settings) - set(replacement.settings):
            self._close_later(self._backends.pop(name))
            if self._room is not None:
                self._room.forget(BACKEND + name)
        for name, settings in replacement.settings.items():
            backend = self.get(name)
            store = replacement.opened.get(name)
            if store is not None:
                self._close_later(backend.serve(store, is_recognised=isinstance(settings, SqliteBackend)))
            backend.write_timeout = settings.write_timeout
            if name not in self._settings:
                self._watch(name, settings)
        self._settings = replacement.settings

    def _close_later(self, closed: Backend | PartitionStore | None) -> None:
        """Close it once its work in flight has ended."""
        if closed is not None:
            task = asyncio.create_task(closed.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Finish work in flight, and release everything. Then raises the error of one that could not."""
        closings = [*(asyncio.create_task(backend.close()) for backend in self._backends.values()), *self._closing]
        if closings:
            await asyncio.wait(closings)
            await asyncio.gather(*closings)
