"""Partitions that are pinned to an instance or a zone: where they are, what is told of it, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluiceway.core.group.group_records import Pin
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.instances import PinInfo
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import Cluster, cluster, shares
from tests.instance.instance_rig import eventually, produce, spec


async def until(made: Cluster, name: str, number: int) -> None:
    """Until the instance serves that partition."""
    await eventually(lambda: number in shares(made.wires.instances[name], "q"))


@driven
async def test_a_pinned_partition_is_served_there_or_elsewhere_while_nobody_is_there(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (made, _):
        a, _b = await made.start("a", "east"), await made.start("b", "west")
        await a.create_queue(spec("q", 4))
        number = shares(a, "q")[0]
        await a.pin_partition("q", number, Pin(instance="b"))
        await until(made, "b", number)
        assert sorted(len(shares(each, "q")) for each in made.services) == [2, 2]
        why = await a.instances.why(a.queue("q"), number)
        assert why.reason.endswith("reason of the round: the resource has changed; pinned to instance b, where it is")
        assert (why.pinned_instance, why.pinned_zone) == ("b", "")
        assert a.instances.cluster().pins == [PinInfo("q", number, "b", "")]
        await made.leave("b")
        await until(made, "a", number)
        why = await a.instances.why(a.queue("q"), number)
        assert why.reason.endswith("; pinned to instance b, of which no instance is in the cluster now")
        assert (await produce(a, "q", "x")).items == 1
        await made.start("b", "west")
        await until(made, "b", number)
        # To where it is already, by its zone.
        await a.pin_partition("q", number, Pin(zone="east"), SYSTEM)
        await until(made, "a", number)
        await a.pin_partition("q", number, None)
        assert a.instances.cluster().pins == []
        trail = [each for each in await a.audit.list(limit=20) if each.action.startswith("partition.")]
        assert [(each.action, each.queue_name, each.detail) for each in trail] == [
            ("partition.unpin", "q", {"partition": number}),
            ("partition.pin", "q", {"partition": number, "to": "zone east"}),
            ("partition.pin", "q", {"partition": number, "to": "instance b"}),
        ]


@driven
async def test_what_cannot_be_pinned_is_refused_and_what_is_pinned_already_leaves_no_trace(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a") as (_, (a,)):
        await a.create_queue(spec("q", 2))
        refused_ones = ((0, Pin(instance="b"), "instance"), (0, Pin(zone="east"), "zone"), (2, Pin(instance="a"), "partition"))
        for number, where, field in refused_ones:
            with pytest.raises(SluicewayError) as refused:
                await a.pin_partition("q", number, where)
            assert (refused.value.code, refused.value.field) == ("invalid_request", field)
        # By the name that it has at this start, too.
        for name in (a.ownership.name, "a"):
            await a.pin_partition("q", 0, Pin(instance=name))
        await a.pin_partition("q", 1, None)
        assert a.instances.cluster().pins == [PinInfo("q", 0, "a", "")]
        assert [each.action for each in await a.audit.list(limit=20)].count("partition.pin") == 1
        await a.delete_queue("q", True)
        assert a.ownership.look is not None
        assert a.ownership.look.resource is not None
        assert a.ownership.look.resource.pins == {}


@driven
async def test_a_change_of_another_instance_meanwhile_is_kept(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, (a, b)):
        await a.create_queue(spec("q", 4))
        await asyncio.gather(
            *(each.pin_partition("q", number, Pin(instance="a")) for number, each in enumerate((a, b, a, b))),
            b.create_queue(spec("p", 2)),
        )
        await a.look_up("p")
        assert [each.partition for each in b.instances.cluster().pins] == [0, 1, 2, 3]
