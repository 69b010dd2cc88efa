"""The breaker of a backend: opens when partitions fail together, lets one probe through at a time, closes at the first success."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.loop import Loop, simulated
from sluiceway.adapters.storage.memory import MemoryPartitionStore
from sluiceway.core.queue.breaker import PROBE_INTERVAL, Breaker
from sluiceway.local.backend import Backend
from sluiceway.model.changes import Changes, Fence, Least, PartitionRef, Snapshot
from sluiceway.model.outcomes import Outcome
from sluiceway.ports.partition_store import StoreUnavailableError

A, B, C = (PartitionRef("k7f3q2ma", number) for number in range(3))
NOW = 1_000_000


def opened() -> Breaker:
    breaker = Breaker()
    assert not breaker.failed(A, 3)
    assert breaker.failed(B, 3)
    return breaker


def test_one_partition_that_fails_again_and_again_is_its_own_affair() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(A, 3) for _ in range(10))
    assert breaker.admits(A, NOW)
    assert breaker.admits(B, NOW)


def test_the_only_partition_is_the_backend() -> None:
    breaker = Breaker()
    assert breaker.failed(A, 1)
    assert breaker.is_open


def test_a_success_in_between_tells_them_apart() -> None:
    breaker = Breaker()
    breaker.failed(A, 3)
    assert not breaker.succeeded(), "it was not open"
    assert not breaker.failed(B, 3)
    assert not breaker.is_open


def test_it_opens_once() -> None:
    breaker = opened()
    assert not breaker.failed(C, 3)


def test_the_first_probe_goes_at_once_and_nobody_else() -> None:
    breaker = opened()
    assert breaker.wants_probe(NOW)
    assert breaker.admits(A, NOW)
    assert not breaker.wants_probe(NOW + 10 * PROBE_INTERVAL)
    assert not breaker.admits(B, NOW + 10 * PROBE_INTERVAL), "one is under way"


def test_the_next_probe_waits_for_the_end_of_the_last_and_for_its_time() -> None:
    breaker = opened()
    assert breaker.admits(A, NOW)
    breaker.failed(B, 3)
    assert not breaker.admits(C, NOW + PROBE_INTERVAL), "that was not the probe's end"
    breaker.failed(A, 3)
    assert not breaker.admits(C, NOW + PROBE_INTERVAL - 1)
    assert breaker.admits(C, NOW + PROBE_INTERVAL)


def test_any_success_closes_it() -> None:
    breaker = opened()
    breaker.admits(A, NOW)
    assert breaker.succeeded()
    assert breaker.admits(B, NOW)
    assert not breaker.failed(A, 3), "it begins to count anew"


@given(st.lists(st.tuples(st.sampled_from(["open", "fail", "succeed", "wait"]), st.sampled_from([A, B, C])), max_size=60))
def test_while_it_is_open_there_is_one_probe_at_a_time_and_at_most_one_a_second(steps: list[tuple[str, PartitionRef]]) -> None:
    breaker, now = Breaker(), NOW
    under_way: set[PartitionRef] = set()
    probes: list[int] = []
    for what, ref in steps:
        now += PROBE_INTERVAL // 3 if what == "wait" else 0
        if what == "open" and ref not in under_way:
            if breaker.admits(ref, now) and breaker.is_open:
                assert not under_way
                assert not probes or now - probes[-1] >= PROBE_INTERVAL
                under_way.add(ref)
                probes.append(now)
        elif what == "fail":
            under_way.discard(ref)
            breaker.failed(ref, 3)
        elif what == "succeed":
            under_way.clear()
            probes.clear()
            breaker.succeeded()
            assert breaker.admits(ref, now)


def test_what_the_backend_is_not_asked_for_any_more_says_nothing() -> None:
    breaker = Breaker()
    breaker.failed(A, 3)
    breaker.forget(A)
    assert not breaker.failed(B, 3), "one that has gone and one that fails are not two"
    assert breaker.failed(C, 3)
    assert breaker.admits(B, NOW)
    breaker.forget(B)
    assert breaker.wants_probe(NOW + PROBE_INTERVAL), "the probe of one that has gone is not waited for"


def test_a_backend_is_tried_again_when_all_that_failed_has_gone_to_another_instance() -> None:
    class Store(MemoryPartitionStore):
        async def open(self, ref: PartitionRef, fence: Fence, least: Least | None = None) -> Snapshot:
            if ref != B:
                raise StoreUnavailableError("away")
            return await super().open(ref, fence, least)

    async def history() -> None:
        backend, fence = Backend("default", Store(), 1_000), Fence(1, 1, 1)
        for ref in (A, B, C):
            backend.attach(ref, lambda _: False)
        await backend.open(B, fence)
        for ref in (A, C):
            with pytest.raises(StoreUnavailableError):
                await backend.open(ref, fence)
        assert await backend.apply(B, Changes(1, b""), fence, 1_000) is Outcome.REFUSED, "they failed together"
        backend.detach(A)
        backend.detach(C)
        await asyncio.sleep(2 * PROBE_INTERVAL / 1000)
        assert await backend.apply(B, Changes(1, b""), fence, 1_000) is Outcome.DONE

    loop = Loop(Random(0))
    with simulated(loop):
        loop.run_until_complete(history())
