"""Specification of rounds (ADR 19): members of a group divide its items by plans that they agree on through the meta store.

Plans are those of the code (`core/group/rounds.py`), and so is what a member serves by them. Around that, everything may happen at any
time: a member pauses before or after any step, also between reading the group and deciding, for good or not, and its commit lands late, or
unheard. (A commit that is lost is a look without one.) After a commit that was only its beat, a member may go on from its last look, with
that beat in it (ADR 70). There are no clocks: a lease is over at any moment, and from then on others may take the member for silent, since
that takes longer than the lease by every clock. Items are placed and removed without a round (ADR 20).

Promise 33 of docs/explanation/guarantees.md: an item has one owner at a time, and a later owner's token is greater. `python -m spec rounds`
checks it, and that each rule is needed. `spec/group_trace.py` checks that recorded histories of groups are orders of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import NamedTuple

from sluiceway.core.group.group_records import GroupView, Keys, MemberRecord, Plan, Resource, Round
from sluiceway.core.group.heartbeats import Beating
from sluiceway.core.group.rounds import Rounds, next_plan
from sluiceway.model.meta import View
from spec.checker import Broken

ITEMS = ("q.0", "q.1", "q.2")
AT_FIRST = 2
"""Items that the group has at first. The others are placed later, each once."""
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
    late_looks: int = 1
    """Members that may have read the group and not looked at it yet."""
    own_beats: int = 1
    """Members that may go on from their last look, with their own beat in it."""
    marked: int = 0
    """1: at first, all have marked themselves in a second round."""
    placements: int = 0
    """Items that may be placed without a round."""
    beats_are_answered: bool = True
    silence_outlasts_leases: bool = True
    checks_those_given_up: bool = True
    checks_the_round: bool = True
    removed_items_never_return: bool = True
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


Divided = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]
"""Items, and the limits of queues."""


class Store(NamedTuple):
    round: Open
    plan: Division
    members: tuple[Record | None, ...]
    items: tuple[str, ...] = ITEMS[:AT_FIRST]
    limits: tuple[tuple[str, int], ...] = ()
    """The number of members that may have items of a queue."""

    @property
    def resource(self) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
        """What a plan divides, and how."""
        return self.items, self.limits


class Commit(NamedTuple):
    """What a member has decided on. `own`, `round`, `given_up`, `resource`: what it checks, as it was seen. `after`: the new round
    and plan. `looked`: the group as the member has seen it, if it may go on from there."""

    what: str
    record: Record | None
    own: Record | None
    round: Open | None = None
    given_up: tuple[tuple[int, Record], ...] = ()
    after: tuple[Open, Division] | None = None
    resource: Divided | None = None
    looked: Store | None = None


class Member(NamedTuple):
    """`serves`: items with their grants, under the lease of the beat `confirmed`; `beats`: those that it has sent. `seen`: the group as it
    has read it, and not looked at yet."""

    serves: tuple[tuple[str, int], ...] = ()
    confirmed: int = 0
    beats: int = 1
    commit: Commit | None = None
    seen: Store | None = None


class State(NamedTuple):
    """`over`: the last beat of each member whose lease is over. `highest`: the greatest grant of each item, and who served under it.
    `gone`: the items that were removed for good."""

    store: Store
    members: tuple[Member, ...]
    over: tuple[int, ...]
    strays: frozenset[tuple[int, Commit]] = frozenset()
    highest: tuple[tuple[int, int], ...] = ((0, -1),) * len(ITEMS)
    gone: frozenset[str] = frozenset()


Step = tuple[str, Callable[[], State]]


class RoundsModel:
    """The model under these rules, of members with these names that divide these items."""

    def __init__(self, rules: Rules, names: Sequence[str] = NAMES, items: Sequence[str] = ITEMS) -> None:
        self._rules, self.names, self._items = rules, names, items
        self._code = CodeDecisions(names)

    def first(self) -> State:
        """The first two have divided the items. The others have just joined."""
        plan = Division(1, (("a", (("q.0", 1),)), ("b", (("q.1", 1),))))
        count, beat = self._rules.members, 1 + self._rules.marked
        current = Open(2, False, ("a", "b"), frozenset(self.names[:count])) if self._rules.marked else Open(1, True, ("a", "b"))
        store = Store(current, plan, (Record(beat, 1),) * count)
        return State(store, (Member(confirmed=beat, beats=beat),) * count, (0,) * count)

    def steps(self, state: State) -> Iterator[Step]:
        for at, member in enumerate(state.members):
            name = self.names[at]
            record = state.store.members[at]
            for beat in {member.confirmed, 0 if record is None else record.beat}:
                if beat > state.over[at]:
                    yield f"the lease of beat {beat} of {name} is over", lambda at=at, beat=beat: self.runs_out(state, at, beat)  # type: ignore[misc]
            if member.commit is None:
                yield from self._looks(state, at, member)
                continue
            commit = member.commit
            yield f"{name} {commit.what}", lambda at=at, commit=commit: self.lands(_heard(state, at), at, commit)  # type: ignore[misc]
            if commit.looked is not None and (state.store.members[at] == commit.own or not self._rules.beats_are_answered):
                yield (
                    f"{name} {commit.what}, and takes that into what it has seen",
                    lambda at=at, commit=commit: self._takes_in(state, at, commit),  # type: ignore[misc]
                )
            if len(state.strays) < self._rules.strays:
                yield (
                    f"{name} goes on without an answer",
                    lambda at=at, commit=commit: _heard(state, at)._replace(strays=state.strays | {(at, commit)}),  # type: ignore[misc]
                )
        yield from self._placements(state)
        for stray in state.strays:
            yield f"late, {self.names[stray[0]]} {stray[1].what}", lambda stray=stray: self._strays_in(state, *stray)  # type: ignore[misc]

    def runs_out(self, state: State, at: int, beat: int) -> State:
        """The lease of that beat is over."""
        over = max(beat, state.over[at])
        return state._replace(over=(*state.over[:at], over, *state.over[at + 1 :]))

    # ---- items ------------------------------------------------------------------------------------------------

    def _placements(self, state: State) -> Iterator[Step]:
        for item in self._items[AT_FIRST : AT_FIRST + self._rules.placements]:
            if item in state.store.items:
                yield f"{item} is removed", lambda item=item: self.removes(state, item)  # type: ignore[misc]
            elif item not in state.gone or not self._rules.removed_items_never_return:
                for name in state.store.round.participants:
                    yield f"{item} is placed at {name}", lambda item=item, name=name: self.places(state, item, name)  # type: ignore[misc]

    def places(self, state: State, item: str, name: str) -> State:
        """The item, which has no owner, is the member's by the plan as it is. Those that may still serve it are in the plan's waits. No
        check of the round: one that is open is sealed over the items as they are by then."""
        store = state.store
        owners = {owner: dict(grants) for owner, grants in store.plan.owners}
        owners.setdefault(name, {})[item] = store.plan.round
        after = store._replace(plan=store.plan._replace(owners=_sorted(owners)), items=tuple(sorted({*store.items, item})))
        return state._replace(store=after)

    def removes(self, state: State, item: str) -> State:
        """The item goes for good. A member that serves it stops at its next look."""
        store = state.store
        owners = {name: {each: grant for each, grant in grants if each != item} for name, grants in store.plan.owners}
        plan = store.plan._replace(owners=_sorted({name: grants for name, grants in owners.items() if grants}))
        items = tuple(each for each in store.items if each != item)
        return state._replace(store=store._replace(plan=plan, items=items), gone=state.gone | {item})

    def changes(self, state: State, after: Store) -> State | None:
        """An operator changes the group like this: only its items, or also the plan, where some are placed or removed; None: never so."""
        before = state.store
        if after.plan == before.plan:
            return state._replace(store=before._replace(items=after.items, limits=after.limits))
        reached = state._replace(store=before._replace(limits=after.limits))
        for item in sorted({*before.items} - {*after.items}):
            reached = self.removes(reached, item)
        had = {item for _, grants in before.plan.owners for item, _ in grants}
        given = {item: name for name, grants in after.plan.owners for item, _ in grants}
        for item in sorted({*after.items} - {*before.items}):
            if item in state.gone or item in had or given.get(item) not in before.round.participants:
                return None
            reached = self.places(reached, item, given[item])
        return reached if reached.store == after else None

    # ---- a look -----------------------------------------------------------------------------------------------

    def _looks(self, state: State, at: int, member: Member) -> Iterator[Step]:
        name, seen = self.names[at], member.seen or state.store
        if member.seen is None and sum(each.seen is not None for each in state.members) < self._rules.late_looks:
            yield f"{name} reads", lambda: _put(state, at, member._replace(seen=seen))
        yield f"{name} looks", lambda: self.sound(self.looks(state, at, seen), at)
        if member.beats < self._rules.beats:
            for commit in self.decisions(state, at, seen):
                if commit.what == "beats" and at < self._rules.own_beats:
                    commit = commit._replace(looked=seen)
                decided = self.decides(self.looks(state, at, seen), at, commit)
                yield f"{name} looks, and {commit.what}: decides", lambda decided=decided: self.sound(decided, at)  # type: ignore[misc]

    def looks(self, state: State, at: int, seen: Store) -> State:
        """The member looks at the group, as it was when it read it, and serves what it may by that."""
        own = seen.members[at]
        looking = state.members[at]._replace(confirmed=0 if own is None else own.beat, seen=None)
        return _put(state, at, looking._replace(serves=self._serves(state, at, seen, looking)))

    def decides(self, state: State, at: int, commit: Commit) -> State:
        """The member decides on a commit."""
        member = state.members[at]
        return _put(state, at, member._replace(beats=commit.record.beat if commit.record else member.beats, commit=commit))

    def _serves(self, state: State, at: int, seen: Store, looking: Member) -> tuple[tuple[str, int], ...]:
        if self._rules.serves_under_a_lease and looking.confirmed <= state.over[at]:
            return ()
        if not self._rules.stops_before_it_says_so and looking.serves:
            return looking.serves
        if not self._rules.waits_for_former_owners:
            return dict(seen.plan.owners).get(self.names[at], ())
        return self._code.served_by(seen, self.names[at])

    def decisions(self, state: State, at: int, seen: Store, only: frozenset[int] | None = None) -> Iterator[Commit]:
        """What a member that sees this may commit. `only`: of those who have said that they leave, it gives up none but these."""
        plan, own, name, beat = seen.plan, seen.members[at], self.names[at], state.members[at].beats + 1
        if own is None:
            yield Commit("joins again", Record(beat, plan.round), own)
            return
        may_leave = own.leaving or at < self._rules.leavers
        if may_leave and name not in seen.round.marks and name not in seen.round.participants and name not in dict(plan.owners):
            yield Commit("goes", None, own)
        for leaving in {own.leaving, may_leave}:
            told = "" if leaving == own.leaving else ", says that it leaves"
            for commit in self._commits(state, at, seen, Record(beat, plan.round, leaving), own, only):
                yield commit._replace(what=commit.what + told)

    def _commits(self, state: State, at: int, seen: Store, record: Record, own: Record, only: frozenset[int] | None) -> Iterator[Commit]:
        """What a member may commit with that record of its own."""
        current, plan, name = seen.round, seen.plan, self.names[at]
        yield Commit("beats", record, own)
        if current.sealed and current.number < self._rules.rounds:
            opened = Open(current.number + 1, False, current.participants, frozenset() if record.leaving else frozenset({name}))
            yield Commit(f"opens round {opened.number}", record, own, current, after=(opened, plan))
        elif not current.sealed and name not in current.marks and not own.leaving:
            if not record.leaving:
                marked = current._replace(marks=current.marks | {name})
                yield Commit("marks itself", record, own, current, after=(marked, plan))
        elif not current.sealed:
            yield from self._seals(state, at, seen, record, own, only)

    def _seals(self, state: State, at: int, seen: Store, record: Record, own: Record, only: frozenset[int] | None) -> Iterator[Commit]:
        current = seen.round
        members = [(other, each) for other, each in enumerate(seen.members) if each is not None]
        missing = [(other, each) for other, each in members if self.names[other] not in current.marks and not each.leaving]
        if self._rules.silence_outlasts_leases and any(each.beat > state.over[other] for other, each in missing):
            return
        silent = [(other, each) for other, each in members if other != at and each.leaving and each.beat <= state.over[other]]
        if only is None:
            choices = [chosen for number in range(len(silent) + 1) for chosen in combinations(silent, number)]
        else:
            choices = [tuple(each for each in silent if each[0] in only)]
        for some in choices:
            gone = tuple(sorted({*missing, *some}))
            given_up = tuple(self.names[other] for other, _ in gone)
            after = self._code.division_after(seen.plan, current, seen.members, given_up, seen.resource)
            without = f", gives up {', '.join(given_up)}" if given_up else ""
            yield Commit(f"seals round {current.number}{without}", record, own, current, gone, after, seen.resource)

    # ---- a commit ---------------------------------------------------------------------------------------------

    def _strays_in(self, state: State, at: int, commit: Commit) -> State:
        return self.lands(state._replace(strays=state.strays - {(at, commit)}), at, commit)

    def lands(self, state: State, at: int, commit: Commit) -> State:
        """The commit takes effect, if all that it checks is as it was seen."""
        store = state.store
        if store.members[at] != commit.own:
            return state
        if commit.round is not None and self._rules.checks_the_round and not _same_round(store.round, commit):
            return state
        if commit.resource is not None and store.resource != commit.resource:
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

    def _takes_in(self, state: State, at: int, commit: Commit) -> State:
        """The beat takes effect, and the member will look at what it has seen before, with the beat in it. What others have done since is
        not in it. Without the rule, it does so if the beat is lost."""
        assert commit.looked is not None
        landed = self.lands(_heard(state, at), at, commit) if self._rules.beats_are_answered else _heard(state, at)
        records = commit.looked.members
        seen = commit.looked._replace(members=(*records[:at], commit.record, *records[at + 1 :]))
        return _put(landed, at, landed.members[at]._replace(seen=seen))

    # ---- promises ---------------------------------------------------------------------------------------------

    def serves_only(self, state: State, at: int, serves: tuple[tuple[str, int], ...]) -> State | None:
        """The member serves no more than these of what it may serve; None if it may not serve them all."""
        member = state.members[at]
        return _put(state, at, member._replace(serves=serves)) if {*serves} <= {*member.serves} else None

    def sound(self, state: State, at: int) -> State:
        """Check what member `at` now serves."""
        highest = list(state.highest)
        for item, grant in self._served(state, at):
            place = self._items.index(item)
            before, owner = highest[place]
            if grant < before or (grant == before and owner != at):
                raise Broken(f"promise 33: {self.names[at]} serves {item} under grant {grant}, after {self.names[owner]} under {before}")
            highest[place] = grant, at
        for other in range(len(state.members)):
            if other != at and (both := {item for item, _ in self._served(state, at)} & {item for item, _ in self._served(state, other)}):
                raise Broken(f"promise 33: {min(both)} is served by {self.names[at]} and {self.names[other]}")
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


def _put(state: State, at: int, member: Member) -> State:
    return state._replace(members=(*state.members[:at], member, *state.members[at + 1 :]))


# ---- the code's decisions ---------------------------------------------------------------------------------------------

KEYS = Keys("g")
ANY = Resource(items=())
"""A resource where its items do not matter: what is served goes by the plan."""


class CodeDecisions:
    """What the code decides about a group of members with these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._look = cache(self._new_look)
        self._served = cache(self._new_served)
        self.division_after = cache(self._new_division)

    def served_by(self, store: Store, name: str) -> tuple[tuple[str, int], ...]:
        """What the member serves by the plan, as the code decides."""
        return self._served(store.plan, store.members, name)

    def _new_served(self, plan: Division, members: tuple[Record | None, ...], name: str) -> tuple[tuple[str, int], ...]:
        look = self._look(plan, Open(plan.round, True, ()), members)
        return tuple(sorted(Rounds(Beating(KEYS, name)).owned(look, ANY).items()))

    def _new_division(
        self,
        plan: Division,
        current: Open,
        members: tuple[Record | None, ...],
        given_up: tuple[str, ...],
        resource: Divided,
    ) -> tuple[Open, Division]:
        """The round sealed, with the plan that the code makes: if it gives members up, those of the last round take over."""
        look = self._look(plan, current, members)
        names = [name for name in sorted(current.marks) if name in look.members and not look.members[name].leaving]
        if given_up:
            names = [name for name in names if name in current.participants] or names
        items, limits = resource
        made, _ = next_plan(look, Resource(items=items, limits=dict(limits)), current.number, names, given_up)
        return Open(current.number, True, tuple(names)), division_of(made)

    def _new_look(self, plan: Division, current: Open, members: tuple[Record | None, ...]) -> GroupView:
        records = {
            self._names[at]: MemberRecord(beat=each.beat, lease_timeout=1, applied=each.applied, leaving=each.leaving)
            for at, each in enumerate(members)
            if each is not None
        }
        record = Round(number=current.number, sealed=current.sealed, trigger="", participants=current.participants)
        return GroupView(View(1, {}), 0, ANY, record, _plan(plan), records, current.marks, {})


def _plan(division: Division) -> Plan:
    owners = {name: dict(grants) for name, grants in division.owners}
    return Plan(round=division.round, era=1, resource_version=1, owners=owners, waits=dict(division.waits))


def division_of(plan: Plan) -> Division:
    """A plan as the model has it."""
    return Division(plan.round, _sorted(plan.owners), tuple(sorted(plan.waits.items())))


def _sorted(owners: Mapping[str, Mapping[str, int]]) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    return tuple((name, tuple(sorted(grants.items()))) for name, grants in sorted(owners.items()))


ABLATIONS = {
    "a member takes a beat that is lost for recorded": Rules(beats_are_answered=False),
    "a member is given up before its lease is over": Rules(silence_outlasts_leases=False),
    "a member is given up though it beats after all": Rules(checks_those_given_up=False),
    "a round is sealed twice": Rules(checks_the_round=False, members=3, rounds=2, marked=1, late_looks=0),
    "an item that was removed is placed again": Rules(removed_items_never_return=False, placements=1, late_looks=0),
    "a member serves without a lease": Rules(serves_under_a_lease=False),
    "a new owner does not wait for the former one": Rules(waits_for_former_owners=False),
    "a member says that it has stopped, and stops later": Rules(stops_before_it_says_so=False),
}
"""The rules without one, by what is missing."""
