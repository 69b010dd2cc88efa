"""Specification of rounds (ADR 19): members of a group divide its items by plans that they agree on through the meta store.

Plans are those of the code (`core/group/rounds.py`), and so is what a member serves by them. Around that, everything may happen at any
time: a member pauses before or after any step, for good or not, and its commit lands late, or unheard. (A commit that is lost is a look
without one.) There are no clocks: a lease is over at any moment, and from then on others may take the member for silent, since that takes
longer than the lease by every clock.

Promise 33 of docs/explanation/guarantees.md: an item has one owner at a time, and a later owner's token is greater. `python -m spec rounds`
checks it, and that each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from sluiceway.core.group.group_records import GroupView, Keys, MemberRecord, Plan, Resource, Round
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.rounds import Rounds, next_plan
from sluiceway.model.meta import View
from spec.checker import Broken

ITEMS = ("q.0", "q.1")
RESOURCE = Resource(items=ITEMS)
NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    members: int = 2
    rounds: int = 3
    beats: int = 3
    """Commits that a member may decide on, each of which has a beat."""
    strays: int = 0
    """Commits that may be under way while their members have gone on without an answer."""
    leavers: int = 1
    """Members that may leave."""
    silence_outlasts_leases: bool = True
    checks_those_given_up: bool = True
    checks_the_round: bool = True
    serves_under_a_lease: bool = True
    waits_for_former_owners: bool = True
    stops_before_it_says_so: bool = True


class Record(NamedTuple):
    """A member's own: `applied` is the plan as of which it has stopped what that took away; `leaving`: it takes part in no round."""

    beat: int
    applied: int
    leaving: bool = False


class Division(NamedTuple):
    """A plan: for each member, its items with their grants, and those that it may still serve."""

    round: int
    owners: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
    waits: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Open(NamedTuple):
    """The round's record, with the marks under it."""

    number: int
    sealed: bool
    participants: tuple[str, ...]
    marks: frozenset[str] = frozenset()


class Store(NamedTuple):
    round: Open
    plan: Division
    members: tuple[Record | None, ...]


class Commit(NamedTuple):
    """What a member has decided on. `own`, `round`, `given_up`: what it checks, as it was seen; `after`: the new round and plan."""

    what: str
    record: Record | None
    own: Record | None
    round: Open | None = None
    given_up: tuple[tuple[int, Record], ...] = ()
    after: tuple[Open, Division] | None = None


class Member(NamedTuple):
    """`serves`: items with their grants, under the lease of the beat `confirmed`; `beats`: those that it has sent."""

    serves: tuple[tuple[str, int], ...] = ()
    confirmed: int = 0
    beats: int = 1
    commit: Commit | None = None


class State(NamedTuple):
    """`over`: the last beat of each member whose lease is over. `highest`: the greatest grant of each item, and who served under it."""

    store: Store
    members: tuple[Member, ...]
    over: tuple[int, ...]
    strays: frozenset[tuple[int, Commit]] = frozenset()
    highest: tuple[tuple[int, int], ...] = ((0, -1),) * len(ITEMS)


Step = tuple[str, Callable[[], State]]


class RoundsModel:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        """The first two have divided the items. The others have just joined."""
        plan = Division(1, (("a", (("q.0", 1),)), ("b", (("q.1", 1),))))
        store = Store(Open(1, True, ("a", "b")), plan, (Record(1, 1),) * self._rules.members)
        return State(store, (Member(confirmed=1),) * self._rules.members, (0,) * self._rules.members)

    def steps(self, state: State) -> Iterator[Step]:
        for at, member in enumerate(state.members):
            name = NAMES[at]
            record = state.store.members[at]
            for beat in {member.confirmed, 0 if record is None else record.beat}:
                if beat > state.over[at]:
                    yield f"the lease of beat {beat} of {name} is over", lambda at=at, beat=beat: _over(state, at, beat)  # type: ignore[misc]
            if member.commit is None:
                yield from self._looks(state, at, member)
                continue
            commit = member.commit
            yield f"{name} {commit.what}", lambda at=at, commit=commit: self._lands(_heard(state, at), at, commit)  # type: ignore[misc]
            if len(state.strays) < self._rules.strays:
                yield (
                    f"{name} goes on without an answer",
                    lambda at=at, commit=commit: _heard(state, at)._replace(strays=state.strays | {(at, commit)}),  # type: ignore[misc]
                )
        for stray in state.strays:
            yield f"late, {NAMES[stray[0]]} {stray[1].what}", lambda stray=stray: self._strays_in(state, *stray)  # type: ignore[misc]

    # ---- a look -----------------------------------------------------------------------------------------------

    def _looks(self, state: State, at: int, member: Member) -> Iterator[Step]:
        store = state.store
        own = store.members[at]
        seen = member._replace(confirmed=0 if own is None else own.beat)
        seen = seen._replace(serves=self._serves(state, at, seen, member))
        yield f"{NAMES[at]} looks", lambda: self._sound(_put(state, at, seen), at)
        if member.beats == self._rules.beats:
            return
        for commit in self._decisions(state, at, member.beats + 1, own):
            decided = seen._replace(beats=member.beats + 1, commit=commit)
            yield f"{NAMES[at]} looks, and {commit.what}: decides", lambda decided=decided: self._sound(_put(state, at, decided), at)  # type: ignore[misc]

    def _serves(self, state: State, at: int, seen: Member, before: Member) -> tuple[tuple[str, int], ...]:
        if self._rules.serves_under_a_lease and seen.confirmed <= state.over[at]:
            return ()
        if not self._rules.stops_before_it_says_so and before.serves:
            return before.serves
        served = served_by(state.store, NAMES[at])
        if not self._rules.waits_for_former_owners:
            served = dict(state.store.plan.owners).get(NAMES[at], ())
        return served

    def _decisions(self, state: State, at: int, beat: int, own: Record | None) -> Iterator[Commit]:
        current, plan, name = state.store.round, state.store.plan, NAMES[at]
        record = Record(beat, plan.round, own is not None and own.leaving)
        if own is None:
            yield Commit("joins again", record, own)
            return
        yield Commit("beats", record, own)
        if own.leaving:
            if name not in current.marks and name not in current.participants and name not in dict(plan.owners):
                yield Commit("goes", None, own)
        elif at < self._rules.leavers:
            yield Commit("says that it leaves", record._replace(leaving=True), own)
        if current.sealed and current.number < self._rules.rounds:
            opened = Open(current.number + 1, False, current.participants, frozenset() if own.leaving else frozenset({name}))
            yield Commit(f"opens round {opened.number}", record, own, current, after=(opened, plan))
        elif not current.sealed and name not in current.marks and not own.leaving:
            marked = current._replace(marks=current.marks | {name})
            yield Commit("marks itself", record, own, current, after=(marked, plan))
        elif not current.sealed:
            yield from self._seals(state, at, record, own)

    def _seals(self, state: State, at: int, record: Record, own: Record) -> Iterator[Commit]:
        current = state.store.round
        members = [(at, each) for at, each in enumerate(state.store.members) if each is not None]
        missing = [(other, each) for other, each in members if NAMES[other] not in current.marks and not each.leaving]
        if self._rules.silence_outlasts_leases and any(each.beat > state.over[other] for other, each in missing):
            return
        missing += [(other, each) for other, each in members if other != at and each.leaving and each.beat <= state.over[other]]
        given_up = tuple(NAMES[other] for other, _ in missing)
        after = division_after(state.store.plan, current, state.store.members, given_up)
        without = f", gives up {', '.join(given_up)}" if given_up else ""
        yield Commit(f"seals round {current.number}{without}", record, own, current, tuple(missing), after)

    # ---- a commit ---------------------------------------------------------------------------------------------

    def _strays_in(self, state: State, at: int, commit: Commit) -> State:
        return self._lands(state._replace(strays=state.strays - {(at, commit)}), at, commit)

    def _lands(self, state: State, at: int, commit: Commit) -> State:
        """The commit takes effect, if all that it checks is as it was seen."""
        store = state.store
        if store.members[at] != commit.own:
            return state
        if commit.round is not None and self._rules.checks_the_round and not _same_round(store.round, commit):
            return state
        if self._rules.checks_those_given_up and any(store.members[each] != record for each, record in commit.given_up):
            return state
        members = [*store.members]
        for each, _ in commit.given_up:
            members[each] = None
        members[at] = commit.record
        landed = store._replace(members=tuple(members))
        if commit.after is None:
            return state._replace(store=landed)
        current, plan = commit.after
        if current.sealed:
            return state._replace(store=landed._replace(round=current, plan=plan))
        marks = current.marks | (store.round.marks if store.round.number == current.number else frozenset())
        return state._replace(store=landed._replace(round=current._replace(marks=marks)))

    # ---- promises ---------------------------------------------------------------------------------------------

    def _sound(self, state: State, at: int) -> State:
        """Check what member `at` now serves."""
        highest = list(state.highest)
        for item, grant in self._served(state, at):
            place = ITEMS.index(item)
            before, owner = highest[place]
            if grant < before or (grant == before and owner != at):
                raise Broken(f"promise 33: {NAMES[at]} serves {item} under grant {grant}, after {NAMES[owner]} under {before}")
            highest[place] = grant, at
        for other in range(len(state.members)):
            if other != at and (both := {item for item, _ in self._served(state, at)} & {item for item, _ in self._served(state, other)}):
                raise Broken(f"promise 33: {min(both)} is served by {NAMES[at]} and {NAMES[other]}")
        return state._replace(highest=tuple(highest))

    def _served(self, state: State, at: int) -> tuple[tuple[str, int], ...]:
        member = state.members[at]
        return member.serves if member.confirmed > state.over[at] or not self._rules.serves_under_a_lease else ()


def _same_round(found: Open, commit: Commit) -> bool:
    """Whether the round's record is as it was seen; for a seal, also its marks."""
    seen = commit.round
    assert seen is not None
    if commit.after is not None and commit.after[0].sealed:
        return found == seen
    return (found.number, found.sealed) == (seen.number, seen.sealed)


def _heard(state: State, at: int) -> State:
    return _put(state, at, state.members[at]._replace(commit=None))


def _over(state: State, at: int, beat: int) -> State:
    return state._replace(over=(*state.over[:at], beat, *state.over[at + 1 :]))


def _put(state: State, at: int, member: Member) -> State:
    return state._replace(members=(*state.members[:at], member, *state.members[at + 1 :]))


# ---- the code's decisions ---------------------------------------------------------------------------------------------

KEYS = Keys("g")


def _plan(division: Division) -> Plan:
    owners = {name: dict(grants) for name, grants in division.owners}
    return Plan(round=division.round, era=1, resource_version=1, owners=owners, waits=dict(division.waits))


@cache
def _look(plan: Division, current: Open, members: tuple[Record | None, ...]) -> GroupView:
    records = {
        NAMES[at]: MemberRecord(beat=each.beat, lease_timeout=1, applied=each.applied, leaving=each.leaving)
        for at, each in enumerate(members)
        if each is not None
    }
    record = Round(number=current.number, sealed=current.sealed, trigger="", participants=current.participants)
    return GroupView(View(1, {}), 0, RESOURCE, record, _plan(plan), records, current.marks, {})


def served_by(store: Store, name: str) -> tuple[tuple[str, int], ...]:
    """What the member serves by the plan, as the code decides."""
    return _served_by(store.plan, store.members, name)


@cache
def _served_by(plan: Division, members: tuple[Record | None, ...], name: str) -> tuple[tuple[str, int], ...]:
    look = _look(plan, Open(plan.round, True, ()), members)
    return tuple(sorted(Rounds(Beating(KEYS, name)).owned(look, RESOURCE).items()))


@cache
def division_after(plan: Division, current: Open, members: tuple[Record | None, ...], given_up: tuple[str, ...]) -> tuple[Open, Division]:
    """The round sealed, with the plan that the code makes: if it gives members up, those of the last round take over."""
    look = _look(plan, current, members)
    names = [name for name in sorted(current.marks) if name in look.members and not look.members[name].leaving]
    if given_up:
        names = [name for name in names if name in current.participants] or names
    made, _ = next_plan(look, RESOURCE, current.number, names, given_up)
    owners = tuple((name, tuple(sorted(grants.items()))) for name, grants in sorted(made.owners.items()))
    return Open(current.number, True, tuple(names)), Division(made.round, owners, tuple(sorted(made.waits.items())))


ABLATIONS = {
    "a member is given up before its lease is over": Rules(silence_outlasts_leases=False),
    "a member is given up though it beats after all": Rules(checks_those_given_up=False),
    "a round is sealed twice": Rules(checks_the_round=False, members=3, rounds=2),
    "a member serves without a lease": Rules(serves_under_a_lease=False),
    "a new owner does not wait for the former one": Rules(waits_for_former_owners=False),
    "a member says that it has stopped, and stops later": Rules(stops_before_it_says_so=False),
}
"""The rules without one, by what is missing."""
