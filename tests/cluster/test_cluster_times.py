"""The times by which a cluster goes, and how it divides its partitions: changed while it runs, by call, configuration, or a start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.cluster.ownership import KEYS, Clustered
from sluiceway.core.group.group_records import BOUNDS, LOAD_MOVES, Parameters, Resource, with_times
from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.configuration import CLUSTER_TIMES, ClusterSettings, Configuration
from sluiceway.ports.meta_store import MetaUnknownError
from tests.cluster.cluster_rig import STEADY, Cluster, Gate, cluster, shares
from tests.instance.instance_rig import eventually, lease, payloads, produce, spec

LONGER = {"lease_timeout": 90_000, "member_timeout": 120_000}


def seen(service: Service) -> tuple[str, Parameters]:
    look = service.ownership.look
    assert look is not None
    assert look.resource is not None
    return look.resource.strategy, look.resource.parameters


async def recorded(made: Cluster) -> Resource:
    return msgspec.json.decode((await made.meta.read([KEYS.resource])).entries[KEYS.resource].value, type=Resource)


def test_all_instances_follow_and_a_round_comes_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("q", 4))
            await produce(a, "q", "x")
            before = (await b.instances.rounds(1))[0].number
            told = await b.instances.redefine(LONGER, None, SYSTEM)
            assert told.parameters == msgspec.structs.asdict(with_times(STEADY, LONGER))
            await eventually(lambda: {*map(seen, (a, b))} == {("rounds", with_times(STEADY, LONGER))})

            async def follows() -> bool:
                rounds = await a.instances.rounds(100)
                return any(each.number > before and each.trigger == "the resource has changed" for each in rounds)

            while not await follows():
                await a.ownership.changed(100)
            # What a member shows of itself is by the new times, too, and nothing has stopped meanwhile.
            look = a.ownership.look
            assert look is not None
            await eventually(lambda: {each.lease_timeout for each in (a.ownership.look or look).members.values()} == {90_000})
            assert sorted(shares(a, "q") + shares(b, "q")) == [0, 1, 2, 3]
            assert payloads((await lease(b, "q")).batches) == ["x"]
            (entry,) = [each for each in await a.audit.list(limit=10) if each.action == "instances.update"]
            assert entry.detail == {name: {"from": getattr(STEADY, name), "to": LONGER[name]} for name in LONGER}

    asyncio.run(run())


def test_the_strategy_changes_while_all_run(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            await a.create_queue(spec("q", 4))
            era = a.ownership.era
            assert (await a.instances.redefine({}, "claims", SYSTEM)).strategy == "claims"
            await eventually(lambda: seen(b)[0] == "claims" and sorted(shares(a, "q") + shares(b, "q")) == [0, 1, 2, 3])
            assert b.ownership.era == era + 1

    asyncio.run(run())


def test_the_bound_of_moves_for_loads_changes_while_all_run(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (_, (a, b)):
            assert a.instances.cluster().load_moves == LOAD_MOVES
            assert (await b.instances.redefine({}, None, SYSTEM, 2)).load_moves == 2
            await eventually(lambda: a.instances.cluster().load_moves == 2)
            (entry,) = [each for each in await a.audit.list(limit=10) if each.action == "instances.update"]
            assert entry.detail == {"load_moves": {"from": LOAD_MOVES, "to": 2}}
            # Other changes leave it as it is.
            assert (await b.instances.redefine({"settle_timeout": 30}, None, SYSTEM)).load_moves == 2

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["its process dies", "its answer is lost", "its caller goes"])
def test_a_change_has_its_audit_entry_however_the_call_ends(tmp_path: Path, ends: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            landed = Gate(only=lambda puts: KEYS.resource in puts)

            async def lost(puts: Mapping[str, bytes]) -> None:
                if KEYS.resource in puts:
                    raise MetaUnknownError("the answer was lost")

            made.metas["a"].on_committed = lost if ends == "its answer is lost" else landed
            work = asyncio.create_task(a.instances.redefine({}, None, SYSTEM, 2))
            if ends == "its answer is lost":
                with pytest.raises(SluicewayError) as failed:
                    await work
                assert failed.value.code == "outcome_unknown"
            else:
                await landed.reached.wait()
                if ends == "its process dies":
                    made.die("a")
                work.cancel()
            await eventually(lambda: b.instances.cluster().load_moves == 2)
            (entry,) = [each for each in await b.audit.list(limit=10) if each.action == "instances.update"]
            assert entry.detail == {"load_moves": {"from": LOAD_MOVES, "to": 2}}

    asyncio.run(run())


def test_an_instance_that_starts_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            await a.instances.redefine({"settle_timeout": 30}, None, SYSTEM)
            # As it is without any of it in its configuration.
            await Clustered("b", "b")._define(made.meta)
            assert (await recorded(made)).parameters == with_times(STEADY, {"settle_timeout": 30})
            await Clustered("b", "b", times=LONGER)._define(made.meta)
            now = await recorded(made)
            assert (now.strategy, now.parameters) == ("rounds", with_times(STEADY, {"settle_timeout": 30, **LONGER}))

    asyncio.run(run())


def test_a_reload_changes_what_has_changed(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            old = Configuration(backends=made.backends)
            new = msgspec.structs.replace(old, cluster=ClusterSettings(lease_timeout=90_000, member_timeout=120_000, strategy="claims"))
            assert {"cluster.lease_timeout", "cluster.member_timeout", "cluster.strategy"} <= {*(await a.reconfigure(old, new))}
            now = await recorded(made)
            assert (now.strategy, now.parameters) == ("claims", with_times(STEADY, LONGER))
            # What is taken out of the file stays as it is.
            await a.reconfigure(new, old)
            assert await recorded(made) == now

    asyncio.run(run())


def test_a_reload_tells_what_is_in_force_if_the_times_could_not_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            old = Configuration(backends=made.backends)
            changed = {"default": msgspec.structs.replace(made.backends["default"], partition_affinity=0.5)}
            new = msgspec.structs.replace(old, backends=changed, cluster=ClusterSettings(lease_timeout=90_000, member_timeout=120_000))

            async def fails(*_: object) -> None:
                raise SluicewayError("unavailable", "the meta store cannot be reached")

            with monkeypatch.context() as patch:
                patch.setattr(a.instances, "redefine", fails)
                with pytest.raises(SluicewayError, match=r"reload again .*; changes of backends are in force"):
                    await a.reconfigure(old, new)
            assert [each.partition_affinity for each in a.backends()] == [0.5]
            await a.reconfigure(old, new)
            assert (await recorded(made)).parameters == with_times(STEADY, LONGER)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("times", "field"),
    [
        ({"lease_timeout": 99}, "lease_timeout"),
        ({"heartbeat_interval": 900_001}, "heartbeat_interval"),
        ({"settle_timeout": 0}, "settle_timeout"),
        ({"beat_interval": 31_000}, "lease_timeout"),
        ({"lease_timeout": 70_000}, "member_timeout"),
    ],
)
def test_a_time_that_cannot_be_is_named_and_nothing_changes(tmp_path: Path, times: dict[str, int], field: str) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a") as (made, (a,)):
            before = await recorded(made)
            with pytest.raises(SluicewayError) as refused:
                await a.instances.redefine(times, None, SYSTEM)
            assert (refused.value.code, refused.value.field) == ("invalid_request", field)
            assert await recorded(made) == before

    asyncio.run(run())


def test_the_record_stays_one_that_earlier_releases_read(tmp_path: Path) -> None:
    """They refuse a time that they do not know: so there is none beside these, and the record has nothing else that is new."""
    assert {*CLUSTER_TIMES} == {*BOUNDS} == {*Parameters.__struct_fields__}
    fields = msgspec.json.decode(msgspec.json.encode(Resource(items=("q.0",), parameters=with_times(STEADY, LONGER))))
    assert {*fields} == {"items", "parameters", "strategy", "era", "version", "limits", "load_moves", "pins"}
    assert {*fields["parameters"]} == {*BOUNDS}


def configured(tmp_path: Path, text: str) -> Any:
    file = tmp_path / "sluiceway.toml"
    file.write_text(text)
    return load(file, {}, {}).configuration.cluster


def test_times_are_keys_of_the_configuration(tmp_path: Path) -> None:
    found = configured(tmp_path, '[cluster]\nlease_timeout = "5s"\nmember_timeout = "8s"\n')
    assert found.times == {"lease_timeout": 5_000, "member_timeout": 8_000}
    with pytest.raises(SluicewayError) as refused:
        configured(tmp_path, '[cluster]\nlease_timeout = "6s"\nmember_timeout = "7s"\n')
    assert refused.value.field == "cluster.member_timeout"
