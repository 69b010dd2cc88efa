"""Consumers that handle the items of a key in order: the machine against a model of such a queue, and both consumers against a server."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway import testing
from sluiceway.client import DeadItem, Ignored, Item, Lease, Leased, LeasedItem, Retry, RetryItem
from sluiceway.client.arrow import LeasedTable
from sluiceway.client.lease_manager import Ask, LeaseManager, Outcome, Settle
from tests.client.lease_manager_world import AT, LEASE_TIMEOUT, Held, World, outcomes
from tests.client.test_consumer import AsyncFace, Face, SyncFace
from tests.server.server_process import PATIENCE

_numbers = itertools.count()


@dataclass
class OrderedWorld(World):
    """A server whose queue orders its items by key, with leases of runs. An item is a key and a number."""

    line: dict[str | None, list[int]] = field(default_factory=lambda: defaultdict(list))
    of: dict[str, tuple[str | None, int]] = field(default_factory=dict)
    done: list[tuple[str | None, int]] = field(default_factory=list)
    """What handlers were done with, in order."""

    def lease(self, count: int) -> Leased:
        """As much of each key as there is room for, as one lease; without a key one item."""
        lease_id, items = f"k7f3q2ma.0.L{self.made}", list[LeasedItem]()
        busy = {self.of[item_id][0] for lease in self.leases.values() for item_id in lease.open}
        for key, numbers in self.line.items():
            while numbers and len(items) < count and (key is None or key not in busy):
                items.append(LeasedItem(id=f"k7f3q2ma.0.{self.items}", origin="", partition=0, lease_id=lease_id, key=key))
                self.of[items[-1].id] = key, numbers.pop(0)
                self.items += 1
        if not items:
            return Leased(queue_name="q", partition=0)
        self.made += 1
        self.leases[lease_id] = Held(self.now + LEASE_TIMEOUT, {item.id for item in items})
        leases = [Lease(lease_id=lease_id, partition=0, count=len(items), lease_deadline=AT)]
        return Leased(queue_name="q", partition=0, leases=leases, items=items)

    def apply(self, settle: Settle) -> list[Ignored]:
        for item_id, outcome in outcomes(settle).items():
            lease = self.lease_of(item_id)
            if lease is not None and outcome != "done" and not is_dead(outcome):
                key, number = self.of[item_id]
                behind = {each for each in lease.open if key is not None and self.of[each][0] == key and self.of[each][1] > number}
                lease.open -= behind
                self.outcome |= dict.fromkeys(behind, "released")
                self.put_back({item_id, *behind})
        return super().apply(settle)

    def run_out(self) -> None:
        for lease in self.leases.values():
            if lease.lease_deadline <= self.now:
                self.put_back(lease.open)
        super().run_out()

    def put_back(self, item_ids: Iterable[str]) -> None:
        for item_id in item_ids:
            key, number = self.of[item_id]
            self.line[key] = sorted([*self.line[key], number])

    def begin(self) -> None:
        held = set(self.handling)
        super().begin()
        for item_id in set(self.handling) - held:
            key, number = self.of[item_id]
            if key is not None:
                assert key not in {self.of[each][0] for each in held}, "two items of a key are handled at once"
                assert {(key, earlier) for earlier in range(number)} <= set(self.done), "an item is begun before one in front of it is done"

    def finish(self, retry: bool = False, dead: bool = False) -> None:
        if self.handling:
            item_id = self.handling.popleft()
            outcome: Outcome = Retry(item_id, dead=dead, reason="no") if retry or dead else "done"
            self.ended[item_id] = outcome
            if not retry:
                self.done.append(self.of[item_id])
            self.keeper.finish(item_id, outcome, self.now)


def is_dead(outcome: Outcome) -> bool:
    return isinstance(outcome, Retry) and outcome.dead


def ordered_world(keys: dict[str | None, int], concurrency: int = 3, prefetch: int = 6) -> OrderedWorld:
    keeper = LeaseManager(concurrency, prefetch, LEASE_TIMEOUT, 50, patience=2_000, handler_time=0, ordered=True)
    made = OrderedWorld(keeper)
    for key, count in keys.items():
        made.line[key] = list(range(count))
    return made


def leased_world(keys: dict[str | None, int], **options: int) -> OrderedWorld:
    made = ordered_world(keys, **options)
    made.pump()
    made.answer_ask(9)
    made.pump()
    return made


def begun(it: OrderedWorld) -> list[tuple[str | None, int]]:
    """What is being handled, after all has been begun that may be."""
    for _ in range(it.keeper.concurrency):
        it.begin()
    return [it.of[item_id] for item_id in it.handling]


def test_items_of_a_key_are_handled_one_after_the_other_and_others_beside_them() -> None:
    it = leased_world({"a": 3, "b": 2, None: 2})
    assert begun(it) == [("a", 0), ("b", 0), (None, 0)]
    it.finish()
    assert begun(it) == [("b", 0), (None, 0), (None, 1)]
    it.finish()
    it.finish()
    assert begun(it) == [(None, 1), ("a", 1), ("b", 1)]


def test_an_item_that_is_put_back_takes_those_behind_it_along() -> None:
    it = leased_world({"a": 3, "b": 2})
    assert begun(it) == [("a", 0), ("b", 0)]
    it.finish(retry=True)
    assert begun(it) == [("b", 0)]
    it.finish()
    assert begun(it) == [("b", 1)]
    it.tick(50)
    it.pump()
    settle = it.calls[Settle]
    assert isinstance(settle, Settle)
    assert [it.of[each] for each in (*(retry.id for retry in settle.retries), *settle.released)] == [("a", 0), ("a", 1), ("a", 2)]


def test_an_item_that_dies_lets_the_next_one_go() -> None:
    it = leased_world({"a": 3})
    assert begun(it) == [("a", 0)]
    it.finish(dead=True)
    assert begun(it) == [("a", 1)]


def test_items_behind_one_that_is_being_handled_do_not_keep_handlers_idle() -> None:
    """Nothing that it holds can be begun: it asks for other keys although there is little room."""
    it = leased_world({"a": 8})
    assert begun(it) == [("a", 0)]
    it.line["b"] = [0]
    it.pump()
    assert it.calls[Ask] == Ask(1)
    it.answer_ask(1)
    assert begun(it) == [("a", 0), ("b", 0)]


def test_a_lost_lease_lets_nothing_overtake_what_is_still_being_handled() -> None:
    """Its handler goes on. What is leased again waits for it, and then comes from the first item on."""
    it = leased_world({"a": 2}, prefetch=0)
    assert begun(it) == [("a", 0)]
    it.tick(LEASE_TIMEOUT)
    it.pump()
    assert it.lost
    it.answer_ask(2)
    it.begin()
    assert list(it.handling) == [it.received[0]]
    it.finish()
    assert begun(it) == [("a", 0)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(1, LEASE_TIMEOUT // 2)),
        st.tuples(st.just("ask"), st.integers(0, 15)),
        st.tuples(st.sampled_from(["extend", "settle"]), st.integers(0, 4)),
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 3)),
    ),
    max_size=80,
)


@given(st.integers(1, 3), st.integers(0, 6), st.lists(st.integers(0, 8), min_size=1, max_size=3), STEPS)
def test_whatever_fails_the_items_of_a_key_are_handled_in_order(
    concurrency: int, prefetch: int, keys: list[int], steps: list[tuple[str, int]]
) -> None:
    """`begin` checks it. At last, with a server that answers, everything is handled."""
    it = ordered_world({None: 3, **{f"k{at}": count for at, count in enumerate(keys)}}, concurrency, prefetch)
    for step, value in steps:
        if step == "tick":
            it.tick(value)
        elif step == "ask":
            it.answer_ask(value // 2, heard=value % 2 == 0)
        elif step == "extend":
            it.answer_extend(done=value != 1, heard=value != 2)
        elif step == "settle":
            it.answer_settle(done=value != 1, heard=value != 2)
        elif step == "begin":
            it.begin()
        else:
            it.finish(retry=value == 1, dead=value == 2)
        it.pump()
    wanted = {(key, number) for key, count in ((None, 3), *((f"k{at}", count) for at, count in enumerate(keys))) for number in range(count)}
    for _ in range(1_000):
        if set(it.done) == wanted:
            break
        it.pump()
        it.answer_ask(9)
        it.answer_extend()
        it.answer_settle()
        it.begin()
        it.finish()
        it.tick(60)
    assert set(it.done) == wanted


# -- with a server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[testing.TestServer]:
    with testing.server() as server:
        yield server


@pytest.fixture(params=[SyncFace, AsyncFace], ids=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    made: Face = request.param
    return made


@pytest.fixture
def queue(served: testing.TestServer) -> str:
    """A queue of six keys with ten items each, whose payloads say which."""
    name = f"ordered-{next(_numbers)}"
    served.client.create_queue(name, requested_partitions=2, order="key")
    served.client.produce(name, [Item(f"{key} {number}", key=key) for number in range(10) for key in "abcdef"])
    return name


class Work:
    """A handler that checks the order, fails at some items the first time, and stops the consumer when all are done."""

    def __init__(self, failures: dict[str, Exception]) -> None:
        self.failures = failures
        self.done: dict[str, list[int]] = defaultdict(list)
        self.at_once = threading.Barrier(2)
        self.handling: set[str] = set()
        self.wrong: list[str] = []
        self.lock = threading.Lock()
        self.stop: Callable[[], None]

    def __call__(self, item: LeasedItem) -> None:
        key, number = item.payload.decode().split()
        with self.lock:
            if key in self.handling or int(number) != len(self.done[key]):
                self.wrong.append(f"{item.payload!r} while {self.handling} are handled, after {self.done[key]}")
            self.handling.add(key)
        try:
            if number == "0" and key in "ab" and not self.done[key]:
                self.at_once.wait(PATIENCE)  # two keys at once
            failure = self.failures.pop(item.payload.decode(), None)
            if isinstance(failure, DeadItem):
                self.done[key].append(int(number))
            if failure is not None:
                raise failure
            self.done[key].append(int(number))
        finally:
            with self.lock:
                self.handling.remove(key)
                if sum(map(len, self.done.values())) == 60:
                    self.stop()


def test_a_consumer_handles_the_items_of_a_key_in_order(face: Face, served: testing.TestServer, queue: str) -> None:
    """Some are put back, by an exception and for a time, and one dies; keys are handled beside each other."""
    work = Work({"a 3": RetryItem("0s"), "b 5": ValueError("no"), "c 7": RetryItem("50ms"), "d 1": DeadItem("bad")})
    consumer = face(served.url, queue, ordered=True)
    work.stop = consumer.stop
    consumer.run(work)
    assert not work.wrong
    assert work.done == {key: list(range(10)) for key in "abcdef"}
    assert not work.failures
    stats = served.client.stats(queue).partitions
    assert sum(part.total for part in stats) == 0
    assert sum(part.retried for part in stats) == 3


def test_a_consumer_leases_several_items_of_a_key_at_once(face: Face, served: testing.TestServer, queue: str) -> None:
    leased: dict[str, list[str]] = defaultdict(list)
    consumer = face(served.url, queue, ordered=True)

    def note(item: LeasedItem) -> None:
        leased[item.lease_id or ""].append(item.payload.decode())
        if sum(map(len, leased.values())) == 60:
            consumer.stop()

    consumer.run(note, concurrency=1)
    assert any(len({item[0] for item in items}) < len(items) for items in leased.values())


def test_a_list_of_items_has_one_of_each_key(face: Face, served: testing.TestServer, queue: str) -> None:
    seen: list[list[str]] = []
    consumer = face(served.url, queue, ordered=True)

    def note(items: list[LeasedItem]) -> None:
        seen.append([item.payload.decode() for item in items])
        if sum(map(len, seen)) == 60:
            consumer.stop()

    consumer.run_batches(note, batch_size=20)
    for items in seen:
        assert len({item.split()[0] for item in items}) == len(items)
    assert max(map(len, seen)) > 1
    for key in "abcdef":
        assert [item for items in seen for item in items if item[0] == key] == [f"{key} {number}" for number in range(10)]


def test_a_table_has_runs_and_one_item_that_is_put_back_takes_those_behind_it_along(
    face: Face, served: testing.TestServer, queue: str
) -> None:
    done: dict[str, list[int]] = defaultdict(list)
    failed: list[str] = []
    consumer = face(served.url, queue, ordered=True)

    def handle(leased: LeasedTable) -> object:
        outcomes: dict[str, RetryItem] = {}
        over: set[str] = set()
        for item_id, payload in zip(leased.ids().to_pylist(), leased.table["payload"].to_pylist(), strict=True):
            key, number = payload.decode().split()
            if key in over:
                continue
            if payload == b"c 4" and not failed:
                failed.append(key)
                over.add(key)
                outcomes[item_id] = RetryItem("0s")
            else:
                assert len(done[key]) == int(number), payload
                done[key].append(int(number))
        if sum(map(len, done.values())) == 60:
            consumer.stop()
        return outcomes

    consumer.run_tables(handle, batch_size=60)
    assert done == {key: list(range(10)) for key in "abcdef"}
    assert failed == ["c"]


def test_a_lease_may_have_runs(served: testing.TestServer, queue: str) -> None:
    client = served.client
    single = client.lease(queue, batch_size=100, max_partitions=2)
    assert sorted(item.payload for item in single) == [f"{key} 0".encode() for key in "abcdef"]
    client.release(queue, lease_ids=single.lease_ids)
    runs = client.lease(queue, batch_size=100, max_partitions=2, runs=True)
    client.release(queue, lease_ids=runs.lease_ids)
    table = client.lease_arrow(queue, batch_size=100, max_partitions=2, runs=True)
    for payloads in ([item.payload for item in runs], table.table["payload"].to_pylist()):
        for key in "abcdef":
            assert [each for each in payloads if each[:1] == key.encode()] == [f"{key} {number}".encode() for number in range(10)]


def test_a_producer_keeps_the_order_of_each_key_and_has_the_ids(served: testing.TestServer, queue: str) -> None:
    """Its batches are divided among partitions."""
    client = served.client
    client.complete(queue, lease_ids=client.lease(queue, batch_size=100, max_partitions=2, runs=True).lease_ids)
    with client.producer(queue, max_in_flight=1, max_batch=7, linger="0s") as producer:
        sent = {producer.send(f"{key} {number}", key=key): f"{key} {number}" for number in range(10) for key in "abcdef"}
    leased = client.lease(queue, batch_size=100, max_partitions=2, runs=True)
    assert {item.id: item.payload.decode() for item in leased} == {each.result(PATIENCE): payload for each, payload in sent.items()}
    for key in "abcdef":
        assert [item.payload.decode() for item in leased if item.key == key] == [f"{key} {number}" for number in range(10)]
