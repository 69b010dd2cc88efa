"""`sluiceway spark ingest` and `process` as processes of their own: what they print, their exit codes, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sluiceway.cli.common import Output
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server_cli.spark import spark as group
from sluiceway.server_cli.spark_jobs import Telling, find_function
from sluiceway.spark.jobs import Progress
from tests.server.server_process import COMMAND, PATIENCE
from tests.spark.spark_world import Server, server, until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(tmp_path_factory.mktemp("world")) as running:
        yield running


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [*COMMAND, "spark", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    with start(folder, *arguments) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err


MODULE = """
from helping import outcome

def judge(items):
    return items.select("id", outcome(items))

def broken(items):
    raise ZeroDivisionError("in my own module")
"""
HELPING = """
from pyspark.sql import functions as F

@F.udf("string")
def told(payload):
    return "retry" if payload == b'{"id":"2"}' else "done"

def outcome(items):
    return told("payload").alias("outcome")
"""


@pytest.mark.slow
def test_from_files_to_outcomes(world: Server, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n2\n3\n")
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "helping.py").write_text(HELPING)
    to = ("--url", world.url)
    code, out, err = run(tmp_path, "ingest", "orders", "a.csv", "--create", "--partitions", "2", *to)
    assert (code, out) == (0, "Stored 3 items of 1 file in 1 chunk\n"), err
    assert "ingest: 1 file, write id ingest-" in err
    code, out, err = run(tmp_path, "ingest", "orders", "a.csv", "--json", *to)
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert {name: told[name] for name in ("files", "items", "chunks", "repeated")} == {"files": 1, "items": 3, "chunks": 1, "repeated": 1}

    # Its traceback is the user's own; then the same items are served again.
    code, out, err = run(tmp_path, "process", "orders", "mine:broken", "--checkpoint", "c", "--once", *to)
    assert (code, out) == (1, ""), err
    assert "mine.py" in err
    assert err.endswith("ZeroDivisionError: in my own module\n")
    assert "Py4J" not in err
    code, out, err = run(tmp_path, "process", "orders", "mine:broken", "--checkpoint", "c", "--once", "--json", *to)
    assert (code, out) == (1, ""), err
    found = json.loads(err.splitlines()[-1])
    assert (found["code"], found["detail"].splitlines()[-1]) == ("internal", "ZeroDivisionError: in my own module")
    more = ("--once", "--strict", "--json", "--every", "0s")
    code, out, err = run(tmp_path, "process", "orders", "mine:judge", "--checkpoint", "c", *more, *to)
    assert code == 0, err
    # The batch that had failed is replayed; what it retries was not yet ready when that was counted, and so comes once more.
    assert json.loads(out.splitlines()[-1]) == {"items": 4, "batches": 2, "stopped": False}
    assert (world.count("orders", "completed"), world.count("orders", "retried")) == (2, 2)
    (seen,) = world.call("/v1/consumers.list", queue_name="orders")["items"]
    queries = [(consumer["client_id"], query["name"], query["state"]) for consumer in seen["consumers"] for query in consumer["queries"]]
    assert queries == [("process", "process orders", "stopped")]


@pytest.mark.slow
def test_it_goes_on_until_it_is_told_to_end(world: Server, tmp_path: Path) -> None:
    world.create("going")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\ntwo\n")
    arguments = ("ingest", "going", "--watch", "in", "--checkpoint", "c", "--every", "0s", "--url", world.url)
    with start(tmp_path, *arguments) as process:
        try:
            assert process.stderr is not None
            until("it says how far it is", lambda: process.stderr.readline() == "ingest: 2 items to batch 0\n")  # type: ignore[union-attr]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.kill()
            raise
    assert (process.returncode, out) == (0, "Stored 2 items in 1 batch; stopped\n"), err


@pytest.mark.slow
def test_a_load_that_is_interrupted_says_so(world: Server, tmp_path: Path) -> None:
    world.create("interrupted")
    world.call("/v1/queue.pause", queue_name="interrupted")
    (tmp_path / "a.txt").write_text("one\n")
    with start(tmp_path, "ingest", "interrupted", "a.txt", "--every", "0s", "--url", world.url) as process:
        try:
            assert process.stderr is not None
            # It waits for the queue to be resumed.
            until("its task runs", lambda: "ingest: 0 of 1 task" in process.stderr.readline())  # type: ignore[union-attr]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 130, err
    assert world.count("interrupted", "produced") == 0


def test_a_module_that_is_not_there_is_told_before_spark_starts(tmp_path: Path) -> None:
    for function, told in (("nothing:there", "there is no module nothing in"), ("json", "'json' is not MODULE:FUNCTION")):
        ended, out, err = run(tmp_path, "process", "orders", function, "--checkpoint", "c", "--url", "http://127.0.0.1:9")
        assert (ended, out) == (3, ""), err
        assert told in err


def test_a_function_is_found_or_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_another.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_function("json", "dumps") is json.dumps
    with pytest.raises(SluicewayError, match="the module json has no function nothing"):
        find_function("json", "nothing")
    with pytest.raises(SluicewayError, match=r"there is no module json\.deeper"):
        find_function("json.deeper", "nothing")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        find_function("needs_another", "judge")


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_with_4(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    code, _, err = run(tmp_path, "ingest", "orders", "a.txt", "--url", "http://127.0.0.1:9", "--request-timeout", "1s", "--json")
    assert code == 4, err
    assert json.loads(err.splitlines()[-1])["code"] == "unavailable"


def test_progress_in_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(Output, "progress", True)
    with Telling(Output(False), 0) as telling:
        telling(Progress(job="ingest", tasks=1_200, tasks_done=3))
        assert "ingest: 3 of 1,200 tasks" in capsys.readouterr().err
        telling(Progress(job="process", items=1, batch=7))
        assert "process: 1 item to batch 7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ingest", "q"), "pass the files to store, or a folder to --watch"),
        (("ingest", "q", "a", "--watch", "b"), "pass the files to store, or a folder to --watch"),
        (("ingest", "q", "--watch", "b"), "--watch needs --checkpoint"),
        (("ingest", "q", "--watch", "b", "--checkpoint", "c", "--write-id", "x"), "--write-id is for files"),
        (("ingest", "q", "a", "--once"), "need --watch"),
        (("ingest", "q", "a", "--partitions", "2"), "--partitions needs --create"),
        (("ingest", "q", "a", "--option", "sep"), "'sep' is not NAME=VALUE"),
        (("process", "q", "a:b"), "Missing option '--checkpoint'"),
    ],
)
def test_wrong_usage_is_told_before_spark_starts(arguments: tuple[str, ...], told: str) -> None:
    ended = CliRunner().invoke(group, list(arguments))
    assert ended.exit_code == 2
    assert told in " ".join(ended.output.split())
