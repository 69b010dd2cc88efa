"""Which polls of other instances are told of items here."""

from __future__ import annotations

from random import Random

from sluiceway.core.queue.poll_line import FEW, RETELL, PollLine

MANY = [f"i{number:03}" for number in range(200)]


def line_of(askers: list[str], *queues: str) -> PollLine:
    line = PollLine()
    for asker in askers:
        line.join(asker, queues)
    return line


def test_in_a_small_cluster_all_are_told_at_once() -> None:
    line = line_of(MANY[:FEW], "q")
    assert line.tell("q", 1, 0) == MANY[:FEW]
    assert not line.waits("q")


def test_no_poll_ends_without_items_or_for_another_queue() -> None:
    line = line_of(["a"], "q")
    assert line.tell("q", 0, 0) == []
    assert line.tell("other", 5, 0) == []
    assert line.waits("q")
    assert not line.waits("other")


def test_in_a_large_cluster_as_many_as_the_items_need_are_told_longest_wait_first() -> None:
    line = line_of(MANY, "q")
    assert line.tell("q", 3, 0) == MANY[:3]
    assert line.tell("q", 3, 1) == []
    assert line_of(MANY, "q").tell("q", 1_000_000, 0) == MANY[:FEW]


def test_each_round_trip_tells_twice_as_many() -> None:
    """Those that were told wait for nothing any more: each comes back without the queue."""
    line = line_of(MANY, "q")
    told, rounds = line.tell("q", 1, 0), [1]
    while told and line.waits("q"):
        back = []
        for asker in told:
            assert line.join(asker, ()) == ["q"]
            back += line.tell("q", 1, 0)
        told = back
        rounds.append(len(told))
    assert rounds == [1, 2, 4, 8, 16, 32, 64, 73]


def test_those_that_are_told_and_silent_leave_their_room_after_a_while() -> None:
    line = line_of(MANY, "q")
    assert line.tell("q", 1, 0) == MANY[:1]
    assert line.next_look("q") == RETELL
    assert line.tell("q", 1, RETELL - 1) == []
    assert line.tell("q", 1, RETELL) == MANY[1:3]
    assert line.next_look("q") == 2 * RETELL


def test_once_the_items_are_taken_the_next_ones_are_told_to_as_few_as_at_first() -> None:
    line = line_of(MANY, "q")
    line.tell("q", 1, 0)
    line.tell("q", 1, RETELL)
    assert line.tell("q", 0, RETELL) == []
    assert line.next_look("q") is None
    assert line.tell("q", 1, RETELL) == MANY[3:4]


def test_an_instance_has_one_poll_here() -> None:
    line = line_of(["a", "b"], "q")
    assert line.join("a", ["r", "r"]) == ["r"]
    assert line.tell("q", 1, 0) == ["b"]
    assert line.tell("r", 1, 0) == ["a"]
    line.join("a", ["q"])
    line.leave("a")
    assert not line.waits("q")
    line.leave("a")


def test_a_poll_that_is_told_of_one_queue_waits_for_no_other() -> None:
    line = line_of(["a"], "q", "r")
    assert line.tell("q", 1, 0) == ["a"]
    assert line.tell("r", 1, 0) == []


def test_whoever_comes_and_goes_all_that_wait_are_told_in_the_end_and_nothing_is_kept() -> None:
    for seed in range(200):
        random, now = Random(seed), 0
        line = PollLine()
        waiting: dict[str, set[str]] = {}
        for _ in range(200):
            now += random.choice([0, 1, RETELL])
            asker, queue = random.choice(MANY[:30]), random.choice("qrs")
            if random.random() < 0.5:
                waiting[asker] = set(random.sample("qrs", random.randint(0, 3)))
                line.join(asker, waiting[asker])
            elif random.random() < 0.2:
                waiting.pop(asker, None)
                line.leave(asker)
            else:
                for told in line.tell(queue, random.choice([0, 1, 50]), now):
                    assert queue in waiting.pop(told)
        for queue in "qrs":
            for _ in range(10):
                now += RETELL
                for told in line.tell(queue, 1, now):
                    assert queue in waiting.pop(told)
            assert not any(queue in each for each in waiting.values())
        assert not line._lines
