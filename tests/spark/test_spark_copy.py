"""The job `copy`: what drains is in the open partitions, what is copied elsewhere is there, each item once, and tells what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, Progress, copy
from tests.cli.cli_shell import COPIES, Shell, covering
from tests.server.test_server_reload import child
from tests.spark.spark_world import Server, kill_group, server, start_child, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("other")) as running:
        yield running


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return session("tests", **{"spark.sql.shuffle.partitions": 2, "spark.sql.session.timeZone": "Pacific/Auckland"})


def fill(world: Server, queue: str, first: int, end: int) -> None:
    for start in range(first, end, 100):
        numbers = range(start, min(start + 100, end))
        items = [
            {"utf8": str(n), "kind": f"kind {n % 3}", "reference": str(n), "key": f"c {n}", "priority": n % 10, "headers": {"n": str(n)}}
            for n in numbers
        ]
        world.call("/v1/queue.produce", queue_name=queue, items=items)


def waiting(world: Server, queue: str) -> dict[str, dict[str, Any]]:
    """All that is ready, by reference. Fails if one is there twice."""
    found: list[dict[str, Any]] = []
    for part in world.call("/v1/queues.info", queue_name=queue)["partitions"]:
        cursor = None
        while True:
            more: dict[str, Any] = {} if cursor is None else {"cursor": cursor}
            page = world.call("/v1/queue.browse", queue_name=queue, partition=part["partition"], **more)
            found += page["items"]
            cursor = page["cursor"]
            if cursor is None:
                break
    assert set(Counter(each["reference"] for each in found).values()) <= {1}
    return {each["reference"]: each for each in found}


def drain(world: Server, queue: str, partitions: int) -> str:
    """Begin a rebalance to so many partitions; its id, when it drains."""
    begun = world.call("/v1/queue.rebalance", queue_name=queue, requested_partitions=partitions)["id"]
    until("it drains", lambda: world.call("/v1/rebalances.get", id=begun)["step"] == "drain")
    return str(begun)


@pytest.mark.slow
def test_what_drains_goes_to_the_open_partitions(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("draining", partitions=4, lease_timeout="1d")
    fill(world, queue, 0, 3_000)
    # Some were tried before.
    leased = world.call("/v1/queue.lease", queue_name=queue, client_id="t", batch_size=200, max_partitions=4)["items"]
    world.call("/v1/queue.retry", queue_name=queue, items=[{"id": each["id"], "retry_after": "0s"} for each in leased])
    before = waiting(world, queue)
    assert len(before) == 3_000
    rebalance = drain(world, queue, 2)
    going = {part["partition"] for part in world.call("/v1/queues.info", queue_name=queue)["partitions"] if part["state"] == "draining"}
    # Some are in other hands meanwhile.
    held = [
        item["id"] for item in world.call("/v1/queue.lease", queue_name=queue, client_id="t", batch_size=40, partition=min(going))["items"]
    ]
    before = {reference: item for reference, item in before.items() if item["id"] not in held}
    assert len(before) == 2_960

    # So many batches that it cannot be done by the time the first of them is told.
    seen: list[Progress] = []
    first = copy(spark, Place(world.url, queue), checkpoint=tmp_path / "c", max_items=40, tell=seen.append, stop=lambda: bool(seen))
    rest = copy(spark, Place(world.url, queue), checkpoint=tmp_path / "c", max_items=1_000)
    assert (first.stopped, rest.stopped, rest.left) == (True, False, 40)
    world.call("/v1/queue.complete", queue_name=queue, ids=held)
    until("the rebalance ends", lambda: world.call("/v1/rebalances.get", id=rebalance)["state"] == "done")
    after = waiting(world, queue)
    assert after.keys() == before.keys()
    for reference, item in after.items():
        old = before[reference]
        assert {name: item[name] for name in ("bytes", "kind", "key", "priority")} == {
            name: old[name] for name in ("bytes", "kind", "key", "priority")
        }
        if old["partition"] in going:
            told = {
                "sluiceway-origin": old["origin"],
                "sluiceway-attempts": str(old["attempts"]),
                "sluiceway-enqueued-at": old["enqueued_at"],
            }
            told["sluiceway-enqueued-at"] = f"{told['sluiceway-enqueued-at'][:19]}Z"
            assert (item["headers"], item["attempts"]) == ({"n": reference} | told, 0)
        else:
            assert (item["id"], item["headers"], item["attempts"]) == (old["id"], {"n": reference}, old["attempts"])
    assert (world.count(queue, "leases"), world.count(queue, "moved")) == (0, 0)

    # Started once more with its checkpoint it finds nothing to do; anew, it says so.
    assert copy(spark, Place(world.url, queue), checkpoint=tmp_path / "c").items == 0
    with pytest.raises(
        SluicewayError, match="queue: no partition of draining is draining; start a rebalance, or name the queue to copy to"
    ):
        copy(spark, Place(world.url, queue), checkpoint=tmp_path / "d")


@pytest.mark.slow
def test_to_a_queue_of_another_server_and_on(spark: SparkSession, world: Server, other: Server, tmp_path: Path) -> None:
    queue, target = world.create("here", partitions=3), other.create("there", partitions=2)
    # Its producer says that it was tried as often as can be told, and it is tried twice more.
    boast = {"sluiceway-attempts": "2147483647"}
    world.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": "boast", "reference": "boast", "headers": boast}])
    for _ in range(2):
        (item,) = world.call("/v1/queue.lease", queue_name=queue, client_id="t", batch_size=1, max_partitions=3)["items"]
        world.call("/v1/queue.retry", queue_name=queue, items=[{"id": item["id"], "retry_after": "0s"}])
    fill(world, queue, 0, 500)
    # Its headers leave no room for others.
    full = {"x": "y" * 8_150}
    world.call("/v1/queue.produce", queue_name=queue, items=[{"utf8": "full", "reference": "full", "headers": full}])
    before = waiting(world, queue)
    done = copy(spark, Place(world.url, queue), to=Place(other.url, target), checkpoint=tmp_path / "c")
    assert (done.items, done.left, world.count(queue, "total")) == (502, 0, 0)
    there = waiting(other, target)
    assert there.keys() == before.keys()
    assert there.pop("full")["headers"] == full
    assert there["boast"]["headers"]["sluiceway-attempts"] == "2147483647"
    assert all(item["headers"]["sluiceway-origin"] == before[reference]["origin"] for reference, item in there.items())

    # The checkpoint is not that of a queue of this name elsewhere.
    with pytest.raises(SluicewayError, match=f"checkpoint: .* is that of copy with queue '{queue} "):
        copy(spark, Place(other.url, other.create(queue)), to=Place(other.url, target), checkpoint=tmp_path / "c")

    # Back: it keeps telling where it was first; and whatever comes meanwhile.
    fill(world, queue, 500, 510)
    back = copy(
        spark,
        Place(other.url, target),
        to=Place(world.url, queue),
        checkpoint=tmp_path / "d",
        follow=True,
        stop=lambda: other.count(target, "total") == 0,
    )
    assert (back.items, back.stopped) == (502, True)
    again = waiting(world, queue)
    assert all(again[reference]["headers"]["sluiceway-origin"] == before[reference]["origin"] for reference in there)
    assert again.keys() == {*before, *map(str, range(500, 510))}


def test_what_would_be_wrong_is_refused(
    spark: SparkSession, world: Server, other: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str, queue: str, to: Place | None = None, **more: Any) -> None:
        with pytest.raises(SluicewayError, match=words):
            copy(spark, Place(world.url, queue), to=to, **{"checkpoint": tmp_path / "c"} | more)

    graves = world.create("graves", partitions=4)
    world.create("mourned", dead_queue=graves)
    fill(world, graves, 0, 400)
    drain(world, graves, 2)
    refused("queue: graves is the dead queue of mourned, .*--drain copy", graves)
    line = world.create("line", partitions=1)
    fill(world, line, 0, 10)
    refused("to_queue: must differ from the queue that the items come from", line, Place(world.url.replace("127.0.0.1", "localhost"), line))
    refused("there is no queue .*; create it first", line, Place(other.url, "nowhere"))
    refused("consumer: this option is required", line, consumer="")
    monkeypatch.setenv("SLUICEWAY_API_KEY", "slw_x_y")
    refused("to_key: SLUICEWAY_API_KEY is for http", line, Place(other.url, other.create("elsewhere")))
    monkeypatch.delenv("SLUICEWAY_API_KEY")
    assert world.count(line, "leased") == 0
    assert not (tmp_path / "c").exists()


def test_a_queue_that_keeps_its_order_is_not_copied(spark: SparkSession, tmp_path: Path) -> None:
    text = "[backends.a]\nkind = 'sqlite'\n"
    with child(tmp_path, text) as moving:
        moving.ask("queues.create", queue_name="line")
        moving.ask("queue.produce", queue_name="line", items=[{"utf8": "first"}])
        moving.file.write_text(f"{text}partition_affinity = 0.0\n{text.replace('.a', '.b')}")
        moving.ask("config.reload")
        moving.ask("queue.rebalance", queue_name="line")
        with pytest.raises(SluicewayError, match="queue: line keeps its order in this rebalance, and copying would break it"):
            copy(spark, Place(moving.url, "line"), checkpoint=tmp_path / "c")
        assert not (tmp_path / "c").exists()


KILLED = """
import sys
from sluiceway.spark import session
from sluiceway.spark.jobs import Place, copy

url, source, target, checkpoint = sys.argv[1:]
spark = session("killed", **{"spark.driver.memory": "1g"})
copy(spark, Place(url, source), to=Place(url, target), checkpoint=checkpoint, max_items=500)
"""


def killed_at(written: int, world: Server, queue: str, target: str, checkpoint: Path) -> None:
    process = start_child(KILLED, world.url, queue, target, str(checkpoint))
    try:
        until("it writes", lambda: world.count(target, "produced") >= written or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
    finally:
        kill_group(process)


@pytest.mark.slow
def test_each_item_is_there_once_whatever_is_killed(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue, target = world.create("killed", partitions=3), world.create("survivor", partitions=3)
    fill(world, queue, 0, 4_000)
    # In the middle of a batch's writing, most likely; whenever it is, nothing may come of it.
    for written in (1, 900, 1_700):
        killed_at(written, world, queue, target, tmp_path / "c")
    done = copy(spark, Place(world.url, queue), to=Place(world.url, target), checkpoint=tmp_path / "c")
    assert done.left == 0
    assert waiting(world, target).keys() == set(map(str, range(4_000)))
    assert (world.count(queue, "total"), world.count(target, "produced")) == (0, 4_000)


COVERED: set[str] = set()
verb = covering(COVERED)


@verb("spark copy")
def _commands(shell: Shell, folder: Path, world: Server) -> None:
    how = ["spark", "copy", shell.queue, "--checkpoint", str(folder / "c")]
    code, _, err = shell.ends(*how)
    assert (code, f"no partition of {shell.queue} is draining" in err) == (3, True), err
    to = [*how, "--to-queue", "taken", "--to-url", world.url]
    assert shell.says(*to) == "Copied 50 items in 1 batch; 0 left\n"
    assert shell.json(*to)[-1] == {"items": 0, "batches": 0, "left": 0, "stopped": False}
    assert shell.ends(*how, "--follow")[0] == 2
    assert shell.ends(*how, "--to-queue", "taken", "--to-key", "env:X")[0] == 2


@pytest.mark.slow
def test_the_command(
    spark: SparkSession, world: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    # The command stops the session that it uses.
    spark.stop()
    fill(world, world.create("asked"), 0, 50)
    world.create("taken")
    for name, value in {"SLUICEWAY_URL": world.url, "SLUICEWAY_API_KEY": "", "SLUICEWAY_CA_FILE": ""}.items():
        monkeypatch.setenv(name, value)
    _commands(shell=Shell("asked", monkeypatch, capsysbinary), folder=tmp_path, world=world)
    assert COVERED == COPIES
