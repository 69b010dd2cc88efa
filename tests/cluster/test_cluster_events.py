"""Events of a cluster: of queues whose partitions other instances have, and of the instances themselves."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sluiceway.contract.queue_stats import PartitionStats
from sluiceway.instance.event_feed import ELSEWHERE_AT_ONCE, Sight, Watch
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.instances import RoundInfo
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import cluster, put, shares
from tests.instance.instance_rig import eventually, spec
from tests.instance.test_events import Scene, record, told


def test_instances_that_come_and_go_and_rounds() -> None:
    def seen(round: RoundInfo | None, *names: str) -> Sight:
        return Sight({}, {}, {}, {name: f"http://{name}" for name in names}, round)

    begun, sealed, next_one = (RoundInfo(number, done, "why", ["a", "b"], 2, 4) for number, done in ((7, False), (7, True), (8, True)))
    told_of = {"round": 7, "trigger": "why", "participants": ["a", "b"], "moved": 2, "kept": 4}
    assert told(seen(None, "a"), seen(begun, "b")) == [
        ("instance.left", {"instance": "a", "address": "http://a"}),
        ("instance.joined", {"instance": "b", "address": "http://b"}),
    ]
    assert told(seen(begun), seen(sealed)) == told(seen(None), seen(sealed)) == [("round.sealed", told_of)]
    assert told(seen(sealed), seen(sealed)) == told(seen(sealed), seen(None)) == []
    assert told(seen(sealed), seen(next_one)) == [("round.sealed", {**told_of, "round": 8})]


def queues_elsewhere(scene: Scene, count: int) -> list[str]:
    names = [f"q{number:03d}" for number in range(count)]
    scene.records = [record(name) for name in names]
    scene.ready = dict.fromkeys(names, 0)
    scene.elsewhere = {name: PartitionStats(partition=0, ready=number) for number, name in enumerate(names)}
    return names


@driven
async def test_of_many_queues_that_others_have_some_are_asked_for_in_each_look_and_all_in_turn() -> None:
    scene = Scene()
    names = queues_elsewhere(scene, 2 * ELSEWHERE_AT_ONCE + 20)
    watch = Watch(scene)
    for look in range(1, 4):
        await watch.look()
        assert len(scene.asked) == look * ELSEWHERE_AT_ONCE
        # What was found earlier is still known.
        assert sorted(watch.counts) == names[: look * ELSEWHERE_AT_ONCE]
    assert set(scene.asked) == set(names)
    assert [watch.counts[name]["ready"] for name in names] == list(range(len(names)))
    scene.elsewhere[names[0]] = PartitionStats(partition=0, state="failed")
    await watch.look()
    await watch.look()
    found = [msgspec.json.decode(event.data) for event in watch.ring.after(0) or ()]
    assert [(each["queue_name"], each["state"]) for each in found] == [(names[0], "failed")]


@driven
async def test_who_reads_after_a_while_is_not_told_counts_of_before() -> None:
    scene = Scene()
    names = queues_elsewhere(scene, 2 * ELSEWHERE_AT_ONCE)
    watch = Watch(scene)
    await watch.look()
    await watch.look()
    assert sorted(watch.counts) == names
    async with watch.reading():
        await watch.begun()
        assert len(watch.counts) == ELSEWHERE_AT_ONCE


@driven
async def test_counts_do_not_fall_while_an_instance_does_not_answer() -> None:
    scene = Scene()
    (name,) = queues_elsewhere(scene, 1)
    scene.elsewhere[name] = PartitionStats(partition=0, ready=5)
    watch = Watch(scene)
    await watch.look()
    for silent in (PartitionStats(partition=0, state="unavailable"), SluicewayError("unavailable", "no answer"), TimeoutError()):
        scene.elsewhere[name] = silent
        await watch.look()
        assert watch.counts[name]["ready"] == 5
    assert [msgspec.json.decode(event.data)["state"] for event in watch.ring.after(0) or ()] == ["unavailable"]
    scene.elsewhere[name] = PartitionStats(partition=0, ready=4)
    await watch.look()
    assert watch.counts[name]["ready"] == 4


@driven
async def test_counts_stay_while_an_owner_does_not_answer_but_that_it_does_not_is_told() -> None:
    scene = Scene()
    scene.records, scene.ready = [record("q")], {"q": 0}
    watch = Watch(scene)
    seen: list[tuple[int, int]] = []
    for partition in (
        PartitionStats(partition=0, ready=5),
        PartitionStats(partition=0, state="unavailable"),
        PartitionStats(partition=0, state="error"),
        PartitionStats(partition=0, state="paused", ready=4),
    ):
        scene.elsewhere = {"q": partition}
        await watch.look()
        seen.append((watch.counts["q"]["ready"], watch.counts["q"]["not_served"]))
    assert seen == [(5, 0), (5, 1), (0, 1), (4, 0)]


@driven
async def test_an_instance_tells_of_the_whole_queue_and_of_the_cluster(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (made, services):
        await services[0].create_queue(spec("q", 4))
        await eventually(lambda: all(len(shares(service, "q")) == 2 for service in services))
        for number in range(4):
            await put(services[0], "q", number, "x")
        watches = [Watch(service) for service in services]
        for watch in watches:
            await watch.look()
            assert watch.counts["q"]["ready"] == 4
        other = await made.start("c")
        await eventually(lambda: all(len(service.instances.cluster().instances) == 3 for service in services))
        await eventually(lambda: sum(len(shares(service, "q")) for service in (*services, other)) == 4)
        await watches[0].look()
        name = other.ownership.name
        await made.leave("c")
        await eventually(lambda: all(len(shares(service, "q")) == 2 for service in services))
        await watches[0].look()
        assert watches[0].counts["q"]["ready"] == 4
        found = [(event.type, msgspec.json.decode(event.data)) for event in watches[0].ring.after(0) or ()]
        assert [(kind, data["instance"]) for kind, data in found if "instance" in data] == [
            ("instance.joined", name),
            ("instance.left", name),
        ]
        assert name in next(data for kind, data in found if kind == "round.sealed")["participants"]
        await services[0].audit.record("config.reload", SYSTEM, detail={"changed": ["log.level"], "instance": "a"})
        await watches[1].look()
        assert msgspec.json.decode((watches[1].ring.after(0) or [])[-1].data) == {"changed": ["log.level"], "instance": "a"}
