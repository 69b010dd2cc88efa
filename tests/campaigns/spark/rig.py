"""A server, and a driver that is started again and again until the queue is empty."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.spark import options
from sluiceway.spark.server_calls import Client
from tests.campaigns.spark import judging
from tests.campaigns.spark.driver import Work
from tests.campaigns.spark.hooks import Plan, Stage, in_session
from tests.campaigns.spark.judging import Faults
from tests.spark.spark_world import Server, until

BATCH = 12_000
"""Items of a batch: more than one call leases, and more than one task reads."""

ITEMS = 5 * BATCH

PATIENCE = 900.0
"""Seconds after which a driver that is neither at its point nor at its end hangs. A busy machine is slow."""

COUNTERS = ("produced", "completed", "retried", "dead", "expired", "total", "leases", "total_leased")

# Most of a short run of Spark is Java compiling itself.
QUICK = {
    "JAVA_TOOL_OPTIONS": "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
}


@dataclass(frozen=True)
class Seen:
    """What a driver has left behind: the last batch in Spark's logs (from 1; 0: none), and what it holds."""

    logged: int
    committed: int
    held: int


class Rig:
    """Three queues: `in`, its dead queue, and `out`."""

    def __init__(self, folder: Path, world: Server, items: int = ITEMS, batch: int = BATCH, partitions: int = 3) -> None:
        self.folder = folder
        self.world = world
        self.items = 0
        self.batch = batch
        self._runs = 0
        world.create("dead", partitions=1)
        world.create("in", partitions=partitions, dead_queue="dead")
        world.create("out", partitions=2)
        self.fill(items)

    def fill(self, items: int) -> None:
        """So many items more, whose payloads are their numbers."""
        first, self.items = self.items, self.items + items
        client = self._client("in")
        with contextlib.closing(client):
            for start in range(first, self.items, 5_000):
                payloads = [str(number).encode() for number in range(start, min(self.items, start + 5_000))]
                client.send_arrow("/v1/queue.produce", {"queue_name": "in"}, pa.record_batch({"payload": pa.array(payloads, pa.binary())}))

    def run(self, work: Work, stages: Sequence[Stage] = (), sabotage: str = "", place: Path | None = None) -> Driver:
        """Start a driver. `place`: where its checkpoint and its sinks are, if not in the rig's folder."""
        self._runs += 1
        place = place or self.folder
        return Driver(place, f"driver{self._runs}", self._complete(work, place), Plan(place, stages, sabotage))

    def _complete(self, work: Work, place: Path) -> Work:
        given = asdict(work)
        given["options"] = {"maxItemsPerTrigger": str(self.batch), **work.options}
        return Work(**{**given, "url": self.world.url, "folder": str(place)})

    def seen(self, place: Path | None = None) -> Seen:
        checkpoint = (place or self.folder) / "checkpoint"
        return Seen(_newest(checkpoint / "offsets"), _newest(checkpoint / "commits"), self.world.count("in", "total_leased"))

    def counters(self, queue: str = "in") -> dict[str, int]:
        return {name: self.world.count(queue, name) for name in COUNTERS}

    def names(self, queue: str) -> pa.ChunkedArray:
        """The payloads of all that is ready in it."""
        found = []
        info = self.world.call("/v1/queues.info", queue_name=queue)
        client = self._client(queue)
        with contextlib.closing(client):
            for partition in info["partitions"]:
                begin: dict[str, object] = {"states": ["ready"]}
                while begin:
                    body = {"queue_name": queue, "partition": partition["partition"], "limit": 10_000, **begin}
                    answer = client.fetch_arrow("/v1/queue.browse", body)
                    cursor = json.loads(answer.schema.metadata[b"sluiceway"])["cursor"]
                    found += answer.read_all().column("payload").cast(pa.utf8()).chunks
                    begin = {"cursor": cursor} if cursor else {}
        return pa.chunked_array(found, pa.utf8())

    def judge(self, sinks: str, moved: bool = False, places: Sequence[Path] = ()) -> Faults:
        """Everything, when no driver runs and nothing is left. `moved`: partitions were removed, and with them what they had counted.

        `places`: those of several queries, which have done all of it together.
        """
        places = places or (self.folder,)
        faults = sum((judging.judge_reads(place / "reads")[0] for place in places), Faults())
        counters = {name: count for name, count in self.counters().items() if not moved or name in ("total", "leases")}
        if sinks == "each":
            rows = pa.concat_tables([judging.folders(place) for place in places])
            final = rows.filter(pc.not_equal(rows.column("outcome"), "retry")).column("text")
            faults += judging.judge_names("the sink that replaces", final, self.items, once=True)
            faults += judging.judge_names("the queue written by keys", self.names("out"), self.items, once=True)
            plain = pa.concat_tables([judging.read_parquet(place / "plain") for place in places]).column("text")
            faults += judging.judge_names("the plain sink", plain, self.items, once=False)
            return faults + judging.judge_outcomes(rows, counters, self.names("dead"), self.items)
        tenth = self.items // 10 if sinks == "settle" else 0
        expected = {"produced": self.items, "completed": self.items - tenth, "retried": tenth, "dead": tenth}
        found = [("miscounted", f"{name} is {counters[name]}, not {count}") for name, count in expected.items() if counters[name] != count]
        if sinks == "stream":
            faults += judging.judge_names("the streaming sink", self.names("out"), self.items, once=True)
        return faults + Faults(tuple(found)) + judging.judge_rest(counters)

    def _client(self, queue: str) -> Client:
        return Client(options.Server(self.world.url, queue, 60_000))


class Driver:
    """A child with all that it starts, in a session of its own."""

    def __init__(self, folder: Path, name: str, work: Work, plan: Plan) -> None:
        self.plan = plan
        self._log = folder / f"{name}.log"
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(os.pathsep)
        env = {**os.environ, **QUICK, **plan.to_environment(), "PYTHONPATH": path}
        # Spark makes folders where it stands.
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "tests.campaigns.spark.driver", json.dumps(asdict(work))]
            self._child = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True)

    def wait(self) -> int:
        """Its exit code, when nothing of it runs any more."""
        until(f"the end of the driver; see {self._log}", lambda: self._child.poll() is not None, PATIENCE)
        code = self._child.wait()
        until("the end of what the driver has started", lambda: not in_session(self._child.pid))
        return code

    def until_reached(self, stage: Stage) -> None:
        path = self.plan.reached(stage)
        until(f"{stage.name}; see {self._log}", lambda: path.exists() or self._child.poll() is not None, PATIENCE)
        assert path.exists(), f"the driver ended before {stage.name}: {self.tail()}"

    def release(self, stage: Stage) -> None:
        self.plan.released(stage).touch()

    def over(self) -> bool:
        return self._child.poll() is not None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def was_starved(self) -> bool:
        """Spark gave up on a Python process of its own that did not start within ten seconds: the machine is too busy, start it again."""
        return any(sign in self.log() for sign in ("failed to connect back", "CANNOT_OPEN_SOCKET"))

    def tail(self) -> str:
        return self.log()[-1_500:]

    def end(self) -> None:
        """Of it, and of all that belongs to it."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self._child.wait()
        for pid in in_session(self._child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


@contextlib.contextmanager
def ended(driver: Driver) -> Iterator[Driver]:
    try:
        yield driver
    finally:
        driver.end()


def _newest(folder: Path) -> int:
    """The number of the last batch in one of Spark's logs, from 1."""
    return max((int(path.name) + 1 for path in folder.glob("[0-9]*")), default=0)
