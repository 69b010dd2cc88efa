"""The jobs `ingest` and `process` on Spark against a real server: every row once, whatever is repeated or killed."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, Progress, Shape, ingest, process, watch
from tests.spark.spark_world import Server, kill_group, server, start_child, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("jobs", **{"spark.sql.shuffle.partitions": 2})


def items(world: Server, queue: str) -> list[dict[str, Any]]:
    """What is ready, up to 1,000 items."""
    found: list[dict[str, Any]] = world.call("/v1/queue.peek", queue_name=queue, limit=1000)["items"]
    return found


def body(item: dict[str, Any]) -> bytes:
    return str(item["utf8"]).encode() if "utf8" in item else base64.b64decode(item["bytes"])


def texts(world: Server, queue: str) -> list[str]:
    return sorted(body(each).decode() for each in items(world, queue))


# -- ingest -----------------------------------------------------------------------------------------------------------


def test_csv_rows_become_json_and_the_same_again_adds_nothing(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    place = Place(world.url, "csv")
    # A value with a line end and quotes in it, one that is empty.
    (tmp_path / "a (1) é.csv").write_text('id,text\n1,"two\nlines"\n2,"he said ""no"""\n3,\n')
    (tmp_path / "b.csv").write_text("id,text\n" + "".join(f"{n},x\n" for n in range(4, 104)))
    told: list[tuple[str, int]] = []
    first = ingest(spark, [tmp_path], place, create=True, partitions=2, announce=lambda id, files: told.append((id, files)))
    assert (first.items, first.files, first.repeated) == (103, 2, 0)
    assert told == [(first.write_id, 2)]
    rows = {row["id"]: row for row in map(json.loads, texts(world, "csv"))}
    assert len(rows) == 103
    assert [rows["1"]["text"], rows["2"]["text"], "text" in rows["3"]] == ["two\nlines", 'he said "no"', False]

    again = ingest(spark, [tmp_path], place, create=True)
    assert (again.write_id, again.items, again.chunks, again.repeated) == (first.write_id, 103, first.chunks, first.chunks)
    assert world.count("csv", "produced") == 103
    # The files in another order are the same load; touched, another one, unless it is named; other columns, another one, too.
    assert ingest(spark, [tmp_path / "b.csv", tmp_path / "a (1) é.csv"], place).repeated == first.chunks
    os.utime(tmp_path / "b.csv", ns=(1, 1))
    assert ingest(spark, [tmp_path], place, write_id=first.write_id).repeated == first.chunks
    other = ingest(spark, [tmp_path], place)
    assert (other.write_id != first.write_id, other.repeated) == (True, 0)
    assert world.count("csv", "produced") == 206


def test_the_cutting_does_not_depend_on_the_session(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    place = Place(world.url, world.create("cut"))
    for name, rows in (("a", 3000), ("b", 2000), ("c", 2000)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(rows)))
    first = ingest(spark, [tmp_path], place)
    other = spark.newSession()
    for name, value in (("maxPartitionBytes", "10000"), ("openCostInBytes", "0"), ("minPartitionNum", "7"), ("maxPartitionNum", "1")):
        other.conf.set(f"spark.sql.files.{name}", value)
    again = ingest(other, [tmp_path], place)
    assert (again.repeated, world.count("cut", "produced")) == (first.chunks, 7000)
    assert other.conf.get("spark.sql.files.minPartitionNum") == "7"


def test_json_lines_stay_as_they_are(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    lines = ['{"id": 12345678901234567890, "b": null, "kind": "x"}', '{"b":  1.00, "it\'s": {"deep": [1]}}', "no JSON at all"]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n  \n")
    ingest(spark, [tmp_path / "a.jsonl"], Place(world.url, world.create("json")))
    assert texts(world, "json") == sorted(lines)
    ingest(spark, [tmp_path / "a.jsonl"], Place(world.url, world.create("named")), options={"multiLine": "true"}, shape=Shape(kind="kind"))
    assert items(world, "named")[0]["kind"] == "x"

    (tmp_path / "b.jsonl").write_text('{"body": {"n": [1, 2.5]}, "type": "t", "it\'s": 7}\n{"body": "plain", "type": "u", "it\'s": "r"}\n')
    shape = Shape(payload="body", kind="type", reference="it's", key="type")
    ingest(spark, [tmp_path / "b.jsonl"], Place(world.url, world.create("columns")), shape=shape)
    found = sorted((body(each).decode(), each["kind"], each["reference"], each["key"]) for each in items(world, "columns"))
    assert found == [("plain", "u", "r", "u"), ('{"n":[1,2.5]}', "t", "7", "t")]
    (tmp_path / "c.json").write_text('{\n  "id": 1\n}\n')
    with pytest.raises(SluicewayError, match="one JSON document, not JSON lines"):
        ingest(spark, [tmp_path / "c.json"], Place(world.url, "json"))


def test_json_lines_that_are_items(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    due = (datetime.now(UTC) + timedelta(hours=2)).replace(microsecond=0)
    whole = {"payload": "now", "kind": "k", "encoding": "e", "reference": "r", "key": "c", "priority": 7, "headers": {"a": "1"}}
    later = {"payload": "later", "enqueue_at": due.astimezone(timezone(timedelta(hours=2))).isoformat(), "other": 1}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (whole, later)))
    ingest(spark, [tmp_path / "a.jsonl"], Place(world.url, world.create("lines", 1)), shape=Shape(items=True))
    (ready,) = items(world, "lines")
    assert body(ready) == b"now"
    assert {name: ready[name] for name in whole if name != "payload"} == {name: each for name, each in whole.items() if name != "payload"}
    (scheduled,) = world.call("/v1/queue.browse", queue_name="lines", partition=0, states=["scheduled"])["items"]
    assert datetime.fromisoformat(scheduled["enqueue_at"]) == due
    for name, text in (("enqueue_at", "soon"), ("priority", "high")):
        (tmp_path / "wrong.jsonl").write_text(json.dumps({"payload": "x", name: text}) + "\n")
        with pytest.raises(SluicewayError, match=rf"{name} is no \w+: {text}"):
            ingest(spark, [tmp_path / "wrong.jsonl"], Place(world.url, "lines"), shape=Shape(items=True))
    assert world.count("lines", "produced") == 2


def test_text_is_stored_byte_for_byte(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"plain\n\nnot \xff text\n")
    ingest(spark, [tmp_path / "a.log"], Place(world.url, world.create("text")), shape=Shape(every_kind="line"))
    found = items(world, "text")
    assert sorted(map(body, found)) == [b"", b"not \xff text", b"plain"]
    assert {each["kind"] for each in found} == {"line"}


def test_parquet_rows_and_items(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    (tmp_path / "rows" / "day=1").mkdir(parents=True)
    pq.write_table(
        pa.table({"n": [1], "at": pa.array([1_700_000_000_123_456], pa.timestamp("us", "UTC"))}), tmp_path / "rows/day=1/a.parquet"
    )
    ingest(spark, [tmp_path / "rows"], Place(world.url, world.create("rows")))
    assert [json.loads(each) for each in texts(world, "rows")] == [{"n": 1, "at": "2023-11-14T22:13:20.123456Z", "day": 1}]

    headers = pa.array([[("a", "1")], None], pa.map_(pa.utf8(), pa.utf8()))
    columns = {
        "payload": [b"\xff", b"text"],
        "kind": ["k", None],
        "encoding": [None, "e"],
        "reference": ["r", None],
        "key": ["c", None],
        "extra": [1, 2],
    }
    pq.write_table(pa.table({**columns, "headers": headers}), tmp_path / "items.parquet")
    ingest(spark, [tmp_path / "items.parquet"], Place(world.url, world.create("items")), shape=Shape(items=True))
    found = {body(each): (each.get("kind"), each.get("encoding"), each.get("reference"), each.get("key")) for each in items(world, "items")}
    assert found == {b"\xff": ("k", None, "r", "c"), b"text": (None, "e", None, None)}
    assert [each["headers"] for each in items(world, "items") if body(each) == b"\xff"] == [{"a": "1"}]


def test_items_of_files_with_keys_and_of_earlier_ones_without(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    (tmp_path / "items").mkdir()
    pq.write_table(pa.table({"payload": [b"old"], "kind": ["k"]}), tmp_path / "items" / "a.parquet")
    pq.write_table(pa.table({"payload": [b"new"], "kind": ["k"], "key": ["c-7"]}), tmp_path / "items" / "b.parquet")
    place = Place(world.url, world.create("both"))
    ingest(spark, [tmp_path / "items"], place, options={"mergeSchema": "true"}, shape=Shape(items=True))
    assert {body(each): each["key"] for each in items(world, "both")} == {b"old": None, b"new": "c-7"}


def test_a_load_without_keys_has_the_id_that_it_had_before_there_were_keys() -> None:
    assert Shape(payload="body", kind="type", reference="id").as_list() == ["body", "type", "id", None, False]
    assert Shape(payload="body", key="customer").as_list() == ["body", None, None, None, False, "customer"]


def test_what_is_wrong_with_an_ingest_is_told(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    place = Place(world.url, world.create("wrong-ingest"))
    file = tmp_path / "a.csv"
    file.write_text("id,b\n1,x\n")
    with pytest.raises(SluicewayError, match=r"there is no file or folder .*none\.csv"):
        ingest(spark, [tmp_path / "none.csv"], place)
    with pytest.raises(SluicewayError, match="there is no column 'c'; there are id, b"):
        ingest(spark, [file], place, shape=Shape(kind="c"))
    with pytest.raises(SluicewayError) as refused:
        ingest(spark, [file], Place(world.url, "nowhere"))
    assert refused.value.code == "queue_not_found"
    (tmp_path / "b.csv").write_text("other,b\n1,x\n")
    with pytest.raises(SluicewayError, match="CSV header does not conform"):
        ingest(spark, [tmp_path], place)
    (tmp_path / "c[1].csv").write_text("id,b\n1,x\n")
    with pytest.raises(SluicewayError, match=r"Spark cannot read .*c\[1\]\.csv, which has one of"):
        ingest(spark, [tmp_path / "c[1].csv"], place)
    started = ingest(spark, [file], place)
    with file.open("a") as more:
        more.write("2,y\n")
    with pytest.raises(SluicewayError) as refused:
        ingest(spark, [file], place, write_id=started.write_id)
    assert refused.value.code == "key_conflict"


@pytest.mark.slow
def test_a_file_that_changes_meanwhile_is_told(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("1\n")

    def grow(write_id: str, files: int) -> None:
        file.write_text("1\n2\n")

    with pytest.raises(SluicewayError, match="files changed while they were read"):
        ingest(spark, [file], Place(world.url, world.create("changing")), announce=grow)


LOAD = """
import sys
from pathlib import Path
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, ingest

url, folder = sys.argv[1], Path(sys.argv[2])
print(ingest(session("load", **{"spark.master": sys.argv[3]}), [folder / "in"], Place(url, "load")))
"""


@pytest.mark.slow
def test_a_load_that_is_killed_and_repeated_has_every_row_once(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    world.create("load", partitions=3)
    (tmp_path / "in").mkdir()
    for number in range(6):
        rows = "".join(f"{n},{'x' * 100}\n" for n in range(number * 10_000, (number + 1) * 10_000))
        (tmp_path / "in" / f"{number}.csv").write_text("id,filler\n" + rows)
    child = start_child(LOAD, world.url, str(tmp_path), "local[1]")
    try:
        until("some of it is stored", lambda: world.count("load", "produced") > 0 or child.poll() is not None)
        assert child.poll() is None, child.communicate()[0]
    finally:
        kill_group(child)
    before = world.count("load", "produced")
    assert 0 < before < 60_000
    done = ingest(spark, [tmp_path / "in"], Place(world.url, "load"))
    assert (done.items, world.count("load", "produced")) == (60_000, 60_000)
    assert 0 < done.repeated < done.chunks
    seen: list[int] = []

    def look(batch: DataFrame) -> None:
        number = F.get_json_object(F.col("payload").cast("string"), "$.id").cast("int").alias("n")
        seen.extend(row.n for row in batch.select(number).collect())

    process(spark, look, Place(world.url, "load"), checkpoint=tmp_path / "checkpoint", once=True, max_items=100_000)
    assert sorted(seen) == list(range(60_000))


@pytest.mark.slow
def test_a_watched_folder(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    place, folder, checkpoint = Place(world.url, world.create("watched")), tmp_path / "in", tmp_path / "checkpoint"
    folder.mkdir()

    def run(**more: Any) -> int:
        return watch(spark, folder, place, checkpoint=checkpoint, once=True, **more).items

    with pytest.raises(SluicewayError, match="is empty"):
        run()
    (folder / "1.csv").write_text("id,b\n1,x\n2,y\n")
    assert run() == 2
    assert run() == 0
    (folder / "2.csv").write_text("id,b\n3,z\n")
    assert run() == 1
    # The last batch again, as after a crash before it was noted as done.
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink()
    assert run() == 1
    assert (world.count("watched", "produced"), world.count("watched", "deduplicated")) == (3, 1)
    assert [json.loads(each)["id"] for each in texts(world, "watched")] == ["1", "2", "3"]
    (folder / "3.csv").write_text("other,b\n4,z\n")
    with pytest.raises(SluicewayError, match="CSV header does not conform"):
        run()


@pytest.mark.slow
def test_a_folder_is_watched_until_it_is_to_stop(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.txt").write_text("one\n")
    told: list[Progress] = []

    def tell(progress: Progress) -> None:
        told.append(progress)
        (tmp_path / "2.txt").write_text("two\nthree\n")
        (tmp_path / "2.txt").rename(tmp_path / "in" / "2.txt")

    place = Place(world.url, world.create("going"))
    done = watch(spark, tmp_path / "in", place, checkpoint=tmp_path / "c", tell=tell, stop=lambda: world.count("going", "produced") == 3)
    assert done.stopped
    assert told[0] == Progress(job="ingest", items=1, batch=0)
    assert texts(world, "going") == ["one", "three", "two"]


# -- process ----------------------------------------------------------------------------------------------------------


def by_text(batch: DataFrame) -> DataFrame:
    """Texts that begin with `bad` die, those that begin with `late` are put back once; those with `fine` are not named."""
    text = F.col("payload").cast("string")
    outcome = F.when(text.startswith("bad"), "dead").when(text.startswith("late") & (F.col("attempts") == 1), "retry").otherwise("done")
    named = batch.where(~text.startswith("fine"))
    return named.select("id", outcome.alias("outcome"), F.when(outcome == "dead", "it is bad").alias("reason"))


def test_items_are_settled_as_the_function_says(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    world.create("pit", partitions=1)
    queue = world.create("judged", dead_queue="pit")
    world.produce(queue, [f"{what} {n}" for what, count in (("good", 50), ("fine", 20), ("late", 10), ("bad", 3)) for n in range(count)])
    place = Place(world.url, queue)
    told: list[Progress] = []
    first = process(spark, by_text, place, checkpoint=tmp_path, once=True, max_items=40, tell=told.append)
    assert (first.items, first.batches, first.stopped) == (83, 3, False)
    assert told[-1] == Progress(job="process", items=83, batch=2)
    second = process(spark, by_text, place, checkpoint=tmp_path, once=True)
    assert second.items == 10
    until("the dead are buried", lambda: world.count(queue, "dead") == 3)
    counts = {name: world.count(queue, name) for name in ("completed", "retried", "dead", "total", "leases")}
    assert counts == {"completed": 80, "retried": 10, "dead": 3, "total": 0, "leases": 0}


@pytest.mark.slow
def test_a_failing_function_is_raised_and_the_batch_comes_again(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("failing")
    world.produce(queue, [str(n) for n in range(30)])
    place = Place(world.url, queue)
    seen: list[tuple[int, list[str]]] = []

    def work(batch: DataFrame, number: int) -> DataFrame:
        seen.append((number, [row.id for row in batch.select("id").collect()]))
        if len(seen) == 1:
            raise KeyError("the user's own")
        return batch.selectExpr("id", "'done' as outcome")

    with pytest.raises(KeyError, match="the user's own") as raised:
        process(spark, work, place, checkpoint=tmp_path, once=True, max_items=20)
    assert (raised.value.__cause__, raised.value.__context__) == (None, None), "what Spark makes of it is left out"
    assert (world.count(queue, "completed"), world.count(queue, "leased")) == (0, 20)
    assert process(spark, work, place, checkpoint=tmp_path, once=True, max_items=20).batches == 2
    assert seen[0] == seen[1]
    assert [number for number, _ in seen] == [0, 0, 1]
    assert (world.count(queue, "completed"), world.count(queue, "leases")) == (30, 0)


def twice(batch: DataFrame) -> DataFrame:
    done = batch.selectExpr("id", "'done' as outcome")
    return done.union(done.limit(1))


def too_few(batch: DataFrame) -> DataFrame:
    return batch.limit(1).selectExpr("partition", "offset", "'done' as outcome")


def foreign(batch: DataFrame) -> DataFrame:
    done = batch.selectExpr("id", "'done' as outcome")
    return done.union(done.limit(1).selectExpr("'k7f3q2ma.0.1' as id", "outcome"))


Refused = tuple[str, Callable[[DataFrame], Any], bool, str]
REFUSED: list[Refused] = [
    ("null", lambda batch: batch.selectExpr("id", "cast(null as string) as outcome"), False, "outcome: null of item .* is not an outcome"),
    ("no-outcome", lambda batch: batch.select("id"), False, "outcome: this column is required"),
    ("no-frame", lambda batch: 7, False, "it returned int; expected a DataFrame"),
    ("nothing", lambda batch: None, True, "the function returned None"),
    ("too-few", too_few, True, "4 without an outcome, 0 named more than once, 0 that are not in the batch"),
    ("twice", twice, True, "0 without an outcome, 1 named more than once, 0 that are not in the batch"),
    ("foreign", foreign, True, r"0 without an outcome, 0 named .*, 1 that are not in the batch, such as k7f3q2ma\.0\.1"),
]


@pytest.mark.parametrize(
    ("name", "work", "strict", "told"),
    [pytest.param(*each, id=each[0], marks=pytest.mark.slow if each[0] in ("twice", "foreign") else ()) for each in REFUSED],
)
def test_what_is_no_outcome_is_told(
    spark: SparkSession, world: Server, tmp_path: Path, name: str, work: Callable[[DataFrame], Any], strict: bool, told: str
) -> None:
    queue = world.create(f"refused-{name}", partitions=1)
    world.produce(queue, [str(n) for n in range(5)])
    with pytest.raises(SluicewayError, match=told):
        process(spark, work, Place(world.url, queue), checkpoint=tmp_path, once=True, strict=strict)
    assert (world.count(queue, "completed"), world.count(queue, "leased")) == (0, 5)


def test_a_function_that_takes_nothing_is_told_before_anything_is_leased(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    with pytest.raises(SluicewayError, match="must take one argument, the items, or two"):
        process(spark, lambda: None, Place(world.url, "judged"), checkpoint=tmp_path)


@pytest.mark.slow
def test_it_goes_on_until_it_is_to_stop_and_strict_is_content_with_one_outcome_each(
    spark: SparkSession, world: Server, tmp_path: Path
) -> None:
    queue = world.create("endless")
    world.produce(queue, ["a", "b"])

    def tell(progress: Progress) -> None:
        if progress.items == 2:
            world.produce(queue, ["c"])

    def work(batch: DataFrame) -> DataFrame:
        return batch.withColumn("outcome", F.lit("done"))

    # An item is completed by the trigger after its batch.
    done = process(
        spark, work, Place(world.url, queue), checkpoint=tmp_path, strict=True, tell=tell, stop=lambda: world.count(queue, "completed") == 3
    )
    assert (done.items, done.stopped) == (3, True)
