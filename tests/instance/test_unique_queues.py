"""Queues with unique items on a real instance: produces that are divided, repeated and refused, and the way back from a dead queue."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Disposition, Lease, Produce, Produced, ProducedByKey, ProduceKey, QueuePatch, QueueSpec, Redrive
from sluiceway.model.small_batch import as_few
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import eventually, fine, payloads, serving, settle, total

NAMES = "abcdefgh"


async def produce(service: Service, names: str, key: str | None = None, timeout: int = 5_000, queue: str = "q", of: str = "") -> Produced:
    """Items with these unique keys, `-` without one; all of the key `of`."""
    rows = batch_from_rows(
        [{"payload": b"x"} | ({} if name == "-" else {"unique_key": name}) | ({"key": of} if of else {}) for name in names]
    )
    return await service.produce(queue, Produce(as_few(rows) or rows, timeout, None if key is None else ProduceKey(key)))


def duplicates(answer: Produced) -> list[int]:
    return [row for row, _ in answer.duplicates]


async def drained(service: Service, queue: str = "q") -> int:
    """Complete all items that are ready."""
    count = 0
    while (leased := await service.lease(queue, Lease("c", 100, 0, 60_000, 4))).leases:
        count += len(payloads(leased.batches))
        await settle(service, queue, leased)
    return count


@driven
async def test_each_item_is_where_its_unique_key_is_at_home(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(QueueSpec("q", 4, unique="until_settled"))
        homes = [home_of_key(record, name) for name in NAMES]
        assert len(set(homes)) > 1
        first = await produce(service, NAMES)
        assert isinstance(first, ProducedByKey)
        assert [partition for partition, _ in first.places] == homes
        again = await produce(service, "-hga")
        assert isinstance(again, ProducedByKey)
        assert duplicates(again) == [1, 2, 3]
        assert again.places[1:] == [first.places[7], first.places[6], first.places[0]]
        assert await drained(service) == len(NAMES) + 1


@driven
async def test_with_order_an_item_is_where_its_key_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        record = await service.create_queue(QueueSpec("q", 4, unique="until_settled", order="key"))
        for key in NAMES:
            answer = await produce(service, NAMES, of=key)
            assert (answer.partition, duplicates(answer)) == (home_of_key(record, key), [])
            assert duplicates(await produce(service, NAMES, of=key)) == [*range(len(NAMES))]


@driven
async def test_what_a_partition_could_not_take_is_stored_by_a_repetition_with_the_first_duplicates(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        record = await service.create_queue(QueueSpec("q", 4, unique="until_settled"))
        await produce(service, "ab")
        away = next(home for name in "cdefgh" if (home := home_of_key(record, name)) != home_of_key(record, "a"))

        async def refuse(ref: PartitionRef) -> Outcome | None:
            return Outcome.REFUSED if ref.partition == away else None

        store.on_apply = refuse
        with pytest.raises(SluicewayError) as raised:
            await produce(service, NAMES, "call", 300)
        assert raised.value.code == "outcome_unknown"
        store.on_apply = fine
        answer = await produce(service, NAMES, "call")
        assert duplicates(answer) == [0, 1]
        await drained(service)
        assert await produce(service, NAMES, "call") == answer._replace(deduplicated=True)
        assert sum(each.produced for each in service.stats("q").partitions) == len(NAMES)


@driven
async def test_a_queue_without_the_setting_refuses_them_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(QueueSpec("q", 2))
        with pytest.raises(SluicewayError) as raised:
            await produce(service, "--a")
        assert (raised.value.code, raised.value.field) == ("invalid_request", "items[2].unique_key")
        assert "until_settled" in raised.value.detail
        await produce(service, "--")
        await service.update_queue("q", QueuePatch({"unique": "while_waiting"}))
        assert duplicates(await produce(service, "aa")) == [1]
        await service.update_queue("q", QueuePatch({"unique": None}))
        with pytest.raises(SluicewayError):
            await produce(service, "a")


@driven
async def test_dead_items_keep_their_unique_keys_and_come_back_in_any_case(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(QueueSpec("dead", 2))
        record = await service.create_queue(QueueSpec("q", 4, unique="until_settled", dead_queue="dead"))
        await produce(service, NAMES)
        while (leased := await service.lease("q", Lease("c", 100, 0, 60_000, 4))).leases:
            await settle(service, "q", leased, Disposition("dead", reason="bad"))
        await eventually(lambda: total(service, "dead") == len(NAMES) and total(service, "q") == 0)
        assert not duplicates(await produce(service, "abc")), "they are free"
        assert (await service.redrive("dead", Redrive(5_000, 100))).redriven == len(NAMES)
        assert total(service, "q") == len(NAMES) + 3
        homes = Counter(home_of_key(record, name) for name in NAMES + "abc")
        assert {each.partition: each.ready for each in service.stats("q").partitions if each.ready} == homes
        assert duplicates(await produce(service, NAMES)) == [*range(len(NAMES))]
        assert await drained(service) == len(NAMES) + 3
        assert not duplicates(await produce(service, NAMES))


@driven
async def test_a_restart_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(QueueSpec("q", 3, unique="until_settled"))
        first = await produce(service, NAMES, "call")
    async with serving(tmp_path) as (service, _):
        assert await produce(service, NAMES, "call") == first._replace(deduplicated=True)
        again = await produce(service, NAMES + "i")
        assert duplicates(again) == [*range(len(NAMES))]
