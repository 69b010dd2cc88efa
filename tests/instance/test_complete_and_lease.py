"""A call that completes and leases: both share a commit, and leases do not wait for a completion that takes long."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import DONE, Lease, Leased, Selection, Settle, Settled
from sluiceway.ports.partition_store import PartitionRef
from sluiceway.testing.drive import driven
from tests.instance.instance_rig import Store, eventually, fine, lease, payloads, produce, serving, spec


@asynccontextmanager
async def holding(folder: Path, partitions: int = 1) -> AsyncIterator[tuple[Service, Store, Settle]]:
    """A queue with the items a (leased) and b in each partition, and the completion of what is leased."""
    async with serving(folder) as (service, store):
        await service.create_queue(spec("q", partitions))
        for _ in range(partitions):
            await produce(service, "q", "a", "b")
        held = [await lease(service, "q", 1) for _ in range(partitions)]
        selections = {each.partition: [Selection(DONE, lease=each.number)] for answer in held for each in answer.leases}
        yield service, store, Settle(selections, 1_000)


def count(service: Service, name: str) -> int:
    return sum(getattr(each, name) for each in service.stats("q").partitions)


async def both(service: Service, completion: Settle, **wanted: object) -> tuple[Leased, Settled | None]:
    request = Lease("c", **({"batch_size": 1, "request_timeout": 1_000} | wanted))  # type: ignore[arg-type]
    return await service.complete_and_lease("q", completion, service.lease("q", request))


@driven
async def test_both_are_one_transaction(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, store, completion):
        commits: list[PartitionRef] = []

        async def note(ref: PartitionRef) -> Outcome | None:
            commits.append(ref)
            return None

        store.on_apply = note
        leased, settled = await both(service, completion)
        assert settled is not None
        assert (payloads(leased.batches), settled.completed, len(commits)) == (["b"], 1, 1)


@pytest.mark.parametrize("hangs", [False, True], ids=["fails", "hangs"])
@driven
async def test_leases_do_not_wait_for_a_completion_that(tmp_path: Path, hangs: bool) -> None:
    """They are running out, and the caller completes again."""
    async with holding(tmp_path, partitions=2) as (service, store, completion):
        one, other = completion.selections
        healed = asyncio.Event()

        async def spoil(ref: PartitionRef) -> Outcome | None:
            if ref.partition != one:
                return None
            if hangs:
                await healed.wait()
                return None
            return Outcome.UNKNOWN

        store.on_apply = spoil
        leased, settled = await both(service, Settle({one: completion.selections[one]}, 900_000), partition=other)
        assert (len(leased.leases), settled) == (1, None)
        store.on_apply = fine
        healed.set()
        again = await service.settle("q", completion)
        assert again.completed + len(again.ignored) == 2
        assert count(service, "completed") == 2


@driven
async def test_an_error_of_the_lease_does_not_undo_the_completion(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, _, completion):
        with pytest.raises(SluicewayError):
            await both(service, completion, partition=7)
        await eventually(lambda: count(service, "completed") == 1)


@driven
async def test_a_caller_that_goes_away_leaves_no_lease(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, _, completion):
        await lease(service, "q", 1)
        waiting = asyncio.ensure_future(both(service, completion, request_timeout=900_000))
        await eventually(lambda: count(service, "completed") == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await produce(service, "q", "c")
        assert payloads((await lease(service, "q", 1)).batches) == ["c"]


@pytest.mark.parametrize("goes", [False, True], ids=["waits", "goes away"])
@driven
async def test_a_completion_is_known_at_once_though_its_caller(tmp_path: Path, goes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bundles, one of which may be over with it, and to the counts of handler times."""
    async with holding(tmp_path) as (service, store, completion):
        await lease(service, "q", 1)
        noted: list[str] = []
        monkeypatch.setattr(service.bundle_driver, "note_settled", noted.append)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def pause(_: PartitionRef) -> Outcome | None:
            begun.set()
            await go_on.wait()
            return None

        store.on_apply = pause
        completion.handler_times = [(20, 1)]
        waiting = asyncio.ensure_future(both(service, completion, request_timeout=900_000))
        await begun.wait()
        if goes:
            waiting.cancel()
            await asyncio.wait([waiting])
        go_on.set()
        await eventually(lambda: noted == ["q"])
        assert sum(service.handler_times("q").done.buckets) == 1
        waiting.cancel()
        await asyncio.wait([waiting])


@driven
async def test_bundles_hear_of_a_completion_while_its_lease_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the last item of one, and nothing else comes: the lease waits for its whole time."""
    async with holding(tmp_path) as (service, _, completion):
        await lease(service, "q", 1)
        noted: list[str] = []
        monkeypatch.setattr(service.bundle_driver, "note_settled", noted.append)
        waiting = asyncio.ensure_future(both(service, completion, request_timeout=900_000))
        await eventually(lambda: noted == ["q"])
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@driven
async def test_a_completion_that_is_refused_at_once_leases_nothing(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, _, completion):
        request = Lease("c", 1, 0)
        leasing = service.lease("q", request)
        with pytest.raises(SluicewayError, match="there is no queue"):
            await service.complete_and_lease("gone", completion, leasing)
        assert inspect.getcoroutinestate(leasing) == inspect.CORO_CLOSED
        assert count(service, "leased") == 1
