"""Polars, DuckDB, pandas and Daft read leases as Arrow streams, and say how each item ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pytest

from sluiceway import testing
from sluiceway.client import Client
from sluiceway.client.arrow import ROWS, LeasedTable
from sluiceway.client.lease_stream import LeaseStream
from tests.client.test_consumer import total
from tests.engines.engine_imports import engine
from tests.server.server_running import eventually

ITEMS = 900
SHOPS = ("north", "south", "west")


def fill(client: Client, queue: str) -> None:
    """Sales in three shops, some without an amount, in three calls. Only a third of them has a kind and headers."""
    sales = [{"shop": SHOPS[number % 3], "amount": None if number % 10 == 0 else number} for number in range(ITEMS)]
    payload = [json.dumps(sale).encode() for sale in sales]
    third = ITEMS // 3
    client.produce_arrow(queue, pa.table({"payload": payload[:third]}))
    client.produce_arrow(queue, pa.table({"payload": payload[third : 2 * third], "kind": ["web"] * third}))
    headers = pa.array([[("source", "till")]] * third, pa.map_(pa.utf8(), pa.utf8()))
    client.produce_arrow(queue, pa.table({"payload": payload[2 * third :], "headers": headers, "key": ["k"] * third}))


def expected() -> dict[str, int]:
    totals = Counter[str]()
    for number in range(ITEMS):
        totals[SHOPS[number % 3]] += 0 if number % 10 == 0 else number
    return dict(totals)


def check(client: Client, queue: str) -> None:
    """All are done but those without an amount, which are dead."""
    names = ("completed", "dead", "total_leased", "ready")
    eventually(lambda: [total(client, queue, name) for name in names] == [ITEMS - ITEMS // 10, ITEMS // 10, 0, 0])


SALE = polars.Struct({"shop": polars.String, "amount": polars.Int64})


def test_polars(served: testing.TestServer, queue: str) -> None:
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS, batch_size=200) as stream:
        frame = polars.DataFrame(stream)
        assert frame.columns == ROWS.names
        sales = frame.with_columns(polars.col("payload").cast(polars.String).str.json_decode(SALE)).unnest("payload")
        totals = sales.group_by("shop").agg(polars.col("amount").sum())
        assert dict(totals.iter_rows()) == expected()
        stream.settle(sales.filter(polars.col("amount").is_null()).select("id", outcome=polars.lit("dead"), reason=polars.lit("no amount")))
    check(served.client, queue)


def test_polars_with_categories_and_whole_frames(served: testing.TestServer, queue: str) -> None:
    """The item's other columns may stay, and an outcome may be a category."""
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS) as stream:
        frame = polars.DataFrame(stream)
        bad = frame["payload"].cast(polars.String).str.contains('"amount": null')
        outcome = polars.when(bad).then(polars.lit("dead")).otherwise(polars.lit("done")).cast(polars.Categorical)
        stream.settle(frame.with_columns(outcome=outcome))
    check(served.client, queue)


def test_a_leased_table_is_a_frame(served: testing.TestServer, queue: str) -> None:
    fill(served.client, queue)
    leased = served.client.lease_arrow(queue, batch_size=100)
    assert len(polars.DataFrame(leased)) == len(polars.DataFrame(leased.rows())) == 100
    outcomes = polars.DataFrame(leased.rows()).select("id", outcome=polars.lit("retry"), retry_after_ms=polars.lit(60_000))
    assert served.client.settle_arrow(queue, outcomes).staged == 100
    served.client.complete(queue, lease_ids=leased.lease_ids)
    assert total(served.client, queue, "scheduled") == 100


@pytest.mark.parametrize("lazy", [False, True])
def test_a_handler_of_tables_returns_a_frame(served: testing.TestServer, queue: str, caplog: pytest.LogCaptureFixture, lazy: bool) -> None:
    """A frame that was not computed is no outcome: the items are put back, and not completed."""
    served.client.produce(queue, ["good", "bad", "good"])
    consumer = served.client.consumer(queue)

    def handle(leased: LeasedTable) -> object:
        consumer.stop()
        bad = polars.LazyFrame(polars.DataFrame(leased.rows())).filter(polars.col("payload") == b"bad")
        outcomes = bad.select("id", outcome=polars.lit("dead"), reason=polars.lit("bad"))
        return outcomes if lazy else outcomes.collect()

    consumer.run_tables(handle)
    names = ("completed", "dead", "retried")
    eventually(lambda: [total(served.client, queue, name) for name in names] == ([0, 0, 3] if lazy else [2, 1, 0]))
    assert ("returned a LazyFrame, which was not computed" in caplog.text) == lazy


def test_duckdb(served: testing.TestServer, queue: str) -> None:
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS, batch_size=200) as stream, duckdb.connect() as database:
        database.register("waiting", stream.reader())
        database.sql("CREATE TABLE sales AS SELECT id, decode(payload)::JSON AS sale FROM waiting")
        totals = database.sql("SELECT sale->>'shop', sum((sale->>'amount')::INT) FROM sales GROUP BY 1").fetchall()
        assert {shop: int(amount) for shop, amount in totals} == expected()
        bad = database.sql("SELECT id, 'dead' AS outcome, 'no amount' AS reason FROM sales WHERE sale->>'amount' IS NULL")
        stream.settle(bad)
    check(served.client, queue)


def test_duckdb_finds_a_stream_by_the_name_of_its_variable(served: testing.TestServer, queue: str) -> None:
    """A query reads it twice, for instance to join it with itself."""
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS, batch_size=200) as waiting, duckdb.connect() as database:
        assert waiting.count == 0
        both = database.sql("SELECT count(*), count(DISTINCT a.id) FROM waiting a JOIN waiting b ON a.id = b.id").fetchall()
        assert both == [(ITEMS, ITEMS)]
        assert waiting.count == ITEMS
    assert total(served.client, queue, "completed") == ITEMS


def test_pandas(served: testing.TestServer, queue: str) -> None:
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS, batch_size=200) as stream:
        frame = stream.reader().read_pandas()
        sales = frame[["id"]].join(pandas.DataFrame([json.loads(payload) for payload in frame["payload"]]))
        totals = sales.groupby("shop")["amount"].sum()
        assert {shop: int(amount) for shop, amount in totals.items()} == expected()
        outcomes = pandas.DataFrame({"id": sales["id"], "outcome": sales["amount"].isna().map({True: "dead", False: "done"})})
        stream.settle(outcomes)
    check(served.client, queue)


def test_whole_numbers_of_pandas_with_gaps(served: testing.TestServer, queue: str) -> None:
    served.client.produce(queue, ["a", "b"])
    with LeaseStream(served.client, queue) as stream:
        ids = stream.reader().read_pandas()["id"]
        stream.settle(pandas.DataFrame({"id": ids, "outcome": ["retry", "done"], "retry_after_ms": [60_000, None]}))
    assert [total(served.client, queue, name) for name in ("completed", "scheduled")] == [1, 1]


def test_daft(served: testing.TestServer, queue: str) -> None:
    daft: Any = engine("daft")
    fill(served.client, queue)
    with LeaseStream(served.client, queue, max_items=ITEMS, batch_size=200) as stream:
        frame = daft.from_arrow(stream.reader())
        assert frame.column_names == ROWS.names
        text = frame["payload"].cast(daft.DataType.string())
        sales = frame.select("id", text.alias("sale")).collect()
        found = [json.loads(sale) for sale in sales.to_pydict()["sale"]]
        totals = Counter[str]()
        for sale in found:
            totals[sale["shop"]] += sale["amount"] or 0
        assert dict(totals) == expected()
        bad = sales.where(sales["sale"].contains('"amount": null'))
        stream.settle(bad.select("id", daft.lit("dead").alias("outcome")).to_arrow())
    check(served.client, queue)


def polars_fails(client: Client, queue: str) -> None:
    with LeaseStream(client, queue) as stream:
        polars.DataFrame(stream).select("absent")


def duckdb_fails(client: Client, queue: str) -> None:
    with LeaseStream(client, queue) as stream, duckdb.connect() as database:
        database.register("stream", stream.reader())
        database.sql("SELECT sum(decode(payload)::INT) FROM stream").fetchall()


@pytest.mark.parametrize("work", [polars_fails, duckdb_fails])
def test_an_error_of_an_engine_puts_everything_back(served: testing.TestServer, queue: str, work: Callable[[Client, str], None]) -> None:
    fill(served.client, queue)
    with pytest.raises((polars.exceptions.PolarsError, duckdb.Error)):
        work(served.client, queue)
    assert [total(served.client, queue, name) for name in ("completed", "total_leased", "ready")] == [0, 0, ITEMS]
