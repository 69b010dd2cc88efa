"""Both clients against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from sluiceway.client import CallError, Client, Item, LeasedItem, QueueStats, Retry, Verdict
from tests.client.client_faces import Blocking
from tests.server.server_process import PATIENCE, ServerProcess, wait_until


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess(tmp_path_factory.mktemp("client") / "data") as server:
        yield server.url


@pytest.fixture(params=[Client, Blocking], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Client]:
    with request.param(url) as made:
        yield made


@pytest.fixture
def queue(client: Client, request: pytest.FixtureRequest) -> str:
    """A queue of the test's own, with a dead queue beside it."""
    name = "".join(char if char.isalnum() else "-" for char in request.node.name)
    client.create_queue(f"{name}.dead")
    client.create_queue(name, requested_partitions=2, dead_queue=f"{name}.dead", reference="ours")
    return name


def total(stats: QueueStats, name: str) -> int:
    return sum(getattr(part, name) for part in stats.partitions)


def test_the_life_of_a_queue(client: Client, queue: str) -> None:
    info = client.queue_info(queue)
    assert (info.queue_name, len(info.partitions), info.dead_queue, info.reference) == (queue, 2, f"{queue}.dead", "ours")
    assert abs(datetime.now(UTC) - info.created_at) < timedelta(minutes=5)
    with pytest.raises(CallError) as raised:
        client.create_queue(queue)
    assert (raised.value.code, raised.value.field, bool(raised.value.request_id)) == ("queue_exists", "queue_name", True)

    names, pivot, pages = [], None, 0
    while pages == 0 or pivot is not None:
        page = client.list_queues(pivot=pivot, limit=1)
        names += [each.queue_name for each in page.items]
        pivot, pages = page.next, pages + 1
    assert {queue, f"{queue}.dead"} <= set(names)
    assert names == sorted(names)

    client.produce(queue, ["x"])
    with pytest.raises(CallError, match="item") as raised:
        client.delete_queue(queue)
    assert raised.value.code == "queue_not_empty"
    client.delete_queue(queue, force=True)
    with pytest.raises(CallError) as raised:
        client.stats(queue)
    assert raised.value.code == "queue_not_found"


def test_an_item_comes_back_as_it_was_produced(client: Client, queue: str) -> None:
    items: list[Item | str | bytes] = [
        Item(b"\x00\xff", kind="k", encoding="e", reference="r", key="customer-7", priority=0, headers={"a": "b"}),
        "text",
        b"bytes",
    ]
    produced = client.produce(queue, items)
    (first, second, third) = leased = client.lease(queue, batch_size=10, lease_timeout=timedelta(minutes=5))
    assert [item.payload for item in leased] == [b"\x00\xff", b"text", b"bytes"]
    assert (first.kind, first.encoding, first.reference, first.headers) == ("k", "e", "r", {"a": "b"})
    assert (second.kind, second.headers or {}) == (None, {})
    assert [item.key for item in leased] == ["customer-7", None, None]
    assert [item.priority for item in leased] == [0, None, None]
    assert leased.ids == [item.origin for item in leased] == produced.ids
    assert [third.attempts, third.partition, third.lease_id] == [1, leased.partition, leased.lease_ids[0]]
    assert leased.leases[0].lease_deadline - datetime.now(UTC) > timedelta(minutes=4)


def test_items_whose_unique_keys_are_taken_are_told(client: Client, queue: str) -> None:
    client.update_queue(queue, unique="until_settled")
    first = client.produce(queue, [Item("1", unique_key="a"), Item("2"), Item("3", unique_key="a")])
    assert (first.count, first.stored, first.duplicates) == (3, 2, [2])
    assert first.ids[2] == first.ids[0]
    again = client.produce_arrow(queue, pa.table({"payload": ["4", "5"], "unique_key": ["b", "a"]}))
    assert (again.duplicates, again.ids[1]) == ([1], first.ids[0])
    found = {item.id: (item.payload, item.unique_key) for item in client.search(queue)}
    assert found == {first.ids[0]: (b"1", "a"), first.ids[1]: (b"2", None), again.ids[0]: (b"4", "b")}


def test_complete_retry_extend_and_their_repetitions(client: Client, queue: str) -> None:
    client.produce(queue, [str(n) for n in range(6)])
    leased = client.lease(queue, batch_size=6)
    ids = leased.ids
    assert client.complete(queue, ids[:2]).completed == 2
    again = client.complete(queue, ids[:3])
    assert (again.completed, [(each.id, each.reason) for each in again.ignored]) == (1, [(ids[0], "completed"), (ids[1], "completed")])

    put_back = client.retry(queue, [ids[3], Retry(ids[4], retry_after="1h"), Retry(ids[5], dead=True, reason="bad")])
    assert (put_back.retried, put_back.dead) == (2, 1)
    assert [each.reason for each in client.retry(queue, [ids[3]]).ignored] == ["retried"]
    (retried,) = client.lease(queue, batch_size=6)
    assert (retried.origin, retried.attempts, retried.id != ids[3]) == (ids[3], 2, True)
    dead = client.lease(f"{queue}.dead", request_timeout="2m").items[0]
    assert (dead.payload, dead.origin, (dead.headers or {})["sluiceway-reason"]) == (b"5", ids[5], "bad")

    assert retried.lease_id is not None
    extended = client.extend(queue, [retried.lease_id, leased.lease_ids[0]], lease_timeout="1h")
    assert [lease.lease_id for lease in extended.leases] == [retried.lease_id]
    assert [each.id for each in extended.ignored] == leased.lease_ids
    assert client.complete(queue, lease_ids=[retried.lease_id]).completed == 1
    stats = client.stats(queue)
    assert [total(stats, name) for name in ("produced", "completed", "dead", "scheduled", "ready", "total_leased")] == [6, 4, 1, 1, 0, 0]


def test_staged_verdicts_take_effect_with_the_lease(client: Client, queue: str) -> None:
    client.produce(queue, ["a", "b", "c"])
    leased = client.lease(queue, batch_size=3)
    (lease_id,) = leased.lease_ids
    staged = client.settle(queue, [Verdict(leased.ids[0], "retry"), Verdict(leased.ids[1], "dead", reason="no")])
    assert (staged.staged, staged.ignored) == (2, [])
    assert [item.payload for item in client.peek(queue, lease_id=lease_id, start=1)] == [b"b", b"c"]
    client.complete(queue, lease_ids=[lease_id])
    assert [item.payload for item in client.peek(queue)] == [b"a"]
    with pytest.raises(CallError) as raised:
        client.peek(queue, lease_id=lease_id)
    assert raised.value.code == "lease_not_found"


def test_keys_make_produce_and_lease_repeatable(client: Client, queue: str) -> None:
    first, again = (client.produce(queue, ["x", "y"], idempotency_key="k") for _ in range(2))
    assert (first.deduplicated, again.deduplicated, first.ids) == (False, True, again.ids)
    with pytest.raises(CallError) as raised:
        client.produce(queue, ["z"], idempotency_key="k")
    assert raised.value.code == "key_conflict"
    taken, retaken = (client.lease(queue, lease_key="l") for _ in range(2))
    assert taken.ids == retaken.ids
    assert total(client.stats(queue), "ready") == 1
    client.produce(queue, ["1"], idempotency_key="1", idempotency_group="g", idempotency_sequence=5)
    with pytest.raises(CallError) as raised:
        client.produce(queue, ["0"], idempotency_key="0", idempotency_group="g", idempotency_sequence=4)
    assert raised.value.code == "stale_sequence"


def test_bulk_as_arrow(client: Client, queue: str) -> None:
    payload = pa.array([b"%d" % n for n in range(10_000)], pa.binary())
    rows = pa.table({"payload": payload, "kind": pa.array(["k"] * 10_000)})
    produced = client.produce_arrow(queue, rows)
    assert produced.count == 10_000
    leased = client.lease_arrow(queue, batch_size=10_000)
    assert leased.table["payload"].combine_chunks().equals(payload)
    assert leased.ids().to_pylist() == produced.ids
    assert client.complete(queue, leased.ids().to_pylist()[:5]).completed == 5
    assert client.complete(queue, lease_ids=leased.lease_ids).completed == 9_995
    assert len(client.lease_arrow(queue)) == 0
    with pytest.raises(CallError, match="payload"):
        client.produce_arrow(queue, pa.table({"value": payload}))


def test_a_waiting_lease_gets_what_is_produced_meanwhile(client: Client, url: str, queue: str) -> None:
    def consume() -> list[bytes]:
        with Client(url) as consumer:
            return [item.payload for item in consumer.lease(queue, request_timeout="15m")]

    with ThreadPoolExecutor() as threads:
        consumed = threads.submit(consume)
        wait_until(lambda: client.stats(queue).logical_queues[0].lease_waiting == 1, "the consumer's wait")
        client.produce(queue, ["at last"])
        assert consumed.result(PATIENCE) == [b"at last"]


def test_items_of_the_future_wait(client: Client, queue: str) -> None:
    client.produce(queue, [Item("later", enqueue_at=datetime.now(UTC) + timedelta(hours=1))])
    assert total(client.stats(queue), "scheduled") == 1
    assert client.lease(queue, request_timeout="50ms").items == []


@pytest.mark.crash
@pytest.mark.slow
def test_a_produce_outlives_a_killed_server(tmp_path: Path) -> None:
    calls, acknowledged = 400, list[str]()

    def produce(url: str) -> None:
        with Client(url, retry_for="10m") as client:
            for n in range(calls):
                acknowledged.extend(client.produce("q", [f"{n}/{part}" for part in range(10)]).ids)

    def acknowledge(count: int) -> None:
        wait_until(lambda: len(acknowledged) >= count, f"acknowledgement {count}")

    with ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "data"))
        client = stack.enter_context(Client(server.url))
        threads = stack.enter_context(ThreadPoolExecutor())
        client.create_queue("q", requested_partitions=2)
        producers = [threads.submit(produce, server.url) for _ in range(2)]
        for enough in (1_000, 4_000):
            acknowledge(enough)
            server.kill()
            server = stack.enter_context(ServerProcess(tmp_path / "data", server.address))
        for producer in producers:
            producer.result(PATIENCE)
        stored: list[LeasedItem] = []
        while leased := client.lease("q", batch_size=1_000).items:
            stored += leased
    assert len(acknowledged) == len(set(acknowledged)) == 2 * 10 * calls
    assert {item.id for item in stored} == set(acknowledged)
    payloads = [f"{n}/{part}".encode() for n in range(calls) for part in range(10)]
    assert sorted(item.payload for item in stored) == sorted(payloads * 2)
