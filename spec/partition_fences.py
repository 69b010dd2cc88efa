"""Specification of one partition under fences (ADR 6): owners that open it, commit and answer, of whom several may take it for theirs.

A commit ends done, refused or unknown. An unknown one may have landed, may land later, or never, so its owner opens the partition again
under a higher fence before it says anything about it. A request to the store stays under way until it can land no more.

Invariants carry the numbers of docs/explanation/guarantees.md. `python -m spec fences` checks them in every order of the steps, and that
each rule is needed. `spec/trace_check.py` checks that recorded histories of the product are orders of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken

Place = int | str
"""Where an item is: the number of its lease, or one of the following."""
ABSENT, READY, SETTLED = "absent", "ready", "settled"

Fence = tuple[int, ...]
"""(grant, opening), perhaps behind an era."""
Contents = frozenset[tuple[int, Place]]
"""Each item that was ever stored in the partition, with its place."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules, which can be left out one by one."""

    owners: int = 2
    items: int = 1
    openings: int = 2
    """Times that an owner may open the partition."""
    cycles: int = 3
    """Commits of an owner."""
    fences_are_checked: bool = True
    fences_are_used_once: bool = True
    reopens_with_a_higher_fence: bool = True
    opens_in_one_step: bool = True
    txns_are_checked: bool = True
    answers_after_the_commit: bool = True
    unknown_is_not_refused: bool = True
    waits_for_deadlines: bool = True
    ids_name_leases: bool = True


class Change(NamedTuple):
    item: int
    before: Place
    after: Place


class Cycle(NamedTuple):
    """A commit: the `txn`th change set of the partition."""

    fence: Fence
    txn: int
    changes: tuple[Change, ...]


class Store(NamedTuple):
    fence: Fence = (0, 0)
    txn: int = 0
    contents: Contents = frozenset()


class Owner(NamedTuple):
    """`sure`: the contents that it knows to be stored, as of its cycle `txn`; `flight`: its commit whose outcome it does not know."""

    phase: str = "closed"
    fence: Fence = (0, 0)
    txn: int = 0
    sure: Contents = frozenset()
    flight: Cycle | None = None
    cycles: int = 0
    read: Store | None = None
    """What it has read before it raised the fence, if these are two steps."""


class State(NamedTuple):
    """`net`: commits that may yet land. `landed`: those that have, until their owners hear. `refused`: those of which a client was told
    that they did nothing. `told`: what clients know: an item with READY is stored, with SETTLED is settled, with a lease is theirs.
    `given_up`: of the leased ones, those that their clients have asked to settle or to put back. `over`: leases that have run out.
    """

    store: Store
    owners: tuple[Owner, ...]
    net: frozenset[Cycle] = frozenset()
    landed: frozenset[Cycle] = frozenset()
    refused: frozenset[Cycle] = frozenset()
    told: Contents = frozenset()
    given_up: Contents = frozenset()
    over: frozenset[int] = frozenset()


Step = tuple[str, Callable[[], State]]


def first_state(owners: int) -> State:
    return State(Store(), (Owner(),) * owners)


class FencedPartition:
    """The steps under these rules. Each returns the state after it, or None where it is not possible, and raises Broken if it breaks a
    promise."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    # ---- the store --------------------------------------------------------------------------------------------

    def opens(self, state: State, at: int, fence: Fence) -> State | None:
        """The owner raises the fence and loads the partition in one step, and learns what became of its commit."""
        store, owner = state.store, state.owners[at]
        if not self._may_open(store, fence):
            return None
        found = owner.read or store
        after = self._without_flight(state, owner, landed=owner.flight is not None and owner.flight.txn <= found.txn)
        opened = Owner("open", fence, found.txn, found.contents, cycles=owner.cycles)
        return _put(self._raised(after, fence), at, opened)

    def opens_unheard(self, state: State, at: int, fence: Fence) -> State | None:
        """The fence is raised, and the owner does not hear of it."""
        if not self._may_open(state.store, fence):
            return None
        return _put(self._raised(state, fence), at, state.owners[at]._replace(phase="closed", fence=fence))

    def _may_open(self, store: Store, fence: Fence) -> bool:
        again = not (self.rules.fences_are_used_once and self.rules.reopens_with_a_higher_fence)
        return fence > store.fence or (again and fence == store.fence)

    def _raised(self, state: State, fence: Fence) -> State:
        store = state.store._replace(fence=fence)
        return state._replace(store=store, net=frozenset(cycle for cycle in state.net if self._may_ever_land(store, cycle)))

    def _without_flight(self, state: State, owner: Owner, *, landed: bool) -> State:
        if owner.flight is None:
            return state
        if landed:
            return state._replace(landed=state.landed - {owner.flight})
        return state._replace(refused=state.refused | {owner.flight})

    def _may_ever_land(self, store: Store, cycle: Cycle) -> bool:
        shut_out = self.rules.fences_are_checked and cycle.fence < store.fence
        return not shut_out and not (self.rules.txns_are_checked and cycle.txn <= store.txn)

    def lands(self, state: State, cycle: Cycle) -> State | None:
        """The store carries the commit out: only under its fence, and only as the next one."""
        store = state.store
        if self.rules.fences_are_checked and cycle.fence != store.fence:
            return None
        if self.rules.txns_are_checked and cycle.txn != store.txn + 1:
            return None
        if cycle in state.refused:
            raise Broken(f"promise 2: cycle {_text(cycle)} was refused, and is stored")
        stored = Store(store.fence, max(cycle.txn, store.txn), _changed(store.contents, cycle.changes))
        net = frozenset(each for each in state.net if self._may_ever_land(stored, each))
        landed = state._replace(store=stored, net=net, landed=state.landed | {cycle})
        return _sound(landed, {change.item for change in cycle.changes})

    # ---- owners -----------------------------------------------------------------------------------------------

    def sends(self, state: State, at: int, changes: tuple[Change, ...]) -> State | None:
        """The owner sends a commit. It has one under way at a time."""
        owner = state.owners[at]
        if owner.phase != "open" or not self._may_change(state, owner, changes):
            return None
        cycle = Cycle(owner.fence, owner.txn + 1, changes)
        sent = owner._replace(phase="commits", flight=cycle, cycles=owner.cycles + 1)
        net = state.net | {cycle} if self._may_ever_land(state.store, cycle) else state.net
        return _put(state._replace(net=net), at, sent)

    def _may_change(self, state: State, owner: Owner, changes: tuple[Change, ...]) -> bool:
        places = dict(owner.sure)
        for item, before, after in changes:
            if places.get(item, ABSENT) != before or before in (after, SETTLED):
                return False
            if self.rules.waits_for_deadlines and self.rules.ids_name_leases and is_certain(state, item, before):
                return False
            places[item] = after
        return True

    def is_done(self, state: State, at: int) -> State | None:
        """The owner hears that its commit has landed. A store takes the newest number under the same fence for a repetition."""
        owner = state.owners[at]
        flight = owner.flight
        if owner.phase != "commits" or flight is None:
            return None
        fenced = not self.rules.fences_are_checked or state.store.fence == flight.fence
        if flight not in state.landed and not (fenced and flight.txn == state.store.txn):
            return None
        done = owner._replace(phase="open", txn=flight.txn, sure=_changed(owner.sure, flight.changes), flight=None)
        return _put(state._replace(landed=state.landed - {flight}), at, done)

    def is_refused(self, state: State, at: int) -> State | None:
        """The owner hears that its commit surely did nothing, and never will. It opens the partition again."""
        owner = state.owners[at]
        if owner.phase != "commits" or owner.flight is None or owner.flight in state.landed:
            return None
        after = state._replace(net=state.net - {owner.flight}, refused=state.refused | {owner.flight})
        return _put(after, at, owner._replace(phase="closed", flight=None))

    def is_unknown(self, state: State, at: int) -> State | None:
        """The owner hears nothing of its commit. Before it answers anybody, it opens the partition again."""
        owner = state.owners[at]
        if owner.phase != "commits" or owner.flight is None:
            return None
        if self.rules.unknown_is_not_refused:
            return _put(state, at, owner._replace(phase="closed"))
        return _put(state._replace(refused=state.refused | {owner.flight}), at, owner._replace(phase="closed", flight=None))

    # ---- clients ----------------------------------------------------------------------------------------------

    def tells(self, state: State, at: int, items: tuple[int, ...], place: Place) -> State | None:
        """The owner tells a client that the items are stored (READY), settled, or leased by it: only what it knows to be stored."""
        owner = state.owners[at]
        known = owner.sure
        if owner.flight is not None and not self.rules.answers_after_the_commit:
            known = _changed(known, owner.flight.changes)
        places = dict(known)
        for item in items:
            found = places.get(item, ABSENT)
            is_true = found != ABSENT if place == READY else found == place
            # An answer that comes after the client has heard the same from another one, and has acted on it.
            if not is_true and (item, place) not in state.given_up and place not in state.over:
                return None
        return _sound(state._replace(told=state.told | {(item, place) for item in items}), set(items))

    def gives_up(self, state: State, item: int, lease: int) -> State:
        """The client asks to settle the item or to put it back: from then on it does not count on it."""
        return state._replace(given_up=state.given_up | {(item, lease)})

    def runs_out(self, state: State, lease: int) -> State:
        """The deadline of the lease has passed."""
        return state._replace(over=state.over | {lease})

    # ---- every order ------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        for cycle in state.net:
            yield from _step(f"{_text(cycle)} lands", lambda cycle=cycle: self.lands(state, cycle))  # type: ignore[misc]
        for at, owner in enumerate(state.owners):
            yield from self._openings(state, at, owner)
            yield from self._commits(state, at, owner)
            yield from self._answers(state, at, owner)
        leases = {place for _, place in state.store.contents | state.told if isinstance(place, int)}
        for lease in leases - state.over:
            yield f"lease {lease} runs out", lambda lease=lease: self.runs_out(state, lease)  # type: ignore[misc]

    def _openings(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.phase not in ("closed", "reads"):
            return
        number = owner.fence[1] + 1
        if not self.rules.opens_in_one_step and owner.phase == "closed":
            read = owner._replace(phase="reads", read=state.store)
            yield f"{at} reads the partition", lambda: _put(state, at, read)
            return
        if owner.fence[1] and not self.rules.reopens_with_a_higher_fence:
            number = owner.fence[1]
        grant = at + 1 if self.rules.fences_are_used_once else 1
        if number <= self.rules.openings:
            yield from _step(f"{at} opens with {grant, number}", lambda: self.opens(state, at, (grant, number)))
            yield from _step(f"{at} opens with {grant, number} and does not hear", lambda: self.opens_unheard(state, at, (grant, number)))

    def _commits(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.phase == "commits":
            yield from _step(f"{at} hears: done", lambda: self.is_done(state, at))
            yield from _step(f"{at} hears: refused", lambda: self.is_refused(state, at))
            yield from _step(f"{at} hears nothing", lambda: self.is_unknown(state, at))
        elif owner.phase == "open" and owner.cycles < self.rules.cycles:
            places = dict(owner.sure)
            for item in range(self.rules.items):
                yield from self._changes(state, at, item, places.get(item, ABSENT))

    def _changes(self, state: State, at: int, item: int, place: Place) -> Iterator[Step]:
        def sends(what: str, after: Place, state: State = state) -> Iterator[Step]:
            yield from _step(f"{at} {what} item {item}", lambda: self.sends(state, at, (Change(item, place, after),)))

        if place == ABSENT:
            yield from sends("stores", READY)
        elif place == READY:
            lease = 10 * (at + 1) + state.owners[at].cycles
            yield from sends(f"leases (lease {lease})", lease)
        elif isinstance(place, int):
            if place in state.over or not self.rules.waits_for_deadlines:
                yield from sends("puts back", READY)
            for held, its in state.told:
                # A client names its own lease: the item may be in another one by now.
                if held == item and isinstance(its, int) and (its == place or not self.rules.ids_name_leases):
                    asked = self.gives_up(state, item, its)
                    yield from sends(f"settles for lease {its}", SETTLED, asked)
                    yield from sends(f"puts back for lease {its}", READY, asked)

    def _answers(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.phase == "closed":
            return
        known = owner.sure
        if owner.flight is not None and not self.rules.answers_after_the_commit:
            known = _changed(known, owner.flight.changes)
        for item, place in known:
            for fact in {READY, place}:
                if (item, fact) not in state.told:
                    what = f"{at} tells that item {item} is " + ("stored" if fact == READY else str(fact))
                    yield from _step(what, lambda item=item, fact=fact: self.tells(state, at, (item,), fact))  # type: ignore[misc]


def _sound(state: State, items: set[int]) -> State:
    """Check what clients know of these items against what is stored."""
    stored = dict(state.store.contents)
    for item, place in state.told:
        found = stored.get(item, ABSENT)
        if item not in items or found == place:
            continue
        if place == READY and found == ABSENT:
            raise Broken(f"promise 1: item {item} was acknowledged, and is not stored")
        if place == SETTLED:
            raise Broken(f"promise 1: item {item} was settled, and is {found}")
        if is_certain(state, item, place):
            whose = f"is also that of lease {found}" if (item, found) in state.told and isinstance(found, int) else f"is {found}"
            raise Broken(f"promise 5: a client holds item {item} by lease {place}, and it {whose}")
    return state


def is_certain(state: State, item: int, place: Place) -> bool:
    """Whether a client was told that it has the item by that lease, and may still count on it."""
    return isinstance(place, int) and (item, place) in state.told and (item, place) not in state.given_up and place not in state.over


def _step(what: str, take: Callable[[], State | None]) -> Iterator[Step]:
    """The step, if it is possible."""
    try:
        reached = take()
    except Broken as error:
        broken = error

        def breaks() -> State:
            raise broken

        yield what, breaks
        return
    if reached is not None:
        yield what, lambda: reached


def _changed(contents: Contents, changes: tuple[Change, ...]) -> Contents:
    places = dict(contents)
    for item, before, after in changes:
        found = places.get(item, ABSENT)
        if found != before:
            raise Broken(f"promise 25: a commit takes item {item} for {before}, and it is {found}")
        places[item] = after
    return frozenset(places.items())


def _put(state: State, at: int, owner: Owner) -> State:
    return state._replace(owners=(*state.owners[:at], owner, *state.owners[at + 1 :]))


def _text(cycle: Cycle) -> str:
    changes = ", ".join(f"{item}: {before} → {after}" for item, before, after in cycle.changes)
    return f"{cycle.txn} of {cycle.fence} ({changes})"


ABLATIONS = {
    "fences are not checked": Rules(fences_are_checked=False),
    "two owners use one fence": Rules(fences_are_used_once=False),
    "an owner opens again with the same fence": Rules(reopens_with_a_higher_fence=False),
    "an owner reads first, and then raises the fence": Rules(opens_in_one_step=False),
    "a commit may land twice": Rules(txns_are_checked=False),
    "answers before the commit": Rules(answers_after_the_commit=False),
    "an unknown outcome is taken for a refusal": Rules(unknown_is_not_refused=False),
    "leases end before their deadlines": Rules(waits_for_deadlines=False),
    "an id names an item in whatever lease": Rules(ids_name_leases=False),
}
"""The rules without one, by what is missing."""
