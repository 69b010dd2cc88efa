"""Instances in zones: their queues are spread over them, and what a lost zone had is served by the others."""

from __future__ import annotations

from pathlib import Path

from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import MORTAL, Cluster, cluster, shares
from tests.instance.instance_rig import eventually, produce, spec

ZONES = {"a": "east", "b": "east", "c": "west"}


def parts(made: Cluster, queue: str) -> dict[str, int]:
    """How many of the queue's partitions each zone serves."""
    found = dict.fromkeys(ZONES.values(), 0)
    for name, service in made.wires.instances.items():
        found[ZONES[name]] += len(shares(service, queue))
    return found


async def until(made: Cluster, queue: str, wanted: dict[str, int]) -> None:
    await eventually(lambda: parts(made, queue) == wanted)


@driven
async def test_a_queue_is_spread_over_zones_and_survives_the_loss_of_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, parameters=MORTAL) as (made, _):
        services = [await made.start(name, zone) for name, zone in ZONES.items()]
        await services[0].create_queue(spec("q", 6))
        await until(made, "q", {"east": 4, "west": 2})
        shown = {each.address: each.zone for each in services[0].instances.cluster().instances}
        assert shown == ZONES
        for name in ("a", "b"):
            made.die(name)
        await until(made, "q", {"east": 0, "west": 6})
        assert (await produce(services[2], "q", "x")).items == 1
