"""Micro-batches: options, what a task reads, and on a real Spark a driver that is killed and goes on from its checkpoint."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

from sluiceway.capture import look
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.change_stream import Batch, BrokenOffError, UnknownPositionError
from sluiceway.spark import capture_source
from sluiceway.spark.capture_options import CaptureOptions, capture_options, has_password
from sluiceway.spark.capture_plan import Offset, Slice
from sluiceway.spark.capture_source import SCHEMA, CaptureSource, CaptureStreamReader, Planner, Task, read_slice
from tests.capture.tasks_rig import Part, Script, ScriptedStream
from tests.servers.moto_server import ENVIRONMENT, REGION, MotoServer, reshard
from tests.spark.spark_world import kill_group, start_child, until

GIVEN = {"name": "c", "meta": "sqlite:x.sqlite", "stream": "kinesis", "stream.stream": "s"}

# ---- options -----------------------------------------------------------------------------------------------------------


def test_options_are_understood_as_spark_hands_them_over() -> None:
    options = capture_options(
        GIVEN | {"stream.apikey": "env:KEY", "maxrowspertrigger": "7", "maxrowsperpartition": "5", "requesttimeout": "3s"}
    )
    assert (options.max_rows, options.config.limit, options.request_timeout) == (7, 5, 3_000)
    assert options.config.options == {"stream": "s", "apikey": "env:KEY"}
    assert (options.config.name, options.config.queue, options.config.preset) == ("c", "", "log-leader")


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"name": ""}, "name", "required"),
        ({"meta": ""}, "meta", "required"),
        ({"stream": "kinesi"}, "stream", "kinesis"),
        ({"meta": "postgresql://me:secret@host/db"}, "meta", "env:NAME or file:PATH"),
        ({"meta": "postgresql://host/db?user=me&password=secret"}, "meta", "env:NAME or file:PATH"),
        ({"maxRowPerTrigger": "5"}, "maxRowPerTrigger", "did you mean maxRowsPerTrigger"),
        ({"maxRowsPerPartition": "10001"}, "maxRowsPerPartition", "from 1 to 10,000"),
        ({"preset": "leader"}, "preset", "log-leader"),
        ({"log": "file"}, "log", "kafka:HOST:PORT"),
        ({"stream": "postgres", "stream.snapshot": "initial"}, "stream.snapshot", "only a resident capture"),
    ],
)
def test_a_wrong_option_is_named_when_the_source_is_loaded(given: dict[str, str], field: str, words: str) -> None:
    with pytest.raises(SluicewayError, match=words) as refused:
        CaptureSource(GIVEN | given).schema()
    assert refused.value.field == field
    assert "secret" not in str(refused.value)


def test_a_password_is_found_wherever_a_url_has_it() -> None:
    assert not any(map(has_password, ("sqlite:x", "env:META", "postgresql://me@host/db?sslmode=require", "etcd://host:1")))
    assert all(map(has_password, ("etcd://me:x@host:1", "postgresql://h/db?sslpassword=x", "postgresql://h/db?PASSWORD=x")))
    assert has_password("postgresql://h/db?password=")


def test_it_is_read_as_a_stream_with_the_columns_that_there_are() -> None:
    source = CaptureSource(GIVEN)
    with pytest.raises(SluicewayError, match="readStream"):
        source.reader(SCHEMA)
    with pytest.raises(SluicewayError, match="columns of a change are fixed"):
        source.streamReader(StructType(SCHEMA.fields[:2]))


# ---- tasks -------------------------------------------------------------------------------------------------------------

PART = Slice("a", "a:2", "a:6", 3, 9, 4)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> ScriptedStream:
    """What tasks open. It has given the batch once."""
    script = Script([Part("a", (), 20, 1)])
    script.read("a", "a:2", None, 4)
    found = ScriptedStream(script)
    monkeypatch.setattr(capture_source, "open_stream", lambda *_: found)
    return found


def _options(**more: str) -> CaptureOptions:
    return capture_options(GIVEN | more)


def test_a_task_reads_what_was_planned(stream: ScriptedStream) -> None:
    reader = CaptureStreamReader(_options())
    (rows,) = reader.read(Task(PART))
    assert rows.schema.names == SCHEMA.names
    assert rows.column("payload").to_pylist() == [b"a/2", b"a/3", b"a/4", b"a/5"]
    assert set(rows.column("partition").to_pylist()) == {"a"}
    assert set(rows.column("batch").to_pylist()) == {3}


def test_a_stream_that_breaks_off_is_tried_until_the_time_is_up(stream: ScriptedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2]
    whole = ScriptedStream.read

    async def read(self: ScriptedStream, partition: str, position: str, upto: str | None = None, limit: int = 10_000) -> Batch:
        left[0] -= 1
        if left[0] >= 0:
            raise BrokenOffError("away")
        return await whole(self, partition, position, upto, limit)

    monkeypatch.setattr(ScriptedStream, "read", read)
    assert asyncio.run(read_slice(_options(), PART)).num_rows == 4
    left[0] = 10**6
    with pytest.raises(SluicewayError, match=r"batch 3 of partition a: away \(tried for 1s; option requestTimeout\)"):
        asyncio.run(read_slice(_options(requestTimeout="1s"), PART))


def test_what_is_gone_or_is_not_what_was_planned_fails_the_task(stream: ScriptedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SluicewayError, match=r"cannot be read again: .*with a new one") as refused:
        asyncio.run(read_slice(_options(), PART._replace(rows=5)))
    assert refused.value.code == "not_found"

    async def gone(*_: object) -> Batch:
        raise UnknownPositionError("dropped")

    monkeypatch.setattr(ScriptedStream, "read", gone)
    with pytest.raises(SluicewayError, match="dropped"):
        asyncio.run(read_slice(_options(), PART))


def test_batches_in_one_step_are_refused() -> None:
    reader = CaptureStreamReader(_options())
    start, end = Offset(1), Offset(3, (PART,))
    with pytest.raises(SluicewayError, match="asynchronous progress tracking"):
        reader.partitions(start.to_dict(), end.to_dict())
    assert reader.partitions(end.to_dict(), end.to_dict()) == []


def test_an_empty_first_batch_that_a_killed_driver_had_logged_is_read_again() -> None:
    logged, again = CaptureStreamReader(_options()).initialOffset(), CaptureStreamReader(_options())
    assert again.partitions(again.initialOffset(), logged) == []


def test_a_member_that_cannot_begin_says_why_to_the_query(tmp_path: Path) -> None:
    planner = Planner(_options(meta=f"sqlite:{tmp_path}/meta.sqlite", **{"stream.streem": "s"}))
    for _ in range(2):
        with pytest.raises(SluicewayError, match="streem"):
            _ask_again_and_again(planner)
    planner.stop()


def _ask_again_and_again(planner: Planner) -> None:
    while True:
        planner.following(Offset(), 10)


# ---- on Spark ----------------------------------------------------------------------------------------------------------

DRIVER = """
import sys, threading
from pathlib import Path
from sluiceway.spark import session

folder, stop_in, endpoint, region = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
spark = session("crash")

def wait(point):
    if point == stop_in:
        (folder / f"reached-{point}").touch()
        threading.Event().wait()

def work(batch, batch_id):
    wait(f"before-{batch_id}")
    batch.selectExpr("partition", "batch", "position", "cast(payload as string) as text").write.mode("overwrite").parquet(
        str(folder / f"out/batch={batch_id}"))
    wait(f"after-{batch_id}")

stream = spark.readStream.format("sluiceway-capture").options(
    name="crash", meta=f"sqlite:{folder}/meta.sqlite", stream="kinesis", maxRowsPerPartition=30,
    **{"stream.stream": "s", "stream.endpoint": endpoint, "stream.region": region}).load()
writer = stream.writeStream.foreachBatch(work).option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
writer.start().awaitTermination()
"""


@pytest.fixture
def moto() -> Iterator[MotoServer]:
    with MotoServer() as running:
        yield running


def _batches(folder: Path) -> dict[int, list[dict[str, object]]]:
    """What was written, by batch id."""
    out = folder / "out"
    return {
        int(each.name.partition("=")[2]): [
            row for file in sorted(each.glob("*.parquet")) for row in pq.read_table(file, partitioning=None).to_pylist()
        ]
        for each in out.iterdir()
    }


def _killed_and_gone_on(moto: MotoServer, folder: Path, points: list[str]) -> None:
    """Two shards that split while nobody reads; a driver that is killed at each of these points, and one that is not."""
    client = moto.client()
    client.create_stream(StreamName="s", ShardCount=2)
    count = 0
    for shards in (2, 3, 4):
        for _ in reshard(client, "s", shards) if shards > 2 else ():
            pass
        for number in range(count, count + 100):
            client.put_record(StreamName="s", Data=str(number).encode(), PartitionKey=str(number % 37))
        count += 100
    environment = os.environ | ENVIRONMENT
    before: dict[int, list[dict[str, object]]] = {}
    for point in [*points, "never"]:
        child = start_child(DRIVER, str(folder), point, moto.endpoint, REGION, env=environment)
        heard: list[str] = []
        listener = threading.Thread(target=lambda: heard.append(child.stdout.read() if child.stdout else ""))  # noqa: B023
        listener.start()
        try:
            until(f"{point} is reached", lambda: (folder / f"reached-{point}").exists() or child.poll() is not None)  # noqa: B023
            if point == "never":
                assert child.wait() == 0, heard
            else:
                assert child.poll() is None, heard
        finally:
            kill_group(child)
            listener.join()
        now = _batches(folder) if (folder / "out").exists() else {}
        assert all(now[number] == rows for number, rows in before.items()), "a batch was written again with other rows"
        before = now
    rows = [(number, row) for number, written in sorted(before.items()) for row in written]
    assert sorted(int(str(row["text"])) for _, row in rows) == list(range(count))
    _check_order(rows, folder)
    # Batches of a partition are numbered without a gap.
    for token in {row["partition"] for _, row in rows}:
        numbers = sorted({int(str(row["batch"])) for _, row in rows if row["partition"] == token})
        assert numbers == list(range(1, len(numbers) + 1))


def _check_order(rows: list[tuple[int, dict[str, object]]], folder: Path) -> None:
    """Whatever is still known has no parent in its own batch or in a later one."""
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for number, row in rows:
        token = str(row["partition"])
        last[token] = max(last.get(token, 0), number)
        first[token] = min(first.get(token, number), number)
    seen = asyncio.run(look("crash", f"sqlite:{folder}/meta.sqlite"))
    related = [
        (token, parent) for token, each in seen.state.partitions.items() for parent in each.parents if {token, parent} <= last.keys()
    ]
    assert related
    assert all(last[parent] < first[token] for token, parent in related)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.crash
def test_a_driver_killed_in_mid_batch_goes_on_exactly(moto: MotoServer, tmp_path: Path) -> None:
    _killed_and_gone_on(moto, tmp_path, ["after-1"])


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.crash
def test_a_driver_killed_again_and_again_goes_on_exactly(moto: MotoServer, tmp_path: Path) -> None:
    _killed_and_gone_on(moto, tmp_path, ["before-0", "after-0", "before-2", "after-3"])
