"""The compatibility level: who may join at which, how it is raised, and what becomes of an instance that does not understand it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.cluster import compatibility_level, ownership
from sluiceway.cluster.compatibility_level import begin_level
from sluiceway.cluster.ownership import GRANT, KEYS, take_grant
from sluiceway.core.group.group_records import GroupView, Keys, Level, MemberRecord, Resource, decode_member
from sluiceway.core.group.levels import admits, next_step, understood
from sluiceway.core.group.member import Member
from sluiceway.instance import upgrades
from sluiceway.instance.service import Service
from sluiceway.kernel.compatibility import NEWEST, OLDEST, UNRECORDED, Levels
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.access import SYSTEM
from sluiceway.model.meta import Entry, View
from sluiceway.testing.drive import driven
from tests.cluster.cluster_rig import MORTAL, cluster
from tests.instance.instance_rig import down, spec

OLD, NEW = Levels(NEWEST, NEWEST), Levels(NEWEST, NEWEST + 1)


def release(patch: pytest.MonkeyPatch, levels: Levels) -> None:
    """Instances that start from now on are of a release that understands these levels."""
    patch.setattr(ownership, "KNOWN", levels)
    patch.setattr(upgrades, "KNOWN", levels)
    patch.setattr(compatibility_level, "KNOWN", levels)


def look(level: Level | None, **members: Levels | None) -> GroupView:
    records = {name: MemberRecord(beat=1, lease_timeout=1, levels=levels) for name, levels in members.items()}
    view = View(7, {KEYS.level: Entry(b"", 5)})
    return GroupView(view, 0, None, None, None, records, frozenset(), {}, level=level)


# ---- decisions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "levels", "may"),
    [
        (Level(level=5), Levels(4, 5), True),
        (Level(level=5), Levels(5, 9), True),
        (Level(level=5), Levels(6, 7), False),
        (Level(level=5), Levels(3, 4), False),
        (Level(level=5, rising_to=6), Levels(4, 5), False),
        (Level(level=5, rising_to=6), Levels(5, 6), True),
        (None, Levels(4, 5), False),
        (None, None, True),
        (Level(level=5), None, True),
    ],
)
def test_who_may_join(level: Level | None, levels: Levels | None, may: bool) -> None:
    assert admits(level, levels) is may


def test_the_level_that_all_understand() -> None:
    assert understood(look(Level(level=1)), 3) == 3
    assert understood(look(Level(level=1), a=Levels(1, 2), b=Levels(1, 3)), 3) == 2
    assert understood(look(Level(level=1), a=None), 3) == 0


@pytest.mark.parametrize(
    ("before", "members", "after"),
    [
        (Level(level=1), {"a": Levels(1, 2)}, Level(level=1, rising_to=2)),
        (Level(level=1, rising_to=2), {"a": Levels(1, 2)}, Level(level=2)),
        (Level(level=1), {"a": Levels(1, 2), "b": Levels(1, 1), "c": None}, None),
        (Level(level=1, rising_to=2), {"a": Levels(1, 1)}, Level(level=1)),
        (Level(level=2, rising_to=3), {"a": Levels(1, 2)}, Level(level=2)),
        (Level(level=2), {"a": Levels(1, 2)}, None),
    ],
)
def test_each_step_towards_a_level(before: Level, members: dict[str, Levels | None], after: Level | None) -> None:
    writes = next_step(look(before, **members), KEYS, 2)
    if after is None:
        assert writes is None
    else:
        assert writes is not None
        assert writes.checks == {KEYS.level: 5}
        assert msgspec.json.decode(writes.puts[KEYS.level], type=Level) == after


def test_a_member_joins_by_a_commit_that_checks_the_level() -> None:
    keys = Keys("g")
    seen = GroupView(View(7, {keys.level: Entry(b"", 5)}), 0, Resource(items=()), None, None, {}, frozenset(), {}, level=Level(level=1))
    writes = Member(keys, "m", levels=Levels(1, 2), release="9.9").look(seen).writes
    assert writes is not None
    assert writes.checks == {keys.member("m"): None, keys.level: 5}
    record = decode_member(writes.puts[keys.member("m")], writes.puts[keys.about("m")])
    assert (record.levels, record.release) == (Levels(1, 2), "9.9")
    assert Member(keys, "m", levels=Levels(2, 3)).look(seen).writes is None


# ---- beginning ---------------------------------------------------------------------------------------------------------


def began(levels: Levels, patch: pytest.MonkeyPatch, meta: MemoryMetaStore) -> int:
    release(patch, levels)
    return asyncio.run(begin_level(meta))


def test_a_new_server_begins_at_the_newest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = MemoryMetaStore()
    assert began(NEW, monkeypatch, meta) == NEW.newest
    # And keeps it, so that the release before does not start on it.
    with pytest.raises(SluicewayError, match=f"of compatibility level {NEW.newest}, and .* understands {NEWEST}: install a later release"):
        began(OLD, monkeypatch, meta)


def test_data_from_before_levels_are_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = MemoryMetaStore()
    asyncio.run(take_grant(meta))
    assert began(Levels(UNRECORDED, UNRECORDED + 3), monkeypatch, meta) == UNRECORDED
    with pytest.raises(SluicewayError, match="start them with the release before this one, and run `sluiceway upgrade finalize` there"):
        began(Levels(UNRECORDED + 1, UNRECORDED + 1), monkeypatch, meta)


def test_nobody_of_the_release_before_starts_while_the_level_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = MemoryMetaStore()
    record = msgspec.json.encode(Level(level=NEWEST, rising_to=NEW.newest))
    asyncio.run(meta.commit(puts={KEYS.level: record, GRANT: b"1"}))
    assert began(NEW, monkeypatch, meta) == NEWEST
    with pytest.raises(SluicewayError, match=f"being raised to compatibility level {NEW.newest}.*again if it was interrupted"):
        began(OLD, monkeypatch, meta)


# ---- a server alone ----------------------------------------------------------------------------------------------------


def test_a_server_alone_goes_back_until_it_is_finalized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(levels: Levels) -> Service:
        release(monkeypatch, levels)
        service = Service(tmp_path)
        await service.start()
        return service

    async def story() -> None:
        service = await start(OLD)
        await service.stop()
        service = await start(NEW)
        assert service.ownership.level == NEWEST
        await service.stop()
        service = await start(OLD)
        await service.stop()
        service = await start(NEW)
        await service.upgrades.finalize(SYSTEM)
        assert service.ownership.level == NEW.newest
        found = await service.audit.list(2)
        assert [(each.action, each.detail) for each in found] == [
            ("upgrades.finalize", {"level": NEW.newest, "rising_to": 0}),
            ("upgrades.finalize", {"level": NEWEST, "rising_to": NEW.newest}),
        ]
        await service.stop()
        with pytest.raises(SluicewayError, match="install a later release"):
            await start(OLD)

    asyncio.run(story())


@driven
async def test_a_level_that_has_risen_is_not_refused_because_the_meta_store_goes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases were locked out, and the answer said that nothing was done."""
    release(monkeypatch, OLD)
    service = Service(tmp_path)
    await service.start()
    await service.stop()
    release(monkeypatch, NEW)
    service = Service(tmp_path)
    await service.start()
    commit = service.meta.commit

    async def commit_last(*args: Any, **named: Any) -> int:
        stamp = await commit(*args, **named)
        patch.setattr(service.meta, "read", down)
        return stamp

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.meta, "commit", commit_last)
        with pytest.raises(SluicewayError, match="run the command again") as raised:
            await service.upgrades.finalize(SYSTEM)
    assert raised.value.code == "outcome_unknown"
    await service.upgrades.finalize(SYSTEM)
    assert service.ownership.level == NEW.newest
    await service.stop()


# ---- a cluster ---------------------------------------------------------------------------------------------------------


def test_a_cluster_is_upgraded_instance_by_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        release(monkeypatch, OLD)
        async with cluster(tmp_path, "a", "b") as (made, _):
            await made.leave("a")
            release(monkeypatch, NEW)
            c = await made.start("c")
            info = c.instances.cluster()
            assert (info.level, info.reachable_level) == (NEWEST, NEWEST)
            assert {each.levels for each in info.instances} == {OLD, NEW}
            # b holds it back.
            await c.upgrades.finalize(SYSTEM)
            assert c.ownership.level == NEWEST
            await made.leave("b")
            # Back to the release before, and there again.
            release(monkeypatch, OLD)
            await made.start("d")
            await made.leave("d")
            release(monkeypatch, NEW)
            e = await made.start("e")
            await e.create_queue(spec("q", 2))
            await c.upgrades.finalize(SYSTEM)
            assert (c.ownership.level, c.instances.cluster().level) == (NEW.newest, NEW.newest)
            while e.ownership.level < NEW.newest:
                await e.ownership.changed(100)
            release(monkeypatch, OLD)
            with pytest.raises(SluicewayError, match="install a later release"):
                await made.start("f")
            made.services.pop()
            made.wires.instances.pop("f")

    asyncio.run(story())


def test_an_instance_that_comes_back_after_the_level_rose_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        release(monkeypatch, OLD)
        async with cluster(tmp_path, "a", "b", parameters=MORTAL) as (made, (a, b)):
            stopped = asyncio.Event()
            a.on_outdated = stopped.set
            # While it is frozen, it is given up, and the level rises.
            gate = made.metas["a"].hang()
            while len(b.instances.cluster().instances) > 1:
                await b.ownership.changed(100)
            raised = msgspec.json.encode(Level(level=NEW.newest))
            await made.meta.commit(puts={KEYS.level: raised})
            gate.open()
            await stopped.wait()
            assert a.outdated is not None
            assert a.outdated.field == "cluster.meta"
            assert not a.ownership.holds()

    asyncio.run(story())


def test_levels_are_known_in_order() -> None:
    assert UNRECORDED <= OLDEST <= NEWEST
