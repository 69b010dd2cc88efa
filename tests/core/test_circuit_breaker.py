"""The circuit breaker of a queue, by itself: when it opens, whom it probes, when it closes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.contract.queue_settings import CircuitBreaker, read_circuit_breaker
from sluiceway.core.partition.circuit_breaker import FIRST_WAIT, LONGEST_WAIT, PROBES, Circuit

NOW = 1_000_000
LEASE = 60_000


def circuit(rate: float = 0.5, failures: int = 20) -> Circuit:
    return Circuit(CircuitBreaker(rate, failures))


def state(one: Circuit) -> str:
    """Its state now: a type checker takes it for the last one that was seen."""
    return one.state


def opened() -> Circuit:
    one = circuit()
    one.failed(20, 0)
    one.judge(NOW)
    assert state(one) == "open"
    return one


def half_open() -> tuple[Circuit, int]:
    """With all its probes leased, and the number by which they are reported."""
    one = opened()
    one.judge(NOW + FIRST_WAIT)
    assert state(one) == "half_open"
    return one, one.leased(PROBES, LEASE, NOW + FIRST_WAIT)


# ---- opening --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1_000_000), st.sampled_from([0.1, 0.5, 0.9]), st.integers(1, 200))
def test_so_many_failures_in_a_row_open_it_whatever_went_well_before(before: int, rate: float, failures: int) -> None:
    one = circuit(rate, failures)
    one.completed(before, 0)
    one.judge(NOW)
    for n in range(failures):
        assert state(one) == "closed", n
        one.failed(1, 0)
        one.judge(NOW + n)
    assert state(one) == "open"
    assert one.room == 0


@given(st.lists(st.sampled_from([(3, 1), (30, 10), (1, 0)]), max_size=2_000))
def test_a_share_of_failures_below_the_rate_never_opens_it(outcomes: list[tuple[int, int]]) -> None:
    one = circuit()
    for completed, failed in outcomes:
        one.failed(failed, 0)
        one.completed(completed, 0)
        one.judge(NOW)
        assert one.room is None
        assert not one.spares


def test_of_one_call_the_sum_counts_and_not_the_order() -> None:
    one = circuit()
    one.failed(400, 0)
    one.completed(9_600, 0)
    one.judge(NOW)
    assert state(one) == "closed"


def test_a_failure_at_the_moment_of_opening_is_spared() -> None:
    """Else one call that fails a hundred items, each at its last attempt, would kill them all."""
    one = circuit()
    one.failed(19, 0)
    assert not one.spares
    one.failed(1, 0)
    assert one.spares


def test_failures_that_outweigh_open_it_though_some_succeed() -> None:
    one = circuit()
    for _ in range(100):
        one.failed(4, 0)
        one.completed(1, 0)
        one.judge(NOW)
    assert state(one) == "open"


# ---- probes ---------------------------------------------------------------------------------------------------


def test_while_it_is_open_nothing_is_leased_and_then_a_few_items() -> None:
    one = opened()
    assert (one.since, one.wake_at) == (NOW, NOW + FIRST_WAIT)
    one.judge(NOW + FIRST_WAIT - 1)
    assert one.room == 0
    one.judge(NOW + FIRST_WAIT)
    assert (one.room, one.wake_at) == (PROBES, None)
    one.leased(2, LEASE, NOW)
    assert (one.room, one.wake_at) == (PROBES - 2, NOW + LEASE)


def test_probes_that_succeed_close_it_and_half_as_many_failures_open_it_again_for_longer() -> None:
    one, probe = half_open()
    one.completed(2, probe)
    one.judge(NOW + 2_000)
    assert state(one) == "half_open", "the others decide"
    one.completed(1, probe)
    one.judge(NOW + 2_000)
    assert (state(one), one.room) == ("closed", None)
    one.failed(10, 0)
    one.judge(NOW + 3_000)
    assert (state(one), one.probe_at) == ("open", NOW + 3_000 + 2 * FIRST_WAIT)


def test_once_all_is_well_again_the_waits_start_over() -> None:
    one, probe = half_open()
    one.completed(PROBES, probe)
    one.judge(NOW + 2_000)
    one.completed(10, 0)
    one.judge(NOW + 2_000)
    one.failed(20, 0)
    one.judge(NOW + 2_000)
    assert one.probe_at == NOW + 2_000 + FIRST_WAIT


def test_probes_that_fail_keep_it_open_for_twice_as_long_each_time_up_to_a_minute() -> None:
    one, now, waits = opened(), NOW, []
    for _ in range(9):
        waits.append(one.probe_at - now)
        now = one.probe_at
        one.judge(now)
        one.failed(1, one.leased(1, LEASE, now))
        one.judge(now)
        assert state(one) == "open"
        assert one.since == NOW, "it has not been closed in between"
    assert waits == [min(LONGEST_WAIT, FIRST_WAIT << n) for n in range(9)]


def test_a_bad_item_among_good_ones_does_not_keep_it_open() -> None:
    one, probe = half_open()
    one.failed(2, probe)
    one.completed(3, probe)
    one.judge(NOW + 2_000)
    assert state(one) == "closed"


def test_what_was_leased_before_says_nothing_while_it_is_open() -> None:
    one, probe = half_open()
    one.failed(100, 0)
    one.completed(100, 0)
    one.judge(NOW + 2_000)
    assert state(one) == "half_open"
    one.completed(PROBES, probe)
    one.judge(NOW + 2_000)
    assert state(one) == "closed"


def test_late_outcomes_of_probes_that_were_judged_say_nothing() -> None:
    one, probe = half_open()
    one.failed(3, probe)
    one.judge(NOW + 2_000)
    at = one.probe_at
    one.failed(1, probe)
    one.completed(1, probe)
    one.judge(NOW + 2_000)
    assert (state(one), one.probe_at) == ("open", at)


def test_a_probe_given_back_is_replaced() -> None:
    one, probe = half_open()
    assert one.room == 0
    one.returned(PROBES, probe)
    one.judge(NOW + 2_000)
    assert (state(one), one.room, one.wake_at) == ("half_open", PROBES, None)


def test_probes_without_an_answer_are_repeated_and_their_late_success_closes_it() -> None:
    """A handler that takes longer than a lease extends it, and is no sign of trouble."""
    one, probe = half_open()
    end = NOW + FIRST_WAIT + LEASE
    one.judge(end - 1)
    assert state(one) == "half_open"
    one.judge(end)
    assert (state(one), one.probe_at) == ("open", end + 2 * FIRST_WAIT)
    one.completed(PROBES, probe)
    one.judge(end + 1)
    assert state(one) == "closed"


@pytest.mark.parametrize(("timeout", "waits"), [(5_000, 5_000), (3_600_000, LONGEST_WAIT)])
def test_probes_are_waited_for_as_long_as_their_lease_but_not_for_an_hour(timeout: int, waits: int) -> None:
    one = opened()
    one.judge(NOW + FIRST_WAIT)
    one.leased(PROBES, timeout, NOW + FIRST_WAIT)
    assert one.wake_at == NOW + FIRST_WAIT + waits


def test_of_probes_of_which_some_do_not_answer_the_others_decide() -> None:
    one, probe = half_open()
    one.completed(2, probe)
    one.judge(NOW + FIRST_WAIT + LEASE)
    assert state(one) == "closed"


def test_a_clock_that_is_set_back_does_not_keep_it_open() -> None:
    one = opened()
    back = NOW - 86_400_000
    one.judge(back)
    assert one.probe_at <= back + LONGEST_WAIT


@given(st.data())
def test_it_always_asks_to_be_woken_and_never_lets_more_out_than_its_probes(data: st.DataObject) -> None:
    one, now = circuit(failures=3), NOW
    out: list[int] = []
    for _ in range(data.draw(st.integers(0, 60))):
        steps = data.draw(st.integers(0, 3))
        if out and steps & 1:
            report = data.draw(st.sampled_from([one.completed, one.failed, one.returned]))
            report(1, out.pop(data.draw(st.integers(0, len(out) - 1))))
        if steps & 2:
            now = one.wake_at or now + 1
        one.judge(now)
        room = one.room
        if state(one) == "open":
            assert room == 0
            assert now < one.probe_at <= now + LONGEST_WAIT
            assert one.wake_at == one.probe_at
        elif room == 0:
            assert one.wake_at is not None
            assert one.wake_at > now
        if room is None or room:
            out += [one.leased(1, LEASE, now)]


# ---- as people write it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "breaker"), [("0.5", CircuitBreaker(0.5)), ("0.25:7", CircuitBreaker(0.25, 7)), ("0.9 : 3", CircuitBreaker(0.9, 3))]
)
def test_a_breaker_can_be_typed(text: str, breaker: CircuitBreaker) -> None:
    assert read_circuit_breaker(text) == breaker
    assert read_circuit_breaker(str(breaker)) == breaker


@pytest.mark.parametrize("text", ["", "x", "0", "1", "nan", "50", "0.5:", "0.5:0", "0.5:x", "0.5:2.5", ":3", "0.5:20:1"])
def test_what_is_no_breaker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a circuit breaker"):
        read_circuit_breaker(text)
