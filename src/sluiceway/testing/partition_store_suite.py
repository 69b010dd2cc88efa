"""Conformance suite of PartitionStore."""

from __future__ import annotations

import asyncio
import os

import pytest

from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import (
    Changes,
    Fence,
    FencedError,
    Least,
    LostError,
    PartitionRef,
    PartitionStore,
    RecordKind,
    Snapshot,
)
from sluiceway.testing.drive import Opened, OpenStore, driven, with_store

REF = PartitionRef("k7f3q2ma", 0)
OTHER = PartitionRef("k7f3q2ma", 1)
FENCE = Fence(1, 1, 1)
EMPTY = Snapshot(0, None, {})

LOWER = [Fence(1, 2, 1), Fence(1, 1, 9), Fence(0, 9, 9)]
"""Fences below Fence(1, 2, 2), each by another element of the tuple."""

ODD_KEYS = [
    "",
    " ",
    "ä€𝄞",
    "a\u0301",
    "á",
    "'; DROP TABLE record; --",
    '"',
    "%",
    "_",
    "\\",
    "a/b/../c",
    "line\nbreak",
    "\x01",
    "K",
    "k",
    "x" * 4_000,
]


def cycle(txn: int, name: str = "a") -> Changes:
    """A cycle that writes its number into the header, a record and a blob, and removes those of the cycle before the last."""
    changes = Changes(
        txn, b"header %d" % txn, puts={(RecordKind.EXTENT, f"{name}{txn}"): b"extent %d" % txn}, blobs={txn: b"blob %d" % txn}
    )
    if txn > 2:
        changes.deletes = {(RecordKind.EXTENT, f"{name}{txn - 2}")}
        changes.dropped_blobs = {txn - 2}
    return changes


def after(txn: int, name: str = "a") -> Snapshot:
    """Expected state after the cycles 1 to `txn`."""
    left = range(max(1, txn - 1), txn + 1)
    return Snapshot(txn, b"header %d" % txn, {(RecordKind.EXTENT, f"{name}{number}"): b"extent %d" % number for number in left})


class PartitionStoreSuite:
    """Conformance suite. Its fixture `open_store` returns an async function without arguments that opens a store on the test's data.

    The data must outlive the store, for the tests that open it again.
    """

    # Opening and looking

    @with_store
    async def test_a_new_partition_is_empty(self, store: PartitionStore) -> None:
        assert await store.open(REF, FENCE) == EMPTY
        assert await store.browse(REF) == EMPTY

    @with_store
    async def test_a_partition_that_does_not_exist_looks_empty(self, store: PartitionStore) -> None:
        assert await store.browse(REF) == EMPTY
        assert await store.read(REF, [1, 2]) == {}

    @with_store
    async def test_what_was_applied_is_there(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        puts = {(kind, f"key of {kind.value}"): os.urandom(50) for kind in RecordKind}
        blobs = {0: b"", 1: b"one", 9_007_199_254_740_993: os.urandom(100_000)}
        assert await store.apply(REF, Changes(1, b"\x00header\xff", puts=dict(puts), blobs=dict(blobs)), FENCE) is Outcome.DONE
        expected = Snapshot(1, b"\x00header\xff", puts)
        assert await store.browse(REF) == expected
        assert await store.open(REF, Fence(1, 1, 2)) == expected
        assert await store.read(REF, list(blobs)) == blobs

    @with_store
    async def test_the_same_key_may_be_of_several_kinds(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        puts = {(kind, "7"): kind.value.encode() for kind in RecordKind}
        await store.apply(REF, Changes(1, b"", puts=dict(puts)), FENCE)
        await store.apply(REF, Changes(2, b"", deletes={(RecordKind.LEASE, "7")}), FENCE)
        del puts[RecordKind.LEASE, "7"]
        assert (await store.browse(REF)).records == puts

    @with_store
    async def test_records_are_replaced_and_deleted(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        a, b, c = ((RecordKind.LEASE, key) for key in "abc")
        await store.apply(REF, Changes(1, b"1", puts={a: b"1", b: b"1"}), FENCE)
        assert (
            await store.apply(REF, Changes(2, b"2", puts={a: b"", c: b"2"}, deletes={b, (RecordKind.KEY, "never")}), FENCE) is Outcome.DONE
        )
        assert await store.browse(REF) == Snapshot(2, b"2", {a: b"", c: b"2"})

    @with_store
    async def test_an_empty_header_is_a_header(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        await store.apply(REF, Changes(1, b""), FENCE)
        assert await store.open(REF, Fence(1, 1, 2)) == Snapshot(1, b"", {})

    @with_store
    async def test_a_snapshot_is_not_touched_by_what_comes_after(self, store: PartitionStore) -> None:
        opened = await store.open(REF, FENCE)
        await store.apply(REF, cycle(1), FENCE)
        browsed = await store.browse(REF)
        await store.apply(REF, cycle(2), FENCE)
        assert opened == EMPTY
        assert browsed == after(1)

    @with_store
    async def test_the_caller_may_reuse_its_changes(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        changes = cycle(1)
        await store.apply(REF, changes, FENCE)
        changes.puts.clear()
        changes.blobs.clear()
        assert await store.browse(REF) == after(1)
        assert await store.read(REF, [1]) == {1: b"blob 1"}

    @with_store
    async def test_odd_keys(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        puts = {(RecordKind.KEY, key): key.encode() for key in ODD_KEYS}
        await store.apply(REF, Changes(1, b"", puts=dict(puts)), FENCE)
        assert (await store.browse(REF)).records == puts
        await store.apply(REF, Changes(2, b"", deletes={(RecordKind.KEY, "%"), (RecordKind.KEY, "K"), (RecordKind.KEY, "á")}), FENCE)
        for key in ("%", "K", "á"):
            del puts[RecordKind.KEY, key]
        assert (await store.open(REF, Fence(1, 1, 2))).records == puts

    # Blobs

    @with_store
    async def test_a_missing_blob_is_missing_from_the_answer(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        for txn in (1, 2, 3):
            await store.apply(REF, cycle(txn), FENCE)
        assert await store.read(REF, [3, 1, 2, 4]) == {2: b"blob 2", 3: b"blob 3"}
        assert await store.read(REF, []) == {}

    @with_store
    async def test_large_blobs(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        blobs = {number: os.urandom(8 << 20) for number in (1, 2)}
        assert await store.apply(REF, Changes(1, b"", blobs=dict(blobs)), FENCE) is Outcome.DONE
        assert await store.read(REF, [2, 1]) == blobs
        assert await store.apply(REF, Changes(2, b"", dropped_blobs={1}), FENCE) is Outcome.DONE
        assert await store.read(REF, [1, 2]) == {2: blobs[2]}

    @driven
    async def test_a_compacted_blob_takes_the_place_of_the_whole_one(self, open_store: OpenStore[PartitionStore]) -> None:
        async with Opened(open_store) as store:
            await store.open(REF, FENCE)
            await store.apply(REF, Changes(1, b"", blobs={1: b"one", 2: b"two" * 1_000, 3: b"three"}), FENCE)
            compaction = Changes(2, b"", blobs={4: b"four"}, dropped_blobs={3}, compacted_blobs={2: b"2"})
            assert await store.apply(REF, compaction, FENCE) is Outcome.DONE
            assert await store.apply(REF, compaction, FENCE) is Outcome.DONE
            assert await store.apply(REF, Changes(3, b"", compacted_blobs={2: b"lost"}), Fence(0, 0, 1)) is Outcome.REFUSED
        async with Opened(open_store) as store:
            assert await store.read(REF, [1, 2, 3, 4]) == {1: b"one", 2: b"2", 4: b"four"}

    # Turns

    @with_store
    async def test_the_newest_cycle_once_more_is_done_and_changes_nothing(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        for txn in (1, 2, 3):
            assert await store.apply(REF, cycle(txn), FENCE) is Outcome.DONE
        assert await store.apply(REF, cycle(3), FENCE) is Outcome.DONE
        assert await store.browse(REF) == after(3)
        assert await store.read(REF, [1, 2, 3]) == {2: b"blob 2", 3: b"blob 3"}
        assert await store.apply(REF, cycle(4), FENCE) is Outcome.DONE

    @with_store
    async def test_an_earlier_cycle_is_refused(self, store: PartitionStore) -> None:
        """Who sends it does not know what the partition holds. To take it for done would acknowledge what is not stored."""
        await store.open(REF, FENCE)
        for txn in (1, 2, 3):
            await store.apply(REF, cycle(txn), FENCE)
        for txn in (2, 1):
            assert await store.apply(REF, cycle(txn), FENCE) is Outcome.REFUSED
        assert await store.browse(REF) == after(3)
        assert await store.read(REF, [1, 2, 3]) == {2: b"blob 2", 3: b"blob 3"}
        assert await store.apply(REF, cycle(4), FENCE) is Outcome.DONE

    @with_store
    async def test_a_cycle_that_leaves_a_gap_is_refused(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(2), FENCE) is Outcome.REFUSED
        assert await store.browse(REF) == EMPTY
        await store.apply(REF, cycle(1), FENCE)
        assert await store.apply(REF, cycle(3), FENCE) is Outcome.REFUSED
        assert await store.browse(REF) == after(1)
        assert await store.read(REF, [1, 2, 3]) == {1: b"blob 1"}

    @with_store
    async def test_a_snapshot_never_shows_half_a_cycle(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        seen: list[Snapshot] = []

        async def look() -> None:
            while not seen or seen[-1].txn < 60:
                seen.append(await store.browse(REF))
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            group.create_task(look())
            for txn in range(1, 61):
                assert await store.apply(REF, cycle(txn), FENCE) is Outcome.DONE
                await asyncio.sleep(0)
        assert all(snapshot == (after(snapshot.txn) if snapshot.txn else EMPTY) for snapshot in seen)

    # Fences

    @with_store
    async def test_nothing_is_applied_before_open(self, store: PartitionStore) -> None:
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.REFUSED
        assert await store.open(REF, FENCE) == EMPTY

    @pytest.mark.parametrize("fence", LOWER, ids=str)
    @with_store
    async def test_a_lower_fence_cannot_open(self, store: PartitionStore, fence: Fence) -> None:
        current = Fence(1, 2, 2)
        await store.open(REF, current)
        await store.apply(REF, cycle(1), current)
        with pytest.raises(FencedError):
            await store.open(REF, fence)
        assert await store.apply(REF, cycle(2), current) is Outcome.DONE
        assert await store.browse(REF) == after(2)

    @pytest.mark.parametrize("fence", LOWER, ids=str)
    @with_store
    async def test_a_former_owner_changes_nothing(self, store: PartitionStore, fence: Fence) -> None:
        await store.open(REF, fence)
        await store.apply(REF, cycle(1), fence)
        assert await store.open(REF, Fence(1, 2, 2)) == after(1)
        assert await store.apply(REF, cycle(2), fence) is Outcome.REFUSED
        assert await store.browse(REF) == after(1)
        assert await store.read(REF, [1, 2]) == {1: b"blob 1"}
        assert await store.apply(REF, cycle(2, "b"), Fence(1, 2, 2)) is Outcome.DONE

    @with_store
    async def test_a_fence_that_has_not_opened_is_refused(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), Fence(1, 1, 2)) is Outcome.REFUSED
        assert await store.browse(REF) == EMPTY
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE

    @with_store
    async def test_looking_leaves_the_fence_alone(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        await store.browse(REF)
        await store.read(REF, [1])
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE

    # Lives of a store

    @driven
    async def test_a_store_opened_again_has_everything(self, open_store: OpenStore[PartitionStore]) -> None:
        blob = os.urandom(2 << 20)
        async with Opened(open_store) as store:
            await store.open(REF, FENCE)
            for txn in (1, 2, 3):
                await store.apply(REF, cycle(txn), FENCE)
            await store.apply(REF, Changes(4, b"four", blobs={4: blob}), FENCE)
        async with Opened(open_store) as store:
            expected = Snapshot(4, b"four", after(3).records)
            assert await store.browse(REF) == expected
            assert await store.read(REF, [1, 2, 3, 4]) == {2: b"blob 2", 3: b"blob 3", 4: blob}
            assert await store.open(REF, Fence(1, 2, 1)) == expected
            assert await store.apply(REF, Changes(5, b"five"), Fence(1, 2, 1)) is Outcome.DONE

    @driven
    async def test_a_store_opened_again_remembers_the_fence_and_the_cycle(self, open_store: OpenStore[PartitionStore]) -> None:
        async with Opened(open_store) as store:
            await store.open(REF, Fence(1, 2, 2))
            await store.apply(REF, cycle(1), Fence(1, 2, 2))
        async with Opened(open_store) as store:
            assert await store.apply(REF, cycle(1), Fence(1, 2, 2)) is Outcome.DONE
            with pytest.raises(FencedError):
                await store.open(REF, Fence(1, 2, 1))
            assert await store.apply(REF, cycle(2), Fence(1, 2, 1)) is Outcome.REFUSED
            assert await store.browse(REF) == after(1)

    @with_store
    async def test_a_dropped_partition_is_gone(self, store: PartitionStore) -> None:
        for ref in (REF, OTHER):
            await store.open(ref, FENCE)
            await store.apply(ref, cycle(1), FENCE)
        await store.drop(REF)
        assert await store.browse(REF) == EMPTY
        assert await store.read(REF, [1]) == {}
        assert await store.apply(REF, cycle(2), FENCE) is Outcome.REFUSED
        await store.drop(REF)
        await store.drop(PartitionRef("k7f3q2ma", 99))
        assert await store.browse(OTHER) == after(1)

    @with_store
    async def test_what_is_released_is_as_it_was(self, store: PartitionStore) -> None:
        await store.release(REF)
        assert await store.browse(REF) == EMPTY
        await store.open(REF, FENCE)
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.DONE
        await store.release(REF)
        await store.release(REF)
        assert await store.read(REF, [1]) == {1: b"blob 1"}
        await store.release(REF)
        assert await store.apply(REF, cycle(2), FENCE) is Outcome.DONE
        # Concurrently with a commit.
        _, done, _ = await asyncio.gather(store.release(REF), store.apply(REF, cycle(3), FENCE), store.release(REF))
        assert done is Outcome.DONE
        assert await store.browse(REF) == after(3)
        await store.release(REF)
        assert await store.open(REF, Fence(1, 1, 2)) == after(3)

    @driven
    async def test_a_dropped_partition_stays_gone(self, open_store: OpenStore[PartitionStore]) -> None:
        async with Opened(open_store) as store:
            await store.open(REF, FENCE)
            await store.apply(REF, cycle(1), FENCE)
            await store.drop(REF)
        async with Opened(open_store) as store:
            assert await store.browse(REF) == EMPTY

    @with_store
    async def test_many_partitions_at_once(self, store: PartitionStore) -> None:
        refs = [PartitionRef(incarnation, number) for incarnation in ("aaaaaaaa", "bbbbbbbb") for number in range(20)]

        async def work(ref: PartitionRef) -> None:
            name = f"{ref.incarnation}{ref.partition}"
            assert await store.open(ref, FENCE) == EMPTY
            for txn in range(1, 6):
                assert await store.apply(ref, cycle(txn, name), FENCE) is Outcome.DONE
                assert await store.read(ref, [txn]) == {txn: b"blob %d" % txn}
            assert await store.browse(ref) == after(5, name)

        async with asyncio.TaskGroup() as group:
            for ref in refs:
                group.create_task(work(ref))

    # Many openings at the same moment, which a store may carry out together

    @with_store
    async def test_each_of_many_openings_has_its_own_result(self, store: PartitionStore) -> None:
        refs = [PartitionRef(incarnation, number) for incarnation in ("aaaaaaaa", "bbbbbbbb") for number in range(20)]
        old, higher, lost, missing, new = refs[:5], refs[5:10], refs[10:15], refs[15:20], refs[20:]
        for ref in [*old, *higher, *lost]:
            await store.open(ref, FENCE if ref not in higher else Fence(1, 2, 9))
            assert await store.apply(ref, cycle(1), FENCE) is (Outcome.REFUSED if ref in higher else Outcome.DONE)
        least = {ref: Least(FENCE, 2 if ref in lost else 1) for ref in refs if ref not in new and ref not in higher}
        fence = Fence(1, 2, 1)
        results = await asyncio.gather(*(store.open(ref, fence, least.get(ref)) for ref in refs), return_exceptions=True)
        for ref, result in zip(refs, results, strict=True):
            name = f"{ref.incarnation}-{ref.partition} "
            if ref in higher:
                assert isinstance(result, FencedError)
                assert name in str(result)
            elif ref in lost or ref in missing:
                assert isinstance(result, LostError)
                assert name in str(result)
            else:
                assert result == (after(1) if ref in old else EMPTY)
        for ref in refs:
            # Exactly those fences were raised whose opening succeeded.
            done = await store.apply(ref, cycle(2 if ref in old else 1), fence)
            assert done is (Outcome.DONE if ref in old or ref in new else Outcome.REFUSED)
        assert [await store.apply(ref, cycle(2), FENCE) for ref in lost] == [Outcome.DONE] * len(lost)

    @with_store
    async def test_many_openings_show_what_each_partition_has(self, store: PartitionStore) -> None:
        refs = [PartitionRef("k7f3q2ma", number) for number in range(30)]
        expected = {}
        for ref in refs:
            await store.open(ref, FENCE)
            # From none to many records.
            puts = {(kind, f"{number}"): os.urandom(20) for kind in RecordKind for number in range(ref.partition)}
            if ref.partition % 3:
                assert await store.apply(ref, Changes(1, b"%d" % ref.partition, puts=dict(puts)), FENCE) is Outcome.DONE
            expected[ref] = Snapshot(1, b"%d" % ref.partition, puts) if ref.partition % 3 else EMPTY
        for opening in (2, 3):
            found = await asyncio.gather(*(store.open(ref, Fence(1, 1, opening), Least(FENCE)) for ref in reversed(refs)))
            assert {ref: snapshot.whole() for ref, snapshot in zip(reversed(refs), found, strict=True)} == expected

    @with_store
    async def test_many_openings_shut_out_former_owners(self, store: PartitionStore) -> None:
        refs = [PartitionRef("k7f3q2ma", number) for number in range(20)]
        await asyncio.gather(*(store.open(ref, FENCE) for ref in refs))

        async def both(ref: PartitionRef) -> tuple[Outcome, Snapshot]:
            return await asyncio.gather(store.apply(ref, cycle(1), FENCE), store.open(ref, Fence(1, 2, 1)))

        for ref, (outcome, snapshot) in zip(refs, await asyncio.gather(*map(both, refs)), strict=True):
            # Whichever came first, the opening has seen it or shuts it out.
            assert (outcome, snapshot.txn) in ((Outcome.DONE, 1), (Outcome.REFUSED, 0), (Outcome.UNKNOWN, 0), (Outcome.UNKNOWN, 1))
            assert snapshot == (after(1) if snapshot.txn else EMPTY)
            assert await store.apply(ref, cycle(snapshot.txn + 1, "b"), FENCE) is Outcome.REFUSED
            assert await store.browse(ref) == snapshot

    @with_store
    async def test_a_cancelled_opening_takes_no_other_along(self, store: PartitionStore) -> None:
        refs = [PartitionRef("k7f3q2ma", number) for number in range(12)]
        for opening in range(1, 5):
            fence = Fence(1, 1, opening)
            tasks = [asyncio.create_task(store.open(ref, fence)) for ref in refs]
            for _ in range(opening):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert results[1::2] == [EMPTY] * (len(refs) // 2)
            # One that has begun is carried to its end, and settled by the next fence.
        assert await asyncio.gather(*(store.open(ref, Fence(1, 1, 9)) for ref in refs)) == [EMPTY] * len(refs)

    @with_store
    async def test_a_cancelled_caller_leaves_no_half_cycle(self, store: PartitionStore) -> None:
        fence, txn = FENCE, 0
        await store.open(REF, fence)
        for opening in range(2, 22):
            task = asyncio.create_task(store.apply(REF, cycle(txn + 1), fence))
            for _ in range(opening % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            fence = Fence(1, 1, opening)
            snapshot = await store.open(REF, fence)
            assert snapshot.txn in (txn, txn + 1)
            txn = snapshot.txn + 1
            assert snapshot == (after(snapshot.txn) if snapshot.txn else EMPTY)
            assert await store.apply(REF, cycle(txn), fence) is Outcome.DONE

    # Being the storage that it was

    @with_store
    async def test_it_has_one_name_for_good(self, store: PartitionStore) -> None:
        assert await store.identify(None) is None
        names = set(await asyncio.gather(*(store.identify(new) for new in ("aaaaaaaa", "bbbbbbbb", "cccccccc"))))
        assert len(names) == 1
        assert names < {"aaaaaaaa", "bbbbbbbb", "cccccccc"}
        assert {await store.identify(None), await store.identify("dddddddd")} == names

    @driven
    async def test_its_name_is_that_of_every_store_on_it(self, open_store: OpenStore[PartitionStore]) -> None:
        async with Opened(open_store) as store:
            assert await store.identify("aaaaaaaa") == "aaaaaaaa"
            await store.open(REF, FENCE)
        async with Opened(open_store) as store:
            assert await store.identify("bbbbbbbb") == "aaaaaaaa"

    @with_store
    async def test_what_must_be_there_is_never_created(self, store: PartitionStore) -> None:
        for least in (Least(Fence(0, 0, 0)), Least(FENCE), Least(FENCE, 1)):
            with pytest.raises(LostError, match=f"{REF.incarnation}-{REF.partition} is not there"):
                await store.open(REF, FENCE, least)
        # The failed opens have created nothing.
        assert await store.apply(REF, cycle(1), FENCE) is Outcome.REFUSED
        assert await store.open(REF, LOWER[0]) == EMPTY
        await store.drop(REF)
        with pytest.raises(LostError):
            await store.open(REF, FENCE, Least(Fence(0, 0, 0)))

    @with_store
    async def test_what_is_there_is_opened(self, store: PartitionStore) -> None:
        await store.open(REF, FENCE)
        assert await store.open(REF, Fence(1, 1, 2), Least(FENCE)) == EMPTY
        assert await store.apply(REF, cycle(1), Fence(1, 1, 2)) is Outcome.DONE
        assert await store.apply(REF, cycle(2), Fence(1, 1, 2)) is Outcome.DONE
        for opening, least in enumerate((Least(Fence(0, 0, 0)), Least(Fence(1, 1, 2), 1), Least(Fence(1, 1, 4), 2)), 3):
            assert await store.open(REF, Fence(1, 1, opening), least) == after(2)

    @with_store
    async def test_what_is_older_than_it_must_be_is_not_opened(self, store: PartitionStore) -> None:
        await store.open(REF, Fence(1, 2, 2))
        assert await store.apply(REF, cycle(1), Fence(1, 2, 2)) is Outcome.DONE
        for least in (Least(Fence(1, 2, 3)), Least(Fence(1, 3, 0)), Least(Fence(2, 0, 0)), Least(Fence(1, 2, 2), 2), Least(FENCE, 2)):
            with pytest.raises(LostError, match=f"{REF.incarnation}-{REF.partition} "):
                await store.open(REF, Fence(9, 0, 0), least)
        # The fence is unchanged: the present owner continues.
        assert await store.apply(REF, cycle(2), Fence(1, 2, 2)) is Outcome.DONE
        with pytest.raises(FencedError):
            await store.open(REF, LOWER[0], Least(Fence(9, 9, 9)))

    @driven
    async def test_no_fence_opens_twice(self, open_store: OpenStore[PartitionStore]) -> None:
        """A copy of a server has the same grants and so the same fences: each of the two would take the other's cycles for its own."""
        for is_first in (True, False):
            async with Opened(open_store) as store:
                if is_first:
                    await store.open(REF, FENCE)
                for least in (None, Least(FENCE)):
                    with pytest.raises(FencedError, match="no fence is given twice"):
                        await store.open(REF, FENCE, least)
                assert await store.apply(REF, cycle(1 if is_first else 2), FENCE) is Outcome.DONE
        async with Opened(open_store) as store:
            assert await store.open(REF, Fence(1, 1, 2), Least(FENCE, 1)) == after(2)
            results = await asyncio.gather(*(store.open(OTHER, FENCE) for _ in range(3)), return_exceptions=True)
            assert sum(result == EMPTY for result in results) == 1
            assert sum(isinstance(result, FencedError) for result in results) == 2
