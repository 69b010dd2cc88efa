"""What a client makes of an answer, and what it keeps of it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.campaigns.blackbox.http_clients import Answer, Caller, ask
from tests.campaigns.blackbox.nemeses import Bag, Nemesis, Strike
from tests.campaigns.blackbox.operation_log import Operation, RoundLog
from tests.campaigns.blackbox.pictures import slices
from tests.campaigns.blackbox.workloads import produced


def answered(status: int, **body: Any) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _: httpx.Response(status, json=body))


def failing(error: Exception) -> httpx.MockTransport:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    return httpx.MockTransport(fail)


def asked(transport: httpx.MockTransport) -> Answer:
    async def work() -> Answer:
        async with httpx.AsyncClient(transport=transport) as http:
            return await ask(http, "http://server", "queue.lease", {}, 1.0, expected=("rebalance_open",))

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("transport", "outcome", "problem"),
    [
        (answered(200, count=1), "done", ""),
        (answered(503, code="unavailable", retryable=True), "refused", "unavailable"),
        (answered(504, code="outcome_unknown", retryable=True), "unknown", "outcome_unknown"),
        (answered(409, code="rebalance_open", retryable=False), "refused", "rebalance_open"),
        (answered(500, code="internal", retryable=False, detail="why"), "unknown", "unexpected: 500 internal: why"),
        (httpx.MockTransport(lambda _: httpx.Response(200, text="no JSON")), "unknown", "unexpected: 200 no JSON"),
        (failing(httpx.ConnectError("")), "refused", "not reached"),
        (failing(httpx.ReadTimeout("")), "unknown", "no answer"),
        (failing(httpx.RemoteProtocolError("")), "unknown", "broken"),
    ],
)
def test_an_answer_is_done_refused_or_unknown(transport: httpx.MockTransport, outcome: str, problem: str) -> None:
    assert asked(transport)[::2] == (outcome, problem)


class Member:
    name, url = "server", "http://server"


def called(transport: httpx.MockTransport, log: RoundLog, **more: Any) -> Operation:
    async def work() -> Operation:
        async with httpx.AsyncClient(transport=transport) as http:
            caller = Caller("c", http, [Member()], log)
            return await caller.call("complete", "queue.complete", "q", {"ids": ["a.0.0"], "left": None}, given={}, timeout=1.0, **more)

    return asyncio.run(work())


def test_a_call_is_in_the_history_with_what_was_read_of_its_answer(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "log")
    operation = called(answered(200, completed=1), log, read=lambda body: {"completed": body["completed"]})
    assert log.round.operations == [operation]
    assert (operation.call, operation.at, operation.outcome, operation.got) == ("complete", "server", "done", {"completed": 1})
    assert operation.ended is not None
    log.close()


@pytest.mark.parametrize(("in_parts", "outcome"), [(True, "unknown"), (False, "refused")])
def test_a_refusal_of_several_may_have_done_some(tmp_path: Path, in_parts: bool, outcome: str) -> None:
    log = RoundLog(tmp_path / "log")
    assert called(answered(503, code="unavailable", retryable=True), log, in_parts=in_parts).outcome == outcome
    log.close()


def test_a_call_that_is_cut_off_is_in_the_history_without_an_end(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "log")

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def work() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(never)) as http:
            task = asyncio.create_task(Caller("c", http, [Member()], log).call("lease", "queue.lease", "q", {}, given={}, timeout=1.0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(work())
    log.close()
    assert [each.ended for each in log.round.operations] == [None]


def test_the_ids_of_a_produce_are_dense_or_told_one_by_one() -> None:
    dense = {"first_id": "a.2.7", "count": 2, "partition": 2, "offsets": None, "partitions": None, "deduplicated": False, "duplicates": []}
    assert produced(dense) == {"ids": ["a.2.7", "a.2.8"], "repeated": False, "duplicates": []}
    divided = dense | {"offsets": [7, 3], "partitions": [2, 0]}
    assert produced(divided)["ids"] == ["a.2.7", "a.0.3"]


def test_each_nemesis_comes_once_before_any_comes_again() -> None:
    kinds = [Nemesis(kind, lambda _: Strike("", lambda: None)) for kind in "abc"]
    bag = Bag(kinds, random.Random(1))
    for _ in range(3):
        dealt = [bag.take() for _ in kinds]
        assert sorted(each.kind for each in dealt if each is not None) == ["a", "b", "c"]
    assert Bag([], random.Random(1)).take() is None


def test_slices_have_no_gaps_and_the_latencies_of_what_was_done() -> None:
    def call(began: float, ended: float, outcome: Any = "done") -> Operation:
        return Operation("c", "produce", "q", began, ended, outcome)

    found = slices([call(0.0, 0.5), call(0.1, 0.4, "unknown"), call(1.9, 3.1)])
    assert [each.at for each in found] == [0.0, 1.0, 2.0, 3.0]
    assert found[0].outcomes == {"done": 1, "unknown": 1}
    assert found[0].latencies == {"produce": (0.5, 0.5)}
    assert found[1].latencies == {}
