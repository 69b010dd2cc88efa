"""The audit trail: each change leaves one entry, in its own commit; what is listed, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.adapters.meta.memory import MemoryMetaStore
from sluiceway.adapters.meta.sqlite import SqliteMetaStore
from sluiceway.instance.configuration import load
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import AUDIT_ENTRIES, MAX_AUDIT_DETAIL_BYTES, MAX_AUDIT_TEXT
from sluiceway.local import audit_trail
from sluiceway.local.audit_trail import AUDIT, AuditTrail
from sluiceway.local.partition_openings import OPENED
from sluiceway.model.access import SYSTEM, Actor
from sluiceway.model.audit import AuditEntry, decode_entry
from sluiceway.model.requests import Clear, QueuePatch, Redrive, Redriven
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError, Stamp
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server.wiring import Assembly, Door
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import down, produce, serving, spec

ALICE = Actor("alice", "r-1")
CLEAR = Clear(10_000)


async def entries(service: Service) -> list[AuditEntry]:
    """Oldest first."""
    return list(reversed(await service.audit.list(1_000)))


@driven
async def test_every_change_leaves_one_entry_that_says_who_and_what(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("dead"), ALICE)
        await service.create_queue(spec("q", 2, dead_queue="dead"), ALICE)
        await service.update_queue("q", QueuePatch({"lease_timeout": 120_000, "reference": "mine"}), ALICE)
        await service.pause("q", ["lease"], True, ALICE)
        await service.pause("q", ["lease"], False, ALICE)
        await produce(service, "q", "a", "b")
        await service.clear("q", CLEAR, ALICE)
        await service.redrive("dead", Redrive(10_000, 5, target="q"), ALICE)
        await service.delete_queue("q", True, ALICE)
        found = await entries(service)
        assert {(entry.actor, entry.request_id) for entry in found} == {ALICE}
        assert [(entry.action, entry.queue_name) for entry in found] == [
            ("queues.create", "dead"),
            ("queues.create", "q"),
            ("queues.update", "q"),
            ("queue.pause", "q"),
            ("queue.resume", "q"),
            ("queue.clear", "q"),
            ("queue.redrive", "dead"),
            ("queues.delete", "q"),
        ]
        details = [entry.detail for entry in found]
        assert (details[1]["requested_partitions"], details[1]["dead_queue"], details[1]["lease_timeout"]) == (2, "dead", "1m")
        assert details[2:] == [
            {"lease_timeout": {"from": "1m", "to": "2m"}, "reference": {"from": "", "to": "mine"}},
            {"paused": {"from": [], "to": ["lease"]}},
            {"paused": {"from": ["lease"], "to": []}},
            {"ready": True, "scheduled": False, "outcome": "done", "result": {"ready": 2, "scheduled": 0}},
            {"limit": 5, "target": "q", "dry_run": False, "outcome": "done", "result": {"matched": 0, "redriven": 0, "targets": {}}},
            {"force": True},
        ]
        assert [entry.id for entry in found] == sorted(entry.id for entry in found)


@driven
async def test_entries_outlive_the_process(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        before = await entries(service)
        assert [entry.actor for entry in before] == [SYSTEM.name]
    async with serving(tmp_path) as (service, _):
        assert await entries(service) == before
        await service.delete_queue("q", False)
        assert (await entries(service))[:1] == before


@driven
async def test_what_changes_nothing_leaves_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        before = await entries(service)
        refused: list[Awaitable[Any]] = [
            service.create_queue(spec("q")),
            service.create_queue(spec("r", dead_queue="none")),
            service.update_queue("q", QueuePatch({"reference": "r"}, version=7)),
            service.update_queue("none", QueuePatch({"reference": "r"})),
            service.delete_queue("q", False),
            service.clear("none", CLEAR),
            service.redrive("q", Redrive(10_000, 1, target="none")),
        ]
        for change in refused:
            with pytest.raises(SluicewayError):
                await change
        await service.update_queue("q", QueuePatch({"reference": ""}))
        await service.redrive("q", Redrive(10_000, 1, target="q2", dry_run=True, reason="nothing has this reason"))
        assert await entries(service) == before


class Failing(MemoryMetaStore):
    """Fails the next commit, before or after it is done, of those that are not about opening a partition."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Exception | None = None
        self.after: Exception | None = None

    async def commit(
        self,
        checks: Mapping[str, Stamp | None] | None = None,
        unchanged: Mapping[str, Stamp] | None = None,
        puts: Mapping[str, bytes] | None = None,
        deletes: Sequence[str] = (),
        *,
        hint: bool = True,
    ) -> Stamp:
        if puts and all(key.startswith(OPENED) for key in puts):
            return await super().commit(checks, unchanged, puts, deletes, hint=hint)
        before, after, self.before, self.after = self.before, self.after, None, None
        if before is not None:
            raise before
        stamp = await super().commit(checks, unchanged, puts, deletes, hint=hint)
        if after is not None:
            raise after
        return stamp


@driven
@pytest.mark.parametrize("landed", [False, True])
async def test_a_change_that_ends_unknown_has_its_entry_exactly_if_it_landed(tmp_path: Path, monkeypatch: Any, landed: bool) -> None:
    meta = Failing()
    monkeypatch.setattr("sluiceway.instance.service.SqliteMetaStore", lambda _: meta)

    def fail() -> None:
        meta.before, meta.after = (None, MetaUnknownError("cut off")) if landed else (MetaUnknownError("cut off"), None)

    async def changed(change: Callable[[], Awaitable[Any]], there: Callable[[], Any]) -> None:
        actions = [entry.action for entry in await entries(service)]
        was = there()
        fail()
        with pytest.raises(SluicewayError, match="did not confirm the change"):
            await change()
        assert (there() != was) == landed
        assert len(await entries(service)) == len(actions) + landed

    async with serving(tmp_path) as (service, _):
        # The trail looks at its first entry for old ones, in a commit of its own if there are any.
        await service.create_queue(spec("first"))
        await changed(lambda: service.create_queue(spec("q")), lambda: len(service.queues()))
        if not landed:
            await service.create_queue(spec("q"))
        await changed(lambda: service.update_queue("q", QueuePatch({"reference": "r"})), lambda: service.queue("q").reference)
        await changed(lambda: service.pause("q", ["lease"], True), lambda: service.queue("q").paused)
        fail()
        with pytest.raises(SluicewayError, match="did not confirm the change"):
            await service.delete_queue("q", True)
        assert [entry.action for entry in await entries(service)].count("queues.delete") == landed
        assert ("queue/q" in (await meta.read(["queue/q"])).entries) == (not landed)


@driven
async def test_a_conflict_leaves_no_entry_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    meta = Failing()
    monkeypatch.setattr("sluiceway.instance.service.SqliteMetaStore", lambda _: meta)
    async with serving(tmp_path) as (service, _):
        await service.create_queue(spec("q"))
        meta.before = ConflictError("queue/q has changed")
        await service.update_queue("q", QueuePatch({"reference": "r"}))
        assert [entry.action for entry in await entries(service)] == ["queues.create", "queues.update"]


@driven
async def test_a_clear_that_may_have_happened_is_noted_as_unknown(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        store.die()
        with pytest.raises(SluicewayError) as raised:
            await service.clear("q", Clear(200))
        assert raised.value.kind.status >= 500
        last = (await entries(service))[-1]
        assert (last.action, last.detail["outcome"], last.detail["code"]) == ("queue.clear", "unknown", raised.value.code)


@driven
async def test_a_clear_whose_caller_goes_away_is_noted(tmp_path: Path) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(_: object) -> None:
        begun.set()
        await go.wait()

    async with serving(tmp_path) as (service, store):
        await service.create_queue(spec("q"))
        await produce(service, "q", "a")
        store.on_apply = slow
        call = asyncio.ensure_future(service.clear("q", CLEAR, ALICE))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        go.set()
        await service.audit.close()
        last = (await entries(service))[-1]
        assert (last.actor, last.action, last.detail["outcome"]) == ("alice", "queue.clear", "unknown")


@driven
async def test_an_entry_that_cannot_be_written_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    meta = Failing()
    trail = AuditTrail(meta)
    meta.before = MetaUnknownError("cut off")
    await trail.record("queue.clear", ALICE, "q", {"outcome": "done"})
    assert "alice" in caplog.text
    assert "queue.clear" in caplog.text
    await trail.close()


class Silent(MemoryMetaStore):
    """Does not answer commits before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def commit(self, *given: Any, **named: Any) -> Stamp:
        await self.answers.wait()
        return await super().commit(*given, **named)


@driven
async def test_a_change_that_is_made_does_not_wait_for_a_meta_store_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "RECORD_TIMEOUT", 10)
    meta = Silent()
    trail = AuditTrail(meta)
    await trail.record("storage/items.import", ALICE, "q")
    assert await trail.list(1) == []
    meta.answers.set()
    await trail.close()
    assert [entry.action for entry in await trail.list(10)] == ["storage/items.import"]


async def trail_of(meta: MetaStore) -> list[Mapping[str, Any]]:
    """The details of all entries, oldest first."""
    return [entry.detail for entry in (await AuditTrail(meta).list(100))[::-1]]


@driven
async def test_a_change_has_its_entry_before_it_is_made() -> None:
    meta = MemoryMetaStore()
    trail = AuditTrail(meta)

    async def change() -> int:
        assert await trail_of(meta) == [{"items": 3, "outcome": "begun"}]
        return 3

    assert await trail.recorded("storage/items.delete", ALICE, "q", {"items": 3}, change) == 3
    assert await trail_of(meta) == [{"items": 3, "outcome": "done", "result": 3}]
    await trail.close()


@driven
async def test_the_entry_of_a_change_with_a_large_result_says_that_it_is_done() -> None:
    """A redrive of a dead queue that many queues share."""
    meta = MemoryMetaStore()
    trail = AuditTrail(meta)

    async def change() -> Redriven:
        return Redriven(500, 500, {f"a-queue-of-some-team-{number}": 1 for number in range(500)})

    await trail.recorded("queue.redrive", ALICE, "dead", {"limit": 1_000}, change)
    (detail,) = await trail_of(meta)
    assert detail["outcome"] == "done"
    assert set(detail) == {"outcome", "left_out"}
    await trail.close()


@driven
@pytest.mark.parametrize("landed", [False, True])
async def test_a_change_whose_end_is_not_recorded_stays_begun_or_is_done(landed: bool, caplog: pytest.LogCaptureFixture) -> None:
    meta = Failing()
    trail = AuditTrail(meta)

    async def change() -> int:
        meta.before, meta.after = (None, MetaUnknownError("cut off")) if landed else (MetaUnknownError("cut off"), None)
        return 3

    assert await trail.recorded("queue.redrive", ALICE, "q", {}, change) == 3
    assert [detail["outcome"] for detail in await trail_of(meta)] == ["done" if landed else "begun"]
    assert "queue.redrive" in caplog.text
    await trail.close()


@driven
@pytest.mark.parametrize("fault", ["refused", "lost", "unheard"])
async def test_without_an_entry_nothing_is_changed(fault: str) -> None:
    meta = Failing()
    trail = AuditTrail(meta)
    # The trail looks at its first entry for old ones.
    await trail.record("first", ALICE)
    meta.before = {"refused": StoreUnavailableError("away"), "lost": MetaUnknownError("cut off")}.get(fault)
    meta.after = MetaUnknownError("cut off") if fault == "unheard" else None

    async def change() -> None:
        pytest.fail("it was made")

    with pytest.raises(SluicewayError, match="nothing was changed") as raised:
        await trail.recorded("queue.clear", ALICE, "q", {}, change)
    assert raised.value.code == "unavailable"
    await trail.close()
    assert await trail_of(meta) == [{}]


@driven
async def test_an_entry_that_comes_too_late_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "RECORD_TIMEOUT", 10)
    meta = Silent()
    trail = AuditTrail(meta)

    async def change() -> None:
        pytest.fail("it was made")

    with pytest.raises(SluicewayError, match="nothing was changed"):
        await trail.recorded("queue.clear", ALICE, "q", {}, change)
    gone = asyncio.ensure_future(trail.recorded("queue.clear", ALICE, "q", {}, change))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    meta.answers.set()
    await trail.close()
    assert await trail_of(meta) == []


@driven
async def test_a_change_that_is_refused_leaves_no_entry_and_one_that_fails_says_unknown() -> None:
    meta = MemoryMetaStore()
    trail = AuditTrail(meta)

    async def fails(code: str) -> None:
        raise SluicewayError(code, "so it is")

    # An instance that has too many requests says nothing of what the others have cleared.
    failed = ("unavailable", "too_many_requests")
    for code in ("queue_not_found", *failed):
        with pytest.raises(SluicewayError, match="so it is"):
            await trail.recorded("queue.clear", ALICE, "q", {"ready": True}, partial(fails, code))
    assert await trail_of(meta) == [{"ready": True, "outcome": "unknown", "code": code} for code in failed]
    await trail.close()


async def filled(meta: MetaStore, count: int, keep: int = AUDIT_ENTRIES) -> AuditTrail:
    trail = AuditTrail(meta, keep)
    for number in range(count):
        await trail.record(f"action-{number % 2}", ALICE, f"q{number % 3}", {"number": number})
    return trail


@driven
async def test_pages_are_newest_first_and_whole_whatever_comes_meanwhile() -> None:
    meta = MemoryMetaStore()
    trail = await filled(meta, 25)
    seen: list[AuditEntry] = []
    pivot = ""
    while page := await trail.list(7, pivot):
        seen += page
        pivot = page[-1].id
        await trail.record("later", ALICE)
    assert [entry.detail["number"] for entry in seen] == list(range(24, -1, -1))
    await trail.close()


@driven
async def test_a_list_can_be_of_one_queue_and_of_one_action() -> None:
    trail = await filled(MemoryMetaStore(), 12)
    assert [entry.detail["number"] for entry in await trail.list(100, queue_name="q1")] == [10, 7, 4, 1]
    assert [entry.detail["number"] for entry in await trail.list(2, queue_name="q1", action="action-1")] == [7, 1]
    await trail.close()


@driven
async def test_the_ids_of_several_writers_differ_and_sort_by_time(tmp_path: Path) -> None:
    stores = [SqliteMetaStore(tmp_path / "meta.sqlite") for _ in range(2)]
    trails = [AuditTrail(store) for store in stores]
    await asyncio.gather(*(trail.record("a", ALICE) for trail in trails for _ in range(50)))
    found = await trails[0].list(1_000)
    assert len({entry.id for entry in found}) == 100
    assert [entry.at for entry in found] == sorted((entry.at for entry in found), reverse=True)
    for trail, store in zip(trails, stores, strict=True):
        await trail.close()
        await store.close()


@driven
async def test_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_trail, "AUDIT_TRIM_BATCH", 3)
    monkeypatch.setattr(audit_trail, "TRIM_EVERY", 20)
    meta = MemoryMetaStore()
    trail = await filled(meta, 60, keep=10)
    await trail.close()
    kept = len((await meta.read(prefixes=[AUDIT])).entries)
    assert 10 <= kept <= 10 + 20
    await trail.trim()
    assert [entry.detail["number"] for entry in await trail.list(1_000)] == list(range(59, 49, -1))


@driven
async def test_how_many_are_kept_is_configured_and_can_change(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _):
        assembly = Assembly(service, load(environment={}, flags={"server.audit_entries": "200"}), Door(keys=False))
        assert service.audit.keep == 200
        # As a reload does it.
        assembly.reloader._apply(load(environment={}, flags={"server.audit_entries": "300"}).configuration)
        assert service.audit.keep == 300
        for wrong in ("99", "100001"):
            with pytest.raises(SluicewayError, match="audit_entries"):
                load(environment={}, flags={"server.audit_entries": wrong})


@driven
async def test_what_is_new_since_a_time_is_found_without_the_rest() -> None:
    reads: list[Sequence[str]] = []

    class Counting(MemoryMetaStore):
        async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> Any:
            reads.append(prefixes)
            return await super().read(keys, prefixes)

    meta = Counting()
    trail = await filled(meta, 10)
    all_of_them = (await trail.list(1_000))[::-1]
    reads.clear()
    assert await trail.since(all_of_them[4].at) == all_of_them[4:]
    assert [AUDIT in prefixes for prefixes in reads] == [False]
    assert await trail.since(0) == all_of_them
    assert [AUDIT in prefixes for prefixes in reads] == [False, True]
    await trail.close()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_a_detail_is_bounded(value: Any) -> None:
    async def made() -> bytes:
        trail = AuditTrail(MemoryMetaStore())
        _, data = trail.entry("a", ALICE, "q", {"value": value, "more": [value] * 20})
        await trail.close()
        return data

    data = asyncio.run(made())
    assert len(data) < MAX_AUDIT_DETAIL_BYTES + 512
    assert decode_entry(data).detail.keys() in ({"left_out"}, {"value", "more"})


@driven
async def test_a_long_text_is_cut_and_a_large_detail_left_out() -> None:
    trail = AuditTrail(MemoryMetaStore())
    cut = decode_entry(trail.entry("a", ALICE, "q", {"text": "x" * 1_000})[1])
    assert cut.detail == {"text": "x" * MAX_AUDIT_TEXT + "…"}
    large = decode_entry(trail.entry("a", ALICE, "q", {f"t{number}": "x" * 200 for number in range(100)})[1])
    assert set(large.detail) == {"left_out"}
    await trail.close()


@driven
async def test_a_meta_store_that_cannot_be_read_is_said() -> None:
    class Down(MemoryMetaStore):
        async def read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> Any:
            await down()

    with pytest.raises(SluicewayError, match="meta store cannot be read") as raised:
        await AuditTrail(Down()).list(1)
    assert raised.value.code == "unavailable"
