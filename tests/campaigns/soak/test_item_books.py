"""What a book finds wrong, and what it does not."""

from __future__ import annotations

import pytest

from tests.campaigns.soak.item_books import ItemBook

NONE = dict.fromkeys(("produced", "moved_in", "completed", "dead", "cleared", "redriven", "moved", "total", "transferring"), 0)


def counts(**of: int) -> dict[str, int]:
    return NONE | of


def handled(book: ItemBook, numbers: range) -> None:
    """Produced, delivered and completed."""
    book.stored(numbers)
    for number in numbers:
        assert book.delivered(number, f"a.0.{number}")
    book.trying(numbers)
    book.completed(numbers)


def test_a_book_without_faults_balances() -> None:
    book = ItemBook("jobs")
    handled(book, book.new(3))
    assert (book.items, book.outstanding) == (3, 0)
    assert book.close({"jobs": counts(produced=3, completed=3)}) == []


def test_a_stored_item_that_no_call_can_have_ended_is_lost() -> None:
    book = ItemBook("jobs")
    handled(book, book.new(2))
    book.stored(book.new(1))
    assert book.outstanding == 1
    assert book.close({"jobs": counts(produced=3, completed=2, cleared=1)}) == ["lost: jobs 2 was stored, and is nowhere"]


def test_an_item_of_unknown_outcome_may_be_there_or_not() -> None:
    book = ItemBook("jobs")
    there, gone = book.new(1), book.new(1)
    assert book.delivered(there[0], "a.0.0")
    book.trying(there)
    assert gone[0] == 1
    # The completion has no answer either: it may have been counted or not.
    assert book.close({"jobs": counts(produced=1, completed=1)}) == []
    assert book.close({"jobs": counts(produced=2, completed=2)}) == [
        "books: jobs counts 2 as completed; the book has 0 to 1",
        "books: jobs counts 2 items; 1 landed, and 0 died or were redriven",
    ]


def test_a_refused_item_is_not_delivered() -> None:
    book = ItemBook("jobs")
    book.refused(book.new(1))
    assert book.outstanding == 0
    book.delivered(0, "a.0.0")
    assert book.wrong == ["invented: jobs 0 was refused, and is a.0.0"]


@pytest.mark.parametrize("number", [None, 7])
def test_what_was_never_sent_is_not_delivered(number: int | None) -> None:
    book = ItemBook("jobs")
    book.new(1)
    assert not book.delivered(number, "a.0.9")
    assert book.wrong == ["invented: a.0.9 of jobs has bytes that were never sent"]


def test_an_item_is_completed_once() -> None:
    book = ItemBook("jobs")
    numbers = book.new(1)
    handled(book, numbers)
    book.completed(numbers)
    assert book.wrong == ["doubled: jobs 0 was completed twice"]


def test_what_dies_and_is_redriven_is_counted_again() -> None:
    book = ItemBook("jobs")
    handled(book, book.new(4))
    dead = {"jobs": counts(produced=5, completed=3, dead=2), "jobs-dead": counts(produced=2, completed=1, redriven=1)}
    assert book.close(dead) == []
    dead["jobs-dead"]["produced"] = 1
    assert len(book.close(dead)) == 2


def test_counters_that_left_with_their_partitions_are_not_compared() -> None:
    book = ItemBook("moving")
    handled(book, book.new(4))
    assert book.close({"moving": counts(produced=1, completed=1)}, keeps_counts=False) == []
    assert book.close({"moving": counts(produced=1)}, keeps_counts=False) != []


def test_an_item_that_is_tried_twice_is_outstanding_no_more() -> None:
    book = ItemBook("jobs")
    numbers = book.new(2)
    book.trying(numbers)
    book.trying(numbers)
    assert book.outstanding == 0


def test_of_many_findings_some_are_told() -> None:
    book = ItemBook("jobs")
    book.stored(book.new(50))
    found = book.close({"jobs": counts(produced=50, total=50)})
    assert len(found) == 21
    assert found[-1] == "and 30 more of jobs"
