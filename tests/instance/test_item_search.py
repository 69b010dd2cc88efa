"""Searches of a real instance: what is found, how far one call looks, and what is done with what was found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluiceway.adapters import system
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.ids import ItemId, parse_item_id
from sluiceway.local import item_search
from sluiceway.model.inspection import MoveItems, RunNow, Search, SearchedQueue
from sluiceway.model.item_filter import REASON_HEADER, ItemFilter
from sluiceway.model.items import ENQUEUE_AT, batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Lease, Offsets, Produce, Selection, Settle
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, fine, serving, spec

ALL = ("ready", "leased", "scheduled")


def search(wanted: ItemFilter, limit: int = 1_000, rows: int = 100_000, timeout: int = 60_000, states: tuple[str, ...] = ALL) -> Search:
    return Search(0, states, wanted, limit, rows, timeout)  # type: ignore[arg-type]


async def every(service: Service, queue: str, request: Search) -> tuple[list[str], list[SearchedQueue]]:
    """The payloads that all calls of a search find, and the answers."""
    answers = []
    while True:
        answers.append(await service.search(queue, request))
        if answers[-1].next is None:
            return [
                payload.decode() for answer in answers for batch, _ in answer.rows for payload in batch.column("payload").to_pylist()
            ], answers
        partition, start = answers[-1].next
        request = Search(partition, request.states, request.wanted, request.limit, request.rows, request.request_timeout, start)


async def put(service: Service, queue: str, *rows: dict[str, Any], partition: int | None = None) -> None:
    await service.produce(queue, Produce(batch_from_rows(list(rows)), 20_000, partition=partition))


def ids(answer: SearchedQueue) -> Iterator[tuple[int, int]]:
    for batch, _ in answer.rows:
        yield from zip(batch.column("partition").to_pylist(), batch.column("offset").to_pylist(), strict=True)


def by_partition(answer: SearchedQueue) -> dict[int, Offsets]:
    found: dict[int, list[int]] = {}
    for partition, offset in ids(answer):
        found.setdefault(partition, []).append(offset)
    return {partition: pa.array(sorted(offsets)).to_numpy() for partition, offsets in found.items()}


def settled(partition: int, offsets: list[int], disposition: Disposition) -> Settle:
    return Settle({partition: [Selection(disposition, offsets=pa.array(offsets).to_numpy())]}, 20_000)


TEXTS = st.none() | st.sampled_from(["a", "b", "é", ""])
HEADERS = st.none() | st.dictionaries(st.sampled_from("xyé"), st.sampled_from(["1", "2", ""]))
ITEM = {"kind": TEXTS, "reference": TEXTS, "key": TEXTS, "unique_key": TEXTS, "headers": HEADERS}
ITEMS = st.lists(st.fixed_dictionaries(ITEM), min_size=1, max_size=12)
WANTED = st.builds(
    ItemFilter,
    kind=TEXTS,
    reference=TEXTS,
    key=TEXTS,
    unique_key=TEXTS,
    headers=st.dictionaries(st.sampled_from("xyé"), st.none() | st.sampled_from(["1", ""]), max_size=2),
    contains=st.none() | st.sampled_from([b"1", b"\xff", "é".encode()]),
)


@settings(max_examples=150, deadline=None)
@given(ITEMS, WANTED)
def test_a_filter_of_columns_agrees_with_one_of_items(items: list[dict[str, object]], wanted: ItemFilter) -> None:
    payloads = [f"{number} é".encode() + b"\xff" * (number % 2) for number in range(len(items))]
    pairs = [{**item, "headers": list(item["headers"].items()) if isinstance(item["headers"], dict) else None} for item in items]
    given = [{name: value for name, value in item.items() if value is not None} for item in pairs]
    batch = batch_from_rows([{"payload": payload} | item for payload, item in zip(payloads, given, strict=True)])

    def fits(payload: bytes, item: dict[str, object]) -> bool:
        headers = item["headers"] or {}
        assert isinstance(headers, dict)
        return (
            wanted.kind in (None, item["kind"])
            and wanted.reference in (None, item["reference"])
            and wanted.key in (None, item["key"])
            and wanted.unique_key in (None, item["unique_key"])
            and all(name in headers and value in (None, headers[name]) for name, value in wanted.headers.items())
            and (wanted.contains is None or wanted.contains in payload)
        )

    expected = [fits(payload, item) for payload, item in zip(payloads, items, strict=True)]
    if not set(wanted.columns()) <= set(batch.schema.names):
        assert not any(expected), "a blob without the column need not be read"
    elif wanted.columns():
        assert wanted.matches(batch).to_pylist() == expected
        assert wanted.matches(batch.slice(1)).to_pylist() == expected[1:]


@driven
async def test_items_are_found_in_all_partitions_and_states(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 3))
        due = datetime.now(UTC) + timedelta(hours=1)
        for partition in range(3):
            rows = batch_from_rows([{"payload": f"{partition}{at}".encode(), "kind": "ab"[at % 2]} for at in range(4)])
            times = pa.array([None, None, due, due], ENQUEUE_AT.type)
            await service.produce("q", Produce(rows.append_column(ENQUEUE_AT, times), 20_000, partition=partition))
        await service.lease("q", Lease("c", 1, partition=1))
        found, (answer,) = await every(service, "q", search(ItemFilter(kind="a")))
        assert sorted(found) == ["00", "02", "10", "12", "20", "22"]
        assert (answer.looked_at, answer.skipped) == (12, [])
        assert (await every(service, "q", search(ItemFilter(kind="a"), states=("leased",))))[0] == ["10"]
        assert sorted((await every(service, "q", search(ItemFilter(kind="a"), states=("scheduled",))))[0]) == ["02", "12", "22"]
        assert (await every(service, "q", search(ItemFilter(reference="never"))))[0] == []


@driven
async def test_a_call_is_bounded_and_the_next_one_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_search, "_STEP_ROWS", 7)
    monkeypatch.setattr(item_search, "_STEP_PIECES", 2)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 2))
        for partition in range(2):
            for at in range(6):
                items = [{"payload": b"%d%d%d" % (partition, at, row), "kind": "ab"[row % 2]} for row in range(5)]
                await put(service, "q", *items, partition=partition)
        whole, _ = await every(service, "q", search(ItemFilter(kind="a")))
        assert len(whole) == len(set(whole)) == 36
        for limit, rows, timeout in ((1, 100, 60_000), (5, 100, 60_000), (100, 3, 60_000), (100, 1, 60_000), (4, 9, 60_000), (100, 100, 0)):
            found, answers = await every(service, "q", search(ItemFilter(kind="a"), limit, rows, timeout))
            assert found == whole
            assert sum(answer.looked_at for answer in answers) == 60
            assert all(answer.looked_at <= rows and sum(batch.num_rows for batch, _ in answer.rows) <= limit for answer in answers)
        assert len(answers) > 1, "the time was over after the first step of each"


@driven
async def test_a_partition_that_is_not_open_is_skipped(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 3))
        for partition in range(3):
            await put(service, "q", {"payload": b"%d" % partition}, partition=partition)
        driver = service._driver("q")
        driver.queue.stop_executor(1, "damaged", system.now())
        found, (answer,) = await every(service, "q", search(ItemFilter(contains=b"")))
        assert (found, answer.skipped, answer.looked_at) == (["0", "2"], [1], 2)


@driven
async def test_an_item_is_found_by_its_id_and_by_its_origin_without_reading_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        incarnation = (await service.create_queue(spec("q", 2))).incarnation
        await put(service, "q", {"payload": b"first"}, {"payload": b"second"}, partition=1)
        await put(service, "q", {"payload": b"other"}, {"payload": b"another"}, partition=0)
        await service.lease("q", Lease("c", 2, partition=1))
        await service.settle("q", settled(1, [0, 1], Disposition("retry", retry_after=0)))
        for item in (ItemId(incarnation, 1, 1), ItemId(incarnation, 1, 3)):
            found, answers = await every(service, "q", search(ItemFilter(item=item)))
            assert (found, sum(answer.looked_at for answer in answers)) == (["second"], 4)
        await service.create_queue(spec("other"))
        moved = await service.move_items("q", MoveItems({1: pa.array([3]).to_numpy()}, 20_000, (), "other"))
        assert (moved.matched, moved.moved, moved.targets) == (1, 1, {"other": 1})
        assert (await every(service, "other", search(ItemFilter(item=ItemId(incarnation, 1, 1)))))[0] == ["second"]
        assert (await every(service, "q", search(ItemFilter(item=ItemId(incarnation, 1, 1)))))[0] == []
        assert (await every(service, "other", search(ItemFilter(item=parse_item_id("aaaaaaaa.0.0")))))[0] == []


@driven
async def test_a_retry_that_waits_for_its_back_off_is_run_now(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await put(service, "q", {"payload": b"x", "kind": "a"})
        await service.lease("q", Lease("c", 1))
        await service.settle("q", settled(0, [0], Disposition("retry", retry_after=3_600_000)))
        waiting = asyncio.ensure_future(service.lease("q", Lease("c", 1, 30_000)))
        (answer,) = (await every(service, "q", search(ItemFilter(kind="a"), states=("scheduled",))))[1]
        made = await service.run_now("q", RunNow(by_partition(answer), 20_000, ("other.0.0",)))
        assert (made.ready, made.ignored) == (1, [("other.0.0", "unknown")])
        leased = await waiting
        assert [item["attempts"] for batch in leased.batches for item in in_columns(batch).to_pylist()] == [2], "attempts go on"
        again = await service.run_now("q", RunNow(by_partition(answer), 20_000))
        assert [reason for _, reason in again.ignored] == ["gone"]
        entries = (await service.audit.list(10, action="storage/items.run_now"))[-1]
        assert entries.queue_name == "q"


@driven
async def test_dead_items_are_found_by_their_reason_and_go_back_to_where_they_died(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await put(service, "q", *[{"payload": b"%d" % at} for at in range(4)])
        await service.lease("q", Lease("c", 4))
        for at, reason in enumerate(["Timeout: 5 s", "Timeout: 7 s", "KeyError: 'x'", "KeyError: 'y'"]):
            await service.settle("q", settled(0, [at], Disposition("dead", reason=reason)))
        await put(service, "dead", {"payload": b"no source", "headers": [(REASON_HEADER, "Timeout"), ("sluiceway-queue", "q")]})
        await eventually(lambda: service.stats("dead").partitions[0].ready == 5)
        found, (answer,) = await every(service, "dead", search(ItemFilter(reason="Timeout")))
        assert sorted(found) == ["0", "1", "no source"]
        moved = await service.move_items("dead", MoveItems(by_partition(answer), 20_000, ("other.0.0",)))
        assert (moved.matched, moved.moved, moved.targets) == (2, 2, {"q": 2})
        assert sorted(reason for _, reason in moved.ignored) == ["no_source", "unknown"]
        assert sorted((await every(service, "q", search(ItemFilter())))[0]) == ["0", "1"]
        with pytest.raises(SluicewayError, match="no queue 'nowhere'"):
            await service.move_items("dead", MoveItems({0: pa.array([2]).to_numpy()}, 20_000, (), "nowhere"))


@driven
async def test_a_move_tells_of_the_items_of_partitions_that_failed(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        incarnation = (await service.create_queue(spec("q", 4))).incarnation
        await service.create_queue(spec("other"))
        for partition in range(4):
            await put(service, "q", {"payload": b"x"}, partition=partition)
        service._driver("q").queue.stop_executor(0, "damaged", system.now())

        async def is_lost(ref: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN if ref == PartitionRef(incarnation, 2) else None

        async def is_down(ref: PartitionRef) -> None:
            if ref == PartitionRef(incarnation, 2):
                raise StoreUnavailableError("the disk is gone")

        store.on_apply, store.on_open = is_lost, is_down
        some = dict.fromkeys(range(4), np.array([0], np.int64))
        moved = await service.move_items("q", MoveItems(some, 1_000, (), "other"))
        assert (moved.matched, moved.moved) == (2, 2), "those behind a partition that fails are moved, too"
        assert sorted(moved.ignored) == [(f"{incarnation}.0.0", "partition_damaged"), (f"{incarnation}.2.0", "outcome_unknown")]
        store.on_apply = store.on_open = fine
        await eventually(lambda: service._driver("q").queue.executors[2].takes_work)
        with pytest.raises(SluicewayError) as raised:
            await service.move_items("q", MoveItems({0: some[0], 1: some[1]}, 1_000, (), "other"))
        assert raised.value.code == "partition_damaged", "with nothing moved, the call says so itself"


def test_a_search_that_goes_on_after_the_last_partition_is_at_its_end(tmp_path: Path) -> None:
    """That partition was removed since the previous page."""

    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q", 2))
            await put(service, "q", {"payload": b"x", "kind": "a"}, partition=1)
            wanted = search(ItemFilter(kind="a"))
            wanted.partition = 2
            found = await service.search("q", wanted)
            assert (found.rows, found.next) == ([], None)

    asyncio.run(scenario())
