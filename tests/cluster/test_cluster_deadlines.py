"""An instance that answers nothing, as one that is frozen: what others ask of it ends when the client's time does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluiceway.cluster.router import ANSWER_MARGIN, COUNT_TIMEOUT
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import Ask
from sluiceway.model.requests import DONE, Clear, Extend, Lease, Peek, Produce, ProduceKey, Redrive, Selection, Settle
from tests.cluster.cluster_rig import Cluster, Gate, cluster, shares
from tests.instance.instance_rig import rows, spec

TIMEOUT: Millis = 300


@contextlib.contextmanager
def freezing(made: Cluster, name: str) -> Iterator[None]:
    """What is asked of that instance's shares is not answered."""
    gate = made.wires.on_ask = Gate(only=lambda address, request: address == name and isinstance(request, Ask))
    made.wires.timeouts.clear()
    try:
        yield
    finally:
        gate.open()


def calls(at: Service, partition: int) -> dict[str, Awaitable[Any]]:
    """Each needs an answer of that partition's owner."""
    offsets = np.array([0])
    selections = {partition: [Selection(DONE, offsets=offsets)]}
    return {
        "produce": at.produce("q", Produce(rows("x"), TIMEOUT, partition=partition)),
        "produce with a key": at.produce("q", Produce(rows("x"), TIMEOUT, ProduceKey("k"), partition)),
        "lease": at.lease("q", Lease("c", 1, TIMEOUT, partition=partition)),
        "lease with a key": at.lease("q", Lease("c", 1, TIMEOUT, lease_key="k")),
        "complete": at.settle("q", Settle(selections, TIMEOUT)),
        "extend": at.extend("q", Extend([], TIMEOUT, 1_000, offsets={partition: offsets})),
        "clear": at.clear("q", Clear(TIMEOUT)),
        "redrive": at.redrive("q", Redrive(TIMEOUT, 10, "other")),
    }


@pytest.mark.parametrize("call", list(range(8)))
def test_a_call_ends_when_its_time_does_though_the_owner_does_not_answer(tmp_path: Path, call: int) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("other"))
            await a.create_queue(spec("q", 4))
            with freezing(made, "b"):
                made_calls = calls(a, shares(b, "q")[0])
                work = list(made_calls.values())[call]
                for each in made_calls.values():
                    if each is not work:
                        each.close()  # type: ignore[attr-defined]
                try:
                    await work
                except SluicewayError as error:
                    assert error.code in ("outcome_unknown", "unavailable"), list(made_calls)[call]
                waited = [timeout for address, timeout in made.wires.timeouts if address == "b"]
            assert waited, "it was not asked"
            assert max(waited) <= TIMEOUT + ANSWER_MARGIN

    assert ANSWER_MARGIN <= 250
    asyncio.run(run())


def test_counts_name_the_instance_that_does_not_answer_and_do_not_wait_for_it(tmp_path: Path) -> None:
    async def run() -> None:
        async with cluster(tmp_path, "a", "b") as (made, (a, b)):
            await a.create_queue(spec("q", 4))
            frozen, own = shares(b, "q"), shares(a, "q")
            with freezing(made, "b"):
                counted = await a.count("q")
                waited = [timeout for address, timeout in made.wires.timeouts if address == "b"]
            assert max(waited) <= COUNT_TIMEOUT + ANSWER_MARGIN
            states = {
                (share.instance or "")[0]: {each.partition: each.state for each in share.partitions} for share in counted.logical_queues
            }
            assert states == {"a": dict.fromkeys(own, "available"), "b": dict.fromkeys(frozen, "unavailable")}
            assert len(await a.peek("q", Peek(10, partition=own[0]))) == 0

    asyncio.run(run())
