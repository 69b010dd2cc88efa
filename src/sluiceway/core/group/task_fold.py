"""Fold of the sync log: members divide the partitions of a change stream, and the log is their only shared state.

Derived from a connector whose tasks tell each other, over a topic with one partition, what they have and what they have done. The
difference: the log is the only truth, each record is judged by the state that the records before it made, and all members judge alike. So a
record may be late, duplicated or from a member replaced long ago: it counts by these rules or not at all.

* A *term* has one leader: the first record that calls for the next term counts. Decisions count in their term only.
* A *grant* is the number of the record that gave a partition to its owner. An owner's records count under the partition's grant only.
  Grants of a partition rise, so the position store can refuse a reader with an older one.
* A partition is ready once each of its parents has finished, and a parent finishes once.
* Key ranges may pass between partitions that both go on: a *handoff*, at a *barrier* in each of the two. The source says that it is
  committed up to its barrier; the target waits at its own until the source has said so. Both ends are records of the log, so either may be
  first, and a wait survives the death of either reader.
* A move has two steps: the owner stops, and its release hands over. A cancelled move leaves a new grant, since the owner may have begun to
  stop: its records about that come under the old grant and no longer count.

Why a finished partition may be removed as soon as none of its children waits for a parent: no record still to come can create it or one of
its children again. Children are created by their parents' records, which count while the parent is not finished. A child that waits for no
parent has only finished parents. A seed is created by `Seeds`, which counts once for each `after`. And the partition itself had become
ready, so its own parents had finished long before. This rests on the stream: it must name the same parents of a partition each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from sluiceway.core.group.task_state import (
    Assign,
    CancelMove,
    Entry,
    Finish,
    Join,
    Leave,
    Move,
    Partition,
    Reach,
    Record,
    Release,
    Seeds,
    Snapshot,
    State,
    Supersede,
    Term,
)
from sluiceway.kernel.clock import Millis
from sluiceway.model.task_records import AnnouncedPartition

Partitions = dict[str, Partition]
Verdict = State | str
"""The state after the record; or the reason why it does not count."""


def fold(state: State, seq: int, record: Record) -> State:
    """Return the state after that record. A record already folded changes nothing."""
    if seq <= state.seq:
        return state
    verdict = judge(state, seq, record)
    return replace(state if isinstance(verdict, str) else verdict, seq=seq)


class _Draft(Partitions):
    """Partitions of a state that nothing else has seen, so they are changed in place: with 100,000 of them, a copy takes milliseconds.

    `waiting` has all that wait for a parent, among others that no longer do: to look for them takes as long.
    """

    def __init__(self, partitions: Partitions) -> None:
        super().__init__(partitions)
        self.waiting = {token: None for token, each in partitions.items() if each.waits}


def fold_all(state: State, entries: Sequence[Entry]) -> State:
    """Return the state after those records: the same as `fold` of one after the other, with two copies of the partitions in all."""
    if len(entries) > 2:
        state = replace(state, partitions=_Draft(state.partitions))
    for seq, record in entries:
        state = fold(state, seq, record)
    return replace(state, partitions=dict(state.partitions)) if isinstance(state.partitions, _Draft) else state


def _writable(partitions: Partitions) -> Partitions:
    return partitions if isinstance(partitions, _Draft) else dict(partitions)


def _add(partitions: Partitions, born: AnnouncedPartition, waits: Sequence[str]) -> None:
    """Add the partition, unless it is known."""
    partitions.setdefault(born.token, _created(partitions, born, waits))
    if isinstance(partitions, _Draft):
        partitions.waiting[born.token] = None


def _waiting(partitions: Partitions) -> list[Partition]:
    """The partitions that wait for a parent."""
    if not isinstance(partitions, _Draft):
        return [each for each in partitions.values() if each.waits]
    return [each for token in partitions.waiting if (each := partitions.get(token)) is not None and each.waits]


def _changed(partitions: Partitions, changes: Partitions) -> Partitions:
    partitions = _writable(partitions)
    partitions.update(changes)
    return partitions


def judge(state: State, seq: int, record: Record) -> Verdict:
    """Return the state that the record makes at that place; or, in words, why it does not count."""
    match record:
        case Join():
            return _join(state, seq, record)
        case Leave():
            return _leave(state, record)
        case Term():
            return _term(state, seq, record)
        case Release():
            return _release(state, seq, record)
        case Finish():
            return _finish(state, seq, record)
        case Reach():
            return _reach(state, record)
        case Snapshot():
            return _snapshot(state, record)
    if not _in_term(state, record.term):
        return f"of term {record.term}, in term {state.term}"
    match record:
        case Seeds():
            return _seeds(state, record)
        case Assign():
            return _assign(state, seq, record)
        case Move():
            return _move(state, record)
        case CancelMove():
            return _cancel(state, seq, record)
        case Supersede():
            return _supersede(state, record)


# ---- members ----------------------------------------------------------------------------------------------------------


def _join(state: State, seq: int, record: Join) -> Verdict:
    if record.member in state.joined:
        return "has joined already"
    return replace(state, joined={**state.joined, record.member: seq})


def _leave(state: State, record: Leave) -> Verdict:
    if record.member not in state.joined:
        return "has not joined"
    members = tuple(name for name in state.members if name != record.member)
    return replace(
        state,
        leader="" if state.leader == record.member else state.leader,
        members=members,
        joined={name: at for name, at in state.joined.items() if name != record.member},
        partitions=_freed(state.partitions, members),
    )


def _term(state: State, seq: int, record: Term) -> Verdict:
    if not _is_next(state, record.term):
        return f"calls for term {record.term}, in term {state.term}"
    members = tuple(sorted(name for name in set(record.members) if name in state.joined))
    if record.leader not in members:
        return "its leader has not joined, or is not among its members"
    # A member that joined since the last term may have been unknown to this leader. Members named by neither have gone.
    joined = {name: at for name, at in state.joined.items() if name in members or at > state.term_at}
    return replace(
        state,
        term=record.term,
        term_at=seq,
        generation=record.generation,
        leader=record.leader,
        members=members,
        joined=joined,
        partitions=_freed(state.partitions, members),
    )


def _is_next(state: State, term: int) -> bool:
    return term == state.term + 1


def _in_term(state: State, term: int) -> bool:
    # A leader that has left leads no more, though its term lasts until the next.
    return term == state.term and bool(state.leader)


def _freed(partitions: Partitions, members: Iterable[str]) -> Partitions:
    """Make partitions of members that have gone ready again."""
    stay = set(members)
    freed = {
        token: replace(each, phase="ready", owner="", to="") for token, each in partitions.items() if each.owner and each.owner not in stay
    }
    return _changed(partitions, freed)


# ---- decisions --------------------------------------------------------------------------------------------------------


def _seeds(state: State, record: Seeds) -> Verdict:
    if record.after != state.sown or record.upto == record.after:
        return f"seeds after {record.after!r}, known up to {state.sown!r}"
    point, parts = state.sowing
    if record.part != (parts if point == record.upto else 0):
        return f"part {record.part} of seeds up to {record.upto!r}, after {parts} up to {point!r}"
    seeds = (state.staged if record.part else ()) + record.partitions
    if record.part + 1 < record.parts:
        return replace(state, staged=seeds, sowing=(record.upto, record.part + 1))
    partitions = _writable(state.partitions)
    known = partitions.keys() | {born.token for born in seeds}
    for born in seeds:
        # An unknown parent is older than the stream's memory, or removed.
        waits = [parent for parent in born.parents if parent in known and not _has_finished(partitions, parent)]
        _add(partitions, born, waits)
    return replace(state, partitions=partitions, sown=record.upto, staged=(), sowing=("", 0))


def _assign(state: State, seq: int, record: Assign) -> Verdict:
    given = {token: _given(state, seq, token, to) for token, to in record.owners.items()}
    return _with(state, given, "nothing of it is ready, for a member")


def _given(state: State, seq: int, token: str, to: str) -> Partition | None:
    partition = state.partitions.get(token)
    if partition is None or partition.phase != "ready" or to not in state.members:
        return None
    return _owned(partition, to, seq)


def _owned(partition: Partition, owner: str, seq: int) -> Partition:
    return replace(partition, phase="owned", owner=owner, grant=seq, to="")


def _move(state: State, record: Move) -> Verdict:
    moving: dict[str, Partition | None] = {}
    for token, to in record.to.items():
        partition = state.partitions.get(token)
        if partition is not None and partition.phase == "owned" and not partition.to and to in state.members and to != partition.owner:
            moving[token] = replace(partition, to=to)
    return _with(state, moving, "nothing of it can move")


def _cancel(state: State, seq: int, record: CancelMove) -> Verdict:
    stay: dict[str, Partition | None] = {}
    for token in record.tokens:
        partition = state.partitions.get(token)
        if partition is not None and partition.to:
            stay[token] = _stays(partition, seq)
    return _with(state, stay, "nothing of it is moving")


def _stays(partition: Partition, seq: int) -> Partition:
    return replace(partition, to="", grant=seq)


def _with(state: State, changed: Mapping[str, Partition | None], otherwise: str) -> Verdict:
    """Apply the entries that count; each counts or not by itself."""
    counts = {token: each for token, each in changed.items() if each is not None}
    return replace(state, partitions=_changed(state.partitions, counts)) if counts else otherwise


def _supersede(state: State, record: Supersede) -> Verdict:
    partition = state.partitions.get(record.token)
    if partition is None or partition.phase == "finished":
        return "has finished"
    breach = broken_rule(state, record.token, record.children)
    if breach is not None:
        return breach
    partitions = _writable(state.partitions)
    if not _bear(partitions, record.children):
        return "nothing of it is new"
    return replace(state, partitions=partitions)


# ---- records of owners ------------------------------------------------------------------------------------------------


def _holds(partition: Partition | None, grant: int) -> bool:
    return partition is not None and partition.phase == "owned" and partition.grant == grant


def _release(state: State, seq: int, record: Release) -> Verdict:
    partition = state.partitions.get(record.token)
    if partition is None or not _holds(partition, record.grant):
        return "not under the partition's grant"
    if partition.to in state.members:
        released = _owned(partition, partition.to, seq)
    else:
        released = replace(partition, phase="ready", owner="", to="")
    return replace(state, partitions=_changed(state.partitions, {record.token: released}))


def _finish(state: State, seq: int, record: Finish) -> Verdict:
    partition = state.partitions.get(record.token)
    if partition is None or not _holds(partition, record.grant):
        return "not under the partition's grant"
    breach = broken_rule(state, record.token, record.children)
    if breach is not None:
        return breach
    partitions = _writable(state.partitions)
    _bear(partitions, record.children)
    ended_at = max(record.ended_at, partition.since or 0)
    partitions[record.token] = replace(partition, phase="finished", owner="", to="", since=ended_at)
    waiting, parents = _waiting(partitions), {record.token}
    for child in waiting:
        if record.token in child.waits:
            partitions[child.token] = _ticked(state, seq, child, record, ended_at)
            parents.update(child.parents)
    return replace(state, partitions=_needed(partitions, [partitions[child.token] for child in waiting], parents))


def _ticked(state: State, seq: int, child: Partition, record: Finish, ended_at: Millis) -> Partition:
    """The child with one parent fewer to wait for."""
    waits = tuple(parent for parent in child.waits if parent != record.token)
    since = ended_at if child.since is None else min(child.since, ended_at)
    child = replace(child, waits=waits, since=since)
    if waits:
        return child
    hint = record.hints.get(child.token, "")
    return _owned(child, hint, seq) if hint in state.members else replace(child, phase="ready")


def _bear(partitions: Partitions, children: Iterable[AnnouncedPartition]) -> bool:
    """Add the children that are not known yet. Returns whether there were any."""
    before = len(partitions)
    for born in children:
        # An unknown parent is not created yet: had it finished, it would have named this child.
        waits = [parent for parent in born.parents if not _has_finished(partitions, parent)]
        _add(partitions, born, waits)
    return len(partitions) > before


def _created(partitions: Partitions, born: AnnouncedPartition, waits: Sequence[str]) -> Partition:
    ends = [partitions[parent].since or 0 for parent in born.parents if _has_finished(partitions, parent)]
    since = min(ends, default=None) if waits else born.since
    return Partition(born.token, born.parents, born.start, "created" if waits else "ready", tuple(waits), since=since)


def _has_finished(partitions: Partitions, token: str) -> bool:
    return token in partitions and partitions[token].phase == "finished"


def _needed(partitions: Partitions, waiting: Iterable[Partition], parents: Iterable[str]) -> Partitions:
    """The partitions without those of these parents that have finished, and that none of those that are or were waiting needs any more."""
    awaited = {parent for each in waiting if each.waits for parent in each.parents}
    for token in parents:
        if token not in awaited and _has_finished(partitions, token):
            del partitions[token]
    return partitions


def broken_rule(state: State, token: str, children: Iterable[AnnouncedPartition]) -> str | None:
    """Return how these children of the partition violate the rule that its removal relies on; None if they do not."""
    for born in children:
        known = state.partitions.get(born.token)
        if born.token == token or born.token in born.parents:
            return f"{born.token} would be its own parent"
        if token not in born.parents:
            return f"{born.token} is named by {token}, which is not among its parents"
        if known is not None and set(known.parents) != set(born.parents):
            return f"{born.token} was born with other parents"
    return None


# ---- barriers ---------------------------------------------------------------------------------------------------------


def _reach(state: State, record: Reach) -> Verdict:
    partition = state.partitions.get(record.token)
    if partition is None or not _holds(partition, record.grant):
        return "not under the partition's grant"
    if not _is_ahead(partition, record.mark):
        return f"has reached {partition.barrier} before"
    # Hand over first: of partitions that exchange key ranges at one moment, none may wait for another before it has.
    state = _take_over(_hand_over(state, record), record)
    return replace(state, partitions=_changed(state.partitions, {record.token: replace(partition, barrier=record.mark)}))


def _is_ahead(partition: Partition, mark: int) -> bool:
    return mark > partition.barrier


def _hand_over(state: State, record: Reach) -> State:
    """Let targets that wait for these handoffs go on; keep the others until their targets come to them."""
    early = tuple(handoff for handoff in record.gives if handoff not in state.awaited)
    awaited = {handoff: token for handoff, token in state.awaited.items() if handoff not in record.gives}
    return replace(state, given=state.given + early, awaited=awaited)


def _take_over(state: State, record: Reach) -> State:
    """Let the partition wait for handoffs that have not been given."""
    late = {handoff: record.token for handoff in record.takes if handoff not in state.given}
    given = tuple(handoff for handoff in state.given if handoff not in record.takes)
    return replace(state, given=given, awaited=state.awaited | late)


def may_cross(state: State, token: str) -> bool:
    """Whether the partition may be read past the barrier that it has reached."""
    return token not in state.awaited.values()


# ---- snapshots --------------------------------------------------------------------------------------------------------


def _snapshot(state: State, record: Snapshot) -> Verdict:
    covers = record.state.seq
    if not state.kept_from < covers <= state.seq:
        return f"of {covers}, after one of {state.kept_from}"
    of, parts = state.snapping
    if record.part != (parts if of == covers else 0):
        return f"part {record.part} of the one of {covers}, after {parts} of {of}"
    if record.part + 1 < record.parts:
        return replace(state, snapping=(covers, record.part + 1))
    return replace(state, kept_from=covers, snapping=(0, 0))


def restore(entries: Sequence[Entry]) -> State:
    """Return the state after all that is left of a log: equal to a fold from its beginning, if no more was trimmed than `trimmable`
    allowed."""
    # Of the snapshots that can belong to this log take the newest: it covers the most.
    return fold_all(max(_snapshots(entries), key=lambda each: each.seq, default=State()), entries)


def _snapshots(entries: Iterable[Entry]) -> Iterator[State]:
    """The states of the snapshots of which all parts are there."""
    found: dict[tuple[int, int], dict[int, State]] = {}
    for seq, record in entries:
        if isinstance(record, Snapshot) and record.state.seq < seq:
            found.setdefault((record.state.seq, record.parts), {})[record.part] = record.state
    for (_, parts), states in found.items():
        if len(states) == parts:
            partitions: Partitions = {}
            for part in range(parts):
                partitions.update(states[part].partitions)
            yield replace(states[0], partitions=partitions)


def trimmable(state: State) -> int:
    """Records up to this number may be trimmed from the log. A member that has not folded so far must then `restore`."""
    return state.kept_from


# ---- queries ----------------------------------------------------------------------------------------------------------


def watermark(state: State, committed: Mapping[str, Millis]) -> Millis | None:
    """Time in ms before which no further record can come; None: no record is to come. `committed`: how far each partition is read and kept.

    A partition that has not begun counts with the earliest end of its finished parents; unfinished parents count themselves.
    """
    bounds = [max(each.since, committed.get(token, 0)) for token, each in state.unfinished().items() if each.since is not None]
    return min(bounds, default=None)


def stuck(state: State) -> dict[str, tuple[str, ...]]:
    """If no partition can proceed although some are unfinished: the waiting partitions, each with its missing parents, and handoffs, which
    the stream withholds."""
    unfinished, waiting = state.unfinished(), set(state.awaited.values())
    if any(each.phase != "created" and token not in waiting for token, each in unfinished.items()):
        return {}
    return {token: each.waits + state.awaits(token) for token, each in unfinished.items()}
