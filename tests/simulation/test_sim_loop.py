"""The loop in virtual time: what asyncio promises holds in it, processes have clocks of their own, and a seed is one order for good."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from random import Random
from typing import Any

import pytest

from simulation.loop import Loop, Process, StuckError, simulated
from simulation.world import START
from sluiceway.adapters import system


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(Random(0))
    yield loop
    loop.close()


def run(loop: Loop, work: Callable[[], Awaitable[Any]]) -> Any:
    return loop.run_until_complete(work())


def test_time_passes_only_when_nobody_has_anything_to_do(loop: Loop) -> None:
    async def work() -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []

        async def after(delay: float, name: str) -> None:
            await asyncio.sleep(delay)
            seen.append((name, loop.now))

        await asyncio.gather(after(3_600, "hour"), after(0, "now"), after(60, "minute"))
        return seen

    assert run(loop, work) == [("now", 0), ("minute", 60_000), ("hour", 3_600_000)]


def test_what_asyncio_offers_works(loop: Loop) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            await asyncio.sleep(1)
            yield number

    async def work() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        assert loop.now == 5_000
        with pytest.raises(ExceptionGroup):
            await grouped()
        assert loop.now == 5_000
        lock, order = asyncio.Lock(), []

        async def locked(name: str) -> None:
            async with lock:
                await asyncio.sleep(1)
                order.append(name)

        await asyncio.gather(*(locked(name) for name in "abc"))
        assert order == ["a", "b", "c"]
        assert [number async for number in numbers()] == [0, 1, 2]
        done, waiting = await asyncio.wait([asyncio.create_task(asyncio.sleep(n)) for n in (1, 50)], timeout=2)
        assert (len(done), len(waiting)) == (1, 1)
        assert await asyncio.to_thread(lambda: 7) == 7
        assert await asyncio.wait_for(asyncio.sleep(1, "x"), 2) == "x"
        with pytest.raises(asyncio.CancelledError):
            await cancelled()

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(100))
            group.create_task(fails())

    async def fails() -> None:
        raise OSError("as it should")

    async def cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(1))
        asyncio.get_running_loop().call_later(0.5, task.cancel)
        await task

    run(loop, work)


def test_a_cancelled_timer_does_not_make_time_pass(loop: Loop) -> None:
    async def work() -> None:
        loop.call_later(1_000, pytest.fail).cancel()
        await asyncio.sleep(1)

    run(loop, work)
    assert loop.now == 1_000


def test_everybody_waiting_for_ever_is_an_error_that_says_who(loop: Loop) -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        await asyncio.gather(waits_for_godot())

    with pytest.raises(StuckError, match=r"the world: .*waits_for_godot at line"):
        run(loop, work)


def test_a_loop_without_end_is_an_error() -> None:
    loop = Loop(Random(0), most_steps=1_000)

    async def work() -> None:
        loop.call_soon(again)
        await asyncio.sleep(1)

    def again() -> None:
        loop.call_soon(again)

    with pytest.raises(StuckError, match="no end"):
        run(loop, work)
    loop.close()


def test_what_a_task_or_a_callback_raises_ends_the_run(loop: Loop) -> None:
    async def fails() -> None:
        raise OSError("nobody hears this")

    async def of_a_task() -> None:
        task = asyncio.create_task(fails())
        await asyncio.sleep(1)
        assert task.done()

    async def of_a_callback() -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(1)

    with pytest.raises(OSError, match="nobody hears"):
        run(loop, of_a_task)
    with pytest.raises(ValueError, match="invalid literal"):
        run(Loop(Random(0)), of_a_callback)


def test_what_a_task_raised_and_somebody_heard_does_not(loop: Loop) -> None:
    async def fails() -> None:
        raise OSError("heard")

    async def work() -> None:
        for _ in range(600):
            await asyncio.wait([task := asyncio.create_task(fails())])
            assert isinstance(task.exception(), OSError)

    run(loop, work)


def test_a_process_has_clocks_of_its_own(loop: Loop) -> None:
    fast, slow = loop.add(Process("fast", 1.1, 50_000)), loop.add(Process("slow", 0.9))

    async def ten_seconds() -> tuple[int, int]:
        began = system.steady()
        await asyncio.sleep(10)
        return loop.now, system.steady() - began

    async def work() -> list[tuple[int, int]]:
        assert fast.steady(0) == 50_000
        return list(await asyncio.gather(loop.begin(fast, ten_seconds()), loop.begin(slow, ten_seconds()), ten_seconds()))

    with simulated(loop):
        answers = run(loop, work)
    assert [at for at, _ in answers] == [9_090, 11_111, 10_000]
    assert all(9_999 <= seen <= 10_000 for _, seen in answers)


def test_the_wall_clock_is_set_and_the_time_of_a_process_runs_on(loop: Loop) -> None:
    process = loop.add(Process("p"))

    async def work() -> list[int]:
        seen = []
        for ahead in (0, 30_000, -30_000, -30_000):
            process.wall_ahead = ahead
            seen.append(system.now() - START)
            await asyncio.sleep(1)
        return seen

    before = system.now
    with simulated(loop):
        assert loop.run_until_complete(loop.begin(process, work())) == [0, 1_000, 2_000, 3_000]
    assert system.now is before


def test_randomness_comes_from_the_seed() -> None:
    def drawn(seed: int) -> tuple[str, str]:
        with simulated(Loop(Random(seed))):
            return system.new_incarnation(), system.new_secret()

    assert drawn(1) == drawn(1) != drawn(2)
    assert (len(drawn(1)[0]), len(drawn(1)[1])) == (8, 48)


def test_a_frozen_process_does_nothing_until_it_thaws_and_then_all_that_was_due(loop: Loop) -> None:
    process, seen = loop.add(Process("p")), []

    async def ticks() -> None:
        for _ in range(5):
            await asyncio.sleep(1)
            seen.append(loop.now)

    def thaw() -> None:
        process.frozen = False

    async def work() -> None:
        loop.after(1_500, lambda: setattr(process, "frozen", True))
        loop.after(10_000, thaw)
        await loop.begin(process, ticks())

    run(loop, work)
    assert seen == [1_000, 10_000, 11_000, 12_000, 13_000]


def test_a_killed_process_ends_between_two_callbacks_without_its_finally(loop: Loop) -> None:
    process, seen = loop.add(Process("p")), []

    async def works() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                seen.append(loop.now)
        finally:
            seen.append(-1)

    async def work() -> None:
        loop.begin(process, works())
        loop.after(2_500, lambda: loop.kill(process))
        await asyncio.sleep(10)

    run(loop, work)
    assert seen == [1_000, 2_000]
    loop.close()
    assert seen == [1_000, 2_000, -1]


def test_processes_take_turns_in_any_order_and_each_keeps_its_own() -> None:
    def order(seed: int, *, shuffle: bool = True) -> str:
        loop, seen = Loop(Random(seed), shuffle=shuffle), []

        async def says(letter: str) -> None:
            for number in range(3):
                seen.append(f"{letter}{number}")
                await asyncio.sleep(0)

        async def work() -> None:
            await asyncio.gather(*(loop.begin(loop.add(Process(letter)), says(letter)) for letter in "ab"))

        run(loop, work)
        loop.close()
        return " ".join(seen)

    orders = {order(seed) for seed in range(50)}
    assert len(orders) > 10
    assert all([each for each in one.split() if each[0] == "a"] == ["a0", "a1", "a2"] for one in orders)
    assert order(1, shuffle=False) == order(2, shuffle=False) == "a0 b0 a1 b1 a2 b2"


TASKS = """
import asyncio
from random import Random
from simulation.loop import Loop

async def work():
    tasks = {asyncio.create_task(asyncio.sleep(0, number)) for number in range(100)}
    done, _ = await asyncio.wait(tasks)
    print([task.result() for task in done])

Loop(Random(0)).run_until_complete(work())
"""


def test_sets_of_tasks_have_one_order_in_every_process() -> None:
    def says(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", TASKS], env=environment, capture_output=True, text=True, check=True).stdout

    assert len({says(hash_seed) for hash_seed in "123"}) == 1
