"""`python -m bench spark`: rows per second and processor time per row of the Spark source and sink, beside those of
Spark's own Kafka connector with a real broker, and a scan of parquet files, in one session of `local[2]`.

Rounds alternate between the two, and a ratio is of one round. The broker and Spark's connector come from the Java registry.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench import kafka, spark_runs
from bench.spark_runs import Place, Run
from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.servers import SLUICEWAY, server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZES = (100, 1_000)
"""Payload sizes in bytes. The number of items falls with the square root of the size."""
DEFAULT_BATCH = 50_000
FLOOR_ITEMS = 12
RIVAL = "kafka"
BROKER = {**kafka.SETTINGS, "auto.create.topics.enable": "true", "num.partitions": str(spark_runs.PARTITIONS)}

_CONNECTOR = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
_OURS = "from sluiceway.spark import session; session('start')"
_PLAIN = "from pyspark.sql import SparkSession; SparkSession.builder.master('local[2]').appName('start').getOrCreate()"

Runs = dict[tuple[str, str], list[Run]]
"""Runs by operation and system."""


def rows_and_bytes(
    spark: SparkSession, places: Sequence[Place], url: str, folder: Path, items: int, size: int, rounds: int
) -> list[Figure]:
    """Measure one payload size: write, read in batches of two sizes, and scan the parquet files."""
    rows = spark_runs.make_rows(spark, folder, items, size)
    batches = (min(DEFAULT_BATCH, items // 4), items // 2)
    runs: Runs = {}
    for number in range(rounds + 1):
        for most in batches:
            name = f"b{size}-{most}-{number}"
            spark_runs.create_queue(url, name)
            for place in _turned(places, number):
                progress(f"{size} B, round {number} of {rounds}: {place.name}, {most:,} a batch")
                wrote = spark_runs.write(spark, place, rows, name)
                read = spark_runs.read(spark, place, name, items, most, folder / "checkpoints" / f"{name}-{place.name}")
                if number:  # the first round warms up
                    runs.setdefault(("sink", place.name), []).append(wrote)
                    runs.setdefault((f"source, {most:,} a batch", place.name), []).append(read)
        scanned = spark_runs.scan(spark, rows)
        if number:
            runs.setdefault(("scan", "parquet"), []).append(scanned)
    figures: list[Figure] = []
    for what in dict.fromkeys(what for what, _ in runs):
        figures += figures_of(what, f"{what}, {items:,} items of {size} B", items, runs)
    return figures


def figures_of(what: str, about: str, items: int, runs: Runs) -> list[Figure]:
    """Figures of one operation for each system, with ours as a multiple of Kafka's, round by round."""
    found: list[Figure] = []
    own: dict[str, list[Run]] = {who: some for (done, who), some in runs.items() if done == what}
    streams = all(run.batches for some in own.values() for run in some)
    for who, some in own.items():
        found.append(Figure(about, f"{who}: rows/s, start and all", _median(items / run.seconds for run in some), ""))
        if streams:
            found.append(Figure(about, f"{who}: rows/s after the first batch", _median(1 / run.steady for run in some), ""))
        found.append(Figure(about, f"{who}: processor time of Spark a row", _median(run.spark_cpu / items * 1e6 for run in some), "µs"))
        found.append(Figure(about, f"{who}: of the server", _median(run.server_cpu / items * 1e6 for run in some), "µs"))
    if RIVAL in own:
        pairs = list(zip(own["sluiceway"], own[RIVAL], strict=True))
        time_of: Callable[[Run], float] = (lambda run: run.steady) if streams else (lambda run: run.seconds)
        found.append(Figure(about, "time of a row, against Kafka's", _median(time_of(a) / time_of(b) for a, b in pairs), "x", 1.0))
        found.append(Figure(about, "processor time of Spark, against Kafka's", _median(a.spark_cpu / b.spark_cpu for a, b in pairs), "x"))
        total = _median((a.spark_cpu + a.server_cpu) / (b.spark_cpu + b.server_cpu) for a, b in pairs)
        found.append(Figure(about, "processor time with the server, against Kafka's", total, "x"))
    return found


def floor(spark: SparkSession, places: Sequence[Place], url: str, folder: Path) -> list[Figure]:
    """Measure the fixed cost of a micro-batch: one with a single item."""
    rows = spark_runs.make_rows(spark, folder, FLOOR_ITEMS, 100).coalesce(1)
    spark_runs.create_queue(url, "floor")
    figures = []
    for place in places:
        progress(f"micro-batches of one item: {place.name}")
        spark_runs.write(spark, place, rows, "floor")
        run = spark_runs.read(spark, place, "floor", FLOOR_ITEMS, 1, folder / "checkpoints" / f"floor-{place.name}")
        figures.append(Figure("a micro-batch with one item", place.name, run.trigger * 1000, "ms"))
    return figures


def start_up(rounds: int) -> list[Figure]:
    """Measure the time from the start of Python until there is a session."""
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    environment = {**os.environ, "JAVA_HOME": str(kafka.java().parent.parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    for _ in range(rounds):
        for name, script in (("sluiceway.spark.session", _OURS), ("SparkSession.builder", _PLAIN)):
            progress(f"a session: {name}")
            used, began = _children_cpu(), time.perf_counter()
            subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
            clock.setdefault(name, []).append(time.perf_counter() - began)
            cpu.setdefault(name, []).append(_children_cpu() - used)
    figures = [Figure("a session, from start to end", name, _median(times), "s") for name, times in clock.items()]
    return figures + [Figure("a session, from start to end", f"{name}: processor time", _median(times), "s") for name, times in cpu.items()]


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _turned(places: Sequence[Place], number: int) -> Sequence[Place]:
    """Alternate the order of the systems."""
    return places if number % 2 else places[::-1]


_median = statistics.median


def _connector(version: str, cache: Path) -> str:
    """Return the connector's jars that PySpark lacks, for `spark.jars`. Raises NotFoundError."""
    place = kafka.fetch("org.apache.spark", "spark-sql-kafka-0-10_2.13", version, cache)
    return ",".join(str(jar) for jar in sorted(place.iterdir()) if jar.name.startswith(_CONNECTOR))


def measure(folder: Path, cache: Path, connector: str, items: int, rounds: int) -> list[Figure]:
    """Measure everything. Raises NotFoundError if Kafka cannot be found or fetched."""
    program = kafka.fetch("org.apache.kafka", "kafka_2.13", kafka.VERSION, cache)
    jars = _connector(connector, cache)
    figures = start_up(rounds)
    with ExitStack() as stack:
        from sluiceway.spark import session

        ours = stack.enter_context(server(SLUICEWAY, folder / "data"))
        broker = stack.enter_context(kafka.Broker(program, BROKER, ("-Xmx1g",)))
        settings = {"spark.jars": jars, "spark.driver.memory": "2g", "spark.sql.warehouse.dir": str(folder / "warehouse")}
        spark = session("bench", **settings)
        stack.callback(spark.stop)
        places = (spark_runs.sluiceway(ours.url, ours.pid), spark_runs.kafka(broker.bootstrap, broker.pid))
        for size in SIZES:
            count = int(items / (size / SIZES[0]) ** 0.5)
            figures += rows_and_bytes(spark, places, ours.url, folder, count, size, rounds)
        figures += floor(spark, places, ours.url, folder)
    return figures


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if an aim was missed, 2 without Kafka to compare with."""
    own = importlib.metadata.version("pyspark")
    parser = argparse.ArgumentParser(prog="python -m bench spark", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000, help="items of 100 B")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    parser.add_argument("--connector", default=own, help=f"version of Spark's Kafka connector; PySpark's own is {own}")
    parser.add_argument("--cache", type=Path, default=Path(".tools"), help="where the jars are kept that come from the Java registry")
    parser.add_argument("--output", type=Path, default=Path("bench/results/spark.json"))
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    if given.items < 100 or given.rounds < 1:
        parser.error("at least 100 items and one round")
    with tempfile.TemporaryDirectory(prefix="sluiceway-bench-") as folder:
        try:
            figures = measure(Path(folder), given.cache.absolute(), given.connector, given.items, given.rounds)
        except kafka.NotFoundError as error:
            progress(f"NOTHING IS MEASURED: {error}")
            return 2
    load = f"load {os.getloadavg()[2]:.1f}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, PySpark {own}, {load}"
    versions = f"Kafka {kafka.VERSION}, connector {given.connector}"
    about = {"machine": machine, "versions": versions, "rounds": given.rounds}
    document = json.dumps({**about, "figures": [figure.document() for figure in figures]}, indent=2)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(document + "\n")
    print(document if given.json else f"{table(figures)}\n{machine}; {versions}")
    missed = sum(figure.missed for figure in figures)
    progress(f"{missed} aims missed" if missed else "every aim met")
    return int(missed > 0)
