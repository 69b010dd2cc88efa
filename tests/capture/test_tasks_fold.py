"""The fold of the sync log: whatever comes, in whatever order and however often, its rules hold."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from sluiceway.capture.log_reader import decoded
from sluiceway.core.group.task_fold import fold, fold_all, judge, restore, trimmable, watermark
from sluiceway.core.group.task_parts import cut_snapshot
from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Decision,
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
    decode,
    encode,
)
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.task_records import AnnouncedPartition
from sluiceway.ports.sync_log import LogPage

NAMES = st.sampled_from(["a", "b", "c", "d"])
LITTLE = st.integers(0, 3)


class FoldMachine(RuleBasedStateMachine):
    """A stream that grows while its log is written by anybody: leaders of now and of before, owners of now and of before."""

    said = Bundle("said")

    def __init__(self) -> None:
        super().__init__()
        self.history = [State()]
        self.entries: list[Entry] = []
        self.parents: dict[str, tuple[str, ...]] = {}
        self.born: set[str] = set()
        self.gone: set[str] = set()
        self.finished: set[str] = set()
        self.times: dict[str, int] = {}
        self.points = self.trimmed = 0
        self.reached: dict[tuple[str, int], Reach] = {}
        """The barriers that count."""
        self.watermark = 0
        self.now = 1

    @property
    def state(self) -> State:
        return self.history[-1]

    def token(self, number: int) -> str:
        tokens = sorted(self.state.partitions if number % 8 else self.parents)
        return tokens[number % len(tokens)] if tokens else "none"

    def say(self, record: Record) -> Record:
        """Append it, and check what it did."""
        before, frozen = self.state, encode(Snapshot(self.state))
        seq = before.seq + 1 + len(self.entries) % 3
        verdict = judge(before, seq, decode(encode(record)))
        after = fold(before, seq, decode(encode(record)))
        assert encode(Snapshot(before)) == frozen, "a state has been changed in its place"
        assert fold(after, seq, record) is after
        if isinstance(verdict, str):
            assert msgspec.structs.replace(after, seq=before.seq) == before
        elif isinstance(record, Decision):
            assert (record.term, bool(before.leader)) == (before.term, True)
        elif isinstance(record, Term):
            assert after.term == before.term + 1
        self.entries.append((seq, record))
        self.history.append(after)
        self.check_steps(before, after, record)
        return record

    def check_steps(self, before: State, after: State, record: Record) -> None:
        assert not after.partitions.keys() & self.gone
        self.born |= after.partitions.keys()
        for token, was in before.partitions.items():
            now = after.partitions.get(token)
            if was.phase != "finished" and (now is None or now.phase == "finished"):
                assert isinstance(record, Finish)
                assert (record.token, record.grant) == (token, was.grant)
                assert token not in self.finished
                self.finished.add(token)
                assert {child for child, parents in self.parents.items() if token in parents} <= self.born
            if now is None:
                self.gone.add(token)
                assert not any(child.waits for child in after.partitions.values() if token in child.parents)
            elif now.grant != was.grant:
                assert now.grant == after.seq > was.grant
            elif now.owner:
                assert now.owner == was.owner
                assert now.to or not was.to, "a move that is cancelled leaves the old grant"

    @initialize(target=said, seeds=st.integers(1, 4))
    def begin(self, seeds: int) -> Record:
        """What random steps alone would seldom come to."""
        for name in "abcd":
            self.say(Join(name))
        self.say(Term(1, "a", ("a", "b", "c")))
        self.parents = {f"p{number}": () for number in range(seeds)}
        sown = self.say(Seeds(1, "", "first", tuple(AnnouncedPartition(token, (), "0", 1) for token in self.parents)))
        for number in range(seeds):
            self.say(Assign(1, {f"p{number}": "abc"[number % 3]}))
        return sown

    # ---- what is said -----------------------------------------------------------------------------------------------

    @rule(target=said, name=NAMES, leaves=st.sampled_from([False, False, True]))
    def come_or_go(self, name: str, leaves: bool) -> Record:
        return self.say(Leave(name) if leaves else Join(name))

    @rule(target=said, leader=NAMES, members=st.sets(NAMES), ahead=st.sampled_from([1, 1, 1, 0, 2]))
    def term(self, leader: str, members: set[str], ahead: int) -> Record:
        return self.say(Term(self.state.term + ahead, leader, tuple(sorted(members | {leader})), self.state.term))

    @rule(target=said, more=LITTLE, behind=st.sampled_from([0, 0, 1]))
    def seeds(self, more: int, behind: int) -> Record:
        self.now += 1
        partitions = []
        for _ in range(more):
            born = AnnouncedPartition(f"p{len(self.parents)}", (), "0", self.now)
            self.parents[born.token] = ()
            self.times[born.token] = self.now
            partitions.append(born)
        self.points += 1
        record = Seeds(self.state.term - behind, self.state.sown, f"point{self.points}", tuple(partitions))
        if isinstance(judge(self.state, self.state.seq + 1, record), str):
            # The stream tells of them again, or never had them.
            for born in partitions:
                del self.parents[born.token]
        return self.say(record)

    @rule(target=said, numbers=st.lists(st.integers(0, 30), min_size=1, max_size=4), to=NAMES, behind=st.sampled_from([0, 0, 0, 1]))
    def assign(self, numbers: list[int], to: str, behind: int) -> Record:
        return self.say(Assign(self.state.term - behind, {self.token(number): to for number in numbers}))

    @rule(target=said, number=st.integers(0, 30), to=NAMES)
    def move(self, number: int, to: str) -> Record:
        return self.say(Move(self.state.term, {self.token(number): to}))

    @rule(target=said, number=st.integers(0, 30))
    def cancel(self, number: int) -> Record:
        return self.say(CancelMove(self.state.term, (self.token(number),)))

    def grant(self, token: str, behind: int) -> int:
        partition = self.state.partitions.get(token)
        return (partition.grant if partition else self.state.seq) - behind

    @rule(target=said, number=st.integers(0, 30), behind=st.sampled_from([0, 0, 1]))
    def release(self, number: int, behind: int) -> Record:
        token = self.token(number)
        return self.say(Release(token, self.grant(token, behind)))

    def children(self, token: str, more: int, with_others: int) -> tuple[AnnouncedPartition, ...]:
        """All that the stream has, and that many new ones; these have other parents, too, that have not finished."""
        if token in self.parents and token not in self.finished:
            others = sorted(set(self.parents) - self.finished - {token})
            for _ in range(more):
                parents = (token, *others[:with_others])
                ancestors = {parent for parent in parents for parent in self.ancestors(parent)}
                self.parents[f"p{len(self.parents)}"] = tuple(parent for parent in parents if parent == token or parent not in ancestors)
        return tuple(AnnouncedPartition(child, parents, "0") for child, parents in self.parents.items() if token in parents)

    def ancestors(self, token: str) -> set[str]:
        return {each for parent in self.parents[token] for each in (parent, *self.ancestors(parent))}

    @rule(target=said, number=st.integers(0, 30), more=LITTLE, others=st.integers(0, 2), behind=st.sampled_from([0, 0, 0, 1]), to=NAMES)
    def finish(self, number: int, more: int, others: int, behind: int, to: str) -> Record:
        token = self.token(number)
        held = token in self.state.partitions and self.state.partitions[token].phase == "owned"
        children = self.children(token, more if held and not behind else 0, others)
        self.now += 1
        hints = {born.token: to for born in children[:1]}
        return self.say(Finish(token, self.grant(token, behind), children, self.now, hints))

    @rule(
        target=said,
        number=st.integers(0, 30),
        mark=st.integers(1, 4),
        behind=st.sampled_from([0, 0, 0, 1]),
        gives=st.sets(st.integers(0, 30), max_size=2),
        takes=st.sets(st.integers(0, 30), max_size=2),
    )
    def reach(self, number: int, mark: int, behind: int, gives: set[int], takes: set[int]) -> Record:
        """A barrier, where the partition exchanges key ranges with any others."""
        token = self.token(number)
        out = tuple(f"{token}>{self.token(other)}@{mark}" for other in sorted(gives) if self.token(other) != token)
        into = tuple(f"{self.token(other)}>{token}@{mark}" for other in sorted(takes) if self.token(other) != token)
        record = Reach(token, self.grant(token, behind), mark, tuple(dict.fromkeys(out)), tuple(dict.fromkeys(into)))
        if isinstance(judge(self.state, self.state.seq + 1, record), State):
            self.reached.setdefault((token, mark), record)
            record = self.reached[token, mark]
            assert self.state.partitions[token].barrier < mark
        return self.say(record)

    @rule(target=said, number=st.integers(0, 30), more=LITTLE, others=st.integers(0, 2))
    def supersede(self, number: int, more: int, others: int) -> Record:
        token = self.token(number)
        known = token in self.state.partitions and bool(self.state.leader)
        return self.say(Supersede(self.state.term, token, self.children(token, more if known else 0, others)))

    @rule(
        target=said,
        back=st.integers(0, 10),
        of_another_log=st.sampled_from([False, False, False, True]),
        most=st.sampled_from([100, 10_000]),
    )
    def snapshot(self, back: int, of_another_log: bool, most: int) -> Record:
        state = State(seq=10_000) if of_another_log else self.history[max(0, len(self.history) - 1 - back)]
        return [self.say(part) for part in cut_snapshot(state, most)][-1]

    @rule(target=said, record=consumes(said))
    def again(self, record: Record) -> Record:
        """Something of before comes once more."""
        return self.say(record)

    @rule()
    def trim(self) -> None:
        self.trimmed = trimmable(self.state)
        self.entries = [entry for entry in self.entries if entry[0] > self.trimmed]

    # ---- what holds -------------------------------------------------------------------------------------------------

    @invariant()
    def what_is_left_gives_the_state(self) -> None:
        assert restore(self.entries) == self.state

    @invariant()
    def records_may_be_folded_together(self) -> None:
        for back in (3, 20):
            before = self.history[max(0, len(self.history) - 1 - back)]
            frozen = encode(Snapshot(before))
            assert fold_all(before, [entry for entry in self.entries if entry[0] > before.seq]) == self.state or self.trimmed > before.seq
            assert encode(Snapshot(before)) == frozen, "a state has been changed in its place"

    @invariant()
    def each_partition_is_of_one_kind(self) -> None:
        state = self.state
        assert set(state.members) <= state.joined.keys()
        assert state.leader in ("", *state.members)
        for token, each in state.partitions.items():
            assert (each.phase == "created") == bool(each.waits)
            assert (each.phase == "owned") == bool(each.owner)
            assert not each.to or each.phase == "owned"
            assert not each.owner or each.owner in state.members
            assert not set(each.waits) & self.finished
            assert each.phase == "created" or set(self.parents[token]) <= self.finished
            if each.phase == "finished":
                assert any(token in child.parents and child.waits for child in state.partitions.values())

    @invariant()
    def a_target_waits_for_what_its_sources_have_not_given(self) -> None:
        given = {handoff for record in self.reached.values() for handoff in record.gives}
        taken = {handoff: record.token for record in self.reached.values() for handoff in record.takes}
        assert self.state.awaited == {handoff: token for handoff, token in taken.items() if handoff not in given}
        assert len(self.state.given) == len(set(self.state.given))
        assert set(self.state.given) == given - taken.keys()

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.born == self.state.partitions.keys() | self.gone

    @invariant()
    def the_watermark_does_not_go_back(self) -> None:
        found = watermark(self.state, {})
        if found is not None and not isinstance(self.entries[-1][1] if self.entries else None, Seeds):
            assert found >= self.watermark
        self.watermark = found if found is not None else self.watermark


TestFold = FoldMachine.TestCase
TestFold.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize(
    "record",
    [
        Join("a"),
        Leave("a"),
        Term(1, "a", ("a", "b"), 7),
        Seeds(1, "", "m", (AnnouncedPartition("p", ("q",), "start", 5),)),
        Assign(1, {"p": "a"}),
        Move(1, {"p": "a"}),
        CancelMove(1, ("p",)),
        Supersede(1, "p", (AnnouncedPartition("q", ("p",)),)),
        Release("p", 3),
        Finish("p", 3, (AnnouncedPartition("q", ("p",)),), 9, {"q": "a"}),
        Reach("p", 3, 1_764_000_000_000_000_000, ("p>q",), ("r>p",)),
        Snapshot(State(seq=3, joined={"a": 1})),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_read_back_as_it_was_written(record: Record) -> None:
    assert decode(encode(record)) == record


def test_what_is_no_record_is_refused() -> None:
    for data in (b'["nonsense", 1]', b"{}", b'["join"]', b'["join", 1]'):
        with pytest.raises(msgspec.ValidationError):
            decode(data)


def test_a_snapshot_from_before_there_were_barriers_is_read() -> None:
    old = b'["snapshot",{"seq":7,"joined":{"a":1},"partitions":{"p":["p",[],"begin","owned",[],"a",5,"",10]}}]'
    record = decode(old)
    assert isinstance(record, Snapshot)
    assert (record.state.partitions["p"].since, record.state.partitions["p"].barrier) == (10, 0)
    assert (record.state.given, record.state.awaited) == ((), {})


def test_fields_that_a_later_version_adds_are_passed_over() -> None:
    assert decode(b'["join","a","more"]') == Join("a")


@pytest.mark.parametrize("data", [b'["later","a"]', b'["join","\xe6"]'], ids=["of a later version", "no UTF-8"])
def test_a_log_with_records_that_cannot_be_read_is_told(data: bytes) -> None:
    with pytest.raises(SluicewayError, match="the log has records that this version does not know"):
        decoded(LogPage(1, ((1, data),), 1))
