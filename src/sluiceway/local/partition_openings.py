"""Partition openings: meta-store records of the fence under which each partition's storage was last opened, and whether it may be created.

A partition is opened in three steps. `claim` records the fence and returns the minimum state of the storage; the storage is opened with
that; `confirm` records the opening, and only then anything is acknowledged. Of several owners only the last to claim can confirm, so
everything acknowledged is in the storage that confirmed last. docs/adr/0031-storage-proves-itself.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import Entry
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import Fence, FencedError, Least, PartitionRef, StoreUnavailableError

OPENED: Final = "opened/"
RECORDED: Final = "openings"
"""Key that marks that all partitions of queues from earlier versions have records: one without a record is new."""
AT_ONCE = 500
"""Records per commit: half of a commit's limit."""
MAX_TRIES = 50
KEPT_FOR: Millis = 10_000
"""How long a record that was read or written is remembered for its next change."""
PATIENCE: Millis = 10_000
"""Time limit for one step of the meta store."""


class OpeningsError(StoreUnavailableError):
    """The meta store could not be asked, so the state of the partition's storage is unknown."""


class Opening(msgspec.Struct, frozen=True, omit_defaults=True):
    """`claimed`: fence of the last owner that began to open the partition. `opened`: last fence under which it was open; None: never, so it
    may be created. `txn`: minimum cycle it had applied then."""

    claimed: Fence
    opened: Fence | None = None
    txn: int = 0


Change = Callable[[Opening | None], Opening | None]
"""Maps a record to its new value; None: unchanged."""


class _Waiting(NamedTuple):
    """`keeps`: a further change of the record follows soon."""

    change: Change
    future: asyncio.Future[Opening | None]
    keeps: bool


def key_of(ref: PartitionRef) -> str:
    """The meta-store key of that partition's record."""
    return f"{OPENED}{ref.incarnation}/{ref.partition}"


def decode(entry: Entry | None) -> Opening | None:
    return None if entry is None else msgspec.json.decode(entry.value, type=Opening)


class Openings:
    """The records of one meta store. Concurrent steps share a commit.

    Raises OpeningsError, and FencedError where a higher fence has claimed the partition.
    """

    def __init__(self, meta: MetaStore) -> None:
        self._meta = meta
        self._kept: dict[str, Entry] = {}
        """Records as this process has seen them last: the next change of each need not read it, and fails if it is another by then."""
        self._waiting: list[tuple[str, _Waiting]] = []
        self._worker: asyncio.Task[None] | None = None

    async def claim(self, ref: PartitionRef, fence: Fence) -> Least | None:
        """Begin an opening. Returns the minimum state of the storage; None: it may be created, since nothing in it was ever
        acknowledged."""

        def claimed(found: Opening | None) -> Opening:
            if found is None:
                return Opening(fence)
            if found.claimed > fence:
                raise FencedError(f"partition {ref.incarnation}-{ref.partition} was claimed with {found.claimed}, above {fence}")
            return msgspec.structs.replace(found, claimed=fence)

        found = await self._step(ref, claimed, keeps=True)
        return None if found is None or found.opened is None else Least(found.opened, found.txn)

    async def read_ahead(self, ref: PartitionRef) -> None:
        """Read the record, so that `claim` need not."""
        await self._step(ref, lambda _: None, keeps=True)

    async def confirm(self, ref: PartitionRef, fence: Fence) -> None:
        """Confirm, after `claim`, that the storage was opened with `fence`. From now on the storage must exist."""

        def confirmed(found: Opening | None) -> Opening:
            if found is None or found.claimed != fence:
                raise FencedError(f"partition {ref.incarnation}-{ref.partition} was claimed by another owner while it was opened")
            return found if found.opened == fence else Opening(fence, fence)

        await self._step(ref, confirmed)

    async def note(self, ref: PartitionRef, least: Least) -> None:
        """Record the state last seen under that fence, unless another owner has claimed the partition since."""

        def noted(found: Opening | None) -> Opening | None:
            if found is None or found.claimed[:2] != least.fence[:2] or found.opened is None:
                return None
            return Opening(max(found.claimed, least.fence), max(found.opened, least.fence), max(found.txn, least.txn))

        await self._step(ref, noted)

    async def forget(self, refs: Sequence[PartitionRef]) -> None:
        """Delete the records of partitions that are gone for good. Raises MetaUnknownError."""
        for first in range(0, len(refs), AT_ONCE):
            await self._meta.commit(deletes=[key_of(ref) for ref in refs[first : first + AT_ONCE]])

    async def look_up(self, key: str) -> str | None:
        """Read a small text from the meta store; None: absent."""
        with _translated():
            async with asyncio.timeout(PATIENCE / 1000):
                entry = (await self._meta.read([key])).entries.get(key)
        return None if entry is None else entry.value.decode()

    async def record(self, key: str, text: str) -> str:
        """Record a small text unless one exists. Returns the recorded one."""
        with _translated():
            async with asyncio.timeout(PATIENCE / 1000):
                while True:
                    entry = (await self._meta.read([key])).entries.get(key)
                    if entry is not None:
                        return entry.value.decode()
                    with contextlib.suppress(ConflictError):
                        await self._meta.commit({key: None}, puts={key: text.encode()})

    async def _step(self, ref: PartitionRef, change: Change, *, keeps: bool = False) -> Opening | None:
        """Change one record. Returns its previous value."""
        waiting = _Waiting(change, asyncio.get_running_loop().create_future(), keeps)
        self._waiting.append((key_of(ref), waiting))
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        with _translated():
            async with asyncio.timeout(PATIENCE / 1000):
                return await waiting.future

    async def _work(self) -> None:
        try:
            while self._waiting:
                together, rest = dict[str, _Waiting](), list[tuple[str, _Waiting]]()
                for key, waiting in self._waiting:
                    if key in together or len(together) == AT_ONCE:
                        rest.append((key, waiting))
                    elif not waiting.future.done():
                        together[key] = waiting
                self._waiting = rest
                try:
                    await self._write(together)
                except Exception as error:
                    # Every waiting call raises it.
                    _fail(together.values(), error)
        finally:
            self._worker = None

    async def _write(self, together: dict[str, _Waiting]) -> None:
        kept = {key: self._kept.pop(key) for key in list(together) if key in self._kept}
        if kept.keys() == together.keys() and await self._try(together, kept, is_fresh=False):
            return
        for _ in range(MAX_TRIES):
            if await self._try(together, (await self._meta.read(list(together))).entries, is_fresh=True):
                return
        raise StoreUnavailableError(f"another instance interfered {MAX_TRIES} times")

    def _keep(self, entries: Mapping[str, Entry]) -> None:
        self._kept |= entries
        asyncio.get_running_loop().call_later(KEPT_FOR / 1000, self._forget, list(entries))

    def _forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._kept.pop(key, None)

    async def _try(self, together: dict[str, _Waiting], entries: Mapping[str, Entry], *, is_fresh: bool) -> bool:
        """Change the records, if they are these still. Unless they were just read, that must show in a commit of each."""
        puts, found = dict[str, bytes](), dict[str, Opening | None]()
        for key, waiting in list(together.items()):
            found[key] = before = decode(entries.get(key))
            try:
                after = waiting.change(before)
            except FencedError as error:
                if not is_fresh:
                    return False
                _fail([together.pop(key)], error)
                continue
            if after is not None and after != before:
                puts[key] = msgspec.json.encode(after)
        if not is_fresh and puts.keys() != together.keys():
            return False
        self._keep({key: entries[key] for key, each in together.items() if each.keeps and key in entries and key not in puts})
        try:
            if puts:
                stamp = await self._meta.commit({key: entries[key].stamp if key in entries else None for key in puts}, puts=puts)
                self._keep({key: Entry(data, stamp) for key, data in puts.items() if together[key].keeps})
        except ConflictError:
            return False
        for key, waiting in together.items():
            if not waiting.future.done():
                waiting.future.set_result(found[key])
        return True


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise OpeningsError(f"the meta store did not answer within {PATIENCE} ms") from None
    except (StoreUnavailableError, MetaUnknownError) as error:
        raise OpeningsError(f"the meta store did not return the storage record: {error}") from error


def _fail(those: Iterable[_Waiting], error: Exception) -> None:
    for waiting in those:
        if not waiting.future.done():
            waiting.future.set_exception(error)


async def record_existing(meta: MetaStore) -> None:
    """Record all partitions of earlier versions as existing, once per meta store, so that none of them is ever created anew.

    Raises StoreUnavailableError, MetaUnknownError.
    """
    while RECORDED not in (await meta.read([RECORDED])).entries:
        view = await meta.read(prefixes=[QUEUE, OPENED])
        queues = [decode_queue(entry.value) for entry in view.prefix(QUEUE).values()]
        missing = [key for key in map(key_of, refs_of(queues)) if key not in view.entries][:AT_ONCE]
        there = msgspec.json.encode(Opening(_LOWEST, _LOWEST))
        checks = {RECORDED: None, **dict.fromkeys(missing)}
        puts = dict.fromkeys(missing, there) or {RECORDED: b"1"}
        # Of instances starting concurrently one records it, and the others retry.
        with contextlib.suppress(ConflictError):
            await meta.commit(checks, {QUEUE: view.stamp}, puts)


_LOWEST = Fence(0, 0, 0)


def refs_of(queues: Iterable[QueueRecord]) -> list[PartitionRef]:
    return [PartitionRef(queue.incarnation, each.partition) for queue in queues for each in queue.partitions]
