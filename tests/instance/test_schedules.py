"""The driver of schedules: each time once, through kills, lost answers and two owners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from sluiceway.adapters import system
from sluiceway.core.schedules import firings
from sluiceway.instance import bundle_driver, schedule_driver
from sluiceway.instance.schedule_driver import ScheduleDriver
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.requests import Produce, Produced, QueueSpec
from sluiceway.model.schedule_records import Progress, SchedulePatch, ScheduleRecord
from sluiceway.ports.meta_store import MetaUnknownError
from tests.cluster.cluster_rig import MORTAL, Cluster, cluster, lapse
from tests.instance.instance_rig import PATIENCE, eventually, lease, moved_ahead, payloads, schedule_spec, serving, spec, total

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
Ahead = Callable[[Millis], None]


def driven(test: Callable[[Path, Ahead], Awaitable[None]]) -> Callable[[Path], None]:
    """Runs the test on a loop, with a clock that it can move."""

    @wraps(test)
    def run(tmp_path: Path) -> None:
        async def timed() -> None:
            with moved_ahead() as ahead:
                async with asyncio.timeout(PATIENCE):
                    await test(tmp_path, ahead)

        asyncio.run(timed())

    # Otherwise pytest asks for the clock as a fixture.
    del run.__wrapped__
    return run


def to_next(minutes: int = 1, *, ahead: Ahead) -> Millis:
    """Move the clock to just after the minute that is so many away, and return that."""
    at = (system.now() // MINUTE + minutes) * MINUTE
    ahead(at - system.now() + 1)
    return at


async def made(service: Service, name: str = "s", cron: str = "* * * * *", **fields: Any) -> ScheduleRecord:
    record = await service.schedules.create(schedule_spec(name, "q", cron, **fields), SYSTEM)
    if not record.paused:
        await eventually(lambda: name in service.schedule_driver._firings)
    return record


def progress(service: Service, name: str = "s") -> Progress:
    record = service.schedules.find(name)
    assert record is not None
    return service.schedules.progress(record)


async def fired(service: Service, at: Millis, name: str = "s") -> None:
    service.schedule_driver._wake.set()

    def is_fired() -> bool:
        last = progress(service, name).fired
        return last is not None and last.at >= at

    await eventually(is_fired)


async def forget(driver: ScheduleDriver) -> None:
    """In place of a record: as if the process had been killed before it."""


# ---- kills ----------------------------------------------------------------------------------------------------------


@driven
async def test_a_time_that_was_fired_before_a_kill_is_not_fired_again(tmp_path: Path, ahead: Ahead) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleDriver, "_record", forget)
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q"))
            await made(service)
            at = to_next(ahead=ahead)
            await fired(service, at)
            first = progress(service).fired
    assert first is not None
    async with serving(tmp_path) as (service, _):
        await fired(service, at)
        again = progress(service).fired
        assert again is not None
        assert (again.at, again.id) == (at, first.id)
        assert total(service, "q") == 1


@driven
async def test_a_time_is_passed_over_while_the_item_of_an_earlier_one_holds_its_unique_key(tmp_path: Path, ahead: Ahead) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(QueueSpec("q", 2, unique="until_settled"))
        record = await made(service, item={"utf8": "x", "unique_key": "backup"})
        ids = []
        for _ in range(2):
            await fired(service, to_next(ahead=ahead))
            last = progress(service).fired
            assert last is not None
            ids.append(last.id)
        assert [*ids, await service.schedule_driver.run_now(record)] == [ids[0]] * 3
        assert total(service, "q") == 1


@driven
async def test_without_the_group_it_would_be_fired_again(tmp_path: Path, ahead: Ahead) -> None:
    """The control group of the test above."""

    async def unkeyed(self: ScheduleDriver, queue_name: str, request: Produce) -> Produced:
        request.key = None
        return await produce(queue_name, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleDriver, "_record", forget)
        for count in (1, 2):
            async with serving(tmp_path) as (service, _):
                produce = service.schedule_driver._produce
                service.schedule_driver._produce = unkeyed.__get__(service.schedule_driver)
                if count == 1:
                    await service.create_queue(spec("q"))
                    await made(service)
                    at = to_next(ahead=ahead)
                await fired(service, at)
                assert total(service, "q") == count


@driven
async def test_a_stop_records_how_far_it_has_come_and_so_it_goes_on(tmp_path: Path, ahead: Ahead) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await made(service, catch_up="all")
        await fired(service, at := to_next(ahead=ahead))
        last = progress(service)
    async with serving(tmp_path) as (service, _):
        assert progress(service) == last
        await eventually(lambda: "s" in service.schedule_driver._firings)
        assert service.schedule_driver._firings.due() == at + MINUTE


@driven
async def test_an_answer_that_was_lost_is_asked_for_again(tmp_path: Path, ahead: Ahead) -> None:
    lost: list[Produced] = []

    async def losing(queue_name: str, request: Produce) -> Produced:
        produced = await produce(queue_name, request)
        if not lost:
            lost.append(produced)
            raise SluicewayError("outcome_unknown", "the answer was lost")
        return produced

    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await made(service)
        produce, service.schedule_driver._produce = service.schedule_driver._produce, losing
        at = to_next(ahead=ahead)
        service.schedule_driver._wake.set()
        await eventually(lambda: progress(service).failed is not None)
        ahead(firings.FIRST_PAUSE)
        await fired(service, at)
        assert len(lost) == total(service, "q") == 1


# ---- failures -------------------------------------------------------------------------------------------------------


@driven
async def test_a_queue_that_takes_nothing_is_tried_again_and_the_failure_is_told(tmp_path: Path, ahead: Ahead) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await made(service)
        await service.pause("q", ["produce"], True)
        at = to_next(ahead=ahead)
        service.schedule_driver._wake.set()
        await eventually(lambda: progress(service).failed is not None)
        failed = progress(service).failed
        assert failed is not None
        assert (failed.at, failed.code) == (at, "queue_paused")
        await service.pause("q", ["produce"], False)
        ahead(firings.LAST_PAUSE)
        await fired(service, at)
        assert progress(service).failed is None
        assert total(service, "q") == 1


@driven
async def test_a_schedule_outlives_its_queue_and_says_what_is_missing(tmp_path: Path, ahead: Ahead) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        record = await made(service)
        await service.delete_queue("q", force=True)
        await eventually(lambda: "s" not in service.schedule_driver._firings)
        to_next(5, ahead=ahead)
        await service.catch_up()
        ((_, told, _),) = await service.schedule_driver.shown([record])
        assert told.failed is not None
        assert told.failed.code == "queue_not_found"
        await service.create_queue(spec("q"))
        await eventually(lambda: total(service, "q") == 1)
        assert payloads((await lease(service, "q")).batches) == ["of s"]


@driven
async def test_a_new_item_is_no_new_firing(tmp_path: Path, ahead: Ahead) -> None:
    """The time was fired, which nobody recorded; then the item changes, and the time is fired with the new one: it is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleDriver, "_record", forget)
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q"))
            await made(service)
            await fired(service, at := to_next(ahead=ahead))
            item = schedule_spec("other", "q").item
            await service.schedules.update("s", SchedulePatch(item=item), "schedules.update", SYSTEM, lambda _: None)
    async with serving(tmp_path) as (service, _):
        await fired(service, at)
        assert total(service, "q") == 1
        again = progress(service).fired
        assert again is not None
        assert again.id == ""


# ---- changes --------------------------------------------------------------------------------------------------------


@driven
async def test_times_of_a_pause_are_not_fired(tmp_path: Path, ahead: Ahead) -> None:
    async def set_paused(paused: bool) -> None:
        await service.schedules.update("s", SchedulePatch(paused=paused), "schedules.pause", SYSTEM, lambda _: None)

    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await made(service, catch_up="all")
        await fired(service, to_next(ahead=ahead))
        await set_paused(True)
        assert "s" not in service.schedule_driver._firings
        to_next(10, ahead=ahead)
        await set_paused(False)
        await eventually(lambda: "s" in service.schedule_driver._firings)
        await fired(service, to_next(ahead=ahead))
        assert total(service, "q") == 2


@driven
async def test_a_schedule_of_the_same_name_is_another_one(tmp_path: Path, ahead: Ahead) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await made(service, catch_up="all")
        await fired(service, at := to_next(ahead=ahead))
        await service.schedules.delete("s", SYSTEM, lambda _: None)
        assert service.schedules.find("s") is None
        # The clock of this instance is behind the first one's.
        ahead(-2 * MINUTE)
        await made(service, catch_up="all")
        assert progress(service).fired is None
        ahead(2 * MINUTE)
        await fired(service, at)
        # The first one fired it, and a minute before it and itself are two of this one.
        assert total(service, "q") == 3


@driven
async def test_many_times_at_once_are_fired_a_few_at_a_time(tmp_path: Path, ahead: Ahead) -> None:
    most = 0

    async def counting(queue_name: str, request: Produce) -> Produced:
        nonlocal most
        most = max(most, len(service.schedule_driver._flying))
        return await produce(queue_name, request)

    count = 3 * schedule_driver.MAX_OF_QUEUE
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        produce, service.schedule_driver._produce = service.schedule_driver._produce, counting
        for number in range(count):
            record = schedule_spec(f"s{number}", "q", "@hourly")
            service.schedules._note(record.name, record)
        await eventually(lambda: len(service.schedule_driver._firings) == count)
        ahead(HOUR)
        await service.catch_up()
        await eventually(lambda: total(service, "q") == count)
        assert most == schedule_driver.MAX_OF_QUEUE


@driven
async def test_a_queue_that_hangs_does_not_hold_up_the_others(tmp_path: Path, ahead: Ahead) -> None:
    hangs, opened = asyncio.Event(), asyncio.Event()

    async def slow(queue_name: str, request: Produce) -> Produced:
        if queue_name == "q":
            hangs.set()
            await opened.wait()
        return await produce(queue_name, request)

    count = 2 * schedule_driver.MAX_OF_QUEUE
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await service.create_queue(spec("other"))
        produce, service.schedule_driver._produce = service.schedule_driver._produce, slow
        for number in range(count):
            record = schedule_spec(f"s{number:04}", "q", catch_up="skip")
            service.schedules._note(record.name, record)
        record = schedule_spec("z", "other", catch_up="skip")
        service.schedules._note("z", record)
        await eventually(lambda: len(service.schedule_driver._firings) == count + 1)
        at = to_next(ahead=ahead)
        await fired(service, at, "z")
        await hangs.wait()
        assert total(service, "q") == 0
        # What has waited until it was missed is decided about again: by its policy nothing of it is fired.
        ahead(firings.MISSED_AFTER)
        opened.set()
        await eventually(lambda: not service.schedule_driver._flying and not service.schedule_driver._waiting)
        late = [name for name in service.schedules.names() if (last := progress(service, name).fired) is None or last.at != at]
        assert len(late) >= count - schedule_driver.MAX_OF_QUEUE


# ---- a cluster ------------------------------------------------------------------------------------------------------


def holders(made: Cluster, name: str = "s") -> list[Service]:
    return [service for service in made.wires.instances.values() if name in service.schedule_driver._firings]


@driven
async def test_one_instance_fires_a_schedule_and_another_takes_it_over(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (rig, (a, b)):
        await a.create_queue(spec("q", 2))
        await a.schedules.create(schedule_spec("s", "q"), SYSTEM)
        await eventually(lambda: len(holders(rig)) == 1)
        (owner,) = holders(rig)
        other = b if owner is a else a
        await fired(owner, first := to_next(ahead=ahead))
        # Not recorded yet.
        rig.die(rig.name(owner))
        await eventually(lambda: other in holders(rig))
        await fired(other, second := to_next(ahead=ahead))
        assert second == first + MINUTE
        await eventually(lambda: total(other, "q") == 2)


@driven
async def test_two_instances_that_both_believe_to_be_the_owner_fire_once(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b") as (_, both):
        await both[0].create_queue(spec("q", 2))
        record = await both[0].schedules.create(schedule_spec("s", "q"), SYSTEM)
        await eventually(lambda: all(service.schedules.find("s") is not None for service in both))
        for service in both:
            service.schedule_driver._owns = lambda queue_name: (1,)  # type: ignore[method-assign]
            service.schedule_driver._is_here = lambda *_: True  # type: ignore[method-assign]
            service.schedule_driver.poke()
            await eventually(lambda service=service: "s" in service.schedule_driver._firings)  # type: ignore[misc]
        for _ in range(3):
            at = to_next(ahead=ahead)
            await asyncio.gather(*(fired(service, at) for service in both))
        ids = [last.id for service in both if (last := service.schedules.progress(record).fired) is not None]
        assert ids[0] == ids[1] != ""
        assert sum(total(service, "q") for service in both) == 3


@driven
async def test_an_instance_that_wakes_up_fires_nothing_twice(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b") as (rig, (a, b)):
        await a.create_queue(spec("q", 2))
        await a.schedules.create(schedule_spec("s", "q", catch_up="all"), SYSTEM)
        await eventually(lambda: len(holders(rig)) == 1)
        (frozen,) = holders(rig)
        await fired(frozen, to_next(ahead=ahead))
        gate = lapse(rig, frozen)
        to_next(ahead=ahead)
        assert frozen.schedule_driver._begin() is None
        assert not frozen.schedule_driver._flying
        gate.open()
        await eventually(lambda: any(progress(service).fired is not None for service in holders(rig)))
        await asyncio.gather(*(fired(service, to_next(ahead=ahead)) for service in holders(rig)[:1]))
        await eventually(lambda: sum(total(service, "q") for service in (a, b)) == 3)


@driven
async def test_a_change_is_heard_by_every_instance(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b") as (rig, (a, b)):
        await a.create_queue(spec("q", 2))
        for number in range(5):
            await a.schedules.create(schedule_spec(f"s{number}", "q", "@hourly"), SYSTEM)
        await eventually(lambda: len([*b.schedules.names()]) == 5)
        assert (await b.schedules.get("s3")) == a.schedules.find("s3")
        await b.schedules.update("s3", SchedulePatch(cron="@daily"), "schedules.update", SYSTEM, lambda _: None)
        await b.schedules.delete("s4", SYSTEM, lambda _: None)
        await eventually(lambda: [*a.schedules.names()] == ["s0", "s1", "s2", "s3"])
        changed = a.schedules.find("s3")
        assert changed is not None
        assert changed.cron == "@daily"
        # Whoever has missed more than the index names reads all.
        late = await rig.start("c")
        assert [*late.schedules.names()] == ["s0", "s1", "s2", "s3"]
        late.schedules._version = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sluiceway.model.record_index.MAX_RECENT", 2)
            for number in range(4):
                await a.schedules.delete(f"s{number}", SYSTEM, lambda _: None)
        await late.schedules.follow()
        assert [*late.schedules.names()] == []


@driven
async def test_what_cannot_be_recorded_is_recorded_later(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a") as (rig, (a,)):
        await a.create_queue(spec("q"))
        await a.schedules.create(schedule_spec("s", "q"), SYSTEM)
        await eventually(lambda: len(holders(rig)) == 1)
        await fired(a, at := to_next(ahead=ahead))
        rig.metas["a"].cut()
        with pytest.raises(SluicewayError):
            await a.schedule_driver._record()
        rig.metas["a"].heal()
        await a.schedule_driver._record()
        fresh = await rig.start("b")
        assert progress(fresh).through == at


@driven
async def test_an_error_that_nobody_expects_ends_no_watch_and_no_record(tmp_path: Path, ahead: Ahead) -> None:
    """An instance that hears of no change any more fires what was deleted."""

    def failing(follow: Callable[[], Awaitable[None]]) -> tuple[Callable[[], Awaitable[None]], list[None]]:
        """Fails some times, more often than there are tasks that call it."""
        failures: list[None] = []

        async def follow_or_fail() -> None:
            if len(failures) < 5:
                failures.append(None)
                raise ValueError("something new")
            await follow()

        return follow_or_fail, failures

    with pytest.MonkeyPatch.context() as patch:
        for module in (schedule_driver, bundle_driver):
            patch.setattr(module, "FOLLOW_INTERVAL", 10)
        patch.setattr(schedule_driver, "RECORD_INTERVAL", 10)
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            seen = []
            for records, name in ((b.schedules, "follow"), (b.bundles, "follow"), (b.schedule_driver, "_record")):
                instead, failures = failing(getattr(records, name))
                patch.setattr(records, name, instead)
                seen.append(failures)
            await eventually(lambda: [*map(len, seen)] == [5, 5, 5])
            await a.create_queue(spec("q"))
            await a.schedules.create(schedule_spec("s", "q", "@hourly"), SYSTEM)
            await eventually(lambda: [*b.schedules.names()] == ["s"])


@driven
async def test_a_change_that_has_landed_without_an_answer_holds_at_once(tmp_path: Path, ahead: Ahead) -> None:
    """A single server fired a schedule that was paused, until it was restarted."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await service.schedules.create(schedule_spec("s", "q"), SYSTEM)
        commit = service.meta.commit

        async def unheard(*args: Any, **named: Any) -> None:
            await commit(*args, **named)
            raise MetaUnknownError("cut off")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service.meta, "commit", unheard)
            with pytest.raises(SluicewayError, match="did not confirm the change"):
                await service.schedules.update("s", SchedulePatch(paused=True), "schedules.pause", SYSTEM, lambda _: None)
        found = service.schedules.find("s")
        assert found is not None
        assert found.paused
