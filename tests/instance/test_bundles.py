"""The driver of bundles: each follow-up once, through kills, lost answers and two owners; and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from sluiceway.adapters import system
from sluiceway.cluster.coordinator import check_bundles
from sluiceway.cluster.ownership import item_of
from sluiceway.core.bundles.lifecycle import KEPT_FOR, OPEN_FOR, REACH
from sluiceway.instance.bundle_catalog import Bundles
from sluiceway.instance.bundle_driver import AT_ONCE, ELSEWHERE, ENDED_ELSEWHERE
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.access import SYSTEM
from sluiceway.model.bundle_records import BundleRecord
from sluiceway.model.items import batch_from_rows
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan
from sluiceway.model.requests import BundleCount, Clear, CountBundles, CountStep, Disposition, Lease, Produce, ProduceKey
from sluiceway.model.small_batch import in_columns
from sluiceway.wire.json_bundles import decode_create
from tests.cluster.cluster_rig import MORTAL, Gate, cluster, shares
from tests.instance.instance_rig import PATIENCE, Store, eventually, lease, moved_ahead, rows, settle, spec, total

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


class Serving:
    """A service in that directory, stopped at the end."""

    def __init__(self, directory: Path) -> None:
        store = Store(directory / "partitions")
        self.service = Service(directory, open_store=lambda *_: store)

    async def __aenter__(self) -> Service:
        await self.service.start()
        return self.service

    async def __aexit__(self, *_: object) -> None:
        async with asyncio.timeout(PATIENCE):
            await self.service.stop()


async def made(service: Service, items: int | None = None, target: str = "then") -> str:
    """A bundle of the queue `q`, with a follow-up. Returns its id."""
    call = {"queue_name": "q", "items": items, "follow_up": {"queue_name": target, "item": {"utf8": "next"}}}
    record = decode_create(msgspec.json.encode(call)).record(system.new_incarnation(), service.queue("q"), system.now())
    return (await service.bundles.create(record, SYSTEM)).id


async def queues(service: Service, partitions: int = 2, **fields: Any) -> None:
    await service.create_queue(spec("then"))
    await service.create_queue(spec("q", partitions, **fields))


async def stored(service: Service, bundle: str | None, *payloads: str, key: str | None = None) -> None:
    await service.produce("q", Produce(rows(*payloads), 10_000, None if key is None else ProduceKey(key), bundle=bundle))


async def close(service: Service, bundle: str) -> None:
    await service.bundles.close(bundle, SYSTEM, lambda _: None)


async def complete_all(service: Service, disposition: Disposition | None = None) -> None:
    leased = await lease(service, "q", most=10)
    await settle(service, "q", leased, *([] if disposition is None else [disposition]))


def record(service: Service, bundle: str) -> BundleRecord:
    found = service.bundles.find(bundle)
    assert found is not None
    return found


async def count(service: Service, bundle: str) -> BundleCount:
    ((_, counted, _),) = await service.bundle_driver.shown([record(service, bundle)])
    assert counted is not None
    return counted


async def is_over(service: Service, bundle: str, state: str = "done") -> None:
    await eventually(lambda: record(service, bundle).state == state)


async def follow_ups(service: Service) -> list[dict[str, str]]:
    """The headers of the follow-ups that are there."""
    leased = await service.lease("then", Lease("c", 10, 0, 60_000, 10))
    return [dict(headers) for batch in map(in_columns, leased.batches) for headers in batch.column("headers").to_pylist()]


def drives(service: Service, bundle: BundleRecord) -> bool:
    queue = service.queue("q")
    return service.bundle_driver._is_here(queue, bundle, service.ownership.tokens(queue))


def ledgers(service: Service) -> int:
    """The records of bundles in the partitions of `q`."""
    return sum(len(each.partition.log.bundles) for each in service._drivers["q"].queue.executors.values())


# ---- one server -----------------------------------------------------------------------------------------------------


@driven
async def test_a_follow_up_says_what_has_become_of_the_items(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        await stored(service, bundle, "a", "b", "c")
        await stored(service, None, "of no bundle")
        for _ in range(2):
            await stored(service, bundle, "d", key="once")
        assert await count(service, bundle) == BundleCount(4)
        await complete_all(service, Disposition("retry"))
        assert await count(service, bundle) == BundleCount(4), "a retry is no end"
        leased = await lease(service, "q", 2)
        await settle(service, "q", leased)
        leased = await lease(service, "q", 1, most=10)
        await settle(service, "q", leased, Disposition("dead"))
        await close(service, bundle)
        with pytest.raises(SluicewayError, match="is closed"):
            await stored(service, bundle, "late")
        await service.clear("q", Clear(10_000))
        await is_over(service, bundle)
        (headers,) = await follow_ups(service)
        counts = [int(headers[f"bundle_{name}"]) for name in ("stored", "completed", "dead", "dropped")]
        assert (headers["bundle"], counts[0], sum(counts[1:])) == (bundle, 4, 4)
        assert tuple(counts) == record(service, bundle).count
        assert record(service, bundle).follow_up_id
        await eventually(lambda: ledgers(service) == 0)


@driven
async def test_a_bundle_of_a_number_of_items_closes_by_itself(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle, empty = await made(service, 3), await made(service, 0)
        await is_over(service, empty)
        await stored(service, bundle, "a", "b")
        await complete_all(service)
        assert (await count(service, bundle)).left == 0
        assert record(service, bundle).state == "open"
        await stored(service, bundle, "c")
        await is_over(service, bundle, "closed")
        await complete_all(service)
        await is_over(service, bundle)
        assert len(await follow_ups(service)) == 2


@driven
async def test_a_killed_server_does_not_produce_the_follow_up_again(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        await stored(service, bundle, "a")
        await close(service, bundle)
        with killed_before_the_record() as killed:
            await complete_all(service)
            await eventually(lambda: bundle in killed)
        assert total(service, "then") == 1
    async with Serving(tmp_path) as service:
        await is_over(service, bundle)
        assert total(service, "then") == 1
        await eventually(lambda: ledgers(service) == 0)


@contextmanager
def killed_before_the_record() -> Iterator[list[str]]:
    """The end of a bundle is not recorded, as if the process had been killed before it. Gives the bundles to which that has happened."""
    killed: list[str] = []

    async def kill(self: Bundles, record: BundleRecord, after: object) -> None:
        killed.append(record.id)
        raise SluicewayError("unavailable", "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bundles, "take_step", kill)
        yield killed


@driven
async def test_without_the_group_it_would_be_produced_again(tmp_path: Path, ahead: Ahead) -> None:
    """The control group of the test above."""
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        await stored(service, bundle, "a")
        produce = service.bundle_driver._produce

        async def unkeyed(queue_name: str, request: Produce) -> Any:
            request.key = None
            return await produce(queue_name, request)

        service.bundle_driver._produce = unkeyed
        await close(service, bundle)
        with killed_before_the_record() as killed:
            await complete_all(service)
            await eventually(lambda: bundle in killed)
        assert total(service, "then") == 1
        await is_over(service, bundle)
        assert total(service, "then") == 2


@driven
async def test_an_answer_that_was_lost_adds_nothing(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        await stored(service, bundle, "a")
        produce = service.bundle_driver._produce
        lost: list[Any] = []

        async def losing(queue_name: str, request: Produce) -> Any:
            produced = await produce(queue_name, request)
            if not lost:
                lost.append(produced)
                raise SluicewayError("outcome_unknown", "the answer is lost")
            return produced

        service.bundle_driver._produce = losing
        await close(service, bundle)
        await complete_all(service)
        await eventually(lambda: bool(lost))
        ((_, _, problem),) = await service.bundle_driver.shown([record(service, bundle)])
        assert problem in ("outcome_unknown: the answer is lost", None)
        ahead(1_000)
        await service.bundle_driver.catch_up()
        await is_over(service, bundle)
        assert total(service, "then") == 1
        assert record(service, bundle).follow_up_id


@driven
async def test_a_follow_up_waits_for_its_queue(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service, target="later")
        await close(service, bundle)
        await eventually(lambda: bundle in service.bundle_driver._failing)
        ((_, _, problem),) = await service.bundle_driver.shown([record(service, bundle)])
        assert problem is not None
        assert problem.startswith("queue_not_found")
        await service.create_queue(spec("later"))
        ahead(60_000)
        await service.bundle_driver.catch_up()
        assert record(service, bundle).state == "done"
        assert total(service, "later") == 1


# ---- nothing is kept for ever ---------------------------------------------------------------------------------------


@driven
async def test_what_has_ended_is_deleted_after_a_day(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        await close(service, bundle)
        await is_over(service, bundle)
        ahead(KEPT_FOR - 60_000)
        await service.bundle_driver.catch_up()
        # A produce that was under way for all that time: it leaves nothing behind.
        service._drivers["q"].queue.executors[0].partition.log.bundles.arrive(record(service, bundle).hashed)
        ahead(120_000)
        await service.bundle_driver.catch_up()
        assert service.bundles.find(bundle) is None
        assert ledgers(service) == 0
        with pytest.raises(SluicewayError) as refused:
            await stored(service, bundle, "late")
        assert refused.value.code == "bundle_not_found"


@driven
async def test_one_that_is_never_closed_or_never_over_expires(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        forgotten, stuck = await made(service), await made(service)
        await stored(service, forgotten, "a")
        await stored(service, stuck, "b")
        await close(service, stuck)
        ahead(REACH + 1_000)
        await service.bundle_driver.catch_up()
        assert [record(service, each).state for each in (forgotten, stuck)] == ["open", "expired"]
        assert record(service, stuck).count == BundleCount(1)
        ahead(OPEN_FOR - REACH)
        await service.bundle_driver.catch_up()
        assert record(service, forgotten).state == "expired"
        assert ledgers(service) == 0
        # The items stay.
        await complete_all(service)
        assert (total(service, "q"), total(service, "then")) == (0, 0)


@driven
async def test_a_cancelled_bundle_and_one_of_a_deleted_queue_have_no_follow_up(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        cancelled, orphan = await made(service), await made(service)
        await stored(service, cancelled, "a")
        await service.bundles.cancel(cancelled, SYSTEM, lambda _: None)
        with pytest.raises(SluicewayError, match="is cancelled"):
            await close(service, cancelled)
        await eventually(lambda: ledgers(service) == 0)
        await complete_all(service)
        await stored(service, orphan, "b")
        await service.delete_queue("q", force=True)
        await service.create_queue(spec("q"))
        await close(service, orphan)
        await is_over(service, orphan, "cancelled")
        assert total(service, "then") == 0
        with pytest.raises(SluicewayError, match="no bundle"):
            await stored(service, orphan, "c")
        assert await service.bundles.cancel(orphan, SYSTEM, lambda _: None) == record(service, orphan)


# ---- rebalances -----------------------------------------------------------------------------------------------------


@driven
async def test_a_drained_partition_stays_until_its_bundles_are_over(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        bundle = await made(service)
        for partition in (0, 1):
            await service.produce("q", Produce(rows("x", "y"), 10_000, partition=partition, bundle=bundle))
        await service.rebalance("q", 1, "copy", None, None)
        stayed = service.queue("q")
        await eventually(lambda: any(each.state == "draining" for each in service.queue("q").partitions))
        (drained,) = (each.partition for each in service.queue("q").partitions if each.state == "draining")
        await eventually(lambda: part(service, drained).admission._log.header.moved == 2)
        assert await count(service, bundle) == BundleCount(4)
        assert len(stayed.partitions) == 2
        await complete_all(service)
        await close(service, bundle)
        await is_over(service, bundle)
        assert record(service, bundle).count == BundleCount(4, 4)
        await eventually(lambda: len(service.queue("q").partitions) == 1)
        assert len(await follow_ups(service)) == 1


def part(service: Service, number: int) -> Any:
    return service._drivers["q"].queue.executors[number].partition


@driven
async def test_an_only_partition_is_not_replaced_while_there_are_bundles(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service, 1)
        bundle = await made(service)
        queue, replaced = service.queue("q"), Plan((), (0,), (), in_order=True)
        check_bundles(replaced, service.queue("then"), service)
        check_bundles(replace(replaced, in_order=False), queue, service)
        with pytest.raises(SluicewayError, match="bundles that are not over"):
            check_bundles(replaced, queue, service)
        await close(service, bundle)
        await is_over(service, bundle)
        check_bundles(replaced, queue, service)


class Unlike(BundleRecord, frozen=True, kw_only=True):
    """A record that must not be compared: each with each is too much."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")


@driven
async def test_many_bundles_hold_up_nothing_else(tmp_path: Path, ahead: Ahead) -> None:
    """After a start, all of a day are looked at."""
    async with Serving(tmp_path) as service:
        await queues(service)
        one = record(service, await made(service))
        fields = {name: getattr(one, name) for name in one.__struct_fields__}
        many = [Unlike(**(fields | {"id": f"{number}", "state": "done", "ended_at": one.created_at})) for number in range(3 * AT_ONCE)]
        driver, turns, taken = service.bundle_driver, [0], list[BundleRecord]()

        async def take(queue: QueueRecord, step: CountStep | None, records: Sequence[BundleRecord]) -> None:
            taken.extend(records)

        async def others() -> None:
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        driver._take_steps = take  # type: ignore[method-assign]
        working = asyncio.create_task(others())
        await driver._drive_of("q", many)
        working.cancel()
        assert [each.id for each in taken if each.id != one.id] == [each.id for each in many]
        assert turns[0] >= 3


@driven
async def test_of_another_instances_bundles_those_that_are_over_are_looked_at_rarely(tmp_path: Path, ahead: Ahead) -> None:
    async with Serving(tmp_path) as service:
        await queues(service)
        one = record(service, await made(service))
        over = replace(one, id="over", state="done", ended_at=one.created_at)
        driver = service.bundle_driver
        driver._is_here = lambda *_: False  # type: ignore[method-assign]
        now = system.now()
        driver._due |= {one.id: -1, "over": -1}
        await driver._drive_of("q", [one, over])
        assert driver._due[one.id] < now + 2 * ELSEWHERE < now + ENDED_ELSEWHERE <= driver._due["over"]


# ---- a cluster ------------------------------------------------------------------------------------------------------


@driven
async def test_a_bundle_over_two_instances(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (rig, (a, b)):
        await queues(a, 4)
        bundle = await made(a)
        # The other one has not heard of it.
        for number in range(4):
            await b.produce("q", Produce(batch_from_rows([{"payload": b"x"}] * 3), 10_000, partition=number, bundle=bundle))
        assert await count(a, bundle) == await count(b, bundle) == BundleCount(12)
        leased = await a.lease("q", Lease("c", 6, 0, 60_000, 10))
        await settle(a, "q", leased)
        await close(b, bundle)
        driver = next(each for each in (a, b) if drives(each, record(b, bundle)))
        other = b if driver is a else a
        rig.die(rig.name(driver))
        await eventually(lambda: drives(other, record(other, bundle)))
        while record(other, bundle).state != "done":
            leased = await other.lease("q", Lease("d", 12, 200, 60_000, 10))
            if leased.leases:
                await settle(other, "q", leased)
        assert record(other, bundle).count == BundleCount(12, 12)
        assert len(await follow_ups(other)) == 1


@driven
async def test_a_partition_is_counted_of_which_the_counting_instance_has_not_heard(tmp_path: Path, ahead: Ahead) -> None:
    """A rebalance has added it. Without it, the bundle would be over while its items wait there."""
    async with cluster(tmp_path, "a", "b") as (rig, both):
        await queues(both[0], 1)
        await both[0].create_queue(spec("more"))
        bundle = record(both[0], await made(both[0]))
        behind, other = sorted(both, key=lambda each: -sum(len(shares(each, name)) for name in ("q", "then", "more")))
        gate = rig.metas[rig.name(behind)].on_read = Gate(only=lambda keys: QUEUE in keys)
        before = other.queue("q")
        writes = other.ownership.placing([item_of(before.incarnation, 1)])
        await other._catalog.put(replace(before, partitions=(*before.partitions, PartitionRecord(1))), {}, writes)
        await eventually(lambda: 1 in shares(other, "q"))
        await other._router.produce(before, Produce(rows("x"), 10_000, partition=1, bundle=bundle.id))
        counting = asyncio.create_task(behind._router.count_bundles(before, CountBundles(10_000, (bundle.hashed,), "close")))
        gate.open()
        assert (await counting).counts.get(bundle.hashed) == BundleCount(1)


@driven
async def test_two_instances_that_both_drive_a_bundle_produce_one_follow_up(tmp_path: Path, ahead: Ahead) -> None:
    async with cluster(tmp_path, "a", "b") as (_, both):
        await queues(both[0])
        ids = [await made(both[0]) for _ in range(5)]
        for service in both:
            service.bundle_driver._is_here = lambda *_: True  # type: ignore[method-assign]
        for bundle in ids:
            await both[0].produce("q", Produce(rows("x"), 10_000, bundle=bundle))
            await close(both[0], bundle)
        await eventually(lambda: all(record(each, bundle).state == "closed" for each in both for bundle in ids))
        while any(record(both[1], bundle).state != "done" for bundle in ids):
            leased = await both[0].lease("q", Lease("c", 10, 200, 60_000, 10))
            if leased.leases:
                await settle(both[0], "q", leased)
        assert sum(total(each, "then") for each in both) == 5


@driven
async def test_no_instance_remembers_what_is_over(tmp_path: Path, ahead: Ahead) -> None:
    """Every instance hears of every bundle, and counts after settlements those that may be over."""
    async with cluster(tmp_path, "a", "b") as (_, both):
        await queues(both[0])
        ids = [await made(both[0]) for _ in range(5)]
        for bundle in ids:
            await both[0].produce("q", Produce(rows("x"), 10_000, bundle=bundle))
            await close(both[0], bundle)
        await eventually(lambda: all(each.bundle_driver._closed == {"q": {*ids}} for each in both))
        while any(record(each, bundle).state != "done" for each in both for bundle in ids):
            leased = await both[0].lease("q", Lease("c", 10, 200, 60_000, 10))
            if leased.leases:
                await settle(both[0], "q", leased)
        assert not any(each.bundle_driver._closed for each in both)
