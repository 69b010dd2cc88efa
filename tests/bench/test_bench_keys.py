"""`python -m bench key_peers`: the load of items with keys, the check of their order, and the systems, on real servers where this machine
has them."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import key_peers
from bench.by_key.keyed_load import SIZE, Batches, KeyedClient, KeyedWork, OrderCheck, Rows, pace, rows_of, saturate, split
from bench.by_key.keyed_slice import drive
from bench.by_key.ordered_systems import ORDERED, OURS
from sluiceway.bench import harness
from sluiceway.bench.work import run

WORK = KeyedWork(keys=5, batch=20, clients=2)


def rows(*items: tuple[int, int]) -> Rows:
    """Rows by their keys and numbers."""
    keys, numbers = np.array(items, np.int64).T
    return Rows(keys, numbers, np.zeros_like(keys))


def test_a_payload_says_its_key_and_its_place_in_it() -> None:
    batches = Batches(WORK, 1)
    first, second = batches.make(1.5), batches.make(2.5)
    assert {len(payload) for payload in split(first)} == {SIZE}
    read = rows_of(first + second)
    assert [f"customer-{key:06}" for key in read.keys[:20]] == WORK.keys_of(1)
    assert read.numbers[read.keys == 7].tolist() == list(range(8))
    assert set(read.sent[:20]) == {1_500_000}
    assert set(read.sent[20:]) == {2_500_000}
    with pytest.raises(RuntimeError, match="101 bytes"):
        rows_of(b"0" * 101)


def test_deliveries_in_order_have_no_faults() -> None:
    check = OrderCheck(3)
    check.delivered(0, rows((0, 0), (1, 0), (0, 1)))
    check.settling(0)
    check.delivered(1, rows((0, 2), (1, 1)))
    assert check.figures() == {"inversions": 0, "repeats": 0, "overlaps": 0}
    assert check.missing(6) == 1


@pytest.mark.parametrize(
    ("deliveries", "faults"),
    [
        ([(0, [(0, 1), (0, 0)])], {"inversions": 1, "repeats": 1, "overlaps": 0}),
        ([(0, [(0, 1)]), (0, [(0, 0)])], {"inversions": 1, "repeats": 1, "overlaps": 0}),
        ([(0, [(0, 0), (0, 1)]), (0, [(0, 1), (0, 2)])], {"inversions": 0, "repeats": 1, "overlaps": 0}),
        ([(0, [(0, 0), (1, 0)]), (1, [(0, 1)])], {"inversions": 0, "repeats": 0, "overlaps": 1}),
    ],
    ids=["within a lease", "between leases", "again", "two clients"],
)
def test_each_fault_is_counted(deliveries: list[tuple[int, list[tuple[int, int]]]], faults: dict[str, int]) -> None:
    check = OrderCheck(2)
    for client, items in deliveries:
        check.delivered(client, rows(*items))
    assert check.figures() == faults


class Memory(KeyedClient):
    """A queue in memory that hands out whole batches."""

    def __init__(self, batches: deque[bytes]) -> None:
        self._batches = batches

    async def produce(self, payloads: bytes) -> None:
        self._batches.append(payloads)

    async def lease(self) -> tuple[bytes, Any]:
        await asyncio.sleep(0)
        if not self._batches:
            return b"", None
        return self._batches.popleft(), None

    async def complete(self, leased: Any) -> None:
        await asyncio.sleep(0)


class Twice(Memory):
    """Delivers each batch twice."""

    async def produce(self, payloads: bytes) -> None:
        await super().produce(payloads)
        await super().produce(payloads)


class Lossy(Memory):
    """Loses the last item of each batch."""

    async def produce(self, payloads: bytes) -> None:
        await super().produce(payloads[:-SIZE])


def queue(kind: type[Memory]) -> list[KeyedClient]:
    batches: deque[bytes] = deque()
    return [kind(batches) for _ in range(WORK.clients)]


def test_a_load_checks_all_that_it_counts() -> None:
    full = run(saturate(queue(Memory), WORK, 0.1))
    assert full.items >= WORK.batch
    assert full.items % WORK.batch == 0
    assert full.figures["inversions"] == 0
    half = run(pace(queue(Memory), WORK, 2_000, 0.4))
    # What is due within the time is produced and awaited, however late the machine is.
    assert half.items == 800
    assert half.figures["missing"] == half.figures["inversions"] == half.figures["repeats"] == 0
    assert 0 < half.figures["wait_p50_ms"] <= half.figures["wait_p99_ms"]


def test_a_load_tells_of_a_queue_that_repeats_or_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(pace(queue(Twice), WORK, 2_000, 0.2)).figures["repeats"] > 0
    monkeypatch.setattr("bench.by_key.keyed_load.DRAIN", 0.0)
    lossy = run(pace(queue(Lossy), WORK, 2_000, 0.2)).figures
    assert lossy["inversions"] > 0
    assert lossy["missing"] > 0


def skip_without(name: str) -> None:
    if reason := ORDERED[name].missing():
        warnings.warn(f"{name.upper()} IS NOT TESTED: {reason}", stacklevel=3)
        pytest.skip(f"{name.upper()} IS NOT TESTED: {reason}")


def check_order(name: str) -> None:
    skip_without(name)
    work = KeyedWork(keys=10, batch=100, clients=4)
    with harness.started([ORDERED[name].server], pytest.fail) as running:
        address = running[ORDERED[name].server].address
        full = run(drive(name, address, work, 0.5))
        half = run(drive(name, address, work, 0.6, 2_000.0))
    assert full.items
    for done in (full, half):
        assert done.figures["inversions"] == done.figures["repeats"] == done.figures["overlaps"] == 0
    assert half.items == 1_200
    assert half.figures["missing"] == 0


@pytest.mark.parametrize("name", [OURS, "redis-everysec"])
def test_a_real_system_keeps_the_order(name: str) -> None:
    check_order(name)


def test_a_lock_in_redis_that_ran_out_is_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without("redis-everysec")
    monkeypatch.setattr("bench.by_key.ordered_redis.LEASE", 0)

    async def lease_twice(address: str) -> None:
        async with ORDERED["redis-everysec"].load().clients("redis-everysec", address, WORK) as (first, second):
            await first.produce(Batches(WORK, 0).make(0))
            taken, leased = await first.lease()
            assert len(taken) == WORK.batch * SIZE
            again, theirs = await second.lease()
            assert sorted(split(again)) == sorted(split(taken))
            with pytest.raises(RuntimeError, match="0 of 20 items settled"):
                await first.complete(leased)
            await second.complete(theirs)
            assert await first.lease() == (b"", None)

    with harness.started([ORDERED["redis-everysec"].server], pytest.fail) as running:
        run(lease_twice(running[ORDERED["redis-everysec"].server].address))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pgmq", "pgmq-rr", "kafka"])
def test_a_slower_system_keeps_the_order(name: str) -> None:
    check_order(name)


@pytest.mark.slow
def test_the_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "keys.json", tmp_path / "page.md"
    page.write_text("<!-- key peers: begin -->\n<!-- key peers: end -->\n")
    given = [
        "--systems",
        OURS,
        "--keys",
        "100",
        "--rounds",
        "1",
        "--seconds",
        "0.5",
        "--output",
        str(output),
        "--page",
        str(page),
        "--json",
    ]
    assert key_peers.main(given) == 0
    document = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out) == document
    (measured,) = document["runs"]
    assert measured["inversions"] == measured["missing"] == measured["overlaps"] == 0
    assert measured["items_per_s"] / 2 == pytest.approx(measured["half_per_s"], rel=0.01)
    assert key_peers.tables(document) in page.read_text()


def measured(system: str, number: int, rate: float, **more: Any) -> dict[str, Any]:
    figures = dict.fromkeys(("server_us", "client_us", "half_per_s", "p50_ms", "p99_ms"), 2.0)
    faults = dict.fromkeys(("inversions", "overlaps", "repeats", "missing"), 0)
    about = {"system": system, "keys": 100, "round": number, "at": "2026-01-31T08:00:00Z", "load": 1.5, "items_checked": 1_000}
    return about | figures | faults | {"items_per_s": rate} | more


def document(*runs: dict[str, Any]) -> dict[str, Any]:
    about = {"version": "1", "guarantee": "All.", "order": "Kept."}
    names = dict.fromkeys(each["system"] for each in runs)
    return {
        "machine": "a machine",
        "seconds": 3,
        "absent": {"kafka": "no Java"},
        "systems": dict.fromkeys(names, about),
        "runs": list(runs),
    }


def test_a_ratio_is_of_one_round() -> None:
    # The machine was half as fast in the second round.
    runs = [measured(OURS, 1, 100), measured("pgmq", 1, 10), measured(OURS, 2, 50), measured("pgmq", 2, 5), measured("pgmq", 3, 500)]
    assert key_peers.ratios(runs, "pgmq", "items_per_s") == 10
    assert key_peers.ratios(runs, OURS, "items_per_s") is None
    assert key_peers.ratios(runs[1:2], "pgmq", "items_per_s") is None


def test_the_tables_say_who_is_ahead_and_what_broke() -> None:
    text = key_peers.tables(
        document(
            measured(OURS, 1, 1_000),
            measured("pgmq", 1, 2_000, inversions=7),
            measured("kafka-sync", 1, 500, p99_ms=1.0),
            {"system": "redis-always", "keys": 100, "round": 1, "failed": "gone"},
        )
    )
    assert text.count("| 0.5 | 1 |\n") == 1
    assert "Peers with more items/s than ours: pgmq (0.5 ×); with a lower p99 than ours: kafka-sync (2 ×)." in text
    assert "| pgmq | 1 | All. | Kept. | 1,000 | 7 | 0 | 0 | 0 |" in text
    assert "**redis-always failed** with 100 keys in round 1: gone." in text
    assert "**kafka was not measured**: no Java." in text
    assert "load 1.5 to 1.5" in text


def test_a_system_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> harness.Slice:
        raise harness.FailedError("stuck")

    monkeypatch.setattr(key_peers, "_slice", fail)
    output = tmp_path / "keys.json"
    assert key_peers.main(["--systems", OURS, "--rounds", "1", "--keys", "100", "--output", str(output)]) == 1
    assert json.loads(output.read_text())["runs"][0]["failed"] == "stuck"
    assert f"{OURS}: FAILED: stuck" in capsys.readouterr().err
