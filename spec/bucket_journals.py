"""Specification of a partition in a bucket (ADR 51): owners that open it, commit, checkpoint, detach and collect, and may sleep before any
step.

Each owner is a process with a journal of its own. Of other partitions' cycles there is nothing here: they only make numbers pass. Every
request may land late, and more than once: what was sent stays in the net for ever. An owner may stop for good at any moment.

`python -m spec` checks it, and that each rule is needed: without it, the checker finds how an acknowledged cycle is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spec.checker import Broken


class Cycle(NamedTuple):
    """The `txn`th cycle of the partition, by that owner."""

    owner: int
    txn: int
    attempt: int


class Part(NamedTuple):
    """Entries of an owner's journal, from `start` on and before `end`; None: up to its end."""

    owner: int
    start: int
    end: int | None = None


class Head(NamedTuple):
    """`nonce`: who wrote it, and its how manieth that was; `saved`: the cycles that its checkpoint has."""

    nonce: tuple[int, int] = (-1, 0)
    fence: int = -1
    saved: tuple[Cycle, ...] = ()
    tail: tuple[Part, ...] = ()


Entry = Cycle | str
"""`end`: an ending entry."""
Request = tuple[str, int, int, Cycle | None] | tuple[str, Head, Head]
"""Under way: `create` and `delete` in an owner's journal, at a number; `replace` a head by another."""


@dataclass(frozen=True)
class Rules:
    """The bounds, and the rules of the protocol, which can be left out one by one."""

    owners: int = 2
    numbers: int = 2
    """Length of a journal."""
    cycles: int = 1
    """Cycles that an owner may commit."""
    heads: int = 3
    """Times that an owner may write the head."""
    walks: int = 1
    """Times that an owner may read the partition."""
    ending_entries: bool = True
    keeps_ending_entries: bool = True
    takes_the_head_that_it_read: bool = True
    leaves_others_heads: bool = True
    versions_are_unique: bool = True
    collects_behind_the_head: bool = True
    covers_what_was_saved: bool = True
    refuses_only_when_sure: bool = True
    attaches_after_a_lost_detachment: bool = True


class Owner(NamedTuple):
    """`head`: as read or written last; `known`: the cycles that it takes for the partition's. While it walks: `tail`, the ranges that it is
    through with, and the `number` that comes next; afterwards, `number` is of the last entry of its journal."""

    phase: str = "new"
    head: Head = Head()
    known: tuple[Cycle, ...] = ()
    tail: tuple[Part, ...] = ()
    number: int = 0
    walks: int = 0
    cycles: int = 0
    heads: int = 0
    checkpoint: tuple[tuple[Cycle, ...], int] | None = None
    """That it writes: the cycles, and its journal's number then."""
    unsure: bool = False
    """Whether it has asked for a head that detaches the partition, and heard nothing."""


class State(NamedTuple):
    """`journals`: what there is at each number, by owner; `net`: requests under way."""

    journals: tuple[tuple[Entry | None, ...], ...]
    head: Head
    net: frozenset[Request]
    owners: tuple[Owner, ...]
    acknowledged: frozenset[Cycle] = frozenset()
    refused: frozenset[Cycle] = frozenset()


Step = tuple[str, Callable[[], State]]


def first_state(rules: Rules) -> State:
    return State(((None,) * rules.numbers,) * rules.owners, Head(), frozenset(), (Owner(),) * rules.owners)


class Journals:
    """The model under those rules."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def steps(self, state: State) -> Iterator[Step]:
        for request in state.net:
            landed = self._lands(state, request)
            if landed != state:
                yield f"{_text(request)} lands", lambda landed=landed: landed  # type: ignore[misc]
        for at, owner in enumerate(state.owners):
            yield from getattr(self, f"_when_{owner.phase}")(state, at, owner)
            if owner.phase in ("open", "writes"):
                yield from self._saves(state, at, owner)

    def _lands(self, state: State, request: Request) -> State:
        if len(request) == 3:
            _, read, written = request
            return state._replace(head=written) if self._same(state.head, read) else state
        what, journal, number, cycle = request
        there = state.journals[journal][number - 1]
        if what == "delete":
            return _with(state, journal, number, None)
        return _with(state, journal, number, cycle) if there is None else state

    def _same(self, found: Head, read: Head) -> bool:
        """Whether the tag has not changed."""
        if not self._rules.versions_are_unique:
            return (found.saved, found.tail) == (read.saved, read.tail)
        return found == read

    # ---- opening ----------------------------------------------------------------------------------------------

    def _when_new(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        head = state.head
        if owner.walks < self._rules.walks and head.fence < at:
            walks = Owner("walks", head, head.saved, (), _start(head, 0), owner.walks + 1, owner.cycles, owner.heads)
            yield f"{at} reads the head of {head.fence}", lambda: _put(state, at, walks)

    def _when_walks(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if len(owner.tail) == len(owner.head.tail):
            yield from self._takes(state, at, owner)
            return
        part = owner.head.tail[len(owner.tail)]
        if part.end is not None and owner.number >= part.end:
            yield f"{at} has read {part}", lambda: _put(state, at, _next(owner, part))
            return
        if owner.number > self._rules.numbers:
            return
        entry = state.journals[part.owner][owner.number - 1]
        if isinstance(entry, Cycle):
            if entry.txn > len(owner.known) + 1:
                yield f"{at} finds a gap before {owner.number} of {part.owner}, and starts over", lambda: _again(state, at, owner)
                return
            known = (*owner.known, entry) if entry.txn == len(owner.known) + 1 else owner.known
            yield (
                f"{at} reads {owner.number} of {part.owner}",
                lambda: _put(state, at, owner._replace(known=known, number=owner.number + 1)),
            )
            if part.end is None and self._rules.ending_entries:
                yield from self._ends_ahead(state, at, owner, part)
        elif part.end is not None:
            yield f"{at} misses {owner.number} of {part.owner}, and starts over", lambda: _again(state, at, owner)
        elif entry == "end" or not self._rules.ending_entries:
            yield f"{at} finds the end of {part.owner} at {owner.number}", lambda: _put(state, at, _next(owner, part))
        else:
            yield f"{at} ends the journal of {part.owner} at {owner.number}", lambda: _with(state, part.owner, owner.number, "end")

    def _ends_ahead(self, state: State, at: int, owner: Owner, part: Part) -> Iterator[Step]:
        """An entry was in the way: its owner may be alive. Numbers before the ending entry may be missing, or may yet be written."""
        for number in range(owner.number + 1, self._rules.numbers + 1):
            if state.journals[part.owner][number - 1] is None:
                yield (
                    f"{at} ends the journal of {part.owner} ahead, at {number}",
                    lambda number=number: _with(  # type: ignore[misc]
                        state, part.owner, number, "end"
                    ),
                )

    def _takes(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.heads == self._rules.heads:
            return
        taken = Head((at, owner.heads), at, owner.head.saved, (*owner.tail, Part(at, 1)))
        opened = owner._replace(phase="open", head=taken, tail=(), number=0, heads=owner.heads + 1)
        if self._same(state.head, owner.head) or not self._rules.takes_the_head_that_it_read:
            yield f"{at} opens the partition", lambda: self._opens(state._replace(head=taken), at, opened)
        else:
            yield f"{at} finds another head, and starts over", lambda: _again(state, at, owner)
        lost = _sent(state, ("replace", owner.head, taken))
        yield f"{at} sends its head, and hears nothing", lambda: _put(lost, at, opened._replace(phase="gone"))

    def _opens(self, state: State, at: int, owner: Owner) -> State:
        if lost := state.acknowledged - set(owner.known):
            raise Broken(f"owner {at} opens the partition without {min(lost)}, which was acknowledged")
        if wrong := state.refused & set(owner.known):
            raise Broken(f"owner {at} opens the partition with {min(wrong)}, which was refused: whoever repeats it has it twice")
        return _put(state, at, owner)

    # ---- cycles -----------------------------------------------------------------------------------------------

    def _when_open(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        attached = bool(owner.head.tail) and owner.head.tail[-1].end is None
        number = owner.number + 1
        if not attached or owner.unsure:
            tail = owner.head.tail if attached else (*owner.head.tail, Part(at, number))
            yield from self._replaces(state, at, owner, owner.head._replace(nonce=(at, owner.heads), tail=tail), "attaches it")
            return
        *before, last = owner.head.tail
        closed = owner.head._replace(nonce=(at, owner.heads), tail=(*before, last._replace(end=number)))
        lost = owner._replace(unsure=self._rules.attaches_after_a_lost_detachment)
        yield from self._replaces(state, at, owner, closed, "detaches it", lost=lost)
        if owner.cycles == self._rules.cycles or number > self._rules.numbers:
            return
        cycle = Cycle(at, len(owner.known) + 1, owner.cycles)
        if state.journals[at][number - 1] is not None:
            yield f"{at} is told that {number} is taken: refused", lambda: self._refuses(state, at, owner, cycle)
        writing = owner._replace(phase="writes", cycles=owner.cycles + 1)
        sent = _sent(state, ("create", at, number, cycle))
        yield f"{at} sends {cycle} to {number}, and hears nothing", lambda: _put(sent, at, writing)

    def _when_writes(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        number, cycle = owner.number + 1, Cycle(at, len(owner.known) + 1, owner.cycles - 1)
        found = state.journals[at][number - 1]
        if found == cycle:
            yield f"{at} learns that {number} is its own: acknowledged", lambda: self._acknowledges(state, at, owner, cycle)
        elif found is not None and not self._rules.refuses_only_when_sure:
            yield f"{at} learns that {number} is taken: refused", lambda: self._refuses(state, at, owner, cycle)
        yield f"{at} gives up", lambda: _put(state, at, Owner("gone"))

    def _acknowledges(self, state: State, at: int, owner: Owner, cycle: Cycle) -> State:
        for other, later in enumerate(state.owners):
            if other > at and later.phase in ("open", "writes") and cycle not in later.known:
                raise Broken(f"owner {at} acknowledges {cycle}, which owner {other} does not know, who has opened the partition since")
        done = owner._replace(phase="open", known=(*owner.known, cycle), number=owner.number + 1)
        return _put(state._replace(acknowledged=state.acknowledged | {cycle}), at, done)

    def _refuses(self, state: State, at: int, owner: Owner, cycle: Cycle) -> State:
        for other, later in enumerate(state.owners):
            if cycle in later.known:
                raise Broken(f"owner {at} refuses {cycle}, which owner {other} has")
        return _put(state._replace(refused=state.refused | {cycle}), at, Owner("gone"))

    def _when_gone(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        return iter(())

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def _saves(self, state: State, at: int, owner: Owner) -> Iterator[Step]:
        if owner.checkpoint is None:
            if owner.known != owner.head.saved and owner.heads < self._rules.heads:
                yield f"{at} writes a checkpoint", lambda: _put(state, at, owner._replace(checkpoint=(owner.known, owner.number)))
            return
        saved, number = owner.checkpoint
        if not self._rules.covers_what_was_saved:
            number = owner.number
        # Ranges of others were read before it opened the partition. Its own goes on while the checkpoint is written.
        later = (part._replace(start=max(part.start, number + 1)) for part in owner.head.tail if part.owner == at)
        tail = tuple(part for part in later if part.end is None or part.start < part.end)
        head = Head((at, owner.heads), owner.head.fence, saved, tail)
        if not self._rules.collects_behind_the_head:
            yield f"{at} collects first", lambda: self._collects(state, at, number)
        yield from self._replaces(state, at, owner, head, "has the head name its checkpoint", number)

    def _replaces(
        self, state: State, at: int, owner: Owner, head: Head, what: str, saved: int | None = None, lost: Owner | None = None
    ) -> Iterator[Step]:
        """It replaces the head that it has read or written last. `lost`: what it is if it hears nothing."""
        if self._same(state.head, owner.head):
            if owner.heads == self._rules.heads:
                return
            done = owner._replace(head=head, heads=owner.heads + 1, unsure=False)
            landed = state._replace(head=head)
            if saved is not None:
                done, landed = done._replace(checkpoint=None), self._wipes(self._collects(landed, at, saved), at, owner.head)
            yield f"{at} {what}", lambda: _put(landed, at, done)
            sent, unheard = _sent(state, ("replace", owner.head, head)), (lost or owner)._replace(heads=owner.heads + 1)
            yield f"{at} {what}, and hears nothing", lambda: _put(sent, at, unheard)
        elif state.head.fence == owner.head.fence or not self._rules.leaves_others_heads:
            yield f"{at} reads its head again", lambda: _put(state, at, owner._replace(head=state.head))
        else:
            yield f"{at} sees the head of another owner", lambda: _put(state, at, Owner("gone"))

    def _collects(self, state: State, at: int, number: int) -> State:
        """It sends the deletions of its journal, up to the checkpoint."""
        gone: set[Request] = {("delete", at, n, None) for n in range(1, number + 1)}
        return state._replace(net=state.net | gone)

    def _wipes(self, state: State, at: int, before: Head) -> State:
        """It sends the deletions of the journals that the head no longer names."""
        gone: set[Request] = {
            ("delete", part.owner, n, None)
            for part in before.tail
            if part.owner != at
            for n, entry in enumerate(state.journals[part.owner], 1)
            if entry is not None and (entry != "end" or not self._rules.keeps_ending_entries)
        }
        return state._replace(net=state.net | gone)


def _start(head: Head, index: int) -> int:
    return head.tail[index].start if index < len(head.tail) else 0


def _next(owner: Owner, part: Part) -> Owner:
    """It is through with the range."""
    tail = (*owner.tail, part._replace(end=owner.number))
    return owner._replace(tail=tail, number=_start(owner.head, len(tail)))


def _again(state: State, at: int, owner: Owner) -> State:
    return _put(state, at, Owner("new", walks=owner.walks, cycles=owner.cycles, heads=owner.heads))


def _put(state: State, at: int, owner: Owner) -> State:
    return state._replace(owners=(*state.owners[:at], owner, *state.owners[at + 1 :]))


def _sent(state: State, request: Request) -> State:
    return state._replace(net=state.net | {request})


def _with(state: State, journal: int, number: int, entry: Entry | None) -> State:
    log = state.journals[journal]
    changed = (*log[: number - 1], entry, *log[number:])
    return state._replace(journals=(*state.journals[:journal], changed, *state.journals[journal + 1 :]))


def _text(request: Request) -> str:
    if len(request) == 3:
        return f"the head by {request[2].nonce[0]}"
    return f"“{request[0]} {request[2]}” in the journal of {request[1]}"


ABLATIONS = {
    "without ending entries": Rules(ending_entries=False),
    "ending entries are deleted": Rules(keeps_ending_entries=False),
    "an opening replaces any head": Rules(takes_the_head_that_it_read=False),
    "a former owner replaces a later one's head": Rules(leaves_others_heads=False),
    "heads may be equal": Rules(versions_are_unique=False, heads=4),
    "collects before the head names the checkpoint": Rules(collects_behind_the_head=False),
    "a checkpoint covers what came after it": Rules(covers_what_was_saved=False, numbers=3, cycles=2, heads=2),
    "a cycle follows a detachment that was not answered": Rules(attaches_after_a_lost_detachment=False),
    "a lost answer and a taken number are taken for a refusal": Rules(refuses_only_when_sure=False, owners=3, heads=2),
}
"""The rules without one, by what is missing, in bounds within which the checker must find a loss."""
