"""The demo without Spark: what it reads, when it kills, what its ledger says, and that its children die."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sluiceway.client import PartitionStats
from sluiceway.demo.books import Ledger
from sluiceway.demo.check import Check
from sluiceway.demo.children import Child, session_members, wait_until
from sluiceway.demo.crashes import KILLS, View, parse_kills
from sluiceway.demo.inputs import Input, detect, queue_name, unpack_flights
from sluiceway.demo.main import run_demo
from sluiceway.demo.picture import Sample, draw_delays, draw_rates
from sluiceway.demo.work import Batches, Work
from sluiceway.kernel.errors import SluicewayError
from tests.server.server_process import PATIENCE
from tests.servers.pids import is_alive

PNG = b"\x89PNG\r\n"


@pytest.fixture
def work(tmp_path: Path) -> Work:
    work = Work(tmp_path / "root", tmp_path / "results")
    work.make()
    return work


# -- inputs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.csv", "csv"), ("A.CSV", "csv"), ("a.jsonl", "jsonl"), ("a.ndjson", "jsonl"), ("a.parquet", "parquet"), ("a.log", "text")],
)
def test_a_file_is_known_by_its_extension(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    path.write_text("x\n")
    assert detect(str(path)) == Input(kind, name, (str(path),))


def test_a_compressed_file_is_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n"))
    assert detect(str(path)).kind == "jsonl"


def test_a_folder_is_all_its_files_and_nobodys_markers(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.csv", "deep/a.csv", "_SUCCESS", ".hidden.txt"):
        (tmp_path / name).write_text("x\n")
    assert detect(str(tmp_path)) == Input("csv", tmp_path.name, (str(tmp_path / "b.csv"), str(tmp_path / "deep/a.csv")))


def test_a_folder_of_parquet_is_given_whole(tmp_path: Path) -> None:
    (tmp_path / "month=1").mkdir()
    (tmp_path / "month=1" / "a.parquet").write_text("x")
    assert detect(str(tmp_path)).paths == (str(tmp_path),)


@pytest.mark.parametrize(
    ("files", "given", "problem"),
    [
        ({}, "absent.csv", "there is no file or folder"),
        ({}, ".", "is empty"),
        ({"a.xlsx": "x"}, "a.xlsx", r"cannot tell .* known extensions are \.csv"),
        ({"a.csv": "x", "b.txt": "x"}, ".", r"different kinds \(a\.csv and b\.txt\)"),
        ({"a.csv": "x", "readme.md": "x"}, ".", r"cannot tell the format of readme\.md"),
        ({"a.json": "[\n  {}\n]\n"}, "a.json", "is one JSON document, not JSON lines"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], given: str, problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(SluicewayError, match=problem) as caught:
        detect(str(tmp_path / given))
    assert caught.value.field == "input"


@pytest.mark.parametrize(
    ("name", "queue"), [("flights.csv", "flights"), ("my data (1).csv", "my-data-1"), ("été.csv", "t"), (".csv", "csv"), ("…", "rows")]
)
def test_the_queue_is_named_after_the_input(name: str, queue: str) -> None:
    assert queue_name(Input("csv", name, ())) == queue


def test_a_sample_of_the_flights_is_spread_over_the_year(tmp_path: Path) -> None:
    flights = Path(unpack_flights(tmp_path, 1_000).paths[0]).read_text().splitlines()
    assert flights[0].startswith("year,month,day,dep_time")
    assert 1_000 <= len(flights) - 1 <= 1_010
    assert {line.split(",")[1] for line in flights[1:]} == {str(month) for month in range(1, 13)}


# -- what is killed when -------------------------------------------------------------------------------------------------


def test_kills_are_a_list_of_names_or_all() -> None:
    assert parse_kills(None) == []
    assert parse_kills("driver, server-ingest,driver") == [KILLS["driver"], KILLS["server-ingest"]]
    assert parse_kills("all") == list(KILLS.values())
    with pytest.raises(SluicewayError, match="'serverr' is not one of server-ingest, server-process, driver, all"):
        parse_kills("driver,serverr")


@pytest.mark.parametrize(
    ("view", "due"),
    [
        (View(100, 10, 0, False, False), []),
        (View(100, 50, 0, False, False), ["server-ingest"]),
        (View(100, 100, 0, False, False), []),
        (View(100, 100, 50, True, False), []),
        (View(100, 100, 30, True, True), ["server-process"]),
        (View(100, 100, 60, True, True), ["server-process", "driver"]),
        (View(100, 100, 95, True, True), []),
    ],
)
def test_a_kill_comes_in_mid_work(view: View, due: list[str]) -> None:
    assert [name for name, kill in KILLS.items() if kill.is_due(view)] == due


def test_runs_of_a_batch_are_counted(work: Work) -> None:
    assert work.batches().count == 0
    for event, batch, items in (("begin", 0, 0), ("end", 0, 30), ("begin", 1, 0), ("begin", 1, 0)):
        work.log_batch(event, batch, items)
    assert work.batches().is_open
    work.log_batch("end", 1, 20)
    batches = work.batches()
    assert (batches.count, batches.replayed, batches.redelivered, batches.is_open) == (2, 1, 20, False)


def test_the_rate_after_the_first_batch_leaves_that_out() -> None:
    ends = (("end", 0, 30, 5.0), ("begin", 1, 0, 5.5), ("end", 1, 20, 6.0), ("end", 2, 20, 9.0))
    assert Batches(ends).rate == 10.0
    assert Batches(ends[:2]).rate == 0.0


def test_a_stage_begins_once(work: Work) -> None:
    work.began("ingest")
    first = work.read("ingest-began")
    work.began("ingest")
    assert work.read("ingest-began") == first
    assert not work.is_done("ingest")
    work.ended("ingest")
    assert work.is_done("ingest")


# -- the ledger ----------------------------------------------------------------------------------------------------------

PARTS = (
    PartitionStats(partition=0, produced=60, completed=57, dead=3, leased=64, retried=3, expired=1),
    PartitionStats(partition=1, produced=40, completed=40, leased=40, deduplicated=20),
)
GOOD = Ledger(
    queue="q",
    dead_queue="q-dead",
    partitions=PARTS,
    dead_partitions=(PartitionStats(partition=0, produced=3, ready=3, total=3),),
    check=Check(
        rows=100,
        table=97,
        dead=3,
        lost=0,
        duplicated=0,
        unknown=0,
        missing=0,
        unexpected=0,
        dead_missing=0,
        dead_unexpected=0,
        reasons={"cancelled": 3},
    ),
    batches=5,
    replayed=1,
    redelivered=20,
    seconds_in=2.0,
    seconds_out=4.0,
    events=("driver killed",),
)


def test_a_ledger_that_balances_says_so() -> None:
    assert GOOD.problems() == []
    text = "\n".join(GOOD.lines())
    for line in (
        "produced 100 = completed 97 + dead 3",
        "lost 0, duplicated 0",
        "driver killed",
        "served again: 4 items; put back for a retry: 3, by an expired lease: 1",
        "sent twice and stored once: 20 items",
        "run again after an interruption: 1",
        "        3  cancelled",
    ):
        assert line in text
    assert text.endswith("the ledger balances")


@pytest.mark.parametrize("field", ["lost", "duplicated", "unknown", "missing", "unexpected", "dead_missing", "dead_unexpected"])
def test_a_row_that_is_wrong_spoils_the_ledger(field: str) -> None:
    cooked = msgspec.structs.replace(GOOD.check, **{field: 2})
    assert [problem[0] for problem in replace(GOOD, check=cooked).problems()] == ["2"]


@pytest.mark.parametrize("name", ["produced", "completed", "dead", "total", "transferring"])
def test_a_count_that_is_off_by_one_spoils_the_ledger(name: str) -> None:
    first = msgspec.structs.replace(PARTS[0], **{name: getattr(PARTS[0], name) + 1})
    assert replace(GOOD, partitions=(first, PARTS[1])).problems()


@pytest.mark.parametrize("name", ["rows", "table", "dead"])
def test_a_comparison_that_counts_otherwise_than_the_server_spoils_the_ledger(name: str) -> None:
    cooked = msgspec.structs.replace(GOOD.check, **{name: getattr(GOOD.check, name) - 1})
    assert replace(GOOD, check=cooked).problems()


def test_errors_that_cancel_out_are_found() -> None:
    first, second = PARTS
    cooked = (
        msgspec.structs.replace(first, completed=first.completed + 1),
        msgspec.structs.replace(second, completed=second.completed - 1),
    )
    assert len(replace(GOOD, partitions=cooked).problems()) == 2
    assert "THE LEDGER DOES NOT BALANCE" in "\n".join(replace(GOOD, partitions=cooked).lines())


# -- pictures ------------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_delays([("Some Air", 1, 12.4, 100), ("Some Air", 7, -0.2, 50), ("Other Air", 7, 55.0, 3)], tmp_path / "delays.png")
    draw_rates([Sample(0.0, 0, 0), Sample(1.0, 10, 0), Sample(2.0, 10, 10)], [(1.5, "server")], tmp_path / "rates.png")
    draw_rates([], [], tmp_path / "nothing.png")
    for name in ("delays.png", "rates.png", "nothing.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 10_000


# -- the command's own refusals --------------------------------------------------------------------------------------------


def test_wrong_usage_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not touch")
    assert run_demo("absent.csv", None, None) == 2
    assert run_demo(None, "printer", None) == 2
    assert run_demo(None, None, tmp_path / "mine") == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in told] == ["input", "kill", "data"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_folder_that_is_not_a_demos_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sluiceway-demo-results").mkdir()
    (tmp_path / "sluiceway-demo-results" / "mine.txt").write_text("do not touch")
    assert run_demo(None, None, None) == 2
    assert (tmp_path / "sluiceway-demo-results" / "mine.txt").exists()


# -- children ------------------------------------------------------------------------------------------------------------

# A process with a child in a process group of its own, as Spark's workers are, that holds on to life.
FAMILY = """
import os, signal, subprocess, sys, threading
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"
child = subprocess.Popen([sys.executable, "-c", code], process_group=0)
Path(sys.argv[1]).write_text(str(child.pid))
threading.Event().wait()
"""


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module `family_of_two` that can be run with -m."""
    (tmp_path / "family_of_two.py").write_text(FAMILY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_child_goes_with_all_it_started(family: Path, how: str) -> None:
    child = Child("family_of_two", [str(family / "pid")], family / "log", family)
    assert wait_until((family / "pid").exists, PATIENCE), (family / "log").read_text()
    assert wait_until(lambda: len(list(session_members(child.pid))) == 2, PATIENCE)
    if how == "kill":
        child.kill()
    else:
        child.stop(grace=0.2)
    assert child.exit_code == -signal.SIGKILL
    assert list(session_members(child.pid)) == []


@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="a killed parent takes its children along on Linux only")
def test_a_child_does_not_outlive_a_killed_parent(family: Path) -> None:
    parent = f"""
import sys, threading
from pathlib import Path
from sluiceway.demo.children import Child
child = Child("family_of_two", [{str(family / "pid")!r}], Path({str(family / "log")!r}), Path({str(family)!r}))
print(child.pid, flush=True)
threading.Event().wait()
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        assert wait_until((family / "pid").exists, PATIENCE)
        assert is_alive(pid)
        process.kill()
        process.wait()
        assert wait_until(lambda: not is_alive(pid), PATIENCE)
    finally:
        process.stdout.close()
        for left in session_members(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
