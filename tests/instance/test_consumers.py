"""Who consumes a queue: what leases say of it, what queries tell of themselves, and how instances put it together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sluiceway.cli.common import wide_console
from sluiceway.cli.consumers import ConsumerRow, consumer_table, queues_of, rows_of
from sluiceway.client import AsyncClient, Client
from sluiceway.contract.consumer_answers import QueryState
from sluiceway.core.partition import lease_table
from sluiceway.core.partition.records import LeaseState
from sluiceway.core.queue.consumer_activity import FAILED_FOR, SEEN_FOR, ConsumerBook, Tally, merge, shown
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_CONSUMERS, MAX_CONSUMERS_SHOWN, MAX_QUERIES, MAX_TEXT_BYTES
from sluiceway.model.consumers import Consumer, Consumers, Query
from sluiceway.model.peers import ListConsumers
from sluiceway.model.requests import Lease, QueueSpec
from sluiceway.wire.json_consumers import MAX_QUEUES, page
from tests.cluster.cluster_rig import cluster, put, shares
from tests.instance.instance_rig import PATIENCE, serving
from tests.server.server_guarded import Guarded, guarded
from tests.server.server_running import eventually

NOW = 1_000_000


def query(id: str = "q", state: QueryState = "running", **fields: Any) -> Query:
    return Query(id, "run", "name", state, 7, 10, 1.5, 2.5, 300, "")._replace(**fields)


# ---- what one instance remembers --------------------------------------------------------------------------------------


def test_who_asked_is_remembered_for_a_minute_and_no_more_than_so_many() -> None:
    book = ConsumerBook()
    book.saw("a", NOW)
    book.saw("b", NOW + 1)
    book.saw("a", NOW + 2)
    assert book.seen(NOW + 2) == {"a": NOW + 2, "b": NOW + 1}
    assert book.seen(NOW + 2 + SEEN_FOR) == {"a": NOW + 2}
    for n in range(MAX_CONSUMERS):
        book.saw(f"c{n}", NOW + 3)
    assert len(book.seen(NOW + 3)) == MAX_CONSUMERS
    assert "a" not in book.seen(NOW + 3)
    book.saw("z", NOW + 4 + SEEN_FOR)
    assert list(book._seen) == ["z"]


def test_what_a_query_tells_replaces_what_it_told_and_is_forgotten() -> None:
    book = ConsumerBook()
    book.tell("a", query(batch=1), NOW)
    book.tell("a", query(batch=2), NOW + 1)
    book.tell("b", query(batch=3), NOW + 1)
    book.tell("b", query("failing", "failed"), NOW + 1)
    assert [(client_id, each.batch, each.told_at) for client_id, each in book.queries(NOW + 2)] == [
        *(("a", 2, NOW + 1), ("b", 3, NOW + 1), ("b", 7, NOW + 1))
    ]
    # That it failed is told for longer.
    assert [each.id for _, each in book.queries(NOW + 2 + SEEN_FOR)] == ["failing"]
    assert book.queries(NOW + 2 + FAILED_FOR) == []


def test_queries_beyond_the_limit_are_refused_and_those_that_are_there_go_on() -> None:
    book = ConsumerBook()
    for n in range(MAX_QUERIES):
        book.tell("a", query(str(n)), NOW)
    with pytest.raises(SluicewayError) as refused:
        book.tell("a", query("more"), NOW)
    assert refused.value.code == "too_many_requests"
    book.tell("a", query("0", batch=9), NOW)
    book.tell("a", query("more"), NOW + 1 + SEEN_FOR)


def test_leases_are_added_up_by_client() -> None:
    book = ConsumerBook()
    book.saw("idle", NOW)
    book.tell("a", query(), NOW)
    tally = Tally(book, ["idle", "idle", "new"], NOW)
    tally.add([LeaseState(1, [], 5, "a", NOW + 9), LeaseState(2, [], 3, "a", NOW + 4), LeaseState(3, [], 1, "b", None)])
    assert {each.client_id: each for each in tally.consumers()} == {
        "idle": Consumer("idle", waiting=2, seen_at=NOW),
        "new": Consumer("new", waiting=1),
        "a": Consumer("a", 2, 8, NOW + 4, queries=[query(told_at=NOW)]),
        "b": Consumer("b", 1, 1),
    }


def test_what_instances_know_is_put_together_and_the_later_word_of_a_query_counts() -> None:
    here = Consumers(5, 2, 1, [Consumer("a", 1, 2, NOW + 9, 0, NOW, [query(batch=1, told_at=NOW)]), Consumer("b", 1, 1)])
    there = Consumers(7, 3, 0, [Consumer("a", 2, 3, NOW + 3, 1, NOW + 5, [query(batch=2, told_at=NOW + 1)])], more=True)
    for both in ([here, there], [there, here]):
        found = merge(both)
        assert (found.ready, found.leased, found.scheduled, found.more) == (12, 5, 1, True)
        assert found.consumers == [
            *(Consumer("a", 3, 5, NOW + 3, 1, NOW + 5, [query(batch=2, told_at=NOW + 1)]), Consumer("b", 1, 1)),
        ]
    # What was put together stays as it was.
    assert here.consumers[0].leases == 1


def test_of_many_consumers_those_with_queries_and_most_items_are_shown() -> None:
    many = [Consumer(f"c{n:03}", 1, n) for n in range(MAX_CONSUMERS_SHOWN)]
    found = merge([Consumers(consumers=[*many, Consumer("query", queries=[query()])])])
    assert found.more
    assert len(found.consumers) == MAX_CONSUMERS_SHOWN
    assert {each.client_id for each in many} - {each.client_id for each in found.consumers} == {"c000"}
    assert shown(Consumers(), many, MAX_CONSUMERS).more is False


def test_the_largest_answer_is_of_some_megabytes() -> None:
    longest = "x" * MAX_TEXT_BYTES
    queries = [query(longest, name=longest, run_id=longest, error=longest) for _ in range(MAX_QUERIES)]
    consumers = [Consumer(longest, 1, n, NOW, 1, NOW) for n in range(MAX_CONSUMERS_SHOWN)]
    consumers[0].queries = queries
    found = Consumers(consumers=consumers)
    assert len(page([(f"q{n:0127}", found) for n in range(MAX_QUEUES)], None, ())) < 32_000_000


# ---- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("data")) as served:
        yield served


@pytest.fixture(scope="module")
def text(server: Guarded) -> str:
    return server.key("produce:*", "consume:*", "read:*", "manage:*")


@pytest.fixture(scope="module")
def client(server: Guarded, text: str) -> Iterator[Client]:
    with Client(server.url, api_key=text) as made:
        yield made


def as_client(server: Guarded, text: str, client_id: str) -> Client:
    return Client(server.url, api_key=text, client_id=client_id)


def report(server: Guarded, text: str, queue_name: str, **fields: object) -> Any:
    told = {"id": "id-1", "run_id": "run-1", "name": "bill", "state": "running", "batch": 3, "items": 10, "input_per_s": 1.5}
    told |= {"processed_per_s": 20.25, "batch_duration": "1500ms", **fields}
    body = {"queue_name": queue_name, "client_id": "billing", "query": told}
    return server.with_key(text).post("/v1/consumers.report", json=body)


def test_consumers_are_listed_with_their_leases_and_queries(server: Guarded, client: Client, text: str) -> None:
    for name in ("two", "two-idle"):
        client.create_queue(name, requested_partitions=2)
    client.produce("two", ["x"] * 30)
    held = as_client(server, text, "billing").lease("two", batch_size=10, lease_timeout="1h")
    as_client(server, text, "billing").lease("two", batch_size=5, lease_timeout="2h")
    other = as_client(server, text, "shipping").lease("two", batch_size=5, lease_timeout="1m")
    client.complete("two", [other.items[0].id])
    assert report(server, text, "two").json() == {}
    (found,) = client.list_consumers("two").items
    assert (found.queue_name, found.ready, found.leased, found.scheduled, found.more) == ("two", 10, 19, 0, False)
    billing, shipping = found.consumers
    assert (billing.client_id, billing.leases, billing.items, billing.waiting) == ("billing", 2, 15, 0)
    assert billing.lease_deadline == held.leases[0].lease_deadline
    assert billing.seen_at is not None
    assert (shipping.client_id, shipping.leases, shipping.items, shipping.queries) == ("shipping", 1, 4, [])
    (told,) = billing.queries
    assert (told.id, told.run_id, told.name, told.state, told.batch, told.items) == ("id-1", "run-1", "bill", "running", 3, 10)
    assert (told.input_per_s, told.processed_per_s, told.batch_duration, told.error) == (1.5, 20.25, "1s500ms", "")
    # Of the queues, those that have consumers; one that is named in any case.
    assert "two-idle" not in [each.queue_name for each in client.list_consumers().items]
    assert client.list_consumers("two-idle").items[0].consumers == []
    with pytest.raises(SluicewayError) as refused:
        client.list_consumers("none")
    assert refused.value.code == "queue_not_found"
    rows = rows_of(queues_of(client, "two"))
    assert rows[0] == ConsumerRow("two", "billing", "bill", "running", 3, 2, 15, 20.25, 10, f"{told.told_at:%H:%M:%S}")
    assert (rows[1].query, rows[1].state, rows[1].items_per_second) == ("", "", None)


def test_who_waits_is_a_consumer(server: Guarded, client: Client, text: str) -> None:
    client.create_queue("waited-for")

    def waits() -> bool:
        found = client.list_consumers("waited-for").items[0].consumers
        return [(each.client_id, each.waiting, each.leases) for each in found] == [("patient", 1, 0)]

    waiting = threading.Thread(target=lambda: as_client(server, text, "patient").lease("waited-for", request_timeout="1m"))
    waiting.start()
    eventually(waits)
    client.produce("waited-for", ["x"])
    waiting.join(PATIENCE)
    assert [(each.waiting, each.leases) for each in client.list_consumers("waited-for").items[0].consumers] == [(0, 1)]


def test_pages_go_by_queue_and_have_what_the_key_may_read(server: Guarded, client: Client, text: str) -> None:
    names = [f"paged-{n}" for n in range(3)]
    for name in names:
        client.create_queue(name)
        report(server, text, name)
    with Client(server.url, api_key=server.key("read:paged-*")) as reader:
        pages, pivot = [], None
        while True:
            page = reader.list_consumers(pivot=pivot, limit=2)
            pages.append([each.queue_name for each in page.items])
            pivot = page.next
            if pivot is None:
                break
        assert pages == [names[:2], names[2:]]
        assert [each.queue_name for each in queues_of(reader)] == names
    with Client(server.url, api_key=server.key("consume:*")) as nobody:
        assert nobody.list_consumers().items == []

    async def also() -> list[str]:
        async with AsyncClient(server.url, api_key=text) as with_asyncio:
            return [each.queue_name for each in (await with_asyncio.list_consumers("paged-0")).items]

    assert asyncio.run(also()) == ["paged-0"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"state": "asleep"}, "query.state"),
        ({"id": ""}, "query.id"),
        ({"error": "x" * 2_049}, "query.error"),
        ({"name": "é" * 1_025}, "query.name"),
        ({"items": -1}, "query.items"),
        ({"batch": -1}, "query.batch"),
        ({"processed_per_s": -0.1}, "query.processed_per_s"),
        ({"batch_duration": "-1s"}, "query.batch_duration"),
        ({"batch_duration": "400d"}, "query.batch_duration"),
        ({"lag": 1}, "query.lag"),
    ],
)
def test_what_a_query_may_not_tell(server: Guarded, client: Client, text: str, fields: dict[str, object], field: str) -> None:
    refused = report(server, text, "two", **fields)
    assert (refused.status_code, refused.json()["field"]) == (400, field)


def test_an_endless_rate_is_refused(server: Guarded, text: str) -> None:
    body = b'{"queue_name": "two", "client_id": "c", "query": {"id": "q", "state": "running", "input_per_s": 1e999}}'
    answer = server.with_key(text).post("/v1/consumers.report", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) in ((400, "invalid_request"), (400, "invalid_body"))


def test_metrics_have_consumers_and_queries_by_queue(server: Guarded, client: Client, text: str) -> None:
    client.create_queue("metered")
    as_client(server, text, "polls").lease("metered")
    report(server, text, "metered", id="a", batch_duration="2s")
    report(server, text, "metered", id="b", batch_duration="4s", processed_per_s=10)
    report(server, text, "metered", id="c", state="failed", batch_duration="9s", processed_per_s=99, error="boom")

    def has(*lines: str) -> bool:
        page = server.with_key(text).get("/metrics").text
        return all(f"{line}\n" in page for line in lines)

    eventually(
        lambda: has(
            'sluiceway_queue_consumers{queue="metered"} 1.0',
            'sluiceway_queue_queries{queue="metered",state="running"} 2.0',
            'sluiceway_queue_queries{queue="metered",state="failed"} 1.0',
            'sluiceway_queue_queries{queue="metered",state="stopped"} 0.0',
            'sluiceway_queue_query_items_per_second{queue="metered"} 30.25',
            'sluiceway_queue_query_batch_duration_seconds{queue="metered"} 4.0',
        )
    )


def test_the_table_escapes_what_clients_call_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ConsumerRow("q", "\x1b[31mred", "\x07", "running", 0, 1, 1_234, 0.0, 5, "12:00:00"),
        ConsumerRow("q", "c", "", "", None, 0, 0, None, 5, None),
    ]
    wide_console().print(consumer_table(rows))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["q", "\\x1b[31mred", "\\x07", "running", "0", "1", "1,234", "0", "5", "12:00:00"] in lines
    assert ["q", "c", "-", "-", "-", "0", "0", "-", "5", "-"] in lines


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def test_consumers_whose_leases_are_packed_are_counted_as_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_table, "UNPACKED_LEASES", 0)
    monkeypatch.setattr(lease_table, "PACKED_AT_ONCE", 2)

    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            record = await service.create_queue(QueueSpec("q", 1))
            await put(service, "q", 0, *"abcdefg")
            for client in "cdcdc":
                await service.lease("q", Lease(client, 1, 5_000))
            packed = [executor.partition.leases.packed for executor in service._drivers["q"].executors]
            assert sum(packed) >= 4
            found = (await service.consumers.list([record])).queues[record.incarnation]
            assert [(each.client_id, each.leases, each.items) for each in found.consumers] == [("c", 3, 3), ("d", 2, 2)]
            assert all(each.lease_deadline is not None for each in found.consumers)

    asyncio.run(scenario())


# ---- several instances ------------------------------------------------------------------------------------------------


def test_any_instance_tells_what_all_know_and_which_do_not_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, services):
            record = await services[0].create_queue(QueueSpec("q", 2))
            await until(lambda: all(shares(service, "q") for service in services))
            for number, service in enumerate(services):
                await put(service, "q", number, *"abcd")
                await service.lease("q", Lease("c", 3, 5_000, partition=number))
            services[1].consumers.tell(record, "c", query(batch=8))
            services[0].consumers.tell(record, "other", query("o"))
            for service in services:
                seen = await service.consumers.list([record])
                found = seen.queues[record.incarnation]
                assert (found.ready, found.leased, seen.silent) == (2, 6, ())
                assert [(each.client_id, each.leases, each.items) for each in found.consumers] == [("c", 2, 6), ("other", 0, 0)]
                assert [[each.batch for each in consumer.queries] for consumer in found.consumers] == [[8], [7]]
            rig.wires.asked.clear()
            await services[0].consumers.list([record, await services[0].create_queue(QueueSpec("r"))])
            assert len([asked for _, asked in rig.wires.asked if isinstance(asked, ListConsumers)]) == 1
            rig.wires.refuses.add("b")
            seen = await services[0].consumers.list([record])
            assert seen.silent == (services[1].ownership.name,)
            found = seen.queues[record.incarnation]
            assert [(each.client_id, each.leases, each.items) for each in found.consumers] == [("c", 1, 3), ("other", 0, 0)]
            rig.wires.refuses.clear()

    asyncio.run(scenario())
