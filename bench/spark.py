"""`python -m bench spark`: the Spark source and sink beside those of Spark's own Kafka connector with a real broker, a Python source that
calls no server, and a scan of Parquet files, in one session of `local[2]`; and the demo.

Rounds take the systems in turns, and a ratio is of one round. The broker and Spark's connector come from the Java registry.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import kafka, spark_runs
from bench.spark_runs import Place, Run
from sluiceway.bench.figures import Figure, progress, table
from sluiceway.bench.servers import SLUICEWAY, server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FLOOR_ITEMS = 12
"""Micro-batches of one item, the first of which does not count."""
OURS, RIVAL, EMPTY = "sluiceway", "kafka", "empty"
PAYLOADS, EMPTY_PAYLOADS = "sluiceway, payload only", "empty, payload only"
BROKER = {**kafka.SETTINGS, "auto.create.topics.enable": "true", "num.partitions": str(spark_runs.PARTITIONS)}

_CONNECTOR = ("spark-sql-kafka", "spark-token-provider-kafka", "kafka-clients", "commons-pool2")
_SESSION = "from sluiceway.spark import session; session('start')"
_PLAIN = "from pyspark.sql import SparkSession; SparkSession.builder.master('local[2]').appName('start').getOrCreate()"

_median = statistics.median
Rounds = list[dict[str, Run]]
"""What each system cost in each round."""


class Case(NamedTuple):
    """A stream of `items` of `size` bytes, read in batches of `most`, by the systems `places` (Parquet files are scanned if `scans`)."""

    items: int
    size: int
    most: int
    places: tuple[str, ...]
    scans: bool = False

    def scaled(self, share: float) -> Case:
        """About that share of the items, in as many batches."""
        return self._replace(items=max(40, int(self.items * share)), most=max(10, int(self.most * share)))


CASES = {
    "large": Case(10_000_000, 100, 1_000_000, (OURS, PAYLOADS, RIVAL, EMPTY, EMPTY_PAYLOADS), scans=True),
    "small": Case(1_000_000, 100, 50_000, (OURS, PAYLOADS, RIVAL, EMPTY, EMPTY_PAYLOADS)),
    "wide": Case(1_000_000, 1_000, 100_000, (OURS, PAYLOADS, RIVAL)),
}
OTHERS = ("single", "start", "demo")


class Ratio(NamedTuple):
    """One against another, a value for each round. `bar`: lower bound, or, with `at_most`, upper bound; None: there is nothing to reach."""

    name: str
    about: str
    values: list[float]
    bar: float | None
    at_most: bool = False

    @property
    def value(self) -> float:
        return _median(self.values)

    @property
    def missed(self) -> bool:
        if self.bar is None:
            return False
        return self.value > self.bar if self.at_most else self.value < self.bar

    def document(self) -> dict[str, Any]:
        rounds = [float(f"{value:.4g}") for value in self.values]
        value = float(f"{self.value:.4g}")
        found = {"about": self.about, "value": value, "rounds": rounds}
        return found if self.bar is None else {**found, "at most" if self.at_most else "at least": self.bar, "missed": self.missed}


class Measured(NamedTuple):
    figures: list[Figure]
    ratios: list[Ratio]


# ---- streams --------------------------------------------------------------------------------------------------


def rounds_of(name: str, case: Case, spark: SparkSession, places: dict[str, Place], url: str, folder: Path, rounds: int) -> Rounds:
    """Write and read the items in each of the systems, in turns. A round before the first, of a tenth of the items, warms up."""
    done: Rounds = []
    for number in range(rounds + 1):
        work = case if number else case.scaled(0.1)
        rows = spark_runs.make_rows(spark, folder, work.items, work.size)
        costs: dict[str, Run] = {}
        for place in [places[each] for each in (case.places if number % 2 else case.places[::-1])]:
            progress(f"{name}, round {number} of {rounds}: {place.name}")
            target = f"{name}-{number}-{len(costs)}"
            if place.sink is not None:
                if place.is_ours:
                    spark_runs.create_queue(url, target)
                costs[f"{place.name}: sink"] = spark_runs.write(spark, place, rows, target)
            costs[place.name] = spark_runs.read(spark, place, target, work, folder / "checkpoints" / f"{target}-{place.name}")
            if place.is_ours:
                spark_runs.delete_queue(url, target)
        if case.scans:
            costs["parquet"] = spark_runs.scan(spark, rows)
        if number:
            done.append(costs)
    return done


def of_case(name: str, case: Case, rounds: Rounds) -> Measured:
    about = f"{case.items:,} items of {case.size:,} B, {case.most:,} a batch"
    figures = [figure for who in rounds[0] for figure in _costs(about, who, case.items, [each[who] for each in rounds])]
    return Measured(figures, ratios_of(name, about, rounds))


def ratios_of(name: str, about: str, rounds: Rounds) -> list[Ratio]:
    """The ratios for which there are bars."""

    def each(value: Callable[[Run], float], one: str, other: str) -> list[float]:
        return [value(costs[one]) / value(costs[other]) for costs in rounds]

    def speed(run: Run) -> float:
        return 1 / (run.steady if run.batches else run.seconds)

    def cpu(run: Run) -> float:
        return run.spark_cpu

    if name == "large":
        floor = f"{about}: a source without a server, with the payload alone"
        return [
            Ratio("floor-steady", f"{floor}: rows/s after the first batch, against Kafka's", each(speed, EMPTY_PAYLOADS, RIVAL), None),
            Ratio("floor-cpu", f"{floor}: Spark's processor time a row, against Kafka's", each(cpu, EMPTY_PAYLOADS, RIVAL), None),
            Ratio("source-steady", f"{about}: rows/s after the first batch, against Kafka's", each(speed, OURS, RIVAL), 1.5),
            Ratio("source-steady-payload", f"{about}: the same, with the payload alone", each(speed, PAYLOADS, RIVAL), 1.5),
            Ratio("source-cpu", f"{about}: Spark's processor time a row, against Kafka's", each(cpu, OURS, RIVAL), 1.0, at_most=True),
            Ratio("source-cpu-payload", f"{about}: the same, with the payload alone", each(cpu, PAYLOADS, RIVAL), 1.0, at_most=True),
            Ratio("sink", f"{about}: rows/s written, against Kafka's", each(speed, f"{OURS}: sink", f"{RIVAL}: sink"), 1.5),
        ]
    if name == "small":
        return [
            Ratio(
                "source-floor", f"{about}: rows/s after the first batch, against a source without a server", each(speed, OURS, EMPTY), 0.95
            ),
            Ratio("source-small", f"{about}: the same, against Kafka's", each(speed, OURS, RIVAL), 1.0),
            Ratio("source-small-payload", f"{about}: the same, with the payload alone", each(speed, PAYLOADS, RIVAL), 1.0),
            Ratio("source-floor-payload", f"{about}: the same, against its floor", each(speed, PAYLOADS, EMPTY_PAYLOADS), 0.95),
        ]
    return []


def _costs(about: str, who: str, items: int, runs: Sequence[Run]) -> Iterable[Figure]:
    yield Figure(about, f"{who}: rows/s, start and all", _median(items / run.seconds for run in runs), "")
    if all(len(run.batches) > 1 for run in runs):
        yield Figure(about, f"{who}: rows/s after the first batch", _median(1 / run.steady for run in runs), "")
    yield Figure(about, f"{who}: processor time of Spark a row", _median(run.spark_cpu / items * 1e6 for run in runs), "µs")
    if any(run.server_cpu for run in runs):
        yield Figure(about, f"{who}: of the server", _median(run.server_cpu / items * 1e6 for run in runs), "µs")


# ---- a single item, the start, the demo -----------------------------------------------------------------------


def single(spark: SparkSession, places: dict[str, Place], url: str, folder: Path, rounds: int) -> Measured:
    """The fixed cost of a micro-batch: one with a single item."""
    work = Case(FLOOR_ITEMS, 100, 1, ())
    rows = spark_runs.make_rows(spark, folder, FLOOR_ITEMS, 100).coalesce(1)
    took: list[dict[str, float]] = []
    for number in range(rounds):
        took.append({})
        for name in (OURS, RIVAL, EMPTY)[:: 1 if number % 2 else -1]:
            progress(f"micro-batches of one item, round {number + 1} of {rounds}: {name}")
            place, target = places[name], f"single-{number}"
            if place.is_ours:
                spark_runs.create_queue(url, target)
            if place.sink is not None:
                spark_runs.write(spark, place, rows, target)
            took[-1][name] = spark_runs.read(spark, place, target, work, folder / "checkpoints" / f"{target}-{name}").trigger
    about = "a micro-batch with one item"
    figures = [Figure(about, name, _median(each[name] for each in took) * 1000, "ms") for name in (OURS, RIVAL, EMPTY)]
    return Measured(
        figures,
        [
            Ratio("micro-batch", f"{about}: time, against Kafka's", [each[OURS] / each[RIVAL] for each in took], 1.0, at_most=True),
            Ratio(
                "micro-batch-floor", f"{about}: the same, without a server", [each[OURS] / each[EMPTY] for each in took], 1.2, at_most=True
            ),
        ],
    )


def start_up(rounds: int) -> Measured:
    """The time from the start of Python until there is a session."""
    clock: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    environment = {**os.environ, "JAVA_HOME": str(kafka.java().parent.parent), "SPARK_LOCAL_IP": "127.0.0.1"}
    for _ in range(rounds):
        for name, script in (("sluiceway.spark.session", _SESSION), ("SparkSession.builder", _PLAIN)):
            progress(f"a session: {name}")
            used, began = _children_cpu(), time.perf_counter()
            subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
            clock.setdefault(name, []).append(time.perf_counter() - began)
            cpu.setdefault(name, []).append(_children_cpu() - used)
    about = "a session, from start to end"
    figures = [Figure(about, name, _median(times), "s") for name, times in clock.items()]
    return Measured(figures + [Figure(about, f"{name}: processor time", _median(times), "s") for name, times in cpu.items()], [])


def demo(folder: Path, rounds: int) -> Measured:
    """What `sluiceway demo` says of its own rates. Raises RuntimeError if it fails."""
    rates: dict[str, list[float]] = {"in": [], "out": [], "out, after the first batch": []}
    for number in range(rounds):
        progress(f"the demo, round {number + 1} of {rounds}")
        place = folder / f"demo-{number}"
        place.mkdir()
        command = [sys.executable, "-m", "sluiceway.cli.main", "demo"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the demo failed:\n{done.stdout[-2_000:]}\n{done.stderr[-2_000:]}")
        for some, rate in zip(
            rates.values(), (rate_in(done.stdout, "in"), rate_in(done.stdout, "out"), rate_later(done.stdout)), strict=True
        ):
            some.append(rate)
    figures = [Figure("the demo", f"items/s {way}", _median(some), "") for way, some in rates.items()]
    later = rates["out, after the first batch"]
    return Measured(figures, [Ratio("demo-out", "the demo: items/s from the queue to Parquet, after the first batch", later, 50_000)])


def rate_in(ledger: str, way: str) -> float:
    """The items a second that the demo's ledger has for `in` or `out`."""
    return _rate(ledger, rf"^{way}\s+([\d,]+) items/s")


def rate_later(ledger: str) -> float:
    """The items a second from the queue to Parquet, once Spark has started."""
    return _rate(ledger, r"^out.*?([\d,]+)/s after the first batch")


def _rate(ledger: str, line: str) -> float:
    found = re.search(line, ledger, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the ledger of the demo has no line such as {line}")
    return float(found[1].replace(",", ""))


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- all of it ------------------------------------------------------------------------------------------------


def _connector(version: str, cache: Path) -> str:
    """Return the connector's jars that PySpark lacks, for `spark.jars`. Raises NotFoundError."""
    place = kafka.fetch("org.apache.spark", "spark-sql-kafka-0-10_2.13", version, cache)
    return ",".join(str(jar) for jar in sorted(place.iterdir()) if jar.name.startswith(_CONNECTOR))


def measure(names: Sequence[str], folder: Path, cache: Path, connector: str, share: float, rounds: int) -> Measured:
    """Measure the cases of these names. Raises NotFoundError if Kafka cannot be found or fetched."""
    program = kafka.fetch("org.apache.kafka", "kafka_2.13", kafka.VERSION, cache)
    jars = _connector(connector, cache)
    all_of_it = [start_up(rounds)] if "start" in names else []
    all_of_it += [demo(folder, rounds)] if "demo" in names else []
    if not {*CASES, "single"}.isdisjoint(names):
        with ExitStack() as stack:
            from sluiceway.spark import session

            ours = stack.enter_context(server(SLUICEWAY, folder / "data"))
            broker = stack.enter_context(kafka.Broker(program, BROKER, ("-Xmx1g",)))
            settings = {"spark.jars": jars, "spark.driver.memory": "2g", "spark.sql.warehouse.dir": str(folder / "warehouse")}
            spark = session("bench", **settings)
            stack.callback(spark.stop)
            places = {
                OURS: spark_runs.sluiceway(OURS, ours.url, ours.pid),
                PAYLOADS: spark_runs.sluiceway(PAYLOADS, ours.url, ours.pid, "payload binary"),
                RIVAL: spark_runs.kafka(RIVAL, broker.bootstrap, broker.pid),
                EMPTY: spark_runs.empty(spark, EMPTY),
                EMPTY_PAYLOADS: spark_runs.empty(spark, EMPTY_PAYLOADS, "payload binary"),
            }
            for name, case in CASES.items():
                if name in names:
                    work = case.scaled(share) if share < 1 else case
                    all_of_it.append(of_case(name, work, rounds_of(name, work, spark, places, ours.url, folder, rounds)))
            if "single" in names:
                all_of_it.append(single(spark, places, ours.url, folder, rounds))
    return Measured([each for some in all_of_it for each in some.figures], [each for some in all_of_it for each in some.ratios])


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark. Exit code 1 if a bar was missed, 2 without Kafka to compare with."""
    own = importlib.metadata.version("pyspark")
    every = [*CASES, *OTHERS]
    parser = argparse.ArgumentParser(prog="python -m bench spark", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=every, default=every, metavar="CASE", help=f"some of {', '.join(every)}")
    parser.add_argument("--share", type=float, default=1.0, help="of the items, for a quick look")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--connector", default=own, help=f"version of Spark's Kafka connector; PySpark's own is {own}")
    parser.add_argument("--cache", type=Path, default=Path(".tools"), help="where the jars are kept that come from the Java registry")
    parser.add_argument("--output", type=Path, default=Path("bench/results/spark.json"))
    parser.add_argument("--json", action="store_true", help="print the document")
    given = parser.parse_args(arguments)
    if not 0 < given.share <= 1 or given.rounds < 1:
        parser.error("a share of more than 0 and at most 1, and one round at least")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="sluiceway-bench-") as folder:
        try:
            found = measure(given.cases, Path(folder), given.cache.absolute(), given.connector, given.share, given.rounds)
        except kafka.NotFoundError as error:
            progress(f"NOTHING IS MEASURED: {error}")
            return 2
    loads = f"load {load:.1f} before, {os.getloadavg()[2]:.1f} at the end"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, PySpark {own}, {loads}"
    versions = f"Kafka {kafka.VERSION}, connector {given.connector}"
    about = {"machine": machine, "versions": versions, "rounds": given.rounds, "share": given.share}
    ratios = {each.name: each.document() for each in found.ratios}
    document = json.dumps({**about, "ratios": ratios, "figures": [each.document() for each in found.figures]}, indent=2)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(document + "\n")
    print(document if given.json else f"{table(found.figures)}\n{_told(found.ratios)}\n{machine}; {versions}")
    missed = sum(each.missed for each in found.ratios)
    progress(f"{missed} bars missed" if missed else "every bar met")
    return int(missed > 0)


def _told(ratios: Sequence[Ratio]) -> str:
    return "\n".join(map(_line, ratios))


def _line(ratio: Ratio) -> str:
    bound = "" if ratio.bar is None else f"bar: {'at most' if ratio.at_most else 'at least'} {ratio.bar:,g}; "
    missed = "MISSED; " if ratio.missed else ""
    return f"{ratio.name:22} {ratio.value:10,.4g}  ({bound}{missed}{min(ratio.values):,.4g} to {max(ratio.values):,.4g})"
