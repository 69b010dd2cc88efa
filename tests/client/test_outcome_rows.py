"""Outcomes of leased items as rows: what is refused before a call, and what the server makes of the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from sluiceway import testing
from sluiceway.client import Client, SluicewayError
from sluiceway.client.arrow import ROWS, LeasedTable
from sluiceway.client.outcome_rows import outcome_bodies, outcome_table
from tests.client.test_consumer import AsyncFace, SyncFace, total
from tests.server.server_running import eventually

_numbers = itertools.count()
A = "k7f3q2ma.0.1"


@pytest.fixture(scope="module")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


@pytest.fixture
def queue(served: testing.TestServer) -> str:
    name = f"q-{next(_numbers)}"
    served.client.create_queue(f"{name}.dead")
    served.client.create_queue(name, dead_queue=f"{name}.dead", requested_partitions=3)
    return name


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([{"id": A}], "rows"),
        ({"id": [A], "outcome": ["done"], "outcomes": ["x"]}, "outcomes"),
        ({"id": [A]}, "outcome"),
        ({"outcome": ["done"]}, "id"),
        ({"partition": [0], "outcome": ["done"]}, "id"),
        ({"id": [None], "outcome": ["done"]}, "id"),
        ({"id": [7], "outcome": ["done"]}, "id"),
        ({"partition": ["0"], "offset": [1], "outcome": ["done"]}, "partition"),
        ({"partition": [1 << 40], "offset": [1], "outcome": ["done"]}, "partition"),
        ({"id": [A], "outcome": ["finished"]}, "outcome"),
        ({"id": [A], "outcome": [None]}, "outcome"),
        ({"id": [A], "outcome": ["done"], "retry_after_ms": [1]}, "retry_after_ms"),
        ({"id": [A], "outcome": ["retry"], "retry_after_ms": [-1]}, "retry_after_ms"),
        ({"id": [A], "outcome": ["retry"], "retry_after_ms": [1.5]}, "retry_after_ms"),
        ({"id": [A], "outcome": ["dead"], "reason": ["x" * 2_049]}, "reason"),
        ({"id": [A], "outcome": ["dead"], "reason": [7]}, "reason"),
    ],
)
def test_what_is_no_outcome_is_refused_by_the_name_of_its_column(rows: Any, field: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        outcome_table(rows)
    assert (refused.value.code, refused.value.field) == ("invalid_request", field)


def unchecked(*values: bytes) -> pa.Array:
    """A column of text that may be any bytes, as Spark casts binary ones."""
    made = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.utf8(), len(made), made.buffers())


def test_a_reason_of_bytes_that_are_no_text_is_told() -> None:
    """The server takes a body with it for a damaged stream, which names no item, and a query that repeats its batch never goes on."""
    rows = {"id": [A, f"{A}7"], "outcome": ["dead", "dead"], "reason": unchecked(b"good", b"not a number: \xff")}
    with pytest.raises(SluicewayError, match=rf"'not a number: \ufffd' of item {A}7 is not UTF-8") as refused:
        outcome_table(rows)
    assert refused.value.field == "reason"
    with pytest.raises(SluicewayError, match=r"'d\ufffd' of item .* is not an outcome"):
        outcome_table({"id": [A], "outcome": unchecked(b"d\xff")})


def test_an_id_that_is_none_is_refused() -> None:
    with pytest.raises(SluicewayError, match="'A-1' is not an item id"):
        list(outcome_bodies(outcome_table({"id": [A, "A-1"], "outcome": ["done", "done"]})))


def test_types_of_other_engines_are_taken() -> None:
    table = outcome_table(
        {
            "id": pa.array([A, A], pa.large_string()),
            "outcome": pa.array(["retry", "done"]).dictionary_encode(),
            "retry_after_ms": pa.array([1_000.0, None]),
            "reason": pa.nulls(2),
        }
    )
    assert table.schema.types == [pa.utf8(), pa.utf8(), pa.int64(), pa.utf8()]
    assert table["retry_after_ms"].to_pylist() == [1_000, None]


def test_ids_of_several_incarnations_go_into_bodies_of_their_own() -> None:
    ids = [f"{'ab'[number % 2] * 8}.{number % 3}.{number}" for number in range(25_000)]
    bodies = list(outcome_bodies(outcome_table({"id": ids, "outcome": ["done"] * len(ids)})))
    sizes = [(body.incarnation, sorted(body.partitions), len(pa.ipc.open_stream(body.stream).read_all())) for body in bodies]
    assert sizes == [(name * 8, [0, 1, 2], size) for name in "ab" for size in (10_000, 2_500)]


@pytest.mark.parametrize("by", ["id", "position"])
def test_outcomes_of_more_rows_than_a_call_takes(served: testing.TestServer, queue: str, by: str) -> None:
    client = served.client
    for _ in range(3):
        client.produce_arrow(queue, pa.table({"payload": [b"x"] * 5_000}))
    leased: list[LeasedTable] = []
    while len(found := client.lease_arrow(queue, batch_size=10_000, max_partitions=3)):
        leased.append(found)
    rows = pa.concat_tables([each.rows() for each in leased])
    outcome = ["dead", "retry", "done"] * 5_000
    named = rows.select(["id"] if by == "id" else ["partition", "offset", "attempts"]).append_column("outcome", pa.array(outcome))
    after = pa.array([60_000 if each == "retry" else None for each in outcome])
    staged = client.settle_arrow(queue, named.append_column("retry_after_ms", after))
    assert (staged.staged, staged.ignored) == (15_000, [])
    assert total(client, queue, "total_leased") == 15_000
    client.complete(queue, lease_ids=[lease_id for each in leased for lease_id in each.lease_ids])
    eventually(lambda: [total(client, queue, name) for name in ("completed", "dead", "scheduled")] == [5_000, 5_000, 5_000])


def test_rows_have_the_same_columns_whatever_their_items_have(served: testing.TestServer, queue: str) -> None:
    client = served.client
    client.produce(queue, ["plain"])
    client.produce_arrow(queue, pa.table({"payload": [b"rich"], "kind": ["k"], "priority": [7], "key": ["c"], "reference": ["r"]}))
    plain, rich = sorted((client.lease_arrow(queue, batch_size=1).rows() for _ in range(2)), key=lambda rows: rows["payload"][0].as_py())
    assert plain.schema == rich.schema == ROWS
    assert [plain[name][0].as_py() for name in ("payload", "queue", "attempts", "kind", "headers")] == [b"plain", queue, 1, None, None]
    assert [rich[name][0].as_py() for name in ("payload", "kind", "priority", "key", "reference")] == [b"rich", "k", 7, "c", "r"]
    (item_id,), (lease_id,) = rich["id"].to_pylist(), rich["lease_id"].to_pylist()
    assert rich["origin"].to_pylist() == [item_id]
    assert client.complete(queue, [item_id]).completed == 1
    client.release(queue, lease_ids=plain["lease_id"].to_pylist())
    (again,) = client.lease_arrow(queue).rows().to_pylist()
    assert (again["origin"], again["id"] != again["origin"]) == (plain["origin"][0].as_py(), True)
    assert client.explain(queue, item_id).state == "gone"
    assert lease_id.split(".")[2].startswith("L")


def test_a_lease_without_payloads_is_read_later(served: testing.TestServer, queue: str) -> None:
    client: Client = served.client
    client.produce(queue, ["a", "b"])
    leased = client.lease(queue, batch_size=10, payload=False)
    assert ([lease.count for lease in leased.leases], leased.items) == ([2], [])
    assert client.peek_arrow(queue, leased.lease_ids[0]).rows()["payload"].to_pylist() == [b"a", b"b"]


@pytest.mark.parametrize("face", [SyncFace, AsyncFace])
def test_a_handler_of_tables_returns_rows_of_outcomes(face: Any, served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, [str(number) for number in range(6)])
    consumer = face(served.url, queue)

    def handle(leased: LeasedTable) -> object:
        consumer.stop()
        outcome = pa.array(["done", "dead", "retry"] * 2)
        return leased.table.select(["partition", "offset"]).append_column("outcome", outcome)

    consumer.run_tables(handle)
    eventually(lambda: [total(served.client, queue, name) for name in ("completed", "dead", "ready")] == [2, 2, 2])


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"id": ["aaaaaaaa.0.1"], "outcome": ["dead"]}, "a handler returns outcomes of its items, not of 'aaaaaaaa.0.1'"),
        ({"id": ["aaaaaaaa.0.1"], "result": ["dead"]}, "not a column of an outcome"),
    ],
)
def test_rows_that_are_no_outcomes_of_a_table_put_it_back(
    served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture, returned: dict[str, list[str]], said: str
) -> None:
    served.client.produce(queue, ["x", "x"])
    consumer = served.client.consumer(queue)

    def handle(leased: LeasedTable) -> object:
        consumer.stop()
        return pa.table(returned)

    consumer.run_tables(handle)
    assert [total(served.client, queue, name) for name in ("completed", "retried")] == [0, 2]
    assert said in caplog.text
