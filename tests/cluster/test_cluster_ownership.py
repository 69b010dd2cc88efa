"""Partitions that go from one instance to another while requests are under way: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from sluiceway.instance import service as service_module
from sluiceway.instance.service import LET_GO, Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_driver import QueueDriver
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import Lease, Produce, ProduceKey
from sluiceway.ports.partition_store import PartitionRef
from tests.cluster.cluster_rig import MORTAL, Gate, blind, cluster, clustered, counts, lapse, never, put, ref, shares
from tests.instance.instance_rig import eventually, fine, payloads, produce, rows, settle, spec


@pytest.mark.parametrize("strategy", ["rounds", "claims"])
def test_who_joins_gets_a_share_and_who_leaves_hands_over_all_of_it(tmp_path: Path, strategy: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", strategy=strategy) as (made, (a,)):  # type: ignore[arg-type]
            await a.create_queue(spec("q", 6))
            for number in range(6):
                await put(a, "q", number, f"item {number}")
            b = await made.start("b")
            await eventually(lambda: (len(shares(a, "q")), len(shares(b, "q"))) == (3, 3))
            assert counts(await b.count("q")) == dict.fromkeys(range(6), (1, 0))
            held = await b.lease("q", Lease("c", 6, max_partitions=6))
            await made.leave("a")
            await eventually(lambda: len(shares(b, "q")) == 6)
            # Leases of before are still good, and are settled where they went.
            assert (await settle(b, "q", held)).completed == sum(each.items for each in held.leases)
            rest = await b.lease("q", Lease("c", 6, max_partitions=6))
            assert sorted(payloads([*held.batches, *rest.batches])) == sorted(f"item {number}" for number in range(6))

    asyncio.run(run())


class Ledger:
    """What was produced for sure, what perhaps, and what was completed for sure or perhaps."""

    def __init__(self) -> None:
        self.produced: set[str] = set()
        self.perhaps: set[str] = set()
        self.completed: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.stop = False

    async def produce(self, services: list[Service], name: str) -> None:
        number = 0
        while not self.stop:
            number += 1
            item = f"{name}-{number}"
            try:
                await produce(services[number % len(services)], "q", item, timeout=20_000)
                self.produced.add(item)
            except SluicewayError as error:
                self.errors[error.code] += 1
                if error.code == "outcome_unknown":
                    self.perhaps.add(item)
            await asyncio.sleep(0)

    async def consume(self, services: list[Service], name: str) -> None:
        turn = 0
        while not (self.stop and await self.drained(services[0])):
            turn += 1
            service = services[turn % len(services)]
            try:
                leased = await service.lease("q", Lease(name, 20, 20, 600_000, 2))
                if leased.leases:
                    await self.complete(service, payloads(leased.batches), leased)
            except SluicewayError as error:
                self.errors[error.code] += 1

    async def complete(self, service: Service, items: list[str], leased: object) -> None:
        """Until it is known: to complete again what is completed does nothing."""
        self.completed.update(items)
        while True:
            try:
                await settle(service, "q", leased)  # type: ignore[arg-type]
                return
            except SluicewayError as error:
                self.errors[error.code] += 1
                await asyncio.sleep(0.001)

    async def drained(self, service: Service) -> bool:
        """Nothing waits any more."""
        counted = await service.count("q")
        return all(each.state == "available" and each.total == 0 for each in counted.partitions)


def test_under_load_instances_come_and_go_and_no_item_is_lost_or_served_twice(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 8))
            ledger = Ledger()
            clients = [asyncio.create_task(ledger.produce([a, b], f"p{n}")) for n in range(3)]
            clients += [asyncio.create_task(ledger.consume([a, b], f"c{n}")) for n in range(3)]
            for name in ("c", "d"):
                joined = await made.start(name)
                await eventually(lambda joined=joined: len(shares(joined, "q")) >= 2)  # type: ignore[misc]
                known = len(ledger.produced)
                await eventually(lambda known=known: len(ledger.produced) > known + 20)  # type: ignore[misc]
            for name in ("c", "d"):
                await made.leave(name)
                known = len(ledger.produced)
                await eventually(lambda known=known: len(ledger.produced) > known + 20)  # type: ignore[misc]
            ledger.stop = True
            await asyncio.gather(*clients)
            assert set(ledger.errors) <= {"unavailable", "outcome_unknown"}
            assert not ledger.produced - set(ledger.completed), "items are lost"
            assert not set(ledger.completed) - ledger.produced - ledger.perhaps, "items that nobody produced"
            assert [item for item, times in ledger.completed.items() if times > 1] == []

    asyncio.run(run())


def test_after_a_death_others_take_over_and_what_was_acknowledged_is_there(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c", parameters=MORTAL) as (made, (a, _b, c)):
            await a.create_queue(spec("q", 6))
            done = [await c.produce("q", Produce(rows(f"{n}"), 20_000, ProduceKey(f"key {n}"))) for n in range(12)]
            assert {each.partition for each in done} != {0}
            made.die("b")
            await eventually(lambda: len(shares(a, "q")) + len(shares(c, "q")) == 6)
            again = [await a.produce("q", Produce(rows(f"{n}"), 20_000, ProduceKey(f"key {n}"))) for n in range(12)]
            assert [each[:3] for each in again] == [each[:3] for each in done]
            assert all(each.deduplicated for each in again)

    asyncio.run(run())


def test_an_instance_is_given_partitions_when_it_can_serve_them_and_serves_before_they_are_open(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            await a.create_queue(spec("q", 6))
            b, opens = made.add("b"), asyncio.Event()

            async def hold(_: PartitionRef) -> None:
                await opens.wait()

            made.stores["b"].on_open = hold
            await b.prepare()
            assert b.queue("q").queue_name == "q", "it has loaded the queue"
            for number in range(6):
                await put(a, "q", number, f"item {number}")
            assert len(shares(a, "q")) == 6, "it is given nothing yet"
            await b.join()
            await eventually(lambda: len(shares(a, "q")) == 3)
            # It takes requests, for what the others have.
            assert payloads((await b.lease("q", Lease("c", 6, max_partitions=6, request_timeout=20_000))).batches)
            opens.set()
            await b.wait_until_open()
            assert len(shares(b, "q")) == 3

    asyncio.run(run())


def test_what_an_instance_has_whose_lease_has_run_out_is_read_ahead_by_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        times = msgspec.structs.replace(MORTAL, member_timeout=75_000)
        async with cluster(tmp_path, "a", "b", "c", parameters=times) as (made, (a, b, _)):
            await a.create_queue(spec("q", 6))
            await eventually(lambda: len(shares(b, "q")) == 2)
            theirs = {ref(b, "q", number) for number in shares(b, "q")}
            made.die("b")
            # It is not given up: whoever is busy may be taken for dead as well, and nothing comes of it.
            await eventually(lambda: theirs <= made.stores["a"].found | made.stores["c"].found)

    asyncio.run(run())


def test_a_lapsed_instance_serves_by_the_others_and_comes_back_with_higher_openings(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            mine = shares(a, "q")[0]
            await put(a, "q", mine, "kept")
            for _ in range(3):
                before = made.stores["a"].fences[-1]
                gate = lapse(made, a)
                clustered(a).member._lapsed()
                await eventually(lambda: shares(a, "q") == [])
                assert (await produce(a, "q", "by the other")).partition != mine
                gate.open()
                made.metas["a"].heal()
                await eventually(lambda: shares(a, "q") == [mine])
                after = made.stores["a"].fences[-1]
                assert (after.era, after.grant) == (before.era, before.grant)
                assert after.opening > before.opening
            assert counts(await b.count("q"))[mine] == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("lands", [True, False])
def test_a_commit_in_flight_when_its_partition_goes(tmp_path: Path, lands: bool) -> None:
    """It ends in time: who waits for it is told, and the next owner knows."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            mine = shares(a, "q")[0]
            gate = Gate()

            async def hold(_: PartitionRef) -> Outcome | None:
                await gate()
                return None if lands else Outcome.REFUSED

            made.stores["a"].on_apply = hold
            work = asyncio.create_task(put(a, "q", mine, "in flight"))
            await gate.reached.wait()
            leaving = asyncio.create_task(a.hand_over())
            await eventually(lambda: shares(a, "q") == [])
            made.stores["a"].on_apply = fine
            gate.open()
            done = await work
            await leaving
            await eventually(lambda: len(shares(b, "q")) == 2)
            # If it was refused, it has been asked of the next owner.
            assert done[:3] == (mine, 0, 1)
            assert counts(await b.count("q"))[mine] == (1, 0)

    asyncio.run(run())


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("key", [None, ProduceKey("k")])
@pytest.mark.parametrize("at_its_owner", [True, False])
def test_a_commit_that_hangs_when_its_partition_goes(tmp_path: Path, lands: bool, key: ProduceKey | None, at_its_owner: bool) -> None:
    """Its outcome is unknown. Without a key it is not done again elsewhere; with one it is, and is there once."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            owner = made.owner("q", 0)
            other = b if owner is a else a
            gate = Gate()

            async def hold(_: PartitionRef) -> Outcome | None:
                await gate()
                return None if lands else Outcome.UNKNOWN

            if lands:
                made.stores[made.name(owner)].on_applied = gate
            else:
                made.stores[made.name(owner)].on_apply = hold
            asked = owner if at_its_owner else other
            work = asyncio.create_task(asked.produce("q", Produce(rows("perhaps"), 60_000, key)))
            await gate.reached.wait()
            await owner.hand_over()
            await eventually(lambda: shares(other, "q") == [0])
            if key is None:
                with pytest.raises(SluicewayError) as raised:
                    await work
                assert raised.value.code == "outcome_unknown"
                assert counts(await other.count("q"))[0] == (1 if lands else 0, 0)
            else:
                assert (await work).deduplicated == lands
                assert counts(await other.count("q"))[0] == (1, 0)
            gate.open()

    asyncio.run(run())


@pytest.mark.parametrize("key", [None, ProduceKey("k")])
def test_an_answer_of_an_owner_that_is_lost(tmp_path: Path, key: ProduceKey | None) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            owner = made.owner("q", 0)
            other = b if owner is a else a
            made.wires.loses.add(made.name(owner))
            work = asyncio.create_task(other.produce("q", Produce(rows("x"), 60_000, key)))
            if key is None:
                with pytest.raises(SluicewayError) as raised:
                    await work
                assert raised.value.code == "outcome_unknown"
            else:
                await eventually(lambda: len(made.wires.requests(Produce)) >= 2)
                made.wires.loses.clear()
                assert (await work).deduplicated
            assert counts(await owner.count("q"))[0] == (1, 0)

    asyncio.run(run())


def test_an_unknown_outcome_is_not_forgotten_when_it_is_refused_the_next_time(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            owner = made.owner("q", 0)
            other = b if owner is a else a
            made.wires.loses.add(made.name(owner))
            work = asyncio.create_task(other.produce("q", Produce(rows("x"), 60_000, ProduceKey("k"))))
            await eventually(lambda: counts(owner.stats("q"))[0] == (1, 0))
            await owner.pause("q", ["produce"], True)
            made.wires.loses.clear()
            with pytest.raises(SluicewayError) as raised:
                await work
            assert raised.value.code == "outcome_unknown"
            assert counts(await owner.count("q"))[0] == (1, 0)

    asyncio.run(run())


def test_a_blob_of_a_commit_that_did_not_land_is_not_served_in_place_of_another_owners(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            await a.create_queue(spec("q", 2))
            made.stores["a"].on_apply = never
            ghosts = [asyncio.create_task(put(a, "q", number, "a ghost")) for number in (0, 1)]
            await eventually(lambda: min(each.failures for each in a.stats("q").partitions) > 0)
            for ghost in ghosts:
                ghost.cancel()
            await asyncio.wait(ghosts)
            made.stores["a"].on_apply = fine
            await eventually(lambda: shares(a, "q") == [0, 1])
            b = await made.start("b")
            await eventually(lambda: len(shares(b, "q")) == 1)
            moved = shares(b, "q")[0]
            # Its blob has the number of the one that was lost, and that the first remembers.
            assert (await put(b, "q", moved, "real")).first_offset == 0
            await made.leave("b")
            await eventually(lambda: shares(a, "q") == [0, 1])
            assert payloads((await a.lease("q", Lease("c", 1, 20_000))).batches) == ["real"]

    asyncio.run(run())


def test_who_does_not_see_a_move_is_refused_and_looks_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, b, c)):
            await a.create_queue(spec("q", 3))
            moved = shares(b, "q")[0]
            blind(a)
            before = dict(clustered(a)._owners)
            await b.hand_over()
            await eventually(lambda: moved in shares(a, "q") + shares(c, "q"))
            assert clustered(a)._owners == before
            work = asyncio.create_task(put(a, "q", moved, "x"))
            await eventually(lambda: len(made.wires.requests(Produce)) >= 2 or work.done())
            clustered(a)._look(clustered(a).member.look)  # type: ignore[arg-type]
            assert (await work).partition == moved
            assert ref(a, "q", moved) in made.disk.partitions

    asyncio.run(run())


def test_partitions_that_go_together_have_together_as_long_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With that long for each, the lease would run out while they are let go, and everything else would be lost, too."""
    clock = 1_000
    waited = []

    async def hangs(driver: QueueDriver, number: int, patience: int) -> None:
        nonlocal clock
        clock += patience
        waited.append(patience)

    async def run() -> None:
        nonlocal clock
        async with cluster(tmp_path, "a") as (_, (a,)):
            record = await a.create_queue(spec("q", 4))
            with monkeypatch.context() as patch:
                patch.setattr(service_module, "system", SimpleNamespace(steady=lambda: clock))
                patch.setattr(QueueDriver, "lose", hangs)
                for number in range(4):
                    await a.lost(record.incarnation, number)
                assert waited == [LET_GO, 0, 0, 0]
                clock += 2 * LET_GO
                await a.lost(record.incarnation, 0)
                assert waited[-1] == LET_GO

    asyncio.run(run())
