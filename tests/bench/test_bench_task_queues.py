"""The comparison of workers: real runs of ours, of each task queue that is installed, and what is made of their figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from bench import __main__ as bench_command
from bench import key_peers, page, workers
from bench.processes import kill_family
from bench.task_queues import job_producer, job_record, runs
from bench.task_queues.catalog import OURS, QUEUES, TaskQueue
from bench.task_queues.job_record import JobRecord
from bench.task_queues.runs import Bench, FailedError, Row, measure_server_kill, measure_speed, measure_worker_kill
from tests.servers.pids import is_alive
from tests.spark.spark_world import until

FIRST_OF_EACH = {queue.environment: name for name, queue in reversed(QUEUES.items())}


def speed(system: str, number: int, **values: float) -> Row:
    row = dict.fromkeys(workers.SPEED.values(), 1.0)
    return {"part": "speed", "system": system, "round": number, "at": "2026-01-31T08:00:00Z", "load": 0.1, "jobs": 10, **row, **values}


def kill(system: str, lost: int) -> Row:
    told = {"confirmed": 100, "handled_again": 2, "recovered_s": 3.5, "worker_restarts": 0}
    return {"part": "worker-kill", "system": system, "round": 1, "at": "2026-01-31T08:00:00Z", "load": 0.1, "lost": lost, **told}


def document(*rows: Row) -> workers.Document:
    return {"machine": "x", "systems": {}, "absent": {}, "runs": list(rows)}


# ---- real runs


def test_every_job_of_ours_is_handled_and_timed() -> None:
    row = measure_speed(QUEUES[OURS], 60, 20)
    assert row.keys() == {*workers.SPEED.values(), "handled_again"}
    assert row["handled_again"] == 0
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert all(row[key] > 0 for key in ("work_per_s", "together_per_s", "produce_per_s"))


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize("measure", [measure_worker_kill, measure_server_kill])
def test_ours_loses_nothing(measure: Callable[[TaskQueue, int], Row], monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure(QUEUES[OURS], 240)
    assert row["confirmed"] == 240
    assert row["lost"] == 0
    assert row["recovered_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIRST_OF_EACH.values() if name != OURS])
def test_a_task_queue_handles_every_job(name: str) -> None:
    if reason := QUEUES[name].found():
        warnings.warn(f"{name.upper()} IS NOT TESTED: {reason}", stacklevel=2)
        pytest.skip(f"{name.upper()} IS NOT TESTED: {reason}")
    row = measure_speed(QUEUES[name], 60, 20)
    assert row["handled_again"] == 0
    assert row["work_per_s"] > 0
    assert str(QUEUES[name].environment) in QUEUES[name].version()


def test_a_system_that_does_nothing_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "STALLED", 0.3)
    idle = QUEUES[OURS]._replace(worker=("python", "-c", "import time; time.sleep(60)"))
    with pytest.raises(FailedError, match="20 of 20 jobs not handled"):
        measure_speed(idle, 20, 20)


# ---- the record, the schedule and the kill


def test_a_job_that_is_handled_again_keeps_its_first_time(tmp_path: Path) -> None:
    job_record.create(tmp_path / "record", 3)
    record, other = JobRecord(tmp_path / "record"), JobRecord(tmp_path / "record")
    record.add_handled(1)
    first = record.handled[1]
    other.add_handled(1)
    assert list(record.times_handled) == [0, 2, 0]
    assert list(other.handled) == [0, first, 0]
    assert list(record.produced) == list(record.confirmed) == [0, 0, 0]


def test_what_was_confirmed_and_never_handled_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RECOVERY", 0.0)
    job_record.create(tmp_path / "record", 5)
    record = JobRecord(tmp_path / "record")
    # Job 4 was not confirmed: its producer knows that it may be missing.
    for job in (0, 1, 2, 3):
        record.confirmed[job] = time.monotonic()
    for job in (0, 1, 1):
        record.add_handled(job)
    idle = [sys.executable, "-c", "import time; time.sleep(60)"]

    class Stopped(Bench):
        def __init__(self) -> None:
            self.record = record
            self.worker = subprocess.Popen(idle)

        def begin_producing(self, first: int, last: int, pace: float = 0.0) -> subprocess.Popen[bytes]:
            return subprocess.Popen(idle)

    bench = Stopped()
    outcome = runs._outcome(bench, 5, record.handled[0])
    assert bench.worker is not None
    bench.worker.kill()
    bench.worker.wait()
    assert (outcome["lost"], outcome["confirmed"], outcome["handled_again"]) == (2, 4, 1)


def test_jobs_are_handed_out_once_in_batches_or_at_a_pace() -> None:
    batches = job_producer.Schedule(10, 17, 3, 0)
    parts: list[tuple[list[int], float]] = []
    while part := batches.next_part():
        parts.append(part)
    assert parts == [([10, 11, 12], 0), ([13, 14, 15], 0), ([16], 0)]
    paced = job_producer.Schedule(10, 12, 1, 0.1)
    first, second = paced.next_part(), paced.next_part()
    assert first is not None
    assert second is not None
    assert first[1] == 0
    assert 5 < second[1] <= 10
    assert paced.next_part() is None


def test_a_job_that_cannot_be_sent_is_not_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_producer, "PAUSE", 0)
    job_record.create(tmp_path / "record", 3)
    record = JobRecord(tmp_path / "record")

    class Refusing:
        AT_ONCE, BATCH, IS_ASYNC = 1, 1, False

        @staticmethod
        def prepare() -> None: ...

        @staticmethod
        @contextmanager
        def sending() -> Any:
            def send(jobs: list[int]) -> None:
                if jobs == [1]:
                    raise ConnectionError("gone")

            yield send

    job_producer.send_blocking(cast(job_producer.System, Refusing()), job_producer.Schedule(0, 3, 1, 0), record)
    assert [bool(each) for each in record.produced] == [True] * 3
    assert [bool(each) for each in record.confirmed] == [True, False, True]


def test_a_family_is_killed_with_its_youngest() -> None:
    sleeping = "import time; time.sleep(60)"
    script = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', '{sleeping}']); print(p.pid, flush=True); p.wait()"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    kill_family(process.pid)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    until("its child has ended", lambda: not is_alive(child))


# ---- figures and tables


def test_workers_are_a_case_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[str]] = []

    def told(arguments: Sequence[str]) -> int:
        given.append(list(arguments))
        return 0

    monkeypatch.setattr(workers, "main", told)
    assert bench_command.main(["--cases", "workers", "--rounds", "1"]) == 0
    assert bench_command.main(["--systems", "rq", "--cases", "workers"]) == 0
    assert bench_command.main(["workers", "--json"]) == 0
    assert given == [["--rounds", "1"], ["--systems", "rq"], ["--json"]]


def test_the_ratio_is_of_one_round_and_the_best_peer_counts() -> None:
    # The second round met a machine ten times as fast: medians of all would say 2 and 5.5.
    rows = [
        speed(OURS, 1, work_per_s=100, p99_ms=4),
        speed("dramatiq", 1, work_per_s=10, p99_ms=2),
        speed("rq", 1, work_per_s=5, p99_ms=8),
        speed("taskiq", 1, work_per_s=9, p99_ms=1),
        speed("rq-everysec", 1, work_per_s=20, p99_ms=8),
        speed(OURS, 2, work_per_s=1_000, p99_ms=4),
        speed("dramatiq", 2, work_per_s=100, p99_ms=2),
        speed("sluiceway-threads", 1, work_per_s=1_000, p99_ms=1),
    ]
    assert workers.ratios(rows, "work_per_s") == pytest.approx({"dramatiq": 10, "rq": 20, "taskiq": 100 / 9, "rq-everysec": 5})
    lines = workers.tables(document(*rows)).splitlines()
    assert "| jobs/s worked off | dramatiq | ≥ 10 × | 10 × |" in lines
    assert "| p99 | dramatiq | ≤ 1 × | 2 ×, **missed** |" in lines
    assert "| jobs/s worked off | rq-everysec | ≥ 10 × | 5 ×, **missed** |" in lines
    assert "| p99 | rq-everysec | ≤ 1 × | 0.5 × |" in lines
    assert "Peers with a lower p99 than ours: dramatiq (2 ×), taskiq (4 ×)." in lines


def test_the_page_tells_of_losses_failures_and_absent_systems() -> None:
    told = document(speed(OURS, 1), speed("rq", 1) | {"failed": "stuck"}, kill(OURS, 0), kill("celery", 7))
    told["absent"]["arq"] = "arq is not installed"
    told["systems"]["celery"] = {"version": "celery 5", "choices": "Acknowledged late. No results.", "links": ["https://example.org"]}
    text = workers.tables(told)
    assert "**arq was not measured**: arq is not installed." in text
    lines = text.splitlines()
    assert "| celery | worker | 1 | 100 | **7** | 2 | 3.5 | 0 |" in lines
    assert "| sluiceway | worker | 1 | 100 | 0 | 2 | 3.5 | 0 |" in lines
    assert any(line.startswith("| rq | **failed** |") for line in lines)
    assert "| celery | celery 5 | Acknowledged late. No results. [1](https://example.org) |" in lines


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[tuple[str, int]] = []

    def fake(queue: TaskQueue, jobs: int, paced: int) -> Row:
        measured.append((queue.module, jobs))
        if len(measured) == 2:
            raise FailedError("stuck")
        return dict.fromkeys(workers.SPEED.values(), 1.23456)

    monkeypatch.setattr(workers, "measure_speed", fake)
    output = tmp_path / "workers.json"
    given = ["--systems", OURS, "sluiceway-threads", "--parts", "speed", "--jobs", "10", "--output", str(output)]
    assert workers.main([*given, "--rounds", "1"]) == 0
    assert measured == [("sluiceway_jobs", 10)] * 2
    capsys.readouterr()
    assert workers.main([*given, "--rounds", "2", "--resume", "--json"]) == 0
    assert len(measured) == 4
    both = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == both
    assert [(run["system"], run["round"], run.get("failed"), run.get("p99_ms")) for run in both["runs"]] == [
        (OURS, 1, None, 1.235),
        ("sluiceway-threads", 1, "stuck", None),
        (OURS, 2, None, 1.235),
        ("sluiceway-threads", 2, None, 1.235),
    ]
    assert both["systems"].keys() == {OURS, "sluiceway-threads"}
    again = ["--systems", OURS, "--parts", "speed", "--output", str(output), "--rounds", "1", "--merge"]
    assert workers.main(again) == 0
    assert [(run["system"], run["round"]) for run in json.loads(output.read_text())["runs"]] == [
        ("sluiceway-threads", 1),
        ("sluiceway-threads", 2),
        (OURS, 1),
    ]


def test_a_named_system_that_is_absent_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(QUEUES, "rq", QUEUES["rq"]._replace(environment="none-such"))
    output = tmp_path / "workers.json"
    assert workers.main(["--systems", "rq", "--output", str(output)]) == 1
    assert "NOT MEASURED, rq: none-such is not installed" in capsys.readouterr().err
    assert json.loads(output.read_text())["absent"].keys() == {"rq"}


def test_the_page_has_all_comparisons(tmp_path: Path) -> None:
    latest, told, keys, text = (tmp_path / name for name in ("latest.json", "workers.json", "keys.json", "page.md"))
    when = {"at": "2026-01-31T08:00:00Z", "rounds": 3, "seconds": 2.0, "load": 0.1}
    empty: dict[str, Any] = {"machine": "x", "cases": {}, "ratios": {}, "ratios_on_postgres": {}, "systems": {}}
    latest.write_text(json.dumps(empty | {"measured": {"a": when}}))
    told.write_text(json.dumps(document(speed(OURS, 1))))
    keys.write_text(json.dumps({"runs": []}))
    marks = "".join(f"<!-- {mark}: begin -->\n<!-- {mark}: end -->\n" for mark in (workers.MARK, key_peers.MARK))
    text.write_text(f"before\n{page.BEGIN}\n{page.END}\nbetween\n{marks}after\n")
    given = [
        "--results",
        str(latest),
        "--workers",
        str(told),
        "--keys",
        str(keys),
        "--page",
        str(text),
        "--images",
        str(tmp_path / "images"),
    ]
    assert page.main(given) == 0
    written = text.read_text()
    assert (
        written.index("### Aims")
        < written.index("between")
        < written.index("| sluiceway | 1 | 0.1 to 0.1 |")
        < written.index("Nothing measured.")
    )
    assert written.index("Nothing measured.") < written.rindex("after")


def test_every_maintainer_finds_two_sentences_and_a_link() -> None:
    for name, queue in QUEUES.items():
        assert queue.choices.endswith("."), name
        assert queue.links, name
        assert os.path.basename(queue.worker[0]) == queue.worker[0], name
