"""Rebalances of queues that keep the items of a key together, on several instances: order and limits across the move, and calls that are
repeated after it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from sluiceway.adapters import system
from sluiceway.core.partition import admission
from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import DONE, Lease, Produce, Produced, ProducedByKey, ProduceKey, QueuePatch, QueueSpec, Selection, Settle
from sluiceway.model.small_batch import in_columns
from tests.cluster.cluster_rig import cluster
from tests.cluster.rebalance_rig import BY, at_step, begun, ended
from tests.instance.instance_rig import PATIENCE, eventually

KEYS = [f"k{number}" for number in range(40)]
FAR = 3_600_000


class Item(NamedTuple):
    partition: int
    offset: int
    key: str
    number: int


def rows(number: int) -> pa.RecordBatch:
    """An item of each key, with that number."""
    return batch_from_rows([{"payload": f"{number}".encode(), "key": key} for key in KEYS])


async def produce(at: Service, number: int) -> Produced:
    return await at.produce("q", Produce(rows(number), 20_000, ProduceKey(f"call-{number}")))


def places(answer: Produced) -> list[tuple[int, int]]:
    if isinstance(answer, ProducedByKey):
        return list(answer.places)
    return [(answer.partition, answer.first_offset + at) for at in range(answer.items)]


async def lease(at: Service) -> list[Item]:
    leased = await at.lease("q", Lease("c", 100, 0, 600_000, 8, runs=True))
    found = []
    for batch in map(in_columns, leased.batches):
        columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "key", "payload"))
        found += [Item(partition, offset, key, int(payload)) for partition, offset, key, payload in zip(*columns, strict=True)]
    return found


async def complete(at: Service, items: list[Item]) -> None:
    offsets: dict[int, list[int]] = defaultdict(list)
    for item in items:
        offsets[item.partition].append(item.offset)
    await at.settle("q", Settle({number: [Selection(DONE, offsets=np.array(sorted(those)))] for number, those in offsets.items()}, 20_000))


class Consumer:
    """Handles items at both instances in turn until it is told to stop, and notes each key's."""

    def __init__(self, *services: Service) -> None:
        self.services = services
        self.handled: dict[str, list[int]] = defaultdict(list)
        self.enough = False

    async def run(self) -> None:
        while not self.enough:
            for at in self.services:
                items = await lease(at)
                await asyncio.sleep(0.002)
                for item in items:
                    self.handled[item.key].append(item.number)
                await complete(at, items)
            await asyncio.sleep(0.002)


def test_keys_stay_in_order_while_their_queue_grows_and_shrinks(tmp_path: Path) -> None:
    """Under traffic. Each call is repeated after each rebalance, and has its first answer."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(QueueSpec("q", 4, order="key"))
            await eventually(lambda: any(each.queue_name == "q" for each in b.queues()))
            answers: list[list[tuple[int, int]]] = []
            is_over = False

            async def produce_all() -> None:
                while not is_over:
                    answers.append(places(await produce((a, b)[len(answers) % 2], len(answers))))
                    await asyncio.sleep(0.005)

            consumer = Consumer(a, b)
            tasks = [asyncio.create_task(produce_all()), asyncio.create_task(consumer.run())]
            for requested in (8, 3):
                most = len(answers) + 10
                await eventually(lambda most=most: len(answers) > most)  # type: ignore[misc]
                done = await ended(b, (await begun(a, "q", requested)).id)
                assert (done.state, done.plan.by_key) == ("done", True)
                for number in range(0, len(answers), 7):
                    assert places(await produce(b, number)) == answers[number]
            is_over = True
            await tasks[0]
            await eventually(lambda: all(len(consumer.handled[key]) == len(answers) for key in KEYS))
            consumer.enough = True
            await tasks[1]
            assert consumer.handled == {key: list(range(len(answers))) for key in KEYS}
            assert len(a.queue("q").partitions) == 3

    asyncio.run(run())


def test_a_key_waits_for_what_its_former_partition_has_leased(tmp_path: Path) -> None:
    """Others go on. A call of which a part was stored before is completed at the new home."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            record = await a.create_queue(QueueSpec("q", 2, order="key"))
            await produce(a, 0)
            held: list[Item] = []
            while len(held) < len(KEYS):
                held += await lease(a)
            asked = await begun(a, "q", 4)
            await at_step(a, asked.id, "drain")
            await eventually(lambda: a.queue("q").slots == b.queue("q").slots)
            moved = [key for key in KEYS if home_of_key(record, key) != home_of_key(a.queue("q"), key)]
            assert 0 < len(moved) < len(KEYS)
            answer = await produce(b, 1)
            assert {partition for partition, _ in places(answer)} == {0, 1, 2, 3}
            # The keys of a slot are served together: those whose items are settled wait for the others.
            await complete(b, [item for item in held if item.key not in moved])
            await eventually_leased(a, [key for key in KEYS if key not in moved])
            keys = await a.keys("q", 100)
            assert {each.key: each.blocked_by for each in keys.busiest} == dict.fromkeys(moved, "rebalance")
            assert (await a.get_rebalance(asked.id)).is_open
            await complete(a, [item for item in held if item.key in moved])
            await eventually_leased(b, moved)
            assert (await ended(a, asked.id)).state == "done"
            assert places(await produce(a, 0)) == [(item.partition, item.offset) for key in KEYS for item in held if item.key == key]

    asyncio.run(run())


def test_calls_too_many_for_a_message_are_remembered_where_their_keys_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slot has a record of each call that had items for it: of a day, those of a single slot may be too many."""
    monkeypatch.setattr(admission, "MAX_KEYS_BYTES", 1_000)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            record = await a.create_queue(QueueSpec("q", 12, order="key"))
            answers = [places(await produce(a, number)) for number in range(30)]
            asked = await begun(a, "q", 13)
            await at_step(a, asked.id, "drain")
            consumer = Consumer(a, b)
            handling = asyncio.create_task(consumer.run())
            assert (await ended(a, asked.id)).state == "done"
            assert any(home_of_key(record, key) != home_of_key(a.queue("q"), key) for key in KEYS)
            assert [places(await produce(b, number)) for number in range(30)] == answers
            await eventually(lambda: all(len(consumer.handled[key]) == 30 for key in KEYS))
            consumer.enough = True
            await handling

    asyncio.run(run())


async def eventually_leased(at: Service, keys: list[str]) -> None:
    """Lease until there is an item with number 1 of each of the keys, and no other."""
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while sorted(found) != sorted(keys):
            items = await lease(at)
            assert all(item.number == 1 for item in items)
            found += [item.key for item in items]
            assert {*found} <= {*keys}
            await complete(at, items)
            await asyncio.sleep(0.005)


def test_scheduled_items_keep_no_rebalance_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(QueueSpec("q", 4, order="key"))
            due = batch_from_rows([{"payload": b"0", "key": key, "enqueue_at": system.now() + FAR} for key in [*KEYS, None]])
            await a.produce("q", Produce(due, 20_000))
            for requested in (8, 3):
                assert (await ended(b, (await begun(a, "q", requested)).id)).state == "done"
            record, stats = a.queue("q"), (await a.count("q")).partitions
            homes = [home_of_key(record, key) for key in KEYS]
            assert sum(each.scheduled for each in stats) == len(KEYS) + 1
            assert all(each.scheduled >= homes.count(each.partition) for each in stats)

    asyncio.run(run())


def test_what_would_break_the_order_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (_, (a,)):
            await a.create_queue(QueueSpec("q", 4, key_concurrency=2))
            await produce(a, 0)
            with pytest.raises(SluicewayError, match="consumers must empty"):
                await begun(a, "q", 2, drain="copy")
            asked = await begun(a, "q", 2)
            await at_step(a, asked.id, "drain")
            with pytest.raises(SluicewayError) as raised:
                await a.cancel_rebalance(asked.id, BY)
            assert raised.value.code == "not_cancellable"
            with pytest.raises(SluicewayError) as raised:
                await a.update_queue("q", QueuePatch({"unique": "until_settled"}))
            assert (raised.value.code, raised.value.field) == ("rebalance_open", "unique")
            await a.update_queue("q", QueuePatch({"key_concurrency": 0}))
            with pytest.raises(SluicewayError) as raised:
                await a.update_queue("q", QueuePatch({"order": "key"}))
            assert raised.value.code == "rebalance_open"

    asyncio.run(run())
