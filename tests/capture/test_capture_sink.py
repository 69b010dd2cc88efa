"""Batches of a capture in a real queue: each once, in order, whoever writes it and however often."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sluiceway.capture.capture_sink import QueueSink, group_of, to_items
from sluiceway.client import AsyncClient
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_PAYLOAD_BYTES
from sluiceway.model.task_records import CHANGES
from sluiceway.ports.change_stream import BrokenOffError, StaleBatchError
from sluiceway.testing.drive import driven
from tests.server.server_running import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("sink") / "data") as served:
        yield served


@asynccontextmanager
async def sink_of(server: Running, queue_name: str, name: str = "orders", **cut: int) -> AsyncIterator[QueueSink]:
    async with AsyncClient(server.url, retry_for="2s") as client:
        yield QueueSink(client, name, queue_name, **cut)


def records(*payloads: str, keys: list[str | None] | None = None) -> pa.RecordBatch:
    count = len(payloads)
    columns: dict[str, list[Any]] = {
        "position": [f"at-{payload[:20]}" for payload in payloads],
        "at": [1_000] * count,
        "kind": ["insert"] * count,
        "key": keys or [None] * count,
        "payload": [payload.encode() for payload in payloads],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[each.name], each.type) for each in CHANGES], schema=CHANGES)


def items(server: Running, queue_name: str) -> list[dict[str, Any]]:
    """All that is in the queue, in order."""
    found: list[dict[str, Any]] = []
    while leased := server.lease(queue_name)["items"]:
        found += leased
    return found


def texts(server: Running, queue_name: str) -> list[str]:
    return [text_of(item) for item in items(server, queue_name)]


def text_of(item: dict[str, Any]) -> str:
    return str(item["utf8"]) if "utf8" in item else base64.b64decode(item["bytes"]).decode()


@driven
async def test_a_record_becomes_an_item(server: Running) -> None:
    queue_name = server.queue()
    async with sink_of(server, queue_name) as sink:
        await sink.write("p", 1, records("a", "b", "c", keys=["key", None, "k" * 2_049]))
    got = items(server, queue_name)
    assert [text_of(item) for item in got] == ["a", "b", "c"]
    assert [item.get("kind") for item in got] == ["insert"] * 3
    # A key that no reference may be as long as is left out.
    assert [item.get("reference") for item in got] == ["key", None, None]


@driven
async def test_a_batch_said_again_adds_nothing_whoever_says_it(server: Running) -> None:
    queue_name = server.queue()
    rows = records(*(f"r{number}" for number in range(25)))
    async with sink_of(server, queue_name, chunk_items=10) as sink:
        await sink.write("p", 1, rows)
        await sink.write("p", 1, rows)
    async with sink_of(server, queue_name, chunk_items=10) as another:
        await another.write("p", 1, rows)
        await another.write("p", 2, records("last"))
    assert texts(server, queue_name) == [f"r{number}" for number in range(25)] + ["last"]


@driven
async def test_a_batch_that_is_there_in_part_is_completed(server: Running) -> None:
    """Whoever wrote its first chunks died then."""
    queue_name = server.queue()
    rows = records(*(f"r{number}" for number in range(25)))
    async with sink_of(server, queue_name, chunk_items=10) as sink:
        await sink._client.produce_arrow(
            queue_name,
            to_items(rows.slice(0, 10)),
            idempotency_key="7/0",
            idempotency_group="capture/orders/p",
            idempotency_sequence=7,
        )
        await sink.write("p", 7, rows)
    assert texts(server, queue_name) == [f"r{number}" for number in range(25)]


@driven
async def test_what_is_too_large_for_an_item_goes_to_the_dead_queue_in_parts_and_the_others_go_on(server: Running) -> None:
    dead_queue = server.queue()
    queue_name = server.queue(dead_queue=dead_queue)
    large = "".join(f"{number:015}\n" for number in range((MAX_PAYLOAD_BYTES + 100) // 16 + 1))
    just = "j" * MAX_PAYLOAD_BYTES
    rows = records("a", just, large, "b", large * 4, keys=[None, "just", "large", None, "k" * 2_049])
    async with sink_of(server, queue_name) as sink:
        dead = await sink.write("p", 1, rows)
        assert dead is not None
        assert (dead.count, dead.queue, dead.position) == (2, dead_queue, f"at-{large[:20]}")
        # Said again, it is told again, and adds nothing.
        again = await sink.write("p", 1, rows)
        assert again is not None
        assert replace(again, at=dead.at) == dead
        assert await sink.write("p", 2, records("c")) is None
        with pytest.raises(StaleBatchError):
            await sink.write("p", 1, rows)
    assert texts(server, queue_name) == ["a", just, "b", "c"]
    letters = items(server, dead_queue)
    assert [each["headers"]["sluiceway-part"] for each in letters] == ["1/2", "2/2", *(f"{part}/5" for part in range(1, 6))]
    assert [each.get("reference") for each in letters] == ["large"] * 2 + [None] * 5
    for whole, parts in ((large, letters[:2]), (large * 4, letters[2:])):
        assert "".join(text_of(each) for each in parts) == whole
        for each in parts:
            assert each["kind"] == "insert"
            about = each["headers"]
            assert about["sluiceway-sha256"] == hashlib.sha256(whole.encode()).hexdigest()
            assert (about["sluiceway-queue"], about["sluiceway-capture"], about["sluiceway-partition"]) == (queue_name, "orders", "p")
            assert about["sluiceway-bytes"] == str(len(whole))
            assert about["sluiceway-reason"] == f"the record has {len(whole):,} bytes, an item at most 8,388,608"


@driven
async def test_what_is_too_large_waits_for_a_dead_queue_by_name(server: Running) -> None:
    queue_name = server.queue()
    rows = records("a", "x" * (MAX_PAYLOAD_BYTES + 1))
    async with sink_of(server, queue_name) as sink:
        with pytest.raises(SluicewayError, match=r"has 8,388,609 bytes, .* sluiceway queue update queue-\d+ --dead-queue NAME") as refused:
            await sink.write("p", 1, rows)
        assert not refused.value.retryable
        server.ask("queues.update", queue_name=queue_name, dead_queue=server.queue())
        assert await sink.write("p", 1, rows) is not None
    assert texts(server, queue_name) == ["a"]


@driven
async def test_chunks_that_were_written_before_there_were_dead_letters_are_the_same(server: Running) -> None:
    queue_name = server.queue(dead_queue=server.queue())
    rows = records("a", "x" * (20 << 20), "b")
    async with sink_of(server, queue_name) as sink:
        first = to_items(rows.slice(0, 1))
        group = group_of("orders", "p")
        await sink._client.produce_arrow(queue_name, first, idempotency_key="1/0", idempotency_group=group, idempotency_sequence=1)
        await sink.write("p", 1, rows)
    assert texts(server, queue_name) == ["a", "b"]


@driven
async def test_a_batch_before_the_last_is_refused_and_adds_nothing(server: Running) -> None:
    queue_name = server.queue()
    async with sink_of(server, queue_name) as sink:
        await sink.write("p", 4, records("old"))
        await sink.write("p", 5, records("new"))
        with pytest.raises(StaleBatchError, match="chunk 0 of batch 4 of partition p"):
            await sink.write("p", 4, records("old"))
        with pytest.raises(StaleBatchError):
            await sink.write("p", 3, records("older"))
        # Others have batches of their own.
        await sink.write("q", 1, records("other"))
    assert texts(server, queue_name) == ["old", "new", "other"]


@driven
async def test_other_records_under_the_same_number_are_loud(server: Running) -> None:
    queue_name = server.queue()
    async with sink_of(server, queue_name) as sink:
        await sink.write("p", 1, records("a"))
        with pytest.raises(SluicewayError, match=r"chunk 0 of batch 1 of partition p is in queue .* did not repeat the same") as refused:
            await sink.write("p", 1, records("b"))
    assert refused.value.code == "key_conflict"
    assert not refused.value.retryable
    assert texts(server, queue_name) == ["a"]


@driven
async def test_chunks_are_cut_by_rows_and_by_bytes_and_the_same_each_time(server: Running) -> None:
    queue_name = server.queue()
    rows = records(*(f"{number:04}" * 25 for number in range(300)))
    async with sink_of(server, queue_name, chunk_items=1_000, chunk_bytes=1_000) as sink:
        await sink.write("p", 1, rows)
        # A slice has its own offsets in the same buffers.
        await sink.write("p", 1, pa.concat_batches([records("x"), rows]).slice(1))
    assert texts(server, queue_name) == [f"{number:04}" * 25 for number in range(300)]


@driven
async def test_a_batch_of_too_many_chunks_is_refused_whole(server: Running) -> None:
    queue_name = server.queue()
    async with sink_of(server, queue_name, chunk_items=1) as sink:
        with pytest.raises(SluicewayError, match="1,001 chunks; at most 1,000"):
            await sink.write("p", 1, records(*("x" for _ in range(1_001))))
        await sink.write("p", 1, records(*("x" for _ in range(100))))
    assert len(items(server, queue_name)) == 100


@driven
async def test_a_partition_with_a_long_name_has_a_group_of_its_own(server: Running) -> None:
    long, other = "p" * 1_000, "p" * 999 + "q"
    name = "n" * 100
    assert group_of("orders", "p") == "capture/orders/p"
    assert group_of(name, long) != group_of(name, other)
    queue_name = server.queue()
    async with sink_of(server, queue_name, name) as sink:
        await sink.write(long, 2, records("a"))
        await sink.write(other, 1, records("b"))
        with pytest.raises(StaleBatchError):
            await sink.write(long, 1, records("c"))
    assert texts(server, queue_name) == ["a", "b"]


@driven
async def test_a_server_that_is_away_is_no_end(tmp_path: Path) -> None:
    with running(tmp_path / "data") as away:
        queue_name = away.queue()
        url = away.url
    async with AsyncClient(url, retry_for="100ms") as client:
        with pytest.raises(BrokenOffError, match="chunk 0 of batch 1 of partition p could not be written"):
            await QueueSink(client, "orders", queue_name).write("p", 1, records("a"))


@driven
async def test_a_refusal_that_does_not_pass_is_told_as_it_is(server: Running) -> None:
    async with sink_of(server, "missing") as sink:
        with pytest.raises(SluicewayError) as refused:
            await sink.write("p", 1, records("a"))
    assert refused.value.code == "queue_not_found"
    assert "sluiceway queue create" in refused.value.detail
    assert "then continues by itself" in refused.value.detail
