"""Simulated owners of one partition in a bucket: they open it under rising fences, commit cycles, sleep, are frozen and killed.

What is checked: an acknowledged cycle is in every state that is opened later; a refused one in none; all states are beginnings of one
history; and each blob is what was written.
"""

from __future__ import annotations

import asyncio
from random import Random

from simulation.bucket_objects import Bucket, BucketWeather, SimObjects
from simulation.loop import Loop, Process, simulated
from simulation.promises import check
from simulation.world import EventLog
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.core.bucket import partition_log
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import ObjectStore
from sluiceway.ports.partition_store import (
    Changes,
    DamagedError,
    Fence,
    FencedError,
    Least,
    PartitionRef,
    RecordKind,
    Snapshot,
    StoreUnavailableError,
)

REF = PartitionRef("k7f3q2ma", 0)
TRAFFIC: Millis = 60_000
"""How long faults last, in milliseconds."""


def weather_of(random: Random) -> BucketWeather:
    pick = random.choice
    return BucketWeather(
        lost=pick([0.0, 0.0, 0.05, 0.2]),
        unheard=pick([0.0, 0.0, 0.05, 0.2]),
        late=pick([0.0, 0.05, 0.2]),
        throttled=pick([0.0, 0.0, 0.1]),
        usual=pick([5, 60, 60]),
        longest=pick([20, 200, 800]),
        sleep=pick([0.0, 0.02, 0.1]),
    )


def run_bucket(seed: int, log: EventLog | None = None) -> None:
    """Run one history. Raises BrokenPromiseError."""
    BucketWorld(seed, log).live()


class BucketWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        self.loop = Loop(self.random)
        self.events = log
        self.weather = weather_of(self.random)
        self.patience: Millis = self.random.choice([300, 1_500, 4_000])
        """How long a write of unknown outcome is repeated."""
        self.bucket = Bucket()
        self.fences = 0
        self.history: dict[int, str] = {}
        """The cycle of each number, as far as any state has shown or an answer has said."""
        self.acknowledged: dict[int, str] = {}
        self.refused: set[str] = set()
        self.blobs: dict[str, bytes] = {}
        """Content of each blob that a cycle wrote, by its label."""
        self.least: Least | None = None
        """The acknowledged state of the last opening: no storage may be older."""
        self.opened = self.cycles = 0

    def live(self) -> None:
        entries, partition_log.CHECKPOINT_ENTRIES = partition_log.CHECKPOINT_ENTRIES, self.random.choice([1, 2, 3, 8, 30])
        try:
            with simulated(self.loop):
                self.loop.run_until_complete(self._script())
        finally:
            partition_log.CHECKPOINT_ENTRIES = entries
            self.loop.close()

    async def _script(self) -> None:
        owners = [self._begin(f"i{number}") for number in range(self.random.choice([1, 2, 2, 3, 4]))]
        deadline = self.loop.now + TRAFFIC
        while self.loop.now < deadline:
            await asyncio.sleep(self.random.uniform(0.05, 6))
            alive = [owner for owner in owners if not owner.dead]
            act = self.random.random()
            if not alive or act < 0.2:
                owners.append(self._begin(f"i{len(owners)}"))
            elif act < 0.4:
                victim = self.random.choice(alive)
                self.note(victim.name, "is killed")
                self.loop.kill(victim)
            elif act < 0.8:
                self._freeze(self.random.choice(alive))
        self.note("calm")
        self.weather = BucketWeather()
        for owner in owners:
            if not owner.dead:
                self.loop.kill(owner)
        await asyncio.sleep(10)
        last = self.loop.add(Process("last"))
        await self.loop.begin(last, self._check_end(last))

    async def _check_end(self, process: Process) -> None:
        """In fair weather the partition opens, takes cycles, and has every blob."""
        store = self._store(process)
        fence = self._next_fence()
        snapshot = await store.open(REF, fence)
        self._opened("last", fence, snapshot)
        for _ in range(40):
            snapshot = self._followed(snapshot, await self._cycle("last", store, fence, snapshot))
        await self._read(store, snapshot, every=True)
        await store.close()
        again = self._store(process)
        self._opened("last", fence, await again.open(REF, self._next_fence()))
        await again.close()

    # ---- owners -----------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Process:
        process = self.loop.add(Process(name))
        self.loop.begin(process, self._owned(name, process))
        return process

    async def _owned(self, name: str, process: Process) -> None:
        try:
            await self._own(name, process)
        except Exception as error:
            # It would be lost with a killed process.
            self.loop.fail(error)

    def _freeze(self, process: Process) -> None:
        self.note(process.name, "stands still")
        process.frozen = True

        def thaw() -> None:
            process.frozen = False

        self.loop.after(self.random.choice([200, 2_000, 8_000, 20_000]), thaw)

    def _store(self, process: Process) -> BucketPartitionStore:
        objects: ObjectStore = SimObjects(self.bucket, lambda: self.weather, self.loop, process, self.random)
        if self.random.random() < 0.5:
            objects = HedgedReads(objects)
        return BucketPartitionStore(objects, self.patience, lambda: self.random.getrandbits(64).to_bytes(8, "big"))

    def _next_fence(self) -> Fence:
        self.fences += 1
        return Fence(1, self.fences, 1)

    async def _own(self, name: str, process: Process) -> None:
        """Open the partition again and again, and commit cycles until a commit fails, or for a while."""
        store = self._store(process)
        while True:
            fence = self._next_fence()
            # It may be long until the owner uses what it was granted.
            await asyncio.sleep(self.random.choice([0, 0, 0.1, 2, 10]))
            acknowledged = dict(self.acknowledged)
            try:
                snapshot = await store.open(REF, fence, self.least)
            except (FencedError, StoreUnavailableError) as error:
                self.note(name, fence, "is not opened:", error)
                continue
            except DamagedError as error:
                check(False, f"{name} finds damage: {error}")
                return
            self._opened(name, fence, snapshot, acknowledged)
            for _ in range(self.random.choice([1, 5, 20, 100])):
                outcome = await self._cycle(name, store, fence, snapshot)
                snapshot = self._followed(snapshot, outcome)
                if outcome is None:
                    break
                if self.random.random() < 0.2:
                    await self._read(store, snapshot)
                if self.random.random() < 0.05:
                    await store.release(REF)
                    break
            await asyncio.sleep(self.random.choice([0, 0.5, 3]))

    async def _cycle(self, name: str, store: BucketPartitionStore, fence: Fence, snapshot: Snapshot) -> Changes | None:
        """Commit a cycle. Returns its changes if they are acknowledged."""
        self.cycles += 1
        txn, label = snapshot.txn + 1, f"{name}.{fence.grant}.{self.cycles}"
        changes = Changes(txn, label.encode(), puts={(RecordKind.KEY, f"{txn:06}"): label.encode()})
        live = sorted(key for kind, key in snapshot.records if kind is RecordKind.BLOB)
        if self.random.random() < 0.7:
            changes.blobs[txn] = self._blob(label)
            changes.puts[RecordKind.BLOB, str(txn)] = label.encode()
        if live and self.random.random() < 0.5:
            gone = self.random.choice(live)
            changes.dropped_blobs = {int(gone)}
            changes.deletes = {(RecordKind.BLOB, gone)}
        elif live and self.random.random() < 0.2:
            kept = self.random.choice(live)
            changes.compacted_blobs = {int(kept): self._blob(f"{label} again")}
            changes.puts[RecordKind.BLOB, kept] = f"{label} again".encode()
        outcome = await store.apply(REF, changes, fence)
        self.note(name, fence, txn, label, outcome.value)
        if outcome is Outcome.DONE:
            self._note_history(txn, label)
            self.acknowledged[txn] = label
            check(label not in self.refused, f"{label} is acknowledged after it was refused")
            return changes
        if outcome is Outcome.REFUSED:
            self.refused.add(label)
            check(label not in self.history.values(), f"{label} was refused, and is in the history")
        return None

    def _blob(self, label: str) -> bytes:
        data = self.random.randbytes(self.random.choice([0, 1, 40]))
        self.blobs[label] = data
        return data

    def _followed(self, snapshot: Snapshot, changes: Changes | None) -> Snapshot:
        if changes is None:
            return snapshot
        records = {key: value for key, value in snapshot.records.items() if key not in changes.deletes} | changes.puts
        return Snapshot(changes.txn, changes.header, records)

    async def _read(self, store: BucketPartitionStore, snapshot: Snapshot, *, every: bool = False) -> None:
        wanted = {int(key): label.decode() for (kind, key), label in snapshot.records.items() if kind is RecordKind.BLOB}
        numbers = sorted(wanted) if every else sorted(wanted)[:5]
        try:
            found = await store.read(REF, numbers)
        except (StoreUnavailableError, DamagedError) as error:
            # A former owner's store may not know that it is one: what it misses, the present one has dropped.
            self.note("not read:", error)
            check(not every, f"blobs cannot be read: {error}")
            return
        for number, data in found.items():
            check(data == self.blobs[wanted[number]], f"blob {number} is not that of {wanted[number]}")
        check(not every or found.keys() == wanted.keys(), "blobs are missing")

    # ---- what must hold ---------------------------------------------------------------------------------------

    def _opened(self, name: str, fence: Fence, snapshot: Snapshot, acknowledged: dict[int, str] | None = None) -> None:
        self.opened += 1
        if self.least is None or fence > self.least.fence:
            self.least = Least(fence, snapshot.txn)
        self.note(name, fence, "opens at", snapshot.txn)
        cycles = {int(key): label.decode() for (kind, key), label in snapshot.records.items() if kind is RecordKind.KEY}
        check(sorted(cycles) == list(range(1, snapshot.txn + 1)), f"{name} opens a state with gaps")
        for txn, label in (self.acknowledged if acknowledged is None else acknowledged).items():
            check(cycles.get(txn) == label, f"{name} opens a state without {label}, which was acknowledged as cycle {txn}")
        for txn, label in cycles.items():
            check(label not in self.refused, f"{name} opens a state with {label}, which was refused")
            self._note_history(txn, label)

    def _note_history(self, txn: int, label: str) -> None:
        known = self.history.setdefault(txn, label)
        check(known == label, f"cycle {txn} is {known}, and {label}")

    def note(self, *parts: object) -> None:
        if self.events is not None:
            self.events.add(self.loop.now, parts)
