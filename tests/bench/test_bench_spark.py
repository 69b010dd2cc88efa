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
    rounds = [
        {
            "sluiceway": mine,
            "sluiceway, payload only": mine,
            "sluiceway: sink": Run(2.0, 1, 1),
            "kafka": its,
            "kafka: sink": Run(3.0, 1, 1),
            "empty, payload only": mine,
        }
        for mine, its in zip(ours, kafkas, strict=True)
    ]
    found = spark.of_case("large", spark.Case(30, 100, 10, ()), rounds)
    figures = {figure.name: figure.value for figure in found.figures}
    assert figures["sluiceway: rows/s after the first batch"] == 7.5
    assert figures["sluiceway: processor time of Spark a row"] == pytest.approx(2e6 / 30)
    ratios = {each.name: each for each in found.ratios}
    assert ratios["source-steady"].values == [2.0, 2.0]
    assert ratios["source-cpu"].values == [0.5, 0.5]
    assert ratios["sink"].value == 1.5
    assert ratios["floor-steady"].value == 2.0
    assert not any(each.missed for each in found.ratios)


def test_a_bar_may_be_an_upper_or_a_lower_bound() -> None:
    assert spark.Ratio("slow", "", [0.8, 0.9, 1.7], 1.0).missed
    assert not spark.Ratio("quick", "", [0.8, 0.9, 1.7], 1.0, at_most=True).missed
    assert not spark.Ratio("told", "", [0.8, 0.9, 1.7], None).missed


def test_the_rates_of_the_demo_are_those_of_its_ledger() -> None:
    ledger = "in     34,842 items/s (9.7 s)   Spark\nout     9,908 items/s (34.0 s; 50,012/s after the first batch)   queue\n"
    assert (spark.rate_in(ledger, "in"), spark.rate_in(ledger, "out")) == (34_842, 9_908)
    assert spark.rate_later(ledger) == 50_012


@pytest.mark.slow
def test_all_of_it_is_measured(tmp_path: Path) -> None:
    # The one of PySpark's own version may not be published yet.
    output = tmp_path / "spark.json"
    cases = ["large", "small", "wide", "single", "start"]
    known = ["--connector", "4.2.0", "--cache", str(CACHE), "--output", str(output)]
    code = spark.main(["--cases", *cases, "--share", "0.0001", "--rounds", "1", *known])
    if code == 2:
        pytest.skip("NOTHING IS MEASURED: no Kafka")
    document = json.loads(output.read_text())
    assert {*document["ratios"]} >= {"source-steady", "source-floor", "source-cpu", "sink", "micro-batch"}
    assert len({figure["about"] for figure in document["figures"]}) == 5
    assert all(figure["value"] >= 0 for figure in document["figures"])
