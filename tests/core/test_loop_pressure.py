"""Pressure: the share of the time in which an event loop has work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.core.queue.loop_pressure import EVERY, HIGH, LOW, LoopPressure
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, lease, produce, serving, spec


def shares(pressure: LoopPressure, *of_time: float) -> list[bool]:
    """Whether the pressure is high after each of these times of EVERY seconds, with work in these shares of it."""
    busy = now = 0.0
    pressure.note(busy, now)
    found = []
    for share in of_time:
        busy, now = busy + share * EVERY, now + 1.001 * EVERY
        assert pressure.is_due(now)
        pressure.note(busy, now)
        assert not pressure.is_due(now + EVERY / 2)
        found.append(pressure.is_high)
    return found


def test_pressure_begins_late_and_ends_late() -> None:
    between = (HIGH + LOW) / 2
    assert shares(LoopPressure(), between, 0.99, between, between, 0.0, between) == [False, True, True, True, False, False]


def test_after_a_rest_there_is_no_pressure() -> None:
    pressure = LoopPressure()
    assert shares(pressure, 1.0) == [True]
    pressure.note(EVERY, 10.0)
    assert not pressure.is_high


@driven
async def test_a_server_that_is_short_of_processor_time_fills_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 0.0

    def work_without_end() -> float:
        nonlocal busy
        busy += 60.0
        return busy

    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))

        async def sizes() -> list[int]:
            waiting = [asyncio.ensure_future(lease(service, "q", 100, 2_000)) for _ in range(2)]
            await eventually(lambda: len(service._drivers["q"].waiting()) == 2)
            await produce(service, "q", *"x" * 10)
            first = await waiting[0]
            if not waiting[1].done():
                await produce(service, "q", "y")
            return [sum(each.items for each in leased.leases) for leased in (first, await waiting[1])]

        monkeypatch.setattr(system, "cpu_seconds", lambda: 0.0)
        assert await sizes() == [5, 5]
        monkeypatch.setattr(system, "cpu_seconds", work_without_end)
        service._context.pressure._read_at = float("-inf")
        service._context.pressure.note(0.0, system.stopwatch() - 1)
        assert await sizes() == [10, 1]
