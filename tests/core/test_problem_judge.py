"""The judge names each incident within 15 s, lets it go when it is over, and finds nothing wrong with a healthy queue."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.core.partition.held_keys import Holder
from sluiceway.core.problems.judge import Judge
from sluiceway.core.problems.observations import BackendSample, FailedQuery, HeldUp, InstanceSample, QueueFacts, QueueSample, Repeat
from sluiceway.core.problems.thresholds import CLEARS_AFTER, DEAD_SHOWN, INTERVAL, MEMORY
from sluiceway.kernel.clock import Millis
from sluiceway.model.problems import Problem, merge

START: Millis = 1_000_000_000_000
NAMED_WITHIN: Millis = 15_000


@dataclass
class Queue:
    """A queue on a virtual clock: a step lets a second pass, and the judge looks at every other one."""

    facts: QueueFacts = field(default_factory=lambda: QueueFacts("orders", updated_at=START - 3_600_000))
    judge: Judge = field(default_factory=Judge)
    now: Millis = START
    sample: QueueSample = field(default_factory=lambda: QueueSample(START))
    seen: dict[str, Millis] = field(default_factory=dict)
    """When each kind was first found."""

    def put(self, count: int) -> None:
        self.sample = self.sample._replace(ready=self.sample.ready + count, produced=self.sample.produced + count)
        if self.sample.oldest_at is None and count:
            self.sample = self.sample._replace(oldest_at=self.now)

    def take(self, count: int, client: str = "c", lease: int | None = None) -> int:
        """Lease up to so many, as one lease. A call that gets nothing waits."""
        count = min(count, self.sample.ready)
        held = {name: dict(leases) for name, leases in self.sample.held.items()}
        if count:
            held.setdefault(client, {})[0, lease or self.sample.taken + 1] = count
        waiting = {*self.sample.waiting} - {client} if count else {*self.sample.waiting, client}
        self.sample = self.sample._replace(
            ready=self.sample.ready - count,
            leased=self.sample.leased + count,
            taken=self.sample.taken + count,
            seen_at=self.now,
            held=held,
            waiting=tuple(sorted(waiting)),
            oldest_at=self.sample.oldest_at if self.sample.ready > count else None,
        )
        return count

    def settle(self, outcome: str, count: int, client: str = "c") -> None:
        """Settle the client's oldest items."""
        held = {name: dict(leases) for name, leases in self.sample.held.items()}
        left = count
        for lease, open_items in list(held.get(client, {}).items()):
            done = min(left, open_items)
            left -= done
            held[client][lease] -= done
            if not held[client][lease]:
                del held[client][lease]
        done = count - left
        back = done if outcome in ("retried", "expired", "released") else 0
        self.sample = self.sample._replace(
            held={name: leases for name, leases in held.items() if leases},
            leased=self.sample.leased - done,
            ready=self.sample.ready + back,
            **{outcome: getattr(self.sample, outcome) + done},
        )

    def idle(self, client: str = "c") -> None:
        """The client's lease call has ended."""
        self.sample = self.sample._replace(waiting=tuple(each for each in self.sample.waiting if each != client))

    def work(self, count: int, outcome: str = "completed") -> None:
        """A quick consumer: takes and settles within the second."""
        self.settle(outcome, self.take(count))

    def step(self) -> list[Problem]:
        self.now += 1_000
        if (self.now - START) % INTERVAL == 0:
            self.judge.see_queue("k7f3q2ma", self.facts, self.sample._replace(at=self.now))
            for each in self.judge.problems():
                self.seen.setdefault(each.kind, self.now)
        return self.judge.problems()

    def run(self, seconds: int, second: Callable[[int], Any] = lambda n: None) -> list[Problem]:
        found: list[Problem] = []
        for n in range(seconds):
            second(n)
            found = self.step()
        return found

    def kinds(self) -> list[str]:
        return [each.kind for each in self.judge.problems()]


def steady(queue: Queue, seconds: int = 40) -> None:
    """Ten items a second, all completed."""

    def second(n: int) -> None:
        queue.put(10)
        queue.work(10)
        queue.take(1)

    queue.run(seconds, second)
    queue.idle()
    assert not queue.seen


def assert_named(queue: Queue, kind: str, began: Millis) -> Problem:
    assert kind in queue.seen, f"{kind} was never found; found: {queue.seen}"
    assert queue.seen[kind] - began <= NAMED_WITHIN - 2_000, "with a sample and a page on top it must be within 15 s"
    return next(each for each in queue.judge.problems() if each.kind == kind)


def assert_clears(queue: Queue, kind: str, second: Callable[[int], Any], within: Millis = MEMORY) -> None:
    began = queue.now
    while kind in queue.kinds():
        queue.run(1, lambda _: second(0))
        assert queue.now - began <= within + CLEARS_AFTER + 2 * INTERVAL, f"{kind} stays"


def healthy(queue: Queue) -> Callable[[int], None]:
    def second(n: int) -> None:
        queue.put(10)
        queue.work(10 + queue.sample.ready)

    return second


# ---- each incident is named, and goes ---------------------------------------------------------------------------------


def test_consumers_that_stopped() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    queue.run(20, lambda n: queue.put(10))
    problem = assert_named(queue, "no_consumer", began)
    assert "200 items ready" in queue.judge.problems()[0].message
    assert problem.severity == "warning"
    assert problem.queue_name == problem.subject == "orders"
    assert abs(problem.since - began) <= INTERVAL
    assert queue.kinds() == ["no_consumer"]
    assert_clears(queue, "no_consumer", healthy(queue), 0)


def test_a_queue_that_nobody_ever_consumed() -> None:
    queue = Queue()
    queue.run(10)
    began = queue.now
    queue.put(3)
    queue.run(16)
    assert "no consumer has requested items since" in assert_named(queue, "no_consumer", began).cause


def test_items_that_no_consumer_can_get_need_none() -> None:
    """All keys wait for the delay of a retry, and the consumers ask now and then. Then the delays are over."""
    queue = Queue()
    queue.put(200)
    queue.sample = queue.sample._replace(blocked=200)
    queue.run(600)
    assert not queue.seen
    began = queue.now
    queue.sample = queue.sample._replace(blocked=150)
    queue.run(16)
    assert abs(assert_named(queue, "no_consumer", began).since - began) <= INTERVAL


def test_a_dead_queue_need_not_be_consumed() -> None:
    queue = Queue(QueueFacts("dead", is_dead_queue=True))
    queue.put(3)
    queue.run(60)
    assert not queue.seen


def test_a_dependency_that_fails_most_of_the_time() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now

    def second(n: int) -> None:
        queue.put(5)
        queue.work(4, "retried")
        queue.work(1)

    queue.run(20, second)
    problem = assert_named(queue, "failure_rate", began)
    assert problem.severity == "critical"
    assert "80 % of the items fail (4.0/s" in problem.message
    assert set(queue.seen) == {"failure_rate"}
    assert_clears(queue, "failure_rate", healthy(queue), 10_000)


def test_the_single_item_that_failed_51_times_a_second() -> None:
    queue = Queue()
    queue.put(1)
    began = queue.now
    attempts = 0

    def second(n: int) -> None:
        nonlocal attempts
        for _ in range(51):
            queue.work(1, "retried")
        attempts += 51
        queue.sample = queue.sample._replace(repeats=(Repeat(0, 0, attempts, queue.now),))

    queue.run(14, second)
    assert assert_named(queue, "failure_rate", began).severity == "critical"


def test_a_poison_item_among_good_ones() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    attempts = 0

    def second(n: int) -> None:
        nonlocal attempts
        queue.put(5)
        queue.work(5)
        queue.put(1)
        for _ in range(20):
            queue.work(1, "retried")
        queue.work(1)
        attempts += 20
        queue.sample = queue.sample._replace(repeats=(Repeat(0, 17, attempts, queue.now),))

    queue.run(14, second)
    problem = assert_named(queue, "poison_item", began)
    assert "1 item fails again and again, up to 280 times" in problem.message
    assert "partition 0, first offset 17" in problem.cause
    # The item is at fault, and not what all depend on: one cause is named once.
    assert set(queue.seen) == {"poison_item"}
    queue.sample = queue.sample._replace(repeats=())
    assert_clears(queue, "poison_item", healthy(queue), 0)


def test_an_item_that_fails_without_end_in_a_quiet_queue() -> None:
    queue = Queue()
    queue.put(1)
    queue.work(1, "retried")
    queue.sample = queue.sample._replace(ready=0, scheduled=1, repeats=(Repeat(2, 5, 10, START),))
    queue.run(4)
    assert queue.kinds() == ["poison_item"]


ORDERED = QueueFacts("orders", incarnation="abc", order=True)


def held_up(key: str = "ada", behind: int = 20, attempts: int = 0, **holder: Any) -> HeldUp:
    return HeldUp(1, Holder(17, 0, hash(key), behind, attempts, **holder), key)


def test_a_poison_item_at_the_head_of_its_key() -> None:
    queue = Queue(ORDERED)
    steady(queue)
    began = queue.now

    def second(n: int) -> None:
        queue.put(5)
        queue.work(5)
        queue.put(1)
        queue.work(1, "retried")
        queue.work(1)
        queue.sample = queue.sample._replace(repeats=(Repeat(1, 17, 4 + n, queue.now),), held_up=(held_up(behind=1, attempts=4 + n),))

    queue.run(14, second)
    problem = assert_named(queue, "key_held_up", began)
    assert problem.subject == "ada"
    assert problem.message == "1 item of key ada in orders waits for item abc.1.17, which has failed 17 times"
    assert problem.page == "/ui/queues/orders/items?id=abc.1.17"
    # It is the same item: one cause is named once.
    assert set(queue.seen) == {"key_held_up"}
    queue.sample = queue.sample._replace(repeats=(), held_up=())
    assert_clears(queue, "key_held_up", healthy(queue), 0)


def test_a_dependency_that_fails_holds_up_no_key_in_particular() -> None:
    queue = Queue(ORDERED)
    steady(queue)

    def second(n: int) -> None:
        queue.put(5)
        queue.work(5, "retried")
        if n > 6:
            repeat = (Repeat(1, 17, 4, queue.now),)
            queue.sample = queue.sample._replace(repeats=repeat, held_up=(held_up(attempts=4),))

    queue.run(20, second)
    assert set(queue.seen) == {"failure_rate"}


def test_a_single_item_that_fails_holds_up_many() -> None:
    """Nothing else is done in the queue, so nothing tells that others would be."""
    queue = Queue(ORDERED)
    queue.put(11)
    queue.sample = queue.sample._replace(ready=10, scheduled=1, blocked=10, repeats=(Repeat(1, 17, 4, START),))
    few, many = held_up(behind=9, attempts=4), held_up(behind=10, attempts=4)
    queue.sample = queue.sample._replace(held_up=(few,))
    queue.run(20)
    assert queue.kinds() == []
    queue.sample = queue.sample._replace(held_up=(few, many._replace(key="bob")))
    queue.run(2)
    (problem,) = queue.judge.problems()
    assert (problem.kind, problem.subject) == ("key_held_up", "bob")


def test_a_key_that_a_lease_or_a_retry_holds_up_for_long() -> None:
    queue = Queue(ORDERED)
    queue.put(20)
    leased = held_up(client_id="slow", leased_at=START - 180_000)
    queue.sample = queue.sample._replace(blocked=20, leased=1, held_up=(leased,))
    queue.run(2)
    (problem,) = queue.judge.problems()
    assert problem.message.startswith("20 items of key ada in orders wait for item abc.1.17, which consumer slow has leased for 3 min")
    assert (problem.since, problem.command) == (START - 180_000, "sluiceway search orders --id abc.1.17")
    queue.sample = queue.sample._replace(held_up=())
    assert_clears(queue, "key_held_up", lambda n: None, 0)
    queue.sample = queue.sample._replace(leased=0, scheduled=1, held_up=(held_up("bob", due_at=queue.now + 3_600_000, attempts=1),))
    queue.run(2)
    (problem,) = queue.judge.problems()
    assert "which is retried in 59 min" in problem.message
    assert problem.command.endswith("--run-now")


def test_items_that_die_and_where_they_are() -> None:
    queue = Queue(QueueFacts("orders", dead_queue="orders.dead"))
    steady(queue)
    began = queue.now
    queue.put(3)
    queue.work(3, "dead")
    queue.run(4, healthy(queue))
    assert "3 items died in the last minute and are in orders.dead" in assert_named(queue, "dead_letters", began).message
    assert_clears(queue, "dead_letters", healthy(queue), DEAD_SHOWN)


def test_a_queue_that_is_paused_and_forgotten() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    queue.facts = queue.facts._replace(paused=("lease", "produce"))
    queue.put(7)
    queue.run(14)
    problem = assert_named(queue, "queue_paused", began)
    assert "7 items ready" in problem.message
    assert abs(problem.since - began) <= INTERVAL
    assert set(queue.seen) == {"queue_paused"}
    queue.facts = queue.facts._replace(paused=())
    queue.run(2, healthy(queue))
    assert queue.kinds() == []


def test_a_pause_of_produces_is_told_once_producers_are_refused() -> None:
    queue = Queue()
    queue.facts = queue.facts._replace(paused=("produce",), updated_at=START)
    queue.run(30)
    assert not queue.seen
    queue.sample = queue.sample._replace(refused={"queue_paused": 2})
    queue.run(2)
    assert "2 produces were refused" in queue.judge.problems()[0].message


def test_a_pause_of_before_the_start_is_as_old_as_the_settings() -> None:
    queue = Queue()
    queue.facts = queue.facts._replace(paused=("lease",))
    queue.put(1)
    queue.run(2)
    assert "leasing has been paused for 60 min" in queue.judge.problems()[0].message


def test_leases_that_run_out() -> None:
    queue = Queue()
    steady(queue)
    queue.put(30)
    began = queue.now

    def second(n: int) -> None:
        if n % 2 == 0:
            queue.settle("expired", 5)
            queue.take(5)

    queue.run(12, second)
    assert "ran out" in assert_named(queue, "leases_expiring", began).message
    queue.settle("completed", 5)
    assert_clears(queue, "leases_expiring", healthy(queue), 30_000)


def test_handlers_that_have_become_slow() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    queue.put(2)
    queue.take(1, "a")
    queue.take(1, "b")

    def second(n: int) -> None:
        queue.put(5)
        if n % 12 == 11:
            queue.settle("completed", 1, "a")
            queue.take(1, "a")

    queue.run(14, second)
    problem = assert_named(queue, "slow_handlers", began)
    assert re.fullmatch(
        r"2 consumers have held \d items? for over 6 s while \d+ are ready: 5.0/s come in, 0.\d/s are completed", problem.message
    ), problem.message
    assert set(queue.seen) == {"slow_handlers"}


def test_consumers_are_not_slow_where_the_items_wait_for_their_keys() -> None:
    """As `test_handlers_that_have_become_slow`, but no further consumer would get an item."""
    queue = Queue()
    steady(queue)
    queue.put(2)
    queue.take(1, "a")
    queue.take(1, "b")

    def second(n: int) -> None:
        queue.put(5)
        queue.sample = queue.sample._replace(blocked=queue.sample.ready)
        if n % 12 == 11:
            queue.settle("completed", 1, "a")
            queue.take(1, "a")
            queue.sample = queue.sample._replace(blocked=queue.sample.ready)

    queue.run(60, second)
    assert not queue.seen


def test_a_consumer_does_not_hoard_what_others_could_not_have() -> None:
    """It holds long runs of a few keys in order, and others wait."""
    queue = Queue(QueueFacts("orders", order=True))
    steady(queue)
    queue.put(400)
    queue.take(200, "busy")
    queue.sample = queue.sample._replace(blocked=queue.sample.ready, waiting=("hungry",), held_keys={"busy": 9})
    queue.run(60)
    assert not queue.seen


@pytest.mark.parametrize("facts", [QueueFacts("orders", order=True), QueueFacts("orders")], ids=["order", "limits"])
def test_a_consumer_that_hoards_all_keys(facts: QueueFacts) -> None:
    """It holds an item of each key, others wait for some, and what is ready is blocked by what it holds."""
    queue = Queue(facts)
    steady(queue)
    began = queue.now
    queue.put(400)
    queue.take(200, "greedy")
    queue.sample = queue.sample._replace(blocked=queue.sample.ready, waiting=("hungry",), held_keys={"greedy": 10} if facts.order else {})
    queue.run(14)
    assert assert_named(queue, "consumer_hoarding", began).subject == "greedy"
    assert set(queue.seen) == {"consumer_hoarding"}
    queue.sample = queue.sample._replace(blocked=0, held_keys={})
    assert_clears(queue, "consumer_hoarding", lambda n: None, 0)


def test_a_consumer_that_hoards() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    queue.put(200)
    queue.take(200, "greedy")
    queue.take(1, "hungry")

    def second(n: int) -> None:
        queue.settle("completed", 1, "greedy")
        queue.take(1, "hungry")

    queue.run(14, second)
    problem = assert_named(queue, "consumer_hoarding", began)
    assert problem.subject == "greedy"
    assert "1 other consumer has no items" in problem.message
    assert set(queue.seen) == {"consumer_hoarding"}
    queue.settle("completed", 200, "greedy")
    assert_clears(queue, "consumer_hoarding", healthy(queue), 0)


def test_produces_that_are_refused() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now

    def second(n: int) -> None:
        queue.sample = queue.sample._replace(refused={"storage_full": n + 1})

    queue.run(4, second)
    problem = assert_named(queue, "produce_refused", began)
    assert (problem.severity, "storage_full" in problem.message) == ("critical", True)
    assert_clears(queue, "produce_refused", healthy(queue), 10_000)


def test_a_partition_that_does_not_open() -> None:
    queue = Queue()
    steady(queue)
    began = queue.now
    queue.sample = queue.sample._replace(partitions=4, unserved={2: "no answer"})
    queue.run(8)
    problem = assert_named(queue, "partition_unavailable", began)
    assert "1 of 4 partitions" in problem.message
    assert problem.cause == "partition 2: no answer"
    queue.sample = queue.sample._replace(unserved={})
    assert_clears(queue, "partition_unavailable", healthy(queue), 0)


def test_a_query_that_failed() -> None:
    queue = Queue()
    queue.sample = queue.sample._replace(failed_queries=(FailedQuery("spark", "sums", "boom", START - 5_000),))
    problem = queue.run(2)[0]
    assert (problem.kind, problem.subject, problem.cause, problem.since) == ("query_failed", "sums", "boom", START - 5_000)


def test_a_queue_whose_next_item_is_older_than_its_target() -> None:
    queue = Queue()
    queue.facts = queue.facts._replace(target_age=5_000)
    queue.put(100)
    queue.run(12, lambda n: queue.work(1))
    problem = assert_named(queue, "backlog_age", START + 5_000)
    assert (problem.since, "the target is 5 s" in problem.message) == (START + 5_000, True)
    assert_clears(queue, "backlog_age", lambda n: queue.work(200), 0)


def test_a_backlog_of_keys_is_not_said_to_be_the_consumers() -> None:
    queue = Queue()
    queue.facts = queue.facts._replace(target_age=5_000)
    queue.put(100)
    queue.sample = queue.sample._replace(blocked=100, waiting=("c",))
    queue.run(12)
    (problem,) = queue.judge.problems()
    assert (problem.kind, problem.command) == ("backlog_age", "sluiceway queue keys orders")
    assert problem.cause.startswith("100 items cannot be leased: an earlier one of the key is leased")


# ---- healthy histories ------------------------------------------------------------------------------------------------


def bursty(queue: Queue) -> Callable[[int], None]:
    """Five hundred at once every 30 s, thirty of which are done each second."""

    def second(n: int) -> None:
        if n % 30 == 0:
            queue.put(500)
        queue.work(30)

    return second


def slow_and_steady(queue: Queue) -> Callable[[int], None]:
    """One item in five seconds, one after the other, and a backlog that does not grow."""

    def second(n: int) -> None:
        if n == 0:
            queue.put(50)
        if n % 5 == 0:
            queue.settle("completed", 1)
            queue.put(1)
            queue.take(1)

    return second


def empty(queue: Queue) -> Callable[[int], None]:
    return lambda n: None


def polled_now_and_then(queue: Queue) -> Callable[[int], None]:
    """A consumer that looks every seven seconds."""

    def second(n: int) -> None:
        queue.put(1)
        if n % 7 == 0:
            queue.work(100)
            queue.idle()

    return second


def restarting(queue: Queue) -> Callable[[int], None]:
    """A consumer that is away for six seconds every half minute."""

    def second(n: int) -> None:
        queue.put(10)
        if n % 30 >= 6:
            queue.work(50)
        else:
            queue.idle()

    return second


def crashing_once(queue: Queue) -> Callable[[int], None]:
    """Ten items of a busy queue come back by the end of a lease."""

    def second(n: int) -> None:
        queue.put(20)
        queue.work(30)
        if n == 20:
            queue.put(10)
            queue.take(10)
            queue.settle("expired", 10)

    return second


def long_handler(queue: Queue) -> Callable[[int], None]:
    """An item that takes minutes, whose lease is renewed, and nothing else."""

    def second(n: int) -> None:
        if n == 0:
            queue.put(1)
            queue.take(1)

    return second


def occasional_failure(queue: Queue) -> Callable[[int], None]:
    """One item in twenty is retried."""

    def second(n: int) -> None:
        queue.put(20)
        queue.work(1, "retried")
        queue.work(20)

    return second


def rare_failure_of_a_slow_queue(queue: Queue) -> Callable[[int], None]:
    """An item every four seconds, of which one a minute fails."""

    def second(n: int) -> None:
        if n % 4 == 0:
            queue.put(1)
            queue.work(1, "retried" if n % 60 == 0 else "completed")
            queue.work(1)

    return second


def a_batch_every_ten_seconds(queue: Queue) -> Callable[[int], None]:
    """Spark: each batch takes all that is there, and works on it for ten seconds."""

    def second(n: int) -> None:
        if n % 10 == 0:
            queue.settle("completed", 10_000)
            queue.take(10_000)
            queue.idle()
        queue.put(40)

    return second


def idle_consumers(queue: Queue) -> Callable[[int], None]:
    """Three wait, and one works on a few items for long."""

    def second(n: int) -> None:
        if n == 0:
            queue.put(3)
            queue.take(3, "busy")
        for name in ("x", "y", "z"):
            queue.take(1, name)

    return second


def growing_load(queue: Queue) -> Callable[[int], None]:
    """Ever more comes in, and quick consumers follow a little late."""

    def second(n: int) -> None:
        queue.put(10 + 10 * n)
        queue.work(10 * n)

    return second


HEALTHY = (
    bursty,
    slow_and_steady,
    empty,
    polled_now_and_then,
    restarting,
    crashing_once,
    long_handler,
    occasional_failure,
    rare_failure_of_a_slow_queue,
    a_batch_every_ten_seconds,
    idle_consumers,
    growing_load,
)


@pytest.mark.parametrize("history", HEALTHY, ids=lambda each: each.__name__)
def test_a_healthy_queue_has_no_problem(history: Callable[[Queue], Callable[[int], None]]) -> None:
    queue = Queue()
    queue.run(300, history(queue))
    assert not queue.seen, queue.judge.problems()


@given(st.lists(st.sampled_from((bursty, slow_and_steady, occasional_failure, growing_load)), min_size=1, max_size=6), st.integers(5, 60))
def test_a_load_that_changes_is_no_problem(histories: list[Any], seconds: int) -> None:
    queue = Queue()
    for history in histories:
        queue.run(seconds, history(queue))
        queue.settle("completed", 1_000_000)
    assert not queue.seen, queue.judge.problems()


@given(st.lists(st.tuples(*(st.integers(0, 50) for _ in range(9))), max_size=80), st.integers(500, 5_000))
def test_whatever_it_is_told_it_says_each_problem_once_and_since_when(rows: list[tuple[int, ...]], pause: Millis) -> None:
    judge, now = Judge(), START
    for row in rows:
        now += pause
        ready, leased, scheduled, produced, taken, completed, retried, expired, dead = row
        sample = QueueSample(
            now, ready, leased, scheduled, now - 1_000 if ready else None, produced, taken, completed, retried, expired, dead
        )
        judge.see_queue("k7f3q2ma", QueueFacts("orders", paused=("lease",) if ready % 7 == 0 else ()), sample)
        found = judge.problems()
        assert len({(each.kind, each.subject) for each in found}) == len(found)
        assert all(each.since <= now and each.message and each.command.startswith("sluiceway ") for each in found)
        assert merge([*found, *found]) == found


def test_a_deleted_queue_takes_its_problems_with_it() -> None:
    queue = Queue()
    queue.put(1)
    queue.run(20)
    assert queue.kinds() == ["no_consumer"]
    queue.judge.keep(())
    assert queue.kinds() == []


def test_one_quiet_sample_does_not_end_a_problem() -> None:
    queue = Queue()
    queue.put(5)
    queue.run(20)
    since = queue.judge.problems()[0].since
    queue.work(1)
    queue.run(2)
    assert [each.since for each in queue.judge.problems()] == [since]


# ---- the instance -----------------------------------------------------------------------------------------------------


def looks(*samples: InstanceSample) -> Iterator[list[tuple[str, str, str]]]:
    judge = Judge("i1")
    for n, sample in enumerate(samples):
        judge.see_instance(sample._replace(at=START + n * INTERVAL))
        yield [(each.kind, each.severity, each.subject) for each in judge.problems()]


def test_a_backend_that_is_slow_stuck_or_down() -> None:
    def of(problem: str | None, slowest: Millis) -> InstanceSample:
        return InstanceSample(0, (BackendSample("db", problem, slowest, "orders"), BackendSample("disk", None, 3)))

    first, *_, last = looks(of(None, 600), of(None, 700), of(None, 800))
    assert first == []
    assert last == [("backend_slow", "warning", "db")]
    # One commit that hangs is enough.
    assert list(looks(of(None, 4_500))) == [[("backend_slow", "critical", "db")]]
    assert list(looks(of("no answer", 0))) == [[("backend_down", "critical", "db")]]
    assert list(looks(of("no answer", 0), *[of(None, 3)] * 3))[-1] == []


def test_a_bucket_that_goes_on_refusing_requests() -> None:
    def of(share: float) -> InstanceSample:
        return InstanceSample(0, throttled={"backend cloud": share, "the meta store": 0.0})

    *_, second, third = looks(of(0.1), of(0.5), of(0.3))
    assert second == []
    assert third == [("bucket_throttled", "warning", "backend cloud")]
    assert [*looks(*[of(0.09)] * 4)][-1] == []
    # Each time for a moment.
    assert not any(looks(*[of(0.5), of(0.5), of(0.0)] * 3))


def test_an_upgrade_that_is_not_finalized_is_remembered_after_a_day() -> None:
    judge = Judge("i1")
    for hour in range(25):
        assert judge.problems() == []
        judge.see_instance(InstanceSample(hour * 3_600_000, level=11, reachable_level=12))
    (found,) = judge.problems()
    assert (found.kind, found.severity, found.command) == ("upgrade_open", "warning", "sluiceway upgrade finalize")
    assert found.message == "the upgrade to compatibility level 12 is not finalized"
    judge.see_instance(InstanceSample(26 * 3_600_000, level=12, reachable_level=12))
    assert judge.problems() == []


def test_what_is_wrong_with_the_instance() -> None:
    sample = InstanceSample(0, silent=("i2",), disks={"the data": "no room"}, clock="10 s ahead", idle="it joins")
    *_, last = looks(sample, sample, sample)
    assert set(last) == {
        ("instance_silent", "critical", "i2"),
        ("disk_full", "critical", "the data"),
        ("clock_wrong", "critical", "clock"),
        ("instance_idle", "critical", "i1"),
    }


def test_instances_that_find_the_same_say_it_once() -> None:
    one = Problem("no_consumer", "warning", "q", "q", "3 items", "", "", "", 20, "i1")
    other = one._replace(message="5 items", since=10, instance="i2")
    worse = Problem("failure_rate", "critical", "q", "q", "", "", "", "", 30, "i1")
    assert merge([one, worse, other]) == [worse, other]


def test_what_happened_in_a_new_queue_before_its_first_sample_counts() -> None:
    judge = Judge()
    judge.see_instance(InstanceSample(START))
    judge.see_queue("k7f3q2ma", QueueFacts("orders"), QueueSample(START + 1, dead=3))
    assert [each.kind for each in judge.problems()] == ["dead_letters"]
    # At the start of the server nothing is new.
    judge = Judge()
    judge.see_queue("k7f3q2ma", QueueFacts("orders"), QueueSample(START + 1, dead=3))
    assert judge.problems() == []


def test_an_open_circuit_breaker_is_named_and_not_taken_for_absent_consumers() -> None:
    queue = Queue()
    queue.put(100)
    queue.sample = queue.sample._replace(circuit_since=START, failure="ConnectionError: refused")
    for _ in range(30):
        queue.step()
    (found,) = queue.judge.problems()
    assert (found.kind, found.severity, found.cause) == ("circuit_open", "critical", "the latest: ConnectionError: refused")
    queue.sample = queue.sample._replace(circuit_since=None)
    queue.work(100)
    for _ in range(12):
        queue.work(0)
        queue.step()
    assert not queue.judge.problems()


def test_a_failing_queue_says_what_the_latest_attempt_failed_of() -> None:
    queue = Queue()
    queue.sample = queue.sample._replace(failure="TimeoutError: no answer")
    for _ in range(20):
        queue.put(10)
        queue.work(10, "retried")
        queue.step()
    assert {each.cause for each in queue.judge.problems() if each.kind == "failure_rate"} == {"the latest: TimeoutError: no answer"}
