"""The comparison with the peers: real slices of real systems, and the arithmetic over them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import page
from sluiceway.bench import __main__ as bench
from sluiceway.bench import campaign, harness, systems
from sluiceway.bench.harness import Slice, case_of, groups, ratios_of
from sluiceway.bench.work import Served, Work

SECONDS = 0.2


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with systems.module("sluiceway").serve("sluiceway", tmp_path_factory.mktemp("ours")) as served:
        yield served


def cycle(form: str = "arrow") -> Work:
    return Work.named(f"{form}-100x100-c2")


def one(items: int, seconds: float = 1.0, cpu: float = 0.0, cycles: list[float] | None = None) -> Slice:
    return Slice(items, seconds, cpu, cpu / 2, {"cycle": cycles} if cycles else {})


@pytest.mark.parametrize("name", [*campaign.CASES, "json-5x1000-c3", "single-latency-c8"])
def test_a_case_is_known_by_its_name(name: str) -> None:
    assert Work.named(name).name == name


@pytest.mark.parametrize(
    "name", ["", "arrow", "arrow-1000x100", "xml-1x1-c1", "json-1x100-c8", "single-peek-c1", "arrow-0x100-c1", "single-cycle-c64 "]
)
def test_what_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no case"):
        Work.named(name)


def test_forms_of_one_work_are_measured_together() -> None:
    names = ("arrow-1000x100-c8", "single-cycle-c64", "json-1000x100-c8", "arrow-1000x100-c1")
    assert [[work.name for work in group] for group in groups(map(Work.named, names)).values()] == [
        ["arrow-1000x100-c8", "json-1000x100-c8"],
        ["single-cycle-c64"],
        ["arrow-1000x100-c1"],
    ]


def test_the_campaign_has_every_system_in_the_main_cases_and_some_in_all() -> None:
    names = list(systems.MODULES)
    taking_part = {work.name: part.systems for part in campaign.parts(None, names) for work in part.works}
    assert taking_part.keys() == set(campaign.CASES)
    assert all(taking_part[case] == names for case in campaign.FULL)
    assert all(set(campaign.SOME) <= set(part) for part in taking_part.values())
    assert [part.systems for part in campaign.parts(["arrow-1x100-c1"], names)] == [names]


def test_figures_are_medians_and_processor_time_an_item() -> None:
    figures = case_of({"sluiceway": [one(100, cpu=1e-3), one(300, cpu=2e-3), one(200, cpu=3e-3)], "nats": []})
    assert figures == {"sluiceway": {"items_per_s": 200, "min": 100, "max": 300, "server_us_per_item": 10, "client_us_per_item": 5}}


def test_a_ratio_is_of_one_round() -> None:
    # The machine was ten times as fast in the second round: the medians alone would say 1.
    slices = {"sluiceway": [one(200), one(2_000), one(300)], "nats": [one(100), one(1_000), one(100)], "disk": []}
    assert ratios_of(slices) == {"nats": 2}
    assert ratios_of(slices, "nats") == {"sluiceway": 0.5}


def test_of_latency_the_cycles_p99_is_compared() -> None:
    times = [n / 1_000 for n in range(1, 201)]
    slices = {"sluiceway": [one(200, cycles=times)], "redis-always": [one(200, cycles=[each / 2 for each in times])]}
    assert ratios_of(slices) == {"redis-always": 2}
    assert case_of(slices)["sluiceway"]["cycle_ms"] == {"p50": 101, "p99": 199, "p99_9": 200}


@pytest.mark.parametrize(
    ("name", "form"), [("sluiceway", "json"), ("sluiceway", "protobuf"), ("sluiceway-client", "arrow"), ("sluiceway-client", "json")]
)
def test_ours_in_each_form(ours: Served, name: str, form: str) -> None:
    done = systems.module(name).drive(name, ours.address, cycle(form), SECONDS)
    assert done.items > 0
    assert done.items % 100 == 0
    assert done.seconds >= SECONDS


@pytest.mark.parametrize("kind", ["produce", "cycle"])
def test_the_producer_and_the_consumer_do_single_items(ours: Served, kind: str) -> None:
    done = systems.module("sluiceway-consumer").drive("sluiceway-consumer", ours.address, Work.named(f"single-{kind}-c8"), SECONDS)
    assert done.items > 0
    assert done.seconds >= SECONDS


def test_the_producer_and_the_consumer_take_part_in_single_items_alone(ours: Served) -> None:
    for case, takes_part in (("single-cycle-c2", True), ("single-latency-c1", False), ("arrow-1x100-c2", False), ("json-2x100-c2", False)):
        work = Work.named(case)
        assert (harness.measure([work], {"sluiceway-consumer": ours}, 1, SECONDS, print)[work] != {}) == takes_part, case


@pytest.mark.slow
def test_a_slice_is_a_process_of_its_own(ours: Served) -> None:
    measured = harness.slice_of("sluiceway", ours, cycle(), SECONDS)
    assert measured.items > 0
    assert measured.seconds >= SECONDS
    assert 0 < measured.client < 60
    assert 0 <= measured.server < 60


def test_latencies_are_those_of_each_call(ours: Served) -> None:
    done = systems.module("sluiceway").drive("sluiceway", ours.address, Work.named("single-latency-c1"), SECONDS)
    assert done.latencies is not None
    names = ("produce", "lease", "complete", "cycle")
    assert {name: len(times) for name, times in done.latencies.items()} == dict.fromkeys(names, done.items)
    assert all(cycle == pytest.approx(sum(parts)) for *parts, cycle in zip(*(done.latencies[name] for name in names), strict=True))


@pytest.mark.slow
def test_a_system_that_fails_is_told_of_and_the_others_go_on(ours: Served) -> None:
    told: list[str] = []
    # Nobody listens there.
    running = {"beanstalkd": Served("1", [os.getpid()]), "sluiceway": ours}
    slices = harness.measure([cycle()], running, 2, SECONDS, told.append)
    assert {name: len(each) for name, each in slices[cycle()].items()} == {"sluiceway": 2}
    failed = [line for line in told if line.startswith("LEFT OUT")]
    assert len(failed) == 1
    assert "beanstalkd" in failed[0]
    assert "Connect" in failed[0]


def test_a_peer_does_one_slice_for_all_forms_and_fails_in_all(tmp_path: Path) -> None:
    told: list[str] = []
    group = [cycle(), cycle("json")]
    assert harness.measure(group, {"beanstalkd": Served("1", [os.getpid()])}, 1, SECONDS, told.append) == {work: {} for work in group}
    assert len(told) == 1


@pytest.mark.parametrize("name", ["redis-everysec", "redis-always-raw", "nats", "beanstalkd"])
def test_a_peer(name: str, tmp_path: Path) -> None:
    if reason := systems.found(name):
        pytest.skip(f"{name.upper()} IS NOT TESTED: {reason}")
    module = systems.module(name)
    with module.serve(name, tmp_path) as served:
        done = module.drive(name, served.address, Work.named("arrow-10x100-c2"), SECONDS)
    assert done.items > 0
    assert module.version()
    assert module.GUARANTEES[name]


def test_the_page_says_what_was_missed_and_where_others_are_ahead() -> None:
    ratios = {
        "arrow-1000x100-c8": {"redis-everysec": 1.5, "nats": 5.5, "in-process": 0.4},
        "single-cycle-c64": {"redis-always": 0.5},
        "single-latency-c1": {"redis-always": 5.5, "postgres": 0.5},
    }
    when = {case: {"at": "2026-01-31T08:00:00Z", "rounds": 3, "seconds": 2.0, "load": 0.1} for case in ratios}
    on_postgres = {"arrow-1000x100-c8": {"postgres": 3.5}}
    others = {"ratios_on_postgres": on_postgres, "ratios_of_consumer": {"single-cycle-c64": {"redis-always": 1.5}}}
    document = {"machine": "x", "cases": {}, "ratios": ratios, "measured": when, "systems": {}, **others}
    lines = page.tables(document).splitlines()
    assert "| arrow-1000x100-c8 | ours against redis-everysec | ≥ 2 × | 1.5 ×, **missed** |" in lines
    assert "| arrow-1000x100-c8 | ours against nats | ≥ 5 × | 5.5 × |" in lines
    assert "| single-cycle-c64 | ours against redis-always | ≥ 1.3 × | 0.5 ×, **missed** |" in lines
    assert "| single-cycle-c64 | our producer and consumer against redis-always | ≥ 1 × | 1.5 × |" in lines
    assert "| single-cycle-c64 | our producer and consumer against nats | ≥ 1 × | not measured |" in lines
    assert "| arrow-1000x100-c8 | our PostgreSQL store against postgres | ≥ 3 × | 3.5 × |" in lines
    assert "| single-latency-c1 | p99 of ours against redis-always | ≤ 5 × | 5.5 ×, **missed** |" in lines
    assert [line for line in lines if line.startswith("* ")] == [
        "* single-cycle-c64: redis-always (0.5 ×)",
        "* single-latency-c1, p99 of a cycle: redis-always (5.5 ×)",
    ]


@pytest.mark.slow
def test_the_command_keeps_the_cases_that_it_does_not_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    before = {"at": "2026-01-31T08:00:00Z", "rounds": 3, "seconds": 2.0, "load": 0.1}
    figures = {"nats": case_of({"nats": [one(100)]})["nats"]}
    kept = {
        "cases": {"arrow-10x100-c1": figures},
        "ratios": {"arrow-10x100-c1": {}},
        "measured": {"arrow-10x100-c1": before},
        "systems": {},
    }
    file.write_text(json.dumps(kept))
    given = ["--cases", "single-latency-c1", "--systems", "sluiceway", "--rounds", "1", "--seconds", str(SECONDS), "--output", str(file)]
    assert bench.main([*given, "--merge", "--json"]) == 0
    both = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == both
    assert both["cases"].keys() == both["measured"].keys() == {"arrow-10x100-c1", "single-latency-c1"}
    assert both["cases"]["arrow-10x100-c1"] == figures
    written = page.tables(both)
    assert "### arrow-10x100-c1" in written
    assert "p99.9" in written
    assert systems.module("sluiceway").GUARANTEES["sluiceway"] in written
    assert "| single-latency-c1 | p99 of ours against redis-always | ≤ 5 × | not measured |" in written
    assert {plot.name for plot in page.plots(both, tmp_path)} == {"bench-latency.svg"}
