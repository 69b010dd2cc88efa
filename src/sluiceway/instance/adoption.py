"""Adoption: brings the data directory of a standalone server into a cluster, while no server uses it.

Partitions in SQLite files are copied into storage that every instance reaches; others stay where they are. Then the records are published
in the cluster's meta store. docs/adr/0052-adopting-a-directory.md says why it may be interrupted anywhere, and repeated.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.lock import DirectoryLock
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.adapters.storage.sqlite import identity_of
from sluiceway.cluster.compatibility_level import begin_level
from sluiceway.cluster.ownership import KEYS, PARAMETERS, item_of, items_of, take_grant
from sluiceway.cluster.queue_changes import DROPPING
from sluiceway.cluster.rebalance_records import ENDED
from sluiceway.core.group.group_records import Resource, Token, Writes, decode_record
from sluiceway.core.group.item_placement import begin
from sluiceway.core.queue.backend_placement import interleave, place
from sluiceway.core.queue.queue_history import PREFIX as HISTORY
from sluiceway.core.queue.scaling_policy import wanted
from sluiceway.instance.adoption_mark import Mark, put_mark, read_mark
from sluiceway.instance.api_keys import API_KEY
from sluiceway.instance.bundle_catalog import BUNDLE
from sluiceway.instance.bundle_catalog import INDEX as BUNDLES
from sluiceway.instance.indexed_records import index_of
from sluiceway.instance.schedule_catalog import FIRED, SCHEDULE
from sluiceway.instance.schedule_catalog import INDEX as SCHEDULES
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local import stores
from sluiceway.local.audit_trail import AUDIT, AuditTrail
from sluiceway.local.backend import Backend
from sluiceway.local.backend_pool import OpenStore
from sluiceway.local.partition_copy import copy_partition
from sluiceway.local.partition_openings import AT_ONCE, OPENED, Opening, Openings, key_of, record_existing, refs_of
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.local.storage_identity import record_of, verify
from sluiceway.model.access import Actor
from sluiceway.model.backends import BackendSettings, BucketBackend, PostgresBackend, SqliteBackend
from sluiceway.model.meta import Stamp, View
from sluiceway.model.queue import QueueRecord, decode_queue, encode_queue
from sluiceway.ports.meta_store import ConflictError, MetaStore
from sluiceway.ports.partition_store import Fence, Least, PartitionRef, PartitionStore

CLAIM: Final = "adoption/"
"""Prefix of the claims in the cluster's meta store, by the id of the adoption."""
COPIES_AT_ONCE = 8
"""Partitions copied at the same time: a bucket answers late, and takes many requests at once."""
BATCH_BYTES = 96 << 10
"""Published bytes per commit, which leaves room for the group's resource."""


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of an adoption, in the cluster. Each attempt writes it anew, which makes all commits of earlier attempts conflict."""

    attempt: int = 1
    published: int = 0
    """Records that the cluster has, in the order of `_Adoption._records`."""
    is_done: bool = False


class Adopted(msgspec.Struct, frozen=True):
    """What is in the cluster now. `copied_partitions`, and their bytes of payload, are those of this attempt."""

    queues: int
    partitions: int
    api_keys: int
    copied_partitions: int
    copied_bytes: int
    was_done: bool
    """Whether an earlier attempt had done it all."""


class Copied(NamedTuple):
    """Progress of the copy: finished partitions of how many, and bytes of payload."""

    partitions: int
    of: int
    nbytes: int


async def adopt_directory(
    data: Path,
    open_cluster: Callable[[], MetaStore],
    cluster_url: str,
    backends: Mapping[str, BackendSettings],
    tell: Callable[[Copied], None],
    *,
    open_store: OpenStore = stores.open_store,
) -> Adopted:
    """Bring the queues, items, API keys, audit trail and history of the directory into a cluster, which may be running.

    `cluster_url` names the cluster in messages; `backends` are those of its configuration; `tell` is called as the copy goes on. A repeated
    call completes an interrupted one.

    Raises `invalid_request`, `queue_exists` and `rebalance_open` where it is refused, `unavailable`, DirectoryInUseError,
    StoreUnavailableError, MetaUnknownError, ConflictError, DamagedError and FencedError.
    """
    if not (data / "meta.sqlite").exists():
        raise invalid("data", f"there is no {data / 'meta.sqlite'}: {data} is not the data folder of a server")
    lock = DirectoryLock(data)
    try:
        async with _closing(SqliteMetaStore(data / "meta.sqlite")) as own, _closing(open_cluster()) as cluster, AsyncExitStack() as opened:
            return await _Adoption(data, own, cluster, shown_url(cluster_url), backends, open_store, opened, tell).run()
    finally:
        lock.release()


def shown_url(url: str) -> str:
    """The URL of a meta store without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc else url


@asynccontextmanager
async def _closing(meta: MetaStore) -> AsyncIterator[MetaStore]:
    try:
        yield meta
    finally:
        await meta.close()


class _Adoption:
    """One attempt."""

    def __init__(
        self,
        data: Path,
        own: MetaStore,
        cluster: MetaStore,
        cluster_url: str,
        backends: Mapping[str, BackendSettings],
        open_store: OpenStore,
        opened: AsyncExitStack,
        tell: Callable[[Copied], None],
    ) -> None:
        self._data, self._own, self._cluster, self._url = data, own, cluster, cluster_url
        self._backends, self._open_store, self._opened, self._tell = backends, open_store, opened, tell
        self._audit = AuditTrail(cluster)
        opened.push_async_callback(self._audit.close)
        self._shared: dict[str, PartitionStore] = {}
        """Stores that every instance reaches, by backend."""
        self._mark = Mark(system.new_secret())
        self._claimed: Stamp = 0
        """Stamp of the claim, as this attempt wrote it last."""
        self._token = Token(0, 0)
        self._copied = Copied(0, 0, 0)

    async def run(self) -> Adopted:
        await self._check_levels()
        claim = await self._begin()
        queues = [decode_queue(entry.value) for entry in (await self._own.read(prefixes=[QUEUE])).prefix(QUEUE).values()]
        if not (claim.is_done or claim.published):
            await self._prepare(queues)
        if not claim.is_done:
            await self._publish([_placed(queue, self._mark.placement) for queue in queues], claim)
        if self._mark.state != "done":
            await self._put_mark(state="done", at=system.now())
        keys = (await self._own.read(prefixes=[API_KEY])).entries
        return Adopted(len(queues), len(refs_of(queues)), len(keys), self._copied.partitions, self._copied.nbytes, claim.is_done)

    async def _check_levels(self) -> None:
        """Check that the cluster's instances understand the directory's data."""
        own = await begin_level(self._own)
        cluster = await begin_level(self._cluster, own)
        if own > cluster:
            raise invalid(
                "data",
                f"the data in {self._data} are of compatibility level {own}, and the cluster is at {cluster}: run "
                "`sluiceway upgrade finalize` for the cluster first",
            )

    async def _put_mark(self, **changes: object) -> None:
        self._mark = msgspec.structs.replace(self._mark, **changes)
        await put_mark(self._own, self._mark)

    # ---- claim ------------------------------------------------------------------------------------------------

    async def _begin(self) -> Claim:
        """Claim the adoption. From here on nothing of an earlier attempt can land in the cluster's meta store."""
        self._mark = await read_mark(self._own) or self._mark
        self._token = await take_grant(self._own)
        key = CLAIM + self._mark.id
        while True:
            found = (await self._cluster.read([key])).entries.get(key)
            if found is None and self._mark.state != "copying":
                raise invalid("data", f"the queues of {self._data} went to another cluster, with the meta store {self._mark.cluster}")
            before = Claim(0) if found is None else msgspec.json.decode(found.value, type=Claim)
            if before.is_done:
                return before
            claim = msgspec.structs.replace(before, attempt=before.attempt + 1)
            if found is None:
                # Before the claim, which is found by the mark's id.
                await self._put_mark(cluster=self._url)
            try:
                self._claimed = await self._cluster.commit({key: found and found.stamp}, puts={key: msgspec.json.encode(claim)})
            except ConflictError:
                continue
            if not claim.published:
                # Nothing is in the cluster, nor will be: if this attempt is refused, the server may be started again.
                await self._put_mark(state="copying", placement={})
            return claim

    # ---- copy -------------------------------------------------------------------------------------------------

    async def _prepare(self, queues: Sequence[QueueRecord]) -> None:
        """Copy all partitions into the cluster's storage, where nothing refers to them yet, and mark the directory."""
        self._adding(await self._cluster.read([KEYS.resource], [QUEUE]), queues)
        _scheduling(await self._cluster.read([SCHEDULES], [SCHEDULE]), [*(await self._own.read(prefixes=[SCHEDULE])).entries])
        await self._check_idle(queues)
        sources = await self._sources(queues)
        placement = self._placement(queues, sources)
        # A server does so at its start.
        await record_existing(self._own)
        await record_existing(self._cluster)
        opened = (await self._own.read(prefixes=[OPENED])).entries
        records = {key: entry.value for key, entry in opened.items()}
        for ref, least in (await self._copy(queues, sources, placement)).items():
            records[key_of(ref)] = msgspec.json.encode(Opening(least.fence, least.fence, least.txn))
        keys = [key for ref in refs_of(queues) if (key := key_of(ref)) in records]
        for at in range(0, len(keys), AT_ONCE):
            claimed = {CLAIM + self._mark.id: self._claimed}
            await self._cluster.commit(claimed, puts={key: records[key] for key in keys[at : at + AT_ONCE]})
        await self._put_mark(state="publishing", at=system.now(), cluster=self._url, placement=placement)

    async def _check_idle(self, queues: Iterable[QueueRecord]) -> None:
        for queue in queues:
            if queue.rebalance is not None:
                detail = f"queue {queue.queue_name!r} is being rebalanced; start the server, and wait for the end, or cancel the rebalance"
                raise SluicewayError("rebalance_open", detail, "data")
        if (await self._own.read(prefixes=[DROPPING])).entries:
            raise invalid("data", "data of deleted queues or partitions is still to be removed; start the server once, which does that")

    async def _sources(self, queues: Sequence[QueueRecord]) -> dict[str, Backend | None]:
        """By name, the backends that hold the partitions; None: their storage is also the cluster's, and they stay there."""
        names = sorted({each.backend for queue in queues for each in queue.partitions})
        return {name: await self._source(name) for name in names}

    async def _source(self, name: str) -> Backend | None:
        key, settings = record_of(name), self._backends.get(name)
        entry = (await self._own.read([key])).entries.get(key)
        identity = None if entry is None else entry.value.decode()
        # In the directory, unless the server was told another path.
        for local in (SqliteBackend(), settings):
            if isinstance(local, SqliteBackend) and identity is not None:
                directory = stores.directory_of(name, local, self._data)
                if identity_of(directory, None) == identity:
                    store = self._open_store(name, msgspec.structs.replace(local, path=str(directory)), self._data)
                    self._opened.push_async_callback(store.close)
                    return Backend(name, store, local.write_timeout, openings=Openings(self._own), is_recognised=True)
        if isinstance(settings, PostgresBackend | BucketBackend):
            store = await self._reach(name)
            if identity is None or await store.identify(None) == identity:
                return None
        raise invalid(
            f"backends.{name}",
            f"the storage of backend {name!r}, which holds partitions of {self._data}, is neither there nor known to the cluster; "
            "add it to the cluster's configuration as the server had it, with partition_affinity = 0.0 if nothing new is to go there",
        )

    async def _reach(self, name: str) -> PartitionStore:
        """The store of a backend that every instance reaches."""
        if name not in self._shared:
            store = self._open_store(name, self._backends[name], self._data)
            self._opened.push_async_callback(store.close)
            await verify(name, store, Openings(self._cluster), None, first=True)
            self._shared[name] = store
        return self._shared[name]

    def _placement(self, queues: Sequence[QueueRecord], sources: Mapping[str, Backend | None]) -> dict[str, str]:
        """The backend of each partition in the cluster. The copied ones of each queue are divided by the affinities."""
        affinities = {
            name: settings.partition_affinity
            for name, settings in self._backends.items()
            if isinstance(settings, PostgresBackend | BucketBackend)
        }
        placement: dict[str, str] = {}
        for queue in queues:
            copied = [each for each in queue.partitions if sources[each.backend] is not None]
            if copied and not any(affinities.values()):
                why = "needs a backend that every instance reaches: PostgreSQL or a bucket, with a partition_affinity above 0"
                raise invalid("backends", f"{self._data} has partitions in SQLite files, so the cluster's configuration {why}")
            names = iter(interleave(place(len(copied), affinities)) if copied else ())
            for each in queue.partitions:
                placement[item_of(queue.incarnation, each.partition)] = each.backend if sources[each.backend] is None else next(names)
        return placement

    async def _copy(
        self, queues: Sequence[QueueRecord], sources: Mapping[str, Backend | None], placement: Mapping[str, str]
    ) -> dict[PartitionRef, Least]:
        """Copy the partitions that have a source. Returns their state in their new storage."""
        work = [
            (PartitionRef(queue.incarnation, each.partition), source, placement[item_of(queue.incarnation, each.partition)])
            for queue in queues
            for each in queue.partitions
            if (source := sources[each.backend]) is not None
        ]
        targets = {name: await self._reach(name) for name in {name for _, _, name in work}}
        copied: dict[PartitionRef, Least] = {}
        gate = asyncio.Semaphore(COPIES_AT_ONCE)
        self._copied = Copied(0, len(work), 0)

        def note(partitions: int, nbytes: int) -> None:
            self._copied = Copied(self._copied.partitions + partitions, len(work), self._copied.nbytes + nbytes)
            self._tell(self._copied)

        async def copy(ref: PartitionRef, source: Backend, target: PartitionStore) -> None:
            async with gate:
                copied[ref] = await copy_partition(ref, source, target, Fence(*self._token, 1), lambda nbytes: note(0, nbytes))
            note(1, 0)

        try:
            async with asyncio.TaskGroup() as group:
                for ref, source, name in work:
                    group.create_task(copy(ref, source, targets[name]))
        except BaseExceptionGroup as errors:
            # The first failure has ended the others.
            raise errors.exceptions[0] from None
        return copied

    # ---- publication ------------------------------------------------------------------------------------------

    async def _publish(self, queues: Sequence[QueueRecord], claim: Claim) -> None:
        """Commit the records, the queues first, each commit with the progress. The claim keeps earlier attempts out."""
        records, named = await self._records(queues), {QUEUE + queue.queue_name: queue for queue in queues}
        key = CLAIM + self._mark.id
        while not claim.is_done:
            batch = _batch(records[claim.published :])
            count = claim.published + len(batch)
            after = Claim(claim.attempt, count, count == len(records))
            scheduled = [each for each in batch if each.startswith(SCHEDULE)]
            bundled = [each for each in batch if each.startswith(BUNDLE)]
            view = await self._cluster.read([key, KEYS.resource, SCHEDULES, BUNDLES, *scheduled, *bundled], [QUEUE])
            new = [named[each] for each in batch if each in named]
            if view.entries[key].stamp != self._claimed:
                raise SluicewayError("unavailable", f"another process is adopting a copy of {self._data}", "data")
            try:
                writes = self._adding(view, new)
                begun = _scheduling(view, scheduled)
                # Their ids are random.
                indexed = _indexing(view, bundled, BUNDLE, BUNDLES)
            except SluicewayError:
                if not claim.published:
                    await self._put_mark(state="copying")
                raise
            writes.checks |= {key: self._claimed, **begun.checks, **indexed.checks}
            writes.puts |= {**batch, **begun.puts, **indexed.puts}
            writes.put(key, after)
            if not claim.published:
                detail = {"data": str(self._data.absolute()), "queues": len(queues), "partitions": len(refs_of(queues))}
                entry, text = self._audit.entry("cluster.adopt", Actor("command line"), detail=detail)
                writes.puts[entry] = text
            try:
                self._claimed = await self._cluster.commit(writes.checks, puts=writes.puts)
            except ConflictError:
                # Another process changed the queues or the group; look again.
                continue
            claim = after

    async def _records(self, queues: Sequence[QueueRecord]) -> list[tuple[str, bytes]]:
        """What to publish, always in the same order: queues after their dead queues, then all that no queue needs."""
        by_name = {queue.queue_name: queue for queue in queues}

        def depth(queue: QueueRecord) -> int:
            return 0 if queue.dead_queue not in by_name else 1 + depth(by_name[queue.dead_queue])

        found = {QUEUE + queue.queue_name: encode_queue(queue) for queue in sorted(queues, key=depth)}
        # How far schedules have come goes first: whoever reads a schedule reads that, too.
        others = (API_KEY, FIRED, SCHEDULE, BUNDLE, ENDED, HISTORY, AUDIT)
        view = await self._own.read(prefixes=others)
        for prefix in others:
            found |= {key: entry.value for key, entry in view.prefix(prefix).items()}
        return list(found.items())

    def _adding(self, view: View, queues: Sequence[QueueRecord]) -> Writes:
        """Writes that add the queues' partitions to the group, in an era above all of the directory. The group follows with a round.

        Raises `queue_exists`, and `invalid_request` for more partitions than the cluster can divide.
        """
        if not queues:
            return Writes()
        if clash := next((queue.queue_name for queue in queues if QUEUE + queue.queue_name in view.entries), None):
            detail = f"the cluster has a queue {clash!r}, too; delete one of the two (the directory's by starting its server)"
            raise SluicewayError("queue_exists", detail, "queue_name")
        entry = view.entries.get(KEYS.resource)
        group = Resource(items=(), parameters=PARAMETERS) if entry is None else decode_record(entry.value, Resource)
        items = [*group.items, *(item for queue in queues for item in items_of(queue))]
        limits = {queue.incarnation: wanted(queue.logical_queues, 1) for queue in queues if queue.logical_queues is not None}
        _, writes = begin(
            KEYS, entry, items, group.strategy, group.parameters, group.limits | limits, first_era=2, era_above=self._token.era
        )
        writes.checks |= {QUEUE + queue.queue_name: None for queue in queues}
        return writes


def _scheduling(view: View, keys: Sequence[str]) -> Writes:
    """Writes that add the schedules of these keys to the cluster's index. Raises `schedule_exists`."""
    names = [key.removeprefix(SCHEDULE) for key in keys]
    if clash := next((name for name in names if SCHEDULE + name in view.entries), None):
        detail = f"the cluster has a schedule {clash!r}, too; delete one of the two (the directory's by starting its server)"
        raise SluicewayError("schedule_exists", detail, "name")
    return _indexing(view, keys, SCHEDULE, SCHEDULES)


def _indexing(view: View, keys: Sequence[str], prefix: str, name: str) -> Writes:
    """Writes that add the new records of these keys to the index of that name."""
    if not keys:
        return Writes()
    entry, index = view.entries.get(name), index_of(view, name)
    for key in keys:
        index = index.changed(key.removeprefix(prefix), 1)
    writes = Writes(checks={name: entry and entry.stamp, **dict.fromkeys(keys)})
    writes.put(name, index)
    return writes


def _placed(queue: QueueRecord, placement: Mapping[str, str]) -> QueueRecord:
    partitions = tuple(
        msgspec.structs.replace(each, backend=placement[item_of(queue.incarnation, each.partition)]) for each in queue.partitions
    )
    return msgspec.structs.replace(queue, partitions=partitions)


def _batch(records: Iterable[tuple[str, bytes]]) -> dict[str, bytes]:
    """The first of the records, as many as one commit takes."""
    batch: dict[str, bytes] = {}
    left = BATCH_BYTES
    for key, value in itertools.islice(records, AT_ONCE):
        left -= len(key) + len(value)
        if batch and left < 0:
            break
        batch[key] = value
    return batch
