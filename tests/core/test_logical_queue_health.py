"""Slow partitions are avoided and tried again, hung ones hold up nobody who can go elsewhere."""

from __future__ import annotations

from sluiceway.core.queue.executor_health import DEGRADED, PROBE_EVERY
from sluiceway.core.queue.partition_executor import SOON
from sluiceway.core.queue.tickets import Ticket
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import ProduceKey
from tests.core.queue_rig import Rig, lease, produce, settle

KEY = ProduceKey("key-0")
"""At home in the first of three partitions."""


def commit(rig: Rig, number: int, took: int) -> None:
    """Let that partition commit one item, in so many milliseconds."""
    rig.queue.executors[number].put(Ticket(produce(), rig.now + 100_000), produce())
    rig.cycle()
    rig.now += took
    rig.end(number)


def degraded(rig: Rig) -> list[bool]:
    rig.cycle()
    return [each.degraded for each in rig.queue.stats().partitions]


def where(rig: Rig, ticket: Ticket) -> int:
    rig.end_all()
    return rig.produced(ticket).partition


def with_a_slow_one() -> Rig:
    """Three partitions; the first has the fewest items and is slow, as the first that looked has found."""
    rig = Rig(3)
    rig.fill(1, 50)
    rig.fill(2, 60)
    commit(rig, 0, 1_000)
    assert where(rig, rig.ask(produce())) == 0
    assert degraded(rig) == [True, False, False]
    return rig


def test_a_slow_partition_is_avoided_though_it_is_the_emptiest() -> None:
    rig = with_a_slow_one()
    assert [where(rig, rig.ask(produce())) for _ in range(3)] == [1, 1, 1]


def test_a_slow_partition_is_given_one_produce_now_and_then_to_see() -> None:
    rig = with_a_slow_one()
    rig.wait(PROBE_EVERY)
    tickets = [rig.submit(produce()) for _ in range(4)]
    rig.cycle()
    assert [where(rig, ticket) for ticket in tickets] == [0, 1, 1, 1]
    rig.wait(PROBE_EVERY - 1)
    assert where(rig, rig.ask(produce())) == 1
    rig.wait(1)
    assert where(rig, rig.ask(produce())) == 0


def test_a_partition_that_is_quick_again_is_soon_like_the_others() -> None:
    rig = with_a_slow_one()
    probes = 0
    while degraded(rig)[0]:
        rig.wait(PROBE_EVERY)
        assert where(rig, rig.ask(produce())) == 0
        probes += 1
        assert probes < 10
    assert [where(rig, rig.ask(produce())) for _ in range(3)] == [0, 0, 0]


def test_a_partition_that_hung_for_long_recovers_as_soon_as_one_that_hung_for_seconds() -> None:
    times = []
    for took in (2_000, 600_000):
        rig = Rig(3)
        commit(rig, 0, took)
        times.append(rig.queue.stats().partitions[0].commit_time_ms)
    assert times[0] == times[1]


def test_a_slow_partition_goes_on_to_lease_and_to_settle() -> None:
    rig = Rig(3)
    rig.fill(0, 2)
    commit(rig, 0, 1_000)
    assert degraded(rig)[0]
    ticket = rig.ask(lease(9))
    rig.end_all()
    assert rig.grants(ticket)[0].partition == 0
    done = rig.ask(settle({0: [0]}))
    rig.end_all()
    assert rig.settled(done).completed == 1


def test_a_partition_by_itself_is_never_degraded() -> None:
    rig = Rig()
    commit(rig, 0, 60_000)
    assert degraded(rig) == [False]
    assert where(rig, rig.ask(produce())) == 0


def test_where_most_are_slow_together_nobody_is_degraded() -> None:
    rig = Rig(3)
    for number in (0, 1):
        commit(rig, number, 1_000)
    assert degraded(rig) == [False, False, False]


def test_a_commit_that_is_a_little_slower_than_the_others_is_no_reason() -> None:
    rig = Rig(3)
    floor, times = DEGRADED
    for number, took in enumerate([floor * times, floor, floor]):
        for _ in range(40):
            commit(rig, number, took)
    assert degraded(rig) == [False, False, False], "no slower than so many times the median"
    for _ in range(40):
        commit(rig, 0, floor * times + 20)
    assert degraded(rig) == [True, False, False]


# ---- hung -----------------------------------------------------------------------------------------------------


def test_what_waits_behind_a_hung_commit_goes_elsewhere_unless_it_has_a_key() -> None:
    rig = Rig(3)
    rig.fill(1, 50)
    rig.fill(2, 50)
    flying = rig.ask(produce())
    behind, keyed = [rig.ask(produce()) for _ in range(3)], rig.ask(produce(key=KEY))
    assert list(rig.commits) == [0]
    rig.wait(DEGRADED[0])
    assert list(rig.commits) == [0]
    assert rig.queue.wake_at() == rig.now + 1, "the queue asks for a turn when its patience is over"
    rig.wait(1)
    assert list(rig.commits) == [0, 1]
    assert (rig.queue.stats().produce_waiting, rig.queue.executors[0].accepted) == (1, 0)
    while rig.commits.keys() - {0}:
        rig.end(max(rig.commits))
    assert sorted(rig.produced(ticket).partition for ticket in behind) == [1, 1, 1]
    assert not rig.answers.keys() & {flying, keyed}
    later = rig.ask(produce())
    rig.end(next(iter(rig.commits.keys() - {0})))
    assert rig.produced(later).partition != 0
    rig.end_all()
    assert rig.produced(flying).partition == rig.produced(keyed).partition == 0
    assert sum(rig.durable(number)[0] for number in range(3)) == 106


def test_a_client_that_went_away_meanwhile_is_not_taken_elsewhere() -> None:
    rig = Rig(3)
    rig.fill(1, 50)
    rig.fill(2, 50)
    rig.ask(produce())
    behind = rig.ask(produce())
    rig.queue.cancel(behind)
    rig.wait(DEGRADED[0] + 1)
    assert list(rig.commits) == [0]
    rig.end_all()
    assert rig.durable(0)[0] == 1


def test_where_all_hang_produces_wait_and_the_queue_does_not_turn_without_end() -> None:
    rig = Rig(3)
    tickets = []
    for _ in range(3):
        tickets.append(rig.ask(produce(timeout=20_000)))
        rig.now += SOON + 1
    tickets += [rig.ask(produce(timeout=20_000)) for _ in range(3)]
    assert sorted(rig.commits) == [0, 1, 2]
    rig.wait(19_999 - 3 * (SOON + 1))
    assert not rig.answers
    rig.wait(1 + 3 * (SOON + 1))
    assert [rig.code(ticket) for ticket in tickets] == ["outcome_unknown"] * 3 + ["unavailable"] * 3


def test_a_hung_partition_is_given_no_further_produce_to_see() -> None:
    rig = Rig(3)
    rig.ask(produce())
    rig.wait(PROBE_EVERY * 5)
    for _ in range(3):
        ticket = rig.ask(produce())
        (number,) = rig.commits.keys() - {0}
        rig.end(number)
        assert rig.produced(ticket).partition == number


def test_a_lease_without_time_waits_for_a_commit_but_not_for_a_hung_one() -> None:
    rig = Rig(3)
    rig.fill(0, 3)
    rig.ask(lease(1))
    patient = rig.ask(lease(1))
    assert list(rig.commits) == [0]
    assert patient not in rig.answers, "the partition has items, and is about to be free"
    rig.wait(DEGRADED[0] + 1)
    assert rig.queue.executors[0].degraded
    ticket = rig.ask(lease(1))
    assert rig.answers[ticket] == []


# ---- opening again --------------------------------------------------------------------------------------------


def test_a_partition_is_opened_at_once_when_what_kept_it_from_opening_is_over() -> None:
    rig = Rig(2)
    rig.ask(produce())
    rig.end(0, Outcome.REFUSED)
    for _ in range(6):
        rig.open(0, SluicewayError("unavailable", "no disk"))
        rig.wait(rig.queue.executors[0].retry_at - rig.now)
    rig.open(0, SluicewayError("unavailable", "no disk"))
    assert not rig.opens
    rig.queue.retry_now([0, 1], rig.now)
    rig.cycle()
    assert list(rig.opens) == [0], "the other is open"
