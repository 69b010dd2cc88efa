"""Partitions in a bucket when requests fail: each outcome is what the port promises."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, NamedTuple

import obstore.store
import pytest
from msgspec.structs import replace

from simulation.loop import Loop, simulated
from sluiceway.adapters.storage import bucket as bucket_store
from sluiceway.adapters.storage import bucket_objects
from sluiceway.adapters.storage.bucket import BucketPartitionStore
from sluiceway.adapters.storage.bucket_journals import entry_name
from sluiceway.adapters.storage.bucket_objects import BucketObjects, in_azure, in_gcs, in_s3
from sluiceway.core.bucket.journal_entry import ending_entry
from sluiceway.core.bucket.partition_head import Head, Range
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.object_store import Object, UnknownWriteError
from sluiceway.ports.partition_store import Changes, DamagedError, Fence, PartitionRef, RecordKind, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.servers.moto_server import MotoServer

REF = PartitionRef("k7f3q2ma", 0)
FENCE = Fence(1, 1, 1)


class Seam(BucketObjects):
    """A bucket in memory. `before` and `after` are called with each request's name and its object's, and may raise or return an answer."""

    def __init__(self) -> None:
        super().__init__(obstore.store.MemoryStore())
        self.before: Callable[[str, str], Any] = lambda call, name: None
        self.after: Callable[[str, str, Any], Any] = lambda call, name, answer: answer
        self.calls: list[tuple[str, str]] = []

    async def _through(self, call: str, name: str, carry_out: Any) -> Any:
        self.calls.append((call, name))
        with contextlib.closing(carry_out):
            answer = self.before(call, name)
            return self.after(call, name, await carry_out) if answer is None else answer

    async def get(self, name: str) -> Object | None:
        found: Object | None = await self._through("get", name, super().get(name))
        return found

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        found: bytes | None = await self._through("get", name, super().get_range(name, start, length))
        return found

    async def create(self, name: str, data: bytes) -> bool:
        return bool(await self._through("create", name, super().create(name, data)))

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        found: str | None = await self._through("replace", name, super().replace(name, data, tag))
        return found

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        found: Sequence[str] = await self._through("list", prefix, super().list(prefix, after))
        return found

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        found: Mapping[str, int] = await self._through("list", prefix, super().sizes(prefix))
        return found

    async def delete(self, names: Sequence[str]) -> None:
        await self._through("delete", names[0], super().delete(names))


def changes(txn: int, blob: bytes | None = None) -> Changes:
    made = Changes(txn, b"header %d" % txn, puts={(RecordKind.EXTENT, str(txn)): b"%d" % txn})
    if blob is not None:
        made.blobs = {txn: blob}
    return made


def fails(times: int, call: str, part: str, error: Exception) -> Callable[[str, str], None]:
    """Raise the error for the first `times` requests of that kind whose object's name has that part."""
    left = [times]

    def act(now: str, name: str) -> None:
        if now == call and part in name and left[0]:
            left[0] -= 1
            raise error

    return act


async def opened(seam: Seam, patience: int = 400) -> BucketPartitionStore:
    store = BucketPartitionStore(seam, patience)
    await store.open(REF, FENCE)
    seam.calls.clear()
    return store


async def at_rest(store: BucketPartitionStore) -> None:
    """Wait for the checkpoint that a cycle may have begun."""
    while store._calls:
        await asyncio.wait(store._calls)


async def head_of(seam: Seam, ref: PartitionRef) -> Object:
    found = await seam.get(bucket_store._head_of(ref))
    assert found is not None
    return found


@driven
async def test_a_cycle_is_one_write_and_nothing_else() -> None:
    seam = Seam()
    store = await opened(seam)
    assert await store.apply(REF, changes(1, b"blob"), FENCE) is Outcome.DONE
    assert [call for call, _ in seam.calls] == ["create"]


@driven
async def test_cycles_of_all_partitions_share_a_write() -> None:
    seam = Seam()
    store = BucketPartitionStore(seam, 400, 5)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(100)]
    await asyncio.gather(*(store.open(ref, FENCE) for ref in refs))
    seam.calls.clear()
    assert await asyncio.gather(*(store.apply(ref, changes(1, b"blob"), FENCE) for ref in refs)) == [Outcome.DONE] * 100
    assert [call for call, _ in seam.calls] == ["create"]
    assert await asyncio.gather(*(store.read(ref, [1]) for ref in refs)) == [{1: b"blob"}] * 100


@driven
async def test_an_opening_elsewhere_does_not_disturb_the_other_partitions() -> None:
    seam = Seam()
    store, other = BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(3)]
    for ref in refs:
        await store.open(ref, FENCE)
        assert await store.apply(ref, changes(1), FENCE) is Outcome.DONE
    # Not released before: its journal is ended.
    assert (await other.open(refs[0], Fence(1, 2, 1))).txn == 1
    assert await store.apply(refs[0], changes(2), FENCE) is Outcome.REFUSED
    for ref in refs[1:]:
        for txn in (2, 3):
            assert await store.apply(ref, changes(txn), FENCE) is Outcome.DONE
    assert await other.apply(refs[0], changes(2), Fence(1, 2, 1)) is Outcome.DONE
    assert [(await other.open(ref, Fence(1, 3, 1))).txn for ref in refs] == [2, 3, 3]


@driven
async def test_a_partition_is_opened_though_its_former_owner_is_first_at_each_number() -> None:
    seam, theirs = Seam(), Seam()
    theirs._store = seam._store
    store, other = BucketPartitionStore(seam, 400), BucketPartitionStore(theirs, 400)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(2)]
    for ref in refs:
        await store.open(ref, FENCE)
        assert await store.apply(ref, changes(1), FENCE) is Outcome.DONE
    txns = itertools.count(2)

    def first(carry_out: Callable[[str, bytes], Any]) -> Callable[[str, bytes], Any]:
        async def create(name: str, data: bytes) -> bool:
            if "/log/" in name and next(left, None) is not None:
                assert await store.apply(refs[0], changes(next(txns)), FENCE) is Outcome.DONE
            return bool(await carry_out(name, data))

        return create

    # The entry that is in the way, and two of those that are written ahead of it.
    left = iter(range(3))
    theirs.create = first(theirs.create)  # type: ignore[method-assign, assignment]
    assert (await other.open(refs[1], Fence(1, 2, 1))).txn == 1
    assert await store.apply(refs[1], changes(2), FENCE) is Outcome.REFUSED
    assert await store.apply(refs[0], changes(next(txns)), FENCE) is Outcome.DONE
    assert (await other.open(refs[0], Fence(1, 2, 1))).txn == next(txns) - 1


@driven
async def test_what_a_killed_opener_left_out_before_its_ending_entry_is_no_damage() -> None:
    seam = Seam()
    store = await opened(seam)
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE
    journal = store._journal.name
    name, data = entry_name(journal, 4), ending_entry(4, b"another.", gap=2)[1]
    await seam.create(name, data)
    # Its owner is alive: it goes on, up to that entry.
    assert (await BucketPartitionStore(seam, 400).browse(REF)).txn == 1
    assert await store.apply(REF, changes(2), FENCE) is Outcome.DONE
    other = BucketPartitionStore(seam, 400)
    assert (await other.open(REF, Fence(1, 2, 1))).txn == 2
    assert await store.apply(REF, changes(3), FENCE) is Outcome.REFUSED
    assert await other.apply(REF, changes(3), Fence(1, 2, 1)) is Outcome.DONE


@driven
async def test_more_than_an_opener_may_have_left_out_is_damage() -> None:
    seam = Seam()
    store = await opened(seam)
    for txn in (1, 2, 3):
        assert await store.apply(REF, changes(txn), FENCE) is Outcome.DONE
    journal = store._journal.name
    await seam.create(entry_name(journal, 5), ending_entry(5, b"another.", gap=1)[1])
    await seam.delete([entry_name(journal, 2)])
    with pytest.raises(DamagedError, match="missing"):
        await BucketPartitionStore(seam, 400).open(REF, Fence(1, 2, 1))


@driven
async def test_a_partition_that_was_released_is_opened_without_ending_the_journal() -> None:
    seam = Seam()
    store, other = BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(2)]
    for ref in refs:
        await store.open(ref, FENCE)
        assert await store.apply(ref, changes(1), FENCE) is Outcome.DONE
    await store.release(refs[0])
    await other.open(refs[0], Fence(1, 2, 1))
    await at_rest(other)
    seam.calls.clear()
    assert await store.apply(refs[1], changes(2), FENCE) is Outcome.DONE
    assert [call for call, _ in seam.calls] == ["create"]


@driven
async def test_a_partition_at_rest_leaves_the_journal_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 4)
    seam = Seam()
    store = BucketPartitionStore(seam, 400)
    busy, quiet = PartitionRef("k7f3q2ma", 0), PartitionRef("k7f3q2ma", 1)
    for ref in (busy, quiet):
        await store.open(ref, FENCE)
    assert await store.apply(quiet, changes(1, b"kept"), FENCE) is Outcome.DONE
    for txn in range(1, 30):
        assert await store.apply(busy, changes(txn), FENCE) is Outcome.DONE
        await at_rest(store)
    seam.calls.clear()
    for txn in range(30, 60):
        assert await store.apply(busy, changes(txn), FENCE) is Outcome.DONE
        await at_rest(store)
    # It costs nothing by now, and the entry with its blob is still there.
    assert not [name for _, name in seam.calls if name.startswith("partitions/k7f3q2ma-1/")]
    assert await store.read(quiet, [1]) == {1: b"kept"}
    assert len([name for name in await seam.list("journals/", "") if "/log/" in name]) < 20
    assert await store.apply(quiet, changes(2), FENCE) is Outcome.DONE
    assert (await BucketPartitionStore(seam, 400).open(quiet, Fence(1, 2, 1))).txn == 2


@driven
async def test_a_detachment_that_comes_late_finds_another_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the specification: the owner went on to write where it was attached no longer."""
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 4)
    seam = Seam()
    store = BucketPartitionStore(seam, 400)
    busy, quiet = PartitionRef("k7f3q2ma", 0), PartitionRef("k7f3q2ma", 1)
    for ref in (busy, quiet):
        await store.open(ref, FENCE)
    late: list[tuple[str, bytes, str]] = []
    original = seam.replace

    async def is_slow(name: str, data: bytes, tag: str) -> str | None:
        if name.startswith("partitions/k7f3q2ma-1/"):
            late.append((name, data, tag))
            raise UnknownWriteError("no answer")
        return await original(name, data, tag)

    seam.replace = is_slow  # type: ignore[method-assign]
    for txn in range(1, 10):
        assert await store.apply(busy, changes(txn), FENCE) is Outcome.DONE
        await at_rest(store)
    assert late
    seam.replace = original  # type: ignore[method-assign]
    # No checkpoint may come in between and mend it.
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 1_000)
    for txn in range(1, 4):
        assert await store.apply(quiet, changes(txn), FENCE) is Outcome.DONE
        for request in late:
            await original(*request)
    assert (await BucketPartitionStore(seam, 400).open(quiet, Fence(1, 2, 1))).txn == 3


class Quiet(NamedTuple):
    """A store with a partition at rest, which is detached, beside a busy one that makes the journal go on."""

    seam: Seam
    store: BucketPartitionStore
    ref: PartitionRef
    busy: PartitionRef

    @classmethod
    async def made(cls, monkeypatch: pytest.MonkeyPatch) -> Quiet:
        monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 4)
        seam = Seam()
        found = cls(seam, BucketPartitionStore(seam, 400), PartitionRef("k7f3q2ma", 1), PartitionRef("k7f3q2ma", 0))
        for ref in (found.busy, found.ref):
            await found.store.open(ref, FENCE)
        assert await found.store.apply(found.ref, changes(1), FENCE) is Outcome.DONE
        await found.goes_on(14)
        assert (await found.head()).attached is None
        return found

    async def goes_on(self, cycles: int) -> None:
        txn = self.store._open_ones[self.busy].log.txn
        for number in range(txn + 1, txn + cycles + 1):
            assert await self.store.apply(self.busy, changes(number), FENCE) is Outcome.DONE
            await at_rest(self.store)

    async def head(self) -> Head:
        return bucket_store._decode_head((await head_of(self.seam, self.ref)).data)

    async def entries(self) -> int:
        return len([name for name in await self.seam.list("journals/", "") if "/log/" in name])

    def lose_heads(self) -> tuple[list[tuple[str, bytes, str]], Callable[[], Awaitable[None]]]:
        """Let no request for a head of it arrive from now on. Returns those, and what ends it."""
        late: list[tuple[str, bytes, str]] = []
        original = self.seam.replace

        async def is_slow(name: str, data: bytes, tag: str) -> str | None:
            if name == bucket_store._head_of(self.ref):
                late.append((name, data, tag))
                raise UnknownWriteError("no answer")
            return await original(name, data, tag)

        async def lands() -> None:
            self.seam.replace = original  # type: ignore[method-assign]
            for request in late:
                await original(*request)

        self.seam.replace = is_slow  # type: ignore[method-assign]
        return late, lands


@driven
async def test_entries_are_kept_for_an_attachment_that_may_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = await Quiet.made(monkeypatch)
    late, lands = quiet.lose_heads()
    for _ in range(2):
        assert await quiet.store.apply(quiet.ref, changes(2), FENCE) is Outcome.REFUSED
        await quiet.goes_on(6)
    assert len(late) >= 2
    await lands()
    assert (await BucketPartitionStore(quiet.seam, 400).open(quiet.ref, Fence(1, 2, 1))).txn == 1


@driven
async def test_an_attachment_that_came_late_is_checkpointed_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = await Quiet.made(monkeypatch)
    _, lands = quiet.lose_heads()
    assert await quiet.store.apply(quiet.ref, changes(2), FENCE) is Outcome.REFUSED
    await lands()
    assert await quiet.store.apply(quiet.ref, changes(2), FENCE) is Outcome.DONE
    await quiet.goes_on(40)
    assert (await quiet.head()).tail == []
    assert await quiet.entries() < 20


@driven
async def test_an_attachment_that_was_lost_does_not_hold_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = await Quiet.made(monkeypatch)
    late, lands = quiet.lose_heads()
    assert await quiet.store.apply(quiet.ref, changes(2), FENCE) is Outcome.REFUSED
    late.clear()
    await lands()
    await quiet.goes_on(40)
    assert await quiet.entries() < 20


@driven
async def test_a_cycle_under_the_former_fence_does_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the same process opens the partition again."""
    seam = Seam()
    store = await opened(seam)
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE
    reads, goes_on = asyncio.Event(), asyncio.Event()
    original = seam.get_range

    async def waits(name: str, start: int, length: int) -> bytes | None:
        reads.set()
        await goes_on.wait()
        return await original(name, start, length)

    seam.get_range = waits  # type: ignore[method-assign]
    opening = asyncio.create_task(store.open(REF, Fence(1, 1, 2)))
    await reads.wait()
    applying = asyncio.create_task(store.apply(REF, changes(2), FENCE))
    await asyncio.sleep(0)
    goes_on.set()
    assert (await opening).txn == 1
    assert await applying is Outcome.REFUSED
    assert await store.apply(REF, changes(2), Fence(1, 1, 2)) is Outcome.DONE
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 2, 1))).txn == 2


@driven
async def test_a_checkpoint_that_breaks_off_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 3)
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1, "create", "/checkpoint/", ZeroDivisionError("a bug"))
    for txn in range(1, 10):
        assert await store.apply(REF, changes(txn), FENCE) is Outcome.DONE
        await at_rest(store)
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 1, 2))).txn == 9


@driven
async def test_a_former_store_of_this_process_changes_no_head_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when `write_timeout` has changed: the new store goes on under the same fence, and the former one is still writing a checkpoint."""
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 3)
    seam = Seam()
    former, present = await opened(seam), BucketPartitionStore(seam, 400)
    begun, goes_on = asyncio.Event(), asyncio.Event()
    original = seam.create

    async def is_slow(name: str, data: bytes) -> bool:
        if "/checkpoint/" in name and not begun.is_set():
            begun.set()
            await goes_on.wait()
        return await original(name, data)

    seam.create = is_slow  # type: ignore[method-assign]
    for txn in range(1, 6):
        assert await former.apply(REF, changes(txn), FENCE) is Outcome.DONE
    await begun.wait()
    assert await present.apply(REF, changes(6), FENCE) is Outcome.DONE
    await at_rest(present)
    goes_on.set()
    await at_rest(former)
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 2, 1))).txn == 6


@driven
async def test_a_drop_ends_though_no_answer_comes() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1_000, "replace", "/head", UnknownWriteError("no answer"))
    with pytest.raises(StoreUnavailableError):
        await store.drop(REF)
    seam.before = lambda call, name: None
    await store.drop(REF)
    assert [name for name in await seam.list("partitions/", "") if not name.endswith("/head")] == []


@driven
async def test_a_journal_goes_with_the_last_partition_that_is_opened_or_dropped() -> None:
    seam = Seam()
    first, second = BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(3)]
    for ref in refs:
        await first.open(ref, FENCE)
    for txn in range(1, 20):
        assert await first.apply(refs[0], changes(txn), FENCE) is Outcome.DONE
    assert await first.apply(refs[2], changes(1, b"blob"), FENCE) is Outcome.DONE
    folder = f"journals/{first._journal.name}/log/"
    # The second has no cycle in it, and so needs nothing of it once it is open.
    for ref in refs:
        await second.open(ref, Fence(1, 2, 1))
        await at_rest(second)
    assert len(await seam.list(folder, folder)) > 10
    seam.before = fails(1, "list", "/of/", StoreUnavailableError("slow down"))
    await second.drop(refs[2])
    await at_rest(second)
    assert len(await seam.list(folder, folder)) > 10
    # What failed is tried again with the next collection.
    await second._collect()
    assert len(await seam.list(folder, folder)) == 1


@driven
async def test_a_journal_goes_when_the_last_partition_no_longer_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 2)
    seam = Seam()
    first, second = BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    refs = [PartitionRef("k7f3q2ma", number) for number in range(2)]
    for ref in refs:
        await first.open(ref, FENCE)
        assert await first.apply(ref, changes(1, b"blob"), FENCE) is Outcome.DONE
    folder = f"journals/{first._journal.name}/"
    for ref in refs:
        await second.open(ref, Fence(1, 2, 1))
        await at_rest(second)
    for ref in refs:
        # Both have blobs in it.
        assert len(await seam.list(folder, folder)) > 2
        dropped = changes(2)
        dropped.dropped_blobs = {1}
        assert await second.apply(ref, dropped, Fence(1, 2, 1)) is Outcome.DONE
        for txn in range(3, 8):
            assert await second.apply(ref, changes(txn), Fence(1, 2, 1)) is Outcome.DONE
            await at_rest(second)
    # Its writer may be asleep before it writes there, and a request of its to attach a partition may come late.
    assert [name.rpartition("/")[2] for name in await seam.list(folder, folder)] == ["deleted", f"{3:016x}"]
    late = replace(bucket_store._decode_head((await head_of(seam, refs[0])).data), tail=[Range(first._journal.name, 2)])
    await seam.replace("partitions/k7f3q2ma-0/head", bucket_store._encode(late), (await head_of(seam, refs[0])).tag)
    assert (await BucketPartitionStore(seam, 400).open(refs[0], Fence(1, 3, 1))).txn == 7


@driven
async def test_a_lost_answer_is_found_out() -> None:
    seam = Seam()
    store = await opened(seam)
    lost = fails(1, "create", "/log/", UnknownWriteError("no answer"))

    def after(call: str, name: str, answer: Any) -> Any:
        lost(call, name)
        return answer

    seam.after = after
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE
    assert [call for call, _ in seam.calls] == ["create", "create", "get"]
    assert await store.apply(REF, changes(2), FENCE) is Outcome.DONE
    assert (await store.open(REF, Fence(1, 1, 2))).txn == 2


@driven
async def test_a_lost_request_is_sent_again() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(2, "create", "/log/", UnknownWriteError("no answer"))
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE
    assert (await store.open(REF, Fence(1, 1, 2))).txn == 1


@driven
async def test_a_bucket_that_slows_down_for_a_moment_refuses_nothing() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(2, "create", "/log/", StoreUnavailableError("slow down"))
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE


@driven
async def test_a_bucket_that_takes_nothing_refuses_and_the_next_cycle_may_come() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1_000, "create", "/log/", StoreUnavailableError("access denied"))
    assert await store.apply(REF, changes(1), FENCE) is Outcome.REFUSED
    seam.before = lambda call, name: None
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE


@driven
async def test_without_any_answer_the_outcome_is_unknown_until_the_partition_is_opened_again() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1_000, "create", "/log/", UnknownWriteError("no answer"))
    assert await store.apply(REF, changes(1), FENCE) is Outcome.UNKNOWN
    assert await store.apply(REF, changes(1), FENCE) is Outcome.REFUSED
    with pytest.raises(StoreUnavailableError):
        await store.open(REF, Fence(1, 1, 2))
    seam.before = lambda call, name: None
    assert (await store.open(REF, Fence(1, 1, 3))).txn == 0
    assert await store.apply(REF, changes(1), Fence(1, 1, 3)) is Outcome.DONE


@driven
async def test_what_nobody_expected_is_an_unknown_outcome() -> None:
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1, "create", "/log/", ZeroDivisionError("a bug"))
    assert await store.apply(REF, changes(1), FENCE) is Outcome.UNKNOWN
    assert (await store.open(REF, Fence(1, 1, 2))).txn == 0
    assert await store.apply(REF, changes(1), Fence(1, 1, 2)) is Outcome.DONE


@driven
async def test_what_was_refused_for_another_write_at_the_same_time_is_written_again() -> None:
    seam = Seam()
    store = await opened(seam)
    conflicts = [409, 409]

    def before(call: str, name: str) -> Any:
        if call == "create" and conflicts:
            conflicts.pop()
            # Not None, and false: "there is one".
            return 0
        return None

    seam.before = before
    assert await store.apply(REF, changes(1), FENCE) is Outcome.DONE
    assert (await store.open(REF, Fence(1, 1, 2))).txn == 1


@driven
async def test_a_partition_is_not_attached_without_a_mark() -> None:
    """A store that refuses the mark because of another write at the same time has not created it. The journal could be deleted then."""
    seam = Seam()
    store = BucketPartitionStore(seam, 400)
    # Not None, and false: "there is one".
    seam.before = lambda call, name: 0 if call == "create" and "/of/" in name else None
    with pytest.raises(StoreUnavailableError, match="could not be created"):
        await store.open(REF, FENCE)
    seam.before = lambda call, name: None
    await store.open(REF, FENCE)
    assert len([name for name in await seam.list("journals/", "") if "/of/" in name]) == 1


@driven
async def test_an_answer_that_was_cut_off_is_read_again() -> None:
    seam = Seam()
    store = await opened(seam)
    await store.apply(REF, changes(1, b"x" * 1_000), FENCE)
    cut = [True]

    def after(call: str, name: str, answer: Any) -> Any:
        if call == "get" and "/log/" in name and cut:
            cut.pop()
            return answer[:-1]
        return answer

    seam.after = after
    assert await store.read(REF, [1]) == {1: b"x" * 1_000}
    cut.append(True)
    assert (await store.open(REF, Fence(1, 1, 2))).txn == 1
    assert not cut


@driven
async def test_an_answer_that_was_cut_off_once_is_no_damage_though_the_head_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 4)
    seam = Seam()
    store = await opened(seam)

    async def write(cycles: int) -> None:
        for _ in range(cycles):
            assert await store.apply(REF, changes(store._open_ones[REF].log.txn + 1), FENCE) is Outcome.DONE
            await at_rest(store)

    await write(8)
    original, reads = seam.get, 0

    async def get(name: str) -> Object | None:
        nonlocal reads
        found = await original(name)
        if "/checkpoint/" not in name:
            return found
        reads += 1
        if reads <= 2:
            await write(8)
        return found._replace(data=found.data[:-1]) if found is not None and reads == 3 else found

    seam.get = get  # type: ignore[method-assign]
    # As of some moment of the call: of what is written meanwhile, it may have seen a part.
    assert 8 < (await BucketPartitionStore(seam, 400).browse(REF)).txn <= 24
    assert reads == 4


@driven
async def test_damage_is_told_from_absence() -> None:
    seam = Seam()
    store = await opened(seam)
    await store.apply(REF, changes(1, b"x" * 1_000), FENCE)
    seam.after = lambda call, name, answer: bytes([answer[0] ^ 1]) + answer[1:] if call == "get" and "/log/" in name else answer
    with pytest.raises(DamagedError, match="blob 1 failed its checksum"):
        await store.read(REF, [1])
    with pytest.raises(DamagedError, match="not a journal entry"):
        await BucketPartitionStore(seam, 400).open(REF, Fence(1, 1, 2))
    seam.after = lambda call, name, answer: None if call == "get" and "/log/" in name else answer
    with pytest.raises(DamagedError, match="blob 1 is missing"):
        await store.read(REF, [1])
    with pytest.raises(DamagedError, match=r"entries of journal .* are missing"):
        await store.open(REF, Fence(1, 1, 3))


@driven
async def test_a_head_that_is_no_utf_8_is_damage() -> None:
    seam = Seam()
    await (await opened(seam)).close()
    head = await seam.get(bucket_store._head_of(REF))
    assert head is not None
    life = bucket_store._decode_head(head.data).life.encode()
    damaged = head.data.replace(life, b"\xff" + life[1:])
    seam.after = lambda call, name, answer: answer._replace(data=damaged) if call == "get" and name.endswith("/head") else answer
    with pytest.raises(DamagedError, match="its head cannot be read"):
        await BucketPartitionStore(seam, 400).open(REF, Fence(1, 1, 2))


@driven
async def test_a_checkpoint_that_fails_is_made_later(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 3)
    seam = Seam()
    store = await opened(seam)
    seam.before = fails(1, "replace", "/head", StoreUnavailableError("slow down"))
    with caplog.at_level(logging.WARNING):
        for txn in range(1, 10):
            assert await store.apply(REF, changes(txn), FENCE) is Outcome.DONE
            await at_rest(store)
    assert "a checkpoint failed" in caplog.text
    await store.close()
    # Not what was collected, but what came after that, and the ending entry.
    names = await seam.list("", "")
    assert len([name for name in names if "/log/" in name]) < 8
    assert len([name for name in names if "/checkpoint/" in name]) == 1
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 1, 2))).txn == 9


@driven
async def test_the_answer_to_a_new_head_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_store, "CHECKPOINT_ENTRIES", 2)
    seam = Seam()
    store = await opened(seam)
    lost = fails(1, "replace", "/head", UnknownWriteError("no answer"))

    def after(call: str, name: str, answer: Any) -> Any:
        lost(call, name)
        return answer

    seam.after = after
    for txn in range(1, 8):
        assert await store.apply(REF, changes(txn), FENCE) is Outcome.DONE
        await at_rest(store)
    await store.close()
    assert (await BucketPartitionStore(seam, 400).open(REF, Fence(1, 1, 2))).txn == 7


@driven
async def test_blobs_of_one_entry_are_read_together() -> None:
    seam = Seam()
    store = await opened(seam)
    many = changes(1)
    many.blobs = {number: b"%d" % number * 100 for number in range(20)}
    await store.apply(REF, many, FENCE)
    seam.calls.clear()
    assert await store.read(REF, range(20)) == many.blobs
    assert len(seam.calls) == 1


class Reading(NamedTuple):
    """A store of 300 blobs that were written one by one, and the reads of them that wait for `goes_on`."""

    seam: Seam
    store: BucketPartitionStore
    goes_on: asyncio.Event
    under_way: list[str]

    @classmethod
    async def made(cls, monkeypatch: pytest.MonkeyPatch) -> Reading:
        monkeypatch.setattr(bucket_store, "READS_AT_ONCE", 30)
        monkeypatch.setattr(bucket_store, "READS_OF_A_CALL", 20)
        seam = Seam()
        found = cls(seam, await opened(seam), asyncio.Event(), [])
        for txn in range(1, 301):
            assert await found.store.apply(REF, changes(txn, b"%d" % txn), FENCE) is Outcome.DONE
        await at_rest(found.store)
        original = seam.get_range

        async def waits(name: str, start: int, length: int) -> bytes | None:
            found.under_way.append(name)
            await found.goes_on.wait()
            return await original(name, start, length)

        seam.get_range = waits  # type: ignore[method-assign]
        return found

    async def begins(self, requests: int) -> None:
        # Time enough for more.
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(self.under_way) == requests


@driven
async def test_blobs_of_many_entries_are_not_all_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of items that were produced one by one."""
    reading = await Reading.made(monkeypatch)
    all_of_them = asyncio.create_task(reading.store.read(REF, range(1, 301)))
    await reading.begins(20)
    a_few = asyncio.create_task(reading.store.read(REF, [1, 2]))
    await reading.begins(22)
    more = asyncio.create_task(reading.store.read(REF, range(1, 301)))
    await reading.begins(30)
    reading.goes_on.set()
    assert await a_few == {1: b"1", 2: b"2"}
    assert await all_of_them == await more == {number: b"%d" % number for number in range(1, 301)}


@driven
async def test_blobs_that_nobody_waits_for_any_more_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = await Reading.made(monkeypatch)
    given_up = asyncio.create_task(reading.store.read(REF, range(1, 301)))
    await reading.begins(20)
    given_up.cancel()
    reading.goes_on.set()
    await asyncio.wait([given_up])
    await at_rest(reading.store)
    assert len(reading.under_way) == 20
    assert await reading.store.read(REF, [1]) == {1: b"1"}


# ---- a bucket that is not fit -----------------------------------------------------------------------------------


class Overwrites(BucketObjects):
    async def create(self, name: str, data: bytes) -> bool:
        await obstore.put_async(self._store, name, data)
        return True


class Replaces(BucketObjects):
    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        put = await obstore.put_async(self._store, name, data)
        return put["e_tag"]


@pytest.mark.parametrize(("kind", "what"), [(Overwrites, "If-None-Match"), (Replaces, "If-Match")])
@driven
async def test_a_bucket_that_ignores_conditions_is_refused(kind: type[BucketObjects], what: str) -> None:
    store = BucketPartitionStore(kind(obstore.store.MemoryStore()), 400)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match=what):
            await store.open(REF, FENCE)
        with pytest.raises(StoreUnavailableError, match=what):
            await store.identify("aaaaaaaa")


@contextmanager
def answering(status: int, body: bytes = b"") -> Iterator[str]:
    """A server that answers every request with that status."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def bucket(endpoint: str) -> BucketObjects:
    return in_s3("tests", "folder", region="eu-central-1", endpoint=endpoint, access_key_id="tests", secret_access_key="tests")


@pytest.mark.parametrize(("status", "error"), [(403, StoreUnavailableError), (500, UnknownWriteError), (503, UnknownWriteError)])
@driven
async def test_what_a_status_says_of_a_write(status: int, error: type[Exception]) -> None:
    with answering(status) as endpoint:
        for write in (bucket(endpoint).create("name", b""), bucket(endpoint).replace("name", b"", "tag")):
            with pytest.raises(error):
                await write
        with pytest.raises(StoreUnavailableError):
            await bucket(endpoint).get("name")


@driven
async def test_a_write_whose_connection_has_died_without_a_word_is_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each journal has one write under way: all partitions of the process wait for it."""
    monkeypatch.setattr(bucket_objects, "ANSWERED_IN", 0.1, raising=False)
    silent, ended = asyncio.Event(), asyncio.Event()

    async def is_dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.set()
        while await reader.read(1 << 16):
            continue
        ended.set()
        writer.close()

    async with await asyncio.start_server(is_dead, "127.0.0.1", 0) as server:
        objects = bucket(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with asyncio.timeout(20):
            for write in (objects.create("name", b"data"), objects.replace("name", b"data", '"tag"\n')):
                with pytest.raises(UnknownWriteError, match="no answer in time"):
                    await write
                assert silent.is_set()
                # Its connection is not used again.
                await ended.wait()
                silent.clear()
                ended.clear()


def test_a_write_without_an_answer_has_more_time_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the virtual clock: a store may need longer for each first write, as while it gets credentials."""
    loop = Loop(Random(1))

    async def is_well(*_: object, **__: object) -> dict[str, str | None]:
        return {"e_tag": "tag", "version": None}

    async def is_dead(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async def times() -> AsyncIterator[float]:
        objects = BucketObjects(obstore.store.MemoryStore())
        for put in [*[is_dead] * 5, is_well, is_dead]:
            monkeypatch.setattr(obstore, "put_async", put)
            began = loop.time()
            with contextlib.suppress(UnknownWriteError):
                await objects.create("name", b"")
            yield loop.time() - began

    async def all_of_them() -> list[float]:
        return [each async for each in times()]

    with simulated(loop):
        took = loop.run_until_complete(all_of_them())
    assert took == pytest.approx([3, 6, 12, 24, 30, 0, 3], abs=0.1)


@driven
async def test_a_condition_that_does_not_hold_is_no_error() -> None:
    with answering(412) as endpoint:
        assert await bucket(endpoint).create("name", b"") is False
        assert await bucket(endpoint).replace("name", b"", "tag") is None


@driven
async def test_a_write_that_met_another_says_nothing_of_the_object() -> None:
    with answering(409, b"<Error><Code>ConditionalRequestConflict</Code></Error>") as endpoint:
        for write in (bucket(endpoint).create("name", b""), bucket(endpoint).replace("name", b"", "tag")):
            with pytest.raises(StoreUnavailableError, match="ConditionalRequestConflict"):
                await write


@driven
async def test_a_store_that_says_409_of_an_object_that_exists_is_understood() -> None:
    """Azure does."""
    with answering(409, b"<Error><Code>BlobAlreadyExists</Code></Error>") as endpoint:
        assert await bucket(endpoint).create("name", b"") is False


@driven
async def test_a_read_that_met_a_write_is_read_again(s3: MotoServer) -> None:
    """versitygw answers it with the new version's tag and the former one's data; replacing that version would undo what it says."""
    objects = BucketObjects(s3.bucket())
    assert await objects.create("met", b"former")
    former = await objects.get("met")
    assert former is not None
    tag = await objects.replace("met", b"new", former.tag)
    assert tag is not None
    original, torn = objects._get, [1]

    async def read(name: str) -> Object | None:
        return Object(b"former", tag) if torn and torn.pop() else await original(name)

    objects._get = read  # type: ignore[method-assign]
    assert await objects.get("met") == Object(b"new", tag)
    torn.append(1)
    torn.append(1)
    # Twice the same: these are tags of another kind.
    assert await objects.get("met") == Object(b"former", tag)
    assert await objects.get("met") == Object(b"new", tag)


@driven
async def test_nobody_there_is_not_a_missing_object() -> None:
    with answering(200) as endpoint:
        pass
    with pytest.raises(StoreUnavailableError):
        await bucket(endpoint).get("name")
    with pytest.raises(UnknownWriteError):
        await bucket(endpoint).create("name", b"")


@driven
async def test_a_missing_bucket_is_not_a_missing_object(s3: MotoServer) -> None:
    absent = in_s3("absent", "folder", region="none", endpoint=s3.endpoint, access_key_id="tests", secret_access_key="tests")
    for call in (absent.get("name"), absent.get_range("name", 0, 1), absent.create("name", b""), absent.list("", "")):
        with pytest.raises(StoreUnavailableError):
            await call
    with pytest.raises(StoreUnavailableError):
        await BucketPartitionStore(absent, 400).open(REF, FENCE)


@driven
async def test_a_late_drop_leaves_the_next_life_alone() -> None:
    seam = Seam()
    store, other = BucketPartitionStore(seam, 400), BucketPartitionStore(seam, 400)
    await store.open(REF, FENCE)
    await store.apply(REF, changes(1), FENCE)
    await store.drop(REF)
    waits, made = asyncio.Event(), asyncio.Event()
    original = seam.list

    async def slow(prefix: str, after: str) -> Sequence[str]:
        waits.set()
        await made.wait()
        return await original(prefix, after)

    seam.list = slow  # type: ignore[method-assign]
    late = asyncio.create_task(store.drop(REF))
    await waits.wait()
    seam.list = original  # type: ignore[method-assign]
    await other.open(REF, Fence(1, 2, 1))
    assert await other.apply(REF, changes(1), Fence(1, 2, 1)) is Outcome.DONE
    made.set()
    await late
    assert (await other.open(REF, Fence(1, 3, 1))).txn == 1


def test_the_other_kinds_open() -> None:
    in_azure("container", "", account="account", access_key="a2V5", endpoint="")
    with pytest.raises(ValueError, match="nowhere"):
        in_gcs("bucket", "", service_account="/nowhere/key.json")
