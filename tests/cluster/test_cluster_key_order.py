"""Order by key over several instances: while an owner goes, while one cannot be reached, and on the way back from a dead queue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pytest

from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import (
    DONE,
    Disposition,
    Lease,
    Produce,
    Produced,
    ProducedByKey,
    ProduceKey,
    QueueSpec,
    Redrive,
    Selection,
    Settle,
)
from sluiceway.model.small_batch import in_columns
from tests.cluster.cluster_rig import MORTAL, STEADY, Cluster, cluster, counts, shares
from tests.instance.instance_rig import PATIENCE, eventually, spec

KEYS = "abcdefgh"
T = TypeVar("T")


class Item(NamedTuple):
    partition: int
    offset: int
    key: str
    number: int


def rows(number: int) -> pa.RecordBatch:
    """An item of each key, with that number."""
    return batch_from_rows([{"payload": f"{number}".encode(), "key": key} for key in KEYS])


async def ordered(at: Service, dead_queue: str | None = None) -> list[int]:
    """A queue of partitions at every instance; the home of each key."""
    record = await at.create_queue(QueueSpec("q", 4, order="key", dead_queue=dead_queue))
    return [home_of_key(record, key) for key in KEYS]


async def repeated(call: Callable[[], Awaitable[T]]) -> T:
    """As a client does it while an owner is replaced."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except SluicewayError as error:
                if error.code not in ("unavailable", "outcome_unknown"):
                    raise
            await asyncio.sleep(0.01)


async def produce(at: Service, number: int, timeout: int = 5_000) -> Produced:
    """Store the items with that number: the number is the idempotency key."""
    return await at.produce("q", Produce(rows(number), timeout, ProduceKey(f"call-{number}")))


async def lease(at: Service, queue: str = "q") -> list[Item]:
    """A lease of runs of all keys, in the order in which they are to be handled."""
    leased = await at.lease(queue, Lease("c", 100, 0, 600_000, 4, runs=True))
    found = []
    for batch in map(in_columns, leased.batches):
        columns = (batch.column(name).to_pylist() for name in ("partition", "offset", "key", "payload"))
        found += [Item(partition, offset, key, int(payload)) for partition, offset, key, payload in zip(*columns, strict=True)]
    return found


async def settle(at: Service, items: list[Item], disposition: Disposition = DONE) -> None:
    offsets: dict[int, list[int]] = defaultdict(list)
    for item in items:
        offsets[item.partition].append(item.offset)
    chosen = {number: [Selection(disposition, offsets=np.array(sorted(those)))] for number, those in offsets.items()}
    await repeated(lambda: at.settle("q", Settle(chosen, 5_000)))


async def handle_all(at: Service, count: int) -> dict[str, list[int]]:
    """The numbers of each key, in the order in which so many items are delivered."""
    found: dict[str, list[int]] = defaultdict(list)
    async with asyncio.timeout(PATIENCE):
        while sum(map(len, found.values())) < count:
            items = await repeated(lambda: lease(at))
            for item in items:
                found[item.key].append(item.number)
            await settle(at, items)
            await asyncio.sleep(0)
    return found


def ready(made: Cluster, queue: str) -> dict[int, int]:
    """Items of each partition, wherever it is served."""
    return {number: ready for at in made.wires.instances.values() for number, (ready, _) in counts(at.stats(queue)).items() if ready}


def on_the_way(made: Cluster) -> bool:
    """Whether dead items have not been confirmed to have arrived."""
    return any(each.transferring for at in made.wires.instances.values() for each in at.stats("q").partitions)


@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
def test_order_is_kept_while_an_owner_goes(tmp_path: Path, dies: bool) -> None:
    """What it had leased, what was retried, and what waited is as before at the next owner."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", parameters=MORTAL if dies else STEADY) as (made, (a, b)):
            homes = await ordered(a)
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            for number in range(5):
                await repeated(partial(produce, a, number))
            held: list[Item] = []
            while len(held) < 40:
                held += await repeated(lambda: lease(a))
            await repeated(lambda: produce(b, 5))
            assert set(homes) & set(shares(b, "q")), "keys are at home there"
            if dies:
                made.die("b")
            else:
                await made.leave("b")
            # One after the other, as a handler would: the third fails, and those behind it come back with it.
            await settle(a, [item for item in held if item.number < 2])
            await settle(a, [item for item in held if item.number == 2], Disposition("retry"))
            await settle(a, [item for item in held if item.number > 2])
            await repeated(lambda: produce(a, 6))
            assert await handle_all(a, 40) == {key: [2, 3, 4, 5, 6] for key in KEYS}
            assert not await lease(a)

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["refuses", "loses"])
def test_a_divided_produce_of_which_one_owner_does_not_answer(tmp_path: Path, fault: str) -> None:
    """It says that its outcome is unknown. The repetition stores what is missing, and nothing twice, at whichever instance."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            homes = await ordered(a)
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            at_b = set(shares(b, "q"))
            assert 0 < sum(home in at_b for home in homes) < len(KEYS)
            getattr(made.wires, fault).add("b")
            with pytest.raises(SluicewayError) as raised:
                await produce(a, 0, 200)
            assert raised.value.code == "outcome_unknown"
            assert "the idempotency key stores what is missing" in raised.value.detail
            expected = sum(home not in at_b for home in homes) if fault == "refuses" else len(KEYS)
            assert sum(ready(made, "q").values()) == expected
            getattr(made.wires, fault).clear()
            answers = [await produce(at, 0) for at in (a, b)]
            assert [each.deduplicated for each in answers] == [fault == "loses", True]
            for answer in answers:
                assert isinstance(answer, ProducedByKey)
                assert [partition for partition, _ in answer.places] == homes
                assert isinstance(answers[0], ProducedByKey)
                assert answer.places == answers[0].places
            assert await handle_all(b, len(KEYS)) == {key: [0] for key in KEYS}
            assert not await lease(a)

    asyncio.run(run())


def test_dead_items_of_all_instances_go_back_to_their_keys_partitions(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("dead", 2))
            homes = await ordered(a, dead_queue="dead")
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            await produce(a, 0)
            before = {number: homes.count(number) for number in set(homes)}
            assert ready(made, "q") == before
            held: list[Item] = []
            while len(held) < len(KEYS):
                held += await lease(b)
            await settle(b, held, Disposition("dead", reason="bad"))
            await eventually(lambda: sum(ready(made, "dead").values()) == len(KEYS) and not on_the_way(made))
            assert (await b.redrive("dead", Redrive(20_000, 100))).redriven == len(KEYS)
            assert ready(made, "q") == before
            assert await handle_all(a, len(KEYS)) == {key: [0] for key in KEYS}

    asyncio.run(run())
