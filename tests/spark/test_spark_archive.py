"""The job `archive`: what is in the queue is on disk once, whatever is killed, and what is wrong with an archive is found."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, Progress, Shape, ingest
from sluiceway.spark.jobs.archive import _sum_of, archive
from sluiceway.spark.jobs.archive_files import Location, Manifest, open_archive, read_manifest, verify, write_manifest
from tests.cli.cli_shell import ARCHIVES, Shell, covering
from tests.spark.spark_world import Server, kill_group, server, start_child, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    # Another time zone than that of the folders, so that it is not by luck that these are in UTC.
    return session("tests", **{"spark.sql.shuffle.partitions": 2, "spark.sql.session.timeZone": "Pacific/Auckland"})


def fill(world: Server, queue: str, count: int, start: int = 0) -> None:
    for first in range(start, start + count, 1_000):
        numbers = range(first, min(first + 1_000, start + count))
        items = [
            {"bytes": base64.b64encode(b"\xff%d" % n).decode(), "kind": f"kind {n % 3}", "encoding": "raw", "reference": str(n)}
            | ({"key": f"c-{n % 5}"} if n % 3 else {})
            | ({"headers": {"n": str(n), "a": "é"}} if n % 2 else {})
            for n in numbers
        ]
        world.call("/v1/queue.produce", queue_name=queue, items=items)


def rows(root: Path) -> list[dict[str, Any]]:
    return list(ds.dataset(root, format="parquet", partitioning="hive").to_table().to_pylist())


def produced(root: Path) -> Counter[tuple[object, ...]]:
    names = ("payload", "kind", "encoding", "reference", "key")
    return Counter((*(row[name] for name in names), tuple(row["headers"] or ())) for row in rows(root))


def expected(count: int) -> Counter[tuple[object, ...]]:
    def one(n: int) -> tuple[object, ...]:
        return (
            b"\xff%d" % n,
            f"kind {n % 3}",
            "raw",
            str(n),
            f"c-{n % 5}" if n % 3 else None,
            (("n", str(n)), ("a", "é")) if n % 2 else (),
        )

    return Counter(one(n) for n in range(count))


def test_an_archive_has_what_was_in_the_queue(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("all", partitions=3)
    fill(world, queue, 2_500)
    place = Place(world.url, queue)
    told: list[Progress] = []
    done = archive(spark, place, to=tmp_path / "a", checkpoint=tmp_path / "c", by="hour", once=True, max_items=1_000, tell=told.append)
    assert (done.items, done.batches, told[-1].items, told[-1].batch) == (2_500, 3, 2_500, 2)
    assert produced(tmp_path / "a") == expected(2_500)
    assert {name: world.count(queue, name) for name in ("completed", "total", "leases")} == {"completed": 2_500, "total": 0, "leases": 0}
    for row in rows(tmp_path / "a"):
        assert row["enqueued_at"].strftime("%Y-%m-%d %-H") == f"{row['day']} {row['hour']}"

    # It goes on, and does not touch what is there.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.parquet")}
    fill(world, queue, 10, start=2_500)
    assert archive(spark, place, to=tmp_path / "a", checkpoint=tmp_path / "c", by="hour", once=True).items == 10
    assert produced(tmp_path / "a") == expected(2_510)
    assert before.items() <= {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*.parquet")}.items()

    found = verify(tmp_path / "a")
    assert (found.batches, found.items, found.problems) == (4, 2_510, [])
    assert spark.read.parquet(str(tmp_path / "a")).count() == 2_510


@pytest.mark.slow
def test_items_without_a_key_have_the_checksum_that_they_had_before_there_were_keys(spark: SparkSession) -> None:
    """As a batch that an earlier release has written may be looked for."""
    before = spark.createDataFrame([("1", None, b"x"), ("2", "r", b"y")], "id string, reference string, payload binary")
    none = F.lit(None).cast("string")
    after = before.select(
        "id", "reference", none.alias("key"), F.lit(None).cast("int").alias("priority"), none.alias("unique_key"), "payload"
    )
    assert _sum_of(after) == _sum_of(before)
    for name, value in (("key", "r"), ("priority", 0), ("unique_key", "r")):
        assert _sum_of(after.withColumn(name, F.lit(value))) != _sum_of(before)
    assert _sum_of(after.withColumn("key", F.col("reference"))) != _sum_of(before)


def test_a_batch_is_not_replaced_by_one_with_other_items(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("tampered", partitions=2)
    fill(world, queue, 600)
    place, root = Place(world.url, queue), tmp_path / "a"
    archive(spark, place, to=root, checkpoint=tmp_path / "c", once=True)
    mine = next((root / "_batches").iterdir()).stem.partition("-")[0]
    location = Location(root, mine, 1)
    fill(world, queue, 400, start=600)
    archive(spark, place, to=root, checkpoint=tmp_path / "c", once=True)
    manifest = read_manifest(location)
    assert manifest is not None
    assert manifest.items == 400
    assert sum(span.items for span in manifest.partitions.values()) == 400

    # A checkpoint that was tampered with gives the number to other items.
    for log in ("commits", "offsets"):
        for path in (tmp_path / "c" / log).glob("*1*"):
            path.unlink()
    fill(world, queue, 5, start=1_000)
    with pytest.raises(SluicewayError, match=f"batch {location.name} is in the archive with other items; use a new checkpoint"):
        archive(spark, place, to=root, checkpoint=tmp_path / "c", once=True)
    assert produced(root) == expected(1_000)


@pytest.mark.slow
def test_a_batch_that_is_cut_off_is_counted_by_the_run_that_ends_it(
    spark: SparkSession, world: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = world.create("cut-off", partitions=2)
    fill(world, queue, 30)
    place = Place(world.url, queue)
    there = threading.Event()

    def write_and_wait(location: Location, manifest: Manifest) -> None:
        write_manifest(location, manifest)
        there.set()
        until("the query is told to stop", lambda: not any(query.isActive for query in spark.streams.active))

    with monkeypatch.context() as waiting:
        waiting.setattr(sys.modules["sluiceway.spark.jobs.archive"], "write_manifest", write_and_wait)
        first = archive(spark, place, to=tmp_path / "a", checkpoint=tmp_path / "c", stop=there.is_set)
    rest = archive(spark, place, to=tmp_path / "a", checkpoint=tmp_path / "c", once=True)
    assert (first.stopped, first.items + rest.items, first.batches + rest.batches) == (True, 30, 1)
    assert produced(tmp_path / "a") == expected(30)


KILLED = """
import importlib, sys, threading
from pathlib import Path
from sluiceway.spark import session
from sluiceway.spark.jobs import Place

url, folder, stop_in = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def reach(name):
    if name == stop_in and (folder / "a").exists() and len(list((folder / "a").glob("batch=*"))) >= 1:
        (folder / "reached").touch()
        threading.Event().wait()

def wrap(module, name, moment):
    original = getattr(module, name)
    def wrapped(*arguments):
        if moment == "before":
            reach(f"before {name}")
        result = original(*arguments)
        if moment == "after":
            reach(f"after {name}")
        return result
    setattr(module, name, wrapped)

module = importlib.import_module("sluiceway.spark.jobs.archive")
wrap(module, "tidy", "before")
wrap(module, "publish", "after")
wrap(module, "write_manifest", "after")
spark = session("killed", **{"spark.sql.shuffle.partitions": 1})
done = module.archive(spark, Place(url, "q"), to=folder / "a", checkpoint=folder / "c", once=True, max_items=200)
print("DONE", done.items)
"""


def reached_or_over(child: subprocess.Popen[str], reached: Path) -> bool:
    return reached.exists() or child.poll() is not None


@pytest.mark.crash
@pytest.mark.slow
def test_a_driver_killed_at_any_step_archives_each_item_once(tmp_path: Path) -> None:
    """One archive, and a driver that is killed in its second batch and later: written aside, renamed, with its manifest."""
    with server(tmp_path) as world:
        world.create("q", partitions=2)
        fill(world, "q", 800)
        for step in ("before tidy", "after publish", "after write_manifest"):
            (tmp_path / "reached").unlink(missing_ok=True)
            child = start_child(KILLED, world.url, str(tmp_path), step)
            try:
                until(f"the driver is {step}", partial(reached_or_over, child, tmp_path / "reached"))
                assert child.poll() is None, child.communicate()[0]
            finally:
                kill_group(child)
            # A reader sees whole batches: 200 items each.
            names = Counter(row["batch"] for row in rows(tmp_path / "a"))
            assert set(names.values()) <= {200}, step
            waits = [problem.what for problem in verify(tmp_path / "a").problems]
            assert [what for what in waits if "has no manifest" not in what] == []
            assert len(waits) == (step == "after publish")
        # Of a batch that Spark has not committed, and whose items are still leased, a file is lost: it is written again.
        newest = max((tmp_path / "a").glob("batch=*"))
        flip(next(newest.rglob("*.parquet")))
        assert [problem.batch for problem in verify(tmp_path / "a").problems] == [newest.name.removeprefix("batch=")]
        last = start_child(KILLED, world.url, str(tmp_path), "never")
        output = last.communicate()[0]
        assert last.returncode == 0, output
        assert produced(tmp_path / "a") == expected(800)
        assert len({row["id"] for row in rows(tmp_path / "a")}) == 800
        found = verify(tmp_path / "a")
        assert (found.items, found.problems) == (800, [])
        assert {name: world.count("q", name) for name in ("completed", "retried", "expired", "total")} == {
            "completed": 800, "retried": 0, "expired": 0, "total": 0
        }  # fmt: skip


@pytest.mark.slow
def test_an_archive_is_restored_by_ingesting_it(spark: SparkSession, sound: Path, world: Server, tmp_path: Path) -> None:
    again = Place(world.url, world.create("again", partitions=3))
    assert ingest(spark, [sound], again, format="parquet", shape=Shape(items=True)).items == 300
    archive(spark, again, to=tmp_path / "a", checkpoint=tmp_path / "c", once=True)
    assert produced(tmp_path / "a") == produced(sound) == expected(300)


# ---- what is wrong is found ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(spark: SparkSession, world: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of three batches."""
    folder = tmp_path_factory.mktemp("sound")
    queue = world.create("sound", partitions=2)
    fill(world, queue, 300)
    archive(spark, Place(world.url, queue), to=folder / "a", checkpoint=folder / "c", once=True, max_items=100)
    return folder / "a"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_what_is_missing_or_damaged_is_named(sound: Path, tmp_path: Path) -> None:
    assert verify(sound).problems == []
    names = sorted(path.stem for path in (sound / "_batches").iterdir())
    first, last = names[0], names[-1]

    def told(copy: Path) -> list[tuple[str, str]]:
        return [(problem.batch, problem.what.partition(":")[0]) for problem in verify(copy).problems]

    def file(root: Path, batch: str) -> Path:
        return sorted((root / f"batch={batch}").rglob("*.parquet"))[0]

    def fresh(name: str) -> Path:
        return shutil.copytree(sound, tmp_path / name)

    root = fresh("changed")
    flip(file(root, first))
    assert told(root) == [(first, "is damaged")]
    assert verify(root).problems[0].path == str(file(root, first).relative_to(root))

    root = fresh("cut")
    file(root, last).write_bytes(file(root, last).read_bytes()[:-1])
    assert told(root) == [(last, "is damaged")]

    root = fresh("lost")
    file(root, first).unlink()
    assert told(root) == [(first, "is missing")]

    root = fresh("foreign")
    shutil.copy(file(root, first), file(root, last).with_name("more.parquet"))
    assert told(root) == [(last, "is not in the manifest")]

    root = fresh("folder")
    shutil.rmtree(root / f"batch={first}")
    assert {batch for batch, _ in told(root)} == {first}

    root = fresh("both")
    shutil.rmtree(root / f"batch={first}")
    (root / "_batches" / f"{first}.json").unlink()
    assert told(root) == [(first, "is missing, with its manifest")]

    root = fresh("manifest")
    (root / "_batches" / f"{first}.json").unlink()
    assert told(root) == [(first, "has no manifest")]

    root = fresh("torn")
    path = root / "_batches" / f"{first}.json"
    path.write_text(path.read_text()[:-3])
    assert told(root) == [(first, "the manifest is damaged")]


def test_what_cannot_be_is_told_before_anything_is_leased(spark: SparkSession, world: Server, sound: Path, tmp_path: Path) -> None:
    queue = world.create("refused")
    fill(world, queue, 3)
    place = Place(world.url, queue)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    def refused(words: str, **more: Any) -> None:
        given: dict[str, Any] = {"to": tmp_path / "a", "checkpoint": tmp_path / "c", "once": True} | more
        with pytest.raises(SluicewayError, match=words):
            archive(spark, place, **given)

    refused("by: 'month' is not one of day, hour", by="month")
    refused(r"to: .*full exists and is not an archive", to=tmp_path / "full")
    refused("to: 's3://bucket/a' is not a folder of this machine", to="s3://bucket/a")
    refused(r"checkpoint: .*full is not a checkpoint of this job", checkpoint=tmp_path / "full")
    refused("checkpoint: .* is that of archive with queue 'sound', to '.*'; use another one", checkpoint=sound.parent / "c")
    refused("consumer: this option is required", consumer="")
    refused("holdFor: ", hold_for="1x")
    refused("by: .* is divided by day", to=sound, by="hour")
    assert world.count(queue, "leased") == 0
    with pytest.raises(SluicewayError, match="is not an archive"):
        verify(tmp_path / "full")
    open_archive(tmp_path / "new", "day")
    assert verify(tmp_path / "new").problems == []


# ---- the command --------------------------------------------------------------------------------------------------------

COVERED: set[str] = set()
verb = covering(COVERED)


@verb("spark archive")
def _commands(shell: Shell, world: Server, folder: Path) -> None:
    how = ["--to", str(folder / "a"), "--checkpoint", str(folder / "c"), "--once"]
    fill(world, shell.queue, 30)
    assert shell.says("spark", "archive", shell.queue, *how) == "Archived 30 items in 1 batch\n"
    fill(world, shell.queue, 12, start=30)
    assert shell.json("spark", "archive", shell.queue, *how)[-1] == {"items": 12, "batches": 1, "stopped": False}
    assert re.fullmatch(r"42 items in 2 batches, 2 files, [0-9,]+ bytes: no problems\n", verified(shell, folder))
    found = shell.json("spark", "archive", "--verify", str(folder / "a"))[0]
    assert (found["items"], found["problems"]) == (42, [])


def verified(shell: Shell, folder: Path) -> str:
    return shell.says("spark", "archive", "--verify", str(folder / "a"))


@pytest.mark.slow
def test_the_command(
    spark: SparkSession, world: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # The command stops the session that it uses.
    spark.stop()
    for name, value in {"SLUICEWAY_URL": world.url, "SLUICEWAY_API_KEY": "", "SLUICEWAY_CA_FILE": "", "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shell = Shell(world.create("commands"), monkeypatch, capsysbinary)
    _commands(shell=shell, world=world, folder=tmp_path)
    assert COVERED == ARCHIVES

    flip(next((tmp_path / "a").rglob("*.parquet")))
    code, out, _ = shell.ends("spark", "archive", "--verify", str(tmp_path / "a"))
    assert (code, "is damaged" in out, out.endswith(": 1 problem\n")) == (3, True, True)
    for wrong in (["q"], ["q", "--to", "a"], ["--verify", "a", "--once"], ["q", "--verify", "a"]):
        assert shell.ends("spark", "archive", *wrong)[0] == 2
    code, _, err = shell.ends("spark", "archive", "--verify", str(tmp_path / "c"))
    assert (code, "is not an archive" in err) == (3, True)
