"""Invariants of task groups, numbered as in docs/project/tasks.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from simulation.promises import check
from simulation.tasks_stream import Positions, Stream
from sluiceway.core.group.task_fold import fold, judge, restore, trimmable, watermark
from sluiceway.core.group.task_leader import divide
from sluiceway.core.group.task_state import Decision, Entry, Finish, Reach, Record, Release, Seeds, State, Term, decode, encode
from sluiceway.kernel.clock import Millis


class TruthLog:
    """Reference log and its fold from the beginning, with a check of what each record does."""

    def __init__(self, stream: Stream, positions: Positions) -> None:
        self.stream, self.positions = stream, positions
        self.entries: list[Entry] = []
        self.history: list[State] = [State()]
        """State after each record, indexed by record number."""
        self.givers: dict[tuple[str, int], str] = {}
        """Owner to which each (partition, grant) was given."""
        self.released: set[tuple[str, int]] = set()
        self.born: set[str] = set()
        self.gone: set[str] = set()
        self.finished: set[str] = set()
        self.counted: Counter[str] = Counter()
        """Number of effective records, by kind."""
        self._watermark: Millis = 0

    @property
    def state(self) -> State:
        return self.history[-1]

    def append(self, author: str, record: Record) -> bool:
        """Append a record and check its effect. Returns whether it counts."""
        record = decode(encode(record))
        before, seq = self.state, len(self.history)
        counts = isinstance(judge(before, seq, record), State)
        after = fold(before, seq, record)
        self.entries.append((seq, record))
        self.history.append(after)
        if not counts:
            check(
                after.partitions == before.partitions and after.members == before.members, "S8: what does not count has changed something"
            )
            return False
        self.counted[type(record).__name__] += 1
        self._check_author(author, before, record)
        self._check_grants(before, after, seq)
        self._check_lives(before, after, record)
        if isinstance(record, Reach):
            self._check_reached(record)
        self.check_watermark(isinstance(record, Seeds))
        return True

    def _check_author(self, author: str, before: State, record: Record) -> None:
        match record:
            case Release() | Finish() | Reach():
                owner = before.partitions[record.token].owner if record.token in before.partitions else ""
                check(author == owner, f"S11: {author} says what becomes of {record.token}, which is {owner}'s: {record}")
            case Term():
                check(author == record.leader, f"S11: {author} calls for the term of {record.leader}")
            case _ if isinstance(record, Decision):
                check(author == before.leader, f"S11: {author} decides in the term of {before.leader}")

    def _check_grants(self, before: State, after: State, seq: int) -> None:
        for token, each in after.partitions.items():
            was = before.partitions.get(token)
            if each.grant != (was.grant if was else 0):
                check(each.grant == seq and each.phase == "owned", f"S10: a grant of {token} out of nothing: {each.grant}")
                self.givers[token, seq] = each.owner
            elif each.owner:
                check(was is not None and each.owner == was.owner, f"S10: {token} changes hands under the grant {each.grant}")
            if each.owner:
                check(each.owner in after.members, f"S11: {token} is owned by {each.owner}, which is no member")

        check(after.joined.keys() >= set(after.members), f"S11: {after.members} are members, and {list(after.joined)} have joined")

    def _check_lives(self, before: State, after: State, record: Record) -> None:
        new = after.partitions.keys() - before.partitions.keys()
        again = sorted(new & self.gone)
        check(not again, f"S6: {again} come back after their removal")
        self.born |= new
        for token in sorted(before.partitions):
            was, now = before.partitions[token], after.partitions.get(token)
            if was.phase != "finished" and (now is None or now.phase == "finished"):
                check(isinstance(record, Finish) and record.token == token, f"S5: {token} is gone and had not finished")
                self._check_finish(token)
            if now is None:
                self._check_removal(token, after)
        for token, each in after.partitions.items():
            if each.phase in ("ready", "owned"):
                self._check_gate(token, "is ready")

    def _check_finish(self, token: str) -> None:
        part = self.stream.parts[token]
        check(token not in self.finished, f"S4: {token} finishes twice")
        self.finished.add(token)
        kept = self.positions.committed.get(token, 0)
        check(kept == part.records, f"S4: {token} finishes at {kept} of {part.records}")
        missing = sorted(set(part.children) - self.born)
        check(not missing, f"S5: {token} has finished, and its children {missing} are lost")

    def _check_reached(self, record: Reach) -> None:
        barrier = next(each for each in self.stream.parts[record.token].barriers if each.mark == record.mark)
        kept = self.positions.committed.get(record.token, 0)
        check(
            kept >= barrier.records,
            f"S16: {record.token} has reached the barrier after {barrier.records} records, and {kept} are committed",
        )

    def _check_removal(self, token: str, after: State) -> None:
        self.gone.add(token)
        waiting = [child for child in self.stream.parts[token].children if child in after.partitions and after.partitions[child].waits]
        check(not waiting, f"S7: {token} is removed while {waiting} wait")

    def _check_gate(self, token: str, what: str) -> None:
        unfinished = [parent for parent in self.stream.parts[token].parents if parent not in self.finished]
        check(not unfinished, f"S3: {token} {what} before {unfinished} have finished")

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check_reading(self, name: str, token: str, grant: int) -> None:
        self._check_gate(token, "is read")
        giver = self.givers.get((token, grant))
        check(giver == name, f"S1: {name} reads {token} under {grant}, which is {giver}'s")
        check((token, grant) not in self.released, f"S12: {name} reads {token} under {grant}, which it has released")

    def check_order(self, token: str, first: int, end: int) -> None:
        """Check that what came before these records, of the same keys, in other partitions, is committed."""
        for index in range(first, end):
            other, before = self.stream.parts[token].earlier.get(index, (token, -1))
            kept = self.positions.committed.get(other, 0)
            check(kept > before, f"S15: {token} is read at {index}, after record {before} of {other}, of which {kept} are committed")

    def check_fold(self, state: State) -> None:
        check(state == self.history[state.seq], f"S8: not all have the same state after {state.seq}")

    def check_restore(self) -> None:
        check(restore(self.entries) == self.state, "S9: what is left of the log does not give its state")

    def check_watermark(self, seeded: bool = False) -> None:
        """Check that the watermark never goes back, except for seeds, and that no record older than it is still to come."""
        parts, kept = self.stream.parts, self.positions.committed
        says = watermark(self.state, {token: parts[token].base + index for token, index in kept.items()})
        if says is None:
            return
        check(seeded or says >= self._watermark, f"S14: the watermark goes back from {self._watermark} to {says}")
        self._watermark = says
        roots = {token for token, part in parts.items() if part.point and token not in self.born}
        for token, part in parts.items():
            if kept.get(token, 0) < part.records and token not in self.finished and not self._begins_in(token, roots):
                first = part.base + kept.get(token, 0)
                check(says <= first, f"S14: the watermark is {says}, and {token} has a record of {first} to come")

    def _begins_in(self, token: str, roots: set[str]) -> bool:
        """Whether the partition is a seed not yet known or descends from one, whose records may be older than the watermark."""
        return token in roots or any(self._begins_in(parent, roots) for parent in self.stream.parts[token].parents)

    def trim(self) -> int:
        upto = trimmable(self.state)
        self.entries = [entry for entry in self.entries if entry[0] > upto]
        return upto

    # ---- at rest ----------------------------------------------------------------------------------------------------

    def unrest(self, alive: Mapping[str, bool]) -> str | None:
        """Return why the group is not at rest, None if it is. `alive`: expected members, and whether each has read the whole log."""
        state = self.state
        if state.members != tuple(sorted(alive)):
            return f"L6: {sorted(alive)} are there, {list(state.members)} are served"
        if state.leader not in alive:
            return f"L4: {state.leader or 'nobody'} leads"
        if not all(alive.values()):
            return "L6: somebody has not read the log"
        if any(each.to for each in state.partitions.values()):
            return "L5: a move has not ended"
        if state.awaited:
            return f"L7: somebody waits at a barrier: {state.awaited}"
        if any(each.phase == "ready" for each in state.partitions.values()):
            return "L1: something is ready and nobody's"
        counts = Counter(dict.fromkeys(state.members, 0))
        counts.update(each.owner for each in state.active().values())
        if max(counts.values()) - min(counts.values()) > 1 or any(divide(state)):
            return f"L3: uneven: {dict(counts)}"
        unread = [token for token in state.active() if self.stream.ends(token)]
        return f"L1: {unread} have not finished" if unread else None
