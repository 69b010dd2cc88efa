"""The benchmarks of what is hard and of what grows, in small: that they measure what they say, and that their arithmetic is right."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import backlog, growth, growth_plots, hard, model, odd_shapes
from sluiceway.bench import systems
from sluiceway.bench.figures import Figure
from sluiceway.bench.load import Connection
from sluiceway.bench.servers import SLUICEWAY, server
from sluiceway.bench.work import Work


def run_case(name: str, items: int, folder: Path) -> list[hard.Document]:
    return asyncio.run(hard._run(name, items, folder))


@pytest.mark.parametrize("name", hard.CASES)
def test_a_hard_case_does_all_that_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hard, "SOON", 100)
    monkeypatch.setattr(hard, "BULK", 500)
    phases = run_case(name, 2_000, tmp_path)
    # Each phase has checked that it was done to as many items as it names.
    assert phases
    table = hard.table({name: phases})
    for phase in phases:
        assert phase["items_per_s"]
        assert str(phase["phase"]) in table
        assert str(phase["why"]) in table


def test_a_hard_case_that_takes_too_long_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(hard.CASES, "ones", hard.CASES["ones"]._replace(bound=-59.9e6 / 1_000))
    output = tmp_path / "hard.json"
    assert hard.main(["ones", "--items", "1000", "--output", str(output)]) == 1
    assert json.loads(output.read_text())["cases"] == {}
    assert "ones took longer than 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["in-process", "disk", "in-memory"])
def test_a_floor_does_the_work(name: str, tmp_path: Path) -> None:
    floors = systems.module(name)
    assert floors.found() is None
    assert name in floors.GUARANTEES
    with floors.serve(name, tmp_path) as served:
        assert len(served.pids) == (name == "in-memory")
        # The in-process floor is in this process, whose loop and files it must give back.
        done = floors.drive(name, served.address, Work.named("arrow-100x100-c8"), 0.2)
        assert done.items >= 100
        assert done.items % 100 == 0
        if name != "in-memory":
            single = floors.drive(name, served.address, Work.named("single-latency-c1"), 0.2)
            assert single.latencies is not None
            assert single.items == len(single.latencies["lease"]) > 0


@pytest.mark.slow
def test_growth_measures_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SETTLE", 0)
    rows = growth.waiters(tmp_path, (1, 20), growth.Effort(rounds=10, rest=0.1))
    assert [row["size"] for row in rows] == [1, 20]
    assert all(row["memory_mb"] > 10 and row["produce_cpu_ms"] > 0 for row in rows)
    assert growth.page_of({"waiters": rows}).count("\n| 20 |") == 1
    figures = growth.aims({"waiters": rows})
    # What was not measured in full size has no aim, so it cannot meet one.
    assert figures
    assert all(figure.aim is None for figure in figures)


@pytest.mark.slow
def test_growth_counts_what_partitions_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "SETTLE", 0)
    monkeypatch.setattr(growth, "STARTS", 1)
    (row,) = growth.partitions(tmp_path, (9,), growth.Effort(rounds=10, rest=0.1))
    # Each partition is a database and its log.
    assert row["open_files"] > 2 * 9
    assert min(row["restart_s"], row["cycle_ms"]) > 0
    assert growth.aims({"partitions": [row]})


@pytest.mark.slow
@pytest.mark.parametrize("name", odd_shapes.SHAPES)
def test_an_odd_shape_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(odd_shapes, "SETTLE", 0.1)
    monkeypatch.setattr(odd_shapes, "LEAD", 2.0)
    monkeypatch.setattr(odd_shapes, "PROBES", 20)
    # Each checks that there are as many as it says.
    figures = odd_shapes.SHAPES[name].run(tmp_path / "data", 40)
    assert any("p99" in figure.name for figure in figures)
    assert all(figure.aim is None for figure in figures), "an aim in small"


def test_odd_shapes_have_aims_in_full_size_and_keep_what_was_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shape(_folder: Path, size: int) -> list[Figure]:
        return [Figure("shape", "start", 6.0, "s", odd_shapes.aim_at(size >= 10, 5))]

    monkeypatch.setattr(odd_shapes, "SHAPES", {"one": odd_shapes.Shape(shape, 10), "two": odd_shapes.Shape(shape, 20)})
    output = tmp_path / "odd.json"
    assert odd_shapes.main(["one", "--output", str(output)]) == 1
    page = tmp_path / "page.md"
    page.write_text("<!-- odd shapes: begin -->\n<!-- odd shapes: end -->\n")
    assert odd_shapes.main(["two", "--share", "0.1", "--output", str(output), "--page", str(page)]) == 0
    assert "| shape | start | 6 s | ≤ 5 s, missed |" in page.read_text()
    assert "aim: 5, MISSED" in capsys.readouterr().out
    found = json.loads(output.read_text())["shapes"]
    assert {name: each["figures"][0]["missed"] for name, each in found.items()} == {"one": True, "two": False}


def test_a_line_stays_as_long_while_it_is_leased_from(tmp_path: Path) -> None:
    async def measured(url: str) -> tuple[int, list[backlog.Cycle]]:
        await backlog.fill(url, 2_000)
        (cycles,) = await backlog.cycles([url], 5)
        connection = Connection(url)
        await connection.open()
        stats = json.loads(await connection.post("/v1/queue.stats", b'{"queue_name": "q"}'))
        await connection.close()
        return stats["logical_queues"][0]["partitions"][0]["ready"], cycles

    with server(SLUICEWAY, tmp_path) as running:
        ready, cycles = asyncio.run(measured(running.url))
    assert ready == 2_000
    assert len(cycles) == 5
    assert all(min(cycle) > 0 for cycle in cycles)


def test_growth_has_aims_in_full_size() -> None:
    row = {"size": 10_000_000.0, "against_short": 1.3, "restart_s": 1.0, "memory_mb": 150.0}
    idle = {"size": 9_999.0, "idle_cpu_percent": 1.0, "memory_per_waiter_kb": 13.0, "produce_against_alone": 1.0}
    figures = growth.aims({"backlog": [row | {"size": 1_000.0}, row], "waiters": [idle]})
    assert {figure.aim: figure.missed for figure in figures if figure.aim is not None} == {1.2: True, 2.0: False}


def test_a_plot_has_the_shape_that_is_expected(tmp_path: Path) -> None:
    assert growth_plots.expected("flat", [1, 10, 100], [2.0, 2.5, 9.0]) == [2.0, 2.0, 2.0]
    assert growth_plots.expected("linear", [0, 10, 100], [1.0, 5.0, 11.0]) == [1.0, 2.0, 11.0]
    rows = [{"size": size, **{panel.column: size for panel in growth_plots.PARTS["waiters"].panels}} for size in (1.0, 10.0, 100.0)]
    growth_plots.draw({"waiters": rows, "workers": rows}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["growth-waiters.svg"]
    assert "<svg" in (tmp_path / "growth-waiters.svg").read_text()[:1_000]


ROUND = model.Store(
    "round",
    commit=0.001,
    commit_cpu=0.0001,
    commit_here=0.0002,
    look_cpu=0.0001,
    look_cpu_each=0.000001,
    look_here=0.0003,
    look_here_each=0.000002,
    ask_cpu=0.00005,
    ask_here=0.0001,
    refresh_cpu=0.00008,
    refresh_here=0.0002,
    refresh_cpu_each=0.0000008,
    refresh_here_each=0.0000015,
    scan_cpu=0.0000005,
    scan_here=0.0000001,
    serial=True,
    asks_at_hints=True,
)
"""Constants that are easy to calculate with."""
BEFORE = model.VARIANTS["before: looks that read everything"]


def test_the_model_counts_what_a_cluster_asks_of_its_meta_store() -> None:
    at = model.cost(ROUND, model.Setting(10, beat=0.5))
    # Ten members beat twice a second, each of them looks at each beat, and the watcher of each asks twice.
    assert (at.commits, at.looks) == (20, 200)
    # One of them reads the loads of all every 15 s.
    reports = 1 / 15
    assert at.asks == pytest.approx(430 + reports)
    assert at.commit_line == pytest.approx(0.02)
    # One of the ten has changed since the look before.
    look_cpu, look_here = 0.00008 + 0.0000008 + 10 * 0.0000005, 0.0002 + 0.0000015 + 10 * 0.0000001
    assert at.meta_cores == pytest.approx(20 * 0.0001 + 200 * look_cpu + (430 + reports) * 0.00005)
    assert at.look_share == pytest.approx((20 * 0.0002 + 200 * look_here + (430 + reports) * 0.0001) / 10)
    assert at.megabytes == pytest.approx((200 * 75 + 34_000 * reports) / 1e6)
    # A hundred are not told of beats, and look once for each of their own; before, twice.
    assert model.cost(ROUND, model.Setting(100, beat=0.5)).looks == 100 * 2
    assert model.cost(ROUND, replace(BEFORE, instances=100)).looks == 100 * 4
    assert model.cost(ROUND, model.Setting(100)).asks == pytest.approx(100 * 3 + reports)
    # Each asks nine others once a second, and nine ask it. A third of the calls is on leased items; one in ten meets the owner by chance.
    assert at.polls == 18
    assert at.forwarded == pytest.approx(10 * 1_000 / 3 * 0.9)
    assert at.breaks == ""


def test_polls_and_wake_ups_no_longer_grow_with_the_instances() -> None:
    small, large = model.Setting(10, poll_here=0.0001), model.Setting(1_000, poll_here=0.0001)
    # Nine others, polled each second and polling; an item ends nine polls, each of which is followed by a lease and the next poll.
    assert model.cost(ROUND, small).poll_share == pytest.approx(18 * 0.0001)
    assert model.cost(ROUND, small).wake_share == pytest.approx(9 * 2 * (0.0001 + 0.0002))
    before = model.cost(ROUND, replace(large, bounded_polls=False))
    assert before.polls == pytest.approx(2 * 999)
    assert before.poll_share == pytest.approx(0.1998)
    assert before.wake_share == pytest.approx(999 * 2 * 0.0003)
    now = model.cost(ROUND, large)
    assert now.polls == pytest.approx(2 * 33, abs=1)
    assert now.wake_share == pytest.approx(2 * 0.0003)


def test_looks_that_read_everything_grow_with_the_partitions() -> None:
    few, many = (model.cost(ROUND, model.Setting(100, partitions)).megabytes for partitions in (1_000, 10_000))
    assert many - few == pytest.approx(9_000 * 34 / 15 / 1e6)
    few, many = (model.cost(ROUND, replace(BEFORE, instances=100, partitions=partitions)).megabytes for partitions in (1_000, 10_000))
    assert many - few > 400 * 9_000 * 49 / 1e6


def test_the_model_says_where_it_breaks() -> None:
    most = model.most(ROUND, model.Setting(10))
    assert 200 < most < 1_000
    assert model.cost(ROUND, model.Setting(most)).breaks == ""
    assert "commits wait for one another" in model.cost(ROUND, model.Setting(1_000)).breaks
    assert "1000 members are the limit" in model.cost(ROUND, model.Setting(1_001)).breaks
    assert "the plan does not fit" in model.cost(ROUND, replace(BEFORE, partitions=100_000)).breaks
    assert "the plan does not fit" not in model.cost(ROUND, model.Setting(10, 100_000)).breaks
    assert "the plan does not fit" in model.cost(ROUND, model.Setting(10, 120_000)).breaks
    # Without a pace, looks grow with the square of the members, so twice the beat is less than twice the members.
    before = model.most(ROUND, model.Setting(10, quiet=False, told_what=False, delta=False))
    longer = model.most(ROUND, model.Setting(10, quiet=False, told_what=False, delta=False, beat=1.0))
    assert before < longer < 2 * before
    # With it, the line of commits is what is left.
    assert longer < most <= 0.5 / ROUND.commit


def test_the_model_shows_a_table_of_the_kept_constants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constants = tmp_path / "model.json"
    with pytest.raises(SystemExit):
        model.main(["--constants", str(constants)])
    assert "measure a meta store and polls first" in capsys.readouterr().err
    assert model.main(["--constants", str(model.RESULTS)]) == 0
    shown = capsys.readouterr().out
    assert "**PostgreSQL**" in shown
    assert "**etcd**" in shown
    assert sum(line.split(" | ")[1:3] == ["1,000", "100,000"] for line in shown.splitlines()) == 2 * len(model.VARIANTS)


def test_the_page_has_the_table_of_the_kept_constants(tmp_path: Path) -> None:
    page = Path("docs/explanation/scale-out.md")
    copy = tmp_path / "page.md"
    copy.write_text(page.read_text().replace("| as it is | 10 |", "| something else |"))
    assert copy.read_text() != page.read_text()
    assert model.main(["--constants", str(model.RESULTS), "--page", str(copy)]) == 0
    assert copy.read_text() == page.read_text()
