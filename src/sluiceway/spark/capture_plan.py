"""Micro-batch plan of a capture: what a batch reads, and which earlier batches are done. Pure: the source supplies the facts.

Two places remember a batch: the position store has, for each partition, the plan of the batch being handed on, and Spark's offset log has
the *slices* of each micro-batch. The plan is recorded first, then Spark logs the offset, runs the batch, commits it, and asks for the next
one; only then is the plan recorded as done. Wherever the driver dies between two of these steps, the records determine what to do:

* plan recorded, offset not logged: the plan is no slice of `start`, so it is a slice of the next batch. Nothing of it was handed on.
* offset logged, batch not committed: Spark reads exactly the same slices again, without asking.
* batch committed, plan not recorded as done: the plan is a slice of `start`, so it is done.
* the partition is not this member's yet, or no longer: its slice is carried from offset to offset as *done*, until it is seen that the
  owner has recorded it. Otherwise a plan found long after its batch would be handed on twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sluiceway.core.group.task_state import State
from sluiceway.kernel.errors import invalid
from sluiceway.model.task_records import PositionRecord


class Slice(NamedTuple):
    """Records of a partition after the position `after`, up to `upto`, as its batch number `batch`, planned under `grant`."""

    token: str
    after: str
    upto: str
    batch: int
    grant: int
    rows: int

    @property
    def done(self) -> Done:
        return Done(self.token, self.upto, self.batch, self.rows)


class Done(NamedTuple):
    """A batch of a partition that Spark has committed, perhaps not yet recorded as done."""

    token: str
    upto: str
    batch: int
    rows: int


@dataclass(frozen=True, slots=True)
class Offset:
    """One micro-batch. `sequence` counts a checkpoint's batches from 1.

    Equal offsets are equal text, which is how Spark compares them.
    """

    sequence: int = 0
    slices: tuple[Slice, ...] = ()
    done: tuple[Done, ...] = ()
    """Entries of earlier batches. Those of this batch are done as well once Spark begins at this offset."""

    @classmethod
    def parse(cls, offset: Mapping[str, object]) -> Offset:
        slices = tuple(Slice(*each) for each in json.loads(str(offset["slices"])))
        done = tuple(Done(*each) for each in json.loads(str(offset["done"])))
        return cls(int(str(offset["sequence"])), slices, done)

    def to_dict(self) -> dict[str, object]:
        """Keys in alphabetical order; lists as one string each, since Spark takes no lists."""
        return {"done": _text(self.done), "sequence": self.sequence, "slices": _text(self.slices)}

    def committed(self) -> tuple[Done, ...]:
        """Everything done when Spark begins at this offset: the last entry of each partition."""
        last = {each.token: each for each in self.done}
        last |= {each.token: each.done for each in self.slices}
        return tuple(last.values())

    def following(self, slices: Iterable[Slice], done: Iterable[Done]) -> Offset:
        return Offset(self.sequence + 1, tuple(sorted(slices)), tuple(sorted(done)))


def _text(entries: Sequence[tuple[object, ...]]) -> str:
    return json.dumps([list(each) for each in entries], separators=(",", ":"))


Verdict = Literal["settle", "settled"]


def judge(kept: PositionRecord, done: Done) -> Verdict:
    """What to record for a batch that Spark has committed. `settle`: that it is done; `settled`: nothing, it is recorded already.

    Raises `invalid_request` if the position store is behind the checkpoint: continuing would hand on twice, or under used numbers.
    """
    if kept.batch == done.batch and kept.plan == done.upto:
        return "settle"
    if _beyond(kept, done):
        return "settled"
    raise invalid(
        "meta",
        f"the position store is at batch {kept.batch} of partition {done.token}, but the checkpoint has completed batch {done.batch} up to "
        f"{done.upto}: the checkpoint belongs to another capture, or the position store was restored from a backup",
    )


def choose(offered: Mapping[str, int], most: int, first: Iterable[str] = ()) -> list[str]:
    """Choose the partitions' offers (rows by token) for a batch: all of `first`, then others until there are `most` rows.

    At least one, if any is offered. The rest comes first next time: the caller passes the oldest offers first.
    """
    chosen = [token for token in first if token in offered]
    rows = sum(offered[token] for token in chosen)
    for token, count in offered.items():
        if token in chosen:
            continue
        if rows >= most:
            break
        chosen.append(token)
        rows += count
    return chosen


def recorded(done: Done, state: State, kept: PositionRecord | None) -> bool:
    """Whether another member has recorded that batch, so that it need not be carried on; `kept` is a recent state of the position store.

    `state` must be newer than this member's own `Join`. A partition only finishes once its last batch is recorded.
    """
    return done.token not in state.partitions or (kept is not None and _beyond(kept, done))


def _beyond(kept: PositionRecord, done: Done) -> bool:
    """Whether the position store is past that batch: no plan under the same number means that it was recorded; the position may have moved
    on without records."""
    return kept.batch > done.batch or (kept.batch == done.batch and kept.plan is None)


class EndFacts(NamedTuple):
    """Facts that decide the end of an `availableNow` run. `reached`: this member's partitions with nothing older than the run, and nothing
    planned. `steady`: the members have been the same for so long that none can be dead."""

    state: State
    name: str
    reached: frozenset[str]
    steady: bool


def is_over(seen: EndFacts) -> bool:
    """Whether everything present at the start of an `availableNow` run has been read by this query, or belongs to another live one."""
    state = seen.state
    if seen.name not in state.members:
        return False
    if not state.sown and not state.partitions:
        # The leader has not asked the stream yet; or it has, and there is nothing.
        return seen.steady
    for token, each in state.unfinished().items():
        if each.phase == "ready":
            return False
        if each.phase == "owned" and (token not in seen.reached if each.owner == seen.name else not seen.steady):
            return False
    return True
