"""Unique items over several instances: producers at each of them, while an owner goes or does not answer."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows
from sluiceway.model.requests import Produce, ProducedByKey, ProduceKey, QueueSpec
from tests.cluster.cluster_rig import MORTAL, STEADY, cluster, shares
from tests.cluster.test_cluster_key_order import handle_all, ready, repeated
from tests.instance.instance_rig import eventually

NAMES = "abcdefgh"


async def produce(at: Service, call: str, names: str = NAMES, timeout: int = 5_000) -> ProducedByKey:
    """An item of each name, which is its unique key and, for `handle_all`, its key."""
    rows = batch_from_rows([{"payload": b"0", "key": name, "unique_key": name} for name in names])
    answer = await at.produce("q", Produce(rows, timeout, ProduceKey(call)))
    assert isinstance(answer, ProducedByKey)
    return answer


async def unique(at: Service) -> list[int]:
    """A queue of partitions at every instance; the home of each name."""
    record = await at.create_queue(QueueSpec("q", 4, unique="until_settled"))
    return [home_of_key(record, name) for name in NAMES]


def test_producers_at_several_instances_store_each_item_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            homes = await unique(a)
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            answers = await asyncio.gather(*(produce((a, b)[number % 2], f"call-{number}") for number in range(10)))
            assert [partition for partition, _ in answers[0].places] == homes
            assert all(answer.places == answers[0].places for answer in answers)
            stored = [row for answer in answers for row in range(len(NAMES)) if row not in dict(answer.duplicates)]
            assert sorted(stored) == [*range(len(NAMES))]
            assert sum(ready(made, "q").values()) == len(NAMES)
            for number in range(10):
                again = await produce((b, a)[number % 2], f"call-{number}")
                assert (again.places, again.duplicates, again.deduplicated) == (answers[number].places, answers[number].duplicates, True)

    asyncio.run(run())


@pytest.mark.parametrize("dies", [False, True], ids=["leaves", "dies"])
def test_what_is_taken_stays_so_while_an_owner_goes(tmp_path: Path, dies: bool) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", parameters=MORTAL if dies else STEADY) as (made, (a, b)):
            homes = await unique(a)
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            assert set(homes) & set(shares(b, "q")), "names are at home there"
            first = await repeated(partial(produce, b, "first"))
            later = await repeated(partial(produce, b, "later", "ab"))
            if dies:
                made.die("b")
            else:
                await made.leave("b")
            again = await repeated(partial(produce, a, "again", NAMES + "i"))
            assert [row for row, _ in again.duplicates] == [*range(len(NAMES))]
            assert again.places[: len(NAMES)] == first.places
            repetition = await repeated(partial(produce, a, "later", "ab"))
            assert (repetition.duplicates, repetition.deduplicated) == (later.duplicates, True)
            await handle_all(a, len(NAMES) + 1)
            assert not (await repeated(partial(produce, a, "free"))).duplicates

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["refuses", "loses"])
def test_a_call_of_which_one_owner_does_not_answer_is_repeated_with_one_answer(tmp_path: Path, fault: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await unique(a)
            await eventually(lambda: len(shares(a, "q")) == len(shares(b, "q")) == 2)
            before = await produce(a, "before", "aceg")
            getattr(made.wires, fault).add("b")
            with pytest.raises(SluicewayError) as raised:
                await produce(a, "call", timeout=200)
            assert raised.value.code == "outcome_unknown"
            getattr(made.wires, fault).clear()
            answers = [await produce(at, "call") for at in (a, b)]
            for answer in answers:
                assert [row for row, _ in answer.duplicates] == [0, 2, 4, 6]
                assert answer.places == answers[0].places
                assert answer.places[::2] == before.places
            assert sum(ready(made, "q").values()) == len(NAMES)

    asyncio.run(run())
