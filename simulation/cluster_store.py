"""The partitions of a simulated cluster: one store that all instances share, each over a way of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from simulation.item_history import Turn
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
"""How long a store is waited for; the backend of an instance gives up before."""


@dataclass
class Kept:
    """One partition as it is stored."""

    store: Store
    backend: str = "default"
    users: dict[tuple[int, int], str] = field(default_factory=dict)
    """Which instance has used a token, (era, grant): no other one may."""


class Vault:
    """What is really stored. `new_store` makes the store of a partition, which checks each step of each item; `dropped` hears what goes."""

    def __init__(self, new_store: Callable[[PartitionRef], Store], dropped: Callable[[PartitionRef], None] = lambda _: None) -> None:
        self.partitions: dict[PartitionRef, Kept] = {}
        self.identities: dict[str, str] = {}
        self.away: set[PartitionRef] = set()
        """Partitions whose storage is not what it was, for a while."""
        self.commits = 0
        self.shut_out = 0
        """Commits that a fence refused."""
        self.straggles: Callable[[], bool] = lambda: False
        """Whether a commit that is sent arrives only when its partition has been opened again."""
        self._stragglers: dict[PartitionRef, asyncio.Event] = {}
        self._new_store = new_store
        self._dropped = dropped
        self._turns: dict[int, tuple[Changes, Turn]] = {}

    @contextmanager
    def noting_turns(self) -> Iterator[None]:
        """For the length of a block it is noted at what time, and under which settings, each change set was decided."""
        original = vars(QueueDriver)["_carry_out"]

        def carry_out(driver: QueueDriver, effect: Effect) -> None:
            if isinstance(effect, Commit):
                self._turns[id(effect.changes)] = effect.changes, Turn(system.now(), driver.record)
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
            # An empty storage lies where it was. What was never acknowledged in may be made anew there.
            check(least is not None, f"{owner} makes {name} anew, which has acknowledged turn {kept.store.txn}")
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
        """It has something, which cannot be found where it was."""
        return ref in self.away and self.partitions[ref].store.txn > 0

    @staticmethod
    def is_shut_out(store: Store, fence: Fence) -> bool:
        """Somebody has opened it with a higher fence."""
        return store.fence > fence

    @staticmethod
    def may_write(store: Store, fence: Fence) -> bool:
        """The fence is that of the last opening."""
        return store.fence == fence

    async def apply_late(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        """Between the next opening and whatever is then written: nothing but the fence keeps it out."""
        await self._stragglers.setdefault(ref, asyncio.Event()).wait()
        return await self.apply(ref, changes, fence)

    async def apply(self, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        kept = self.partitions.get(ref)
        _, turn = self._turns.pop(id(changes), (changes, None))
        if kept is None or self.is_away(ref) or not self.may_write(kept.store, fence) or changes.txn > kept.store.txn + 1:
            self.shut_out += 1
            return Outcome.REFUSED
        if changes.txn == kept.store.txn + 1:
            kept.store.apply(changes, kept.store.fence, turn)
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
    """An instance's PartitionStore."""

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
        """There is nothing to release."""

    async def close(self) -> None:
        """There is nothing to release."""


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("the store has not answered")
