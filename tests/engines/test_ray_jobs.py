"""Ray Data reads a queue and settles it by row: jobs that end well, that fail, and whose workers are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluiceway import testing
from sluiceway.client import SluicewayError
from tests.client.test_consumer import total
from tests.engines.engine_imports import engine
from tests.server.server_running import eventually

ray: Any = engine("ray")
engine("ray.data")

from sluiceway.ray import QueueSink, QueueSource, SettleSink  # noqa: E402 - not without ray

ITEMS = 2_000


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on two cores of this machine, with a small object store. Its folder has a short name, since sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def produce(served: testing.TestServer, queue: str, items: int = ITEMS) -> None:
    for start in range(0, items, 500):
        client = served.client
        client.produce_arrow(queue, pa.table({"payload": [str(number).encode() for number in range(start, min(items, start + 500))]}))


def counts(served: testing.TestServer, queue: str) -> dict[str, int]:
    return {name: total(served.client, queue, name) for name in ("completed", "dead", "ready", "scheduled", "total_leased")}


def settled(served: testing.TestServer, queue: str) -> None:
    """Each item has the outcome of `doubled`. Dead ones leave for their queue a little later."""
    eventually(lambda: counts(served, queue) == {"completed": ITEMS - 21, "dead": 20, "ready": 1, "scheduled": 0, "total_leased": 0})


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Inference, so to speak: multiples of 100 are no good, and 7 is for later."""
    numbers = [int(payload) for payload in batch["payload"]]
    outcome = ["dead" if number % 100 == 0 else "retry" if number == 7 else "done" for number in numbers]
    return {
        "id": batch["id"],
        "number": numbers,
        "double": [2 * number for number in numbers],
        "outcome": outcome,
        "reason": ["a multiple of 100" if each == "dead" else "" for each in outcome],
    }


class Files(ray.data.Datasink):  # type: ignore[misc]
    """A sink of one file for each task, and of a mark that all of them are written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, blocks: Any, ctx: Any) -> str:
        rows = pa.concat_tables([ray.data.block.BlockAccessor.for_block(block).to_arrow() for block in blocks])
        name = f"{ctx.task_idx}.parquet"
        pq.write_table(rows, self.folder / name)
        return name

    def on_write_complete(self, write_result: Any) -> None:
        (self.folder / "_SUCCESS").write_text(" ".join(sorted(write_result.write_returns)))


def read(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in folder.glob("*.parquet")])


def test_results_are_stored_and_then_items_are_settled_by_row(served: testing.TestServer, queue: str, tmp_path: Path) -> None:
    produce(served, queue)
    with QueueSource(queue, url=served.url, columns=["payload"]) as source:
        assert source.count == ITEMS
        results = ray.data.read_datasource(source, override_num_blocks=4).map_batches(doubled, batch_size=100)
        results.write_datasink(SettleSink(source, after=Files(tmp_path)))
        assert source.count == 0
    settled(served, queue)
    rows = read(tmp_path)
    assert rows.schema.names == ["id", "number", "double"]
    done = [number for number in range(ITEMS) if number % 100 and number != 7]
    assert sorted(rows["double"].to_pylist()) == [2 * number for number in done]
    assert (tmp_path / "_SUCCESS").read_text().split()
    (dead, *_) = served.client.lease(f"{queue}.dead", request_timeout="1m")
    assert (dead.headers or {})["sluiceway-reason"] == "a multiple of 100"


def test_without_outcomes_each_row_is_done_and_items_without_a_row_are_released(served: testing.TestServer, queue: str) -> None:
    produce(served, queue)
    with QueueSource(queue, url=served.url, max_items=1_500) as source:
        rows = ray.data.read_datasource(source).filter(lambda row: int(row["payload"]) % 3 != 0)
        rows.select_columns(["id"]).write_datasink(SettleSink(source))
    found = counts(served, queue)
    assert found["completed"] + found["ready"] == ITEMS
    assert found["completed"] == total(served.client, queue, "leased") * 2 // 3
    assert total(served.client, queue, "retried") == 0


def test_a_source_that_is_not_settled_gives_back_its_items(served: testing.TestServer, queue: str) -> None:
    produce(served, queue, 100)
    with QueueSource(queue, url=served.url) as source:
        dataset = ray.data.read_datasource(source)
        first, second = dataset.take_all(), dataset.take_all()
        assert sorted(row["id"] for row in first) == sorted(row["id"] for row in second)
        assert {row["attempts"] for row in first} == {1}
        assert counts(served, queue)["total_leased"] == 100
    assert counts(served, queue)["ready"] == 100


def test_an_empty_queue_is_an_empty_dataset(served: testing.TestServer, queue: str) -> None:
    with QueueSource(queue, url=served.url) as source:
        assert source.count == 0
        dataset = ray.data.read_datasource(source)
        assert dataset.take_all() == []
        dataset.map_batches(doubled).write_datasink(SettleSink(source))


def killing(folder: Path, signal_number: int) -> Any:
    """A function that kills its own process, once in all."""

    def infer(batch: dict[str, Any]) -> dict[str, Any]:
        if any(int(payload) == 1_234 for payload in batch["payload"]):
            try:
                (folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal_number)
        return doubled(batch)

    return infer


def test_a_killed_worker_loses_and_doubles_nothing(served: testing.TestServer, queue: str, tmp_path: Path) -> None:
    produce(served, queue)
    results = tmp_path / "results"
    results.mkdir()
    with QueueSource(queue, url=served.url, columns=["payload"]) as source:
        dataset = ray.data.read_datasource(source, override_num_blocks=8)
        dataset.map_batches(killing(tmp_path, signal.SIGKILL), batch_size=50).write_datasink(SettleSink(source, after=Files(results)))
    assert (tmp_path / "killed").exists()
    settled(served, queue)
    written = Counter(read(results)["number"].to_pylist())
    assert written == Counter(number for number in range(ITEMS) if number % 100 and number != 7)


def test_a_job_that_fails_settles_nothing_and_its_items_come_back(served: testing.TestServer, queue: str, tmp_path: Path) -> None:
    produce(served, queue)

    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        if any(int(payload) == 1_999 for payload in batch["payload"]):
            raise ValueError("this item breaks the model")
        return doubled(batch)

    def job() -> None:
        with QueueSource(queue, url=served.url, lease_timeout="1m") as source:
            dataset = ray.data.read_datasource(source, override_num_blocks=8).map_batches(fail, batch_size=50)
            dataset.write_datasink(SettleSink(source, after=Files(tmp_path)))

    with pytest.raises(Exception, match="this item breaks the model"):
        job()
    assert counts(served, queue) == {"completed": 0, "dead": 0, "ready": 0, "scheduled": 0, "total_leased": ITEMS}
    assert not (tmp_path / "_SUCCESS").exists()
    served.clock.advance("61s")
    assert counts(served, queue)["ready"] == ITEMS
    with QueueSource(queue, url=served.url) as source:
        assert source.count == ITEMS
        rows = ray.data.read_datasource(source).select_columns(["id", "attempts"])
        assert rows.unique("attempts") == [2]
        rows.select_columns(["id"]).write_datasink(SettleSink(source))
    assert counts(served, queue)["completed"] == ITEMS


def test_items_of_a_killed_driver_come_back(served: testing.TestServer, queue: str) -> None:
    produce(served, queue, 100)
    program = f"""if True:
        import sys
        from sluiceway.ray import QueueSource
        source = QueueSource({queue!r}, url={served.url!r}, lease_timeout="1m")
        print(source.count, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "100\n"
        assert counts(served, queue)["total_leased"] == 100
        driver.kill()
    served.clock.advance("61s")
    assert (counts(served, queue)["ready"], total(served.client, queue, "expired")) == (100, 100)


def test_a_settled_source_is_not_read_again(served: testing.TestServer, queue: str) -> None:
    produce(served, queue, 10)
    with QueueSource(queue, url=served.url) as source:
        rows = ray.data.read_datasource(source)
        rows.write_datasink(SettleSink(source))
        with pytest.raises(SluicewayError, match="its items are settled or released"):
            source.get_read_tasks(1)


def test_a_result_that_cannot_be_stored_settles_nothing(served: testing.TestServer, queue: str, tmp_path: Path) -> None:
    produce(served, queue, 100)

    class Refuses(Files):
        def on_write_complete(self, write_result: Any) -> None:
            raise OSError("the disk is full")

    def job() -> None:
        with QueueSource(queue, url=served.url) as source:
            ray.data.read_datasource(source).map_batches(doubled).write_datasink(SettleSink(source, after=Refuses(tmp_path)))

    with pytest.raises(OSError, match="the disk is full"):
        job()
    assert counts(served, queue)["completed"] == 0
    assert counts(served, queue)["total_leased"] == 100


def test_a_lease_that_is_lost_fails_its_read_and_nothing_is_settled(served: testing.TestServer, queue: str) -> None:
    produce(served, queue, 100)

    def job() -> None:
        with QueueSource(queue, url=served.url) as source:
            served.clock.advance("6m")
            ray.data.read_datasource(source).write_datasink(SettleSink(source))

    with pytest.raises(Exception, match="lease"):
        job()
    assert counts(served, queue) == {"completed": 0, "dead": 0, "ready": 100, "scheduled": 0, "total_leased": 0}


def test_rows_become_items(served: testing.TestServer, queue: str) -> None:
    rows = ray.data.range(5_000, override_num_blocks=3).map_batches(
        lambda batch: {"payload": [str(number) for number in batch["id"]], "kind": ["number"] * len(batch["id"])}
    )
    sink = QueueSink(queue, url=served.url, chunk_items=700)
    rows.write_datasink(sink)
    rows.write_datasink(sink)
    found: Counter[bytes] = Counter()
    while len(leased := served.client.lease_arrow(queue, batch_size=10_000, max_partitions=4)):
        found.update(leased.rows()["payload"].to_pylist())
    assert found == Counter({str(number).encode(): 2 for number in range(5_000)})


@pytest.mark.parametrize("dies", ["after it has stored its results", "after it has staged its outcomes"])
def test_items_go_from_queue_to_queue_and_a_killed_worker_stores_nothing_twice(
    served: testing.TestServer, queue: str, tmp_path: Path, dies: str
) -> None:
    produce(served, queue)
    target = f"{queue}.results"
    served.client.create_queue(target, requested_partitions=2)

    def die_once() -> None:
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class Stores(QueueSink):
        def write(self, blocks: Any, ctx: Any) -> int:
            rows = super().write(blocks, ctx)
            if dies == "after it has stored its results":
                die_once()
            return rows

    class Settles(SettleSink):
        def write(self, blocks: Any, ctx: Any) -> Any:
            staged = super().write(blocks, ctx)
            die_once()
            return staged

    def infer(batch: dict[str, Any]) -> dict[str, Any]:
        made = doubled(batch)
        return {"id": made["id"], "outcome": made["outcome"], "payload": [str(each) for each in made["double"]]}

    with QueueSource(queue, url=served.url) as source:
        dataset = ray.data.read_datasource(source, override_num_blocks=8).map_batches(infer, batch_size=50)
        dataset.write_datasink(Settles(source, after=Stores(target, url=served.url)))
    assert (tmp_path / "killed").exists()
    settled(served, queue)
    stored = served.client.lease_arrow(target, batch_size=10_000, max_partitions=2).rows()["payload"].to_pylist()
    assert Counter(stored) == Counter(str(2 * number).encode() for number in range(ITEMS) if number % 100 and number != 7)


def test_a_sink_refuses_columns_that_are_none_of_an_item(served: testing.TestServer, queue: str) -> None:
    with pytest.raises(Exception, match="unknown column of an item"):
        ray.data.from_items([{"payload": "x", "label": "y"}]).write_datasink(QueueSink(queue, url=served.url))
    assert counts(served, queue)["ready"] == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [({"max_items": 0}, "max_items"), ({"columns": ["body"]}, "columns"), ({"api_key": "slw_x_y"}, "api_key")],
)
def test_a_wrong_option_of_a_source_is_named(served: testing.TestServer, queue: str, options: dict[str, Any], field: str) -> None:
    with pytest.raises(SluicewayError) as refused:
        QueueSource(queue, url=served.url, **options)
    assert refused.value.field == field
