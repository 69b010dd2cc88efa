"""A stream on a queue in order: what a batch has of a key, in which task, and what a replay and an outcome make of it."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session, settle
from sluiceway.spark.columns import ItemColumns
from sluiceway.spark.offsets import HeldLease, Offset
from sluiceway.spark.options import consume_options, source_options
from sluiceway.spark.rows import SCHEMA
from sluiceway.spark.source import LeaseStreamReader
from tests.spark.spark_world import Server, kill_group, server, start_child
from tests.spark.test_spark_source import reader, texts

ALL = ReadAllAvailable()
KEYS = [f"k{number}" for number in range(6)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("order")) as running:
        yield running


def filled(world: Server, name: str, rounds: int = 5, partitions: int = 2) -> str:
    """A queue with that many items of each key, as KEY/NUMBER."""
    queue = world.create(name, partitions, order="key")
    for number in range(rounds):
        world.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": f"{key}/{number}", "key": key} for key in KEYS])
    return queue


def flat(tasks: list[list[str]]) -> list[str]:
    return [row for task in tasks for row in task]


def numbers(rows: list[str]) -> dict[str, list[int]]:
    """The items of each key, in the order of the rows."""
    found: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        key, _, number = row.partition("/")
        found[key].append(int(number))
    return dict(found)


def batch(driver: LeaseStreamReader, start: dict[str, Any], limit: ReadLimit = ALL) -> tuple[dict[str, Any], list[list[str]]]:
    """The next batch's offset, and what each of its tasks reads, called as Spark does."""
    end = driver.latestOffset(start, limit)
    driver.commit(start)
    return end, texts(driver, start, end)


def test_without_runs_a_batch_has_one_item_of_each_key(world: Server) -> None:
    driver = reader(world, filled(world, "singles", 3))
    at = driver.initialOffset()
    for number in range(3):
        at, tasks = batch(driver, at)
        assert numbers(flat(tasks)) == {key: [number] for key in KEYS}
    driver.stop()


def test_with_runs_a_batch_has_all_items_of_a_key_in_order_and_in_one_task(world: Server) -> None:
    driver = reader(world, filled(world, "runs", partitions=3), runs="true", minPartitions="4")
    _, tasks = batch(driver, driver.initialOffset())
    assert len(tasks) > 1
    found = [numbers(task) for task in tasks]
    assert sorted(key for task in found for key in task) == KEYS, "a key is in two tasks"
    assert all(task[key] == [0, 1, 2, 3, 4] for task in found for key in task)
    driver.stop()


def test_a_limit_ends_a_run_and_the_next_batch_goes_on_with_it(world: Server) -> None:
    queue = filled(world, "limited", partitions=1)
    driver = reader(world, queue, runs="true")
    at = driver.initialOffset()
    seen: list[str] = []
    while rows := flat((found := batch(driver, at, ReadMaxRows(7)))[1]):
        assert len(rows) <= 7
        seen += rows
        at = found[0]
    assert numbers(seen) == {key: [0, 1, 2, 3, 4] for key in KEYS}
    driver.stop()


def test_a_replay_after_a_kill_has_the_same_rows_in_the_same_tasks(world: Server) -> None:
    """Whatever the options are by then, and whatever was produced meanwhile."""
    queue = filled(world, "replayed", partitions=2)
    first = reader(world, queue, runs="true", minPartitions="3")
    start = first.initialOffset()
    end, tasks = batch(first, start)
    world.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": f"{key}/5", "key": key} for key in KEYS])
    # Killed after Spark logged the batch, and before.
    again = reader(world, queue, minPartitions="1")
    assert texts(again, start, end) == tasks
    found = Offset.parse(reader(world, queue, runs="true", minPartitions="3").latestOffset(start, ALL))
    assert {*found.leases} == {*Offset.parse(end).leases}
    _, after = batch(again, end)
    assert numbers(flat(after)) == {key: [5] for key in KEYS}
    again.stop()


def test_what_is_behind_a_retry_comes_back_whatever_its_outcome(world: Server) -> None:
    queue = filled(world, "settled", partitions=1)
    driver = reader(world, queue, runs="true")
    at, tasks = batch(driver, driver.initialOffset())
    (lease,) = Offset.parse(at).lease_ids
    items = world.call("/v1/queue.peek", queue_name=queue, lease_id=lease, limit=100)["items"]
    ids = dict(zip(flat(tasks), (item["id"] for item in items), strict=True))
    outcomes = {"k0/1": "retry", "k0/3": "dead", "k1/4": "retry", "k2/2": "dead"}
    told = [{"id": ids[row], "outcome": outcomes.get(row, "done")} for row in ids]
    world.call("/v1/queue.settle", queue_name=queue, items=told)
    start = at
    at, tasks = batch(driver, start)
    assert reader(world, queue, runs="true").latestOffset(start, ALL) == at, "a driver that is started again takes the batch for lost"
    # The one after the dead item was not behind a retry.
    assert numbers(flat(tasks)) == {"k0": [1, 2, 3, 4], "k1": [4]}
    assert (world.count(queue, "retried"), world.count(queue, "dead"), world.count(queue, "released")) == (2, 1, 3)
    driver.stop()


def test_a_batch_read_takes_runs_too(world: Server) -> None:
    from sluiceway.spark.consume import ConsumeReader, take

    queue = filled(world, "consumed", partitions=2)
    options = consume_options({"url": world.url, "queue": queue, "consumer": "c", "mode": "consume", "runs": "true", "minPartitions": "3"})
    held = ConsumeReader(options, take(options), ItemColumns(SCHEMA, SCHEMA))
    tasks = [[row.as_py().decode() for part in held.read(task) for row in part.column("payload")] for task in held.partitions()]
    assert sorted(key for task in tasks for key in numbers(task)) == KEYS
    assert all(those == [0, 1, 2, 3, 4] for task in tasks for those in numbers(task).values())


def test_a_lease_with_runs_is_not_divided() -> None:
    leases = [HeldLease("q.0.L0", 5), HeldLease("q.0.L1", 12), HeldLease("q.0.L2", 2), HeldLease("q.0.L3", 1)]
    offset = Offset("n").following(leases, 4, runs=True)
    assert Offset.parse(offset.to_dict()) == offset
    tasks = [[(part.lease_id, part.start, part.count) for part in task] for task in offset.tasks()]
    assert tasks == [[("q.0.L0", 0, 5)], [("q.0.L1", 0, 12)], [("q.0.L2", 0, 2), ("q.0.L3", 0, 1)]]
    assert "runs" not in Offset("n").following(leases, 4).to_dict()


def test_runs_is_true_or_false() -> None:
    with pytest.raises(SluicewayError, match="runs: 'perhaps' is neither true nor false"):
        source_options({"url": "http://127.0.0.1:1", "queue": "q", "consumer": "c", "runs": "perhaps"})


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("runs", ["true", "false"])
def test_rows_behind_a_failed_one_come_again_in_a_later_run_of_the_query(runs: str, world: Server, tmp_path: Path) -> None:
    """A real query, whose rows go through Python and are settled one by one. One of them fails twice."""
    queue = filled(world, f"spark-{runs}", partitions=3)
    seen: list[str] = []

    def handle(rows: DataFrame, _: int) -> None:
        failed = "payload = cast('k3/1' as binary) and attempts < 3"
        told = rows.mapInArrow(lambda batches: batches, rows.schema).selectExpr("*", f"if({failed}, 'retry', 'done') as outcome").cache()
        seen.extend(bytes(row.payload).decode() for row in told.select("payload").collect())
        # Of every row, also of those behind the failed one.
        settle(told, url=world.url, queue=queue)
        told.unpersist()

    options = {"url": world.url, "queue": queue, "consumer": "c", "runs": runs, "minPartitions": "2"}
    stream = session("tests").readStream.format("sluiceway").options(**options).load().writeStream.foreachBatch(handle)
    stream = stream.option("checkpointLocation", str(tmp_path))
    for _ in range(3):
        stream.trigger(availableNow=True).start().awaitTermination()
    again = [1, 2, 3, 4] if runs == "true" else [1]
    assert numbers(seen) == {key: [0, *(again * 2 if key == "k3" else []), 1, 2, 3, 4] for key in KEYS}
    assert (world.count(queue, "retried"), world.count(queue, "completed"), world.count(queue, "total")) == (2, 30, 0)


@pytest.mark.spark
@pytest.mark.crash
@pytest.mark.slow
def test_a_query_that_is_killed_keeps_order(tmp_path: Path) -> None:
    """A real Spark, killed again and again between the batches and within them."""
    rounds, kills = 30, [("wrote", 1), ("read", 3)]
    with server(tmp_path) as world:
        queue = filled(world, "q", rounds, partitions=3)
        while kills:
            assert run(world, queue, tmp_path, kills[0]), f"it ended before {kills[0]}"
            kills.pop(0)
        assert not run(world, queue, tmp_path, None)
        assert (world.count(queue, "completed"), world.count(queue, "total")) == (rounds * len(KEYS), 0)
    seen: list[str] = []
    for number in range(len(list(tmp_path.glob("batch-*")))):
        attempts = (tmp_path / f"batch-{number}").read_text().splitlines()
        assert len({*attempts}) == 1, "a replay has other rows, or another order"
        seen += json.loads(attempts[0])
    assert len((tmp_path / "batch-1").read_text().splitlines()) == 2, "it was not killed after it was written"
    assert numbers(seen) == {key: list(range(rounds)) for key in KEYS}


QUERY = """
import json, sys, time
from pathlib import Path
from sluiceway.spark import session

url, queue, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def reach(stage, batch):
    print(stage, batch, flush=True)
    while not (folder / f"go-{stage}-{batch}").exists():
        time.sleep(0.02)

def handle(rows, batch):
    found = json.dumps([bytes(row.payload).decode() for row in rows.select("payload").collect()])
    reach("read", batch)
    with (folder / f"batch-{batch}").open("a") as log:
        log.write(found + "\\n")
    reach("wrote", batch)

spark = session("order")
options = {"url": url, "queue": queue, "consumer": "c", "runs": "true", "maxItemsPerTrigger": "40", "minPartitions": "3"}
stream = spark.readStream.format("sluiceway").options(**options).load().writeStream.foreachBatch(handle)
stream.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start().awaitTermination()
"""


def run(world: Server, queue: str, folder: Path, kill: tuple[str, int] | None) -> bool:
    """Run the query until it ends, or is killed at that stage of a batch. Returns whether it was."""
    child = start_child(QUERY, world.url, queue, str(folder))
    said = []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line)
            stage, _, batch = line.strip().partition(" ")
            if stage in ("read", "wrote") and batch.isdecimal():
                if (stage, int(batch)) == kill:
                    return True
                (folder / f"go-{stage}-{batch}").touch()
        assert child.wait() == 0, "".join(said[-20:])
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill_group(child)
