"""What metrics and health tell of an instance of a cluster, and what it counts of its calls to the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster.group_member import GroupMember
from sluiceway.cluster.instance_view import Instances
from sluiceway.cluster.ownership import Clustered
from sluiceway.cluster.peer_counts import CountedTransport
from sluiceway.core.group import group_records
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.meta import View
from sluiceway.model.peers import Ask, Count, Learn, PeerRequest, Poll
from sluiceway.model.requests import Leased, LeaseInfo, Produce, QueueSpec
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.server.app import Fittings
from sluiceway.server.metrics import Metrics
from tests.cluster.cluster_rig import MORTAL, cluster, lapse, shares
from tests.instance.instance_rig import eventually, lease, produce, rows
from tests.server.server_running import running


async def scraped(service: Service, metrics: Metrics | None = None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await (metrics or Metrics(service)).scrape()).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[f"sluiceway_{name}", frozenset(labels.items())]


def test_metrics_of_an_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, services):
            here, there = services
            await here.create_queue(QueueSpec("q", 4))
            await eventually(lambda: all(each.partitions == 2 for each in here.instances.cluster().instances))
            number = next(each.partition for each in there.stats("q").partitions)
            await here.produce("q", Produce(rows("x"), 30_000, partition=number))
            assert len((await lease(here, "q", timeout=30_000)).leases) == 1
            found = await scraped(here)
            assert value(found, "cluster_partitions") == 2
            assert value(found, "cluster_ownership_holds") == 1
            assert value(found, "cluster_ownership_lapses_total") == 0
            assert value(found, "cluster_load_moves_total") == 0
            assert value(found, "cluster_load") == 0
            assert value(found, "cluster_round") == (await here.instances.rounds(1))[0].number > 0
            assert [value(found, "cluster_instances", state=state) for state in ("alive", "silent", "leaving", "joining")] == [2, 0, 0, 0]
            assert value(found, "peer_requests_total", request="produce", outcome="done") == 1
            assert value(found, "peer_requests_total", request="lease", outcome="done") >= 1
            assert value(found, "peer_leases_fetched_total") == 1
            assert value(found, "peer_request_seconds_total", request="produce") > 0
            rig.wires.refuses.add("b")
            await here.count("q")
            assert value(await scraped(here), "peer_requests_total", request="count", outcome="unreachable") == 1
            rig.wires.refuses.clear()

    asyncio.run(scenario())


def test_a_partition_that_comes_from_another_instance_brings_no_counts_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluiceway.server.metrics._FRESH", 0.0)

    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (here, there)):
            await here.create_queue(QueueSpec("q", 2))
            await eventually(lambda: [len(shares(each, "q")) for each in (here, there)] == [1, 1])
            for number in range(2):
                await here.produce("q", Produce(rows("x", "y"), 30_000, partition=number))
            metrics = Metrics(there)
            for expected in (0, 0, 1):
                assert value(await scraped(there, metrics), "queue_items_produced_total", queue="q") == expected
                if len(shares(there, "q")) == 1:
                    await here.hand_over()
                    await eventually(lambda: len(shares(there, "q")) == 2)
                else:
                    await produce(there, "q", "z")

    asyncio.run(scenario())


def test_a_server_that_is_alone_owns_all_and_asks_nobody(tmp_path: Path) -> None:
    with running(tmp_path, lambda service: Fittings(pages=Metrics(service).pages())) as server:
        server.queue(requested_partitions=3)
        text = server.http.get("/metrics").text
        checks = server.http.get("/readyz?verbose").json()["checks"]
    samples = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")}
    assert abs(samples["sluiceway_clock_ahead_seconds"]) < 10
    assert samples["sluiceway_cluster_partitions"] == 3
    assert samples["sluiceway_cluster_ownership_holds"] == 1
    assert samples['sluiceway_cluster_instances{state="alive"}'] == 1
    assert not [name for name in samples if name.startswith("sluiceway_peer_requests")]
    assert "cluster" not in [check["name"] for check in checks]


def test_an_instance_whose_lease_has_run_out_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, (here, _)):
            await here.create_queue(QueueSpec("q", 2))
            await produce(here, "q", "x")
            assert [check.ok for check in await here.checks() if check.name == "cluster"] == [True]
            gate = lapse(rig, here)
            assert here.problems()[0].startswith("the meta store has not confirmed which partitions this instance owns")
            (found,) = here.instances.checks()
            assert (found.name, found.ok, found.detail) == ("cluster", False, here.problems()[0])
            assert value(await scraped(here), "cluster_ownership_holds") == 0
            gate.open()
            await eventually(lambda: here.instances.holds)
            assert not here.instances.problems()

    asyncio.run(scenario())


def test_lapses_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", parameters=MORTAL) as (rig, (only,)):
            await only.create_queue(QueueSpec("q", 1))
            gate = rig.metas["a"].hang()
            await eventually(lambda: only.instances.lapses == 1)
            gate.open()
            await eventually(lambda: only.instances.holds)

    asyncio.run(scenario())


def outside(members: int) -> Instances:
    """An instance that is no member of a cluster with so many."""
    ownership = Clustered("a", "http://a")
    ownership._member = GroupMember(MemoryMetaStore(), "partitions", lambda change: None, name="a")
    there = {f"i-{n}": group_records.MemberRecord(beat=1, lease_timeout=2_000) for n in range(members)}
    view = View(1, {})
    ownership.member.look = group_records.GroupView(view, 0, group_records.Resource(items=()), None, None, there, frozenset(), {})
    return Instances(ownership, list)


@pytest.mark.parametrize(
    ("members", "why"),
    [(3, "it is joining, or has left"), (group_records.MAX_MEMBERS, "it has 1000 members, which is the maximum")],
)
def test_an_instance_that_is_no_member_says_so(members: int, why: str) -> None:
    instances = outside(members)
    assert instances.problems() == [f"this instance is not a member of the cluster: {why}; it only forwards calls to the others"]
    assert [each.state for each in instances.cluster().instances if each.here] == ["joining"]


# -- counting ---------------------------------------------------------------------------------------------------------


class Scripted:
    """Gives, or raises, what it was told to."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.closed = False

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said

    async def close(self) -> None:
        self.closed = True


def test_each_way_to_end_is_counted_apart() -> None:
    async def scenario() -> None:
        ends = {
            "done": True,
            "not_here": SluicewayError("not_here", "x"),
            "refused": SluicewayError("unavailable", "x"),
            "unreachable": PeerRefusedError("x"),
            "unknown": PeerUnknownError("x"),
            "cancelled": asyncio.CancelledError(),
        }
        transport = Scripted(*ends.values(), True, Leased([LeaseInfo(0, 1, 1, 0), LeaseInfo(1, 1, 1, 0)]))
        counted = CountedTransport(transport)
        for outcome, said in ends.items():
            if isinstance(said, BaseException):
                with pytest.raises(type(said)):
                    await counted.ask("a", Ask("i", Count()), 1)
            else:
                assert await counted.ask("a", Ask("i", Count()), 1) is said
            assert counted.calls["count", outcome] == 1
        await counted.ask("a", Learn(1), 1)
        await counted.ask("a", Poll((), 1), 1)
        assert set(counted.calls) == {*(("count", outcome) for outcome in ends), ("learn", "done"), ("poll", "done")}
        assert counted.seconds.keys() == {"count", "learn", "poll"}
        assert counted.leases == 2
        await counted.close()
        assert transport.closed

    asyncio.run(scenario())
