"""How long the partitions of an owner that has died take to be opened, in requests one after the other, and in the latencies of S3.

By the virtual clock: only requests take time. What the cluster does before is not in it, nor the machine's speed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import pytest

from simulation.bucket_objects import Bucket
from simulation.loop import Loop, Process, simulated
from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.storage import bucket as bucket_store
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_journals import entry_name
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.local.backend import Backend
from sluiceway.local.partition_openings import Openings
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.meta_store import View
from sluiceway.ports.object_store import Object, ObjectStore
from sluiceway.ports.partition_store import Changes, Fence, FencedError, PartitionRef, RecordKind, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.storage.test_bucket_faults import FENCE, REF, Seam, at_rest, changes, fails, opened

T = TypeVar("T")

REFS = [PartitionRef("k7f3q2ma", number) for number in range(12)]
MEDIAN, P99 = 0.06, 0.2


class Asked(NamedTuple):
    began: float
    ended: float
    call: str
    name: str


class Slow:
    """ObjectStore of a process, each of whose requests takes as long as `latency` says: half before it takes effect, half after."""

    def __init__(self, bucket: Bucket, latency: Callable[[], float]) -> None:
        self._bucket = bucket
        self._latency = latency
        self.asked: list[Asked] = []

    async def get(self, name: str) -> Object | None:
        return await self._through("get", name, lambda: self._bucket.get(name))

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        found = await self._through("get", name, lambda: self._bucket.get(name))
        return None if found is None else found.data[start : start + length]

    async def create(self, name: str, data: bytes) -> bool:
        return await self._through("create", name, lambda: self._bucket.create(name, data))

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return await self._through("replace", name, lambda: self._bucket.replace(name, data, tag))

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        return await self._through("list", prefix, lambda: self._bucket.list(prefix, after))

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        return await self._through("list", prefix, lambda: self._bucket.sizes(prefix))

    async def delete(self, names: Sequence[str]) -> None:
        await self._through("delete", names[0], lambda: self._bucket.delete(names))

    async def close(self) -> None:
        """No-op: nothing to release."""

    async def _through(self, call: str, name: str, act: Callable[[], T]) -> T:
        loop, half = asyncio.get_running_loop(), self._latency() / 2
        began = loop.time()
        await asyncio.sleep(half)
        answer = act()
        await asyncio.sleep(half)
        self.asked.append(Asked(began, loop.time(), call, name))
        return answer


class SlowMeta(MemoryMetaStore):
    def __init__(self, latency: Callable[[], float]) -> None:
        super().__init__()
        self._latency = latency

    async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        await asyncio.sleep(self._latency())
        return await super().read(keys, prefixes)

    async def commit(self, *args: Any, **kwargs: Any) -> int:
        await asyncio.sleep(self._latency())
        return await super().commit(*args, **kwargs)


def log_normal(random: Random) -> Callable[[], float]:
    sigma = math.log(P99 / MEDIAN) / NormalDist().inv_cdf(0.99)
    return lambda: MEDIAN * math.exp(random.gauss(0, sigma))


class Takeover(NamedTuple):
    """Seconds until all partitions were open, and until each had a first cycle; and the requests until then."""

    opened: float
    cycled: float
    asked: list[Asked]


def taken_over(
    latency: Callable[[], float], meta_latency: Callable[[], float], cycles: int = 5, seed: int = 1, *, expected: bool = True
) -> Takeover:
    """Let an owner of REFS write so many cycles of each and die, and another process, which serves other partitions, take over.

    `expected`: the owner's lease has run out before, so that the other has read ahead.
    """
    bucket, loop = Bucket(), Loop(Random(seed), shuffle=False)
    owner, heir = loop.add(Process("owner")), loop.add(Process("heir"))
    openings = Openings(SlowMeta(meta_latency))

    def backend(objects: ObjectStore) -> Backend:
        return Backend(
            "bucket",
            BucketPartitionStore(HedgedReads(objects), 10_000, 10, lambda: loop.random.getrandbits(64).to_bytes(8, "big")),
            10_000,
            openings=openings,
        )

    async def cycle(of: Backend, ref: PartitionRef, fence: Fence, txn: int) -> None:
        changes = Changes(txn, b"header", puts={(RecordKind.LEASE, str(txn)): bytes(100)})
        assert await of.apply(ref, changes, fence, 10_000) is Outcome.DONE

    async def own() -> None:
        own = backend(Slow(bucket, lambda: 0.001))
        for opening, txns in enumerate((range(1, cycles // 2 + 1), range(cycles // 2 + 1, cycles + 1)), 1):
            # The second opening makes checkpoints, if there are cycles.
            await asyncio.gather(*(own.open(ref, Fence(1, 1, opening)) for ref in REFS))
            for txn in txns:
                await asyncio.gather(*(cycle(own, ref, Fence(1, 1, opening), txn) for ref in REFS))

    async def take_over() -> Takeover:
        objects = Slow(bucket, latency)
        to = backend(objects)
        # It is up and serves another partition.
        busy = PartitionRef("k7f3q2ma", len(REFS))
        await to.open(busy, Fence(1, 1, 1))
        await cycle(to, busy, Fence(1, 1, 1), 1)
        await asyncio.sleep(5)
        for ref in REFS if expected else ():
            to.prepare(ref)
        await asyncio.sleep(1)
        objects.asked.clear()
        began = asyncio.get_running_loop().time()
        opened = []

        async def take(ref: PartitionRef) -> None:
            snapshot = await to.open(ref, Fence(1, 2, 1))
            assert snapshot.txn == cycles
            opened.append(asyncio.get_running_loop().time() - began)
            await cycle(to, ref, Fence(1, 2, 1), cycles + 1)

        await asyncio.gather(*map(take, REFS))
        cycled = asyncio.get_running_loop().time() - began
        return Takeover(max(opened), cycled, [each._replace(began=each.began - began, ended=each.ended - began) for each in objects.asked])

    async def script() -> Takeover:
        await loop.begin(owner, own())
        await asyncio.sleep(1)
        loop.kill(owner)
        return await loop.begin(heir, take_over())

    try:
        with simulated(loop):
            return loop.run_until_complete(script())
    finally:
        loop.close()


def in_turn(takeover: float) -> int:
    """How many requests of a tenth of a second there were one after the other."""
    return round(takeover / 0.1)


@pytest.mark.parametrize("cycles", [0, 1, 40])
def test_an_expected_takeover_is_two_requests_and_the_first_cycle_one_more(cycles: int) -> None:
    found = taken_over(lambda: 0.1, lambda: 0.0, cycles)
    before = [each for each in found.asked if each.ended < 0.21 and "/log/" in each.name]
    assert [each.call for each in before] == ["create"], "the entries are known"
    assert in_turn(found.opened) == 2
    assert in_turn(found.cycled) == 3


@pytest.mark.parametrize("cycles", [0, 1, 40])
def test_one_that_nobody_expected_is_four_and_one_more(cycles: int) -> None:
    found = taken_over(lambda: 0.1, lambda: 0.0, cycles, expected=False)
    assert in_turn(found.opened) == 4
    assert in_turn(found.cycled) == 5


@pytest.mark.parametrize("expected", [True, False])
def test_of_the_meta_store_it_takes_a_commit_before_and_one_after(expected: bool) -> None:
    """And a read before, if it was not expected. A confirmation that comes while another is under way waits for that one."""
    assert in_turn(taken_over(lambda: 0.0, lambda: 0.1, expected=expected).opened) == (3 if expected else 4)


def test_twelve_partitions_have_a_cycle_within_seven_tenths_of_a_second_of_s3_latencies() -> None:
    found = sorted(taken_over(log_normal(Random(seed)), lambda: 0.01, seed=seed).cycled for seed in range(50))
    assert found[24] < 0.4
    assert found[-1] < 0.7


# ---- what was read ahead and has changed since ------------------------------------------------------------------


@pytest.mark.parametrize("later", [0, 1, 20])
@driven
async def test_a_former_owner_that_goes_on_after_it_was_read_ahead_loses_nothing(later: int) -> None:
    """It was only silent, and may write and checkpoint on until the partition is opened."""
    seam = Seam()
    owner, heir = await opened(seam), BucketPartitionStore(seam, 400)
    assert await owner.apply(REF, changes(1), FENCE) is Outcome.DONE
    seam.calls.clear()
    await heir.read_ahead(REF)
    assert {call for call, _ in seam.calls} <= {"get", "list"}, "nothing is written on a suspicion"
    for txn in range(2, 2 + later):
        assert await owner.apply(REF, changes(txn), FENCE) is Outcome.DONE
    await at_rest(owner)
    assert (await heir.open(REF, Fence(1, 2, 1))).txn == 1 + later
    assert await owner.apply(REF, changes(2 + later), FENCE) is Outcome.REFUSED
    assert await heir.apply(REF, changes(2 + later), Fence(1, 2, 1)) is Outcome.DONE
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 3, 1))).txn == 2 + later


@driven
async def test_entries_that_were_deleted_after_they_were_read_ahead_are_not_taken_for_the_present(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the journal is written where entries had been; the head that was read is no longer the present one."""
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 4)
    seam = Seam()
    owner, heir = await opened(seam), BucketPartitionStore(seam, 400)
    for txn in range(1, 3):
        assert await owner.apply(REF, changes(txn), FENCE) is Outcome.DONE
    await heir.read_ahead(REF)
    for txn in range(3, 14):
        assert await owner.apply(REF, changes(txn), FENCE) is Outcome.DONE
        await at_rest(owner)
    assert await seam.get(entry_name(owner._journal.name, 3)) is None
    assert (await heir.open(REF, Fence(1, 2, 1))).txn == 13
    assert await owner.apply(REF, changes(14), FENCE) is Outcome.REFUSED


@driven
async def test_one_that_another_has_opened_since_it_was_read_ahead_is_read_again() -> None:
    seam = Seam()
    owner, other, heir = await opened(seam), BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    assert await owner.apply(REF, changes(1), FENCE) is Outcome.DONE
    await heir.read_ahead(REF)
    assert (await other.open(REF, Fence(1, 2, 1))).txn == 1
    assert await other.apply(REF, changes(2), Fence(1, 2, 1)) is Outcome.DONE
    assert (await heir.open(REF, Fence(1, 3, 1))).txn == 2
    await heir.read_ahead(REF)
    with pytest.raises(FencedError):
        await heir.open(REF, Fence(1, 2, 2))


@driven
async def test_what_cannot_be_read_ahead_is_read_when_the_partition_is_opened() -> None:
    seam = Seam()
    owner, heir = await opened(seam), BucketPartitionStore(seam, 400)
    assert await owner.apply(REF, changes(1), FENCE) is Outcome.DONE
    seam.before = fails(1, "list", "log", StoreUnavailableError("slow down"))
    await heir.read_ahead(REF)
    assert (await heir.open(REF, Fence(1, 2, 1))).txn == 1
