"""A Spark driver that is killed in mid-batch, and goes on from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from spark_world import kill_group, server, start_child, until

pytestmark = [pytest.mark.spark, pytest.mark.crash]

ITEMS = 5_000

DRIVER = """
import sys, threading
from pathlib import Path
from sluiceway.spark import session, settle

url, folder, stop_in = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
spark = session("crash")
batches = []

def work(batch, batch_id):
    batches.append(batch_id)
    rows = batch.selectExpr("id", "origin", "attempts", "cast(payload as string) as text")
    rows.write.mode("overwrite").parquet(str(folder / f"out/batch={batch_id}"))
    judged = rows.selectExpr("id", "case when attempts = 1 and int(text) % 10 = 0 then 'retry' else 'done' end as outcome")
    settle(judged, url=url, queue="q")
    if batch_id == stop_in:
        (folder / "reached").touch()
        threading.Event().wait()

stream = spark.readStream.format("sluiceway").options(url=url, queue="q", consumer="c", maxItemsPerTrigger=1500).load()
writer = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)

# A run takes as many items as are ready when it starts; those it puts back are for the next.
before = None
while before != batches:
    before = list(batches)
    writer.start().awaitTermination()
"""


def batch(folder: Path, number: int) -> list[dict[str, object]]:
    """The rows of one batch, in the order in which they were written."""
    files = sorted((folder / "out" / f"batch={number}").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]


def test_a_driver_killed_in_mid_batch_reads_the_same_rows_again(tmp_path: Path) -> None:
    with server(tmp_path) as world:
        world.create("q", partitions=3)
        for start in range(0, ITEMS, 1_000):
            world.produce("q", [str(n) for n in range(start, start + 1_000)])
        first = start_child(DRIVER, world.url, str(tmp_path), "1")
        try:
            until("the driver is in its second batch", lambda: (tmp_path / "reached").exists() or first.poll() is not None)
            assert first.poll() is None, first.communicate()[0]
        finally:
            kill_group(first)
        before = batch(tmp_path, 1)
        assert world.count("q", "total_leased") == len(before) == 1_500

        second = start_child(DRIVER, world.url, str(tmp_path), "-1")
        output = second.communicate()[0]
        assert second.returncode == 0, output
        assert batch(tmp_path, 1) == before

        rows = [row for number in range(len(list((tmp_path / "out").iterdir()))) for row in batch(tmp_path, number)]
        done = [int(str(row["text"])) for row in rows if not (row["attempts"] == 1 and int(str(row["text"])) % 10 == 0)]
        assert sorted(done) == list(range(ITEMS))
        assert len({row["id"] for row in rows}) == len(rows) == ITEMS + ITEMS // 10
        counts = {name: world.count("q", name) for name in ("produced", "completed", "retried", "expired", "total")}
        assert counts == {"produced": ITEMS, "completed": ITEMS, "retried": ITEMS // 10, "expired": 0, "total": 0}
