"""A call that completes and leases: both share a commit, and an error of one leaves nothing that nobody knows of."""

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
from tests.instance.instance_rig import Store, eventually, lease, payloads, produce, serving, spec


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


async def both(service: Service, completion: Settle, **wanted: object) -> tuple[Leased, Settled]:
    request = Lease("c", **({"batch_size": 1, "request_timeout": 1_000} | wanted))  # type: ignore[arg-type]
    return await service.complete_and_lease("q", completion, request, service.lease("q", request))


@driven
async def test_both_are_one_transaction(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, store, completion):
        commits: list[PartitionRef] = []

        async def note(ref: PartitionRef) -> Outcome | None:
            commits.append(ref)
            return None

        store.on_apply = note
        leased, settled = await both(service, completion)
        assert (payloads(leased.batches), settled.completed, len(commits)) == (["b"], 1, 1)


@pytest.mark.parametrize("lease_key", [None, "k"])
@driven
async def test_what_was_leased_is_released_if_the_completion_fails(tmp_path: Path, lease_key: str | None) -> None:
    """The caller gets an error, and does not know of the lease. With a key, it gets it when it repeats the call."""
    async with holding(tmp_path, partitions=2) as (service, store, completion):
        one = next(iter(completion.selections))
        other = next(number for number in completion.selections if number != one)

        async def fail(ref: PartitionRef) -> Outcome | None:
            return Outcome.UNKNOWN if ref.partition == one else None

        store.on_apply = fail
        alone = Settle({one: completion.selections[one]}, 1_000)
        with pytest.raises(SluicewayError) as raised:
            await both(service, alone, partition=other, lease_key=lease_key)
        assert raised.value.code == "unavailable"
        store.on_apply = lambda ref: asyncio.sleep(0)
        await eventually(lambda: count(service, "released") == (1 if lease_key is None else 0))
        assert count(service, "leased") == 4 - 1


@driven
async def test_an_error_of_the_lease_comes_when_the_completion_has_ended(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, _, completion):
        with pytest.raises(SluicewayError):
            await both(service, completion, partition=7)
        assert count(service, "completed") == 1


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


@driven
async def test_a_completion_that_is_refused_at_once_leases_nothing(tmp_path: Path) -> None:
    async with holding(tmp_path) as (service, _, completion):
        request = Lease("c", 1, 0)
        leasing = service.lease("q", request)
        with pytest.raises(SluicewayError, match="there is no queue"):
            await service.complete_and_lease("gone", completion, request, leasing)
        assert inspect.getcoroutinestate(leasing) == inspect.CORO_CLOSED
        assert count(service, "leased") == 1
