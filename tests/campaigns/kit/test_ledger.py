"""The ledger of the crash rounds finds what it is there to find."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.campaigns.kit.ledger import Ledger, Tally, name_of, payload_of

NAMES = ["p.1.0", "p.1.1"]
EMPTY: Counter[str] = Counter()


class Story:
    """Two items that were stored as a.0.0 and a.0.1."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.ledger = Ledger(self.tally)
        self.ledger.sending(NAMES)
        self.ledger.stored(NAMES, "a.0.0")

    def serve(self, name: str, lease: str = "a.0.L1", granted_at: int = 1_000, **item: Any) -> None:
        n = name.rpartition(".")[2]
        item = {"id": f"a.0.{n}", "origin": f"a.0.{n}", "lease_id": lease} | item
        self.ledger.served(payload_of(name), item, granted_at, granted_at + 500)

    def complete(self, *names: str) -> None:
        self.ledger.trying(list(names), "done")
        self.ledger.fated(list(names), "done")

    def close(self, *dead: str, **counters: int) -> None:
        items = [(payload_of(name), {"origin": f"a.0.{name[-1]}", "headers": {"sluiceway-attempts": "1"}}) for name in dead]
        self.ledger.close(Counter(counters), items, max_attempts=6)

    def found(self) -> set[str]:
        return {kind for kind in Tally.WRONG if self.tally.counts[kind]}


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_payload_tells_its_name_and_its_damage() -> None:
    for name in ("p.1.0", "p.2.10", "p.3.7"):
        assert name_of(payload_of(name)) == name
        assert name_of(payload_of(name)[:-1] + "x") is None


def test_a_story_without_faults(story: Story) -> None:
    story.serve(NAMES[0])
    story.serve(NAMES[1])
    story.complete(NAMES[0])
    story.ledger.trying([NAMES[1]], "dead")
    story.ledger.fated([NAMES[1]], "dead")
    story.ledger.check_counters(Counter(produced=2, completed=1, transferring=1))
    story.close(NAMES[1], produced=2, completed=1, dead=1)
    assert story.tally.faults == 0, story.tally.examples


def test_an_item_that_is_nowhere_is_lost(story: Story) -> None:
    story.serve(NAMES[0])
    story.complete(NAMES[0])
    story.close(produced=2, completed=2)
    assert "lost" in story.found()


def test_an_item_whose_completion_is_in_doubt_may_still_be_found_lost(story: Story) -> None:
    for name in NAMES:
        story.serve(name)
        story.ledger.trying([name], "done")
    story.close(produced=2, completed=1)
    assert story.found() == {"other"}


def test_counters_below_the_acknowledged_are_a_loss(story: Story) -> None:
    story.ledger.check_counters(Counter(produced=1, total=1))
    assert story.found() == {"lost"}


def test_a_killed_item_that_does_not_arrive_is_lost(story: Story) -> None:
    for name in NAMES:
        story.serve(name)
    story.complete(NAMES[0])
    story.ledger.trying([NAMES[1]], "dead")
    story.ledger.fated([NAMES[1]], "dead")
    story.close(produced=2, completed=1, dead=1)
    assert "lost" in story.found()


def test_two_origins_are_a_copy(story: Story) -> None:
    story.serve(NAMES[0], origin="a.0.7")
    assert story.found() == {"doubled"}


def test_one_origin_of_two_items_is_a_copy(story: Story) -> None:
    story.ledger.sending(["p.2.0"])
    story.ledger.stored(["p.2.0"], "a.0.1")
    assert story.found() == {"doubled"}


def test_what_nobody_has_tried_to_be_rid_of_is_outstanding(story: Story) -> None:
    story.ledger.sending(["p.2.0", "p.2.1"])
    assert story.ledger.outstanding == 4
    story.ledger.refused(["p.2.0", "p.2.1"])
    story.ledger.trying(NAMES, "retry")
    assert story.ledger.outstanding == 2
    story.ledger.trying(NAMES[:1], "done")
    assert story.ledger.outstanding == 1


def test_arriving_twice_in_the_dead_queue_is_a_copy(story: Story) -> None:
    story.ledger.trying(NAMES, "dead")
    story.close(NAMES[0], NAMES[0], NAMES[1], produced=2, dead=2)
    assert "doubled" in story.found()


def test_completed_and_dead_is_a_copy(story: Story) -> None:
    story.ledger.trying(NAMES, "dead")
    for name in NAMES:
        story.serve(name)
    story.complete(*NAMES)
    story.close(*NAMES, produced=2, dead=2)
    assert "doubled" in story.found()


def test_what_was_refused_or_never_sent_is_a_phantom(story: Story) -> None:
    story.ledger.sending(["p.2.0"])
    story.ledger.refused(["p.2.0"])
    story.serve("p.2.0")
    story.serve("p.3.0")
    assert story.tally.counts["phantom"] == 2


def test_half_a_request_is_torn(story: Story) -> None:
    story.ledger.sending(["p.2.0", "p.2.1"])
    story.serve("p.2.0", origin="a.0.2")
    story.complete("p.2.0")
    for name in NAMES:
        story.serve(name)
    story.complete(*NAMES)
    story.close(produced=3, completed=3)
    assert story.found() == {"torn"}


@pytest.mark.parametrize(("granted_at", "guilty"), [(1_499, True), (1_500, False), (700, True), (500, False)])
def test_a_lease_before_the_other_has_ended(story: Story, granted_at: int, guilty: bool) -> None:
    story.serve(NAMES[0])
    story.serve(NAMES[0], lease="a.0.L2", granted_at=granted_at)
    assert story.found() == ({"leased twice"} if guilty else set())


def test_an_extended_lease_lasts_longer_and_one_that_was_let_go_ends(story: Story) -> None:
    story.serve(NAMES[0])
    story.serve(NAMES[1])
    story.ledger.trying([NAMES[1]], "retry")
    story.serve(NAMES[1], lease="a.0.L2", granted_at=1_100)
    assert story.tally.faults == 0
    story.ledger.extended("a.0.L1", 3_000)
    story.serve(NAMES[0], lease="a.0.L3", granted_at=2_000)
    assert story.found() == {"leased twice"}


def test_a_completed_item_does_not_come_back(story: Story) -> None:
    story.serve(NAMES[0])
    story.complete(NAMES[0])
    story.serve(NAMES[0], lease="a.0.L2", granted_at=10**15)
    assert story.found() == {"came back"}


def test_a_scheduled_item_is_not_served_early(story: Story) -> None:
    story.ledger.sending(["p.2.0"], not_before=1_001)
    story.serve("p.2.0", origin="a.0.2")
    assert story.found() == {"early"}
