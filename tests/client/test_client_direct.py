"""Calls that go straight to the instance that has what they are about, and what becomes of them when that is not so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sluiceway.client import AsyncClient, CallError, Client, Retry, Verdict, item_calls
from sluiceway.client.answers import Partition, QueueInfo
from sluiceway.client.direct import AGAIN, IN_A_ROW, REFUSED, Direct
from sluiceway.client.http_exchange import Endpoint
from sluiceway.client.item_calls import Check
from sluiceway.client.protocol import Call
from tests.server.server_process import ServerProcess, wait_until

BASE, ONE, TWO = "http://base:1", "http://one:1", "http://two:1"
NONE = Check()


def info(**addresses: str | None) -> QueueInfo:
    """Of a queue whose partitions p0, p1, … are there."""
    parts = [Partition(partition=n, backend="b", state="available", address=each) for n, each in enumerate(addresses.values())]
    settings: dict[str, Any] = {"created_at": "2026-01-31T08:00:00Z", "updated_at": "2026-01-31T08:00:00Z"}
    return QueueInfo(
        queue_name="q", incarnation="k7f3q2ma", **settings, lease_timeout="1m", max_attempts=0, requested_partitions=1, partitions=parts
    )


def completes(*ids: str) -> Call[Any]:
    return item_calls.complete("q", ids, (), None, NONE)


LEASE = item_calls.lease("q", "c", 1, "0s", None, None, None)


def asked(direct: Direct, call: Call[Any], now: float = 0.0) -> str | None:
    found = direct.endpoint(call, now)
    return None if found is None else str(found.url)


def refusal(code: str) -> CallError:
    return CallError(code, "x")


@pytest.fixture
def direct() -> Direct:
    """Partitions 0 and 2 are at ONE, 1 is at TWO, 3 nowhere."""
    made = Direct(Endpoint(BASE, "slw_key"))
    made.learn("q", info(p0=ONE, p1=TWO, p2=ONE, p3=None))
    return made


# -- whom to ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "address"),
    [
        (completes("k.0.1"), ONE),
        (completes("k.0.1", "k.2.7"), ONE),
        (completes("k.1.1"), TWO),
        (completes("k.0.1", "k.1.1"), None),
        (completes("k.3.1"), None),
        (completes("k.0.1", "k.3.1"), None),
        (completes("k.9.1"), None),
        (completes("nonsense"), None),
        (completes("k.0.1", "k.x.1"), None),
        (completes(), None),
        (item_calls.complete("q", (), ["k.1.L4"], None, NONE), TWO),
        (item_calls.complete("q", ["k.0.1"], ["k.1.L4"], None, NONE), None),
        (item_calls.release("q", ["k.1.1"], (), None, NONE), TWO),
        (item_calls.retry("q", [Retry("k.1.1"), "k.1.2"], None, NONE), TWO),
        (item_calls.extend("q", ["k.1.L1"], (), None, None, NONE), TWO),
        (item_calls.settle("q", [Verdict("k.1.1", "done")], None), TWO),
        (item_calls.peek("q", 1, None, "k.1.L1", None), TWO),
        (item_calls.peek("q", 1, 1, None, None), TWO),
        (item_calls.peek("q", 1, None, None, None), None),
        (item_calls.browse("q", 1, None, None, None, True), TWO),
        (item_calls.explain("q", "k.1.1"), TWO),
        (item_calls.complete("other", ["k.0.1"], (), None, NONE), None),
        (item_calls.produce("q", ["x"], None, item_calls.Key()), None),
        (LEASE, None),
    ],
)
def test_a_call_on_one_owner_s_partitions_goes_there(direct: Direct, call: Call[Any], address: str | None) -> None:
    assert asked(direct, call) == address


def test_every_call_that_goes_straight_somewhere_may_be_repeated(direct: Direct) -> None:
    calls = [completes("k.0.1"), item_calls.retry("q", ["k.0.1"], None, NONE), item_calls.peek("q", 1, 0, None, None)]
    assert all(asked(direct, call) and call.repeatable for call in calls)


def test_the_key_goes_to_no_address_of_another_scheme(direct: Direct) -> None:
    direct.learn("q", info(p0="https://one:1", p1="ftp://x", p2="nonsense", p3=ONE))
    assert [asked(direct, completes(f"k.{n}.1")) for n in range(4)] == [None, None, None, ONE]
    found = direct.endpoint(completes("k.3.1"), 0.0)
    assert found is not None
    assert found.api_key == "slw_key"


# -- when to look -----------------------------------------------------------------------------------------------------


def test_owners_are_looked_up_when_needed_and_once_a_second_at_most() -> None:
    direct = Direct(Endpoint(BASE))
    assert direct.to_look_up(LEASE, 0.0) is None
    assert direct.to_look_up(completes("k.0.1"), 0.0) == "q"
    assert direct.to_look_up(completes("k.0.1"), AGAIN - 0.01) is None, "the look before may still be under way"
    direct.learn("q", info(p0=ONE))
    assert direct.to_look_up(completes("k.0.1"), 1_000.0) is None, "what is right needs no look"
    direct.heard(completes("k.0.1"), TWO)
    assert direct.to_look_up(completes("k.0.1"), 1_000.0) == "q"
    assert direct.to_look_up(completes("k.0.1"), 1_000.0 + AGAIN - 0.01) is None
    assert direct.to_look_up(completes("k.0.1"), 1_000.0 + AGAIN) == "q"


def test_who_may_not_know_does_not_ask_again_and_again() -> None:
    direct = Direct(Endpoint(BASE))
    assert direct.to_look_up(completes("k.0.1"), 0.0) == "q"
    direct.not_told("q", refusal("forbidden"), 0.0)
    assert direct.to_look_up(completes("k.0.1"), REFUSED - 0.01) is None
    assert direct.to_look_up(completes("k.0.1"), REFUSED) == "q"
    direct.not_told("q", refusal("unavailable"), REFUSED)
    assert direct.to_look_up(completes("k.0.1"), REFUSED + AGAIN) == "q"


# -- what fails -------------------------------------------------------------------------------------------------------


def fail(direct: Direct, code: str, now: float = 0.0) -> None:
    endpoint = direct.endpoint(completes("k.0.1"), now)
    assert endpoint is not None
    direct.failed(completes("k.0.1"), endpoint, refusal(code), now)


def test_an_instance_that_cannot_be_reached_is_left_alone_for_a_while(direct: Direct) -> None:
    fail(direct, "unavailable", 10.0)
    assert asked(direct, completes("k.0.1"), 10.0 + AGAIN - 0.01) is None
    assert asked(direct, completes("k.1.1"), 10.0) == TWO
    assert asked(direct, completes("k.0.1"), 10.0 + AGAIN) == ONE
    assert direct.to_look_up(completes("k.0.1"), 10.0) == "q"


def test_an_unknown_outcome_is_not_hidden(direct: Direct) -> None:
    with pytest.raises(CallError) as raised:
        fail(direct, "outcome_unknown")
    assert raised.value.code == "outcome_unknown"
    assert asked(direct, completes("k.0.1")) is None, "the repetition asks the base"


@pytest.mark.parametrize("code", ["stale_ids", "rate_limited", "too_many_requests"])
def test_what_all_would_say_is_not_asked_twice(direct: Direct, code: str) -> None:
    with pytest.raises(CallError):
        fail(direct, code)
    assert asked(direct, completes("k.0.1")) == ONE


def test_what_another_server_may_know_better_is_asked_there(direct: Direct) -> None:
    fail(direct, "queue_not_found")
    assert direct.to_look_up(completes("k.0.1"), 0.0) == "q"
    assert asked(direct, completes("k.0.1")) == ONE, "it was there"


# -- leases -----------------------------------------------------------------------------------------------------------


def test_leases_follow_where_they_were_served_several_times_in_a_row(direct: Direct) -> None:
    for hint in (*[ONE] * (IN_A_ROW - 1), None, *[ONE] * (IN_A_ROW - 1), TWO):
        direct.heard(LEASE, hint)
        assert asked(direct, LEASE) is None
    for _ in range(IN_A_ROW - 1):
        direct.heard(LEASE, TWO)
    assert asked(direct, LEASE) == TWO
    direct.heard(LEASE, None)
    assert asked(direct, LEASE) == TWO, "it serves them itself"
    for _ in range(IN_A_ROW):
        direct.heard(LEASE, ONE)
    assert asked(direct, LEASE) == ONE


def test_leases_come_back_when_that_fails(direct: Direct) -> None:
    for _ in range(IN_A_ROW):
        direct.heard(LEASE, ONE)
    endpoint = direct.endpoint(LEASE, 0.0)
    assert endpoint is not None
    direct.failed(LEASE, endpoint, refusal("unavailable"), 0.0)
    assert asked(direct, LEASE, 1_000.0) is None


# -- both clients -----------------------------------------------------------------------------------------------------


INFO = {
    "queue_name": "q",
    "incarnation": "k7f3q2ma",
    "created_at": "2026-01-31T08:00:00Z",
    "updated_at": "2026-01-31T08:00:00Z",
    "lease_timeout": "1m",
    "max_attempts": 0,
    "requested_partitions": 1,
    "partitions": [{"partition": 0, "backend": "b", "state": "available", "owner": "i", "address": ONE}],
}


class World:
    """The base and one instance. `one` says what the instance does."""

    def __init__(self, one: Callable[[], httpx.Response], told: int = 200) -> None:
        self._one, self._told = one, told
        self.asked: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.host, request.url.path.removeprefix("/v1/")))
        if request.url.host == "one":
            return self._one()
        if request.url.path.endswith("queues.info"):
            return httpx.Response(self._told, json=INFO if self._told == 200 else {"code": "forbidden", "retryable": False})
        return httpx.Response(200, json={"completed": 1, "ignored": []}, headers={"x-sluiceway-served-by": ONE})


def completed(kind: str, world: World, times: int = 1, retry_for: str = "0s") -> list[int]:
    """What so many calls of complete answered."""
    if kind == "sync":
        with Client(BASE, transport=httpx.MockTransport(world), direct=True, retry_for=retry_for) as client:
            return [client.complete("q", ["k.0.1"]).completed for _ in range(times)]

    async def run() -> list[int]:
        async with AsyncClient(BASE, transport=httpx.MockTransport(world), direct=True, retry_for=retry_for) as client:
            return [(await client.complete("q", ["k.0.1"])).completed for _ in range(times)]

    return asyncio.run(run())


def unreachable() -> httpx.Response:
    raise httpx.ConnectError("no")


def breaks() -> httpx.Response:
    raise httpx.ReadError("broken")


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_the_owner_is_asked_and_looked_up_once(kind: str) -> None:
    world = World(lambda: httpx.Response(200, json={"completed": 2, "ignored": []}))
    assert completed(kind, world, 3) == [2, 2, 2]
    assert world.asked == [("base", "queues.info"), *[("one", "queue.complete")] * 3]


@both
def test_the_base_is_asked_when_the_owner_cannot_be_reached(kind: str) -> None:
    world = World(unreachable)
    assert completed(kind, world) == [1]
    assert world.asked == [("base", "queues.info"), ("one", "queue.complete"), ("base", "queue.complete")]


@both
def test_an_unknown_outcome_is_repeated_at_the_base_as_long_as_the_caller_wants(kind: str) -> None:
    world = World(breaks)
    assert completed(kind, world, retry_for="1m") == [1]
    assert [call for call in world.asked if call[1] == "queue.complete"] == [("one", "queue.complete"), ("base", "queue.complete")]
    with pytest.raises(CallError) as raised:
        completed(kind, World(breaks))
    assert raised.value.code == "outcome_unknown"


@both
def test_a_key_that_may_not_read_the_queue_does_without(kind: str) -> None:
    world = World(unreachable, told=403)
    assert completed(kind, world, 3) == [1, 1, 1]
    assert world.asked == [("base", "queues.info"), *[("base", "queue.complete")] * 3]


@both
def test_leases_move_to_where_they_are_served(kind: str) -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(200, json={"queue_name": "q"}, headers={"x-sluiceway-served-by": ONE} if request.url.host == "base" else {})

    transport = httpx.MockTransport(handler)
    client: Any = (Client if kind == "sync" else AsyncClient)(BASE, transport=transport, direct=True)
    for _ in range(IN_A_ROW + 2):
        leased = client.lease("q")
        if kind == "async":
            asyncio.run(leased)
    assert asked == ["base"] * IN_A_ROW + ["one"] * 2


def test_it_is_off_unless_asked_for() -> None:
    world = World(unreachable)
    with Client(BASE, transport=httpx.MockTransport(world)) as client:
        client.complete("q", ["k.0.1"])
    assert world.asked == [("base", "queue.complete")]


# -- a real cluster ---------------------------------------------------------------------------------------------------


class Watched(httpx.HTTPTransport):
    """Notes where each call goes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append((f"{request.url.scheme}://{request.url.netloc.decode()}", request.url.path.removeprefix("/v1/")))
        return super().handle_request(request)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two processes at one address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLUICEWAY_SERVER__WORKERS", "2")
        with ServerProcess(tmp_path_factory.mktemp("direct") / "data") as server:
            yield server.url
            server.interrupt()


@pytest.mark.slow
def test_workers_are_reached_at_their_own_addresses(workers: str) -> None:
    transport = Watched()
    with Client(workers, transport=transport, direct=True) as client:
        client.create_queue("orders", requested_partitions=4)
        wait_until(lambda: len({part.address for part in client.queue_info("orders").partitions} - {None}) == 2, "two owners")
        client.produce("orders", [json.dumps(n) for n in range(50)])
        for n in range(20):
            # Keys have homes, and these have homes everywhere.
            client.produce("orders", ["x"], idempotency_key=f"key-{n}")
        owners = {part.partition: part.address for part in client.queue_info("orders").partitions}
        items = []
        while leased := client.lease("orders", batch_size=100, request_timeout="1s").items:
            items += leased
        assert len(items) == 70
        transport.sent.clear()
        for partition in {item.partition for item in items}:
            ids = [item.id for item in items if item.partition == partition]
            assert client.complete("orders", ids).completed == len(ids)
            assert transport.sent[-1] == (owners[partition], "queue.complete")
        assert sum(part.completed for part in client.stats("orders").partitions) == 70
        assert len({address for address, call in transport.sent if call == "queue.complete"}) == 2
