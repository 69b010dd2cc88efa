"""What is killed under a streaming query on a standalone cluster: an executor, the instance whose partitions are being read, and both.

Each blow comes while a task of a batch is in the midst of its rows, and waits there until it has been struck.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from tests.campaigns.kit.fleet import Instance
from tests.campaigns.kit.lines import HOST, Switchboard
from tests.campaigns.kit.report import Report
from tests.servers.pids import kill, parent
from tests.spark.spark_standalone import Driver, Pair, Spark, pair, spark_cluster
from tests.spark.spark_world import until

ITEMS = 14_000
BATCH = 2_000
SIZE = 1_000
"""Bytes of a payload, so that a task cannot have read all of its rows before it waits."""

QUERY = """
import json, os, sys, time
from pathlib import Path
from sluiceway.spark import session, settle

url, folder, items, size, most = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
spark = session("kills", **settings)
common = {"url": url, "direct": "true", "requestTimeout": "2m"}


def waiting(number):
    def rows(batches):
        for batch in batches:
            if not (folder / f"go{number}").exists():
                about = {"python": os.getppid(), "partition": batch.column("partition")[0].as_py()}
                (folder / f"new{number}.{os.getpid()}").write_text(json.dumps(about))
                os.replace(folder / f"new{number}.{os.getpid()}", folder / f"reached{number}")
                while not (folder / f"go{number}").exists():
                    time.sleep(0.02)
            yield batch
    return rows


def work(batch, number):
    rows = batch.selectExpr("id", "partition", "int(substring(cast(payload as string), 1, 8)) as number")
    rows.mapInArrow(waiting(number), rows.schema).write.mode("overwrite").parquet(f"{folder}/out/batch={number}")
    copies = batch.selectExpr("payload as value")
    copies.write.format("sluiceway").mode("append").options(queue="copies", writeId=f"copy/{number}", **common).save()
    settle(rows.selectExpr("id", "if(number % 10 = 0, 'dead', 'done') as outcome"), url=url, queue="orders", direct=True)


values = spark.range(0, items, 1, 4).selectExpr(f"rpad(lpad(cast(id as string), 8, '0'), {size}, '.') as value")
values.write.format("sluiceway").mode("append").options(queue="orders", writeId="once", **common).save()
limits = {"maxItemsPerTrigger": str(most), "minPartitions": "2"}
stream = spark.readStream.format("sluiceway").options(queue="orders", consumer="c", **limits, **common).load()
query = stream.writeStream.foreachBatch(work).option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True).start()
query.awaitTermination()
spark.stop()
"""


class Blow(NamedTuple):
    """What is struck in that batch. `instance`: how the owner of what is being read ends."""

    batch: int
    executor: bool = False
    instance: str = ""

    @property
    def name(self) -> str:
        whom = ["an executor killed"] if self.executor else []
        return " and ".join([*whom, *([f"the owner {self.instance}"] if self.instance else [])])


BLOWS = (Blow(1, executor=True), Blow(2, instance="killed"), Blow(3, instance="stopped"), Blow(4, executor=True, instance="killed"))


def run_standalone(report: Report, folder: Path) -> None:
    """A query of seven batches, and four blows."""
    work = folder / "spark"
    work.mkdir()
    with Switchboard() as switchboard, pair(folder) as instances, spark_cluster(work) as spark:
        for queue in ("dead", "orders", "copies"):
            instances.create(queue, dead_queue="dead" if queue == "orders" else None)
        # Stands for a load balancer: leads to an instance that is there.
        line = switchboard.line(instances.instances[0].port)
        arguments = (f"http://{HOST}:{line.port}", str(work), str(ITEMS), str(SIZE), str(BATCH))
        with Driver(spark, QUERY, *arguments) as driver:
            blows = {blow.batch: blow for blow in BLOWS}
            for number in range(ITEMS // BATCH):
                driver.until(f"batch {number} is being read", (work / f"reached{number}").exists)
                for instance in instances.instances:
                    if not instance.runs:
                        revive(instances, instance)
                blow = blows.get(number)
                victim = None if blow is None else strike(blow, instances, spark, work)
                if victim is not None:
                    line.target = next(instance for instance in instances.instances if instance.runs).port
                begun = time.monotonic()
                (work / f"go{number}").touch()
                if blow is not None:
                    driver.until(f"batch {number} is done", (work / "checkpoint" / "commits" / str(number)).exists)
                    report.figure(f"{blow.name}: the batch done after {time.monotonic() - begun:.1f} s")
            driver.finish()
        judge(report, instances, spark, work)


def revive(instances: Pair, instance: Instance) -> None:
    """While a batch is being read some of its partitions go back there."""
    instances.restart(instance)
    at = instances.instances.index(instance)
    until(f"{instance.name} has partitions again", lambda: instance.url in instances.owners("orders", at).values())
    instances.await_ready()


def strike(blow: Blow, instances: Pair, spark: Spark, work: Path) -> Instance | None:
    """The instance that is no more."""
    reached = json.loads((work / f"reached{blow.batch}").read_text())
    owner = instances.owners("orders")[reached["partition"]]
    if blow.executor:
        executor = parent(reached["python"])
        assert executor in spark.executors
        kill(executor)
    if not blow.instance:
        return None
    victim = next(instance for instance in instances.instances if instance.url == owner)
    if blow.instance == "killed":
        victim.kill()
    else:
        assert victim.stop() == 0
    return victim


def judge(report: Report, instances: Pair, spark: Spark, work: Path) -> None:
    """By the ledger over the files, the counters of the queues, and what the executors have said."""
    at = next(number for number, instance in enumerate(instances.instances) if instance.runs)
    rows = [row for file in (work / "out").glob("batch=*/*.parquet") for row in pq.read_table(file, partitioning=None).to_pylist()]
    if sorted(row["number"] for row in rows) != list(range(ITEMS)) or len({row["id"] for row in rows}) != ITEMS:
        report.fail(
            f"{len(rows)} rows, {len({row['number'] for row in rows})} numbers, {len({row['id'] for row in rows})} ids of {ITEMS} items"
        )
    wanted = {
        "orders": {"ready": 0, "leases": 0, "total": 0},
        "copies": {"ready": ITEMS, "total": ITEMS},
        "dead": {"ready": ITEMS // 10, "total": ITEMS // 10},
    }
    for queue, counts in wanted.items():
        found = {name: instances.count(queue, name, at) for name in counts}
        if found != counts:
            report.fail(f"{queue}: {found}, not {counts}")
    lost = sum(blow.executor for blow in BLOWS)
    started = len(list(work.glob("work*/*/*")))
    if started != lost + 2:
        report.fail(f"{started} executors were started, {lost} of them killed")
    turned = spark.said().count("(option direct)")
    if not turned:
        report.fail("no executor has found an owner gone, so nothing was struck")
    for line in instances.check_logs():
        report.fail(line)
    report.figure(f"{len(BLOWS)} blows, {ITEMS} items each once; {turned} times an owner was gone and the url asked")
