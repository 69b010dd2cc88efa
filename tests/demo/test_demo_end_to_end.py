"""The demo as a user runs it, on a sample of the flights and on files of one's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sluiceway.demo.children import wait_until
from tests.server.server_process import COMMAND

pytestmark = pytest.mark.spark

SAMPLE = 6_000
PATIENCE = 600.0
"""Seconds for a demo to come to an end, or to a point in it."""

RUN = "import sys; from pathlib import Path; from sluiceway.demo.main import run_demo; sys.exit(run_demo({}))"


class Demo:
    """A demo in a process of its own. All that it starts can be told by a mark in the environment."""

    def __init__(self, cwd: Path, command: list[str]) -> None:
        self._mark = f"SLUICEWAY_DEMO_TEST={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        (cwd / "tmp").mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, name: value, "TMPDIR": str(cwd / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str]:
        """Its exit code and all that it said."""
        output, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output

    def wait_for_line(self, start: str) -> None:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith(start):
                return
        raise AssertionError("".join(said))

    def left_over(self) -> list[int]:
        """Process ids of whatever it started that still runs."""
        return [pid for pid in _marked(self._mark.encode()) if pid != self.process.pid]


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def flights(*, kill: str | None = None, data: str | None = None) -> list[str]:
    """A demo of some of the flights: fewer than the command line lets a user take."""
    arguments = f"None, {kill!r}, {f'Path({data!r})' if data else None}, limit={SAMPLE}"
    return [sys.executable, "-c", RUN.format(arguments)]


@contextmanager
def demo(cwd: Path, command: list[str]) -> Iterator[Demo]:
    running = Demo(cwd, command)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.communicate(timeout=PATIENCE)
        if running.process.stdout is not None:
            running.process.stdout.close()


@pytest.mark.crash
@pytest.mark.slow
def test_flights_with_everything_killed_and_then_with_a_cooked_table(tmp_path: Path) -> None:
    with demo(tmp_path, flights(kill="all", data="data")) as run:
        code, output = run.end()
        assert code == 0, output
        assert run.left_over() == []
    for line in (
        "server killed (SIGKILL) in mid-ingest",
        "server killed (SIGKILL) in mid-processing",
        "driver killed (SIGKILL) in mid-batch, with",
        "lost 0, duplicated 0",
        "the ledger balances",
        "cancelled: it never departed",
    ):
        assert line in output
    replayed = output.partition("run again after an interruption: ")[2].split()[0]
    assert int(replayed) >= 1

    results = tmp_path / "data" / "results"
    table = pq.read_table(results / "table")
    dead = pq.read_table(results / "dead-letters")
    references = table["reference"].to_pylist() + dead["reference"].to_pylist()
    assert len(references) == len(set(references)) >= SAMPLE
    assert set(table["month"].to_pylist()) == set(range(1, 13))
    assert table["arr_time"].null_count == 0
    assert table["airline"].null_count == 0
    assert all(json.loads(payload).get("arr_time") is None for payload in dead["payload"].to_pylist())
    assert {int(attempts) for attempts in dead["attempts"].to_pylist()} == {2}
    for name in ("delays.png", "rates.png"):
        assert (results / name).read_bytes().startswith(b"\x89PNG")

    # The same folder again: all is done, and is checked once more.
    stolen = pq.read_table(spoil := next((results / "table" / "month=7").rglob("*.parquet"))).num_rows
    spoil.unlink()
    with demo(tmp_path, flights(data="data")) as again:
        code, output = again.end()
    assert code == 1, output
    assert "THE LEDGER DOES NOT BALANCE" in output
    assert f"{stolen} rows lost" in output


def test_ones_own_json_lines(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    rows = [{"n": n, "text": f"zeile {n}\tü", "deep": {"list": [n, None], "on": n % 2 == 0}} for n in range(3_000)]
    lines = [json.dumps(row) for row in rows]
    lines[17] = '{"n": 17, "text": "cut o'
    lines[1_500] = "not JSON at all"
    (tmp_path / "mine" / "a.jsonl").write_text("\n".join(lines[:1_000]) + "\n\n")
    (tmp_path / "mine" / "b.jsonl").write_text("\n".join(lines[1_000:]) + "\n")
    with demo(tmp_path, [*COMMAND, "demo", "--input", "mine"]) as run:
        code, output = run.end()
    assert code == 0, output
    assert "produced 3,000 = completed 2,998 + dead 2" in output
    results = tmp_path / "sluiceway-demo-results"
    got = {row["n"]: row for row in pq.read_table(results / "table")["row"].to_pylist()}
    assert got == {row["n"]: row for row in rows if row["n"] not in (17, 1_500)}
    dead = pq.read_table(results / "dead-letters")
    assert sorted(dead["payload"].to_pylist()) == sorted(lines[n].encode() for n in (17, 1_500))
    assert set(dead["reason"].to_pylist()) == {"the line is not a JSON object"}
    assert (results / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tmp").glob("sluiceway-demo-*")) == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(("number", "code", "stage"), [(signal.SIGINT, 130, "processing"), (signal.SIGTERM, 143, "ingesting")])
@pytest.mark.slow
def test_a_wish_to_stop_leaves_nothing_behind(tmp_path: Path, number: signal.Signals, code: int, stage: str) -> None:
    with demo(tmp_path, flights()) as run:
        run.wait_for_line(stage)
        assert len(run.left_over()) >= 3
        run.process.send_signal(number)
        assert run.end()[0] == code
        assert run.left_over() == []
        assert list((tmp_path / "tmp").glob("sluiceway-demo-*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="a killed parent takes its children along on Linux only")
@pytest.mark.slow
def test_a_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    with demo(tmp_path, flights()) as run:
        run.wait_for_line("ingesting")
        assert len(run.left_over()) >= 3
        run.process.kill()
        run.process.wait()
        assert wait_until(lambda: not run.left_over(), PATIENCE)
