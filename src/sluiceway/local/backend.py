"""Backend: a configured store behind time limits and a circuit breaker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from sluiceway.adapters import system
from sluiceway.core.queue.breaker import PROBE_INTERVAL, Breaker
from sluiceway.kernel.clock import Millis
from sluiceway.local.partition_openings import Openings, OpeningsError
from sluiceway.local.storage_identity import OtherStorageError, verify
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    FencedError,
    Least,
    LostError,
    PartitionRef,
    PartitionStore,
    Snapshot,
    StoreUnavailableError,
)

log = logging.getLogger(__name__)

OPEN_TIMEOUT: Millis = 30_000
"""For opening a partition, which takes longer the more small records it has: a lower limit would leave large ones unserved for ever."""

DROP_TIMEOUT: Millis = 600_000
"""For removing a partition, which takes minutes if it is very large. A server that hangs shows much earlier, a disk that hangs does not."""

NOT_CONFIGURED = "it is not configured on this instance; add it to the instance's configuration, and reload it"

Retry = Callable[[int], bool]
"""Reopens that partition at once if it is waiting to be. Returns whether it does."""


class BackendDownError(StoreUnavailableError):
    """The store was not asked: the whole backend is known not to answer."""


class Backend:
    """One configured store. Each call ends within its time limit, whatever the store does.

    Once its partitions have failed together, only one at a time asks the store, at most every PROBE_INTERVAL; on the first answer all are
    reopened. Without a `store` it stands for a backend that is not served, and gives the reason.

    With `openings`, the storage must prove its identity, in each partition and, unless `is_recognised`, as a whole, before any answer comes
    from it.
    """

    def __init__(
        self,
        name: str,
        store: PartitionStore | None,
        write_timeout: Millis,
        reason: str = NOT_CONFIGURED,
        openings: Openings | None = None,
        *,
        is_recognised: bool = False,
    ) -> None:
        self.name = name
        self.write_timeout = write_timeout
        self._store = store
        self._breaker = Breaker()
        self._reason = reason
        self._partitions: dict[PartitionRef, Retry] = {}
        """The partitions it holds, next to be probed first."""
        self._openings: dict[PartitionRef, asyncio.Task[Snapshot]] = {}
        self._lost: set[PartitionRef] = set()
        """Partitions that were removed while they were opened, and are to be released when that ends."""
        self._tasks: set[asyncio.Task[None]] = set()
        """What goes on in the background."""
        self._timer: asyncio.TimerHandle | None = None
        self._records = openings
        self._seen: dict[PartitionRef, Least] = {}
        """The acknowledged state of each opened partition."""
        self._identity: str | None = None
        """Identity of its storage; None: not known yet."""
        self._is_recognised = is_recognised
        self._is_verified = False
        self._verifying = asyncio.Lock()
        self._is_other = False
        """Whether it was last found to be a different storage."""
        self.is_low = False
        """Whether its disk has only the reserve left."""

    @property
    def owed(self) -> int:
        """Bytes that its store has written to logs and will write a second time, on the same disk."""
        return int(getattr(self._store, "owed", 0))

    @property
    def problem(self) -> str | None:
        """Why none of its partitions is served, in words; None also if it holds none."""
        return self.why_down if self._partitions else None

    @property
    def partitions(self) -> int:
        """The number of partitions it holds."""
        return len(self._partitions)

    @property
    def why_down(self) -> str | None:
        """Why it does not serve, in words; None if it does."""
        if self._store is None:
            return f"backend {self.name}, which holds {len(self._partitions)} partitions, is not served: {self._reason}"
        if not self._breaker.is_open:
            return None
        return f"backend {self.name} {'is not served' if self._is_other else 'does not answer'}: {self._reason}"

    def serve(self, store: PartitionStore, *, is_recognised: bool = False) -> PartitionStore | None:
        """Switch to this store, and open the waiting partitions. Returns the previous one, possibly in use, for the caller to close."""
        before, self._store = self._store, store
        self._is_recognised, self._is_verified = is_recognised, False
        for ref, retry in list(self._partitions.items()):
            retry(ref.partition)
        return before

    def attach(self, ref: PartitionRef, retry: Retry) -> None:
        """Add a partition."""
        self._partitions[ref] = retry
        self._lost.discard(ref)

    def detach(self, ref: PartitionRef) -> None:
        """Remove a partition; the store's resources for it are released in the background."""
        self._partitions.pop(ref, None)
        self._breaker.forget(ref)
        seen = self._seen.pop(ref, None)
        if self._store is not None:
            if ref in self._openings:
                self._lost.add(ref)
            else:
                self._spawn(self._release(self._store, ref))
            self._spawn(self._note(ref, seen))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _release(self, store: PartitionStore, ref: PartitionRef) -> None:
        if ref in self._partitions:
            # It has come back before this began.
            return
        # A hung store must not hold up a stop.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.write_timeout / 1000):
                await store.release(ref)

    async def _note(self, ref: PartitionRef, seen: Least | None) -> None:
        """Record the partition's acknowledged state, so that an older copy of its storage is detected even if it has the fence."""
        if seen is not None and self._records is not None:
            with contextlib.suppress(OpeningsError):
                await self._records.note(ref, seen)

    def prepare(self, ref: PartitionRef) -> None:
        """Read ahead what opening the partition takes, which another instance has now. In the background; if that fails, it shows when the
        partition is opened."""
        # For stores whose openings consist of several reads.
        read_ahead: Callable[[PartitionRef], Awaitable[None]] | None = getattr(self._store, "read_ahead", None)
        if read_ahead is not None and self._records is not None and not self._breaker.is_open:
            self._spawn(self._prepare(read_ahead(ref), self._records.read_ahead(ref)))

    async def _prepare(self, *reads: Awaitable[None]) -> None:
        with contextlib.suppress(StoreUnavailableError, DamagedError, TimeoutError):
            async with asyncio.timeout(self.write_timeout / 1000):
                await asyncio.gather(*reads)

    async def open(self, ref: PartitionRef, fence: Fence) -> Snapshot:
        """PartitionStore.open, within OPEN_TIMEOUT. Also raises BackendDownError."""
        if self._store is None or not self._breaker.admits(ref, system.now()):
            raise BackendDownError(self.why_down)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT / 1000):
                snapshot = await self._prove(self._store, ref, fence)
            self._seen[ref] = Least(fence, snapshot.txn)
            return snapshot
        except (DamagedError, FencedError, OpeningsError):
            # These are no evidence about the backend, which may not even have been asked.
            self._breaker.forget(ref)
            raise
        except TimeoutError:
            error = StoreUnavailableError(f"no answer within {OPEN_TIMEOUT} ms")
            self._failed(ref, error)
            raise error from None
        except Exception as error:
            self._failed(ref, error)
            raise

    async def _prove(self, store: PartitionStore, ref: PartitionRef, fence: Fence) -> Snapshot:
        """Open the partition, if its storage holds all acknowledged cycles."""
        if self._records is None:
            return await self._open(store, ref, fence, None)
        await self._verify(store, self._records, first=False)
        least = self._seen.get(ref)
        # Under a confirmed grant there is no other owner, and this memory is newer than any record.
        confirmed = least is not None and least.fence[:2] == fence[:2]
        if not confirmed:
            least = await self._records.claim(ref, fence)
        try:
            snapshot = await self._open(store, ref, fence, least)
        except LostError:
            await self._note(ref, self._seen.get(ref))
            self._is_verified = False
            # If the whole storage is a different one, report that instead: it may pass once the server is back on the right one.
            await self._verify(store, self._records, first=False)
            raise
        await self._verify(store, self._records, first=True)
        if not confirmed:
            await self._records.confirm(ref, fence)
        return snapshot

    def verify_soon(self) -> None:
        """Begin to verify the storage, so that the first partition need not wait for it. What is wrong shows when that is opened."""
        if self._store is not None and self._records is not None:
            self._spawn(self._verify_early(self._store, self._records))

    async def _verify_early(self, store: PartitionStore, records: Openings) -> None:
        # A hung store must not hold up a stop.
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(self.write_timeout / 1000):
                await self._verify(store, records, first=False)

    async def _verify(self, store: PartitionStore, records: Openings, *, first: bool) -> None:
        """Verify the storage's identity, once. Raises OtherStorageError, StoreUnavailableError."""
        if self._is_verified or self._is_recognised:
            return
        async with self._verifying:
            if not self._is_verified:
                self._identity = await verify(self.name, store, records, self._identity, first=first)
                self._is_verified = self._identity is not None

    async def _open(self, store: PartitionStore, ref: PartitionRef, fence: Fence, least: Least | None) -> Snapshot:
        """Open the partition. An abandoned opening continues, and the next one waits for it, so that they do not pile up while a store
        hangs."""
        if ref in self._openings:
            await asyncio.wait([self._openings[ref]])
        opening = asyncio.create_task(store.open(ref, fence, least))
        self._openings[ref] = opening
        opening.add_done_callback(lambda done: self._opened(store, ref, done))
        await asyncio.wait([opening])
        return opening.result()

    def _opened(self, store: PartitionStore, ref: PartitionRef, opening: asyncio.Task[Snapshot]) -> None:
        self._openings.pop(ref, None)
        if ref in self._lost:
            self._lost.discard(ref)
            self._spawn(self._release(store, ref))
        if not opening.cancelled() and (opening.exception() is None or isinstance(opening.exception(), DamagedError | FencedError)):
            self._succeeded()

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence, write_timeout: Millis) -> Outcome:
        """PartitionStore.apply. UNKNOWN if it takes longer; REFUSED, without asking the store, while the backend is known not to answer."""
        if self._store is None or self._breaker.is_open:
            return Outcome.REFUSED
        try:
            async with asyncio.timeout(write_timeout / 1000):
                outcome = await self._store.apply(ref, changes, fence)
        except TimeoutError:
            if write_timeout < self.write_timeout:
                # The queue's own shorter time-out is no evidence about the backend.
                return Outcome.UNKNOWN
            outcome, reason = Outcome.UNKNOWN, StoreUnavailableError(f"a commit took longer than {write_timeout} ms")
        except Exception as error:
            self._failed(ref, error)
            raise
        else:
            reason = StoreUnavailableError("a commit had an unknown outcome")
        if outcome is Outcome.DONE:
            if ref in self._seen:
                self._seen[ref] = Least(fence, changes.txn)
            self._succeeded()
        elif outcome is Outcome.UNKNOWN:
            self._failed(ref, reason)
        return outcome

    def at_once(self, ref: PartitionRef) -> bool:
        """PartitionStore.at_once."""
        return self._store is not None and self._store.at_once(ref)

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        """PartitionStore.read, within the backend's write time-out. Also raises BackendDownError."""
        if self._store is None or self._breaker.is_open:
            raise BackendDownError(self.why_down)
        try:
            async with asyncio.timeout(self.write_timeout / 1000):
                return await self._store.read(ref, blobs)
        except TimeoutError:
            # Not counted as a failure: a read reopens no partition, so nothing would notice that the backend answers again.
            raise StoreUnavailableError(f"no answer within {self.write_timeout} ms") from None

    async def browse(self, ref: PartitionRef) -> Snapshot:
        """PartitionStore.browse, within OPEN_TIMEOUT. Also raises BackendDownError."""
        if self._store is None or self._breaker.is_open:
            raise BackendDownError(self.why_down)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT / 1000):
                return await self._store.browse(ref)
        except TimeoutError:
            raise StoreUnavailableError(f"no answer within {OPEN_TIMEOUT} ms") from None

    async def reusable(self, ref: PartitionRef) -> int:
        """Bytes that can be written to that partition without taking disk room, as far as the store knows; 0 if unknown."""
        # For stores that reuse the room of deleted data.
        reusable: Callable[[PartitionRef], Awaitable[int]] | None = getattr(self._store, "reusable", None)
        if reusable is None or self._breaker.is_open:
            return 0
        try:
            async with asyncio.timeout(self.write_timeout / 1000):
                return await reusable(ref)
        except Exception:
            return 0

    async def drop(self, ref: PartitionRef) -> None:
        """PartitionStore.drop, after verifying the storage's identity, within DROP_TIMEOUT. Also raises BackendDownError."""
        if self._store is None or self._breaker.is_open:
            raise BackendDownError(self.why_down)
        try:
            async with asyncio.timeout(DROP_TIMEOUT / 1000):
                if self._records is not None:
                    await self._verify(self._store, self._records, first=False)
                await self._store.drop(ref)
        except TimeoutError:
            raise StoreUnavailableError(f"partition {ref.incarnation}-{ref.partition} was not removed within {DROP_TIMEOUT} ms") from None

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The store ends what is still being opened.
        self._lost.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._store is not None:
            await self._store.close()

    # ---- the breaker ------------------------------------------------------------------------------------------

    def _failed(self, ref: PartitionRef, error: Exception) -> None:
        self._is_verified, self._is_other = False, isinstance(error, OtherStorageError)
        if ref in self._partitions and self._breaker.failed(ref, len(self._partitions)):
            self._reason = str(error) or repr(error)
            log.error("%s", self.why_down)
            self._probe_later()

    def _succeeded(self) -> None:
        if self._breaker.succeeded():
            log.info("backend %s answers again", self.name)
            for ref, retry in self._partitions.items():
                retry(ref.partition)

    def _probe_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROBE_INTERVAL / 1000, self._probe)

    def _probe(self) -> None:
        """Have the next partition probe the store: on their own, partitions wait longer after each failure."""
        if not self._breaker.is_open:
            return
        if self._breaker.wants_probe(system.now()):
            for ref, retry in list(self._partitions.items()):
                self._partitions[ref] = self._partitions.pop(ref)
                if retry(ref.partition):
                    break
            else:
                # Every partition held is open, and the failed ones have moved away: no probe would ever come. Let a commit find out.
                self._breaker.succeeded()
                return
        self._probe_later()
