"""`python -m bench spark`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import spark
from bench.spark_runs import Run
from tests.servers.kafka_server import CACHE


def test_a_ratio_is_of_one_round_and_leaves_out_the_first_batch() -> None:
    # The second round met a machine half as fast.
    ours = [Run(9.0, 2.0, 1.0, ((10, 5.0), (10, 1.0), (10, 1.0))), Run(18.0, 2.0, 1.0, ((10, 9.0), (10, 2.0), (10, 2.0)))]
    kafkas = [Run(9.0, 4.0, 2.0, ((10, 1.0), (10, 2.0), (10, 2.0))), Run(18.0, 4.0, 2.0, ((10, 1.0), (10, 4.0), (10, 4.0)))]
    runs = {("source", "sluiceway"): ours, ("source", "kafka"): kafkas, ("sink", "sluiceway"): ours}
    figures = {figure.name: figure.value for figure in spark.figures_of("source", "source", 30, runs)}
    assert figures["sluiceway: rows/s after the first batch"] == 7.5
    assert figures["sluiceway: processor time of Spark a row"] == pytest.approx(2e6 / 30)
    assert [figures[name] for name in figures if "against" in name] == [0.5, 0.5, 0.5]


def test_what_has_no_rival_has_no_ratio() -> None:
    figures = spark.figures_of("scan", "scan", 100, {("scan", "parquet"): [Run(2.0, 1.0, 0.0)]})
    assert figures[0].value == 50
    assert not [figure for figure in figures if "against" in figure.name or "first batch" in figure.name]


@pytest.mark.slow
def test_all_of_it_is_measured(tmp_path: Path) -> None:
    # The one of PySpark's own version may not be published yet.
    output = tmp_path / "spark.json"
    code = spark.main(["--items", "400", "--rounds", "1", "--connector", "4.2.0", "--cache", str(CACHE), "--output", str(output)])
    if code == 2:
        pytest.skip("NOTHING IS MEASURED: no Kafka")
    figures = json.loads(output.read_text())["figures"]
    about = {figure["about"] for figure in figures}
    assert {name.partition(",")[0] for name in about} == {"a session", "sink", "source", "scan", "a micro-batch with one item"}
    assert len(about) == 10
    assert all(figure["value"] >= 0 for figure in figures)
