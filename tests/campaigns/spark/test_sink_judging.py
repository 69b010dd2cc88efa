"""The judge of the campaign: each kind of fault is found, and nothing where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.campaigns.spark.__main__ import Campaign
from tests.campaigns.spark.control import WHERE
from tests.campaigns.spark.driver_kills import POINTS
from tests.campaigns.spark.judging import folders, judge_names, judge_outcomes, judge_reads
from tests.campaigns.spark.sabotages import SABOTAGES

GOOD = {"produced": 3, "completed": 1, "retried": 1, "dead": 1, "total": 0, "leases": 0}
ROWS = pa.table({"id": ["a", "b", "c"], "text": ["0", "1", "2"], "outcome": ["done", "retry", "dead"]})
BURIED = pa.chunked_array([["2"]])


def names(*some: str) -> pa.ChunkedArray:
    return pa.chunked_array([list(some)], pa.utf8())


@pytest.mark.parametrize(
    ("some", "once", "kinds"),
    [
        (("0", "2", "1"), True, set()),
        (("0", "2", "1", "1"), False, set()),
        (("0", "2", "1", "1"), True, {"doubled"}),
        (("0", "2"), False, {"lost"}),
        ((), True, {"lost"}),
        (("0", "1", "2", "3"), True, {"phantom"}),
        (("0", "1", "1", "-1"), True, {"lost", "doubled", "phantom"}),
    ],
)
def test_names_of_a_sink(some: tuple[str, ...], once: bool, kinds: set[str]) -> None:
    assert judge_names("it", names(*some), 3, once).kinds == kinds


def test_outcomes_that_fit() -> None:
    assert not judge_outcomes(ROWS, GOOD, BURIED, 3).found


@pytest.mark.parametrize(("counter", "value"), [("produced", 4), ("completed", 2), ("retried", 0), ("dead", 2)])
def test_a_counter_that_does_not_fit(counter: str, value: int) -> None:
    assert judge_outcomes(ROWS, {**GOOD, counter: value}, BURIED, 3).kinds == {"miscounted"}


@pytest.mark.parametrize("counter", ["total", "leases"])
def test_something_that_is_left(counter: str) -> None:
    assert judge_outcomes(ROWS, {**GOOD, counter: 1}, BURIED, 3).kinds == {"left"}


@pytest.mark.parametrize("buried", [["1"], [], ["2", "2"]])
def test_other_items_in_the_dead_queue(buried: list[str]) -> None:
    assert judge_outcomes(ROWS, GOOD, pa.chunked_array([buried], pa.utf8()), 3).kinds == {"miscounted"}


def test_a_row_that_is_in_two_batches() -> None:
    rows = pa.concat_tables([ROWS, ROWS.slice(0, 1)])
    assert judge_outcomes(rows, {**GOOD, "completed": 2}, BURIED, 3).kinds == {"doubled"}


def record(folder: Path, name: str, *ids: str) -> Path:
    path = folder / name
    rows = pa.record_batch({"id": list(ids)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
        stream.write_batch(rows)
    return path


def test_reads_that_are_the_same(tmp_path: Path) -> None:
    record(tmp_path, "1-0-x.whole", "a", "b", "c")
    record(tmp_path, "1-0-y.whole", "a", "b", "c")
    record(tmp_path, "1-0-z.part", "a", "b")
    (tmp_path / "1-0-empty.part").touch()
    record(tmp_path, "1-1-x.whole", "d")
    faults, compared = judge_reads(tmp_path)
    assert not faults.found
    assert compared == 3


def test_a_record_that_is_torn(tmp_path: Path) -> None:
    record(tmp_path, "1-0-x.whole", "a", "b", "c")
    torn = record(tmp_path, "1-0-y.part", "a", "b", "c")
    torn.write_bytes(torn.read_bytes()[:200])
    assert not judge_reads(tmp_path)[0].found


@pytest.mark.parametrize("other", [("a", "c", "b"), ("a", "b"), ("a", "b", "d"), ("a", "b", "c", "d")])
def test_reads_that_differ(tmp_path: Path, other: tuple[str, ...]) -> None:
    record(tmp_path, "1-0-x.whole", "a", "b", "c")
    record(tmp_path, "1-0-y.whole", *other)
    assert judge_reads(tmp_path)[0].kinds == {"other rows"}


def test_what_spark_has_not_committed_is_in_no_sink(tmp_path: Path) -> None:
    good, bad = tmp_path / "folders" / "batch=7", tmp_path / "folders" / "batch=7" / "_temporary" / "0"
    bad.mkdir(parents=True)
    for folder in (good, bad):
        pq.write_table(ROWS, folder / "part-0.parquet")
    assert folders(tmp_path).column("batch").to_pylist() == [7, 7, 7]


def test_each_sabotage_has_a_point_at_which_it_is_found() -> None:
    assert WHERE.keys() == SABOTAGES.keys()
    assert set(WHERE.values()) <= {point.name for point in POINTS}


def test_the_page_tells_of_every_point_and_every_scenario(repository: Path) -> None:
    page = (repository / "docs" / "project" / "spark-campaign.md").read_text()
    told = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert set(told) == {*Campaign.scenarios(), *(point.name for point in POINTS)}
