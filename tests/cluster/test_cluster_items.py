"""Every call about items, at every instance, for partitions that it owns, that others own, and that several do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sluiceway.cluster import router
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.inspection import DeleteItems, ListItems, MoveItems, RunNow, Search
from sluiceway.model.item_filter import ItemFilter
from sluiceway.model.peers import Ask, Count, PeerRequest
from sluiceway.model.requests import (
    DONE,
    RELEASE,
    Clear,
    Disposition,
    Extend,
    Lease,
    LeaseInfo,
    Peek,
    Produce,
    ProduceKey,
    Selection,
    Settle,
    Settled,
)
from tests.cluster.cluster_rig import Cluster, Gate, cluster, clustered, counts, put, shares
from tests.instance.instance_rig import eventually, lease, payloads, produce, rows, settle, spec

NUMBERS = range(6)
SOME = np.array([0], dtype=np.int64)
NEVER = np.array([0, 77], dtype=np.int64)


async def filled(made: Cluster, *payload: str) -> list[Service]:
    """A queue of six partitions over three instances, with these items in each partition."""
    services = made.services
    await services[0].create_queue(spec("q", 6))
    assert [len(shares(each, "q")) for each in services] == [2, 2, 2]
    for number in NUMBERS:
        if payload:
            await put(services[number % 3], "q", number, *payload)
    return services


async def leased(service: Service) -> dict[int, LeaseInfo]:
    """A lease in every partition."""
    found: dict[int, LeaseInfo] = {}
    while len(found) < 6:
        found.update((each.partition, each) for each in (await service.lease("q", Lease("c", 1, 10_000))).leases)
    return found


@pytest.mark.parametrize("at", range(3))
def test_produce(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            service = (await filled(made))[at]
            # It stays at home, and goes to a partition of others when it is told to, or its key does.
            assert {(await produce(service, "q", "x")).partition for _ in range(4)} <= set(shares(service, "q"))
            assert [(await put(service, "q", number, "y")).partition for number in NUMBERS] == list(NUMBERS)
            keyed = [await produce(service, "q", "z", key=ProduceKey(f"k{n}")) for n in range(12)]
            assert len({each.partition for each in keyed}) > 3
            for other in made.services:
                again = [await produce(other, "q", "z", key=ProduceKey(f"k{n}")) for n in range(12)]
                assert again == [each._replace(deduplicated=True) for each in keyed]
            with pytest.raises(SluicewayError) as raised:
                await produce(service, "q", "another body", key=ProduceKey("k1"))
            assert raised.value.code == "key_conflict"
            assert sum(ready for ready, _ in counts(await service.count("q")).values()) == 4 + 6 + 12

    asyncio.run(run())


def test_produce_goes_elsewhere_when_no_partition_here_takes_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))

            async def down(*_: object) -> None:
                raise OSError("the disk is gone")

            store = made.stores["a"]
            store.on_open = store.on_apply = down
            with pytest.raises(SluicewayError) as raised:
                # What it tried at home it does not know of.
                await produce(a, "q", "x", timeout=300)
            assert raised.value.code == "outcome_unknown"
            await eventually(lambda: not shares(a, "q"))
            assert (await produce(a, "q", "y")).partition in shares(b, "q")

    asyncio.run(run())


@pytest.mark.parametrize("disposition", [DONE, RELEASE, Disposition("retry"), Disposition("dead", reason="bad")])
@pytest.mark.parametrize("by_lease", [True, False])
def test_settle_over_three_owners(tmp_path: Path, disposition: Disposition, by_lease: bool) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            found = await leased(services[1])
            if by_lease:
                selections = {
                    number: [Selection(disposition if disposition is RELEASE else DONE, lease=each.number)]
                    for number, each in found.items()
                }
            else:
                selections = {number: [Selection(disposition, offsets=NEVER)] for number in NUMBERS}
            answer = await services[2].settle("q", Settle(selections, 10_000, foreign=("other.0.5",)))
            assert answer.total == 6
            ignored: dict[str, str] = dict(answer.ignored)
            assert len(ignored) == len(answer.ignored), "an id is named twice"
            assert ignored.pop("other.0.5") == "unknown"
            incarnation = services[0].queue("q").incarnation
            assert ignored == ({} if by_lease else {f"{incarnation}.{number}.77": "unknown" for number in NUMBERS})
            # To repeat it does nothing, and says why.
            again = await services[0].settle("q", Settle(selections, 10_000))
            assert again.total == 0
            back = disposition.verdict in ("release", "retry") and not (by_lease and disposition is not RELEASE)
            assert counts(await services[0].count("q")) == dict.fromkeys(NUMBERS, (1, 0) if back else (0, 0))

    asyncio.run(run())


def test_settle_for_one_client_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await leased(services[0])
            selections = {number: [Selection(DONE, offsets=SOME)] for number in NUMBERS}
            answer = await services[1].settle("q", Settle(selections, 10_000, client_id="somebody else"))
            assert (answer.total, {why for _, why in answer.ignored}, len(answer.ignored)) == (0, {"not_yours"}, 6)
            assert (await services[1].settle("q", Settle(selections, 10_000, client_id="c"))).completed == 6

    asyncio.run(run())


def test_staged_outcomes_take_effect_when_their_leases_are_closed_at_another_instance(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            found = await leased(services[0])
            staged = {number: [Selection(Disposition("retry") if number % 2 else DONE, offsets=SOME)] for number in NUMBERS}
            assert (await services[1].settle("q", Settle(staged, 10_000, stage=True))).total == 6
            assert counts(await services[2].count("q")) == dict.fromkeys(NUMBERS, (0, 1))
            closing = {number: [Selection(DONE, lease=each.number)] for number, each in found.items()}
            answer = await services[2].settle("q", Settle(closing, 10_000))
            assert (answer.completed, answer.retried) == (3, 3)
            assert counts(await services[0].count("q")) == {number: (number % 2, 0) for number in NUMBERS}

    asyncio.run(run())


def test_a_settle_of_which_one_owner_cannot_be_reached_does_the_rest(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await leased(services[0])
            selections = {number: [Selection(DONE, offsets=SOME)] for number in NUMBERS}
            for fault, code in ((made.wires.refuses, "unavailable"), (made.wires.loses, "outcome_unknown")):
                fault.add("c")
                with pytest.raises(SluicewayError) as raised:
                    await services[0].settle("q", Settle(selections, 10_000))
                assert raised.value.code == code
                fault.clear()
            # All of it is done by now: the second time the answer was lost, and not the question.
            assert counts(await services[0].count("q")) == dict.fromkeys(NUMBERS, (0, 0))
            again = await services[0].settle("q", Settle(selections, 10_000))
            assert (again.completed, len(again.ignored)) == (0, 6)

    asyncio.run(run())


def test_a_settle_whose_partition_has_just_gone_finds_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await leased(services[0])
            gate = made.wires.on_ask = Gate(only=lambda address, request: address == "c" and isinstance(request, Ask))
            selections = {number: [Selection(DONE, offsets=SOME)] for number in NUMBERS}
            work = asyncio.create_task(services[0].settle("q", Settle(selections, 60_000)))
            await gate.reached.wait()
            gone = made.wires.instances["c"]
            await gone.hand_over()
            await eventually(lambda: len(shares(services[0], "q")) + len(shares(services[1], "q")) == 6)
            gate.open()
            answer: Settled = await work
            assert (answer.completed, answer.ignored) == (6, [])

    asyncio.run(run())


def test_a_settle_of_whose_partitions_one_has_gone_does_each_once(tmp_path: Path) -> None:
    """Who has one of the two that it is asked for does neither, before it is asked again."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await leased(services[0])
            gate = made.wires.on_ask = Gate(only=lambda address, request: address == "c" and isinstance(request, Ask))
            selections = {number: [Selection(DONE, offsets=SOME)] for number in NUMBERS}
            work = asyncio.create_task(services[0].settle("q", Settle(selections, 60_000)))
            await gate.reached.wait()
            for name in ("d", "e", "f"):
                joined = await made.start(name)
                await eventually(lambda joined=joined: len(shares(joined, "q")) > 0)  # type: ignore[misc]
            await eventually(lambda: len(shares(services[2], "q")) == 1)
            gate.open()
            answer = await work
            assert (answer.completed, answer.ignored) == (6, [])

    asyncio.run(run())


def test_extend(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            found = await leased(services[0])
            leases = [(number, each.number) for number, each in found.items() if number < 3]
            offsets = {number: SOME for number in NUMBERS if number >= 3}
            request = Extend([*leases, (0, 77)], 10_000, 600_000, ("other.0.L1",), offsets)
            answer = await services[2].extend("q", request)
            assert {each.partition for each in answer.leases} == set(NUMBERS)
            assert all(each.lease_deadline > found[each.partition].lease_deadline for each in answer.leases)
            assert sorted(answer.ignored) == sorted([("other.0.L1", "unknown"), (f"{services[0].queue('q').incarnation}.0.L77", "unknown")])

    asyncio.run(run())


@pytest.mark.parametrize("at", range(3))
def test_looking(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            service = (await filled(made, "x", "y"))[at]
            batches = await service.peek("q", Peek(100))
            assert sorted({batch.column("partition")[0].as_py() for batch in batches}) == list(NUMBERS)
            assert sum(batch.num_rows for batch in batches) == 12
            assert sum(batch.num_rows for batch in await service.peek("q", Peek(5))) == 5
            for number in NUMBERS:
                assert payloads(await service.peek("q", Peek(9, number))) == ["x", "y"]
                page = await service.list_items("q", ListItems(number, 0, 1))
                assert (sum(batch.num_rows for batch, _ in page.rows), page.last) == (1, 0)
                assert (await service.explain("q", number, 1)).ahead == 1
            taken = (await made.services[0].lease("q", Lease("c", 2))).leases[0]
            assert payloads(await service.peek("q", Peek(9, taken.partition, taken.number))) == ["x", "y"]
            with pytest.raises(SluicewayError) as raised:
                await service.peek("q", Peek(9, taken.partition, 77))
            assert raised.value.code == "lease_not_found"
            with pytest.raises(SluicewayError) as raised:
                await service.peek("q", Peek(9, 99, 1))
            assert raised.value.code == "lease_not_found"
            assert (await service.explain("q", taken.partition, 0)).state == "leased"
            assert counts(await service.count("q")) == {n: (0, 2) if n == taken.partition else (2, 0) for n in NUMBERS}

    asyncio.run(run())


@pytest.mark.parametrize("at", range(3))
def test_clear_import_delete_and_reload(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            service = (await filled(made, "x", "y"))[at]
            await service.reload("q", 10_000)
            answer = await service.delete_items("q", DeleteItems(dict.fromkeys(NUMBERS, NEVER), 10_000, ("other.0.0",)))
            assert answer.deleted == 6
            assert sorted({why for _, why in answer.ignored}) == ["unknown"]
            assert len(answer.ignored) == 7
            for number in NUMBERS:
                done = await service.import_items("q", Produce(rows("new"), 10_000, partition=number))
                assert done[:3] == (number, 2, 1)
            await made.services[0].lease("q", Lease("c", 1))
            cleared = await service.clear("q", Clear(10_000))
            assert (cleared.ready, cleared.scheduled) == (11, 0)
            assert sum(sum(each) for each in counts(await service.count("q")).values()) == 1

    asyncio.run(run())


@pytest.mark.parametrize("at", range(3))
def test_search_run_now_and_move(tmp_path: Path, at: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            service = (await filled(made, "x", "y"))[at]
            await service.create_queue(spec("other", 3))
            wanted = Search(0, ("ready", "leased", "scheduled"), ItemFilter(contains=b"y"), 100, 1_000, 20_000)
            found = await service.search("q", wanted)
            columns = [[batch.column(name).to_pylist() for name in ("partition", "offset")] for batch, _ in found.rows]
            places = [place for partitions, offsets in columns for place in zip(partitions, offsets, strict=True)]
            assert (found.looked_at, found.skipped, found.next, places) == (12, [], None, [(number, 1) for number in NUMBERS])
            first = await service.search("q", replace(wanted, limit=4))
            assert first.next is not None
            rest = await service.search("q", replace(wanted, partition=first.next[0], start=first.next[1]))
            assert [sum(batch.num_rows for batch, _ in each.rows) for each in (first, rest)] == [4, 2]
            ready = await service.run_now("q", RunNow(dict.fromkeys(NUMBERS, NEVER), 10_000, ("other.0.0",)))
            assert (ready.ready, sorted({why for _, why in ready.ignored})) == (0, ["ready", "unknown"])
            moved = await service.move_items("q", MoveItems(dict.fromkeys(NUMBERS, NEVER), 20_000, ("other.0.0",), "other"))
            assert (moved.matched, moved.moved, moved.targets) == (6, 6, {"other": 6})
            assert sorted(why for _, why in moved.ignored) == ["unknown"] * 7
            assert counts(await service.count("q")) == dict.fromkeys(NUMBERS, (1, 0))
            assert sum(ready for ready, _ in counts(await service.count("other")).values()) == 6

    asyncio.run(run())


def test_what_is_asked_of_a_partition_that_nobody_has_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as the request may take; then it is said which, and what is left to do."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            owned = clustered(services[0])._owners
            item = next(name for name, owner in owned.items() if name.endswith(".4"))
            clustered(services[0]).member._on_look = None
            clustered(services[0])._owners = {name: owner for name, owner in owned.items() if name != item}
            with pytest.raises(SluicewayError) as raised:
                await services[0].clear("q", Clear(200))
            assert raised.value.code == "unavailable"
            assert "partition 4" in str(raised.value)
            assert counts(await services[1].count("q")) == {number: (int(number == 4), 0) for number in NUMBERS}
            monkeypatch.setattr(router, "LOOK_TIMEOUT", 20)
            assert (await services[0].explain("q", 4, 0)).state == "unavailable"
            work = asyncio.create_task(services[0].clear("q", Clear(60_000)))
            await asyncio.sleep(0)
            clustered(services[0])._owners = owned
            assert (await work).ready == 1

    asyncio.run(run())


def test_counts_list_a_partition_once_also_while_it_moves(tmp_path: Path) -> None:
    """One owner has told of it and lost it, and the next tells of it in the same call."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")

            def late(address: str, request: PeerRequest) -> bool:
                return address == "c" and isinstance(request, Ask) and isinstance(request.request, Count)

            gate = made.wires.on_ask = Gate(only=late)
            work = asyncio.create_task(services[0].count("q"))
            await gate.reached.wait()
            await services[1].hand_over()
            await eventually(lambda: len(shares(services[0], "q")) + len(shares(services[2], "q")) == 6)
            gate.open()
            counted = await work
            assert [each.partition for each in counted.partitions] == list(NUMBERS)

    asyncio.run(run())


def test_a_lease_takes_from_several_partitions_of_one_owner(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            found = []
            for _ in range(3):
                answer = await lease(services[0], "q", 10, 10_000, most=6)
                assert len(answer.leases) == 2
                found += payloads(answer.batches)
                assert (await settle(services[1], "q", answer)).completed == 2
            assert len(found) == 6

    asyncio.run(run())


@pytest.mark.parametrize(("fault", "code"), [("refuses", "unavailable"), ("loses", "outcome_unknown")])
def test_a_move_of_which_one_owner_cannot_be_reached_tells_of_every_item(tmp_path: Path, fault: str, code: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await services[0].create_queue(spec("other", 1))
            getattr(made.wires, fault).add("c")
            request = MoveItems(dict.fromkeys(NUMBERS, SOME), 10_000, (), "other")
            moved = await services[0].move_items("q", request)
            incarnation = services[0].queue("q").incarnation
            assert (moved.matched, moved.ignored) == (
                4,
                [(f"{incarnation}.{number}.0", code) for number in sorted(shares(services[2], "q"))],
            )
            # With nothing moved, the error alone says it.
            with pytest.raises(SluicewayError) as raised:
                await services[0].move_items("q", replace(request, offsets=dict.fromkeys(shares(services[2], "q"), SOME)))
            assert raised.value.code == code
            getattr(made.wires, fault).clear()
            again = await services[0].move_items("q", request)
            assert again.matched == (2 if code == "unavailable" else 0)
            assert {why for _, why in again.ignored} == {"gone"}

    asyncio.run(run())


def test_a_move_whose_partition_finds_no_owner_in_time_tells_of_its_items(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (made, _):
            services = await filled(made, "x")
            await services[0].create_queue(spec("other", 1))
            incarnation = services[0].queue("q").incarnation
            owned = clustered(services[0])._owners
            item = next(name for name, owner in owned.items() if name.endswith(f"{incarnation}.4"))
            clustered(services[0]).member._on_look = None
            clustered(services[0])._owners = {name: owner for name, owner in owned.items() if name != item}
            moved = await services[0].move_items("q", MoveItems(dict.fromkeys(NUMBERS, SOME), 1_000, (), "other"))
            assert (moved.matched, moved.ignored) == (5, [(f"{incarnation}.4.0", "unavailable")])
            clustered(services[0])._owners = owned

    asyncio.run(run())
