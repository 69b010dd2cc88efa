"""Consumers at one instance, items at another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.cluster import remote_leases
from sluiceway.cluster.remote_demand import AFTER_NOTHING
from sluiceway.cluster.router import ANSWER_MARGIN
from sluiceway.contract.queue_settings import CircuitBreaker
from sluiceway.core.partition.circuit_breaker import PROBES
from sluiceway.core.partition.key_slots import slot
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import Ask, LeaseAnywhere, PeerRequest, Poll
from sluiceway.model.requests import Disposition, Lease, Leased, ProduceKey, QueueSpec, Settle
from sluiceway.model.small_batch import in_columns
from sluiceway.ports.partition_store import PartitionRef, StoreUnavailableError
from tests.cluster.cluster_rig import Cluster, Gate, cluster, counts, fine_always, put, ref, shares
from tests.instance.instance_rig import PATIENCE, eventually, fine, lease, payloads, settle, spec


def waits(service: Service, queue: str) -> bool:
    """A lease waits there."""
    return service.stats(queue).lease_waiting > 0


def without(made: Cluster, queue: str, number: int) -> Service:
    """An instance that does not own that partition."""
    owner = made.owner(queue, number)
    return next(service for service in made.services if service is not owner)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_what_is_produced_anywhere_reaches_who_waits_anywhere(tmp_path: Path, count: int) -> None:
    """Also who waits at an instance that has no partition at all."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", count))
            for consumer in services:
                for number in range(count):
                    work = asyncio.create_task(consumer.lease("q", Lease("c", 10, 60_000)))
                    await eventually(lambda consumer=consumer: waits(consumer, "q"))  # type: ignore[misc]
                    await put(services[1], "q", number, f"for {number}")
                    leased = await work
                    assert payloads(leased.batches) == [f"for {number}"]
                    assert (await settle(services[2], "q", leased)).completed == 1

    asyncio.run(run())


@pytest.mark.parametrize("key", [None, "k"])
def test_a_lease_up_to_offsets_takes_what_was_there_wherever_it_is_and_no_more(tmp_path: Path, key: str | None) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 6))
            for number in range(6):
                await put(services[0], "q", number, f"{number}")
            stats = await services[1].count("q")
            before = {each.partition: each.next_offset for each in stats.partitions}
            assert before == dict.fromkeys(range(6), 1)
            for number in range(6):
                await put(services[0], "q", number, f"later {number}")
            found: list[str] = []
            for turn in range(20):
                asked = Lease("c", 100, 0, None, 100, f"{key}{turn}" if key else None, before=dict.fromkeys(range(6), 1))
                leased = await services[turn % 3].lease("q", asked)
                if not leased.leases:
                    break
                found += payloads(leased.batches)
            assert sorted(found) == [str(number) for number in range(6)]

    asyncio.run(run())


def test_a_lease_that_does_not_wait_finds_what_is_elsewhere(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 6))
            for consumer in services:
                assert (await lease(consumer, "q")).leases == []
            for number in range(6):
                await put(services[0], "q", number, f"{number}")
            found = []
            while (leased := await lease(services[1], "q")).leases:
                found += payloads(leased.batches)
            assert sorted(found) == [f"{number}" for number in range(6)]

    asyncio.run(run())


def test_many_who_wait_and_one_item(tmp_path: Path) -> None:
    """One gets it. The others wait on, and get what comes next."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, services):
            await services[0].create_queue(spec("q", 3))
            waiting = {asyncio.create_task(services[n % 3].lease("q", Lease(f"c{n}", 1, 60_000))) for n in range(12)}
            await eventually(lambda: sum(service.stats("q").lease_waiting for service in services) == 12)
            got = []
            for number in range(12):
                await put(services[number % 2], "q", number % 3, f"{number}")
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                assert len(done) == 1
                got += [item for task in done for item in payloads(task.result().batches)]
            assert got == [f"{number}" for number in range(12)]
            assert not made.wires.requests(Settle)

    asyncio.run(run())


def test_one_item_is_offered_to_one_of_those_who_wait(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            consumer = without(made, "q", 0)
            waiting = [asyncio.create_task(lease(consumer, "q", 1, 60_000)) for _ in range(6)]
            await eventually(lambda: consumer.stats("q").lease_waiting == 6)
            await put(a, "q", 0, "x")
            done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert [payloads(task.result().batches) for task in done] == [["x"]]
            assert len(made.wires.requests(Lease)) == 1
            for task in pending:
                task.cancel()

    asyncio.run(run())


def test_a_paused_queue_gives_nothing_out_wherever_its_items_are(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await put(a, "q", 0, "zero")
            await put(a, "q", 1, "one")
            await a.pause("q", ["lease"], True)
            for service in (a, b):
                assert (await lease(service, "q")).leases == []
            work = [asyncio.create_task(lease(service, "q", timeout=60_000)) for service in (a, a, b, b)]
            await eventually(lambda: waits(a, "q") and waits(b, "q"))
            made.wires.asked.clear()
            done, _pending = await asyncio.wait(work, timeout=0.05)
            assert not done
            assert not made.wires.requests(Lease)
            await b.pause("q", ["lease"], False)
            done, pending = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            while len(done) < 2:
                more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done |= more
            assert sorted(item for task in done for item in payloads(task.result().batches)) == ["one", "zero"]
            for task in pending:
                task.cancel()

    asyncio.run(run())


def test_what_is_paused_is_not_offered(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            consumer = without(made, "q", 0)
            await put(a, "q", 0, "x")
            await a.pause("q", ["lease"], True)
            work = asyncio.create_task(lease(consumer, "q", timeout=60_000))
            await eventually(lambda: any(isinstance(request, Poll) and request.wanted for _, request in made.wires.asked))
            await asyncio.wait([work], timeout=0.05)
            assert not made.wires.requests(Lease)
            await a.pause("q", ["lease"], False)
            assert payloads((await work).batches) == ["x"]

    asyncio.run(run())


def test_what_is_fetched_for_a_client_that_has_gone_is_given_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner = made.owner("q", 0)
            consumer = without(made, "q", 0)
            gate = made.wires.on_answer = Gate(only=leases)
            work = asyncio.create_task(lease(consumer, "q", timeout=60_000))
            await put(a, "q", 0, "x")
            await gate.reached.wait()
            assert owner.stats("q").partitions[0].total_leased == 1
            work.cancel()
            gate.open()
            await eventually(lambda: owner.stats("q").partitions[0].ready == 1)
            # It was not touched: the attempt does not count.
            again = await lease(consumer, "q", timeout=60_000)
            assert in_columns(again.batches[0]).column("attempts").to_pylist() == [1]

    asyncio.run(run())


def test_what_is_fetched_for_a_client_that_goes_at_any_moment_is_given_back_or_delivered(tmp_path: Path) -> None:
    """Also while the instance is about to answer."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, consumer = made.owner("q", 0), without(made, "q", 0)
            await put(a, "q", 0, "x")
            for iterations in range(30):
                gate = made.wires.on_answer = Gate(only=leases)
                work = asyncio.create_task(lease(consumer, "q", timeout=60_000, lease_timeout=600_000))
                await gate.reached.wait()
                gate.open()
                for _ in range(iterations):
                    await asyncio.sleep(0)
                work.cancel()
                await asyncio.wait([work])
                if not work.cancelled():
                    await settle(consumer, "q", work.result(), Disposition("release"))
                await eventually(lambda: owner.stats("q").partitions[0].ready == 1)
            assert not work.cancelled(), "each moment was tried"

    asyncio.run(run())


def leases(_: str, request: PeerRequest) -> bool:
    """Whether it asks for a lease from a share."""
    return isinstance(request, Ask) and isinstance(request.request, Lease)


@pytest.mark.parametrize("timeout", [0, 50])
def test_what_comes_too_late_for_its_call_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: int) -> None:
    """A slow owner. If its items stayed leased, those of the same keys would wait until the lease runs out."""
    monkeypatch.setattr(remote_leases, "NO_WAIT", 50)
    monkeypatch.setattr(remote_leases, "IN_FLIGHT", 50)
    monkeypatch.setattr(remote_leases, "LATE", 60_000)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, consumer = made.owner("q", 0), without(made, "q", 0)
            await put(a, "q", 0, "x")
            gate = made.wires.on_answer = Gate(only=leases)
            # On a slow machine the time of a call may be over before it hears of the item.
            while not gate.reached.is_set():
                assert (await lease(consumer, "q", timeout=timeout)).leases == []
            assert owner.stats("q").partitions[0].total_leased == 1
            # The time was over: nobody else was asked.
            assert len(made.wires.requests(Lease)) == 1
            gate.open()
            await eventually(lambda: owner.stats("q").partitions[0].ready == 1)
            again = await lease(consumer, "q", timeout=60_000)
            assert in_columns(again.batches[0]).column("attempts").to_pylist() == [1]

    asyncio.run(run())


def test_who_waits_for_an_instance_that_answers_nothing_gets_its_items_where_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is frozen, say, until the others have given it up."""
    monkeypatch.setattr(remote_leases, "LOOK", 10)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner, consumer = made.owner("q", 0), without(made, "q", 0)
            gate = made.wires.on_ask = Gate(only=leases)
            await put(a, "q", 0, "x")
            work = asyncio.create_task(lease(consumer, "q", timeout=int(10_000 * PATIENCE)))
            await gate.reached.wait()
            await made.leave(made.name(owner))
            async with asyncio.timeout(PATIENCE):
                assert payloads((await work).batches) == ["x"]

    asyncio.run(run())


def test_a_call_waits_a_moment_longer_for_items_that_are_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_leases, "IN_FLIGHT", 60_000)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            consumer = without(made, "q", 0)
            await put(a, "q", 0, "x")
            gate = made.wires.on_answer = Gate(only=leases)
            reached = asyncio.create_task(gate.reached.wait())
            while not reached.done():
                deadline = system.now() + 50
                work = asyncio.create_task(lease(consumer, "q", timeout=50))
                await asyncio.wait((work, reached), return_when=asyncio.FIRST_COMPLETED)
            await eventually(lambda: system.now() > deadline + 2 * ANSWER_MARGIN)
            assert not work.done()
            gate.open()
            assert payloads((await work).batches) == ["x"]

    asyncio.run(run())


def test_a_client_that_goes_before_anything_was_fetched_leaves_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            work = asyncio.create_task(lease(a, "q", timeout=60_000))
            await eventually(lambda: waits(a, "q"))
            await eventually(lambda: any(isinstance(request, Poll) and request.wanted for _, request in made.wires.asked))
            work.cancel()
            await asyncio.wait([work])
            assert not waits(a, "q")
            await put(a, "q", shares(b, "q")[0], "x")
            assert payloads((await lease(b, "q", timeout=60_000)).batches) == ["x"]
            assert not made.wires.requests(Lease)

    asyncio.run(run())


def test_offers_that_come_to_nothing_do_not_spin(tmp_path: Path) -> None:
    """The other says it has items, and gives none out."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            consumer = without(made, "q", 0)
            await put(a, "q", 0, "x")

            async def refuse(_: str, request: PeerRequest) -> None:
                if isinstance(request, Ask) and isinstance(request.request, Lease):
                    raise SluicewayError("unavailable", "not now")

            made.wires.on_ask = refuse
            work = asyncio.create_task(lease(consumer, "q", timeout=300))
            assert (await work).leases == []
            # One in AFTER_NOTHING at most, however fast the machine is.
            most = 300 // AFTER_NOTHING + 5
            assert 1 <= len(made.wires.requests(Lease)) <= most
            assert len([1 for address, request in made.wires.asked if isinstance(request, Poll)]) <= 2 * most + 10

    asyncio.run(run())


def test_who_waits_for_a_queue_that_is_deleted_is_answered(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            consumer = without(made, "q", 0)
            work = asyncio.create_task(lease(consumer, "q", timeout=60_000))
            await eventually(lambda: waits(consumer, "q"))
            await made.owner("q", 0).delete_queue("q", force=False)
            assert (await work).leases == []
            # Nothing of it is wanted any more.
            await a.create_queue(spec("q", 1))
            await put(a, "q", 0, "x")
            assert counts(await b.count("q")) == {0: (1, 0)}

    asyncio.run(run())


# ---- with a key -----------------------------------------------------------------------------------------------


def told(leased: Leased) -> list[tuple[int, int]]:
    return sorted((each.partition, each.number) for each in leased.leases)


def test_beside_a_partition_of_which_nobody_knows_anything_each_open_one_answers_for_itself(tmp_path: Path) -> None:
    """Its store has been away since a takeover. What Spark's source relies on (ADR 61), whichever instance it asks."""

    def keyed(key: str, number: int | None, before: dict[int, int] | None = None) -> Lease:
        return Lease("c", 1, 0, 600_000, 6 if number is None else 1, key, number, before=before)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, *_)):
            await a.create_queue(spec("q", 6))
            for number in range(6):
                await put(a, "q", number, f"{number}")
            taken = [await a.lease("q", keyed("k", number)) for number in (0, 1)]
            gone, leaving = ref(a, "q", 0), made.name(made.owner("q", 0))

            async def away(of: PartitionRef) -> None:
                if of == gone:
                    raise StoreUnavailableError("away")

            for store in made.stores.values():
                store.on_open = away
            await made.leave(leaving)
            for each in made.services:
                for request in (keyed("new", None), keyed("k", None, {}), keyed("k", 0, {})):
                    with pytest.raises(SluicewayError) as refused:
                        await each.lease("q", request)
                    assert refused.value.code == "unavailable"
                # Found again, and no more.
                assert told(await each.lease("q", keyed("k", 1, {}))) == told(taken[1])
                assert told(await each.lease("q", keyed("none", 2, {}))) == []
            fresh = [await each.lease("q", keyed("new", 2)) for each in made.services]
            assert len({*map(str, map(told, fresh))}) == 1
            assert payloads(fresh[0].batches) == ["2"]
            for store in made.stores.values():
                store.on_open = fine
            await eventually(lambda: any(0 in shares(each, "q") for each in made.services))
            for each in made.services:
                assert told(await each.lease("q", keyed("k", None, {}))) == sorted([*told(taken[0]), *told(taken[1])])
                assert told(await each.lease("q", keyed("new", None, {}))) == told(fresh[0])

    asyncio.run(run())


def test_a_lease_key_gives_the_same_leases_at_every_instance(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 6))
            for number in range(6):
                await put(services[0], "q", number, f"{number}")
            for key in ("k1", "k2", "k3"):
                first = await services[0].lease("q", Lease("c", 1, lease_key=key))
                assert len(first.leases) == 1
                for service in services:
                    again = await service.lease("q", Lease("c", 1, lease_key=key))
                    assert (told(again), payloads(again.batches)) == (told(first), payloads(first.batches))
            stats = await services[1].count("q")
            assert sum(each.total_leased for each in stats.partitions) == 3

    asyncio.run(run())


def test_one_lease_key_at_all_instances_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 6))
            for number in range(6):
                await put(services[0], "q", number, f"{number}")
            for round_ in range(3):
                asked = (service.lease("q", Lease("c", 2, 10_000, lease_key=f"k{round_}")) for service in services * 3)
                answers = await asyncio.gather(*asked)
                assert len({tuple(told(each)) for each in answers}) == 1
                assert (await settle(services[round_], "q", answers[0])).completed >= 1

    asyncio.run(run())


def test_a_lease_key_after_its_home_or_its_leases_have_moved(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, services):
            await services[0].create_queue(spec("q", 6))
            for number in range(6):
                await put(services[0], "q", number, f"{number}")
            first = {key: told(await services[0].lease("q", Lease("c", 1, lease_key=key))) for key in ("k1", "k2", "k3", "k4")}
            await made.leave("b")
            for service in (services[0], services[2]):
                for key, leases in first.items():
                    assert told(await service.lease("q", Lease("c", 1, 20_000, lease_key=key))) == leases

    asyncio.run(run())


def home_partition(service: Service, key: str) -> int:
    return slot(ProduceKey(f"c\n{key}"), len(service.queue("q").partitions))


def test_an_instance_that_is_not_a_keys_home_does_not_take_its_leases(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 2))
            wrong = without(made, "q", home_partition(a, "k"))
            with pytest.raises(SluicewayError) as raised:
                await wrong.answer(Ask(a.queue("q").incarnation, LeaseAnywhere(Lease("c", 1, lease_key="k"))))
            assert raised.value.code == "not_here"

    asyncio.run(run())


def test_a_keyed_lease_whose_answer_was_lost_is_found_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 2))
            number = home_partition(a, "k")
            await put(a, "q", number, "x", "y")
            home, other = made.owner("q", number), without(made, "q", number)
            made.wires.loses.add(made.name(home))
            work = asyncio.create_task(other.lease("q", Lease("c", 1, 60_000, lease_key="k")))
            await eventually(lambda: len(made.wires.requests(LeaseAnywhere)) >= 2)
            made.wires.loses.clear()
            assert payloads((await work).batches) == ["x"]
            assert counts(await a.count("q"))[number] == (1, 1)

    asyncio.run(run())


@pytest.mark.parametrize("code", ["outcome_unknown", "unavailable"])
@pytest.mark.parametrize("timeout", [0, 60_000])
def test_under_a_key_nothing_is_leased_elsewhere_once_an_instance_may_have_leased_items(tmp_path: Path, code: str, timeout: int) -> None:
    """Its commit took too long, or it cannot read what it has leased. The first answer would lack leases that a repetition has."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, (a, *_)):
            await a.create_queue(spec("q", 3))
            number = home_partition(a, "k")
            for each in {0, 1, 2} - {number}:
                await put(a, "q", each, f"{each}")

            async def fail(_: str, request: PeerRequest) -> None:
                if isinstance(request, Ask) and isinstance(request.request, Lease):
                    made.wires.on_answer = fine_always
                    raise SluicewayError(code, "the commit is not over")

            made.wires.on_answer = fail
            with pytest.raises(SluicewayError) as failed:
                await made.owner("q", number).lease("q", Lease("c", 1, timeout, lease_key="k"))
            assert failed.value.code == code
            found = await made.owner("q", number).lease("q", Lease("c", 1, lease_key="k"))
            assert len(found.leases) == 1
            stats = await a.count("q")
            assert sum(each.total_leased for each in stats.partitions) == 1

    asyncio.run(run())


def test_leased_items_whose_partition_went_before_they_were_read(tmp_path: Path) -> None:
    """The client is not told what instances tell each other."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(spec("q", 1))
            owner = made.owner("q", 0)
            await put(owner, "q", 0, "x")
            owner._cache.capacity = 0
            await put(owner, "q", 0, "y")
            gate = made.stores[made.name(owner)].on_read = Gate()
            work = asyncio.create_task(lease(owner, "q", timeout=20_000))
            await gate.reached.wait()
            await owner.hand_over()
            gate.open()
            assert payloads((await work).batches) == ["x", "y"]

    asyncio.run(run())


def test_an_owners_circuit_breaker_holds_for_consumers_elsewhere(tmp_path: Path) -> None:
    """They wait as on an empty queue, and get its probes."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, _)):
            await a.create_queue(QueueSpec("q", 1, circuit_breaker=CircuitBreaker(0.5, 5)))
            owner, consumer = made.owner("q", 0), without(made, "q", 0)
            await put(a, "q", 0, *map(str, range(50)))
            await settle(consumer, "q", await lease(consumer, "q", 5), Disposition("retry"))
            counted = await consumer.count("q")
            assert [each.circuit and each.circuit.state for each in counted.logical_queues if each.partitions] == ["open"]
            assert (await lease(consumer, "q", 50)).leases == []
            asked = len(made.wires.requests(Lease))
            probes = await lease(consumer, "q", 50, 60_000)
            assert len(payloads(probes.batches)) == PROBES
            assert len(made.wires.requests(Lease)) <= asked + 2, "it is not asked again and again while the breaker is open"
            assert (await lease(owner, "q", 50)).leases == [], "the probes are out"
            await settle(consumer, "q", probes)
            assert len(payloads((await lease(consumer, "q", 50, 60_000)).batches)) == 50 - PROBES

    asyncio.run(run())
