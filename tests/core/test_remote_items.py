"""What polls of other instances name, and which leases are offered what these have."""

from __future__ import annotations

import pytest

from sluiceway.core.queue.remote_items import AFTER_FAILURE, LINGER, MAX_POLLS, POLL, RemoteItems, Wish, after_failure, poll_time
from sluiceway.core.queue.routing import Peer
from sluiceway.model.peers import Load

A, B, C = (Peer(name, name) for name in "abc")


def items(*peers: Peer) -> RemoteItems:
    made = RemoteItems()
    made.follow(peers)
    return made


def has(count: int, queue: str = "q") -> dict[str, Load]:
    return {queue: Load(count, None)}


def wait(known: RemoteItems, batch_size: int = 1, queue: str = "q") -> Wish:
    wish = Wish(queue, batch_size)
    known.wish(wish)
    return wish


@pytest.mark.parametrize("peers", [1, 10, MAX_POLLS, 100, 999])
def test_polls_are_short_in_small_clusters_and_bounded_in_large_ones(peers: int) -> None:
    assert peers / (poll_time(peers) / 1_000) <= MAX_POLLS + 1
    assert (poll_time(peers) == POLL) is (peers <= MAX_POLLS)
    assert (after_failure(peers) == AFTER_FAILURE) is (peers <= MAX_POLLS)


def test_the_first_lease_that_waits_has_the_owners_polled_anew_and_later_ones_cost_nothing() -> None:
    known = items(A, B, C)
    for peer in (A, B, C):
        assert known.asks(peer, 0) == ()
    first = Wish("q", 1)
    assert known.wish(first)
    assert known.unasked("q", [A, B]) == [A, B]
    assert known.asks(A, 0) == ("q",)
    assert known.unasked("q", [A, B]) == [B]
    second = Wish("q", 1)
    assert not known.wish(second)
    # Consumers come and go.
    assert known.end(first, None, 0) == known.end(second, None, 0) == []
    assert known.asks(C, LINGER - 1) == ("q",)
    assert not known.wish(Wish("q", 1))


def test_a_queue_for_which_no_lease_has_waited_for_long_is_named_no_more() -> None:
    known = items(A)
    wish = wait(known)
    known.end(wish, None, 5)
    assert known.asks(A, 5 + LINGER - 1) == ("q",)
    assert known.asks(A, 5 + LINGER) == ()
    assert not known.is_wanted("q")
    assert known.wish(Wish("q", 1))


def test_a_new_owner_is_polled_anew() -> None:
    known = items(A, B)
    known.asks(A, 0)
    wait(known)
    known.asks(B, 0)
    assert known.unasked("q", [B, A, C]) == [A]
    known.follow([A, B, C])
    assert known.unasked("q", [C]) == [C]


def test_items_are_offered_to_as_many_waiting_leases_as_they_serve_oldest_first() -> None:
    known = items(A)
    wishes = [wait(known, 2) for _ in range(3)]
    assert known.answered(A, has(3)) == wishes[:2]
    assert [wish.offered for wish in wishes] == [A, A, None]
    assert known.asks(A, 0) == ("q",)


def test_what_no_lease_takes_is_the_next_ones_and_is_not_asked_for_meanwhile() -> None:
    known = items(A, B)
    wish = wait(known)
    assert known.answered(A, has(2)) == [wish]
    assert known.asks(A, 0) == ()
    assert known.asks(B, 0) == ("q",)
    assert known.end(wish, True, 0) == []
    next_one = wait(known)
    assert next_one.offered == A
    # There is none left: it is to tell of the next ones.
    assert known.end(next_one, True, 0) == [A]
    assert known.asks(A, 0) == ("q",)
    assert wait(known).offered is None


def test_the_fullest_instance_comes_first() -> None:
    known = items(A, B)
    known.end(wait(known), None, 0)
    known.answered(A, has(2))
    known.answered(B, has(5))
    assert [wait(known, 4).offered for _ in range(3)] == [B, A, B]


def test_an_instance_that_has_nothing_any_more_throws_doubt_on_all() -> None:
    known = items(A, B, C)
    known.end(wait(known), None, 0)
    known.answered(A, has(1))
    known.answered(B, has(5))
    wish = wait(known)
    assert wish.offered == B
    assert sorted(known.end(wish, False, 0)) == [A, B]
    assert wait(known).offered is None


def test_an_offer_that_was_not_needed_is_asked_for_again() -> None:
    known = items(A)
    known.end(wait(known), None, 0)
    known.answered(A, has(1))
    wish = wait(known)
    assert known.end(wish, None, 0) == [A]
    assert known.asks(A, 0) == ("q",)


def test_each_answer_replaces_what_was_known() -> None:
    known = items(A)
    known.end(wait(known), None, 0)
    known.answered(A, has(5))
    assert known.loads("q") == {A: Load(5, None)}
    known.answered(A, has(7, "other"))
    assert known.asks(A, 0) == ("q",)
    assert known.loads("q") == {}
    assert not known.is_wanted("other")


def test_of_a_silent_instance_nothing_is_known() -> None:
    known = items(A, B)
    known.end(wait(known), None, 0)
    assert known.busy("q") == {}
    known.answered(A, {"q": Load(5, None, 300)})
    known.answered(B, {})
    assert known.busy("q") == {A: 300, B: 0}
    known.failed(A)
    assert known.busy("q") == {B: 0}
    assert known.loads("q") == {}
    assert wait(known).offered is None
    known.answered(A, has(5))
    known.follow([B])
    assert wait(known).offered is None
    assert known.loads("q") == {}
