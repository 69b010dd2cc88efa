"""Simulated owners of partitions in a bucket: they open them under rising fences, commit cycles, sleep, are frozen and killed.

What is checked of each partition: an acknowledged cycle is in every state that is opened later; a refused one in none; all states are
beginnings of one history; and each blob is what was written.
"""

from __future__ import annotations

import asyncio
from random import Random

from simulation.bucket_objects import Bucket, BucketWeather, SimObjects
from simulation.loop import Loop, Process, simulated
from simulation.promises import check
from simulation.world import EventLog
from sluiceway.adapters.storage import bucket
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.hedged_reads import HedgedReads
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

TRAFFIC: Millis = 60_000
"""How long faults last, in milliseconds."""
OPENED_WITHIN: Millis = 5_000
"""In fair weather, also while its former owner goes on writing."""


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


class Line:
    """A partition, and what is known of it."""

    def __init__(self, number: int, rests: float) -> None:
        self.rests = rests
        """How often its owner pauses between two cycles."""
        self.ref = PartitionRef("k7f3q2ma", number)
        self.fences = 0
        self.history: dict[int, str] = {}
        """The cycle of each number, as far as any state has shown or an answer has said."""
        self.acknowledged: dict[int, str] = {}
        self.refused: set[str] = set()
        self.versions: dict[int, list[str]] = {}
        """The labels of each blob, in the order in which they were written."""
        self.least: Least | None = None
        """The acknowledged state of the last opening: no storage may be older."""

    def next_fence(self) -> Fence:
        self.fences += 1
        return Fence(1, self.fences, 1)

    def note(self, txn: int, label: str) -> None:
        known = self.history.setdefault(txn, label)
        check(known == label, f"cycle {txn} is {known}, and {label}")


class BucketWorld:
    """One history, determined by its seed. `live` raises BrokenPromiseError when an invariant is violated."""

    def __init__(self, seed: int, log: EventLog | None = None) -> None:
        self.random = Random(seed)
        self.loop = Loop(self.random)
        self.events = log
        self.weather = weather_of(self.random)
        self.patience: Millis = self.random.choice([300, 1_500, 4_000])
        """How long a write of unknown outcome is repeated."""
        self.window: Millis = self.random.choice([0, 0, 10, 200])
        self.bucket = Bucket()
        self.lines = [Line(number, self.random.choice([0.02, 0.5])) for number in range(self.random.choice([1, 2, 2, 4]))]
        self.blobs: dict[str, bytes] = {}
        """Content of each blob that a cycle wrote, by its label."""
        self.opened = self.cycles = 0

    def live(self) -> None:
        entries, bucket.CHECKPOINT_ENTRIES = bucket.CHECKPOINT_ENTRIES, self.random.choice([1, 2, 3, 8, 30])
        try:
            with simulated(self.loop):
                self.loop.run_until_complete(self._script())
        finally:
            bucket.CHECKPOINT_ENTRIES = entries
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
        busy, last = self.loop.add(Process("busy")), self.loop.add(Process("last"))
        writing = self.loop.begin(busy, self._write_on(self._store(busy)))
        await asyncio.sleep(5)
        await self.loop.begin(last, self._check_end(last))
        await writing

    async def _write_on(self, store: BucketPartitionStore) -> None:
        """Open the partitions, and commit to each without a pause until another owner has it."""

        async def write(line: Line) -> None:
            fence = line.next_fence()
            snapshot = await store.open(line.ref, fence)
            self._opened("busy", line, fence, snapshot)
            outcome = Outcome.DONE
            while outcome is Outcome.DONE:
                outcome, changes = await self._cycle("busy", line, store, fence, snapshot)
                snapshot = self._followed(snapshot, changes)

        await asyncio.gather(*map(write, self.lines))

    async def _check_end(self, process: Process) -> None:
        """In fair weather the partitions open, though their owner is alive, take cycles, and have every blob."""
        store = self._store(process)
        await asyncio.gather(*(self._check_line(line, store) for line in self.lines))
        await store.close()
        again = self._store(process)
        for line in self.lines:
            fence = line.next_fence()
            self._opened("last", line, fence, await again.open(line.ref, fence))
        await again.close()

    async def _open_at_last(self, store: BucketPartitionStore, line: Line, fence: Fence) -> Snapshot:
        """An opening begins again where the head has changed, which checkpoints every few entries bring about all the time."""
        while True:
            try:
                return await store.open(line.ref, fence)
            except StoreUnavailableError:
                check(bucket.CHECKPOINT_ENTRIES <= 8, "a partition is not opened in fair weather")

    async def _check_line(self, line: Line, store: BucketPartitionStore) -> None:
        fence, began = line.next_fence(), self.loop.now
        snapshot = await self._open_at_last(store, line, fence)
        self._opened("last", line, fence, snapshot)
        late = self.loop.now - began if bucket.CHECKPOINT_ENTRIES > 8 else 0
        check(late <= OPENED_WITHIN, f"a partition is opened after {late} ms in fair weather")
        for _ in range(40):
            outcome, changes = await self._cycle("last", line, store, fence, snapshot)
            check(outcome is Outcome.DONE, "a cycle is not carried out in fair weather")
            snapshot = self._followed(snapshot, changes)
        await self._read(line, store, snapshot, every=True)

    # ---- owners -----------------------------------------------------------------------------------------------

    def _begin(self, name: str) -> Process:
        process = self.loop.add(Process(name))
        store = self._store(process)
        for line in self.lines:
            if len(self.lines) < 3 or self.random.random() < 0.6:
                self.loop.begin(process, self._owned(name, line, store))
        return process

    async def _owned(self, name: str, line: Line, store: BucketPartitionStore) -> None:
        try:
            await self._own(name, line, store)
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
        objects: ObjectStore = SimObjects(self._bucket_of(process), lambda: self.weather, self.loop, process, self.random)
        if self.random.random() < 0.5:
            objects = HedgedReads(objects)
        return self._store_over(objects)

    def _bucket_of(self, process: Process) -> Bucket:
        """The bucket as that process has it."""
        return self.bucket

    def _store_over(self, objects: ObjectStore) -> BucketPartitionStore:
        return BucketPartitionStore(objects, self.patience, self.window, self._nonce)

    def _nonce(self) -> bytes:
        return self.random.getrandbits(64).to_bytes(8, "big")

    async def _own(self, name: str, line: Line, store: BucketPartitionStore) -> None:
        """Open the partition again and again, and commit cycles until a commit fails, or for a while."""
        while True:
            fence = line.next_fence()
            if self.random.random() < 0.3:
                # It expects to be granted the partition, and is mostly right.
                await store.read_ahead(line.ref)
            # It may be long until the owner uses what it was granted.
            await asyncio.sleep(self.random.choice([0, 0, 0.1, 2, 10]))
            acknowledged = dict(line.acknowledged)
            try:
                snapshot = await store.open(line.ref, fence, line.least)
            except (FencedError, StoreUnavailableError) as error:
                self.note(name, line.ref.partition, fence, "is not opened:", error)
                continue
            except DamagedError as error:
                check(False, f"{name} finds damage: {error}")
                return
            self._opened(name, line, fence, snapshot, acknowledged)
            for _ in range(self.random.choice([1, 5, 20, 100])):
                outcome, changes = await self._cycle(name, line, store, fence, snapshot)
                if outcome is Outcome.REFUSED and self.random.random() < 0.3:
                    # The port allows the next cycle under the same fence.
                    continue
                if outcome is not Outcome.DONE:
                    break
                snapshot = self._followed(snapshot, changes)
                if self.random.random() < 0.2:
                    await self._read(line, store, snapshot)
                if self.random.random() < 0.05:
                    await store.release(line.ref)
                    if self.random.random() < 0.5:
                        # It goes on, as an owner whose partition had been taken for idle.
                        break
                if self.random.random() < 0.03:
                    await self._browse(name, line, store)
                if self.random.random() < line.rests:
                    # Long enough that the other partitions' cycles make it leave the journal.
                    await asyncio.sleep(self.random.choice([0.5, 1, 5]))
            await asyncio.sleep(self.random.choice([0, 0.5, 3]))

    async def _cycle(self, name: str, line: Line, store: BucketPartitionStore, fence: Fence, snapshot: Snapshot) -> tuple[Outcome, Changes]:
        """Commit a cycle. Sometimes the owner does not wait for the answer."""
        self.cycles += 1
        txn, label = snapshot.txn + 1, f"{name}.{line.ref.partition}.{fence.grant}.{self.cycles}"
        changes = Changes(txn, label.encode(), puts={(RecordKind.KEY, f"{txn:06}"): label.encode()})
        live = sorted(key for kind, key in snapshot.records if kind is RecordKind.BLOB)
        if self.random.random() < 0.7:
            changes.blobs[txn] = self._blob(label)
            line.versions.setdefault(txn, []).append(label)
            changes.puts[RecordKind.BLOB, str(txn)] = label.encode()
        if live and self.random.random() < 0.5:
            gone = self.random.choice(live)
            changes.dropped_blobs = {int(gone)}
            changes.deletes = {(RecordKind.BLOB, gone)}
        elif live and self.random.random() < 0.2:
            kept = self.random.choice(live)
            changes.compacted_blobs = {int(kept): self._blob(f"{label} again")}
            line.versions[int(kept)].append(f"{label} again")
            changes.puts[RecordKind.BLOB, kept] = f"{label} again".encode()
        patience = self.random.choice([0.05, 0.3]) if name != "last" and self.random.random() < 0.03 else None
        try:
            async with asyncio.timeout(patience):
                outcome = await store.apply(line.ref, changes, fence)
        except TimeoutError:
            outcome = Outcome.UNKNOWN
        self.note(name, line.ref.partition, fence, txn, label, outcome.value)
        if outcome is Outcome.DONE:
            line.note(txn, label)
            line.acknowledged[txn] = label
            check(label not in line.refused, f"{label} is acknowledged after it was refused")
        elif outcome is Outcome.REFUSED:
            line.refused.add(label)
            check(label not in line.history.values(), f"{label} was refused, and is in the history")
        return outcome, changes

    def _blob(self, label: str) -> bytes:
        data = self.random.randbytes(self.random.choice([0, 1, 40]))
        self.blobs[label] = data
        return data

    def _followed(self, snapshot: Snapshot, changes: Changes) -> Snapshot:
        records = {key: value for key, value in snapshot.records.items() if key not in changes.deletes} | changes.puts
        return Snapshot(changes.txn, changes.header, records)

    async def _read(self, line: Line, store: BucketPartitionStore, snapshot: Snapshot, *, every: bool = False) -> None:
        wanted = {int(key): label.decode() for (kind, key), label in snapshot.records.items() if kind is RecordKind.BLOB}
        numbers = sorted(wanted) if every else sorted(wanted)[:5]
        try:
            found = await store.read(line.ref, numbers)
        except (StoreUnavailableError, DamagedError) as error:
            # A former owner's store may not know that it is one: what it misses, the present one has dropped. What it reads may be newer.
            self.note("not read:", error)
            check(not every, f"blobs cannot be read: {error}")
            return
        for number, data in found.items():
            versions = line.versions[number]
            later = versions[versions.index(wanted[number]) :]
            check(data in [self.blobs[label] for label in later], f"blob {number} is not that of {wanted[number]}")
        check(not every or found.keys() == wanted.keys(), "blobs are missing")

    # ---- what must hold ---------------------------------------------------------------------------------------

    def _opened(self, name: str, line: Line, fence: Fence, snapshot: Snapshot, acknowledged: dict[int, str] | None = None) -> None:
        self.opened += 1
        if line.least is None or fence > line.least.fence:
            line.least = Least(fence, snapshot.txn)
        self.note(name, line.ref.partition, fence, "opens at", snapshot.txn)
        self._check_state(name, line, snapshot, line.acknowledged if acknowledged is None else acknowledged)

    async def _browse(self, name: str, line: Line, store: BucketPartitionStore) -> None:
        acknowledged = dict(line.acknowledged)
        try:
            snapshot = await store.browse(line.ref)
        except StoreUnavailableError as error:
            self.note(name, line.ref.partition, "is not browsed:", error)
            return
        except DamagedError as error:
            check(False, f"{name} finds damage as it browses: {error}")
            return
        self.note(name, line.ref.partition, "is browsed at", snapshot.txn)
        self._check_state(name, line, snapshot, acknowledged)

    def _check_state(self, name: str, line: Line, snapshot: Snapshot, acknowledged: dict[int, str]) -> None:
        """It has every cycle that was acknowledged before it was asked for, and none that was refused."""
        cycles = {int(key): label.decode() for (kind, key), label in snapshot.records.items() if kind is RecordKind.KEY}
        check(sorted(cycles) == list(range(1, snapshot.txn + 1)), f"{name} opens a state with gaps")
        for txn, label in acknowledged.items():
            check(cycles.get(txn) == label, f"{name} opens a state without {label}, which was acknowledged as cycle {txn}")
        for txn, label in cycles.items():
            check(label not in line.refused, f"{name} opens a state with {label}, which was refused")
            line.note(txn, label)

    def note(self, *parts: object) -> None:
        if self.events is not None:
            self.events.add(self.loop.now, parts)
