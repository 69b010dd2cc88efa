"""What the judge is told of real partitions, what instances tell each other, and who may see it."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from sluiceway.adapters import system
from sluiceway.adapters.storage.bucket_requests import META
from sluiceway.core.problems.thresholds import HELD_UP_AFTER, INTERVAL, STUCK_COMMIT
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.local.queue_sampling import sample_of
from sluiceway.model.bucket_prices import S3_STANDARD
from sluiceway.model.items import batch_from_rows
from sluiceway.model.outcomes import Outcome
from sluiceway.model.peers import ListProblems
from sluiceway.model.requests import DONE, RELEASE, Clear, Disposition, Lease, Produce, QueueSpec
from tests.cluster.cluster_rig import cluster, put, shares
from tests.instance.instance_rig import eventually, lease, produce, serving, settle, spec
from tests.server.server_guarded import guarded
from tests.server.server_process import wait_until

AHEAD = itertools.count(0, INTERVAL)
RETRY = Disposition("retry", retry_after=0)


async def look(service: Service, times: int = 8) -> None:
    """Samples as the watch takes them, on a clock that runs ahead, and never back."""
    for _ in range(times):
        await service.watch.look(system.now() + next(AHEAD))


def kinds(service: Service) -> list[tuple[str, str]]:
    return [(each.kind, each.subject) for each in service.watch.here().found]


def test_items_that_nobody_takes_are_found_and_dropped_ones_forgotten(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("dead"))
            await service.create_queue(spec("q", dead_queue="dead"))
            assert not service.watch.here().watched
            await produce(service, "q", *"abc")
            await produce(service, "dead", "x")
            await look(service)
            assert service.watch.here().watched
            assert kinds(service) == [("no_consumer", "q")], "a dead queue needs no consumer"
            assert "3 items ready" in service.watch.here().found[0].message
            assert service.watch.here("dead").found == ()
            await service.clear("q", Clear(5_000))
            await look(service)
            assert kinds(service) == []

    asyncio.run(scenario())


def test_a_bucket_that_throttles_is_told_by_its_share_of_refusals(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            backend, meta = (service.bucket_requests.of(name, S3_STANDARD) for name in ("cloud", META))
            # Long before, all went well.
            backend.outcomes["create", "ok"] += 1_000_000
            await look(service, 1)
            for _ in range(3):
                backend.outcomes["create", "ok"] += 3
                backend.outcomes["create", "throttled"] += 1
                meta.outcomes["replace", "throttled"] += 1
                await look(service, 1)
            assert {*kinds(service)} == {("bucket_throttled", "backend cloud"), ("bucket_throttled", "the meta store")}
            assert "25%" in next(each.message for each in service.watch.here().found if each.subject == "backend cloud")
            # Without a request nothing is refused.
            await look(service, 4)
            assert kinds(service) == []

    asyncio.run(scenario())


def test_an_item_is_a_repeated_one_until_it_is_completed_dead_or_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q"))
            driver = service._drivers["q"]

            async def fail(times: int) -> None:
                for _ in range(times):
                    await settle(service, "q", await lease(service, "q"), RETRY)

            def repeats() -> list[tuple[int, int]]:
                return [(each.offset, each.attempts) for each in sample_of(driver, system.now())[0].repeats]

            await produce(service, "q", "a")
            await fail(3)
            assert repeats() == []
            await fail(1)
            assert repeats() == [(0, 4)]
            # What is given back unprocessed has not failed.
            await settle(service, "q", await lease(service, "q"), RELEASE)
            assert repeats() == [(0, 4)]
            await fail(2)
            assert repeats() == [(0, 6)]
            await produce(service, "q", "b")
            await settle(service, "q", await lease(service, "q", 1))
            assert repeats() == [], "it is completed under a new id"
            for disposition in (DONE, Disposition("dead")):
                await fail(5)
                assert [attempts for _, attempts in repeats()] == [5]
                await settle(service, "q", await lease(service, "q"), disposition)
                assert repeats() == []
                await produce(service, "q", "c")
            await fail(5)
            await service.clear("q", Clear(5_000))
            assert repeats() == []

    asyncio.run(scenario())


def test_many_items_that_fail_are_remembered_up_to_a_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q"))
            await produce(service, "q", *map(str, range(100)))
            for _ in range(6):
                await settle(service, "q", await lease(service, "q"), RETRY)
            assert len(sample_of(service._drivers["q"], system.now())[0].repeats) == 16

    asyncio.run(scenario())


def test_a_sample_knows_who_holds_who_waits_and_what_was_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q"))
            driver = service._drivers["q"]
            await produce(service, "q", *"abcd")
            await lease(service, "q", 3)
            await lease(service, "q", 3)
            waiting = asyncio.create_task(service.lease("q", Lease("hungry", 1, 60_000)))
            await eventually(lambda: bool(driver.waiting()))
            sample, slowest = sample_of(driver, system.now())
            assert sorted(sample.held["c"].values()) == [1, 3]
            assert (sample.waiting, sample.ready, sample.leased, sample.taken, sample.produced) == (("hungry",), 0, 4, 4, 4)
            assert sample.seen_at is not None
            assert slowest.keys() <= {"default"}
            waiting.cancel()
            await service.pause("q", ["produce"], True)
            for _ in range(2):
                with pytest.raises(SluicewayError):
                    await produce(service, "q", "e")
            assert sample_of(driver, system.now())[0].refused == {"queue_paused": 2}

    asyncio.run(scenario())


def test_a_sample_knows_what_waits_for_its_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(QueueSpec("q", order="key"))
            rows = [{"payload": b"x", "key": key} for key in ("a", "a", "a", "b")]
            await service.produce("q", Produce(batch_from_rows(rows), 20_000))
            await lease(service, "q", 1)
            sample, _ = sample_of(service._drivers["q"], system.now())
            assert (sample.ready, sample.blocked, sample.servable) == (3, 2, 1)

    asyncio.run(scenario())


def test_a_commit_that_hangs_is_the_backends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, store):
            await service.create_queue(spec("q"))
            blocked, began = asyncio.Event(), asyncio.Event()

            async def hang(_: object) -> Outcome | None:
                began.set()
                await blocked.wait()
                return None

            store.on_apply = hang
            producing = asyncio.create_task(produce(service, "q", "a"))
            await began.wait()
            await service.watch.look(system.now() + STUCK_COMMIT)
            (found,) = service.watch.here().found
            assert (found.kind, found.subject, found.severity) == ("backend_slow", "default", "critical")
            assert "in queue q" in found.message
            blocked.set()
            await producing

    asyncio.run(scenario())


def test_any_instance_tells_what_all_find_and_which_do_not_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, "a", "b") as (rig, services):
            await services[0].create_queue(QueueSpec("q", 2))
            await services[0].create_queue(QueueSpec("r", 2))
            await eventually(lambda: all(shares(service, "q") and shares(service, "r") for service in services))
            (second,) = shares(services[1], "r")
            await put(services[0], "q", 0, "x")
            await put(services[0], "q", 1, "y", "z")
            await put(services[1], "r", second, "x")
            for service in services:
                await look(service)
            assert kinds(services[0]) == [("no_consumer", "q")]
            for service in services:
                seen = await service.watch.everywhere()
                assert sorted((each.kind, each.queue_name) for each in seen.found) == [("no_consumer", "q"), ("no_consumer", "r")]
                assert seen.silent == ()
            assert [each.queue_name for each in (await services[0].watch.everywhere("r")).found] == ["r"]
            rig.wires.asked.clear()
            rig.wires.refuses.add("b")
            seen = await services[0].watch.everywhere()
            assert [each.queue_name for each in seen.found] == ["q"]
            assert seen.silent == (services[1].ownership.name,)
            assert len([asked for _, asked in rig.wires.asked if isinstance(asked, ListProblems)]) == 1
            rig.wires.refuses.clear()

    asyncio.run(scenario())


def test_a_key_sees_what_is_wrong_with_the_queues_that_it_may_read(tmp_path: Path) -> None:
    with guarded(tmp_path) as served:
        owner = served.client("manage:*", "produce:*")
        for name in ("mine", "yours"):
            owner.post("/v1/queues.create", json={"queue_name": name})
            owner.post("/v1/queue.produce", json={"queue_name": name, "items": [{"utf8": "x"}]})
        reader, admin = served.client("read:mine"), served.client("read:*")

        def found(client: object, **call: str) -> list[str]:
            answer = client.post("/v1/problems.list", json=call)  # type: ignore[attr-defined]
            assert answer.status_code == 200, answer.text
            return sorted(each["queue_name"] for each in answer.json()["items"])

        wait_until(lambda: found(admin) == ["mine", "yours"], "both are found")
        assert found(reader) == ["mine"]
        assert reader.post("/v1/problems.list", json={}).json()["queues"] == 1
        assert found(admin, queue_name="yours") == ["yours"]
        assert reader.post("/v1/problems.list", json={"queue_name": "yours"}).status_code == 403
        assert admin.post("/v1/problems.list", json={"queue_name": "none"}).json()["code"] == "queue_not_found"
        assert found(served.client("produce:*")) == []
        attention = admin.get("/readyz?verbose").json()
        assert (attention["ready"], len(attention["attention"])) == (True, 2)
        text = admin.get("/metrics").text
        assert 'sluiceway_problem{kind="no_consumer",queue="mine",severity="warning"} 1.0' in text


def test_a_key_that_a_poison_item_holds_up_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q", order="key"))
            await service.produce("q", Produce(batch_from_rows([{"payload": b"x", "key": "ada"}] * 12), 5_000))
            for _ in range(4):
                await settle(service, "q", await lease(service, "q", 1), RETRY)
            await look(service, 1)
            (held,) = service.watch.here().found
            id = f"{service.queues()[0].incarnation}.0.0"
            assert (held.kind, held.subject) == ("key_held_up", "ada")
            assert held.message == f"11 items of key ada in q wait for item {id}, which has failed 4 times"
            await lease(service, "q", 1)
            told = await service.explain("q", 0, 5)
            assert told.reason.endswith(f"it waits for the item with the origin {id}, leased by c; failed attempts: 4")

    asyncio.run(scenario())


def test_keys_that_storage_does_not_tell_are_held_up_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q", order="key"))
            await service.produce("q", Produce(batch_from_rows([{"payload": b"x", "key": "ada"}] * 12), 5_000))
            await lease(service, "q", 1)
            reads = 0

            async def hangs(*_: object) -> None:
                nonlocal reads
                reads += 1
                await asyncio.Event().wait()

            monkeypatch.setattr("sluiceway.instance.problem_watch.keys_of", hangs)
            monkeypatch.setattr("sluiceway.instance.problem_watch._KEYS_READ_IN", 0.01)
            await service.watch.look(system.now() + HELD_UP_AFTER + next(AHEAD))
            await service.watch.look(system.now() + HELD_UP_AFTER + next(AHEAD))
            held = next(each for each in service.watch.here().found if each.kind == "key_held_up")
            assert (held.subject, reads) == ("q", 1)
            assert "11 items of key unknown in q wait for item" in held.message

    asyncio.run(scenario())


@pytest.mark.parametrize(("keys", "found"), [(12, [("consumer_hoarding", "c")]), (9, [])])
def test_a_consumer_that_holds_many_keys_hoards_them(tmp_path: Path, keys: int, found: list[tuple[str, str]]) -> None:
    """In order, while another waits. It has several items of each."""

    async def scenario() -> None:
        async with serving(tmp_path) as (service, _):
            await service.create_queue(spec("q", order="key"))
            rows = batch_from_rows([{"payload": b"x", "key": f"k{number % keys}"} for number in range(4 * keys)])
            await service.produce("q", Produce(rows, 5_000))
            await service.lease("q", Lease("c", 4 * keys, 0, 60_000, 1, runs=True))
            await service.produce("q", Produce(rows, 5_000))
            waiting = asyncio.create_task(service.lease("q", Lease("hungry", 10, 60_000, 60_000, 1)))
            try:
                await eventually(lambda: len(service._drivers["q"].queue.lease_scheduler.waiters) == 1)
                await look(service)
                assert kinds(service) == found
            finally:
                waiting.cancel()

    asyncio.run(scenario())
