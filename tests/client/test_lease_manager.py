"""What a consumer asks of the server and when: the machine, against a model of the server."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.client import CallError, DeadItem, Ignored, Retry, RetryItem, SluicewayError, consumer_common
from sluiceway.client.lease_manager import (
    DONE,
    HANG_UP_TIME,
    QUIET_TIME,
    RELEASED,
    Abandon,
    Ask,
    Extend,
    HangUp,
    LeaseManager,
    Lost,
    Settle,
)
from sluiceway.kernel.errors import KINDS
from tests.client.lease_manager_world import AWAY, LEASE_TIMEOUT, World


def world(concurrency: int = 2, prefetch: int = 4, linger: int = 50) -> World:
    return World(LeaseManager(concurrency, prefetch, LEASE_TIMEOUT, linger, patience=2_000, handler_time=0))


def filled(count: int = 6, **options: int) -> World:
    """One that has got its first items."""
    made = world(**options)
    made.pump()
    made.answer_ask(count)
    made.pump()
    return made


def test_it_asks_for_as_many_as_it_can_hold_and_then_only_for_many() -> None:
    it = world()
    it.pump()
    assert it.calls == {Ask: Ask(6)}
    it.answer_ask(6)
    for _ in range(2):
        it.begin()
        it.finish()
    it.pump()
    assert Ask not in it.calls
    it.begin()
    it.begin()
    it.pump()
    it.begin()
    it.finish()
    it.begin()
    it.pump()
    assert it.calls[Ask] == Ask(3)


def test_outcomes_wait_for_others_and_go_in_one_call() -> None:
    it = filled()
    it.begin()
    it.begin()
    it.finish()
    it.tick(20)
    it.finish(retry=True)
    it.pump()
    assert Settle not in it.calls
    assert it.keeper.wake_at() == 1_050
    it.tick(30)
    it.pump()
    first, second = it.received[:2]
    assert it.calls[Settle] == Settle([first], [Retry(second, reason="no", handler_time="20ms")], [])


def test_the_last_outcome_waits_for_nobody() -> None:
    it = filled(1)
    it.begin()
    it.finish()
    it.pump()
    assert it.calls[Settle] == Settle(it.received, [], [])


def test_many_outcomes_wait_no_longer() -> None:
    it = filled(concurrency=1, prefetch=5)
    for _ in range(3):
        it.begin()
        it.finish()
    it.pump()
    assert it.calls[Settle] == Settle(it.received[:3], [], [])


def test_leases_are_extended_together_once_a_third_of_their_time_has_passed() -> None:
    it = filled()
    it.tick(LEASE_TIMEOUT // 3 - 1)
    it.pump()
    assert Extend not in it.calls
    it.tick(1)
    it.pump()
    assert it.calls[Extend] == Extend(["k7f3q2ma.0.L0", "k7f3q2ma.0.L1"])
    it.answer_extend()
    it.pump()
    assert it.keeper.wake_at() == it.now + LEASE_TIMEOUT // 3


def test_a_lease_that_the_server_has_ended_takes_its_items_along() -> None:
    it = filled()
    it.begin()
    it.tick(LEASE_TIMEOUT // 3)
    it.pump()
    del it.leases["k7f3q2ma.0.L0"]
    it.answer_extend()
    (told,) = [effect for effect in it.keeper.decide(it.now) if isinstance(effect, Lost)]
    assert told.ids == it.received[:1] == sorted(it.keeper.lost)
    it.finish()
    assert (it.keeper.lost, it.keeper.waiting) == (set(), 3)
    it.begin()
    assert it.handling[0] == it.received[3]


def test_an_extension_counts_from_when_it_was_asked_for() -> None:
    it = filled()
    it.begin()
    it.tick(LEASE_TIMEOUT // 3)
    it.pump()
    asked, sent_at = it.calls.pop(Extend), it.now
    it.tick(100)
    assert isinstance(asked, Extend)
    it.keeper.extended(asked.lease_ids, asked.lease_ids, it.now, sent_at)
    while not it.keeper.lost:
        it.tick(10)
        it.pump()
        it.answer_extend(done=False)
    assert it.now == sent_at + LEASE_TIMEOUT


def test_a_lease_that_nobody_could_extend_is_lost_at_its_deadline() -> None:
    it = filled()
    it.begin()
    while it.now < 1_000 + LEASE_TIMEOUT:
        it.tick(10)
        it.pump()
        assert bool(it.keeper.lost) == (it.now >= 1_000 + LEASE_TIMEOUT)
        it.answer_extend(done=False)
    assert it.keeper.waiting == 0


def test_an_outcome_is_told_again_until_the_lease_is_over_and_once_more() -> None:
    it = filled(1)
    it.begin()
    it.finish()
    told = 0
    while it.now < 1_000 + LEASE_TIMEOUT + 100:
        it.pump()
        told += Settle in it.calls
        it.answer_settle(done=False)
        it.answer_extend(done=False)
        it.tick(10)
    assert 3 < told < 15
    for last in (True, False):
        it.tick(5_000)
        it.pump()
        assert (Settle in it.calls) == last
        it.answer_settle(done=False)


def test_stop_releases_what_was_not_begun_and_waits_for_what_was() -> None:
    it = filled()
    it.begin()
    it.keeper.stop()
    it.begin()
    assert len(it.handling) == 1
    it.tick(50)
    it.pump()
    assert it.calls[Settle] == Settle([], [], it.received[1:])
    it.answer_settle()
    assert not it.keeper.ended
    it.finish()
    it.pump()
    assert it.calls[Settle] == Settle(it.received[:1], [], [])
    assert not it.keeper.ended
    it.answer_settle()
    assert it.keeper.ended


def test_stop_hangs_up_once_and_releases_what_came_all_the_same() -> None:
    it = world()
    it.pump()
    it.tick(QUIET_TIME)
    it.keeper.stop()
    assert it.keeper.decide(it.now) == [HangUp()]
    assert it.keeper.decide(it.now) == []
    assert not it.keeper.ended
    it.answer_ask(2)
    it.tick(HANG_UP_TIME)
    it.pump()
    assert it.calls == {Settle: Settle([], [], it.received)}


def test_the_call_for_items_is_left_alone_while_it_may_be_given_what_was_released() -> None:
    it = filled(2)
    assert Ask in it.calls
    it.keeper.stop()
    it.tick(50)
    it.pump()
    assert it.calls[Settle] == Settle([], [], it.received)
    it.tick(200)
    assert it.keeper.decide(it.now) == []
    it.answer_settle()
    it.tick(QUIET_TIME - 1)
    assert it.keeper.decide(it.now) == []
    assert it.keeper.wake_at() == it.now + 1
    it.tick(1)
    assert it.keeper.decide(it.now) == [HangUp()]


def test_a_call_that_was_just_made_is_not_hung_up_on_whose_items_would_stay_leased() -> None:
    it = world()
    it.pump()
    it.tick(2)
    it.keeper.stop()
    it.tick(QUIET_TIME - 3)
    assert it.keeper.decide(it.now) == []
    assert it.keeper.wake_at() == it.now + 1
    it.answer_ask(2)
    it.pump()
    assert it.calls == {Settle: Settle([], [], it.received)}


def test_nothing_is_put_back_before_the_server_knows_that_nobody_waits() -> None:
    it = filled(1)
    it.tick(QUIET_TIME)
    it.begin()
    it.keeper.stop()
    assert it.keeper.decide(it.now)[0] == HangUp()
    it.finish(retry=True)
    it.tick(HANG_UP_TIME - 1)
    assert it.keeper.decide(it.now) == []
    it.tick(1)
    assert it.keeper.decide(it.now) == [Settle([], [Retry(it.received[0], reason="no", handler_time="0ms")], [])]


def test_a_stop_has_patience_with_a_server_that_is_away_but_not_for_ever() -> None:
    it = filled()
    it.keeper.stop()
    began = it.now
    while not it.keeper.ended:
        it.pump()
        it.answer_settle(done=False)
        it.answer_extend()
        it.tick(10)
    assert 2_000 <= it.now - began < 6_000


def test_a_server_that_was_away_before_the_stop_has_all_of_that_time() -> None:
    """Outcomes were dropped with the next failure, a moment after the stop."""
    it = filled()
    it.begin()
    it.finish()
    for until, done in ((10_000, False), (11_900, False), (20_000, True)):
        while it.now < until:
            it.pump()
            it.answer_settle(done)
            it.answer_extend()
            it.answer_ask(0)
            it.tick(10)
        it.keeper.stop()
    assert it.keeper.ended
    assert it.outcome == dict.fromkeys(it.received, RELEASED) | {it.received[0]: DONE}


@pytest.mark.parametrize("code", sorted(KINDS))
def test_only_what_no_repetition_can_mend_ends_it(code: str) -> None:
    it = filled()
    it.begin()
    it.pump()
    it.keeper._asking.busy = True
    it.keeper.ask_failed(CallError(code, code), it.now, 0.5)
    ends = KINDS[code].status < 500 and not KINDS[code].retryable
    assert it.keeper.stopping == ends
    assert (it.keeper.error is None) != ends


def test_an_outcome_that_may_not_be_told_ends_it_and_is_given_up() -> None:
    it = filled()
    it.begin()
    it.begin()
    it.finish()
    it.tick(50)
    it.pump()
    del it.calls[Settle]
    assert set(it.keeper.settle_failed(CallError("forbidden", "no"), it.now, 0.5)) >= {it.received[0], *it.received[2:]}
    assert it.keeper.error is not None
    assert not it.keeper.ended
    it.finish()
    it.tick(50)
    it.pump()
    del it.calls[Settle]
    it.keeper.settle_failed(CallError("forbidden", "no"), it.now, 0.5)
    assert it.keeper.ended


def test_a_server_that_is_away_is_asked_less_and_less_often() -> None:
    it, asked = world(), []
    while it.now < 30_000:
        it.pump()
        if Ask in it.calls:
            asked.append(it.now)
            del it.calls[Ask]
            it.keeper.ask_failed(AWAY, it.now, 1.0)
        it.tick(1)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (50, 2_000)


def test_a_server_that_says_when_is_not_asked_before() -> None:
    it = world()
    it.pump()
    it.calls.clear()
    it.keeper.ask_failed(CallError("rate_limited", "slow down", retry_after=7_000), it.now, 0.5)
    it.tick(7_000)
    it.pump()
    assert not it.calls
    it.tick(100)
    it.pump()
    assert it.calls == {Ask: Ask(6)}


def test_only_outcomes_that_were_not_taken_are_reported() -> None:
    it = filled(1)
    it.begin()
    it.finish()
    it.pump()
    ignored = [Ignored(id=it.received[0], reason=reason) for reason in ("completed", "settled", "expired", "not_yours")]
    assert it.keeper.settled(ignored, it.now) == ignored[2:]


# -- what a handler says --------------------------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_says_what_becomes_of_the_item_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_common, "_host", lambda: None)
    assert consumer_common.put_back("a.0.1", ValueError("no\nsuch order")) == Retry("a.0.1", reason="ValueError: no such order")
    assert consumer_common.put_back("a.0.1", ValueError("the payload"), False) == Retry("a.0.1", reason="ValueError")
    assert consumer_common.put_back("a.0.1", ValueError()) == Retry("a.0.1", reason="ValueError")
    assert consumer_common.put_back("a.0.1", Mute()) == Retry("a.0.1", reason="Mute"), "an error without a text of its own"
    assert consumer_common.put_back("a.0.1", RetryItem("5m", "later")) == Retry("a.0.1", retry_after="5m", reason="later")
    assert consumer_common.put_back("a.0.1", RetryItem()) == Retry("a.0.1")
    assert consumer_common.put_back("a.0.1", DeadItem("x" * 5_000)) == Retry("a.0.1", dead=True, reason="x" * 2_048)
    assert consumer_common.put_back("a.0.1", DeadItem("é" * 5_000)).reason == "é" * 1_024


@pytest.mark.parametrize(
    ("reason", "text"),
    [(ValueError("no such order"), "ValueError: no such order"), (404, "404"), (None, None), (Mute(), "Mute"), ({"a": 1}, "{'a': 1}")],
)
def test_a_reason_that_is_no_text_becomes_one(reason: Any, text: str | None) -> None:
    """Handlers pass on the exception that they have caught."""
    dead = consumer_common.put_back("a.0.1", DeadItem(reason))
    assert (dead.dead, dead.reason) == (True, text)
    assert consumer_common.put_back("a.0.1", RetryItem(reason=reason)).reason == text


def test_an_exception_keeps_the_last_lines_of_its_trace() -> None:
    def fail(depth: int) -> None:
        if not depth:
            raise ValueError("no such order")
        # Two functions, since equal lines in a row are not repeated in a trace.
        again(depth - 1)

    def again(depth: int) -> None:
        fail(depth)

    def kept(depth: int) -> Retry:
        try:
            fail(depth)
        except ValueError as error:
            return consumer_common.put_back("a.0.1", error)
        raise AssertionError

    short, long = kept(0).trace or "", kept(100).trace or ""
    assert short.startswith("Traceback (most recent call last):")
    assert short.endswith("ValueError: no such order")
    assert 4_000 < len(long) <= 4_096
    assert long.endswith("ValueError: no such order")
    assert kept(0).host
    assert consumer_common.put_back("a.0.1", ValueError("the payload"), False).trace is None


@pytest.mark.parametrize("after", ["soon", "367d"])
def test_a_time_that_the_server_would_refuse_is_refused_where_it_is_said(after: str) -> None:
    with pytest.raises(SluicewayError, match="after"):
        RetryItem(after)


@pytest.mark.parametrize(
    ("prefetch", "lease_timeout", "field"), [(-1, "1m", "prefetch"), (1, "299ms", "lease_timeout"), (1, "31d", "lease_timeout")]
)
def test_an_option_out_of_range_is_named(prefetch: int, lease_timeout: str, field: str) -> None:
    with pytest.raises(SluicewayError) as raised:
        consumer_common.new_lease_manager(prefetch, lease_timeout, "20ms", 30.0)
    assert raised.value.field == field


# -- any history --------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(1, LEASE_TIMEOUT // 2)),
        st.tuples(st.just("ask"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["extend", "settle"]), st.integers(0, 4)),
        st.tuples(st.sampled_from(["begin", "finish"]), st.integers(0, 2)),
        st.just(("stop", 0)),
    ),
    max_size=60,
)


@given(st.integers(1, 3), st.integers(0, 5), STEPS)
def test_whatever_fails_no_outcome_is_forgotten_and_none_is_told_twice(
    concurrency: int, prefetch: int, steps: list[tuple[str, int]]
) -> None:
    it = world(concurrency, prefetch)
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
        elif step == "finish":
            it.finish(retry=value == 1)
        else:
            it.keeper.stop(None if value == 0 else it.now + 100 * value)
        it.pump()
    it.to_the_end()
    for item_id in it.received:
        told = it.outcome.get(item_id)
        if told is None:
            assert it.lease_of(item_id) is None, "given up although its lease was alive"
        else:
            assert told == it.ended.get(item_id, "released")


@given(st.integers(1, 3), st.integers(0, 5), st.lists(st.tuples(st.integers(1, 5_000), st.integers(0, 6)), max_size=10))
def test_with_a_server_that_answers_nothing_is_lost_however_long_handling_takes(
    concurrency: int, prefetch: int, handling: list[tuple[int, int]]
) -> None:
    it = world(concurrency, prefetch)
    for takes, new in handling:
        ends_at = it.now + takes
        while it.now < ends_at:
            it.pump()
            it.answer_ask(new)
            it.answer_extend()
            it.answer_settle()
            it.begin()
            it.pump()
            wake_at = it.keeper.wake_at()
            it.tick(max(1, min(ends_at, wake_at or ends_at) - it.now))
        it.finish()
    it.to_the_end()
    assert not it.lost
    assert set(it.outcome) == set(it.received)


def test_no_items_wait_before_the_first_one_was_handled() -> None:
    """Nothing is known of the time that they take: others could have handled them meanwhile."""
    it = world(concurrency=2, prefetch=4)
    it.keeper.handler_time = None
    it.pump()
    assert it.calls[Ask] == Ask(2)
    it.answer_ask(2)
    it.begin()
    it.begin()
    it.pump()
    assert Ask not in it.calls
    it.tick(10)
    it.finish()
    it.pump()
    assert it.calls[Ask] == Ask(5)


@pytest.mark.parametrize(("takes", "waiting"), [(1, 100), (LEASE_TIMEOUT // 10, 18), (LEASE_TIMEOUT, 0), (10 * LEASE_TIMEOUT, 0)])
def test_no_more_items_wait_than_can_be_handled_within_a_lease(takes: int, waiting: int) -> None:
    it = world(concurrency=2, prefetch=100)
    it.keeper.handler_time = takes
    it.pump()
    assert it.calls[Ask] == Ask(2 + waiting)


def test_the_time_of_handlers_follows_what_they_take_now() -> None:
    it = world(concurrency=1, prefetch=0)
    for takes, expected in ((100, 20), (100, 36)):
        it.pump()
        it.answer_ask(1)
        it.begin()
        it.tick(takes)
        it.finish()
        assert it.keeper.handler_time == pytest.approx(expected)


def test_items_still_being_handled_when_the_time_is_up_are_released() -> None:
    it = filled()
    it.begin()
    it.begin()
    first, second = it.received[:2]
    it.keeper.stop(it.now + 200)
    it.finish()
    it.pump()
    it.answer_settle()
    assert it.keeper.wake_at() == it.now + 200
    it.tick(199)
    assert not any(isinstance(effect, Abandon) for effect in it.keeper.decide(it.now))
    it.tick(1)
    it.pump()
    assert not it.handling
    assert it.keeper.lost == {second}, "its handler can see it"
    it.keeper.finish(second, "done", it.now)
    it.answer_settle()
    assert it.outcome == {first: "done", second: "released"} | dict.fromkeys(it.received[2:], "released")
    assert it.keeper.ended


def test_a_second_stop_can_only_make_it_sooner() -> None:
    it = filled()
    it.begin()
    it.keeper.stop(it.now + 200)
    it.keeper.stop(it.now + 500)
    it.keeper.stop()
    it.pump()
    it.answer_settle()
    assert it.keeper.wake_at() == it.now + 200
    it.keeper.stop(it.now)
    assert Abandon([it.handling[0]]) in it.keeper.decide(it.now)
