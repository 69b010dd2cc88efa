"""A standalone Spark cluster and two Sluiceway instances: every item once, read from its owner, and no key where anybody can see it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from sluiceway.spark.browse import BROWSED, BrowseReader
from sluiceway.spark.options import browse_options, sink_options, source_options
from sluiceway.spark.settle import BatchSettle
from sluiceway.spark.source import LeaseStreamReader
from tests.campaigns.kit.report import Report
from tests.spark.spark_standalone import Driver, Pair, Spark, page, pair, spark_cluster
from tests.spark.spark_standalone_kills import run_standalone

pytestmark = pytest.mark.spark

ITEMS = 4_000

PIPELINE = """
import sys
from pathlib import Path
from sluiceway.spark import session, settle

url, ca, key_file, folder = sys.argv[1:]
logged = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": folder + "/events", "spark.eventLog.compress": "false"}
spark = session("away", **settings, **logged)
sys.stdin.readline()
spark.sparkContext.setLogLevel("INFO")
common = {"url": url, "caFile": ca, "direct": "true", "requestTimeout": "1m"}
with_file = {**common, "apiKey": "file:" + key_file}

rows = spark.range(0, ITEMS, 1, 4).selectExpr("cast(id as string) as value")
rows.write.format("sluiceway").mode("append").options(queue="orders", writeId="once", chunkItems="500", **with_file).save()
print("WRITTEN", flush=True)


def work(batch, number):
    rows = batch.selectExpr("id", "cast(payload as string) as text")
    rows.write.mode("overwrite").parquet(f"{folder}/out/batch={number}")
    done = batch.selectExpr("payload as value")
    done.write.format("sluiceway").mode("append").options(queue="billed", writeId=f"bill/{number}", **with_file).save()
    judged = rows.selectExpr("id", "if(int(text) % 10 = 0, 'dead', 'done') as outcome")
    settle(judged, url=url, queue="orders", api_key="file:" + key_file, ca_file=ca, direct=True)


# The executors have this key of their machines; the one above is in a file of theirs.
limits = {"maxItemsPerTrigger": "2000", "minPartitions": "2"}
stream = spark.readStream.format("sluiceway").options(queue="orders", consumer="c", **limits, **common).load()
query = stream.writeStream.foreachBatch(work).option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
query.explain(True)
print("READ", flush=True)

seen = spark.read.format("sluiceway").options(queue="billed", **with_file).load()
texts = seen.selectExpr("cast(payload as string) as text").collect()
assert sorted(int(row.text) for row in texts) == list(range(ITEMS))
seen.explain(True)
options = ", ".join(f"{name} '{value}'" for name, value in {**with_file, "queue": "billed"}.items())
spark.sql(f"CREATE TABLE kept USING sluiceway OPTIONS ({options})")
spark.sql("DESCRIBE EXTENDED kept").show(100, False)
spark.sql(f"CREATE TEMPORARY VIEW billed USING sluiceway OPTIONS ({options})")
spark.sql("EXPLAIN EXTENDED SELECT count(*) FROM billed").show(100, False)
assert spark.sql("SELECT count(*) AS n FROM billed").first().n == ITEMS
print("LOOKED", flush=True)

(Path(folder) / "page").write_text(spark.sparkContext.uiWebUrl)
sys.stdin.readline()
spark.stop()
"""


def ui(driver: str, spark: Spark) -> dict[str, str]:
    """All that the web pages of a driver, the master and the workers have to show, by address."""
    api = f"{driver}/api/v1/applications"
    app = json.loads(page(api))[0]["id"]
    sql = f"{api}/{app}/sql?details=true&planDescription=true&length=1000"
    executions = [f"{driver}/SQL/execution/?id={each['id']}" for each in json.loads(page(sql))]
    ours = [f"{driver}/{name}/" for name in ("jobs", "stages", "environment", "executors", "SQL", "StreamingQuery")]
    rest = [f"{api}/{app}/{name}" for name in ("environment", "jobs", "stages", "executors", "storage/rdd")]
    others = [address for daemon in spark.daemons for address in (f"{daemon.ui}/", f"{daemon.ui}/json/")]
    return {address: page(address) for address in (*ours, *executions, *rest, sql, f"{spark.master.ui}/app/?appId={app}", *others)}


def files_with(folder: Path, text: bytes) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and text in file.read_bytes()]


@pytest.mark.slow
def test_a_pipeline_over_two_instances_with_keys_and_tls(tmp_path: Path) -> None:
    with pair(tmp_path, guarded=True) as instances:
        file_key = instances.key("produce:*", "consume:*", "read:*")
        env_key = instances.key("consume:orders", "read:orders")
        (tmp_path / "key").write_text(file_key)
        env = {"SLUICEWAY_API_KEY": env_key}
        work = tmp_path / "spark"
        (work / "events").mkdir(parents=True)
        script = PIPELINE.replace("ITEMS", str(ITEMS))
        arguments = (instances.instances[0].url, instances.ca_file, str(tmp_path / "key"), str(work))
        with spark_cluster(work, env) as spark, Driver(spark, script, *arguments, env=env) as driver:
            for queue in ("dead", "orders", "billed"):
                instances.create(queue, dead_queue="dead" if queue == "orders" else None)
            driver.go_on()
            driver.until("all is done", (work / "page").exists)
            shown = ui((work / "page").read_text(), spark)
            driver.go_on()
            driver.finish()
            said = spark.said()
        check_items(instances, work)

        asked = instances.passed_on("orders")
        # A chunk that is written goes where its key has its home, and the driver's leases where the items are.
        assert asked["produce"] > 0
        assert "peek" not in asked
        assert "browse" not in asked

        # These do show what Spark was told.
        assert [text for address, text in shown.items() if "/environment" in address and "spark.executor.memory" in text]
        assert [text for address, text in shown.items() if "/sql?" in address and "sluiceway" in text]
        assert files_with(work / "events", str(tmp_path / "key").encode())
        assert "Executor: Running task" in said
        for key in (file_key, env_key):
            secret = key.rpartition("_")[2]
            assert not [address for address, text in shown.items() if secret in text]
            assert not files_with(work, secret.encode())


def check_items(instances: Pair, work: Path) -> None:
    """Every item has come through once, and ends as was said of it."""
    files = (work / "out").glob("batch=*/*.parquet")
    rows = [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]
    assert sorted(int(row["text"]) for row in rows) == list(range(ITEMS))
    assert len({row["id"] for row in rows}) == ITEMS
    counts = {name: instances.count("orders", name) for name in ("produced", "completed", "dead", "leases", "total")}
    assert counts == {"produced": ITEMS, "completed": ITEMS * 9 // 10, "dead": ITEMS // 10, "leases": 0, "total": 0}
    assert instances.count("dead", "ready") == ITEMS // 10


@pytest.mark.slow
def test_what_is_read_directly_is_passed_on_by_nobody(tmp_path: Path) -> None:
    """The tasks of a stream, of a browse, and the outcomes of one partition."""
    with pair(tmp_path) as instances:
        instances.create("q")
        before = instances.passed_on("q")
        for direct in ("true", "false"):
            read_all(instances, direct)
            after = instances.passed_on("q")
            passed_on = {request for request in ("peek", "browse", "settle") if after[request] > before[request]}
            assert passed_on == (set() if direct == "true" else {"peek", "browse", "settle"})
            before = after


def read_all(instances: Pair, direct: str) -> None:
    """Everything that tasks do with 80 new items, which stay leased."""
    for number in range(4):
        items = [{"payload": "eA=="}] * 20
        instances.call("/v1/storage/items.import", {"queue_name": "q", "partition": number, "items": items})
    options = {"url": instances.instances[0].url, "queue": "q", "direct": direct}
    driver = LeaseStreamReader(source_options({**options, "consumer": direct, "minPartitions": "8"}))
    start = driver.initialOffset()
    tasks = driver.partitions(start, driver.latestOffset(start, ReadAllAvailable()))
    rows = [batch for task in tasks for batch in driver.read(task)]
    assert sum(batch.num_rows for batch in rows) == 80
    assert {number for batch in rows for number in batch.column("partition").to_pylist()} == set(range(4))
    table = BrowseReader(BROWSED, browse_options({**options, "state": "leased"}))
    assert sum(batch.num_rows for part in table.partitions() for batch in table.read(part)) >= 80
    settling = BatchSettle(StructType().add("id", "string").add("outcome", "string"), sink_options({**options, "mode": "settle"}))
    for batch in rows:
        judged = pa.record_batch({"id": batch.column("id"), "outcome": pa.repeat("done", batch.num_rows)})
        assert settling.write(iter([judged])).staged == batch.num_rows
    driver.stop()


@pytest.mark.slow
@pytest.mark.crash
def test_executors_and_instances_are_killed_in_mid_batch(tmp_path: Path) -> None:
    report = Report("standalone")
    run_standalone(report, tmp_path)
    assert not report.wrong
