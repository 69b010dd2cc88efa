"""Trace check of a partition in a bucket: whether a recorded history follows the rules of `bucket_journals`.

A history has the requests of all owners in the order in which they took effect in the bucket, and what the owners heard. So there is one
state at each moment: the head, the journals, and the cycles that are the partition's by them. What an owner has read when it decides is not
seen, and need not be: a head takes effect only while the one that its owner has read is still there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from spec.checker import Broken
from spec.rejected import Rejected, first_rejected

Fence = tuple[int, ...]
"""An owner's fence; empty before the partition is first opened."""


class Cycle(NamedTuple):
    """The `txn`th cycle of the partition, as its owner under that fence has sent it. `label` tells attempts apart."""

    fence: Fence
    txn: int
    label: str


class Part(NamedTuple):
    """Entries of a journal, from `start` on and before `end`; None: up to its end."""

    journal: str
    start: int
    end: int | None = None

    def has(self, journal: str, number: int) -> bool:
        """Whether the entry of that number is one of them."""
        return journal == self.journal and self.start <= number and (self.end is None or number < self.end)


class Head(NamedTuple):
    """`nonce`: unlike that of any other head. `checkpoint`: the name of the one that it begins from; empty: from nothing."""

    nonce: str
    fence: Fence = ()
    checkpoint: str = ""
    tail: tuple[Part, ...] = ()

    @property
    def attached(self) -> Part | None:
        """Where its owner writes."""
        return self.tail[-1] if self.tail and self.tail[-1].end is None else None


Entry = Cycle | Literal["end", "other"]
"""`end`: an ending entry; `other`: one without a cycle of this partition."""


class Sent(NamedTuple):
    """Its owner begins to commit the cycle."""

    cycle: Cycle


class Heard(NamedTuple):
    """The owner has heard what became of the cycle. What stays unknown has no event."""

    cycle: Cycle
    outcome: Literal["done", "refused"]


class Opened(NamedTuple):
    """An opening under that fence has ended, and found these cycles."""

    fence: Fence
    known: tuple[Cycle, ...]


class Created(NamedTuple):
    """An entry is there. `by`: the process that asked for it."""

    by: str
    journal: str
    number: int
    entry: Entry


class Deleted(NamedTuple):
    """An entry is gone."""

    journal: str
    number: int


class Headed(NamedTuple):
    """The partition has another head. `by`: the process that asked for it."""

    by: str
    head: Head


class Saved(NamedTuple):
    """There is a checkpoint of that name, with these cycles."""

    checkpoint: str
    cycles: tuple[Cycle, ...]


class Discarded(NamedTuple):
    """The checkpoint of that name is gone."""

    checkpoint: str


Event = Sent | Heard | Opened | Created | Deleted | Headed | Saved | Discarded


class BucketTraceCheck:
    """Checks the history of one partition."""

    def __init__(self) -> None:
        self._head: Head | None = None
        self._nonces: set[str] = set()
        self._checkpoints: dict[str, tuple[Cycle, ...]] = {"": ()}
        self._journals = Journals()
        self._known: tuple[Cycle, ...] = ()
        """The partition's cycles: what an opening of this moment would find."""
        self._sent: set[Cycle] = set()
        self._landed: set[Cycle] = set()
        self._acknowledged: set[Cycle] = set()
        self._refused: set[Cycle] = set()
        self._found: dict[Fence, tuple[Cycle, ...]] = {}
        """The cycles that each opening has taken over."""

    def check(self, history: Sequence[Event]) -> Rejected[Event] | None:
        """Return None if the history is accepted. A check is for one history."""
        return first_rejected(history, self._take)

    def _take(self, event: Event) -> None:
        match event:
            case Sent(cycle):
                self._sent.add(cycle)
            case Heard(cycle, outcome):
                self._hear(cycle, outcome)
            case Opened(fence, known):
                if self._found.get(fence) != known:
                    raise Broken("it is not what the head and the journals say")
            case Created(_, journal, number, entry):
                if self._journals.create(event) and isinstance(entry, Cycle):
                    self._land(journal, number, entry)
            case Deleted(journal, number):
                self._delete(journal, number)
            case Headed(by, head):
                self._replace(by, head)
            case Saved(checkpoint, cycles):
                self._checkpoints[checkpoint] = cycles
            case Discarded(checkpoint):
                if self._head is not None and self._head.checkpoint == checkpoint:
                    raise Broken("the head names it")
                self._checkpoints.pop(checkpoint, None)

    # ---- cycles ---------------------------------------------------------------------------------------------------

    def _hear(self, cycle: Cycle, outcome: str) -> None:
        if outcome == "done":
            if cycle not in self._known:
                raise Broken("it is acknowledged, and is none of the partition's cycles")
            self._acknowledged.add(cycle)
            return
        if cycle in self._landed:
            raise Broken("it is refused, and was in a journal")
        self._refused.add(cycle)

    def _land(self, journal: str, number: int, cycle: Cycle) -> None:
        """A cycle is in a journal for the first time."""
        self._landed.add(cycle)
        attached = None if self._head is None else self._head.attached
        if cycle not in self._sent:
            raise Broken("nobody has sent it")
        if cycle in self._refused:
            raise Broken("it was refused")
        if self._head is None or attached is None or not attached.has(journal, number):
            raise Broken("the partition is not attached there")
        if (end := self._journals.end(attached)) is not None and end < number:
            raise Broken(f"the journal has ended at {end}")
        if (self._head.fence, len(self._known) + 1) != (cycle.fence, cycle.txn):
            raise Broken(f"the next cycle is number {len(self._known) + 1}, under {self._head.fence}")
        self._known = (*self._known, cycle)

    def _delete(self, journal: str, number: int) -> None:
        gone = self._journals.delete(journal, number)
        # One that was written where entries had been deleted, by a process that had read an old head, is no end.
        if gone == "end" and self._journals.end(Part(journal, number)) is None:
            raise Broken("ending entries stay for ever")
        if isinstance(gone, Cycle) and self._head is not None and any(part.has(journal, number) for part in self._head.tail):
            raise Broken("the head still needs it")

    # ---- heads ----------------------------------------------------------------------------------------------------

    def _replace(self, by: str, head: Head) -> None:
        before = self._head
        if head.nonce in self._nonces:
            raise Broken("there was such a head before")
        self._nonces.add(head.nonce)
        if before is None:
            if head.fence or head.checkpoint or head.tail:
                raise Broken("nobody has created the partition")
        elif head.fence < before.fence:
            raise Broken(f"the partition was opened under {before.fence}")
        else:
            self._check_ranges(by, before, head)
            if head.fence > before.fence:
                self._open(before, head)
            elif (read := self._read(head)) != self._known:
                # Attached, detached, saved, or taken up again after it was let go: nothing comes or goes with that.
                raise Broken(f"the partition has {len(self._known)} cycles, and by this head {len(read)}")
        self._head = head

    def _check_ranges(self, by: str, before: Head, head: Head) -> None:
        """Its owner writes to its own journal, and nobody can add to a range of another any more."""
        if head.attached is not None:
            self._journals.check_own(by, head.attached.journal)
        attached = before.attached
        if attached is None or self._journals.writers.get(attached.journal, by) == by:
            return
        end = self._journals.end(attached)
        if end is None:
            raise Broken(f"the journal {attached.journal}, to which another process writes, has not ended")
        if any((part.journal, part.start) == attached[:2] and part.end != end for part in head.tail if part not in before.tail):
            raise Broken(f"the journal {attached.journal} has ended at {end}")

    def _open(self, before: Head, head: Head) -> None:
        if head.checkpoint != before.checkpoint:
            raise Broken("an opening writes no checkpoint")
        known = self._read(head)
        if lost := self._acknowledged - {*known}:
            raise Broken(f"{min(lost)} is lost, which was acknowledged")
        if wrong := self._refused & {*known}:
            raise Broken(f"{min(wrong)} is there, which was refused")
        self._known = self._found[head.fence] = known

    def _read(self, head: Head) -> tuple[Cycle, ...]:
        """The cycles that the partition has by that head."""
        if head.checkpoint not in self._checkpoints:
            raise Broken(f"there is no checkpoint {head.checkpoint}")
        known = [*self._checkpoints[head.checkpoint]]
        for cycle in (cycle for part in head.tail for cycle in self._journals.read(part)):
            if cycle.txn > len(known) + 1:
                raise Broken(f"cycles before {cycle} are missing")
            if cycle.txn == len(known) + 1:
                known.append(cycle)
        return tuple(known)


class Journals:
    """The journals of all processes, as they are in the bucket."""

    def __init__(self) -> None:
        self.writers: dict[str, str] = {}
        """The process that writes each journal."""
        self._entries: defaultdict[str, dict[int, Entry]] = defaultdict(dict)
        self._first: defaultdict[str, dict[int, Entry]] = defaultdict(dict)
        """What was the first at each number, whether it is still there or not; without ending entries."""

    def check_own(self, by: str, journal: str) -> None:
        """Raise Broken if another process writes that journal."""
        if self.writers.setdefault(journal, by) != by:
            raise Broken(f"the journal {journal} is that of {self.writers[journal]}")

    def create(self, event: Created) -> bool:
        """Take an entry. Returns whether there was none of that number before: a request may land again when its entry is superfluous."""
        by, journal, number, entry = event
        if number in self._entries[journal]:
            raise Broken("the number is taken")
        self._entries[journal][number] = entry
        if entry == "end":
            return False
        self.check_own(by, journal)
        first = self._first[journal]
        if number > len(first) + 1:
            raise Broken(f"the entry after {len(first)} is missing")
        is_new = number > len(first)
        if first.setdefault(number, entry) != entry:
            raise Broken("there was another entry of that number before")
        return is_new

    def delete(self, journal: str, number: int) -> Entry | None:
        """Remove an entry. Returns it; None: it was not there."""
        return self._entries[journal].pop(number, None)

    def end(self, part: Part) -> int | None:
        """Where the journal has ended, from the range's start on. One below is no end: it was written where entries had been deleted."""
        ends = (number for number, entry in self._entries[part.journal].items() if entry == "end" and number >= part.start)
        return min(ends, default=None)

    def read(self, part: Part) -> Iterator[Cycle]:
        """The cycles in that range. Raises Broken if one is gone."""
        end = part.end or self.end(part) or len(self._first[part.journal]) + 1
        for number in range(part.start, end):
            first = self._first[part.journal].get(number)
            if not isinstance(first, Cycle):
                continue
            if self._entries[part.journal].get(number) != first:
                raise Broken(f"{first}, entry {number} of {part.journal}, is missing")
            yield first
