"""Specification of claims (`core/group/claims.py`): members of a group take free items one by one, by conditional writes, without a plan.

A member may give back whatever it has and take whatever is free, at any time, so nothing depends on how it counts its share. It pauses
before or after any step, also between reading the group and deciding, for good or not, and its commit lands late, or unheard. (A commit
that is lost is a look without one.) There are no clocks: a lease is over at any moment, and from then on others may take the member for
silent, since that takes longer than the lease by every clock.

Promise 33 of docs/explanation/guarantees.md: an item has one owner at a time, and a later owner's token is greater. `python -m spec claims`
checks it, and that each rule is needed. `spec/group_trace.py` checks that recorded histories of groups are orders of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken

NAMES = ("a", "b", "c")
NOBODY = -1


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    members: int = 2
    beats: int = 3
    """Commits that a member may decide on, each of which has a beat."""
    strays: int = 1
    """Commits that may be under way while their members have gone on without an answer."""
    leavers: int = 1
    """Members that may leave."""
    late_looks: int = 0
    """Members that may have read the group and not looked at it yet."""
    silence_outlasts_leases: bool = True
    checks_those_struck_off: bool = True
    checks_the_claim: bool = True
    checks_that_the_owner_is_gone: bool = True
    stops_before_it_gives_back: bool = True
    never_serves_what_it_gave_back: bool = True
    serves_under_a_lease: bool = True


class Claim(NamedTuple):
    owner: int = NOBODY
    grant: int = 0


class Store(NamedTuple):
    """One item's claim, and the beat of each member's record; None: it has none."""

    claim: Claim
    beats: tuple[int | None, ...]


class Commit(NamedTuple):
    """What a member has decided on: it checks its `own` beat, the `claim` as it was seen, and, to strike a member off or to take what was
    its, that member's beat. `beat`: its own from then on; None: its record goes."""

    what: str
    beat: int | None
    own: int | None
    claim: Claim | None = None
    other: int | None = None
    seen: int | None = None


class Member(NamedTuple):
    """`serves`: the grant under which it serves the item, by the lease of its beat `confirmed`; 0: not. `given_back`: the grant that it has
    tried to give back. `beats`: those that it has sent. `seen`: the group as it has read it, and not looked at yet."""

    serves: int = 0
    confirmed: int = 0
    beats: int = 1
    given_back: int = 0
    commit: Commit | None = None
    seen: Store | None = None


class State(NamedTuple):
    """`over`: the last beat of each member whose lease is over. `highest`: the greatest grant, and who served under it."""

    store: Store
    members: tuple[Member, ...]
    over: tuple[int, ...]
    strays: frozenset[tuple[int, Commit]] = frozenset()
    highest: tuple[int, int] = (0, NOBODY)


Step = tuple[str, Callable[[], State]]


class ClaimsModel:
    """The model under these rules, of members with these names."""

    def __init__(self, rules: Rules, names: Sequence[str] = NAMES) -> None:
        self._rules, self._names = rules, names

    def first(self) -> State:
        """All have joined, and nobody has the item."""
        count = self._rules.members
        return State(Store(Claim(), (1,) * count), (Member(confirmed=1),) * count, (0,) * count)

    def steps(self, state: State) -> Iterator[Step]:
        for at, member in enumerate(state.members):
            name = self._names[at]
            for beat in {member.confirmed, state.store.beats[at] or 0}:
                if beat > state.over[at]:
                    yield f"the lease of beat {beat} of {name} is over", lambda at=at, beat=beat: self.runs_out(state, at, beat)  # type: ignore[misc]
            if member.commit is None:
                yield from self._looks(state, at, member)
                continue
            commit = member.commit
            yield f"{name} {commit.what}", lambda at=at, commit=commit: self.lands(_heard(state, at), at, commit)  # type: ignore[misc]
            if len(state.strays) < self._rules.strays:
                yield (
                    f"{name} goes on without an answer",
                    lambda at=at, commit=commit: _heard(state, at)._replace(strays=state.strays | {(at, commit)}),  # type: ignore[misc]
                )
        for stray in state.strays:
            yield f"late, {self._names[stray[0]]} {stray[1].what}", lambda stray=stray: self._strays_in(state, *stray)  # type: ignore[misc]

    def runs_out(self, state: State, at: int, beat: int) -> State:
        """The lease of that beat is over."""
        over = max(beat, state.over[at])
        return state._replace(over=(*state.over[:at], over, *state.over[at + 1 :]))

    def changes(self, state: State, after: Store) -> State | None:
        """An operator changes the group like this: it places the item, which had no claim, at a member, or removes it for good; None: never
        so."""
        before = state.store
        is_placed = before.claim == Claim() and after.claim.grant == 1 and after.claim.owner != NOBODY
        is_as_before = after.claim == before.claim or after.claim == Claim()
        return state._replace(store=after) if after.beats == before.beats and (is_placed or is_as_before) else None

    # ---- a look -----------------------------------------------------------------------------------------------

    def _looks(self, state: State, at: int, member: Member) -> Iterator[Step]:
        name, seen = self._names[at], member.seen or state.store
        if member.seen is None and sum(each.seen is not None for each in state.members) < self._rules.late_looks:
            yield f"{name} reads", lambda: _put(state, at, member._replace(seen=seen))
        yield f"{name} looks", lambda: self.sound(self.looks(state, at, seen), at)
        if member.beats < self._rules.beats:
            for commit in self.decisions(state, at, seen):
                decided = self.decides(self.looks(state, at, seen), at, commit)
                yield f"{name} looks, and {commit.what}: decides", lambda decided=decided: self.sound(decided, at)  # type: ignore[misc]

    def looks(self, state: State, at: int, seen: Store) -> State:
        """The member looks at the group, as it was when it read it, and serves the item if it may by that."""
        looking = state.members[at]._replace(confirmed=seen.beats[at] or 0, seen=None)
        return _put(state, at, looking._replace(serves=self._serves(state, at, seen, looking)))

    def decides(self, state: State, at: int, commit: Commit) -> State:
        """The member decides on a commit."""
        member = state.members[at]
        decided = member._replace(beats=member.beats if commit.beat is None else commit.beat, commit=commit)
        if commit.what == "gives it back" and commit.claim is not None:
            serves = 0 if self._rules.stops_before_it_gives_back else member.serves
            decided = decided._replace(serves=serves, given_back=commit.claim.grant)
        return _put(state, at, decided)

    def _serves(self, state: State, at: int, seen: Store, looking: Member) -> int:
        claim = seen.claim
        is_mine = claim.owner == at and looking.confirmed
        has_lease = looking.confirmed > state.over[at] or not self._rules.serves_under_a_lease
        gave_back = claim.grant == looking.given_back and self._rules.never_serves_what_it_gave_back
        return claim.grant if is_mine and has_lease and not gave_back else 0

    def decisions(self, state: State, at: int, seen: Store, only: frozenset[int] | None = None) -> Iterator[Commit]:
        """What a member that sees this may commit. `only`: it gives up none but these."""
        claim, beats = seen
        own, beat = beats[at], state.members[at].beats + 1
        if own is None:
            yield Commit("joins again", beat, own)
            return
        yield Commit("beats", beat, own)
        if claim.owner == at:
            yield Commit("gives it back", beat, own, claim)
        elif at < self._rules.leavers:
            yield Commit("goes", None, own)
        if claim.owner == NOBODY:
            yield Commit("claims it", beat, own, claim)
        elif claim.owner != at and beats[claim.owner] is None:
            yield Commit("claims it", beat, own, claim, claim.owner)
        for other, last in enumerate(beats):
            if only is not None and other not in only:
                continue
            if other != at and last is not None and (last <= state.over[other] or not self._rules.silence_outlasts_leases):
                yield Commit(f"strikes {self._names[other]} off", beat, own, None, other, last)

    # ---- a commit ---------------------------------------------------------------------------------------------

    def _strays_in(self, state: State, at: int, commit: Commit) -> State:
        return self.lands(state._replace(strays=state.strays - {(at, commit)}), at, commit)

    def lands(self, state: State, at: int, commit: Commit) -> State:
        """The commit takes effect, if all that it checks is as it was seen."""
        claim, beats = state.store
        if beats[at] != commit.own or (commit.claim not in (None, claim) and self._rules.checks_the_claim):
            return state
        after = [*beats]
        after[at] = commit.beat
        if commit.other is not None and commit.claim is None:
            if beats[commit.other] != commit.seen and self._rules.checks_those_struck_off:
                return state
            after[commit.other] = None
        elif commit.other is not None and beats[commit.other] is not None and self._rules.checks_that_the_owner_is_gone:
            return state
        if commit.claim is not None:
            claim = Claim(NOBODY, commit.claim.grant) if commit.what == "gives it back" else Claim(at, commit.claim.grant + 1)
        return state._replace(store=Store(claim, tuple(after)))

    # ---- promises ---------------------------------------------------------------------------------------------

    def serves_only(self, state: State, at: int, serves: int) -> State | None:
        """The member serves the item under that grant, or not (0); None if it may not serve it."""
        member = state.members[at]
        return _put(state, at, member._replace(serves=serves)) if serves in (0, member.serves) else None

    def sound(self, state: State, at: int) -> State:
        """Check what member `at` now serves."""
        grant, (before, owner) = self._served(state, at), state.highest
        if not grant:
            return state
        if grant < before or (grant == before and owner != at):
            raise Broken(f"promise 33: {self._names[at]} serves under grant {grant}, after {self._names[owner]} under {before}")
        for other in range(len(state.members)):
            if other != at and self._served(state, other):
                raise Broken(f"promise 33: the item is served by {self._names[at]} and {self._names[other]}")
        return state._replace(highest=(grant, at))

    def _served(self, state: State, at: int) -> int:
        member = state.members[at]
        return member.serves if member.confirmed > state.over[at] or not self._rules.serves_under_a_lease else 0


def _heard(state: State, at: int) -> State:
    return _put(state, at, state.members[at]._replace(commit=None))


def _put(state: State, at: int, member: Member) -> State:
    return state._replace(members=(*state.members[:at], member, *state.members[at + 1 :]))


ABLATIONS = {
    "a member is struck off before its lease is over": Rules(silence_outlasts_leases=False),
    "a member is struck off though it beats after all": Rules(checks_those_struck_off=False),
    "an item is claimed though another has claimed it": Rules(checks_the_claim=False),
    "an item is claimed though its owner has come back": Rules(checks_that_the_owner_is_gone=False),
    "a member gives back, and stops later": Rules(stops_before_it_gives_back=False),
    "a member serves again what it has tried to give back": Rules(never_serves_what_it_gave_back=False),
    "a member serves without a lease": Rules(serves_under_a_lease=False),
}
"""The rules without one, by what is missing."""
