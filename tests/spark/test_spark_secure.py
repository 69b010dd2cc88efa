"""Spark against a server with TLS that asks for API keys: it gets in, it says what is missing, and it shows the key nowhere."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from sluiceway.client._sync import channel
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.options import Server
from sluiceway.spark.server_calls import Client
from tests.server.server_guarded import Guarded, guarded
from tests.spark.spark_world import start_child

JOB = """
import sys
from pathlib import Path
from sluiceway.spark import session, settle

url, folder = sys.argv[1], Path(sys.argv[2])
spark = session("secure")
spark.sparkContext.setLogLevel("INFO")
rows = spark.range(0, 300, 1, 2).selectExpr("cast(id as string) as value")
rows.write.format("sluiceway").mode("append").options(url=url, queue="orders-1", chunkItems="50").save()

def work(batch, batch_id):
    judged = batch.selectExpr("id", "if(int(cast(payload as string)) % 10 = 0, 'dead', 'done') as outcome")
    settle(judged, url=url, queue="orders-1")

stream = spark.readStream.format("sluiceway").options(url=url, queue="orders-1", consumer="c").load()
query = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
query.awaitTermination()
query.explain(True)
print("processed", sum(each.numInputRows for each in query.recentProgress))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("secure") / "data", secure=True) as running:
        manager = running.client("manage:*")
        for name in ("orders-1", "orders-2", "orders-dead"):
            manager.post("/v1/queues.create", json={"queue_name": name}).raise_for_status()
        manager.post("/v1/queues.update", json={"queue_name": "orders-1", "dead_queue": "orders-dead"}).raise_for_status()
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "key"


def totals(served: Guarded, queue: str) -> dict[str, int]:
    stats = served.client("read:*").post("/v1/queue.stats", json={"queue_name": queue}).json()
    return {
        name: sum(partition[name] for logical in stats["logical_queues"] for partition in logical["partitions"])
        for name in ("produced", "completed", "dead", "leases", "total_leased")
    }


def connect(served: Guarded, api_key: str, ca_file: str | None = None) -> Client:
    return Client(Server(served.url, "orders-1", 60_000, api_key, served.ca_file if ca_file is None else ca_file))


def info(client: Client) -> SluicewayError | str:
    """The queue's name, or the refusal."""
    try:
        return str(client.call("/v1/queues.info", {"queue_name": "orders-1"})["queue_name"])
    except SluicewayError as error:
        return error
    finally:
        client.close()


# ---- the client -------------------------------------------------------------------------------------------------


def test_a_key_that_is_replaced_in_its_file_is_used_from_the_next_call_on(served: Guarded, key_file: Path) -> None:
    old = served.key("read:orders-*")
    key_file.write_text(f"{old}\n")
    client = connect(served, f"file:{key_file}")
    assert info(client) == "orders-1"
    key_file.write_text(served.key("read:orders-*"))
    served.admin.post("/v1/keys.revoke", json={"key_id": old.split("_")[1]}).raise_for_status()
    assert info(client) == "orders-1"
    key_file.write_text(old)
    refused = info(client)
    assert isinstance(refused, SluicewayError)
    assert refused.code == "unauthenticated"
    assert "option apiKey" in refused.detail


def test_the_environment_of_the_machine_is_the_default(served: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICEWAY_API_KEY", raising=False)
    monkeypatch.setenv("SLUICEWAY_CA_FILE", served.ca_file)
    refused = info(connect(served, "", ""))
    assert isinstance(refused, SluicewayError)
    assert (refused.code, "SLUICEWAY_API_KEY" in refused.detail) == ("unauthenticated", True)
    monkeypatch.setenv("SLUICEWAY_API_KEY", served.key("read:orders-*"))
    assert info(connect(served, "", "")) == "orders-1"
    monkeypatch.setenv("OTHER", served.key("produce:*"))
    forbidden = info(connect(served, "env:OTHER"))
    assert isinstance(forbidden, SluicewayError)
    assert forbidden.code == "forbidden"
    assert "the scope read:orders-1" in forbidden.detail
    assert "consume and read" in forbidden.detail


@pytest.mark.parametrize("api_key", ["env:NOT_SET_ANYWHERE", "file:/nowhere/key", "env:EVIL"])
def test_a_key_that_cannot_be_used_is_not_told(served: Guarded, api_key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVIL", "slw_k7f3q2ma_verysecret\r\nevil: 1")
    refused = info(connect(served, api_key))
    assert isinstance(refused, SluicewayError)
    assert refused.field == "apiKey"
    assert api_key.partition(":")[2] in refused.detail
    assert "verysecret" not in f"{refused} {refused!r}"


def test_a_refusal_is_heard_in_the_midst_of_a_large_body(served: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD", "slw_k7f3q2ma_verysecret")
    batch = pa.record_batch({"payload": pa.array([secrets.token_bytes(4 << 20)] * 4, pa.binary())})
    client = connect(served, "env:BAD")
    with pytest.raises(SluicewayError) as caught:
        client.send_arrow("/v1/queue.produce", {"queue_name": "orders-1"}, batch)
    assert caught.value.code == "unauthenticated"
    client.close()


def test_a_server_that_is_not_trusted_is_refused_at_once(served: Guarded, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The channel's own clock, not the process's: other threads sleep, too.
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it was tried again")))
    monkeypatch.delenv("SLUICEWAY_CA_FILE", raising=False)
    refused = info(connect(served, "", ""))
    assert isinstance(refused, SluicewayError)
    assert "caFile" in refused.detail
    key_file.write_text("no certificate")
    for path in (key_file, key_file.with_name("missing.pem")):
        with pytest.raises(SluicewayError, match=path.name) as caught:
            connect(served, "", str(path))
        assert caught.value.field == "caFile"


# ---- Spark ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


@pytest.mark.spark
@pytest.mark.slow
def test_a_job_has_all_it_needs_from_the_environment_and_shows_nothing_of_it(served: Guarded, tmp_path: Path) -> None:
    key = served.key("produce:orders-1", "consume:orders-1", "read:orders-1")
    env = {**os.environ, "SLUICEWAY_API_KEY": key, "SLUICEWAY_CA_FILE": served.ca_file}
    child = start_child(JOB, served.url, str(tmp_path), env=env)
    output = child.communicate()[0]
    assert child.returncode == 0, output
    assert "processed 300" in output
    assert totals(served, "orders-1") == {"produced": 300, "completed": 270, "dead": 30, "leases": 0, "total_leased": 0}
    secret = key.rpartition("_")[2]
    assert "INFO SparkContext" in output, "Spark's own log is looked at, too"
    assert secret not in output
    kept = [file for file in (tmp_path / "checkpoint").rglob("*") if file.is_file()]
    assert len(kept) > 3
    assert not [file for file in kept if secret.encode() in file.read_bytes()]


@pytest.mark.spark
def test_a_missing_scope_is_named_before_anything_is_leased(served: Guarded, spark: SparkSession, key_file: Path, tmp_path: Path) -> None:
    common = {"url": served.url, "queue": "orders-2", "apiKey": f"file:{key_file}", "caFile": served.ca_file}
    rows = spark.createDataFrame([("x",)], "value string")
    key_file.write_text(served.key("produce:orders-2"))
    rows.write.format("sluiceway").mode("append").options(**common).save()

    key_file.write_text(served.key("consume:orders-2"))
    with pytest.raises(PySparkException, match=r"(?s)may not produce.*produce:orders-2.*produce for writing"):
        rows.write.format("sluiceway").mode("append").options(**common).save()
    stream = spark.readStream.format("sluiceway").options(consumer="c", **common).load()
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(PySparkException, match=r"(?s)may not read.*read:orders-2.*consume and read"):
        query.awaitTermination()
    assert totals(served, "orders-2") == {"produced": 1, "completed": 0, "dead": 0, "leases": 0, "total_leased": 0}
