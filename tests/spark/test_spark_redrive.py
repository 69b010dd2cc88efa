"""The job `redrive`: dead items that a condition matches go back, once; the others stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, look, redrive
from tests.cli.cli_shell import REDRIVES, Shell, covering
from tests.spark.spark_world import Server, server, until

pytestmark = pytest.mark.spark
MODULE = sys.modules["sluiceway.spark.jobs.redrive_job"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2})


def bury(world: Server, dead: str, source: str, texts: list[str], reason: str) -> None:
    """Items of `source` that died in it, with a header of their own and one that lies about where they came from."""
    own = {"n": "1", "sluiceway-queue": "elsewhere"}
    items = [{"utf8": text, "kind": f"kind {text}", "reference": text, "key": f"c {text}", "priority": 0, "headers": own} for text in texts]
    before = world.count(dead, "produced")
    world.call("/v1/queue.produce", queue_name=source, items=items)
    leased = world.call("/v1/queue.lease", queue_name=source, client_id="t", batch_size=1_000, max_partitions=9)["items"]
    assert len(leased) == len(texts)
    gone = [{"id": each["id"], "dead": True, "reason": reason} for each in leased]
    world.call("/v1/queue.retry", queue_name=source, items=gone)
    until("they are in the dead queue", lambda: world.count(dead, "produced") == before + len(texts))


def waiting(world: Server, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.call("/v1/queue.peek", queue_name=queue, limit=1_000)["items"]
    return found


def texts(world: Server, queue: str) -> list[str]:
    return sorted(each["reference"] for each in waiting(world, queue))


@pytest.fixture
def place(world: Server, request: pytest.FixtureRequest) -> Place:
    """A dead queue with 20 items from two queues, and one that was produced into it and lies."""
    dead = world.create(f"{request.node.name[:40]}.dead", partitions=2)
    for name in ("one", "two"):
        source = world.create(f"{request.node.name[:40]}.{name}", dead_queue=dead)
        bury(world, dead, source, [f"{name} {n}" for n in range(5)], "timeout: no answer")
        bury(world, dead, source, [f"{name} {n}" for n in range(5, 10)], "malformed")
    liar = {
        "utf8": "liar",
        "reference": "liar",
        "headers": {"sluiceway-queue": f"{request.node.name[:40]}.one", "sluiceway-reason": "timeout"},
    }
    world.call("/v1/queue.produce", queue_name=dead, items=[liar])
    return Place(world.url, dead)


def test_what_matches_goes_back_and_the_rest_stays(spark: SparkSession, world: Server, place: Place, tmp_path: Path) -> None:
    one, two = (place.queue.replace(".dead", f".{name}") for name in ("one", "two"))
    where = "reason like 'timeout%' and attempts = 1 and cast(payload as string) != 'two 0'"
    seen = look(spark, place, where=where)
    assert (seen.looked, seen.matched, seen.targets, seen.homeless) == (21, 9, {one: 5, two: 4}, 0)
    assert [(each.reason, each.attempts, each.source == each.target) for each in seen.examples] == [("timeout: no answer", 1, True)] * 5
    assert world.count(place.queue, "leased") == 0
    # What was produced into the dead queue itself has no source, no reason and no attempts, whatever it says.
    assert look(spark, place, where="source is null and reason is null and attempts is null").homeless == 1

    origins = {each["reference"]: each["origin"] for each in waiting(world, place.queue)}
    done = redrive(spark, place, where=where, checkpoint=tmp_path / "c", max_items=8)
    assert (done.redriven, done.targets, done.stopped) == (9, {one: 5, two: 4}, False)
    assert texts(world, one) == [f"one {n}" for n in range(5)]
    assert texts(world, two) == [f"two {n}" for n in range(1, 5)]
    for each in waiting(world, two):
        assert each["headers"] == {"n": "1", "sluiceway-origin": origins[each["reference"]]}
        assert (each["attempts"], each["kind"], each["key"], each["priority"]) == (
            0,
            f"kind {each['reference']}",
            f"c {each['reference']}",
            0,
        )
    left = texts(world, place.queue)
    assert left == sorted(["liar", "two 0", *(f"{name} {n}" for name in ("one", "two") for n in range(5, 10))])
    assert world.count(place.queue, "leases") == 0
    kept = next(each for each in waiting(world, place.queue) if each["reference"] == "two 0")
    assert (kept["headers"]["sluiceway-reason"], kept["headers"]["sluiceway-attempts"]) == ("timeout: no answer", "1")

    # Nothing is left that matches; then the rest, to a queue of one's own choice.
    assert redrive(spark, place, where=where, checkpoint=tmp_path / "c").redriven == 0
    other = world.create("other")
    rest = redrive(spark, place, target=other, checkpoint=tmp_path / "d", rate=1_000)
    assert (rest.targets, texts(world, other), world.count(place.queue, "total")) == ({other: 12}, left, 0)


@pytest.mark.slow
def test_a_batch_that_runs_again_sends_nothing_twice(
    spark: SparkSession, world: Server, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (place.queue.replace(".dead", f".{name}") for name in ("one", "two"))

    def fail(outcomes: DataFrame, **_: object) -> None:
        raise SluicewayError("internal", "the driver is no more")

    # Produced, and not settled.
    with monkeypatch.context() as broken:
        broken.setattr(MODULE, "settle", fail)
        with pytest.raises(SluicewayError, match="the driver is no more"):
            redrive(spark, place, where="reason = 'malformed'", checkpoint=tmp_path / "c")
    assert (world.count(one, "total"), world.count(two, "total")) == (5, 5)
    with pytest.raises(SluicewayError, match=r"checkpoint: .* is that of redrive with .*; use another one"):
        redrive(spark, place, where="reason like 'time%'", checkpoint=tmp_path / "c")
    redrive(spark, place, where="reason = 'malformed'", checkpoint=tmp_path / "c")
    for name, queue in (("one", one), ("two", two)):
        assert texts(world, queue) == [f"{name} {n}" for n in range(5, 10)]
    assert len(texts(world, place.queue)) == world.count(place.queue, "total") == 11


def test_what_cannot_be_is_told_before_anything_is_leased(spark: SparkSession, world: Server, place: Place, tmp_path: Path) -> None:
    def refused(words: str, **more: Any) -> None:
        with pytest.raises(SluicewayError, match=words):
            redrive(spark, place, **{"checkpoint": tmp_path / "c"} | more)

    refused("where: .*raeson.*The columns are id, origin, source", where="raeson = 'x'")
    refused(r"where: this may choose other items when a batch is repeated; leave out rand\(\)", where="rand() < 0.5")
    refused("where: ", where="reason like")
    refused("target: there is no queue 'nowhere' to send items to", target="nowhere")
    refused("target: must differ from the queue that the items come from", target=place.queue)
    refused("consumer: this option is required", consumer="")
    # A condition that fails for some items is found while none is leased.
    refused("Spark: ", where="cast(reference as int) = 1")
    world.call("/v1/queues.update", queue_name=place.queue, max_attempts=3)
    refused("queue: .* has max_attempts")
    assert world.count(place.queue, "leased") == 0
    assert not (tmp_path / "c").exists()


COVERED: set[str] = set()
verb = covering(COVERED)


@verb("spark redrive")
def _commands(shell: Shell, folder: Path) -> None:
    how = ["spark", "redrive", shell.queue, "--where", "reference = 'one 3'"]
    out = shell.says(*how, "--dry-run")
    assert out.startswith("Would send back 1 of 21 items\n1 to ")
    assert out.endswith(", attempts 1, timeout: no answer: one 3\n")
    assert shell.json(*how, "--dry-run")[0]["examples"][0]["payload"] == "one 3"
    assert shell.says(*how, "--checkpoint", str(folder / "c")).startswith("Sent back 1 of 21 items\n1 to ")
    assert shell.ends(*how)[0] == 2


@pytest.mark.slow
def test_the_command(
    spark: SparkSession,
    world: Server,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    # The command stops the session that it uses.
    spark.stop()
    for name, value in {"SLUICEWAY_URL": world.url, "SLUICEWAY_API_KEY": "", "SLUICEWAY_CA_FILE": "", "PYTHONPATH": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", [*sys.path])
    _commands(shell=Shell(place.queue, monkeypatch, capsysbinary), folder=tmp_path)
    assert COVERED == REDRIVES
