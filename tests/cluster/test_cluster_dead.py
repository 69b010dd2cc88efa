"""Dead letters whose dead queue is at another instance, and their way back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.cluster import transfer_sender
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Clear, Disposition, Produce, Redrive
from tests.cluster.cluster_rig import Cluster, cluster, counts, put, shares
from tests.instance.instance_rig import eventually, lease, payloads, settle, spec

DEAD = Disposition("dead", reason="bad")


async def queues(at: Service) -> None:
    """A queue and its dead queue, of partitions at every instance."""
    await at.create_queue(spec("dead", 6))
    await at.create_queue(spec("q", 6, dead_queue="dead"))


def waiting(made: Cluster, queue: str) -> int:
    """Items that wait anywhere in the queue; -1 while some are on their way."""
    found = {name: [each for owner in made.services for each in owner.stats(name).partitions] for name in ("q", "dead")}
    moving = any(each.transferring for partitions in found.values() for each in partitions)
    return -1 if moving else sum(each.ready for each in found[queue])


async def kill_all(at: Service, count: int) -> None:
    """Let all items die. Where a partition is just being opened by its next owner, what is settled there is repeated, as clients do."""
    dead = 0
    while dead < count:
        leased = await lease(at, "q", 10, 10_000)
        while True:
            try:
                await settle(at, "q", leased, DEAD)
                break
            except SluicewayError as error:
                if error.code != "unavailable":
                    raise
                await asyncio.sleep(0)
        dead += len(payloads(leased.batches))


def test_the_dead_of_all_instances_arrive_once_and_are_redriven_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, c)):
            await queues(a)
            for number in range(6):
                await put(b, "q", number, f"{number}", f"{number} too")
            await kill_all(c, 12)
            await eventually(lambda: waiting(made, "dead") == 12)
            dry = await b.redrive("dead", Redrive(10_000, 100, dry_run=True))
            assert (dry.matched, dry.redriven, dry.targets) == (12, 0, {"q": 12})
            assert (await a.redrive("dead", Redrive(20_000, 11, source="q"))).matched == 11
            rest = await c.redrive("dead", Redrive(20_000, 100))
            assert (rest.matched, rest.redriven, rest.targets) == (1, 1, {"q": 1})
            await eventually(lambda: waiting(made, "q") == 12)
            found: list[str] = []
            while len(found) < 12:
                found += payloads((await lease(b, "q", 10, 10_000)).batches)
            assert sorted(found) == sorted([*(f"{n}" for n in range(6)), *(f"{n} too" for n in range(6))])

    asyncio.run(run())


def test_a_redrive_to_a_queue_that_is_not_there_moves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await queues(a)
            await put(a, "q", 0, "x")
            await kill_all(a, 1)
            await eventually(lambda: waiting(made, "dead") == 1)
            for each in (a, b):
                with pytest.raises(SluicewayError) as raised:
                    await each.redrive("dead", Redrive(1_000, 10, "elsewhere"))
                assert raised.value.code == "queue_not_found"
            assert waiting(made, "dead") == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["refuses", "loses"])
def test_dead_items_arrive_once_whatever_fails_between_the_instances(tmp_path: Path, fault: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await queues(a)
            for number in range(6):
                await put(a, "q", number, f"{number}")
            for names in (made.wires.refuses, made.wires.loses) if fault == "refuses" else (made.wires.loses,):
                names |= {"a", "b"}
            held = [await lease(each, "q", 10, 0, most=6) for each in (a, b)]
            # Each instance serves its own, and what dies of it has to go to both.
            for owner, leased in zip((a, b), held, strict=True):
                assert (await settle(owner, "q", leased, DEAD)).dead == 3
            seen = len(made.wires.asked)
            await eventually(lambda: len(made.wires.asked) > seen + 4)
            made.wires.refuses.clear()
            made.wires.loses.clear()
            await eventually(lambda: waiting(made, "dead") == 6)
            assert sum(each.produced for owner in (a, b) for each in owner.stats("dead").partitions) == 6

    asyncio.run(run())


def test_dead_items_go_on_when_their_partition_and_their_home_move(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, _, c)):
            await queues(a)
            for number in range(6):
                await put(a, "q", number, *(f"{number}.{n}" for n in range(5)))
            work = asyncio.create_task(kill_all(a, 30))
            await made.leave("b")
            await work
            await eventually(lambda: waiting(made, "dead") == 30)
            assert sum(each.produced for owner in (a, c) for each in owner.stats("dead").partitions) == 30
            assert (await a.clear("dead", Clear(10_000))).ready == 30

    asyncio.run(run())


def test_an_owner_that_dies_before_it_hears_that_the_items_arrived(tmp_path: Path) -> None:
    """The next owner sends them again, and they are there once."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("dead", 1))
            await a.create_queue(spec("q", 2, dead_queue="dead"))
            target = made.owner("dead", 0)
            source = b if target is a else a
            number = shares(source, "q")[0]
            await put(a, "q", number, "x")
            leased = await lease(source, "q")
            settled = 0

            async def only_the_first(_: object) -> Outcome | None:
                nonlocal settled
                settled += 1
                return None if settled == 1 else Outcome.UNKNOWN

            store = made.stores[made.name(source)]
            store.on_apply = only_the_first
            assert (await settle(source, "q", leased, DEAD)).dead == 1
            await eventually(lambda: counts(target.stats("dead"))[0] == (1, 0) and settled > 1)
            await source.hand_over()
            await eventually(lambda: number in shares(target, "q"))
            await eventually(lambda: target.stats("q").partitions[number].transferring == 0)
            assert [each.produced for each in target.stats("dead").partitions] == [1]
            assert target.stats("dead").partitions[0].deduplicated > 0

    asyncio.run(run())


def test_an_instance_stops_though_its_dead_items_do_not_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_sender, "SEND_TIMEOUT", 3_600_000)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await queues(a)
            made.wires.refuses |= {"a", "b"}
            for each in (a, b):
                for number in shares(each, "q"):
                    await put(each, "q", number, "x")
                assert (await settle(each, "q", await lease(each, "q", 10, most=6), DEAD)).dead == 3
            await eventually(lambda: len(made.wires.requests(Produce)) > 2)

    asyncio.run(run())
