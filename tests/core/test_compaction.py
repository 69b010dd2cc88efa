"""A blob that few open rows keep is stored anew with these alone, and nothing that refers to it changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.compaction import compactions
from sluiceway.core.partition.queries import open_slices
from sluiceway.instance.service import Service
from sluiceway.model.inspection import Browse
from sluiceway.model.items import batch_from_rows, encode_blob, narrow
from sluiceway.model.leased_items import Slice, present, take_rows
from sluiceway.model.requests import DONE, Lease, Selection, Settle
from sluiceway.model.sparse import SparseBatch, compacted, decode_stored, encode_sparse
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.core.core_model import Rig, rows_of
from tests.instance.instance_rig import lease, payloads, produce, serving, settle, spec

ITEMS = 1_000
PAYLOAD = "x" * 200


def blob_of(count: int) -> tuple[pa.RecordBatch, int]:
    rows = range(count)
    return narrow(
        batch_from_rows(
            [{"payload": f"{row}".encode(), "kind": "k" if row % 3 else None, "key": f"c-{row}" if row % 2 else None} for row in rows]
        )
    )


# ---- the form of a compacted blob -----------------------------------------------------------------------------


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), min_size=1))))
def test_a_compacted_blob_has_the_same_rows_under_the_same_numbers(given: tuple[int, set[int]]) -> None:
    count, kept = given
    batch, columns = blob_of(count)
    rows = np.array(sorted(kept), np.int64)
    read = decode_stored(encode_sparse(compacted(decode_stored(encode_blob(batch), columns), rows)), columns)
    assert isinstance(read, SparseBatch)
    assert read.has(np.arange(count)).tolist() == [row in kept for row in range(count)]
    for some in (rows, rows[::2], rows[-1:]):
        assert take_rows(read, some).equals(batch.take(pa.array(some)))
    again = decode_stored(encode_sparse(compacted(read, rows[::2])), columns)
    assert take_rows(again, rows[::2]).equals(batch.take(pa.array(rows[::2])))


def test_an_open_row_that_is_not_there_is_never_compacted_away() -> None:
    batch, _ = blob_of(5)
    sparse = compacted(batch, np.array([1, 3]))
    with pytest.raises(ValueError, match="lacks an open row"):
        compacted(sparse, np.array([1, 2]))


def test_rows_that_were_settled_meanwhile_are_left_out_and_never_served_empty() -> None:
    batch, columns = blob_of(5)
    sparse = compacted(batch, np.array([1, 3]))
    piece = Slice(100, np.array([0, 1, 3, 4]), np.array([200, 201, 203, 204]), 0, 0, columns)
    found = present(piece, sparse)
    assert found is not None
    assert (found.rows.tolist(), found.offsets.tolist()) == ([1, 3], [201, 203])
    assert present(piece._replace(rows=np.array([0]), offsets=np.array([200])), sparse) is None
    assert present(piece, batch) is piece


# ---- what is compacted ----------------------------------------------------------------------------------------


def test_a_row_that_is_leased_scheduled_or_dying_stays() -> None:
    rig = Rig(keeps_dead=True)
    rig.produce(rows_of(*(f"{row}" for row in range(20))))
    taken = rig.lease(16)
    rig.settle(range(2, 16))
    assert rig.compact() == 0, "six of twenty are open: two are leased, four wait"
    rest = rig.lease(4)
    rig.settle([16, 17])
    assert rig.compact() == 1
    assert [each.payload for each in rig.served(open_slices(taken) + open_slices(rest))] == [b"0", b"1", b"18", b"19"]
    rig.reload()
    assert [each.payload for lease in rig.machine.leases.values() for each in rig.served(open_slices(lease))] == [b"0", b"1", b"18", b"19"]


def test_what_is_compacted_again_becomes_smaller_each_time() -> None:
    rig = Rig()
    rig.produce(rows_of(*(f"{row}" for row in range(64))))
    rig.lease(64)
    sizes = []
    for left in (16, 4, 1):
        rig.settle(range(left, 64))
        assert rig.compact() == 1
        sizes.append(rig.machine.log.blobs[0].kept)
        assert rig.compact() == 0
    assert sizes == [16, 4, 1]


def test_a_blob_that_a_snapshot_refers_to_stays_whole() -> None:
    rig = Rig()
    rig.produce(rows_of(*(f"{row}" for row in range(20))))
    rig.lease(20)
    rig.settle(range(1, 20))
    rig.commit()
    machine = rig.machine
    machine.log.min_sparse_bytes = 1
    machine.log.find_sparse()
    assert not compactions(machine)
    machine.log.blobs[0].pins = 1
    assert not compactions(machine)
    assert not machine.log.compact(0, 1, 1, b"")
    machine.log.blobs[0].pins = 0
    assert [each.rows.tolist() for each in compactions(machine)] == [[0]]


def test_a_small_or_a_full_blob_is_left_alone() -> None:
    rig = Rig()
    rig.produce(rows_of(*(f"{row}" for row in range(20))))
    rig.lease(20)
    rig.settle(range(1, 20))
    rig.machine.log.find_sparse()
    assert not rig.machine.log.long_sparse(9)
    assert not rig.machine.log.long_sparse(9), "it is smaller than what is worth a transaction"


# ---- through an instance --------------------------------------------------------------------------------------


async def forgotten(service: Service) -> int:
    """A queue with a blob of which one item is left, leased for long. Returns the item's offset."""
    await service.create_queue(spec("q"))
    await produce(service, "q", *(f"{row} {PAYLOAD}" for row in range(ITEMS)))
    leased = await service.lease("q", Lease("c", ITEMS, 0, 3_600_000))
    offset = ITEMS // 3
    offsets = np.array([each for each in range(ITEMS) if each != offset])
    await service.settle("q", Settle({leased.leases[0].partition: [Selection(DONE, offsets=offsets)]}, 10_000))
    return offset


async def stored(service: Service, store: object) -> int:
    """The bytes of the partition's blob."""
    assert hasattr(store, "read")
    read = await store.read(PartitionRef(service.queue("q").incarnation, 0), [0])
    return len(read[0])


@driven
async def test_one_live_item_does_not_keep_a_large_blob(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        offset = await forgotten(service)
        before = await stored(service, store)
        assert before > ITEMS * len(PAYLOAD)
        driver = service._drivers["q"]
        await driver.compact()
        assert await stored(service, store) == before, "it may be in the middle of being settled"
        await driver.compact()
        assert await stored(service, store) < before / 100
        page = await service.browse("q", Browse(0, ("leased",), 10))
        assert payloads([batch for batch, _ in page.rows]) == [f"{offset} {PAYLOAD}"]
    async with serving(tmp_path) as (service, store):
        driver = service._drivers["q"]
        [(number, left)] = driver.queue.executors[0].partition.leases.items()
        batches = await driver.rows(0, number, open_slices(left))
        assert payloads(batches) == [f"{offset} {PAYLOAD}"]
        assert batches[0].column("origin_offset").to_pylist() == [offset]


@driven
async def test_an_item_that_comes_back_after_a_compaction_is_itself(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        offset = await forgotten(service)
        driver = service._drivers["q"]
        await driver.compact()
        await driver.compact()
        executor = driver.queue.executors[0]
        [number] = executor.partition.leases
        driver.queue.give_back(0, number)
        driver._cycle()
        again = await lease(service, "q", 10, 10_000)
        assert payloads(again.batches) == [f"{offset} {PAYLOAD}"]
        assert (await settle(service, "q", again)).completed == 1
        assert not executor.partition.log.blobs


@driven
async def test_a_partition_that_was_opened_anew_is_not_compacted_by_what_was_seen_before(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await forgotten(service)
        driver = service._drivers["q"]
        await driver.compact()
        executor = driver.queue.executors[0]
        [wanted] = executor.compactions()
        opening, before = executor.opening, await stored(service, store)
        await driver.reload(10_000)
        with pytest.raises(Exception, match="not available"):
            await driver._compact(0, opening, wanted)
        assert await stored(service, store) == before
