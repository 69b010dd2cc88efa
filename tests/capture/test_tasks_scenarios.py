"""What befalls a group of tasks, one by one, told to the fold."""

from __future__ import annotations

from sluiceway.core.group.task_fold import fold, judge, may_cross, restore, stuck, trimmable, watermark
from sluiceway.core.group.task_leader import divide, hints, next_term
from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Entry,
    Finish,
    Join,
    Leave,
    Move,
    Reach,
    Record,
    Release,
    Seeds,
    Snapshot,
    State,
    Supersede,
    Term,
)
from sluiceway.model.task_records import AnnouncedPartition, Group


class Log:
    """A group of a, b and c, led by a, at a stream that begins with these seeds. Each has what is said at `given`."""

    def __init__(self, *seeds: str, given: dict[str, str] | None = None) -> None:
        self.state = State()
        self.entries: list[Entry] = []
        for name in "abc":
            assert self.say(Join(name))
        assert self.say(Term(1, "a", ("a", "b", "c"), 1))
        assert self.say(Seeds(1, "", "first", tuple(AnnouncedPartition(token, since=10) for token in seeds)))
        if given:
            assert self.say(Assign(1, given))

    def say(self, record: Record) -> bool:
        """Whether it counts."""
        seq = self.state.seq + 1
        counts = isinstance(judge(self.state, seq, record), State)
        self.state = fold(self.state, seq, record)
        self.entries.append((seq, record))
        return counts

    def end(
        self, token: str, *children: AnnouncedPartition, at: int = 0, grant: int | None = None, hints: dict[str, str] | None = None
    ) -> bool:
        return self.say(Finish(token, self.grant(token) if grant is None else grant, children, at, hints or {}))

    def give(self, **owners: str) -> None:
        assert self.say(Assign(self.state.term, owners))

    def grant(self, token: str) -> int:
        return self.state.partitions[token].grant

    def phases(self) -> dict[str, str]:
        return {token: each.phase for token, each in self.state.partitions.items()}

    def owner(self, token: str) -> str:
        return self.state.partitions[token].owner


def child(token: str, *parents: str) -> AnnouncedPartition:
    return AnnouncedPartition(token, parents, f"{token}:0")


# ---- partitions ---------------------------------------------------------------------------------------------------------


def test_1_a_partition_splits_and_is_not_needed_any_more() -> None:
    log = Log("p", given={"p": "a"})
    assert log.end("p", child("l", "p"), child("r", "p"))
    assert log.phases() == {"l": "ready", "r": "ready"}
    assert log.state.partitions["l"].start == "l:0"


def test_2_a_merged_partition_waits_for_both_and_the_first_is_kept_until_then() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    merged = child("m", "p", "q")
    assert log.end("p", merged)
    assert log.phases() == {"p": "finished", "q": "owned", "m": "created"}
    assert not log.say(Assign(1, {"m": "a"}))
    assert log.end("q", merged)
    assert log.phases() == {"m": "ready"}


def test_3_a_child_is_known_before_its_other_parent_is() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    # m comes from p and from q's child r.
    assert log.end("p", child("m", "p", "r"))
    assert log.end("q", child("r", "q"))
    assert log.phases() == {"p": "finished", "m": "created", "r": "ready"}
    log.give(r="c")
    assert log.end("r", child("m", "p", "r"))
    assert log.phases() == {"m": "ready"}


def test_4_what_was_split_is_merged_again() -> None:
    log = Log("p", given={"p": "a"})
    merged = child("m", "l", "r")
    assert log.end("p", child("l", "p"), child("r", "p"))
    log.give(l="a", r="b")
    assert log.end("r", merged)
    assert log.end("l", merged)
    log.give(m="c")
    assert log.end("m")
    assert log.state.partitions == {}


def test_5_seeds_count_once() -> None:
    log = Log("p", given={"p": "a"})
    assert log.end("p")
    assert not log.say(Seeds(1, "", "first", (AnnouncedPartition("p"),)))
    assert log.state.partitions == {}
    assert log.say(Seeds(1, "first", "second", (AnnouncedPartition("q"),)))
    assert not log.say(Seeds(1, "second", "second", (AnnouncedPartition("p"),)))
    assert log.phases() == {"q": "ready"}


def test_6_a_seed_waits_for_those_parents_that_the_stream_still_has() -> None:
    log = Log("p")
    seeds = (child("l", "p", "long ago"), child("x", "long ago"))
    assert log.say(Seeds(1, "first", "second", seeds))
    assert log.phases() == {"p": "ready", "l": "created", "x": "ready"}
    log.give(p="a")
    # It is told of with all of its parents, as then.
    assert log.end("p", child("l", "p", "long ago"))
    assert log.phases() == {"l": "ready", "x": "ready"}


def test_7_children_that_are_known_before_the_end() -> None:
    log = Log("p", given={"p": "a"})
    assert log.say(Supersede(1, "p", (child("n", "p"),)))
    assert log.phases() == {"p": "owned", "n": "created"}
    assert not log.say(Supersede(1, "p", (child("n", "p"),)))
    assert log.end("p", child("n", "p"))
    assert log.phases() == {"n": "ready"}
    log.give(n="b")
    assert log.end("n")
    assert not log.say(Supersede(1, "p", (child("n", "p"),)))
    assert log.state.partitions == {}


def test_8_a_partition_finishes_once() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    grant, children = log.grant("p"), (child("m", "p", "q"), child("l", "p"))
    assert log.end("p", *children)
    assert not log.end("p", *children, grant=grant)
    assert log.end("q", child("m", "p", "q"))
    assert not log.end("p", *children, grant=grant)
    assert log.phases() == {"m": "ready", "l": "ready"}


def test_9_a_stream_that_breaks_its_rule_loses_nothing() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    assert not log.end("p", child("p", "p"))
    assert not log.end("p", child("l", "q"))
    assert log.end("p", child("m", "p", "q"))
    assert not log.end("q", child("m", "q"))
    assert log.phases() == {"p": "finished", "q": "owned", "m": "created"}


def test_10_what_waits_for_what_never_comes_is_told() -> None:
    log = Log("p", given={"p": "a"})
    assert stuck(log.state) == {}
    assert log.end("p", child("m", "p", "never"))
    assert stuck(log.state) == {"m": ("never",)}


# ---- members ------------------------------------------------------------------------------------------------------------


def test_11_of_two_who_would_lead_the_first_does() -> None:
    log = Log("p")
    assert log.say(Term(2, "b", ("a", "b", "c")))
    assert not log.say(Term(2, "c", ("a", "b", "c")))
    assert not log.say(Assign(1, {"p": "a"}))
    assert log.say(Assign(2, {"p": "c"}))
    assert not log.say(Term(4, "c", ("c",)))


def test_12_what_the_dead_had_is_read_by_others_and_what_they_still_say_does_not_count() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    old = log.grant("q")
    assert log.say(Term(2, "a", ("a", "c")))
    assert log.phases() == {"p": "owned", "q": "ready"}
    assert not log.end("q", grant=old)
    log.give(q="c")
    assert log.grant("q") > old
    assert not log.say(Release("q", old))
    assert not log.end("q", child("l", "q"), grant=old)
    assert log.owner("q") == "c"


def test_13_the_leader_dies_and_grants_and_moves_go_on() -> None:
    log = Log("p", "q", given={"p": "b", "q": "b"})
    assert log.say(Move(1, {"q": "c"}))
    grants = {token: log.grant(token) for token in "pq"}
    assert log.say(Term(2, "b", ("b", "c")))
    assert {token: log.grant(token) for token in "pq"} == grants
    assert log.end("p", grant=grants["p"])
    assert log.say(Release("q", grants["q"]))
    assert log.owner("q") == "c"


def test_14_a_leader_who_has_left_decides_nothing() -> None:
    log = Log("p")
    assert log.say(Leave("a"))
    assert not log.say(Assign(1, {"p": "b"}))
    assert not log.say(Leave("a"))
    assert log.say(Term(2, "b", ("b", "c")))
    assert log.say(Assign(2, {"p": "b"}))


def test_15_who_joins_while_a_term_is_called_for_is_not_forgotten() -> None:
    log = Log()
    assert log.say(Join("d"))
    assert log.say(Term(2, "a", ("a", "b")))
    assert set(log.state.joined) == {"a", "b", "d"}
    assert next_term(log.state, Group(3, "a", ("a", "b", "d"))) == Term(3, "a", ("a", "b", "d"), 3)
    # Whom two terms pass over has gone.
    assert log.say(Term(3, "a", ("a", "b")))
    assert set(log.state.joined) == {"a", "b"}
    assert not log.say(Term(4, "d", ("d",)))


# ---- moves --------------------------------------------------------------------------------------------------------------


def test_16_a_move_hands_over_when_the_owner_has_stopped() -> None:
    log = Log("p", given={"p": "a"})
    old = log.grant("p")
    assert not log.say(Move(1, {"p": "a"}))
    assert not log.say(Move(1, {"p": "nobody"}))
    assert log.say(Move(1, {"p": "b"}))
    assert not log.say(Move(1, {"p": "c"}))
    assert (log.owner("p"), log.grant("p")) == ("a", old)
    assert log.say(Release("p", old))
    assert log.owner("p") == "b"
    assert log.grant("p") > old


def test_17_what_is_said_before_a_cancel_is_seen_does_not_count_after_it() -> None:
    log = Log("p", given={"p": "a"})
    old = log.grant("p")
    assert not log.say(CancelMove(1, ("p",)))
    assert log.say(Move(1, {"p": "b"}))
    assert log.say(CancelMove(1, ("p",)))
    assert log.owner("p") == "a"
    assert log.grant("p") > old
    assert not log.say(Release("p", old))
    assert not log.end("p", grant=old)
    assert log.end("p")


def test_18_either_side_of_a_move_dies() -> None:
    log = Log("p", "q", given={"p": "b", "q": "c"})
    assert log.say(Move(1, {"p": "c", "q": "b"}))
    assert log.say(Term(2, "a", ("a", "b")))
    assert log.state.partitions["q"].phase == "ready"
    assert log.state.partitions["q"].to == ""
    assert log.owner("p") == "b"
    assert divide(log.state).cancel == ("p",)
    assert log.say(Release("p", log.grant("p")))
    assert log.phases() == {"p": "ready", "q": "ready"}


def test_19_a_partition_ends_while_it_is_to_move() -> None:
    log = Log("p", given={"p": "a"})
    grant = log.grant("p")
    assert log.say(Move(1, {"p": "b"}))
    assert log.end("p", child("l", "p"))
    assert not log.say(Release("p", grant))
    assert log.phases() == {"l": "ready"}


def test_20_a_finisher_proposes_who_has_least() -> None:
    log = Log("p", "q", "r", given={"p": "a", "q": "b", "r": "b"})
    children = child("l", "p"), child("m", "p", "q")
    proposed = hints(log.state, "a", "p", children)
    assert proposed == {"l": "a", "m": "c"}
    assert log.end("p", *children, hints=proposed)
    assert (log.owner("l"), log.phases()["m"]) == ("a", "created")
    assert log.grant("l") == log.state.seq
    # The hint of the last parent counts, and only if whom it names is there.
    assert log.say(Leave("c"))
    assert log.end("q", child("m", "p", "q"), hints={"m": "c"})
    assert log.phases() == {"r": "owned", "l": "owned", "m": "ready"}
    assert divide(log.state).assign == {"m": "a"}


# ---- and more -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_and_what_came_after_its_state_give_the_whole() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    kept = log.state
    assert log.end("p", child("l", "p"))
    assert log.say(Snapshot(kept))
    assert not log.say(Snapshot(kept))
    assert log.end("q")
    assert trimmable(log.state) == kept.seq
    left = [entry for entry in log.entries if entry[0] > kept.seq]
    assert isinstance(left[0][1], Finish)
    assert restore(left) == restore(log.entries) == log.state


def test_a_snapshot_of_what_has_not_been_said_yet_does_not_count() -> None:
    log = Log("p")
    assert not log.say(Snapshot(State(seq=1_000)))
    assert trimmable(log.state) == 0
    assert restore(log.entries) == log.state


# ---- barriers -----------------------------------------------------------------------------------------------------------


def reach(log: Log, token: str, mark: int, gives: str = "", takes: str = "") -> bool:
    """It comes to a barrier where it hands over to these, and takes over from those."""
    out = tuple(f"{token}>{other}@{mark}" for other in gives)
    into = tuple(f"{other}>{token}@{mark}" for other in takes)
    return log.say(Reach(token, log.grant(token), mark, out, into))


def waiting(log: Log) -> set[str]:
    return {token for token in log.state.partitions if not may_cross(log.state, token)}


def test_a_target_waits_until_its_source_has_come_as_far_whichever_comes_first() -> None:
    log = Log("s", "t", given={"s": "a", "t": "b"})
    assert reach(log, "t", 5, takes="s")
    assert waiting(log) == {"t"}
    assert log.state.awaits("t") == ("s>t@5",)
    assert reach(log, "s", 5, gives="t")
    assert not waiting(log)
    assert reach(log, "s", 9, gives="t")
    assert log.state.given == ("s>t@9",)
    assert reach(log, "t", 9, takes="s")
    assert not waiting(log)
    rest = log.state
    assert not rest.given
    assert not rest.awaited


def test_a_barrier_counts_once_and_only_under_the_grant() -> None:
    log = Log("s", "t", given={"s": "a", "t": "b"})
    assert not log.say(Reach("s", log.grant("s") - 1, 5, ("s>t@5",)))
    assert reach(log, "s", 5, gives="t")
    assert not reach(log, "s", 5, gives="t")
    assert not reach(log, "s", 4, gives="t")
    assert not log.say(Reach("x", 1, 5))
    assert log.state.given == ("s>t@5",)


def test_partitions_that_exchange_keys_at_one_moment_do_not_wait_for_each_other() -> None:
    log = Log("p", "q", "r", given={"p": "a", "q": "b", "r": "c"})
    assert reach(log, "p", 5, gives="q", takes="r")
    assert reach(log, "q", 5, gives="r", takes="p")
    assert waiting(log) == {"p"}
    assert reach(log, "r", 5, gives="p", takes="q")
    assert not waiting(log)


def test_a_wait_outlives_the_target_s_reader_and_the_source_s_end() -> None:
    log = Log("s", "t", given={"s": "a", "t": "b"})
    assert reach(log, "t", 5, takes="s")
    assert log.say(Leave("b"))
    log.give(t="c")
    assert waiting(log) == {"t"}
    assert reach(log, "s", 5, gives="t")
    assert reach(log, "s", 6, gives="t")
    assert log.end("s", child("l", "s"))
    assert reach(log, "t", 6, takes="s"), "what it gave is remembered, though it is gone"
    assert not waiting(log)
    assert "s" not in log.state.partitions


def test_what_waits_for_a_handoff_that_never_comes_is_told() -> None:
    log = Log("s", "t", given={"s": "a", "t": "b"})
    assert reach(log, "t", 5, takes="s")
    assert stuck(log.state) == {}, "s goes on"
    assert log.end("s")
    assert stuck(log.state) == {"t": ("s>t@5",)}


def test_the_watermark_is_held_back_by_the_oldest_that_may_still_come() -> None:
    log = Log("p", "q", given={"p": "a", "q": "b"})
    assert watermark(log.state, {}) == 10
    assert watermark(log.state, {"p": 30, "q": 40}) == 30
    merged = child("m", "p", "q")
    assert log.end("p", merged, at=35)
    assert watermark(log.state, {"p": 35, "q": 50}) == 35, "m may have something from where p ended"
    assert log.end("q", merged, at=60)
    assert watermark(log.state, {"q": 60}) == 35
    log.give(m="a")
    assert watermark(log.state, {"m": 70}) == 70
    assert log.end("m", at=80)
    assert watermark(log.state, {}) is None


def test_children_that_are_only_announced_do_not_hold_the_watermark_back() -> None:
    log = Log("p", given={"p": "a"})
    assert log.say(Supersede(1, "p", (child("n", "p"),)))
    assert watermark(log.state, {"p": 30}) == 30
    assert log.end("p", at=45)
    assert watermark(log.state, {"p": 45}) == 45


def test_the_leader_moves_as_few_as_it_can() -> None:
    log = Log(*"pqrstu", given=dict.fromkeys("pqrstu", "a"))
    division = divide(log.state)
    assert (len(division.move), division.assign, division.cancel) == (4, {}, ())
    assert log.say(Move(1, dict(division.move)))
    assert not any(divide(log.state)), "what has begun is not decided again"
    for token in division.move:
        assert log.say(Release(token, log.grant(token)))
    assert not any(divide(log.state))


def test_without_members_nothing_is_decided() -> None:
    log = Log("p")
    for name in "abc":
        assert log.say(Leave(name))
    assert not any(divide(log.state))
    assert hints(log.state, "a", "p", (child("l", "p"),)) == {}
