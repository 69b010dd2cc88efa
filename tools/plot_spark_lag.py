"""Draws docs/images/spark-lag.svg from a run: `python tools/plot_spark_lag.py`. Takes about two minutes, and needs the extra `demo`.

A producer sends bursts into a queue of a server in memory, a streaming query takes them in batches, and what is drawn is what
`/v1/consumers.list` says of both, four times a second.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib import pyplot as plt
from pyspark.sql import DataFrame

from sluiceway.client import Client
from sluiceway.spark import session, watch
from sluiceway.testing import server

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "spark-lag.svg"
QUEUE, CONSUMER = "orders", "billing"
BURST, BETWEEN, BURSTS = 10_000, 20.0, 4
"""Items of a burst, seconds from one to the next, and how many there are."""
BATCH = 2_000


class Sample(NamedTuple):
    """What was seen after so many seconds."""

    at: float
    lag: int
    leased: int
    items_per_s: float
    batch: int | None


def record(client: Client, samples: list[Sample], stop: threading.Event) -> None:
    began = time.monotonic()
    while not stop.wait(0.25):
        (queue,) = client.list_consumers(QUEUE).items
        query = next((query for consumer in queue.consumers for query in consumer.queries), None)
        rate, batch = (query.processed_per_s, query.batch) if query is not None else (0.0, None)
        samples.append(Sample(time.monotonic() - began, queue.ready, queue.leased, rate, batch))


def run(url: str, client: Client, folder: Path) -> list[Sample]:
    """The bursts, until the query has taken them all."""
    client.create_queue(QUEUE, requested_partitions=4)
    spark = session("lag", **{"spark.driver.memory": "1g", "spark.sql.warehouse.dir": str(folder), "spark.sql.shuffle.partitions": "2"})
    watch(spark, url)

    def handle(batch: DataFrame, batch_id: int) -> None:
        batch.selectExpr("sha2(payload, 512)").write.format("noop").mode("overwrite").save()

    stream = spark.readStream.format("sluiceway").options(url=url, queue=QUEUE, consumer=CONSUMER, maxItemsPerTrigger=str(BATCH)).load()
    writing = stream.writeStream.queryName("bill-orders").foreachBatch(handle).option("checkpointLocation", str(folder / "checkpoint"))
    # The first batch starts Spark's workers, which is no part of the picture.
    client.produce(QUEUE, ["warm"])
    query = writing.start()
    while not any(consumer.queries for consumer in client.list_consumers(QUEUE).items[0].consumers):
        if not query.isActive:
            raise SystemExit(f"the query has failed: {query.exception()}")
        time.sleep(0.1)
    samples: list[Sample] = []
    stop = threading.Event()
    recording = threading.Thread(target=record, args=(client, samples, stop))
    recording.start()
    for _ in range(BURSTS):
        time.sleep(2)
        for _ in range(BURST // 1_000):
            client.produce(QUEUE, ["x" * 200] * 1_000)
        time.sleep(BETWEEN - 2)
    while query.isActive and (samples[-1].lag or samples[-1].leased):
        time.sleep(0.25)
    time.sleep(2)
    stop.set()
    recording.join()
    query.stop()
    spark.stop()
    return samples


def draw(samples: list[Sample]) -> None:
    # Texts that can be searched, and the same file from the same samples.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "sluiceway", "font.size": 10})
    times = [sample.at for sample in samples]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), sharex=True, height_ratios=(3, 2), layout="constrained")
    above.fill_between(times, [sample.lag for sample in samples], step="post", alpha=0.35, label="lag: items that are ready")
    above.plot(times, [sample.leased for sample in samples], drawstyle="steps-post", color="tab:orange", label="leased by the query")
    above.set_ylabel("items")
    above.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    below.plot(times, [sample.items_per_s for sample in samples], drawstyle="steps-post", color="tab:green")
    below.set_ylabel("items/s, of the last batch")
    below.set_xlabel("seconds")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(TARGET, metadata={"Date": None})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, server() as running:
        samples = run(running.url, running.client, Path(folder))
    draw(samples)
    most = max(samples, key=lambda sample: sample.lag)
    batches = {sample.batch for sample in samples}
    print(f"{TARGET}: {len(samples)} samples, {len(batches)} batches, lag up to {most.lag:,}", file=sys.stderr)


if __name__ == "__main__":
    main()
