"""`settle` in a query of Spark Connect, whose `foreachBatch` runs in a process and a session of its own."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from sluiceway.spark.session import find_java_home
from tests.spark.spark_world import PATIENCE, kill_group, server, start_child

pytest.importorskip("grpc", reason="Spark Connect needs the packages of pyspark[connect]")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

CLIENT = """
import sys
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession as Classic
from pyspark.sql.connect.session import SparkSession
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import settle

url, port, checkpoint = sys.argv[1:]
# A server on a port of its own, which `remote("local")` does not offer.
conf = SparkConf().setMaster("local[2]").set("spark.driver.bindAddress", "127.0.0.1").set("spark.ui.enabled", "false")
conf.set("spark.plugins", "org.apache.spark.sql.connect.SparkConnectPlugin")
conf.set("spark.connect.grpc.binding.address", "127.0.0.1").set("spark.connect.grpc.binding.port", port)
Classic(SparkContext.getOrCreate(conf))
spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()

def work(batch, number):
    settle(batch.selectExpr("id", "case cast(payload as string) when 'bad' then 'dead' else 'done' end as outcome"), url=url, queue="in")

stream = spark.readStream.format("sluiceway").options(url=url, queue="in", consumer="connect", maxItemsPerTrigger="2").load()
query = stream.writeStream.foreachBatch(work).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
query.awaitTermination()
try:
    settle(spark.range(1).selectExpr("'k7f3q2ma.0.1' as id", "'later' as outcome"), url=url, queue="in")
except SluicewayError as error:
    print("REFUSED", error)
print("DONE", flush=True)
spark.stop()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_outcomes_of_a_query_of_spark_connect(tmp_path: Path) -> None:
    environment = {**os.environ, "JAVA_HOME": str(find_java_home()), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with server(tmp_path) as world:
        world.create("dead", partitions=1)
        world.create("in", dead_queue="dead")
        world.produce("in", ["good", "bad", "good", "good", "bad"])
        child = start_child(CLIENT, world.url, str(free_port()), str(tmp_path / "checkpoint"), env=environment)
        try:
            told, _ = child.communicate(timeout=PATIENCE)
        finally:
            kill_group(child)
        assert "DONE" in told, told
        (refused,) = [line for line in told.splitlines() if line.startswith("REFUSED")]
        assert refused == "REFUSED outcome: 'later' of item k7f3q2ma.0.1 is not an outcome; expected done, retry or dead"
        assert {name: world.count("in", name) for name in ("completed", "dead", "total", "leases")} == {
            "completed": 3,
            "dead": 2,
            "total": 0,
            "leases": 0,
        }
        assert world.count("dead", "ready") == 2
