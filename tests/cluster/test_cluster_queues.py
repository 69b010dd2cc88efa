"""Queues that are created, changed and deleted at several instances at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from msgspec.structs import replace

from simulation.loop import Loop
from sluiceway.cluster import meta_watch, queue_changes
from sluiceway.cluster.meta_watch import MetaWatch
from sluiceway.cluster.ownership import item_of
from sluiceway.cluster.queue_changes import CLOSING, DROPPING
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.peers import Ask, Close, Learn, PeerRequest
from sluiceway.model.queue import PartitionRecord
from sluiceway.model.requests import DONE, Clear, Disposition, Produce, QueuePatch, Redrive, Selection, Settle
from tests.cluster.cluster_rig import Gate, cluster, counts, put, shares
from tests.instance.instance_rig import PATIENCE, eventually, lease, payloads, produce, rows, settle, spec


def closing(_: str, request: PeerRequest) -> bool:
    return isinstance(request, Ask) and isinstance(request.request, Close)


def test_what_is_changed_at_one_instance_holds_at_all_of_them_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, (a, b, c)):
            await a.create_queue(spec("q", 6))
            assert [sorted(shares(each, "q")) != [] for each in (a, b, c)] == [True] * 3
            await b.update_queue("q", QueuePatch({"reference": "new"}))
            assert {each.queue("q").reference for each in (a, b, c)} == {"new"}
            await c.pause("q", ["produce"], True)
            for each in (a, b, c):
                with pytest.raises(SluicewayError) as raised:
                    await produce(each, "q", "x")
                assert raised.value.code == "queue_paused"
            await a.pause("q", ["produce"], False)
            for each in (a, b, c):
                await produce(each, "q", "x")
            # Versions rise one by one, whoever changes.
            assert {each.queue("q").version for each in (a, b, c)} == {4}
            await b.delete_queue("q", force=True)
            for each in (a, b, c):
                with pytest.raises(SluicewayError) as raised:
                    await each.look_up("q")
                assert raised.value.code == "queue_not_found"

    asyncio.run(run())


def test_changes_at_all_instances_at_once_all_happen(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 1))
            changes = [services[n % 3].update_queue("q", QueuePatch({"reference": f"{n}"})) for n in range(9)]
            await asyncio.gather(*changes)
            assert {each.queue("q").version for each in services} == {10}
            created = await asyncio.gather(*(services[n % 3].create_queue(spec(f"q{n}", 2)) for n in range(9)))
            assert len({record.incarnation for record in created}) == 9
            for each in services:
                assert len(each.queues()) == 10
                await produce(each, "q7", "x")

    asyncio.run(run())


def test_one_name_created_at_several_instances_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            answers = await asyncio.gather(*(each.create_queue(spec("q", 2)) for each in services), return_exceptions=True)
            errors = [each.code for each in answers if isinstance(each, SluicewayError)]
            assert errors == ["queue_exists", "queue_exists"]
            assert len({each.queue("q").incarnation for each in services}) == 1

    asyncio.run(run())


def test_creating_and_deleting_one_name_at_two_instances_at_once(tmp_path: Path) -> None:
    """Whatever comes first, all agree in the end, and a queue that is there can be used everywhere."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            for _ in range(10):
                await a.create_queue(spec("q", 2))
                await asyncio.gather(a.delete_queue("q", force=True), b.create_queue(spec("q", 3)), return_exceptions=True)
                await eventually(lambda: [r.incarnation for r in a.queues()] == [r.incarnation for r in b.queues()])
                if a.queues():
                    await produce(a, "q", "x")
                    await produce(b, "q", "y")
                    await a.delete_queue("q", force=True)
                assert not (await made.meta.read(prefixes=[CLOSING, DROPPING])).entries

    asyncio.run(run())


def test_two_deletions_of_one_queue(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            for _ in range(5):
                await a.create_queue(spec("q", 2))
                answers = await asyncio.gather(*(each.delete_queue("q", force=False) for each in (a, b)), return_exceptions=True)
                codes = sorted(each.code if isinstance(each, SluicewayError) else "" for each in answers)
                assert codes == ["", "queue_not_found"]
                assert not a.queues()
                assert not b.queues()
            assert not made.disk.partitions
            assert not (await made.meta.read(prefixes=[CLOSING, DROPPING])).entries

    asyncio.run(run())


def test_a_queue_with_items_elsewhere_is_not_deleted_and_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await put(a, "q", shares(b, "q")[0], "x")
            with pytest.raises(SluicewayError) as raised:
                await a.delete_queue("q", force=False)
            assert raised.value.code == "queue_not_empty"
            assert not (await made.meta.read(prefixes=[CLOSING])).entries
            for each in (a, b):
                await produce(each, "q", "y")
            await a.delete_queue("q", force=True)
            assert not made.disk.partitions

    asyncio.run(run())


def test_a_queue_of_which_an_instance_does_not_tell_is_deleted_with_force_alone(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            made.wires.refuses.add("b")
            with pytest.raises(SluicewayError) as raised:
                await a.delete_queue("q", force=False)
            assert raised.value.code == "queue_not_empty"
            await produce(a, "q", "x")
            await a.delete_queue("q", force=True)
            await eventually(lambda: not b.queues())

    asyncio.run(run())


def test_the_dead_queue_of_another_is_not_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("dead", 1))
            await b.create_queue(spec("q", 2, dead_queue="dead"))
            for force in (False, True):
                with pytest.raises(SluicewayError) as raised:
                    await a.delete_queue("dead", force=force)
                assert raised.value.code == "queue_in_use"
            assert b.queue("dead").partitions

    asyncio.run(run())


def test_a_queue_that_items_of_another_instance_are_on_their_way_to_is_not_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("dead", 1))
            await a.create_queue(spec("q", 1, dead_queue="dead"))
            home, source = made.owner("dead", 0), made.owner("q", 0)
            await put(a, "q", 0, "x")
            # The dead queue takes nothing for the moment.
            gate = made.stores[made.name(home)].on_apply = Gate(only=lambda ref: ref.incarnation == a.queue("dead").incarnation)
            await settle(a, "q", await lease(a, "q", timeout=20_000), Disposition("dead", reason="bad"))
            await gate.reached.wait()
            await b.update_queue("q", QueuePatch({"dead_queue": None}))
            other = b if source is a else a
            with pytest.raises(SluicewayError) as raised:
                await other.delete_queue("dead", force=False)
            assert raised.value.code in ("queue_in_use", "queue_not_empty")
            gate.open()
            await eventually(lambda: sum(each.transferring for each in source.stats("q").partitions) == 0)
            assert payloads((await lease(other, "dead", timeout=20_000)).batches) == ["x"]

    asyncio.run(run())


def test_a_queue_that_another_instance_redrives_items_to_is_not_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("dead", 2))
            await a.create_queue(spec("target", 1))
            home = made.owner("target", 0)
            source = b if home is a else a
            await put(a, "dead", shares(source, "dead")[0], "x")
            gate = made.wires.on_ask = Gate(only=lambda _, request: isinstance(request, Ask) and isinstance(request.request, Produce))
            work = asyncio.create_task(source.redrive("dead", Redrive(60_000, 1, "target")))
            await gate.reached.wait()
            for each in (a, b):
                with pytest.raises(SluicewayError) as raised:
                    await each.delete_queue("target", force=False)
                assert raised.value.code == "queue_in_use"
            gate.open()
            assert (await work).redriven == 1
            assert counts(await a.count("target")) == {0: (1, 0)}

    asyncio.run(run())


def test_a_dead_queue_that_is_deleted_while_another_instance_chooses_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("dead", 1))
            await a.create_queue(spec("q", 1))
            gate = made.metas["a"].on_commit = Gate(only=lambda puts: "queue/q" in puts)
            work = asyncio.create_task(a.update_queue("q", QueuePatch({"dead_queue": "dead"})))
            await gate.reached.wait()
            await b.delete_queue("dead", force=False)
            gate.open()
            with pytest.raises(SluicewayError) as raised:
                await work
            assert (raised.value.code, raised.value.field) == ("invalid_request", "dead_queue")
            assert b.queue("q").dead_queue is None

    asyncio.run(run())


def test_the_coordinator_of_a_deletion_dies_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others find out by themselves that the queue stays."""
    monkeypatch.setattr(queue_changes, "CLOSE_TIMEOUT", 100)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            mine = shares(b, "q")[0]

            async def die(puts: object) -> None:
                if any(key.startswith(DROPPING) for key in puts):  # type: ignore[attr-defined]
                    await asyncio.Event().wait()

            made.metas["a"].on_commit = die
            work = asyncio.create_task(a.delete_queue("q", force=False))
            await eventually(lambda: len(made.wires.requests(Close)) == 1)
            await eventually(lambda: not made.meta._entries.keys() & {CLOSING + b.queue("q").incarnation})
            done = None
            while done is None:
                try:
                    done = await put(b, "q", mine, "x")
                except SluicewayError as error:
                    assert error.code == "unavailable"
                    await asyncio.sleep(0.005)
            # Should the coordinator come back, it does not delete it any more.
            made.metas["a"].heal()
            work.cancel()
            await asyncio.wait([work])
            assert counts(await b.count("q"))[mine] == (1, 0)

    asyncio.run(run())


def test_a_deletion_that_comes_too_late_does_nothing(tmp_path: Path) -> None:
    """Somebody lets the queue serve again while the deletion's commit is on its way."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            mine = shares(b, "q")[0]
            gate = made.metas["a"].on_commit = Gate(only=lambda puts: any(key.startswith(DROPPING) for key in puts))
            work = asyncio.create_task(a.delete_queue("q", force=False))
            await gate.reached.wait()
            assert await b._changes.may_reopen(b.queue("q"))
            b._drivers["q"].closing.close_for(0)
            await put(b, "q", mine, "x")
            gate.open()
            with pytest.raises(SluicewayError):
                await work
            assert counts(await b.count("q"))[mine] == (1, 0)
            await produce(a, "q", "y")

    asyncio.run(run())


def test_an_instance_that_joins_during_a_deletion_does_not_lose_what_it_takes(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 3))
            gate = made.wires.on_answer = Gate(only=closing)
            work = asyncio.create_task(a.delete_queue("q", force=False))
            await gate.reached.wait()
            c = await made.start("c")
            await eventually(lambda: len(shares(c, "q")) == 1)
            taken = None
            try:
                taken = await put(c, "q", shares(c, "q")[0], "x")
            except SluicewayError as error:
                assert error.code == "unavailable"
            gate.open()
            (answer,) = await asyncio.gather(work, return_exceptions=True)
            assert (answer is None) == (taken is None), "what was acknowledged is deleted, or the queue stays without need"
            assert [len(each.queues()) for each in (a, b, c)] == ([0] * 3 if taken is None else [1] * 3)

    asyncio.run(run())


@pytest.mark.parametrize("change", ["update", "delete"])
def test_a_change_that_is_heard_of_before_its_own_answer_comes(tmp_path: Path, change: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            gate = made.metas["a"].on_committed = Gate(only=lambda puts: "queue/q" in puts)
            if change == "update":
                work: asyncio.Task[object] = asyncio.create_task(a.update_queue("q", QueuePatch({"reference": "a"})))
            else:
                work = asyncio.create_task(a.delete_queue("q", force=False))
            await gate.reached.wait()
            if change == "update":
                await b._catalog.follow()
                await b.pause("q", ["produce"], True)
                await eventually(lambda: a.queue("q").version == 3)
            else:
                await eventually(lambda: not a.queues())
            gate.open()
            await work
            if change == "update":
                assert a.queue("q").paused == ("produce",)
                with pytest.raises(SluicewayError):
                    await put(a, "q", 0, "x")
            else:
                assert not a.queues()
                await b.create_queue(spec("q", 1))

    asyncio.run(run())


def test_a_change_that_could_not_be_read_at_once_is_followed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_watch, "LOOK_AGAIN", 20)

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 1))
            made.metas["b"].cut()
            await a.pause("q", ["produce"], True)
            assert any(isinstance(request, Learn) for _, request in made.wires.asked)
            # Nothing else ever happens to a queue.
            assert b.queue("q").paused == ()
            made.metas["b"].heal()
            await eventually(lambda: b.queue("q").paused == ("produce",))

    asyncio.run(run())


def test_ids_of_a_deleted_queue_mean_nothing_in_a_new_one_of_its_name(tmp_path: Path) -> None:
    """Also for a call that was waiting for an owner when the one went and the other came."""

    async def run() -> None:
        async with cluster(tmp_path, "a") as (_, (a,)):
            await a.create_queue(spec("q", 1))
            old = a.queue("q")
            await put(a, "q", 0, "old")
            held = await lease(a, "q")
            await a.delete_queue("q", force=True)
            await a.create_queue(spec("q", 1))
            await put(a, "q", 0, "new")
            new = await lease(a, "q")
            assert new.leases[0][:2] == held.leases[0][:2]
            late = Settle({0: [Selection(DONE, lease=held.leases[0].number)]}, 200)
            with pytest.raises(SluicewayError) as raised:
                await a._router.settle(old, late)
            assert raised.value.code == "queue_not_found"
            assert counts(await a.count("q")) == {0: (0, 1)}

    asyncio.run(run())


def test_a_queue_is_cleared_with_a_partition_of_which_the_instance_has_not_heard(tmp_path: Path) -> None:
    """A rebalance has added it: its items were left."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, both):
            for name in ("q", "more", "most"):
                await both[0].create_queue(spec(name, 1))
            # The one with less gets the new partition.
            behind, other = sorted(both, key=lambda each: -sum(len(shares(each, name)) for name in ("q", "more", "most")))
            gate = made.metas[made.name(behind)].on_read = Gate(only=lambda keys: QUEUE in keys)
            before = other.queue("q")
            writes = other.ownership.placing([item_of(before.incarnation, 1)])
            await other._catalog.put(replace(before, partitions=(*before.partitions, PartitionRecord(1))), {}, writes)
            await eventually(lambda: 1 in shares(other, "q"))
            await put(other, "q", 1, "x")
            clearing = asyncio.create_task(behind._router.clear(before, Clear(10_000)))
            gate.open()
            assert (await clearing).ready == 1

    asyncio.run(run())


def test_an_error_that_nobody_expects_does_not_make_an_instance_deaf() -> None:
    class Catalog:
        looks = 0

        async def follow(self) -> None:
            self.looks += 1
            if self.looks == 1:
                raise ZeroDivisionError("planted")

    loop, catalog = Loop(Random(0)), Catalog()
    watch = MetaWatch(cast(Any, None), cast(Any, catalog), cast(Any, None), None)
    looking = loop.create_task(watch.look_again())
    loop.run_until_complete(asyncio.sleep(2.5 * meta_watch.LOOK_AGAIN / 1000))
    looking.cancel()
    loop.run_until_complete(asyncio.gather(looking, return_exceptions=True))
    loop.close()
    assert catalog.looks == 2


def test_a_produce_is_refused_at_once_if_all_disks_are_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried again until its time was over, and then `unavailable` hid the reason."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, both):
            await both[0].create_queue(spec("q", 4))
            for each in both:
                monkeypatch.setattr(each.room, "is_low", lambda name: True)
                each._note_room()
            with pytest.raises(SluicewayError) as refused:
                async with asyncio.timeout(PATIENCE):
                    await both[0].produce("q", Produce(rows("x"), 24 * 3_600_000))
            assert refused.value.code == "storage_full"
            # Where one has room, that one takes it.
            monkeypatch.setattr(both[1].room, "is_low", lambda name: False)
            both[1]._note_room()
            assert (await both[0].produce("q", Produce(rows("x"), 10_000))).partition in shares(both[1], "q")

    asyncio.run(run())
