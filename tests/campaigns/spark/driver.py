"""The driver that is killed: it empties the queue `in`, run after run, into several sinks at once.

`python -m tests.campaigns.spark.driver CONFIG`, where CONFIG is a JSON object with the fields of `Work`; and SLUICEWAY_CAMPAIGN says what
befalls it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql.streaming.readwriter import DataStreamWriter

from sluiceway.spark import session, settle
from sluiceway.spark.options import Server
from sluiceway.spark.server_calls import Client
from tests.campaigns.spark.hooks import HookedSource, reach

CHUNK = "4000"
"""Rows in a chunk of what is written to `out`: a task of 10,000 rows writes several."""

OUTCOME = "case when int(text) % 10 = 3 and attempts = 1 then 'retry' when int(text) % 10 = 7 then 'dead' else 'done' end as outcome"


@dataclass(frozen=True)
class Work:
    """`sinks`: `each` writes by foreachBatch, `stream` into the queue `out` by the streaming sink, `settle` states outcomes by it.

    `options`: more of the source. `master`: of Spark. `patience`: seconds in which nothing is done, while something is left, until it gives
    up. `forever`: one query that goes on until there is a file `stop` in `folder`. `name` is the consumer's, and that of what it writes.
    With `outcomes`, a seed, they are random, and the same for an item's same attempt; with `triggers`, another, so is how each run ends.
    """

    url: str
    folder: str
    sinks: str = "each"
    options: dict[str, str] = field(default_factory=dict)
    master: str = "local[2]"
    patience: float = 30.0
    forever: bool = False
    name: str = "campaign"
    outcomes: int | None = None
    triggers: int | None = None


def random_outcome(seed: int) -> str:
    """The expression of a column: a fifth of the items is put back, up to four times, and a tenth dies."""
    chance = f"pmod(xxhash64(text, attempts, {seed}), 10)"
    return f"case when {chance} < 2 and attempts < 5 then 'retry' when {chance} = 2 then 'dead' else 'done' end as outcome"


class Driver:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._folder = Path(work.folder)
        self._client = Client(Server(work.url, "in", 120_000))
        self._spark = session("campaign", **{"spark.master": work.master, "spark.driver.memory": "1g"})
        self._spark.dataSource.register(HookedSource)

    def run(self) -> int:
        """As often as something is left: what is put back while a query runs is for the next. 3: it gave up."""
        writer = self._writer(self._stream()).option("checkpointLocation", str(self._folder / "checkpoint"))
        if self._work.forever:
            query = writer.trigger(processingTime="0 seconds").start()
            while not (self._folder / "stop").exists():
                query.awaitTermination(1)
            query.stop()
            return 0
        before, since = -1, time.monotonic()
        chance = None if self._work.triggers is None else random.Random(self._work.triggers)
        while True:
            self._run_once(writer, chance)
            done, left = self._counts()
            if not left:
                return 0
            if done > before:
                before, since = done, time.monotonic()
            elif time.monotonic() > since + self._work.patience:
                print(f"{left} items are left, and none is served")
                return 3

    def _run_once(self, writer: DataStreamWriter, chance: random.Random | None) -> None:
        """One query, which ends with what is there; by `chance` after one batch, or when it is stopped somewhere."""
        # What is leased for the first batch is only remembered once that is logged.
        begun = any((self._folder / "checkpoint" / "offsets").glob("[0-9]*"))
        kind = chance.choice(("availableNow", "once", "processingTime")) if chance and begun else "availableNow"
        print(f"trigger {kind}", flush=True)
        if kind == "once":
            writer.trigger(once=True).start().awaitTermination()
        elif kind == "processingTime" and chance:
            query = writer.trigger(processingTime="0 seconds").start()
            query.awaitTermination(chance.uniform(1, 10))  # type: ignore[arg-type]
            query.stop()
        else:
            writer.trigger(availableNow=True).start().awaitTermination()

    def _counts(self) -> tuple[int, int]:
        """How often an item was settled, and how many are there yet."""
        stats = self._client.call("/v1/queue.stats", {"queue_name": "in"})
        partitions = [partition for logical in stats["logical_queues"] for partition in logical["partitions"]]
        return sum(each["completed"] + each["dead"] + each["retried"] for each in partitions), sum(each["total"] for each in partitions)

    def _stream(self) -> DataFrame:
        options = {"url": self._work.url, "queue": "in", "consumer": self._work.name, **self._work.options}
        rows = self._spark.readStream.format("sluiceway").options(**options).load()
        outcome = OUTCOME if self._work.outcomes is None else random_outcome(self._work.outcomes)
        return rows.selectExpr("id", "attempts", "cast(payload as string) as text").selectExpr("*", outcome)

    def _writer(self, rows: DataFrame) -> DataStreamWriter:
        if self._work.sinks == "each":
            return rows.writeStream.foreachBatch(self._each)
        to = {"url": self._work.url}
        if self._work.sinks == "settle":
            return rows.select("id", "outcome").writeStream.format("sluiceway").options(**to, queue="in", mode="settle")
        # Outcomes are left out, so every row is done when its batch is.
        return rows.selectExpr("text as value").writeStream.format("sluiceway").options(**to, queue="out", chunkItems=CHUNK)

    def _each(self, batch: DataFrame, batch_id: int) -> None:
        """The batch into a folder that replaces that of an earlier try, appended to what is there, and into a queue; then its outcomes."""
        number = batch_id + 1
        rows = batch.persist()
        rows.write.mode("overwrite").parquet(str(self._folder / "folders" / f"batch={number}"))
        reach("folder", number)
        rows.write.mode("append").parquet(str(self._folder / "plain"))
        reach("plain", number)
        final = rows.where("outcome <> 'retry'").selectExpr("text as value")
        to = {"url": self._work.url, "queue": "out", "writeId": f"{self._work.name}-{number}", "chunkItems": CHUNK}
        final.write.format("sluiceway").mode("append").options(**to).save()
        reach("queue", number)
        settle(rows.select("id", "outcome"), url=self._work.url, queue="in")
        rows.unpersist()
        reach("batch-end", number)


if __name__ == "__main__":
    sys.exit(Driver(Work(**json.loads(sys.argv[1]))).run())
