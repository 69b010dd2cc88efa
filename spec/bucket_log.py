"""Specification of a partition's log in a bucket (ADR 49): owners that open, commit, checkpoint and collect, and may sleep before any step.

Every request may land late, and more than once: what was sent stays in the net for ever. An owner may stop for good at any moment. Lists
are not modelled: a walk ends at the first number that is free, even if it is free because it was collected.

`python -m spec` checks it, and that each rule is needed: without it, the checker finds how an acknowledged cycle is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken

Entry = tuple[str, int, int]
"""`fencing` or `cycle`, its owner's number, which is also its fence, and the cycle's number."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules of the protocol, which can be left out one by one."""

    owners: int = 3
    numbers: int = 5
    cycles: int = 1
    """Cycles that an owner may commit."""
    walks: int = 2
    """Times that an owner may read the log."""
    fencing_entries: bool = True
    keeps_fencing_entries: bool = True
    checks_the_head: bool = True
    head_goes_forward: bool = True
    collects_behind_the_head: bool = True
    refuses_only_when_sure: bool = True


class Owner(NamedTuple):
    """`head`: the number of the checkpoint that it has read last; `seen`: the entries that it takes for the log, from the first on."""

    phase: str = "new"
    head: int = 0
    seen: tuple[Entry, ...] = ()
    walks: int = 0
    cycles: int = 0
    checkpoint: int = 0
    """The number of the checkpoint that it writes."""


class State(NamedTuple):
    """`log`: what there is at each number; `first`: what was created there first; `head`: the number of the checkpoint that it names;
    `net`: entries that are under way, by number, and deletions, without an entry."""

    log: tuple[Entry | None, ...]
    first: tuple[Entry | None, ...]
    head: int
    net: frozenset[tuple[int, Entry | None]]
    owners: tuple[Owner, ...]


Step = tuple[str, Callable[[], State]]


def first_state(rules: Rules) -> State:
    nothing = (None,) * rules.numbers
    return State(nothing, nothing, 0, frozenset(), (Owner(),) * rules.owners)


class Log:
    """The model under those rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        for number, entry in state.net:
            if entry is None and state.log[number - 1] is not None:
                yield f"{number} is deleted", lambda number=number: self._deleted(state, number)  # type: ignore[misc]
            elif entry is not None and state.log[number - 1] is None:
                yield f"{_text(entry)} lands at {number}", lambda number=number, entry=entry: self._created(state, number, entry)  # type: ignore[misc]
        for at, owner in enumerate(state.owners):
            yield from getattr(self, f"_when_{owner.phase}")(state, at, owner)

    # ---- an owner's steps, by phase ---------------------------------------------------------------------------

    def _when_new(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.walks < self._rules.walks:
            seen = tuple(entry for entry in state.first[: state.head] if entry is not None)
            fenced_off = any(entry[0] == "fencing" and entry[1] > at + 1 for entry in seen)
            started = owner._replace(phase="gone" if fenced_off else "walks", head=state.head, seen=seen, walks=owner.walks + 1)
            yield f"{at + 1} reads the head, {state.head}, and its checkpoint", lambda: _put(state, at, started)

    def _when_walks(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        number = len(owner.seen) + 1
        if number > self._rules.numbers:
            return
        entry = state.log[number - 1]
        if entry is not None:
            yield f"{at + 1} reads {number}", lambda: self._follows(state, at, owner, entry, "walks")
        else:
            yield f"{at + 1} finds the end at {number}", lambda: _put(state, at, owner._replace(phase="fences"))

    def _when_fences(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if not self._rules.fencing_entries:
            yield f"{at + 1} is open", lambda: self._opens(state, at, owner)
            return
        number = len(owner.seen) + 1
        if number > self._rules.numbers:
            return
        entry, own = state.log[number - 1], ("fencing", at + 1, 0)
        if entry is None:
            fenced = owner._replace(phase="checks", seen=(*owner.seen, own))
            yield f"{at + 1} creates its fencing entry at {number}", lambda: _put(self._created(state, number, own), at, fenced)
        else:
            yield f"{at + 1} finds {number} taken", lambda: self._follows(state, at, owner, entry, "fences")

    def _when_checks(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if not self._rules.checks_the_head or state.head == owner.head:
            yield f"{at + 1} sees the head unchanged, and is open", lambda: self._opens(state, at, owner)
        else:
            yield f"{at + 1} sees another head, and starts over", lambda: _put(state, at, owner._replace(phase="new"))

    def _when_open(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        number = len(owner.seen) + 1
        if owner.cycles < self._rules.cycles and number <= self._rules.numbers:
            entry: Entry = ("cycle", at + 1, owner.cycles)
            sent = state._replace(net=state.net | {(number, entry)})
            writing = owner._replace(phase="writes", cycles=owner.cycles + 1)
            yield f"{at + 1} sends {_text(entry)} to {number}, and hears nothing", lambda: _put(sent, at, writing)
            if state.log[number - 1] is not None:
                yield f"{at + 1} is told that {number} is taken: refused", lambda: self._refuses(state, at, owner, number, entry)
        if len(owner.seen) > owner.head:
            checkpoint = owner._replace(phase="checkpoints", checkpoint=len(owner.seen))
            yield f"{at + 1} writes a checkpoint at {len(owner.seen)}", lambda: _put(state, at, checkpoint)

    def _when_writes(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        number, entry = len(owner.seen) + 1, ("cycle", at + 1, owner.cycles - 1)
        found = state.log[number - 1]
        if found == entry:
            yield f"{at + 1} learns that {number} is its own: acknowledged", lambda: self._acknowledges(state, at, owner, number, entry)
        elif found is not None and not self._rules.refuses_only_when_sure:
            yield f"{at + 1} learns that {number} is another's: refused", lambda: self._refuses(state, at, owner, number, entry)
        yield f"{at + 1} gives up", lambda: _put(state, at, owner._replace(phase="gone"))

    def _when_checkpoints(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if not self._rules.collects_behind_the_head:
            yield f"{at + 1} collects before the head names its checkpoint", lambda: self._collects(state, at, owner, owner.head)
        if state.head == owner.head:
            replaced = state._replace(head=owner.checkpoint)
            yield f"{at + 1} has the head name {owner.checkpoint}", lambda: self._collects(replaced, at, owner, owner.checkpoint)
        elif state.head < owner.checkpoint or not self._rules.head_goes_forward:
            yield f"{at + 1} reads another head, {state.head}", lambda: _put(state, at, owner._replace(head=state.head))
        else:
            yield f"{at + 1} leaves a later head, {state.head}", lambda: _put(state, at, owner._replace(phase="open", head=state.head))

    def _when_gone(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        return iter(())

    # ---- what steps lead to -----------------------------------------------------------------------------------

    def _created(self, state: State, number: int, entry: Entry) -> State:
        first = state.first
        if first[number - 1] is None:
            first = _with(first, number, entry)
        return state._replace(log=_with(state.log, number, entry), first=first)

    def _deleted(self, state: State, number: int) -> State:
        return state._replace(log=_with(state.log, number, None))

    def _follows(self, state: State, at: int, owner: Owner, entry: Entry, phase: str) -> State:
        """It applies an entry: one that does not fit shows that the head has changed, or a later owner."""
        fences = [each[1] for each in owner.seen if each[0] == "fencing"]
        fits = entry[1] > max(fences, default=0) if entry[0] == "fencing" else not fences or entry[1] == fences[-1]
        if entry[1] > at + 1:
            return _put(state, at, owner._replace(phase="gone"))
        if entry == ("fencing", at + 1, 0):
            return _put(state, at, owner._replace(phase="checks", seen=(*owner.seen, entry)))
        if self._rules.fencing_entries and not fits:
            return _put(state, at, owner._replace(phase="new"))
        return _put(state, at, owner._replace(phase=phase, seen=(*owner.seen, entry)))

    def _opens(self, state: State, at: int, owner: Owner) -> State:
        if owner.seen != state.first[: len(owner.seen)]:
            raise Broken(f"owner {at + 1} opens another log than was written")
        if any(entry is not None and entry[0] == "fencing" and entry[1] > at + 1 for entry in state.first[: len(owner.seen)]):
            raise Broken(f"owner {at + 1} opens a partition that a later owner has opened")
        return _put(state, at, owner._replace(phase="open"))

    def _acknowledges(self, state: State, at: int, owner: Owner, number: int, entry: Entry) -> State:
        if state.first[number - 1] != entry:
            raise Broken(f"owner {at + 1} acknowledges a cycle at {number}, where another entry was before: it is lost")
        for other, later in enumerate(state.owners):
            if other > at and later.phase in ("open", "writes", "checkpoints") and entry not in later.seen:
                raise Broken(
                    f"owner {at + 1} acknowledges a cycle that owner {other + 1}, which has opened the partition since, does not know"
                )
        return _put(state, at, owner._replace(phase="open", seen=(*owner.seen, entry)))

    def _refuses(self, state: State, at: int, owner: Owner, number: int, entry: Entry) -> State:
        if state.first[number - 1] == entry:
            raise Broken(f"owner {at + 1} refuses a cycle that is in the log at {number}: whoever repeats it has it twice")
        return _put(state, at, owner._replace(phase="gone", cycles=owner.cycles + 1))

    def _collects(self, state: State, at: int, owner: Owner, head: int) -> State:
        """It sends the deletions, which may land at any time from now on."""
        kept = {n for n, entry in enumerate(owner.seen, 1) if entry[0] == "fencing"} if self._rules.keeps_fencing_entries else set()
        gone = {(n, None) for n in range(1, owner.checkpoint + 1) if n not in kept}
        # Before the head names the checkpoint, it goes on to that.
        phase = "open" if head == owner.checkpoint else "checkpoints"
        return _put(state._replace(net=state.net | gone), at, owner._replace(phase=phase, head=head))


def _put(state: State, at: int, owner: Owner) -> State:
    return state._replace(owners=(*state.owners[:at], owner, *state.owners[at + 1 :]))


def _with(log: tuple[Entry | None, ...], number: int, entry: Entry | None) -> tuple[Entry | None, ...]:
    return (*log[: number - 1], entry, *log[number:])


def _text(entry: Entry) -> str:
    return f"the {'fencing entry' if entry[0] == 'fencing' else 'cycle'} of owner {entry[1]}"


ABLATIONS = {
    "without fencing entries": Rules(fencing_entries=False),
    "fencing entries are collected": Rules(keeps_fencing_entries=False),
    "the head is not read again": Rules(checks_the_head=False),
    "the head may go back": Rules(head_goes_forward=False),
    "collects before the head names the checkpoint": Rules(collects_behind_the_head=False),
    "a lost answer and another's entry are taken for a refusal": Rules(refuses_only_when_sure=False),
}
"""The rules without one, by what is missing. In each the checker must find a loss."""
