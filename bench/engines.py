"""Items a second that other engines read from a queue and complete: `python -m bench engines`.

Each engine reads the same items, stored anew for it, from a server on loopback with four SQLite partitions (FULL): it leases them, counts
the bytes of their payloads with means of its own, and completes them. The rounds of the engines alternate; the median is shown. Engines
that are not installed are left out: `build/engines/bin/python -m bench engines`, after `make test-engines`, has all of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.bench.servers import SLUICEWAY
from sluiceway.bench.servers import server as running
from sluiceway.client import Client
from sluiceway.client.lease_stream import LeaseStream

QUEUE = "items"


def pyarrow(client: Client, items: int) -> int:
    """The stream by itself."""
    total = 0
    with LeaseStream(client, QUEUE, max_items=items) as stream:
        for batch in stream.reader():
            total += pc.sum(pc.binary_length(batch["payload"])).as_py()
    return total


def polars(client: Client, items: int) -> int:
    import polars as engine

    with LeaseStream(client, QUEUE, max_items=items) as stream:
        return int(engine.DataFrame(stream)["payload"].bin.size().sum())


def duckdb(client: Client, items: int) -> int:
    import duckdb as engine

    with LeaseStream(client, QUEUE, max_items=items) as stream, engine.connect() as database:
        database.register("stream", stream.reader())
        (total,) = database.sql("SELECT sum(octet_length(payload)) FROM stream").fetchall()[0]
        return int(total)


def pandas(client: Client, items: int) -> int:
    with LeaseStream(client, QUEUE, max_items=items) as stream:
        return int(stream.reader().read_pandas()["payload"].map(len).sum())


def daft(client: Client, items: int) -> int:
    engine: Any = importlib.import_module("daft")
    with LeaseStream(client, QUEUE, max_items=items) as stream:
        frame = engine.from_arrow(stream.reader())
        table = frame.select(frame["payload"].length().alias("bytes")).sum("bytes").to_pydict()
        return int(table["bytes"][0])


def torch(client: Client, items: int) -> int:
    engine: Any = importlib.import_module("torch.utils.data")
    from sluiceway.client.torch_dataset import QueueDataset

    dataset = QueueDataset(QUEUE, url=_url(client), batch_size=10_000)
    total = 0
    for batch in engine.DataLoader(dataset, batch_size=1_000):
        total += sum(map(len, batch["payload"]))
        dataset.settle({"id": batch["id"], "outcome": ["done"] * len(batch["id"])})
    dataset.close()
    return total


def ray(client: Client, items: int) -> int:
    """One job: read, measure, settle."""
    data: Any = importlib.import_module("ray.data")
    from sluiceway.ray import QueueSource, SettleSink

    class Total(data.Datasink):  # type: ignore[misc]
        total = 0

        def write(self, blocks: Any, ctx: Any) -> int:
            return sum(pc.sum(block["bytes"]).as_py() for block in blocks)

        def on_write_complete(self, write_result: Any) -> None:
            self.total = sum(write_result.write_returns)

    def sizes(table: pa.Table) -> pa.Table:
        return pa.table({"id": table["id"], "bytes": pc.binary_length(table["payload"])})

    with QueueSource(QUEUE, url=_url(client), max_items=items, columns=["payload"]) as source:
        rows = data.read_datasource(source, override_num_blocks=max(4, items // 10_000))
        total = Total()
        rows.map_batches(sizes, batch_format="pyarrow").write_datasink(SettleSink(source, after=total))
        return total.total


ENGINES: dict[str, Callable[[Client, int], int]] = {
    "pyarrow": pyarrow,
    "polars": polars,
    "duckdb": duckdb,
    "pandas": pandas,
    "daft": daft,
    "torch": torch,
    "ray": ray,
}


def _url(client: Client) -> str:
    return client._channel.endpoint.url


def fill(client: Client, items: int, size: int) -> None:
    most = min(5_000, (16 << 20) // size)
    for start in range(0, items, most):
        count = min(most, items - start)
        client.produce_arrow(QUEUE, pa.table({"payload": pa.array([os.urandom(size) for _ in range(count)], pa.binary())}))


@contextmanager
def started(names: Sequence[str]) -> Iterator[None]:
    """What an engine starts once, and not for each job."""
    if "ray" not in names:
        yield
        return
    engine: Any = importlib.import_module("ray")
    engine.init(num_cpus=2, object_store_memory=500 << 20, include_dashboard=False, log_to_driver=False)
    importlib.import_module("ray.data").DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        engine.shutdown()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench engines", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[100, 10_000], help="sizes of payloads; each has a tenth of the items")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    names = [name for name in given.engines if importlib.util.find_spec(name)]
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    print(f"left out: {', '.join(sorted({*given.engines} - {*names})) or 'none'}")
    with started(names):
        for at, size in enumerate(given.bytes):
            measure(names, given.items // 10**at, size, given.rounds)
    return 0


def measure(names: Sequence[str], items: int, size: int, rounds: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(SLUICEWAY, Path(folder) / "data", "--port", "0") as server,
        Client(server.url) as client,
    ):
        client.create_queue(QUEUE, requested_partitions=4)
        # The first round is each engine's warm-up.
        for number in range(rounds + 1):
            for name in names:
                fill(client, items, size)
                began = time.perf_counter()
                total = ENGINES[name](client, items)
                took = time.perf_counter() - began
                if total != items * size:
                    raise RuntimeError(f"{name} counted {total} bytes of {items * size}")
                if number:
                    seconds[name].append(took)
    print(f"\n{items:,} items of {size:,} B: items/s, median of {rounds} rounds")
    for name in names:
        print(f"{name:8} {items / statistics.median(seconds[name]):>12,.0f}")
