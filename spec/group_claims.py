"""Specification of claims (`core/group/claims.py`): members of a group take free items one by one, by conditional writes, without a plan.

A member may give back whatever it has and take whatever is free, at any time, so nothing depends on how it counts its share. It pauses
before or after any step, for good or not, and its commit lands late, or unheard. (A commit that is lost is a look without one.) There are
no clocks: a lease is over at any moment, and from then on others may take the member for silent, since that takes longer than the lease by
every clock.

Promise 33 of docs/explanation/guarantees.md: an item has one owner at a time, and a later owner's token is greater. `python -m spec claims`
checks it, and that each rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    its, that member's beat. `beat`: its own from then on."""

    what: str
    beat: int
    own: int | None
    claim: Claim | None = None
    other: int | None = None
    seen: int | None = None


class Member(NamedTuple):
    """`serves`: the grant under which it serves the item, by the lease of its beat `confirmed`; 0: not. `given_back`: the grant that it has
    tried to give back. `beats`: those that it has sent."""

    serves: int = 0
    confirmed: int = 0
    beats: int = 1
    given_back: int = 0
    commit: Commit | None = None


class State(NamedTuple):
    """`over`: the last beat of each member whose lease is over. `highest`: the greatest grant, and who served under it."""

    store: Store
    members: tuple[Member, ...]
    over: tuple[int, ...]
    strays: frozenset[tuple[int, Commit]] = frozenset()
    highest: tuple[int, int] = (0, NOBODY)


Step = tuple[str, Callable[[], State]]


class ClaimsModel:
    """The model under these rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def first(self) -> State:
        """All have joined, and nobody has the item."""
        count = self._rules.members
        return State(Store(Claim(), (1,) * count), (Member(confirmed=1),) * count, (0,) * count)

    def steps(self, state: State) -> Iterator[Step]:
        for at, member in enumerate(state.members):
            name = NAMES[at]
            for beat in {member.confirmed, state.store.beats[at] or 0}:
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
        own = state.store.beats[at]
        seen = member._replace(confirmed=own or 0)
        seen = seen._replace(serves=self._serves(state, at, seen))
        yield f"{NAMES[at]} looks", lambda: self._sound(_put(state, at, seen), at)
        if member.beats == self._rules.beats:
            return
        for commit in self._decisions(state, at, member.beats + 1, own):
            decided = seen._replace(beats=commit.beat, commit=commit)
            if commit.what == "gives it back":
                serves = 0 if self._rules.stops_before_it_gives_back else seen.serves
                decided = decided._replace(serves=serves, given_back=state.store.claim.grant)
            what = f"{NAMES[at]} looks, and {commit.what}: decides"
            yield what, lambda decided=decided: self._sound(_put(state, at, decided), at)  # type: ignore[misc]

    def _serves(self, state: State, at: int, seen: Member) -> int:
        claim = state.store.claim
        is_mine = claim.owner == at and seen.confirmed
        has_lease = seen.confirmed > state.over[at] or not self._rules.serves_under_a_lease
        gave_back = claim.grant == seen.given_back and self._rules.never_serves_what_it_gave_back
        return claim.grant if is_mine and has_lease and not gave_back else 0

    def _decisions(self, state: State, at: int, beat: int, own: int | None) -> Iterator[Commit]:
        claim, beats = state.store
        if own is None:
            yield Commit("joins again", beat, own)
            return
        yield Commit("beats", beat, own)
        if claim.owner == at:
            yield Commit("gives it back", beat, own, claim)
        elif claim.owner == NOBODY:
            yield Commit("claims it", beat, own, claim)
        elif beats[claim.owner] is None:
            yield Commit("claims it", beat, own, claim, claim.owner)
        for other, seen in enumerate(beats):
            if other != at and seen is not None and (seen <= state.over[other] or not self._rules.silence_outlasts_leases):
                yield Commit(f"strikes {NAMES[other]} off", beat, own, None, other, seen)

    # ---- a commit ---------------------------------------------------------------------------------------------

    def _strays_in(self, state: State, at: int, commit: Commit) -> State:
        return self._lands(state._replace(strays=state.strays - {(at, commit)}), at, commit)

    def _lands(self, state: State, at: int, commit: Commit) -> State:
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

    def _sound(self, state: State, at: int) -> State:
        """Check what member `at` now serves."""
        grant, (before, owner) = self._served(state, at), state.highest
        if not grant:
            return state
        if grant < before or (grant == before and owner != at):
            raise Broken(f"promise 33: {NAMES[at]} serves under grant {grant}, after {NAMES[owner]} under {before}")
        for other in range(len(state.members)):
            if other != at and self._served(state, other):
                raise Broken(f"promise 33: the item is served by {NAMES[at]} and {NAMES[other]}")
        return state._replace(highest=(grant, at))

    def _served(self, state: State, at: int) -> int:
        member = state.members[at]
        return member.serves if member.confirmed > state.over[at] or not self._rules.serves_under_a_lease else 0


def _heard(state: State, at: int) -> State:
    return _put(state, at, state.members[at]._replace(commit=None))


def _over(state: State, at: int, beat: int) -> State:
    return state._replace(over=(*state.over[:at], beat, *state.over[at + 1 :]))


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
