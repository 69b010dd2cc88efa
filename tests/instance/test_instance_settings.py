"""Settings that change while a queue serves: durable, checked against other queues, and one change after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.requests import RELEASE, Clear, Disposition, QueuePatch, QueueSpec
from sluiceway.ports.meta_store import ConflictError, MetaUnknownError, Stamp
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import down, eventually, lease, payloads, produce, serving, settle, spec, total

SETTINGS: dict[str, Any] = {
    "lease_timeout": 5_000,
    "max_lease_timeout": 6_000,
    "max_attempts": 3,
    "dead_queue": "dead",
    "expire_timeout": 7_000,
    "retry_backoff": RetryBackoff(1, 2),
    "idempotency_window": 8_000,
    "write_timeout": 9_000,
    "logical_queues": 3,
    "reference": "mine",
}


@driven
async def test_a_queue_is_created_with_all_that_was_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        created = await service.create_queue(QueueSpec("q", 2, **SETTINGS))
        assert {name: getattr(created, name) for name in SETTINGS} == SETTINGS
        assert created.version == 1
    async with serving(tmp_path) as (service, _):
        assert service.queue("q") == created


@driven
async def test_a_change_is_durable_and_changes_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        before = await service.create_queue(spec("q", 2))
        for name, value in SETTINGS.items():
            after = await service.update_queue("q", QueuePatch({name: value}, before.version))
            assert (getattr(after, name), after.version) == (value, before.version + 1)
            same = {field for field in after.__struct_fields__ if getattr(after, field) == getattr(before, field)}
            assert {name, "version"} <= set(after.__struct_fields__) - same <= {name, "version", "updated_at"}
            assert service.queue("q") == after
            before = after
    async with serving(tmp_path) as (service, _):
        assert service.queue("q") == before
        assert (await lease(service, "q")).leases == []


@driven
async def test_a_change_takes_effect_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        await service.update_queue("q", QueuePatch({"max_attempts": 1, "dead_queue": "dead"}))
        await settle(service, "q", await lease(service, "q"), Disposition("retry"))
        await eventually(lambda: total(service, "dead") == 1)


@pytest.mark.parametrize(
    ("queue", "patch", "code"),
    [
        ("none", QueuePatch({"reference": "x"}), "queue_not_found"),
        ("q", QueuePatch({"reference": "x"}, version=2), "version_conflict"),
        ("q", QueuePatch({"dead_queue": "q"}), "invalid_request"),
        ("q", QueuePatch({"dead_queue": "none"}), "invalid_request"),
        ("dead", QueuePatch({"dead_queue": "source"}), "invalid_request"),
        ("q", QueuePatch({"max_lease_timeout": 59_999}), "invalid_request"),
        ("q", QueuePatch({"lease_timeout": 31 * 86_400_000}), "invalid_request"),
    ],
)
@driven
async def test_what_cannot_be_changed_to(tmp_path: Path, queue: str, patch: QueuePatch, code: str) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("source", dead_queue="dead"))
        await service.create_queue(spec("q"))
        before = service.queues()
        with pytest.raises(SluicewayError) as refused:
            await service.update_queue(queue, patch)
        assert refused.value.code == code
        assert service.queues() == before


@driven
async def test_a_dead_queue_that_stays_is_no_obstacle_to_other_changes(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"))
        await service.create_queue(spec("q", dead_queue="dead"))
        await service.update_queue("dead", QueuePatch({"reference": "x"}))
        assert (await service.update_queue("q", QueuePatch({"dead_queue": "dead", "reference": "y"}))).dead_queue == "dead"
        assert (await service.update_queue("q", QueuePatch({"dead_queue": None}))).dead_queue is None
        await service.delete_queue("dead", False)


@driven
async def test_pauses_at_the_same_time_do_not_undo_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await asyncio.gather(service.pause("q", ["produce"], True), service.pause("q", ["lease"], True))
        assert service.queue("q").paused == ("lease", "produce")
        await asyncio.gather(service.pause("q", ["produce"], False), service.pause("q", ["lease"], False))
        assert service.queue("q").paused == ()


@driven
async def test_a_pause_holds_over_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        await service.pause("q", ["produce", "lease"], True)
    async with serving(tmp_path) as (service, _):
        with pytest.raises(SluicewayError) as refused:
            await produce(service, "q", "b")
        assert refused.value.code == "queue_paused"
        assert (await lease(service, "q")).leases == []
        waiting = asyncio.ensure_future(lease(service, "q", timeout=60_000))
        await eventually(lambda: service.stats("q").lease_waiting == 1)
        await service.pause("q", ["lease"], False)
        assert payloads((await waiting).batches) == ["a"]


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("readable", [True, False])
@driven
async def test_a_change_that_ended_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool, readable: bool) -> None:
    """What is recorded holds, and the next change builds on it."""
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit, read, refresh = service.meta.commit, service.meta.read, service.meta.refresh

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            if landed:
                await commit(*arguments, **fields)
            if not readable:
                monkeypatch.setattr(service.meta, "read", down)
                monkeypatch.setattr(service.meta, "refresh", down)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.update_queue("q", QueuePatch({"reference": "new"}))
        assert unknown.value.code == "outcome_unknown"
        if not readable:
            with pytest.raises(SluicewayError) as unavailable:
                await service.update_queue("q", QueuePatch({"max_attempts": 4}))
            # Without a look it does not know of the first change, which is in the way.
            assert unavailable.value.code == ("unavailable" if landed else "outcome_unknown")
        elif landed:
            assert service.queue("q").reference == "new"
        monkeypatch.setattr(service.meta, "commit", commit)
        monkeypatch.setattr(service.meta, "read", read)
        monkeypatch.setattr(service.meta, "refresh", refresh)
        after = await service.update_queue("q", QueuePatch({"max_attempts": 4}))
        assert (after.reference, after.max_attempts, after.version) == ("new", 4, 3) if landed else ("", 4, 2)
    async with serving(tmp_path) as (service, _):
        assert service.queue("q") == after


@driven
async def test_a_change_by_another_process_in_between_is_a_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))

        async def conflict(*_: Any, **__: Any) -> Stamp:
            raise ConflictError

        monkeypatch.setattr(service.meta, "commit", conflict)
        with pytest.raises(SluicewayError) as refused:
            await service.update_queue("q", QueuePatch({"reference": "new"}))
        assert refused.value.code == "version_conflict"


@driven
async def test_clear_release_and_explain(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        first = await produce(service, "q", "a", "b", "c")
        leased = await lease(service, "q", 1)
        assert (await service.explain("q", 0, first.first_offset)).state == "leased"
        assert (await service.explain("q", 0, first.first_offset + 2)).ahead == 1
        cleared = await service.clear("q", Clear(1_000))
        assert (cleared.ready, cleared.scheduled) == (2, 0)
        assert (await service.explain("q", 0, first.first_offset + 1)).state == "gone"
        assert (await settle(service, "q", leased, RELEASE)).released == 1
        assert payloads((await lease(service, "q")).batches) == ["a"]


@driven
async def test_setting_what_is_set_already_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        paused = await service.pause("q", ["lease"], True)
        assert (paused.paused, paused.version) == (("lease",), 2)
        assert await service.pause("q", ["lease"], True) == paused
        assert await service.update_queue("q", QueuePatch({"paused": ("lease",), "reference": ""}, 2)) == paused
        with pytest.raises(SluicewayError) as refused:
            await service.update_queue("q", QueuePatch({"reference": ""}, 1))
        assert refused.value.code == "version_conflict"
        assert (await service.pause("q", ["lease"], False)).version == 3


@driven
async def test_a_change_that_ended_unknown_and_is_repeated_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        commit, read, refresh = service.meta.commit, service.meta.read, service.meta.refresh

        async def cut_off(*arguments: Any, **fields: Any) -> Stamp:
            await commit(*arguments, **fields)
            monkeypatch.setattr(service.meta, "read", down)
            monkeypatch.setattr(service.meta, "refresh", down)
            raise MetaUnknownError("the answer was lost")

        monkeypatch.setattr(service.meta, "commit", cut_off)
        with pytest.raises(SluicewayError) as unknown:
            await service.pause("q", ["produce"], True)
        assert unknown.value.code == "outcome_unknown"
        monkeypatch.setattr(service.meta, "commit", commit)
        monkeypatch.setattr(service.meta, "read", read)
        monkeypatch.setattr(service.meta, "refresh", refresh)
        assert (await service.pause("q", ["produce"], True)).paused == ("produce",)
        assert service.queue("q").paused == ("produce",)
        with pytest.raises(SluicewayError) as refused:
            await produce(service, "q", "a")
        assert refused.value.code == "queue_paused"
