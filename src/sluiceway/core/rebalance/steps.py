"""What a rebalance does next: its steps, as a pure machine over its record, its queue's record, and what was heard since it was taken up.

A coordinator does what `change` says, if it says anything, and otherwise what `asks` says, and tells `Heard` what it was answered. Every
change is one commit of both records as they were when it was decided; `Heard` is forgotten with each that begins a step. Nothing else is
remembered, so whoever reads the two records can go on, and what is then asked again does no harm: requests carry the queue's `cursor`,
which each change of what partitions and slots are for raises.

Why nothing is lost:

* Until a partition is shut, durably, it may take items, whatever its record says. Only after `shut` are others asked to take over its keys
  or, for a queue that keeps its order, to take items.
* A partition is removed by a commit that follows its seal, and it is sealed in the transaction that finds it empty. What is sealed under
  a cursor is opened again by a cancellation only, under a higher one, while its record is still there. Not sealed are those that a
  rebalance made and did not flip: nothing was ever to be put into them, by any record.
* Items are moved only to partitions that stay: those are removed by a later rebalance, which begins when this one has ended, and so when
  nothing is on its way any more. A cancellation removes partitions that were moved to: it first has those that it opens again, under
  its own cursor, say that nothing of theirs is on its way; from then on what an earlier coordinator asks is refused there.
* What a partition has answered as the target of intents (`core.keys`) it hands over to the homes of these keys, durably, before it can be
  sealed. It takes nothing more from intents since it was shut. So a home whose intent names a partition that is no more knows that it had
  nothing.
* The homes of slots change in the record after the new ones have the keys, durably, and the former ones have closed the slots, durably.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sluiceway.contract.rebalances import PartitionState, RebalanceState, StepKind
from sluiceway.core.partition.key_slots import slot_of_name, slots_of, spread
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import GiveKeys, HandOverKeys, KeysGiven, Moved, MoveOut, Shut, Shutted, Shutting, TakeKeys
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance, StepDone

ASK_TIMEOUT: Millis = 5_000
"""How long one request may take before it is made again."""
MOVE_ITEMS = 2_000
"""Items of one move: few enough that the calls of clients do not notice it, many enough that a move costs little for each."""
SOON: Millis = 20
LATE: Millis = 1_000
"""How long a drain waits before it looks again: SOON after something has changed, and twice as long each time, LATE at most."""
MAX_COUNTED = 1_000
"""A drain that has more items than this, and leaves them to consumers, looks again after LATE."""


class Change(NamedTuple):
    """A commit: the records as they are to be, partitions that get owners by it, those that are gone by it, and what to note of it.

    `record` None: the queue's stays as it is. `step`: what is done by it; None: nothing but what the rebalance's record says of itself.
    """

    record: QueueRecord | None
    rebalance: Rebalance
    placed: tuple[int, ...] = ()
    removed: tuple[PartitionRecord, ...] = ()
    step: StepKind | None = None


class AskFor(NamedTuple):
    """Ask the partition's owner that, after so long."""

    partition: int
    request: Shut | GiveKeys | TakeKeys | HandOverKeys | MoveOut
    delay: Millis = 0


@dataclass
class Look:
    """What is known of a partition that is drained."""

    counts: Shutted | None = None
    delay: Millis = 0
    move: bool = False
    """There is something to be moved, and then looked at again."""


@dataclass
class Heard:
    """What was answered in the present step."""

    shut: dict[int, Shutted] = field(default_factory=dict)
    given: dict[int, KeysGiven] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    looks: dict[int, Look] = field(default_factory=dict)
    moved: int = 0
    """Items that have arrived."""
    too_many: bool = False
    """A former home remembers more than can be said at once."""
    waiting: dict[int, int] = field(default_factory=dict)
    """The waiting items of partitions, as far as they are known; the coordinator counts them before it moves any."""

    def hear(self, ask: AskFor, answer: Any) -> None:
        request = ask.request
        if isinstance(request, Shut):
            self._hear_shut(request, answer)
        elif isinstance(request, GiveKeys):
            self.given[request.partition] = answer
        elif isinstance(request, TakeKeys):
            self.taken.add(request.partition)
        elif isinstance(request, HandOverKeys):
            self.looks.setdefault(request.partition, Look()).counts = None
        else:
            self._hear_moved(request, answer)

    def refuse(self, ask: AskFor, error: SluicewayError) -> bool:
        """Whether the machine has something to say to that error; otherwise the request is to be made again."""
        if isinstance(ask.request, GiveKeys) and error.code == "too_many_items" and len(ask.request.slots) > 1:
            self.too_many = True
            return True
        return False

    def _hear_shut(self, request: Shut, answer: Shutted) -> None:
        before = self.shut.get(request.partition)
        self.shut[request.partition] = answer
        look = self.looks.setdefault(request.partition, Look())
        changed = before is None or before != answer
        look.counts = answer
        look.delay = SOON if changed else min(LATE, max(SOON, 2 * look.delay))
        look.move = True

    def _hear_moved(self, request: MoveOut, answer: Moved) -> None:
        self.moved += answer.arrived
        self.waiting[request.target] = self.waiting.get(request.target, 0) + answer.begun
        look = self.looks.setdefault(request.partition, Look())
        look.move = False
        if answer.arrived:
            look.delay = 0


# ---- beginning and cancelling -------------------------------------------------------------------------------------


def begin(record: QueueRecord, rebalance: Rebalance, plan: Plan, now: Millis) -> Change:
    """Start that rebalance of the queue, which has none open: from now on it has the plan's new partitions, which nothing uses."""
    new = tuple(PartitionRecord(each.partition, each.backend, "preparing", each.parents) for each in plan.creates)
    after = msgspec.structs.replace(
        record,
        partitions=(*record.partitions, *new),
        next_partition=record.given + len(new),
        slots=slots_of(record),
        rebalance=rebalance.id,
        updated_at=now,
    )
    begun = msgspec.structs.replace(rebalance, state="running", step="create", plan=plan, started_at=now, updated_at=now)
    return Change(after, begun, placed=tuple(each.partition for each in new))


def cancelled(record: QueueRecord | None, rebalance: Rebalance, now: Millis) -> Change:
    """Turn it round: what it made is drained, and what it drains goes on. Before the flip it is ended at once. Raises `not_cancellable`."""
    if rebalance.state == "waiting":
        return Change(None, _ended(rebalance, "cancelled", now))
    _check_cancellable(rebalance)
    if record is None:
        raise SluicewayError("not_cancellable", f"rebalance {rebalance.id}: its queue was deleted")
    plan = rebalance.plan
    if rebalance.step in ("create", "flip"):
        new = {each.partition for each in plan.creates}
        unused = tuple(each for each in record.partitions if each.partition in new)
        stay = tuple(each for each in record.partitions if each.partition not in new)
        without = msgspec.structs.replace(record, partitions=stay, rebalance=None, updated_at=now)
        return Change(without, _ended(rebalance, "cancelled", now), removed=unused)
    back = Plan(drains=tuple(each.partition for each in plan.creates), keeps=plan.keeps, reopens=plan.drains)
    turned = msgspec.structs.replace(rebalance, state="cancelling", step="flip", plan=back, updated_at=now, problem="", retries=0)
    # The queue's record is put as well: so all instances hear of it, and nothing that was decided before can be committed.
    return Change(msgspec.structs.replace(record, updated_at=now), turned)


def _check_cancellable(rebalance: Rebalance) -> None:
    why = ""
    if not rebalance.is_open:
        why = f"it has ended: {rebalance.state}"
    elif rebalance.state == "cancelling":
        why = "it is being cancelled already"
    elif any(each.partition is not None for each in rebalance.done):
        why = "a partition was removed already"
    elif rebalance.plan.in_order and rebalance.step not in ("create", "flip"):
        why = "the queue keeps its order, and its new partition is in use"
    if why:
        raise SluicewayError("not_cancellable", f"rebalance {rebalance.id}: {why}")


def failed(rebalance: Rebalance, problem: str, now: Millis) -> Change:
    """It cannot go on, ever."""
    return Change(None, msgspec.structs.replace(_ended(rebalance, "failed", now), problem=problem))


def nothing_to_do(rebalance: Rebalance, now: Millis) -> Change:
    """Its turn has come, and everything is as it is wanted."""
    return Change(None, _ended(rebalance, "done", now))


def _ended(rebalance: Rebalance, state: RebalanceState, now: Millis) -> Rebalance:
    return msgspec.structs.replace(rebalance, state=state, step="finish", ended_at=now, updated_at=now, problem="")


# ---- what to commit -----------------------------------------------------------------------------------------------


def change(rebalance: Rebalance, record: QueueRecord, heard: Heard, now: Millis, by: str) -> Change | None:
    """What there is to be committed now; None: nothing before more was heard."""
    step = rebalance.step
    if step == "create":
        return _created(rebalance, record, heard, now, by)
    if step == "flip":
        return _flip(rebalance, record, now, by)
    if step == "shut":
        return _shut(rebalance, record, heard, now, by)
    if step == "keys":
        return _keys(rebalance, record, heard, now, by)
    if step == "drain":
        return _drained(rebalance, record, heard, now, by)
    ended = _ended(rebalance, "cancelled" if rebalance.state == "cancelling" else "done", now)
    return _step(rebalance, ended, msgspec.structs.replace(record, rebalance=None), now, by)


def _step(
    rebalance: Rebalance, after: Rebalance, record: QueueRecord | None, now: Millis, by: str, *, removed: Sequence[PartitionRecord] = ()
) -> Change:
    """The change that does the present step, or a part of it: it is noted as done."""
    noted: list[StepDone] = [StepDone(rebalance.step, now, by, each.partition) for each in removed]
    if rebalance.step != after.step or not after.is_open:
        noted.append(StepDone(rebalance.step, now, by))
    after = msgspec.structs.replace(after, done=(*rebalance.done, *noted), updated_at=now, problem="", retries=0)
    record = None if record is None else msgspec.structs.replace(record, updated_at=now)
    return Change(record, after, removed=tuple(removed), step=rebalance.step)


def _created(rebalance: Rebalance, record: QueueRecord, heard: Heard, now: Millis, by: str) -> Change | None:
    if any(each.partition not in heard.shut for each in rebalance.plan.creates):
        return None
    return _step(rebalance, msgspec.structs.replace(rebalance, step="flip"), record, now, by)


def _flip(rebalance: Rebalance, record: QueueRecord, now: Millis, by: str) -> Change:
    plan = rebalance.plan
    states: dict[int, PartitionState] = dict.fromkeys(plan.drains, "draining")
    there = {each.partition: each for each in record.partitions}
    paused = tuple(number for number in plan.drains if number in there and there[number].state == "paused")
    for number in plan.reopens:
        if there[number].state == "draining":
            states[number] = "paused" if number in rebalance.paused else "available"
    if not plan.in_order:
        states |= dict.fromkeys((each.partition for each in plan.creates), "available")
    partitions = tuple(msgspec.structs.replace(each, state=states.get(each.partition, each.state)) for each in record.partitions)
    homes = homes_of(rebalance, record)
    if rebalance.state == "cancelling":
        # As it was: those who were homes are all there.
        slots = rebalance.homes
    else:
        slots = spread(homes, [each.partition for each in partitions if each.partition not in plan.drains])
    moving = tuple(
        MOVING if now_at == MOVING or home != final else now_at for now_at, home, final in zip(record.slots, homes, slots, strict=True)
    )
    flipped = msgspec.structs.replace(record, partitions=partitions, slots=moving, cursor=record.cursor + 1)
    after = msgspec.structs.replace(rebalance, step="shut", slots=slots, homes=homes, paused=paused or rebalance.paused)
    return _step(rebalance, after, flipped, now, by)


def homes_of(rebalance: Rebalance, record: QueueRecord) -> tuple[int, ...]:
    """Who remembers the keys of each slot, also of those that are MOVING."""
    if not rebalance.homes:
        return record.slots
    return tuple(before if home == MOVING else home for home, before in zip(record.slots, rebalance.homes, strict=True))


def _shut(rebalance: Rebalance, record: QueueRecord, heard: Heard, now: Millis, by: str) -> Change | None:
    plan = rebalance.plan
    if not (all(_is_shut(heard, number) for number in plan.drains) and all(_is_open(heard, number) for number in plan.reopens)):
        return None
    # From now on there come none but those that are scheduled or leased already.
    items = sum(heard.shut[number].left for number in plan.drains)
    return _step(rebalance, msgspec.structs.replace(rebalance, step="keys", items=items), record, now, by)


def _is_shut(heard: Heard, number: int) -> bool:
    return number in heard.shut and heard.shut[number].shutting != "open"


def _is_open(heard: Heard, number: int) -> bool:
    """It takes items again, and nothing of it is on its way to a partition that is about to be removed, nor will be."""
    return number in heard.shut and heard.shut[number].shutting == "open" and not heard.shut[number].moving


def _keys(rebalance: Rebalance, record: QueueRecord, heard: Heard, now: Millis, by: str) -> Change | None:
    slots = _slots_now(rebalance, record)
    if heard.too_many or _are_too_many(rebalance, slots, heard):
        fewer = msgspec.structs.replace(rebalance, slots_at_once=-(-len(slots) // 2), updated_at=now)
        # Under a new cursor: a home that has taken all of them, unheard of, must not take the half for a repetition.
        return Change(msgspec.structs.replace(record, cursor=record.cursor + 1, updated_at=now), fewer)
    if slots and not heard.taken >= {rebalance.slots[place] for place in slots}:
        return None
    homes = list(record.slots)
    for place in slots:
        homes[place] = rebalance.slots[place]
    moved = msgspec.structs.replace(record, slots=tuple(homes), cursor=record.cursor + 1)
    if MOVING in homes:
        return _step(rebalance, rebalance, moved, now, by)
    if rebalance.plan.in_order:
        moved = msgspec.structs.replace(moved, partitions=tuple(_in_use(rebalance.plan, each) for each in moved.partitions))
    return _step(rebalance, msgspec.structs.replace(rebalance, step="drain", drain_at=now), moved, now, by)


def _in_use(plan: Plan, each: PartitionRecord) -> PartitionRecord:
    """A new partition of a queue that keeps its order: it takes items, and gives out none while its parents are there."""
    if each.partition in plan.drains:
        return each
    return msgspec.structs.replace(each, state="available", after=each.parents)


def _slots_now(rebalance: Rebalance, record: QueueRecord) -> tuple[int, ...]:
    """The slots that are handed over next. Those that stay with their homes go first, and by themselves: there is nothing to be said."""
    moving = [place for place, home in enumerate(record.slots) if home == MOVING]
    stay = tuple(place for place in moving if rebalance.homes[place] == rebalance.slots[place])
    return stay or tuple(moving[: rebalance.slots_at_once or None])


def _are_too_many(rebalance: Rebalance, slots: Sequence[int], heard: Heard) -> bool:
    takers = {rebalance.slots[place] for place in slots}
    return any(_size(_keys_for(rebalance, slots, heard, taker)) > MAX_KEYS_BYTES for taker in takers) if heard.given else False


def _size(keys: Mapping[str, bytes]) -> int:
    return sum(len(name) + len(data) for name, data in keys.items())


def _keys_for(rebalance: Rebalance, slots: Sequence[int], heard: Heard, taker: int) -> dict[str, bytes]:
    """What was given for those of the slots that get this home."""
    mine = {place for place in slots if rebalance.slots[place] == taker}
    found: dict[str, bytes] = {}
    for given in heard.given.values():
        found |= {name: data for name, data in given.keys.items() if slot_of_name(name[1:], len(rebalance.slots)) in mine}
    return found


def _drained(rebalance: Rebalance, record: QueueRecord, heard: Heard, now: Millis, by: str) -> Change | None:
    left = [each for each in record.partitions if each.partition in rebalance.plan.drains]
    sealed = [each for each in left if each.partition in heard.shut and heard.shut[each.partition].shutting == "sealed"]
    if left and not sealed:
        return None
    after = progress(rebalance, heard)
    if len(sealed) == len(left):
        after = msgspec.structs.replace(after, step="finish")
    if not sealed:
        return _step(rebalance, after, record, now, by)
    stay = tuple(each for each in record.partitions if each not in sealed)
    return _step(rebalance, after, msgspec.structs.replace(record, partitions=stay), now, by, removed=sealed)


def progress(rebalance: Rebalance, heard: Heard) -> Rebalance:
    """With what has arrived, which is in it from then on: once that is committed, `heard.moved` has to be less by so many."""
    return msgspec.structs.replace(rebalance, moved=rebalance.moved + heard.moved)


# ---- what to ask --------------------------------------------------------------------------------------------------


def asks(rebalance: Rebalance, record: QueueRecord, heard: Heard) -> list[AskFor]:
    """What is to be asked now, of each partition one thing at most; all of it may be asked at once."""
    plan, cursor = rebalance.plan, record.cursor
    if rebalance.step == "create":
        new = [each.partition for each in plan.creates if each.partition not in heard.shut]
        return [AskFor(number, Shut(number, "open", cursor, ASK_TIMEOUT)) for number in new]
    if rebalance.step == "shut":
        drains = [_shutting(number, "read_only", cursor) for number in plan.drains if not _is_shut(heard, number)]
        waits = {number: heard.looks[number].delay if number in heard.looks else 0 for number in plan.reopens}
        return drains + [_shutting(number, "open", cursor, waits[number]) for number in plan.reopens if not _is_open(heard, number)]
    if rebalance.step == "keys":
        return _ask_keys(rebalance, record, heard)
    if rebalance.step == "drain":
        return [_ask_drain(rebalance, record, heard, each) for each in record.partitions if each.partition in plan.drains]
    return []


def _shutting(number: int, shutting: Shutting, cursor: int, delay: Millis = 0) -> AskFor:
    return AskFor(number, Shut(number, shutting, cursor, ASK_TIMEOUT), delay)


def _ask_keys(rebalance: Rebalance, record: QueueRecord, heard: Heard) -> list[AskFor]:
    slots, of = _slots_now(rebalance, record), len(rebalance.slots)
    if all(rebalance.homes[place] == rebalance.slots[place] for place in slots):
        return [
            AskFor(taker, TakeKeys(taker, places, of, record.cursor, None, ASK_TIMEOUT))
            for taker, places in _by_home(rebalance.slots, slots).items()
            if taker not in heard.taken
        ]
    give = [
        AskFor(giver, GiveKeys(giver, places, of, record.cursor, ASK_TIMEOUT))
        for giver, places in _by_home(rebalance.homes, slots).items()
        if giver not in heard.given
    ]
    if give:
        return give
    return [
        AskFor(taker, TakeKeys(taker, places, of, record.cursor, _keys_for(rebalance, slots, heard, taker), ASK_TIMEOUT))
        for taker, places in _by_home(rebalance.slots, slots).items()
        if taker not in heard.taken
    ]


def _by_home(homes: Sequence[int], slots: Sequence[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for place in slots:
        found[homes[place]] = (*found.get(homes[place], ()), place)
    return found


def _ask_drain(rebalance: Rebalance, record: QueueRecord, heard: Heard, each: PartitionRecord) -> AskFor:
    """Look whether it is empty, and seal it if so; between two looks move what is to be moved."""
    number, look = each.partition, heard.looks.get(each.partition)
    if look is None or look.counts is None:
        return _shutting(number, "sealed", record.cursor)
    counts = look.counts
    if not counts.left and counts.keys:
        # Nothing else keeps it from being sealed.
        return AskFor(number, HandOverKeys(number, record.cursor, ASK_TIMEOUT))
    copies = rebalance.drain == "copy" and not rebalance.plan.in_order
    target = _target(record, heard, number)
    if look.move and target is not None and not counts.moving and (counts.scheduled or (copies and counts.ready)):
        move = MoveOut(number, target, MOVE_ITEMS, record.cursor, ASK_TIMEOUT, scheduled=bool(counts.scheduled))
        return AskFor(number, move)
    many = counts.left > MAX_COUNTED and not copies
    return _shutting(number, "sealed", record.cursor, LATE if many else look.delay)


def _target(record: QueueRecord, heard: Heard, number: int) -> int | None:
    """Where its items go: to the emptiest of those that take its place, or else of those that stay."""
    able = [each for each in record.partitions if each.state == "available"]
    heirs = [each for each in able if number in each.parents]
    return min((each.partition for each in heirs or able), key=lambda other: (heard.waiting.get(other, 0), other), default=None)
