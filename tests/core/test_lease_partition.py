"""A lease from one partition of a queue: in a logical queue, over HTTP, and in a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluiceway.client import CallError, Client
from sluiceway.model.requests import Lease, LeaseInfo
from tests.capture.lineage_rig import Place, two_sided
from tests.cluster.cluster_rig import cluster, put, shares
from tests.core.queue_rig import Rig, lease
from tests.core.queue_rig import settle as settling
from tests.instance.instance_rig import eventually as eventually_here
from tests.instance.instance_rig import payloads, settle, spec
from tests.server.server_running import Running, eventually


def of(partition: int, count: int = 10, timeout: int = 0, *, after: int | None = None, **fields: Any) -> Lease:
    return replace(lease(count, timeout, **fields), partition=partition, after=after)


def given(rig: Rig, request: Lease) -> list[LeaseInfo]:
    """What it was given, durably."""
    ticket = rig.ask(request)
    rig.end_all()
    return rig.grants(ticket)


# ---- in a logical queue --------------------------------------------------------------------------------------------------


def test_it_is_served_from_there_and_from_nowhere_else() -> None:
    rig = Rig(3)
    for number in (0, 2):
        rig.fill(number, 5)
    assert [info.partition for info in given(rig, of(2))] == [2]
    assert given(rig, of(1)) == []
    waits = rig.ask(of(1, timeout=5_000))
    rig.fill(2, 5)
    assert waits not in rig.answers
    rig.fill(1, 2)
    assert [(info.partition, info.items) for info in rig.grants(waits)] == [(1, 2)]


def test_who_waits_for_one_partition_does_not_hold_up_the_others() -> None:
    """There are more of them than items."""
    rig = Rig(2)
    pinned = [rig.ask(of(0, timeout=5_000)) for _ in range(5)]
    free = [rig.ask(lease(1, 5_000)) for _ in range(3)]
    rig.fill(1, 3)
    assert all(len(rig.grants(ticket)) == 1 for ticket in free)
    assert not rig.answers.keys() & {*pinned}
    rig.fill(0, 2)
    assert [ticket in rig.answers for ticket in pinned].count(True) == 2


def test_it_shares_its_partition_with_those_who_take_any() -> None:
    rig = Rig(1)
    tickets = [rig.ask(request) for request in (lease(10, 1_000), of(0, timeout=1_000), lease(10, 1_000))]
    rig.fill(0, 9)
    assert [rig.grants(ticket)[0].items for ticket in tickets] == [3, 3, 3]


def test_its_key_is_looked_for_there_only() -> None:
    rig = Rig(2)
    rig.fill(0, 2)
    rig.fill(1, 2)
    first = given(rig, of(0, 1, key="k"))
    other = given(rig, of(1, 1, key="k"))
    assert [info.partition for info in (*first, *other)] == [0, 1]
    assert given(rig, of(0, 1, key="k")) == first
    assert given(rig, of(1, 1, key="k")) == other


def test_another_partition_that_is_not_open_does_not_matter_to_its_key() -> None:
    """Where any would do, that one may hold leases under the key."""
    rig = Rig(2)
    rig.fill(0, 2)
    rig.queue.retry_now([1], rig.now, anew=True)
    rig.cycle()
    anywhere = rig.ask(lease(1, key="k"))
    rig.end_all()
    assert rig.code(anywhere) == "unavailable"
    assert len(given(rig, of(0, 1, key="k"))) == 1
    closed = rig.ask(of(1, 1, key="k"))
    assert rig.code(closed) == "unavailable"


def test_who_comes_late_is_refused() -> None:
    rig = Rig(1)
    rig.fill(0, 5)
    (one,) = given(rig, of(0, 1, key="1"))
    (two,) = given(rig, of(0, 1, key="2", after=one.number))
    # It is no matter that there is a later one, as long as it is not completed.
    (three,) = given(rig, of(0, 1, key="3", after=one.number))
    rig.ask(settling({0: [2]}))
    rig.end_all()
    assert rig.code(rig.ask(of(0, 1, key="4", after=two.number))) == "stale_ids"
    assert len(given(rig, of(0, 1, key="4", after=three.number))) == 1
    # Somebody else's are none of its business, and its own are found again whatever it names.
    assert len(given(rig, of(0, 1, key="4", after=0, client="d"))) == 1
    assert given(rig, of(0, 1, key="2", after=0)) == [two]


def test_who_asks_a_partition_that_is_damaged_is_told_so() -> None:
    """It would be taken for empty otherwise."""
    rig = Rig(2)
    rig.fill(0, 5)
    waiting = rig.ask(of(1, timeout=5_000, key="k"))
    anywhere = rig.ask(lease(1, 5_000, client="d", key="k"))
    rig.end_all()
    for number in (0, 1):
        rig.queue.stop_executor(number, "no checksum", rig.now)
    rig.cycle()
    assert rig.code(waiting) == "partition_damaged"
    for fields in ({}, {"key": "k"}, {"timeout": 5_000}):
        assert rig.code(rig.ask(of(0, **fields))) == "partition_damaged"
    assert rig.grants(anywhere)


# ---- over HTTP -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with two_sided(tmp_path_factory.mktemp("server")) as found:
        yield found


def test_each_partition_gives_its_own(served: Running) -> None:
    place = Place(served, 3)
    with Client(served.url) as client:
        for number in range(3):
            served.ask("storage/items.import", queue_name=place.queue, partition=number, items=[{"payload": "YQ=="}] * (number + 1))
        for number in (2, 0, 1):
            table = client.lease_arrow(place.queue, partition=number)
            assert table.table["partition"].unique().to_pylist() == [number]
            assert len(table) == number + 1
            assert client.peek_arrow(place.queue, table.lease_ids[0]).table.num_rows == number + 1
            assert not client.lease(place.queue, partition=number).items


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"partition": 7}, "partition"),
        ({"partition": -1}, "partition"),
        ({"partition": 0, "max_partitions": 2}, "max_partitions"),
        ({"after_lease": "INC.0.L0"}, "after_lease"),
        ({"partition": 1, "after_lease": "INC.0.L0"}, "after_lease"),
        ({"partition": 0, "after_lease": "aaaaaaaa.0.L0"}, "after_lease"),
        ({"partition": 0, "after_lease": "INC.0.0"}, "after_lease"),
    ],
)
def test_what_cannot_be_meant_is_refused(served: Running, fields: dict[str, Any], field: str) -> None:
    place = Place(served, 2)
    if "after_lease" in fields:
        fields = fields | {"after_lease": fields["after_lease"].replace("INC", place.info()["incarnation"])}
    answer = served.post("queue.lease", queue_name=place.queue, client_id="c", **fields)
    assert (answer.status_code, answer.json()["field"]) == (400, field)


def test_who_comes_late_is_told_over_http(served: Running) -> None:
    place = Place(served, 1)
    place.produce(3)
    before = f"{place.info()['incarnation']}.0.L0"
    with Client(served.url, retry_for="0s") as client:
        first = client.lease(place.queue, partition=0, after_lease=before)
        client.complete(place.queue, lease_ids=first.lease_ids)
        with pytest.raises(CallError, match="already completed a later lease") as caught:
            client.lease(place.queue, partition=0, after_lease=before)
        assert caught.value.code == "stale_ids"
        assert client.lease(place.queue, partition=0, after_lease=first.lease_ids[0]).items


def test_who_waits_for_a_partition_is_told_when_it_is_removed(served: Running) -> None:
    place = Place(served, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.post, "queue.lease", queue_name=place.queue, client_id="c", partition=1, request_timeout="1m")
        eventually(lambda: place.served.waiting(place.queue) == 1)
        id = place.rebalance(1)
        eventually(lambda: place.ended(id))
        answer = waiting.result(60)
    assert (answer.status_code, answer.json()["field"]) == (400, "partition")
    assert "removed by a rebalance" in answer.json()["detail"]


# ---- in a cluster --------------------------------------------------------------------------------------------------------


def test_any_instance_leases_from_a_partition_of_any_other(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b", "c") as (_, services):
            await services[0].create_queue(spec("q", 6))
            for number in range(6):
                for service in services:
                    work = asyncio.create_task(service.lease("q", of(number, 1, 60_000, key=f"{number}")))
                    await put(services[0], "q", number, f"item {number}")
                    leased = await work
                    assert payloads(leased.batches) == [f"item {number}"]
                    # The key is known wherever it is asked for.
                    for other in services:
                        assert (await other.lease("q", of(number, 1, key=f"{number}"))).leases == leased.leases
                    assert (await settle(service, "q", leased)).completed == 1

    asyncio.run(run())


def test_who_waits_for_a_partition_goes_with_it_to_another_owner(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 2))
            await eventually_here(lambda: (len(shares(a, "q")), len(shares(b, "q"))) == (1, 1))
            (number,) = shares(b, "q")
            work = asyncio.create_task(a.lease("q", of(number, 1, 60_000)))
            await eventually_here(lambda: b.stats("q").lease_waiting > 0)
            await made.leave("b")
            await eventually_here(lambda: len(shares(a, "q")) == 2)
            await put(a, "q", number, "moved")
            assert payloads((await work).batches) == ["moved"]

    asyncio.run(run())


def test_who_waits_for_one_partition_does_not_hide_what_is_in_others(tmp_path: Path) -> None:
    """Others are told what is ready at an instance, unless it is wanted there."""

    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("q", 4))
            await eventually_here(lambda: (len(shares(a, "q")), len(shares(b, "q"))) == (2, 2))
            empty, filled = shares(b, "q")
            waits = asyncio.create_task(b.lease("q", of(empty, 1, 60_000)))
            await eventually_here(lambda: b.stats("q").lease_waiting > 0)
            elsewhere = asyncio.create_task(a.lease("q", Lease("c", 1, 60_000)))
            await eventually_here(lambda: a.stats("q").lease_waiting > 0)
            await put(b, "q", filled, "here")
            assert payloads((await asyncio.wait_for(elsewhere, 30)).batches) == ["here"]
            await put(b, "q", empty, "there")
            assert payloads((await waits).batches) == ["there"]

    asyncio.run(run())
