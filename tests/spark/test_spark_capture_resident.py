"""Resident tasks: what their session must be, how the driver holds them, and on a real Spark, with a worker that is killed."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sluiceway.capture import CaptureConfig
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark.capture_resident import _DETAIL, Leash, Present, Resident, check_session, settings
from tests.cli.cli_shell import CAPTURES, Shell, covering
from tests.servers.moto_server import ENVIRONMENT, REGION, MotoServer, reshard
from tests.servers.pids import is_alive
from tests.spark.spark_world import Server, server, until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COVERED: set[str] = set()
verb = covering(COVERED)

# ---- the session -------------------------------------------------------------------------------------------------------

GOOD = {name: str(value).lower() for name, value in settings(2).items()}
CLUSTER = GOOD | {"spark.master": "spark://host:7077", "spark.executor.instances": "2", "spark.executor.cores": "2"}


def test_the_settings_that_it_makes_are_those_that_it_wants() -> None:
    check_session(GOOD.get, 2)
    check_session(CLUSTER.get, 4)
    # How many there will be is not known.
    check_session((CLUSTER | {"spark.dynamicAllocation.enabled": "true"}).get, 400)


@pytest.mark.parametrize(
    ("conf", "tasks", "field", "words"),
    [
        (GOOD | {"spark.master": "local[8]"}, 2, "spark.master", r"local\[3,1000000\]"),
        (GOOD | {"spark.master": "local"}, 1, "spark.master", "ends the job when a task fails"),
        (GOOD, 4, "spark.master", "4 tasks need 4 slots, and there are 3"),
        (CLUSTER, 5, "spark.executor.instances", "5 tasks need 5 slots, and there are 4"),
        (CLUSTER | {"spark.task.cpus": "2"}, 3, "spark.executor.instances", "there are 2"),
        (CLUSTER | {"spark.task.maxFailures": "4"}, 2, "spark.task.maxFailures", "after this many failures"),
        ({name: text for name, text in CLUSTER.items() if name != "spark.task.maxFailures"}, 2, "spark.task.maxFailures", "4 ends"),
        (GOOD | {"spark.speculation": "true"}, 2, "spark.speculation", "must be false"),
        (
            {name: text for name, text in GOOD.items() if name != "spark.python.worker.reuse"},
            2,
            "spark.python.worker.reuse",
            "must be false",
        ),
    ],
)
def test_a_session_in_which_it_would_end_or_hang_is_refused(conf: dict[str, str], tasks: int, field: str, words: str) -> None:
    with pytest.raises(SluicewayError, match=words) as refused:
        check_session(conf.get, tasks)
    assert refused.value.field == field


# ---- the leash ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def leash() -> Iterator[Leash]:
    held = Leash("127.0.0.1", threading.Event())
    yield held
    held.close()


def _says(leash: Leash, line: str) -> socket.socket:
    connection = socket.create_connection(leash.address, timeout=60)
    connection.sendall(line.encode())
    return connection


def test_who_is_there_is_known_and_gone_when_its_connection_is(leash: Leash) -> None:
    one, two = _says(leash, f"{leash.nonce} 1 0 host 22\n"), _says(leash, f"{leash.nonce} 0 3 host 11\n")
    until("both are there", lambda: leash.present == [Present(0, 3, "host", 11), Present(1, 0, "host", 22)])
    two.close()
    until("one is left", lambda: leash.present == [Present(1, 0, "host", 22)])
    leash.drop()
    assert one.recv(1) == b""
    one.close()
    # One that Spark has just started again.
    with _says(leash, f"{leash.nonce} 0 4 host 33\n") as late:
        assert late.recv(1) == b""


@pytest.mark.parametrize("line", ["GET / HTTP/1.1\r\n", "{wrong} 1 0 host 22\n", "{nonce} 1 0 host\n", "{nonce} x 0 host 22\n", "é\n"])
def test_who_does_not_belong_there_is_sent_away(leash: Leash, line: str) -> None:
    with _says(leash, line.replace("{nonce}", leash.nonce).replace("{wrong}", "0" * 32)) as connection:
        assert connection.recv(1) == b""
    assert leash.present == []
    assert leash.failed is None


def test_what_a_task_cannot_mend_is_heard(leash: Leash) -> None:
    told = '{"code": "invalid_request", "detail": "stream: wrong", "field": "stream"}\n'
    with _says(leash, f"{leash.nonce} 1 0 host 22\n{told}"):
        until("it is heard", leash.news.is_set)
    assert leash.failed is not None
    assert (leash.failed.code, leash.failed.detail, leash.failed.field) == ("invalid_request", "stream: wrong", "stream")


def test_the_longest_detail_is_heard(leash: Leash) -> None:
    """A report that is cut is none: the task would be let go, and the job end as if all were well."""
    detail = "\U0001f4a7" * _DETAIL
    told = json.dumps({"code": "invalid_request", "detail": detail, "field": "stream"})
    with _says(leash, f"{leash.nonce} 1 0 host 22\n{told}\n"):
        until("it is heard", leash.news.is_set)
    assert leash.failed is not None
    assert leash.failed.detail == detail


@pytest.mark.parametrize("words", ["{", "[]", "3", '{"code": "unavailable"}', '{"code": "no_such", "detail": "", "field": null}'])
def test_what_a_task_says_by_halves_is_nothing(leash: Leash, words: str, recwarn: pytest.WarningsRecorder) -> None:
    with _says(leash, f"{leash.nonce} 1 0 host 22\n{words}\n") as connection:
        assert connection.recv(1) == b""
    assert leash.present == []
    assert leash.failed is None
    assert not [each for each in recwarn if each.category is pytest.PytestUnhandledThreadExceptionWarning]


def test_tasks_are_let_in_also_after_one_could_not_be(leash: Leash, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Its first caller is refused, as when too many files are open."""

        def __init__(self, real: socket.socket) -> None:
            self.real, self.refused = real, threading.Event()

        def accept(self) -> object:
            if not self.refused.is_set():
                self.refused.set()
                raise OSError(24, "Too many open files")
            return self.real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    full = Full(leash._socket)
    monkeypatch.setattr(leash, "_socket", full)
    monkeypatch.setattr("sluiceway.spark.capture_resident._AGAIN", 0.01)
    # The thread waits in the real one.
    with _says(leash, "\n"):
        until("it is refused", full.refused.is_set)
    with _says(leash, f"{leash.nonce} 1 0 host 22\n"):
        until("it is there", lambda: leash.present == [Present(1, 0, "host", 22)])


def test_an_address_that_is_not_the_drivers_is_refused_with_its_name() -> None:
    with pytest.raises(SluicewayError, match="bindAddress") as refused:
        Leash("192.0.2.1", threading.Event())
    assert refused.value.field == "spark.driver.host"
    held = Leash("192.0.2.1", threading.Event(), "127.0.0.1")
    assert held.address[0] == "192.0.2.1"
    held.close()


# ---- on Spark ----------------------------------------------------------------------------------------------------------


class Stream:
    """A Kinesis stream with two shards to begin with, and how many records it was given."""

    def __init__(self, moto: MotoServer, name: str) -> None:
        self.name, self.count = name, 0
        self.client = moto.client()
        self.client.create_stream(StreamName=name, ShardCount=2)
        self.options = {"stream": name, "region": REGION, "endpoint": moto.endpoint}

    def put(self, count: int) -> None:
        for number in range(self.count, self.count + count):
            self.client.put_record(StreamName=self.name, Data=str(number).encode(), PartitionKey=str(number % 37))
        self.count += count


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as running, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def no_session() -> None:
    """What another file of tests left to this process has a master that tasks cannot use, and Java without `moto`'s environment."""
    from pyspark import SparkContext

    if (context := SparkContext._active_spark_context) is not None:
        context.stop()
    if (gateway := SparkContext._gateway) is not None:
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def spark(moto: MotoServer) -> Iterator[SparkSession]:
    """After `moto`, because Spark's processes have the environment that there was when it began."""
    from sluiceway.spark import session

    running = session("resident", **settings(2))
    yield running
    running.stop()


def _texts(world: Server, queue: str) -> list[int]:
    """What is in the queue, in order: it has one partition."""
    found: list[int] = []
    while items := world.call("/v1/queue.lease", queue_name=queue, client_id="c", batch_size=1_000, request_timeout="0s")["items"]:
        found += [int(base64.b64decode(item["bytes"])) for item in items]
    return found


@pytest.mark.spark
@pytest.mark.crash
@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_every_record_is_there_once(
    spark: SparkSession, moto: MotoServer, world: Server, tmp_path: Path
) -> None:
    queue = world.create("killed", partitions=1)
    stream = Stream(moto, "killed")
    stream.put(120)
    config = CaptureConfig(
        name="killed", meta=f"sqlite:{tmp_path}/meta.sqlite", stream="kinesis", options=stream.options, url=world.url, queue=queue, limit=20
    )
    with Resident(spark, config, 2) as job:
        until("two tasks have begun", lambda: len(job.present) == 2 and world.count(queue, "produced") > 0)
        killed = job.present[0]
        os.kill(killed.pid, signal.SIGKILL)
        for _ in reshard(stream.client, stream.name, 3):
            stream.put(40)
        until("it is replaced", lambda: any(each.task == killed.task and each.attempt > killed.attempt for each in job.present))
        until("all is there", lambda: world.count(queue, "produced") >= stream.count)
        assert not job.wait(0)
        workers = [each.pid for each in job.present]
    assert job.wait(0)
    until("the workers have ended", lambda: not any(is_alive(pid) for pid in workers))
    assert sorted(_texts(world, queue)) == list(range(stream.count))


@pytest.mark.spark
@pytest.mark.slow
def test_what_no_task_can_mend_ends_the_job_with_its_reason(spark: SparkSession, world: Server, tmp_path: Path) -> None:
    queue = world.create("wrong", partitions=1)
    config = CaptureConfig(
        name="wrong", meta=f"sqlite:{tmp_path}/meta.sqlite", stream="kinesis", options={"streem": "s"}, url=world.url, queue=queue
    )
    with Resident(spark, config, 2) as job, pytest.raises(SluicewayError, match="streem"):
        job.wait(120)


@contextmanager
def _ending(condition: Callable[[], object]) -> Iterator[None]:
    """SIGTERM to this process once that holds."""

    def wait() -> None:
        until("it is to end", condition)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


@verb("spark capture")
def _commands(shell: Shell, moto: MotoServer, world: Server, folder: Path) -> None:
    stream = Stream(moto, "commands")
    stream.put(30)
    options = [word for name, value in stream.options.items() for word in ("--option", f"{name}={value}")]
    what = ["--stream", "kinesis", *options, "--to", world.url, "--queue", shell.queue, "--meta", f"sqlite:{folder}/meta.sqlite"]
    how = ["--resident", "--tasks", "1", "--every", "200ms"]
    with _ending(lambda: world.count(shell.queue, "produced") >= 30):
        shell.says("spark", "capture", "commands", *what, *how)
    stream.put(30)
    with _ending(lambda: world.count(shell.queue, "produced") >= 60):
        lines = shell.json("spark", "capture", "commands", *what, *how)
    # It went on where the first had stopped.
    assert sorted(_texts(world, shell.queue)) == list(range(60))
    assert all(line["name"] == "commands" and line["wanted"] == 1 for line in lines)
    assert {task["pid"] for line in lines for task in line["tasks"]}
    assert max(line["records"] for line in lines) >= 30


@pytest.mark.spark
@pytest.mark.slow
def test_the_command_ends_in_order_and_goes_on(
    moto: MotoServer, world: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    shell = Shell(world.create("commands", partitions=1), monkeypatch, capsysbinary)
    _commands(shell=shell, moto=moto, world=world, folder=tmp_path)
    assert COVERED == CAPTURES


def test_the_command_says_how_else_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    shell = Shell("q", monkeypatch, capsysbinary)
    what = ["--to", "http://127.0.0.1:1", "--queue", "q", "--meta", f"sqlite:{tmp_path}/meta.sqlite"]
    code, _, err = shell.ends("spark", "capture", "c", "--stream", "kinesis", *what)
    assert (code, "--resident" in err) == (2, True)
    code, _, err = shell.ends("spark", "capture", "c", "--stream", "kinesi", *what, "--resident")
    assert (code, "kinesi" in err) == (3, True)
    code, _, err = shell.ends("spark", "capture", "c", "--stream", "kinesis", "--option", "a", *what, "--resident")
    assert (code, "NAME=VALUE" in err) == (2, True)
