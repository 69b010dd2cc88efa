"""Pause and resume, and settings that change while the queue works."""

from __future__ import annotations

import pytest

from sluiceway.contract.queue_settings import RetryBackoff
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.outcomes import Outcome
from sluiceway.model.requests import RELEASE, Disposition, Extend, Extended
from tests.core.queue_rig import LEASE_TIMEOUT, Rig, lease, produce, settle

RETRY = Disposition("retry")


# ---- pause ----------------------------------------------------------------------------------------------------


def test_a_queue_that_is_paused_for_produce_takes_no_items_and_serves_those_it_has() -> None:
    rig = Rig()
    begun = rig.ask(produce(2))
    rig.configure(paused=("produce",))
    with pytest.raises(SluicewayError, match="paused") as refused:
        rig.submit(produce())
    assert refused.value.code == "queue_paused"
    assert refused.value.retryable
    rig.end(0)
    assert rig.produced(begun).items == 2, "it was taken before"
    waiter = rig.ask(lease(5))
    rig.end(0)
    assert rig.grants(waiter)[0].items == 2
    rig.configure()
    rig.ask(produce())
    assert rig.commits


def test_who_waits_on_a_queue_that_is_paused_for_lease_is_served_when_it_is_resumed() -> None:
    rig = Rig()
    rig.configure(paused=("lease",))
    rig.fill(0, 3)
    patient, hasty = rig.ask(lease(2, 5_000)), rig.ask(lease(1, 400))
    rig.wait(400)
    assert rig.grants(hasty) == []
    rig.wait(1_000)
    assert patient not in rig.answers
    rig.configure()
    rig.end(0)
    assert rig.grants(patient)[0].items == 2


def test_what_is_leased_can_be_settled_and_extended_while_all_is_paused() -> None:
    rig = Rig()
    number = rig.take(0, 4).number
    rig.configure(paused=("produce", "lease"))
    tickets = [rig.submit(settle({0: [n]}, disposition)) for n, disposition in enumerate([Disposition("done"), RETRY, RELEASE])]
    extended = rig.submit(Extend([(0, number)], 1_000, 90_000))
    rig.cycle()
    rig.end(0)
    assert [rig.settled(ticket).total for ticket in tickets] == [1, 1, 1]
    answer = rig.answers[extended]
    assert isinstance(answer, Extended)
    assert answer.leases == [(0, number, 1, rig.now + 90_000)]


def test_a_repeated_lease_key_finds_its_leases_while_the_queue_is_paused() -> None:
    rig = Rig()
    rig.fill(0, 3)
    first = rig.ask(lease(2, key="k"))
    rig.end(0)
    rig.configure(paused=("lease",))
    again = rig.ask(lease(2, key="k"))
    assert rig.grants(again) == rig.grants(first)


def test_time_goes_on_while_the_queue_is_paused() -> None:
    rig = Rig()
    rig.take(0, 2, lease_timeout=500)
    rig.configure(paused=("produce", "lease"))
    rig.wait(500)
    rig.end_all()
    assert rig.durable(0) == (2, 0, 0)


# ---- settings -------------------------------------------------------------------------------------------------


def test_the_lease_timeout_changes_for_leases_from_now_on() -> None:
    rig = Rig()
    before = rig.take(0, 2)
    rig.configure(lease_timeout=5_000)
    after = rig.take(0, 2)
    assert (before.lease_deadline, after.lease_deadline) == (rig.now + LEASE_TIMEOUT, rig.now + 5_000)
    extended = rig.ask(Extend([(0, before.number)], 1_000))
    rig.end(0)
    answer = rig.answers[extended]
    assert isinstance(answer, Extended)
    assert answer.leases == [(0, before.number, 2, rig.now + 5_000)]


def test_a_lower_limit_of_attempts_holds_at_the_next_retry() -> None:
    rig = Rig()
    rig.take(0, 2)
    rig.configure(max_attempts=1)
    ticket = rig.ask(settle({0: [0]}, RETRY))
    rig.end(0)
    assert (rig.settled(ticket).retried, rig.settled(ticket).dead) == (0, 1)
    rig.configure(max_attempts=2)
    ticket = rig.ask(settle({0: [1]}, RETRY))
    rig.end(0)
    assert (rig.settled(ticket).retried, rig.settled(ticket).dead) == (1, 0)


def test_a_new_back_off_holds_at_the_next_retry_and_not_for_one_that_names_its_time() -> None:
    rig = Rig()
    rig.take(0, 3)
    rig.configure(retry_backoff=RetryBackoff(4_000, 60_000))
    rig.ask(settle({0: [0]}, RETRY))
    rig.end(0)
    rig.ask(settle({0: [1]}, Disposition("retry", retry_after=0)))
    rig.end(0)
    assert rig.durable(0) == (1, 1, 1)
    rig.wait(3_199)
    assert not rig.commits
    rig.wait(801)
    rig.end(0)
    assert rig.durable(0) == (2, 1, 0)


def test_items_expire_by_the_timeout_that_held_when_they_were_produced() -> None:
    rig = Rig()
    rig.fill(0, 1)
    rig.configure(expire_timeout=2_000)
    rig.fill(0, 2)
    rig.configure(expire_timeout=0)
    rig.fill(0, 4)
    rig.wait(1_999)
    assert not rig.commits
    rig.wait(1)
    rig.end(0)
    assert rig.durable(0) == (5, 0, 0)
    assert rig.queue.stats().partitions[0].dead == 2


def test_a_partition_that_is_opened_again_follows_the_settings_of_now() -> None:
    rig = Rig(keeps_dead=True)
    rig.take(0, 2)
    rig.ask(produce())
    rig.end(0, Outcome.UNKNOWN, landed=True)
    rig.configure(max_attempts=1, dead_queue=None)
    rig.open(0)
    ticket = rig.ask(settle({0: [0, 1]}, RETRY))
    rig.end(0)
    assert rig.settled(ticket).dead == 2
    assert not rig.transfers, "there is no dead queue any more"
