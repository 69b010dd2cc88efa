"""Each checker finds a made-up history that is wrong, and says nothing of the one that differs from it by being right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.campaigns.blackbox.checkers import check
from tests.campaigns.blackbox.item_stories import Delivered
from tests.campaigns.blackbox.operation_log import Fault, Operation, Outcome, Round
from tests.campaigns.blackbox.waits import Wait

NO_COUNTS = dict.fromkeys(("produced", "moved_in", "completed", "dead", "cleared", "redriven", "moved", "total", "transferring"), 0)


class Diary:
    """A round, written by hand. Times are in seconds from its beginning; a call takes 0.1 s."""

    def __init__(self) -> None:
        self.round = Round(is_drained=True, began=0.0, ended=100.0)
        self.offsets = 0
        self.counts = dict(NO_COUNTS)
        """Of the queue, as the server would count."""

    def note(self, at: float, call: str, outcome: Outcome = "done", **more: Any) -> None:
        given = {"client": "c", "queue": "q", "began": at, "ended": at + 0.1, **more}
        self.round.operations.append(Operation(call=call, outcome=outcome, **given))

    def produce(self, at: float, *names: str, outcome: Outcome = "done", first: int | None = None, **given: Any) -> None:
        """`first`: the offset of the first one, if it is not the next."""
        first = self.offsets if first is None else first
        ids = [f"a.0.{first + n}" for n in range(len(names))]
        if outcome == "done":
            self.offsets = max(self.offsets, first + len(names))
            self.counts["produced"] += len(names)
        self.note(at, "produce", outcome, given={"names": list(names), **given}, got={"ids": ids} if outcome == "done" else {})

    def lease(self, at: float, name: str | None, origin: int = 0, lease: str = "L1", until: float | None = None, **more: Any) -> None:
        delivered = Delivered(name, f"a.0.{more.pop('id', origin)}", f"a.0.{origin}", lease, at + 4 if until is None else until)
        self.note(at, "lease", given={"batch": 1}, got={"items": [list(delivered)]}, **more)

    def settle(self, at: float, call: str, name: str, id: int = 0, outcome: Outcome = "done", ignored: bool = False, **given: Any) -> None:
        got = {"ignored": {f"a.0.{id}": "expired"} if ignored else {}, "completed": int(not ignored), "dead": 0}
        if call == "complete" and outcome == "done" and not ignored:
            self.counts["completed"] += 1
        self.note(at, call, outcome, given={"ids": {f"a.0.{id}": name}, **given}, got=got if outcome == "done" else {})

    def kinds(self) -> set[str]:
        """Of the anomalies that are found; the server's books are as they have to be."""
        self.round.after = {"q": self.counts}
        return {each.kind for each in check(self.round)}


@pytest.fixture
def diary() -> Diary:
    return Diary()


def three(diary: Diary) -> None:
    for n in range(3):
        diary.produce(n, f"x{n}")


def end(diary: Diary, *numbers: int) -> None:
    """Deliver and complete those items, much later."""
    for n in numbers:
        diary.lease(50 + n, f"x{n}", n, f"L5{n}")
        diary.settle(51 + n, "complete", f"x{n}", n)


def test_a_right_history_has_no_anomalies(diary: Diary) -> None:
    three(diary)
    diary.lease(5, "x0", 0)
    diary.settle(6, "retry", "x0", 0, after=2.0)
    diary.lease(9, "x0", 0, "L2", id=3)
    diary.settle(10, "complete", "x0", 3)
    end(diary, 1, 2)
    assert diary.kinds() == set()


@pytest.mark.parametrize(("left", "kind"), [((1, 2), "lost prefix"), ((0, 2), "lost middle"), ((0, 1), "lost postfix")])
def test_a_stored_item_that_is_nowhere_is_lost(diary: Diary, left: tuple[int, int], kind: str) -> None:
    three(diary)
    end(diary, *left)
    # The books would show it, too.
    diary.counts["total"] = 0
    assert kind in diary.kinds()


def test_what_is_lost_right_before_a_fault_is_a_postfix_though_more_came_later(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.produce(1, "x1")
    diary.round.faults.append(Fault("kill", "server", 1.2, 2.0))
    diary.produce(3, "x2")
    end(diary, 0, 2)
    assert "lost postfix" in diary.kinds()


def test_an_item_that_may_have_been_completed_is_not_lost(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0")
    diary.settle(2, "complete", "x0", outcome="unknown")
    diary.counts["completed"] = 1
    assert diary.kinds() == set()


def test_an_unknown_produce_need_not_be_there(diary: Diary) -> None:
    diary.produce(0, "x0", outcome="unknown")
    assert diary.kinds() == set()


def test_an_unknown_produce_is_there_whole_or_not_at_all(diary: Diary) -> None:
    diary.produce(0, "x0", "x1", outcome="unknown")
    diary.counts["produced"] = 1
    end(diary, 0)
    assert diary.kinds() == {"torn"}


def test_two_answers_to_one_key_are_two_items(diary: Diary) -> None:
    diary.produce(0, "x0", key="k")
    diary.produce(1, "x0", key="k", first=7)
    diary.counts["produced"] = 1
    end(diary, 0)
    assert diary.kinds() == {"doubled"}


def test_an_item_that_is_completed_twice_is_doubled(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0")
    diary.lease(1.5, "x0", 0, "L2", id=9, until=1.5)
    diary.settle(2, "complete", "x0", 0)
    diary.settle(3, "complete", "x0", 9)
    assert "doubled" in diary.kinds()


def test_a_completion_that_is_ignored_is_none(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0", until=2)
    diary.lease(3, "x0", 0, "L2", id=1)
    diary.settle(4, "complete", "x0", 0, ignored=True)
    diary.settle(5, "complete", "x0", 1)
    assert diary.kinds() == set()


def test_one_place_for_two_items_is_wrong(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.produce(1, "x1", first=0)
    end(diary, 0)
    diary.settle(60, "complete", "x1", 0)
    assert "doubled" in diary.kinds()


def test_a_completed_item_that_is_delivered_is_resurrected(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0")
    diary.settle(2, "complete", "x0")
    diary.lease(3, "x0", 0, "L2")
    assert diary.kinds() == {"resurrected"}


def test_a_delivery_that_began_before_the_completion_was_answered_may_be_older(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0", until=1.5)
    diary.settle(2, "complete", "x0")
    diary.lease(2.05, "x0", 0, "L2")
    assert diary.kinds() == set()


def test_what_was_never_sent_or_refused_is_invented(diary: Diary) -> None:
    diary.lease(1, "y0")
    assert diary.kinds() == {"invented", "books"}


def test_books_of_partitions_that_are_away_are_not_judged(diary: Diary) -> None:
    three(diary)
    end(diary, 0, 1, 2)
    diary.counts |= {"produced": 1, "completed": 0, "unavailable": 1}
    assert diary.kinds() == set()
    diary.counts["unavailable"] = 0
    assert diary.kinds() == {"books"}


def test_a_refused_item_is_invented(diary: Diary) -> None:
    diary.produce(0, "x0", outcome="refused")
    diary.lease(1, "x0")
    diary.settle(2, "complete", "x0")
    diary.counts["produced"] = 1
    assert diary.kinds() == {"invented"}


def test_bytes_that_were_never_sent_are_torn(diary: Diary) -> None:
    diary.lease(1, None)
    assert diary.kinds() == {"torn"}


def two_leases(diary: Diary, between: Callable[[], None] = lambda: None, second: float = 3.0) -> set[str]:
    """The first until 5.0."""
    diary.produce(0, "x0")
    diary.lease(1, "x0", until=5.0)
    between()
    diary.lease(second, "x0", 0, "L2", id=1, client="d")
    diary.settle(30, "complete", "x0", 1, ignored=True)
    end(diary, 0)
    return diary.kinds()


def test_two_leases_at_a_time_are_one_too_many(diary: Diary) -> None:
    assert two_leases(diary) == {"leased twice"}


def test_a_lease_after_the_first_ran_out_is_right(diary: Diary) -> None:
    assert two_leases(diary, second=5.1) == set()


@pytest.mark.parametrize(("outcome", "kinds"), [("done", set()), ("unknown", set()), ("refused", {"leased twice"})])
def test_a_lease_ends_when_its_client_may_have_given_the_item_up(diary: Diary, outcome: Outcome, kinds: set[str]) -> None:
    assert two_leases(diary, lambda: diary.settle(2, "release", "x0", outcome=outcome)) == kinds


def test_an_extended_lease_lasts_longer(diary: Diary) -> None:
    extend: dict[str, Any] = {"given": {"leases": ["L1"]}, "got": {"deadlines": {"L1": 9.0}}}
    assert two_leases(diary, lambda: diary.note(4, "extend", **extend), second=6.0) == {"leased twice"}


def test_a_lost_answer_that_is_told_again_is_the_same_lease(diary: Diary) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0")
    diary.lease(2, "x0")
    diary.settle(3, "complete", "x0")
    assert diary.kinds() == set()


@pytest.mark.parametrize(("at", "kinds"), [(4.0, {"early"}), (5.0, set())])
def test_an_item_is_not_delivered_before_it_is_due(diary: Diary, at: float, kinds: set[str]) -> None:
    diary.produce(0, "x0", due=5.0)
    diary.lease(at, "x0")
    diary.settle(10, "complete", "x0")
    assert diary.kinds() == kinds


@pytest.mark.parametrize(("at", "kinds"), [(3.0, {"early"}), (4.0, set())])
def test_nor_before_the_time_for_which_a_retry_put_it_back(diary: Diary, at: float, kinds: set[str]) -> None:
    diary.produce(0, "x0")
    diary.lease(1, "x0")
    diary.settle(2, "retry", "x0", after=2.0)
    diary.lease(at, "x0", 0, "L2", id=1)
    diary.settle(10, "complete", "x0", 1)
    assert diary.kinds() == kinds


def in_order(diary: Diary, *, settled: float) -> set[str]:
    diary.produce(0, "x0", item_keys=["k"])
    diary.produce(1, "x1", item_keys=["k"])
    diary.lease(2, "x0")
    diary.settle(settled, "complete", "x0")
    diary.lease(5, "x1", 1, "L2")
    diary.settle(6, "complete", "x1", 1)
    return diary.kinds()


def test_the_next_of_a_key_comes_after_the_one_before_is_settled(diary: Diary) -> None:
    assert in_order(diary, settled=3.0) == set()


def test_the_next_of_a_key_that_comes_earlier_is_out_of_order(diary: Diary) -> None:
    assert in_order(diary, settled=7.0) == {"out of order"}


@pytest.mark.parametrize(("settled", "kinds"), [(5.0, {"not unique"}), (0.5, set())])
def test_one_item_has_a_unique_key_at_a_time(diary: Diary, settled: float, kinds: set[str]) -> None:
    diary.produce(0, "x0", unique_keys=["k"])
    diary.lease(0.2, "x0")
    diary.settle(settled, "complete", "x0")
    diary.produce(1, "x1", unique_keys=["k"])
    end(diary, 1)
    assert diary.kinds() == kinds


def test_an_item_that_was_left_out_is_not_lost(diary: Diary) -> None:
    diary.produce(0, "x0", unique_keys=["k"])
    given = {"names": ["x1"], "unique_keys": ["k"]}
    diary.note(1, "produce", given=given, got={"ids": ["a.0.0"], "duplicates": [0]})
    end(diary, 0)
    assert diary.kinds() == set()


@pytest.mark.parametrize("more", [{"ended": None}, {"problem": "no answer"}])
def test_a_call_without_an_answer_is_wrong_unless_something_hung(diary: Diary, more: dict[str, Any]) -> None:
    diary.note(10, "extend", "unknown", given={"leases": []}, **more)
    assert diary.kinds() == {"never ended"}
    diary.round.faults.append(Fault("freeze", "server", 9, 12, hangs=True))
    diary.round.ended = 20
    assert diary.kinds() == set()


@pytest.mark.parametrize(("seconds", "kinds"), [(4.0, {"never ended"}), (6.0, set())])
def test_nor_unless_the_servers_had_no_processor(diary: Diary, seconds: float, kinds: set[str]) -> None:
    diary.note(10, "extend", "unknown", given={"leases": []}, problem="no answer", ended=25)
    diary.round.waits += [Wait(5, 10 + seconds / 2), Wait(9, 10 + seconds / 2), Wait(25 - seconds / 2, 30)]
    assert diary.kinds() == kinds


def test_an_answer_that_the_call_must_not_get_is_wrong(diary: Diary) -> None:
    diary.note(1, "extend", "unknown", given={"leases": []}, problem="unexpected: 500 internal")
    assert diary.kinds() == {"wrong answer"}


def test_what_an_examination_has_found_is_wrong(diary: Diary) -> None:
    diary.round.observed.append("it is served")
    assert diary.kinds() == {"wrong answer"}


@pytest.mark.parametrize("counter", ["produced", "completed", "dead"])
def test_books_that_do_not_agree_with_the_answers_are_wrong(diary: Diary, counter: str) -> None:
    three(diary)
    end(diary, 0, 1, 2)
    diary.counts[counter] += 1
    assert diary.kinds() == {"books"}


@pytest.mark.parametrize(("rest", "kinds"), [(1, {"invented"}), (2, set())])
def test_what_an_earlier_round_has_left_is_not_invented(diary: Diary, rest: int, kinds: set[str]) -> None:
    diary.round.before = {"q": NO_COUNTS | {"produced": 2, "total": rest}}
    diary.counts["produced"] += 2
    end(diary, 0, 1)
    assert diary.kinds() == kinds


def test_what_was_not_counted_at_the_beginning_is_not_in_the_books(diary: Diary) -> None:
    three(diary)
    end(diary, 0, 1, 2)
    diary.counts.update(produced=103, completed=103)
    diary.round.before = {"q": NO_COUNTS | {"produced": 50, "completed": 50, "unavailable": 1}}
    assert diary.kinds() == set()
    diary.round.before["q"]["unavailable"] = 0
    assert diary.kinds() == {"books"}


def test_queues_that_cannot_be_emptied_are_stuck(diary: Diary) -> None:
    three(diary)
    diary.round.is_drained = False
    diary.counts["total"] = 3
    assert diary.kinds() == {"stuck"}


def tick(diary: Diary, minute: int, origin: int, at: float | None = None) -> None:
    at = minute * 60.0 + 1 if at is None else at
    diary.counts["produced"] += 1
    diary.lease(at, f"tick/s@{minute * 60}", origin, f"L{origin}")
    diary.settle(at + 1, "complete", f"tick/s@{minute * 60}", origin)


def test_a_schedule_produces_its_item_once_each_minute(diary: Diary) -> None:
    diary.note(0, "schedule", given={"schedule": "s"})
    diary.round.ended = 150
    tick(diary, 1, 0)
    assert diary.kinds() == {"lost time"}
    tick(diary, 2, 1)
    assert diary.kinds() == set()
    tick(diary, 2, 2, at=130)
    assert diary.kinds() == {"doubled", "resurrected"}


def test_what_a_schedule_produced_right_before_a_round_is_not_in_its_books(diary: Diary) -> None:
    diary.note(0, "schedule", given={"schedule": "s"})
    diary.round.ended = 110
    diary.round.before = {"q": NO_COUNTS | {"produced": 1, "total": 1}}
    tick(diary, 1, 0)
    assert diary.kinds() == set()


def test_a_schedule_is_not_early(diary: Diary) -> None:
    tick(diary, 1, 0, at=58)
    assert diary.kinds() == {"early"}
