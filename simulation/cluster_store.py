"""Partition storage of a simulated cluster: one vault that all instances share, each over its own link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.item_history import Cycle
from simulation.network_link import Link, NoAnswerError, NotSentError
from simulation.promises import check
from simulation.store import Store
from sluiceway.adapters import system
from sluiceway.core.queue.tickets import Commit, Effect
from sluiceway.kernel.clock import Millis
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import Changes, Fence, FencedError, Least, LostError, PartitionRef, Snapshot, StoreUnavailableError

PATIENCE: Millis = 60_000
"""Storage timeout in milliseconds; an instance's backend gives up earlier."""


@dataclass
class Kept:
    """One stored partition."""

    store: Store
    backend: str = "default"
    users: dict[tuple[int, int], str] = field(default_factory=dict)
    """Instance by token, (era, grant): no other instance may use the token."""


class Vault:
    """The shared storage. `new_store` creates a partition's store, which checks each item's steps; `dropped` is called before data goes."""

    def __init__(self, new_store: Callable[[PartitionRef], Store], dropped: Callable[[PartitionRef], None] = lambda _: None) -> None:
        self.partitions: dict[PartitionRef, Kept] = {}
        self.identities: dict[str, str] = {}
        self.away: set[PartitionRef] = set()
        """Partitions whose storage is replaced by an empty one for a while."""
        self.commits = 0
        self.shut_out = 0
        """Number of commits that a fence, a missing partition or a gap in its transactions kept out."""
        self.straggles: Callable[[], bool] = lambda: False
        """Whether a sent commit arrives only after its partition has been opened again."""
        self._stragglers: dict[PartitionRef, asyncio.Event] = {}
        self._new_store = new_store
        self._dropped = dropped
        self._cycles: dict[int, tuple[Changes, Cycle]] = {}

    @contextmanager
    def noting_cycles(self) -> Iterator[None]:
        """For the length of the block, note the time and the settings under which each change set was decided."""
        original = vars(QueueDriver)["_carry_out"]

        def carry_out(driver: QueueDriver, effect: Effect) -> None:
            if isinstance(effect, Commit):
                circuit = driver.queue.circuit
                blocked = circuit is not None and circuit.state == "open"
                self._cycles[id(effect.changes)] = effect.changes, Cycle(system.now(), driver.record, blocked)
            original(driver, effect)

        setattr(QueueDriver, "_carry_out", carry_out)  # noqa: B010 - a type checker would take it for a mistake
        try:
            yield
        finally:
            setattr(QueueDriver, "_carry_out", original)  # noqa: B010

    async def identify(self, backend: str, new: str | None) -> str | None:
        if new is not None:
            self.identities.setdefault(backend, new)
        return self.identities.get(backend)

    async def open(self, owner: str, ref: PartitionRef, fence: Fence, least: Least | None, backend: str = "default") -> Snapshot:
        kept = self.partitions.get(ref)
        name = f"{ref.incarnation}-{ref.partition}"
        if kept is not None and self.is_away(ref):
            if least is None and self.is_shut_out(kept.store, fence):
                # An opening that was sent before anything was acknowledged, and comes late: it is not confirmed, so nothing will be in it.
                raise FencedError(f"partition {name} was claimed above {fence}")
            # The empty storage takes the place of the old one. Only what was never acknowledged in may be made anew there.
            check(least is not None, f"{owner} makes {name} anew, which has acknowledged cycle {kept.store.txn}")
            raise LostError(name, "is not there")
        LostError.check(name, None if kept is None else Least(Fence(*kept.store.fence), kept.store.txn), least)
        if kept is None:
            kept = self.partitions[ref] = Kept(self._new_store(ref), backend)
        check(kept.backend == backend, f"{owner} looks for {ref} in {backend}, and it lies in {kept.backend}")
        if self.is_shut_out(kept.store, fence):
            raise FencedError(f"partition {ref.incarnation}.{ref.partition} was opened with {kept.store.fence}, above {fence}")
        user = kept.users.setdefault(fence[:2], owner)
        check(user == owner, f"{owner} opens {ref.incarnation}.{ref.partition} under {fence[:2]}, which {user} has used")
        check(kept.store.fence != fence, f"{owner} opens {ref.incarnation}.{ref.partition} twice under {fence}")
        kept.store.open(fence)
        if ref in self._stragglers:
            self._stragglers.pop(ref).set()
        return kept.store.snapshot()

    def is_away(self, ref: PartitionRef) -> bool:
        """Whether the partition has data whose storage is away."""
        return ref in self.away and self.partitions[ref].store.txn > 0

    @staticmethod
    def is_shut_out(store: Store, fence: Fence) -> bool:
        """Whether a higher fence has opened the partition."""
        return store.fence > fence

    @staticmethod
    def may_write(store: Store, fence: Fence) -> bool:
        """Whether the fence is that of the last opening."""
        return store.fence == fence

    async def apply_late(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        """Apply after the next opening and before its first commit: only the fence keeps the changes out."""
        await self._stragglers.setdefault(ref, asyncio.Event()).wait()
        return await self.apply(ref, changes, fence)

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        kept = self.partitions.get(ref)
        _, cycle = self._cycles.pop(id(changes), (changes, None))
        if kept is None or self.is_away(ref) or not self.may_write(kept.store, fence) or changes.txn > kept.store.txn + 1:
            self.shut_out += 1
            return Outcome.REFUSED
        if changes.txn == kept.store.txn + 1:
            kept.store.apply(changes, kept.store.fence, cycle)
            self.commits += 1
        return Outcome.DONE

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        kept = self.partitions.get(ref)
        if kept is not None and self.is_away(ref):
            raise StoreUnavailableError("there is no such partition")
        return {} if kept is None else {number: kept.store.blobs[number] for number in blobs if number in kept.store.blobs}

    async def browse(self, ref: PartitionRef) -> Snapshot:
        kept = self.partitions.get(ref)
        return Snapshot(0, None, {}) if kept is None else kept.store.snapshot()

    async def drop(self, ref: PartitionRef) -> None:
        if ref in self.partitions:
            self._dropped(ref)
            del self.partitions[ref]


class SimPartitionStore:
    """PartitionStore port of one instance."""

    def __init__(self, vault: Vault, owner: str, link: Link, backend: str = "default") -> None:
        self._vault = vault
        self._backend = backend
        self._owner = owner
        self._link = link

    def at_once(self, ref: PartitionRef) -> bool:
        return False

    async def identify(self, new: str | None) -> str | None:
        try:
            return await self._link.call(lambda: self._vault.identify(self._backend, new), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise _unavailable() from error

    async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
        try:
            return await self._link.call(lambda: self._vault.open(self._owner, ref, fence, least, self._backend), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise _unavailable() from error

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        apply = self._vault.apply_late if self._vault.straggles() else self._vault.apply
        try:
            return await self._link.call(lambda: apply(ref, changes, fence), PATIENCE)
        except NotSentError:
            return Outcome.REFUSED
        except NoAnswerError:
            return Outcome.UNKNOWN

    async def read(self, ref: PartitionRef, blobs: Sequence[int]) -> dict[int, bytes]:
        try:
            return await self._link.call(lambda: self._vault.read(ref, blobs), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise _unavailable() from error

    async def browse(self, ref: PartitionRef) -> Snapshot:
        try:
            return await self._link.call(lambda: self._vault.browse(ref), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise _unavailable() from error

    async def drop(self, ref: PartitionRef) -> None:
        try:
            await self._link.call(lambda: self._vault.drop(ref), PATIENCE)
        except (NotSentError, NoAnswerError) as error:
            raise _unavailable() from error

    async def release(self, ref: PartitionRef) -> None:
        """No-op: nothing to release."""

    async def close(self) -> None:
        """No-op: nothing to release."""


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("the store has not answered")
