"""Queues with order by key on a real instance: produces that are divided and fail in part, and the way back from a dead queue."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pytest

from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Disposition, Lease, Produce, Produced, ProducedByKey, ProduceKey, QueuePatch, QueueSpec, Redrive
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import down, eventually, fine, payloads, serving, settle, spec, total

KEYS = "abcdefgh"


def rows(per_key: int = 2) -> pa.RecordBatch:
    """Items of every key by turns: a0 b0 … a1 b1 …"""
    return batch_from_rows([{"payload": f"{key}{number}".encode(), "key": key} for number in range(per_key) for key in KEYS])


async def ordered(service: Service, name: str, partitions: int = 4, dead_queue: str | None = None) -> list[int]:
    """A queue with order; the home of each key."""
    record = await service.create_queue(QueueSpec(name, partitions, order="key", dead_queue=dead_queue))
    homes = [home_of_key(record, key) for key in KEYS]
    assert len(set(homes)) > 1
    return homes


async def produce(service: Service, key: ProduceKey | None, timeout: int) -> Produced:
    return await service.produce("q", Produce(rows(), timeout, key))


async def handled(service: Service, queue: str) -> dict[str, list[str]]:
    """What every key's consumer gets, one lease after the other."""
    found: dict[str, list[str]] = defaultdict(list)
    while True:
        leased = await service.lease(queue, Lease("c", 5, 0, 60_000, 4, runs=True))
        if not leased.leases:
            return found
        for payload in payloads(leased.batches):
            found[payload[0]].append(payload)
        await settle(service, queue, leased)


def in_partitions(service: Service, queue: str) -> dict[int, int]:
    return {each.partition: each.ready for each in service.stats(queue).partitions}


@driven
async def test_what_a_partition_could_not_take_is_stored_by_a_repetition_and_nothing_twice(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        homes = await ordered(service, "q")
        away = homes[0]
        key = ProduceKey("call-1")

        async def one_is_down(ref: PartitionRef) -> None:
            if ref.partition == away:
                await down()

        store.on_open, store.on_apply = one_is_down, one_is_down
        with pytest.raises(SluicewayError) as raised:
            await produce(service, key, 200)
        assert raised.value.code == "outcome_unknown"
        assert "the idempotency key stores what is missing" in raised.value.detail
        stored = in_partitions(service, "q")
        assert {number: stored[number] for number in range(4) if number != away} == {
            number: 2 * homes.count(number) for number in range(4) if number != away
        }
        store.on_open = store.on_apply = fine
        done = await produce(service, key, 60_000)
        assert isinstance(done, ProducedByKey)
        assert [partition for partition, _ in done.places] == homes * 2
        assert not done.deduplicated
        again = await produce(service, key, 60_000)
        assert isinstance(again, ProducedByKey)
        assert (again.deduplicated, again.places) == (True, done.places)
        assert await handled(service, "q") == {name: [f"{name}0", f"{name}1"] for name in KEYS}


@driven
async def test_without_an_idempotency_key_it_is_said_that_the_rest_is_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        away = (await ordered(service, "q"))[0]

        async def one_is_down(ref: PartitionRef) -> None:
            if ref.partition == away:
                await down()

        store.on_open, store.on_apply = one_is_down, one_is_down
        with pytest.raises(SluicewayError, match="the others may be stored") as raised:
            await produce(service, None, 200)
        assert raised.value.code == "outcome_unknown"
        store.on_open = store.on_apply = fine


@driven
async def test_dead_items_go_back_to_their_keys_partitions_and_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead", 3))
        homes = await ordered(service, "q", dead_queue="dead")
        await service.produce("q", Produce(rows(), 10_000))
        before = in_partitions(service, "q")
        assert before == {number: 2 * homes.count(number) for number in range(4)}
        while (leased := await service.lease("q", Lease("c", 50, 0, 60_000, 4, runs=True))).leases:
            await settle(service, "q", leased, Disposition("dead", reason="bad"))
        await eventually(lambda: total(service, "dead") == 16 and total(service, "q") == 0)
        assert (await service.redrive("dead", Redrive(60_000, 100))).redriven == 16
        assert in_partitions(service, "q") == before
        assert {name: sorted(those) for name, those in (await handled(service, "q")).items()} == {
            name: [f"{name}0", f"{name}1"] for name in KEYS
        }


@driven
async def test_items_that_were_there_before_the_setting_are_served_and_later_ones_are_in_order(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q", 4))
        await service.produce("q", Produce(rows(), 10_000))
        await service.update_queue("q", QueuePatch({"order": "key"}))
        for number in (8, 9):
            later = batch_from_rows([{"payload": f"{key}{number}".encode(), "key": key} for key in KEYS])
            await service.produce("q", Produce(later, 10_000))
        found = await handled(service, "q")
        assert {name: sorted(those) for name, those in found.items()} == {
            name: [f"{name}{number}" for number in (0, 1, 8, 9)] for name in KEYS
        }
        assert all(those.index(f"{name}8") < those.index(f"{name}9") for name, those in found.items())
