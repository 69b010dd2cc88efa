"""The series that are judged, made of what was measured; and what /proc says of a process."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.blackbox.operation_log import Fault
from tests.campaigns.soak.soak_record import (
    MEASURES,
    Beat,
    Calls,
    RecordFile,
    SoakRecord,
    all_series,
    latencies,
    processor_a_call,
    read_record,
    series,
)
from tests.campaigns.soak.soak_run import planned, read_metrics
from tests.campaigns.soak.vital_signs import machine_busy, proportional, stored, vitals, yardstick


def beat(at: float, life: int = 1, **more: Any) -> Beat:
    given: dict[str, Any] = {"resident": 0, "anonymous": 0, "handles": 0, "sockets": 0, "threads": 0, "processor": 0.0, "calls": 0}
    return Beat(at=at, life=life, machine=0.0, **(given | more))


def record(*beats: Beat, **more: Any) -> SoakRecord:
    return SoakRecord(beats=list(beats), warm_up=10.0, lives={1: 0.0, 2: 100.0}, **more)


def test_a_point_is_the_median_of_its_slice() -> None:
    found = series(record(*(beat(10.0 + n, handles=each) for n, each in enumerate((1, 9, 2, 3, 2, 50)))), lambda each: each.handles)
    assert found == [[(10.0, 2), (15.0, 50)]]


def test_each_process_has_a_stretch_after_its_warm_up() -> None:
    given = record(beat(9.0, 1), beat(12.0, 1), beat(105.0, 2), beat(111.0, 2))
    assert series(given, lambda each: each.life) == [[(10.0, 1)], [(110.0, 2)]]


def test_what_outlives_processes_has_one_stretch() -> None:
    given = record(beat(9.0, 1), beat(12.0, 1), beat(105.0, 2), beat(111.0, 2))
    assert series(given, lambda each: each.life, is_process=False) == [[(10.0, 1), (110.0, 2)]]


def test_what_was_not_looked_at_has_no_point() -> None:
    given = record(beat(12.0), beat(17.0, files=7))
    assert series(given, lambda each: each.files) == [[(15.0, 7)]]


def test_latencies_leave_out_what_stood_still_and_warm_ups() -> None:
    slices = [Calls(at, {"produce": (100, 1.0, at)}, 0) for at in (5.0, 15.0, 20.0, 25.0, 40.0, 105.0, 115.0)]
    given = record(calls=slices, faults=[Fault("freeze", "", 24.0, 26.0, hangs=True), Fault("reload", "", 40.0, 41.0)])
    assert latencies(given, "produce", 2) == [[(15.0, 15.0), (40.0, 40.0)], [(115.0, 115.0)]]
    assert latencies(given, "retry", 2) == []


def test_processor_time_is_of_the_calls_of_its_slice() -> None:
    given = record(
        beat(10.0, processor=1.0, calls=100),
        beat(14.0, processor=1.5, calls=600),
        beat(15.0, processor=2.0, calls=700),
        beat(19.0, processor=2.0, calls=700),
        beat(111.0, 2, processor=0.1, calls=800),
        beat(114.0, 2, processor=0.3, calls=900),
    )
    assert [[each.at for each in stretch] for stretch in processor_a_call(given)] == [[10.0], [110.0]]
    assert [each.value for stretch in processor_a_call(given) for each in stretch] == pytest.approx([1.0, 2.0])


def test_a_record_can_be_read_again(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record.jsonl")
    file.add(beat(1.0, gauges={"series": 4.0}))
    file.add(Calls(0.0, {"lease": (3, 1.5, 2.5)}, 1))
    file.add(Fault("kill", "", 1.0, 2.0, hangs=True))
    file.record.lives[1] = 0.5
    file.record.findings.append("lost")
    file.close()
    found = read_record(tmp_path / "record.jsonl")
    assert found == file.record


def test_everything_that_is_judged_has_a_name_of_its_own() -> None:
    names = [each.name for each in all_series(record())]
    assert len(set(names)) == len(names) > len(MEASURES)


def test_metrics_are_summed_over_their_labels_and_counted() -> None:
    text = (
        '# HELP sluiceway_queue_items Items.\nsluiceway_queue_items{queue="a",state="ready"} 3.0\n'
        'sluiceway_queue_items{queue="b",state="ready"} 4.0\nprocess_open_fds 20.0\n'
    )
    assert read_metrics(text) == {"series": 3.0, "items": 7.0}


def test_the_vitals_of_a_process_follow_what_it_takes() -> None:
    before = vitals(os.getpid())
    with socket.socket(), Path("/dev/null").open():
        waiting = threading.Event()
        thread = threading.Thread(target=waiting.wait)
        thread.start()
        kept = bytearray(b"x") * 40_000_000
        after = vitals(os.getpid())
        waiting.set()
        thread.join()
    assert before is not None
    assert after is not None
    assert (after.handles, after.sockets, after.threads) == (before.handles + 2, before.sockets + 1, before.threads + 1)
    assert after.anonymous - before.anonymous > 0.9 * len(kept)
    assert after.processor >= before.processor > 0
    assert proportional(os.getpid()) is not None


def test_a_process_that_is_gone_has_no_vitals() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert vitals(child) is None
    assert proportional(child) is None


def test_all_files_of_a_folder_are_counted(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "one").write_bytes(b"x" * 10_000)
    (tmp_path / "two").write_bytes(b"x")
    found = stored(tmp_path)
    assert found.files == 2
    assert 10_001 <= found.bytes <= 40_000
    assert stored(tmp_path / "none") == (0, 0)


def test_the_machine_is_never_busier_than_it_has_processors() -> None:
    busy, all_of_it = machine_busy()
    assert 0 < busy <= all_of_it


def test_a_fixed_piece_of_work_takes_its_time() -> None:
    assert yardstick() > 0.1


def test_a_longer_soak_has_more_lives_of_the_server() -> None:
    short, long = planned(10, 7), planned(120, 7)
    assert (short.lives, long.lives) == (2, 4)
    assert (short.warm_up, long.warm_up) == (60.0, 300.0)
    assert len(short.ends()) == 1
    assert len(long.ends()) == 3
    assert planned(120, 7).ends() == long.ends() != planned(120, 8).ends()
    assert all(later - earlier > 1_200 for earlier, later in zip([0.0, *long.ends()], [*long.ends(), long.length], strict=True))
