"""A Kinesis stream whose shards split and merge while it is written to, and a capture of it into a queue with one partition."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config as ClientConfig

from sluiceway.client import Client
from tests.campaigns.kit.ledger import Tally, payload_of
from tests.campaigns.kit.report import Report
from tests.campaigns.tasks.processes import Config, Tasks, running
from tests.campaigns.tasks.records import Book, Place, ids, produced, take_all
from tests.server.server_process import COMMAND, PATIENCE, ServerProcess
from tests.servers import pids
from tests.servers.kafka_server import KafkaServer
from tests.servers.moto_server import ENVIRONMENT, REGION, MotoServer, open_shards, reshard, shards_of

STREAM, QUEUE, NAME = "orders", "captured", "orders"
SHARDS = 4
TASKS = 3
LEFT = 180.0
"""Seconds in which what was written has reached the queue, once nothing is disturbed any more."""

Make = Callable[[Path, Config, int, Mapping[str, str]], Tasks]


def once(endpoint: str) -> Any:
    """A client that does not repeat a call: what it was not told of may be there, but not twice."""
    session = boto3.session.Session(aws_access_key_id="tests", aws_secret_access_key="tests")
    return session.client("kinesis", region_name=REGION, endpoint_url=endpoint, config=ClientConfig(retries={"total_max_attempts": 1}))


class Writer:
    """Puts records under a few keys, in one thread, until it is ended."""

    def __init__(self, client: Any, book: Book, rate: int, who: str) -> None:
        """`rate`: records a second. `who`: the first part of their names."""
        self._client, self._book, self._who, self._pause = client, book, who, 0.2
        self._batch = max(1, int(rate * self._pause))
        self._random = random.Random(1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer")
        self.trouble: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        request = 0
        while not self._stopping.wait(self._pause):
            request += 1
            self.put(f"{self._who}.{request}")

    def put(self, request: str) -> None:
        names = [f"{request}.{number}" for number in range(self._batch)]
        keys = [f"key-{self._random.randrange(200)}" for _ in names]
        self._book.sending(names)
        try:
            answer = self._client.put_records(
                StreamName=STREAM,
                Records=[{"Data": payload_of(name).encode(), "PartitionKey": key} for name, key in zip(names, keys, strict=True)],
            )
        except Exception as error:
            # They may be there.
            self.trouble.append(repr(error))
            return
        for name, told in zip(names, answer["Records"], strict=True):
            if "ErrorCode" in told:
                self._book.refused([name])
            else:
                self._book.stored(name, Place(told["ShardId"], int(told["SequenceNumber"])))


class World:
    """The stream, the server with the queue, the meta store, and the tasks between them."""

    def __init__(self, report: Report, folder: Path, make: Make, moto: MotoServer, server: ServerProcess, log: str, rate: int) -> None:
        self.report, self.folder = report, folder
        self.client = Client(server.url)
        self.client.create_queue(QUEUE, requested_partitions=1)
        self.kinesis = moto.client()
        self.kinesis.create_stream(StreamName=STREAM, ShardCount=SHARDS)
        self.book, self.tally = Book(), Tally()
        self.patience = LEFT
        self._rate, self._endpoint = rate, moto.endpoint
        self._writers: list[Writer] = []
        self.meta = f"sqlite:{folder / 'meta.sqlite'}"
        self._log = log
        config: Config = {
            "name": NAME,
            "meta": self.meta,
            "log": log,
            "stream": "kinesis",
            "options": {"stream": STREAM, "region": REGION, "endpoint": moto.endpoint},
            "url": server.url,
            "queue": QUEUE,
            "limit": 500,
        }
        self.tasks = make(folder, config, TASKS, ENVIRONMENT)

    # ---- writing ----------------------------------------------------------------------------------------------------

    def begin_writing(self) -> None:
        self._writers.append(Writer(once(self._endpoint), self.book, self._rate, f"w{len(self._writers)}"))
        self._writers[-1].start()

    def end_writing(self) -> None:
        for writer in self._writers:
            writer.stop()

    # ---- looking ----------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Any]:
        """Again and again while what the capture has in common is away."""
        deadline, pause = time.monotonic() + LEFT, threading.Event()
        while True:
            try:
                return look(self.meta, NAME)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                pause.wait(1)

    def read_by(self) -> dict[str, str | None]:
        return {each["partition"]: each["owner"] for each in self.look()["partitions"]}

    def until(self, holds: Callable[[], bool], what: str) -> float:
        """Seconds until it was so. Raises TimeoutError."""
        begun, pause = time.monotonic(), threading.Event()
        while not holds():
            if time.monotonic() - begun > self.patience:
                raise TimeoutError(f"{what}: not within {self.patience:.0f} s; {self.summary()}; logs and data: {self.folder}")
            pause.wait(0.2)
        return time.monotonic() - begun

    def until_all_read(self, partitions: int) -> float:
        """Until each shard that is open has an owner."""

        def holds() -> bool:
            with contextlib.suppress(RuntimeError):
                found = self.look()
                return bool(found["state_of"]["owned"] == partitions and found["state_of"]["ready"] == 0)
            return False

        return self.until(holds, f"{partitions} partitions are read")

    def caught_up(self) -> bool:
        return produced(self.client, QUEUE) >= self.book.stored_count

    def summary(self) -> str:
        found = self.look()
        return (
            f"{self.book.stored_count:,} records stored, {produced(self.client, QUEUE):,} in the queue; term {found['term']}, "
            f"{len(found['members'])} members, partitions {found['state_of']}"
        )

    # ---- judging ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Nothing is written any more, and all that was has had its time to arrive."""
        taking = {shard["ShardId"] for shard in open_shards(self.kinesis, STREAM)}
        try:
            late = self.until(self.caught_up, "all records are in the queue")
            self.report.say(f"all had arrived {late:.1f} s after the last was written")
            self.until(lambda: set(self.read_by()) == taking, "closed shards are removed from the state")
        except TimeoutError as error:
            # What the ledger has to say tells more.
            self.report.fail(str(error))
        shards = shards_of(self.kinesis, STREAM)
        lineage = {
            shard["ShardId"]: [shard[parent] for parent in ("ParentShardId", "AdjacentParentShardId") if shard.get(parent)]
            for shard in shards
        }
        summary = self.summary()
        taken = take_all(self.client, QUEUE)
        self.book.judge(self.tally, taken, lineage)
        for line in self.tally.examples[:20]:
            self.report.fail(f"{line}; logs and data: {self.folder}")
        for line in self.tasks.check_logs():
            self.report.fail(line)
        unheard = sum(len(writer.trouble) for writer in self._writers)
        self.report.say(f"{summary}; {unheard} puts without an answer")
        self.report.figure(f"{self.tally.counts['records']:,} records of {len(shards)} shards into the queue ({self.tasks.kind})")


def look(meta: str, name: str) -> dict[str, Any]:
    """By the command. Raises RuntimeError while that cannot be done."""
    done = subprocess.run([*COMMAND, "tasks", "show", name, "--meta", meta, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def world(report: Report, folder: Path, make: Make, log: str = "meta", rate: int = 200) -> Iterator[World]:
    """With everything started, and every shard read by some task."""
    with MotoServer() as moto, ServerProcess(folder / "server") as server:
        made = World(report, folder, make, moto, server, log, rate)
        with running(made.tasks):
            try:
                began = made.until_all_read(SHARDS)
                report.say(f"{TASKS} tasks in {made.tasks.kind} read {SHARDS} shards after {began:.1f} s")
                made.begin_writing()
                yield made
            finally:
                made.end_writing()
                made.client.close()


# ---- scenarios ----------------------------------------------------------------------------------------------------------


class Killer:
    """Kills a task's process every so many seconds."""

    def __init__(self, tasks: Tasks, every: float, seed: int) -> None:
        self._tasks, self._every, self._random = tasks, every, random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer")
        self.killed = 0

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            if workers := self._tasks.workers():
                pids.kill(self._random.choice(workers))
                self.killed += 1


def run_shards(report: Report, folder: Path, make: Make, seconds: float, every: float, seed: int, patience: float = LEFT) -> Tally:
    """4 → 16 → 5 shards under load, while a task is killed every so often."""
    with world(report, folder, make) as made:
        made.patience = patience
        with Killer(made.tasks, every, seed) as killer:
            _reshard(made, (16, 5), seconds)
        made.end_writing()
        report.say(f"{killer.killed} kills, seed {seed}")
        made.judge()
        report.figure(f"{killer.killed} kills of {TASKS} tasks")
        if not killer.killed:
            report.fail("nothing was killed")
        return made.tally


def _reshard(made: World, counts: tuple[int, ...], seconds: float, now: int = SHARDS) -> None:
    """One step after another, over that time."""
    steps = sum(abs(to - before) for before, to in zip((now, *counts), counts, strict=False))
    pause = threading.Event()
    for count in counts:
        for _ in reshard(made.kinesis, STREAM, count):
            pause.wait(seconds / steps)
        made.report.say(f"{count} shards are open; {made.summary()}")


def run_kafka(report: Report, folder: Path, make: Make, server: KafkaServer, seconds: float, every: float, seed: int) -> None:
    """4 → 8 → 5 shards, by a log and an election in Kafka, whose server is killed in the middle and started again."""
    with world(report, folder, make, f"kafka:{server.bootstrap}") as made:
        with Killer(made.tasks, every, seed) as killer:
            _reshard(made, (8,), seconds / 2)
            before = produced(made.client, QUEUE)
            server.kill()
            # What is read goes on being read, as the positions are elsewhere.
            threading.Event().wait(5)
            more = produced(made.client, QUEUE) - before
            server.start()
            report.say(f"the Kafka server was killed and started again; {more} records came into the queue meanwhile")
            _reshard(made, (5,), seconds / 2, 8)
        made.end_writing()
        report.say(f"{killer.killed} kills, seed {seed}")
        made.judge()
        report.figure(f"{killer.killed} kills of {TASKS} tasks, and one of Kafka")
        if not killer.killed:
            report.fail("nothing was killed")


def run_frozen(report: Report, folder: Path, make: Make, rounds: int, seed: int) -> None:
    """A task stands still until its partitions are read by others, and wakes up: it adds nothing to the queue."""
    chosen = random.Random(seed)
    with world(report, folder, make, rate=50) as made:
        for number in range(rounds):
            before = {each["member"] for each in made.look()["members"]}
            victim = chosen.choice(made.tasks.workers())
            # Records come all the time, so it stands still in the middle of something.
            # Not in the middle of a commit to the meta store's SQLite file, which would lock it for all of them.
            pids.freeze(victim, folder / "meta.sqlite")
            began = time.monotonic()

            def moved(before: set[str] = before) -> bool:
                found = made.look()
                there = {each["member"] for each in found["members"] if each["in_term"]}
                return (
                    len(before - there) >= 1
                    and found["state_of"]["owned"] == SHARDS
                    and all(each["owner"] in there for each in found["partitions"])
                )

            made.until(moved, "the frozen task's partitions are read by others")
            took = time.monotonic() - began
            if number % 2 == 0:
                # Nothing else may add anything, so what the woken one adds would show.
                made.end_writing()
                made.until(made.caught_up, "all records are in the queue")
                had, count = ids(made.client, QUEUE), produced(made.client, QUEUE)
                pids.thaw(victim)
                _look_away(made, victim)
                now, more = ids(made.client, QUEUE), produced(made.client, QUEUE)
                if (now, more) != (had, count):
                    report.fail(f"the woken task added {more - count} items, {sorted(set(now) - set(had))[:5]}; logs: {folder}")
                made.begin_writing()
            else:
                pids.thaw(victim)
                _look_away(made, victim)
            report.say(f"frozen for {took:.1f} s, its partitions had moved; {made.summary()}")
            made.until_all_read(SHARDS)
        made.end_writing()
        made.judge()
        report.figure(f"{rounds} tasks frozen and woken")


def _look_away(made: World, victim: int) -> None:
    """As long as the woken one needs to find out that it is none any more, and longer: whatever it had in hand is tried by then."""
    deadline = time.monotonic() + 8
    pause = threading.Event()
    while time.monotonic() < deadline and pids.is_alive(victim):
        pause.wait(0.2)
