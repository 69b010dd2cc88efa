"""Step machine of a rebalance: a pure function of its record, its queue's record, and the answers heard since a coordinator took it up.

The coordinator commits what `change` returns, if anything; otherwise it sends what `asks` returns and reports the answers to
`StepReplies`. Every change is one commit of both records, conditional on the versions it was decided from; each change that begins a step
resets `StepReplies`. There is no other memory, so any coordinator can continue from the two records. Repeated requests are harmless: each
carries the queue's `cursor`, which rises with every change in what partitions and slots are for.

Why no item or key is lost:

* Until a partition is durably shut it may take items, whatever its record says. Only after `shut` are others asked to take over its keys
  or, for a queue that keeps its order, to take items.
* A partition is removed by a commit that follows its seal, and it is sealed in the transaction that finds it empty. Only a cancellation
  reopens a sealed partition: under a higher cursor, while its record still exists. Partitions that a rebalance created and did not flip are
  removed unsealed: no record ever allowed items in them.
* Items move only to partitions that stay. Those can be removed only by a later rebalance, which begins after this one has ended, when
  nothing is in transit any more. A cancellation does remove partitions that were moved to: it first has the reopened partitions confirm,
  under its own cursor, that none of their items is in transit; from then on they refuse requests of earlier coordinators.
* What a partition has answered as the target of intents (`core.partition.idempotency_keys`) it hands over to the homes of these keys,
  durably, before it can be sealed. It accepts nothing more from intents once it is shut. So a home whose intent names a removed partition
  knows that it had nothing.
* The homes of slots change in the record after the new homes hold the keys durably and the former ones have closed the slots durably.

Where a queue keeps the items of a key together (`Plan.by_key`), a closed slot takes none of its items either, and the new home holds back
what it takes until the former one has said that it has none of the slot left. As nothing comes into a closed slot but what its own leases
put back, that stays so. So of each key, all items in the former home are finished before one in the new home is leased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from sluiceway.contract.rebalances import PartitionState, RebalanceState, StepKind
from sluiceway.core.partition.idempotency_keys import slot_of_given
from sluiceway.core.partition.key_slots import slots_of, spread
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_KEYS_BYTES
from sluiceway.model.peers import GiveKeys, HandOverKeys, KeysGiven, Moved, MoveOut, ServeSlots, Shut, Shutted, Shutting, TakeKeys
from sluiceway.model.queue import MOVING, PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Plan, Rebalance, StepDone

ASK_TIMEOUT: Millis = 5_000
"""Timeout of one request, after which it is repeated."""
MOVE_ITEMS = 2_000
"""Items per move: few enough not to disturb client calls, many enough to amortise the cost of a move."""
SOON: Millis = 20
LATE: Millis = 1_000
"""Delay before a drain is checked again: SOON after a change, then doubled each time up to LATE."""
MAX_PIECES = 4_096
"""Into how many pieces a slot's keys are divided at most: enough for all keys that a partition can remember."""
MAX_REMOVED = 100
"""Partitions that one commit removes: each is a key of its own, or two, and a commit of the meta store takes 1,000."""
MAX_COUNTED = 1_000
"""A drain with more items than this that leaves them to consumers is checked again after LATE."""


class Change(NamedTuple):
    """A commit: the new records, the partitions that get owners by it, the partitions it removes, and the step to note.

    `record` None: the queue's record stays. `step`: the step that this commit does, or does a part of; None: only the rebalance's own
    record changes.
    """

    record: QueueRecord | None
    rebalance: Rebalance
    placed: tuple[int, ...] = ()
    removed: tuple[PartitionRecord, ...] = ()
    step: StepKind | None = None


class AskFor(NamedTuple):
    """A request to the partition's owner, to be sent after `delay`."""

    partition: int
    request: Shut | GiveKeys | TakeKeys | HandOverKeys | ServeSlots | MoveOut
    delay: Millis = 0


@dataclass
class DrainStatus:
    """State of one drained partition, as last reported."""

    counts: Shutted | None = None
    delay: Millis = 0
    move: bool = False
    """Items remain to be moved before the next check."""


@dataclass
class StepReplies:
    """Answers received in the current step."""

    shut: dict[int, Shutted] = field(default_factory=dict)
    given: dict[int, KeysGiven] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)
    looks: dict[int, DrainStatus] = field(default_factory=dict)
    moved: int = 0
    """Items that have arrived at their targets."""
    too_many: bool = False
    """A former home holds more keys than fit into one answer."""
    piece: int = 0
    pieces: int = 1
    """The next piece of a slot's keys, and into how many they are divided, since one answer does not hold them."""
    served: dict[int, set[int]] = field(default_factory=dict)
    """Slots that their new homes serve, by home."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Waiting items by partition, as far as known; the coordinator counts them before it moves any."""

    def hear(self, ask: AskFor, answer: Any) -> None:
        """Record the answer to `ask`."""
        request = ask.request
        if isinstance(request, Shut):
            self._hear_shut(request, answer)
        elif isinstance(request, GiveKeys):
            if request.piece == (self.piece, self.pieces):
                self.given[request.partition] = answer
        elif isinstance(request, TakeKeys):
            if request.piece is None:
                self.taken.add(request.partition)
            elif request.piece == (self.piece, self.pieces):
                self.piece, self.given = self.piece + 1, {}
        elif isinstance(request, ServeSlots):
            self.served.setdefault(request.partition, set()).update(request.slots)
        elif isinstance(request, HandOverKeys):
            self.looks.setdefault(request.partition, DrainStatus()).counts = None
        else:
            self._hear_moved(request, answer)

    def refuse(self, ask: AskFor, error: SluicewayError) -> bool:
        """Return whether the machine handles that error itself; otherwise the request is to be repeated."""
        if isinstance(ask.request, GiveKeys) and error.code == "too_many_items" and self.pieces < MAX_PIECES:
            self.too_many = True
            self.piece, self.pieces, self.given = 0, 2 * self.pieces, {}
            return True
        return False

    def _hear_shut(self, request: Shut, answer: Shutted) -> None:
        before = self.shut.get(request.partition)
        self.shut[request.partition] = answer
        look = self.looks.setdefault(request.partition, DrainStatus())
        changed = before is None or _progress(before) != _progress(answer)
        look.counts = answer
        look.delay = SOON if changed else min(LATE, max(SOON, 2 * look.delay))
        look.move = True

    def _hear_moved(self, request: MoveOut, answer: Moved) -> None:
        self.moved += answer.arrived
        self.waiting[request.target] = self.waiting.get(request.target, 0) + answer.begun
        look = self.looks.setdefault(request.partition, DrainStatus())
        look.move = False
        if answer.arrived:
            look.delay = 0


def _progress(answer: Shutted) -> Shutted:
    """What must change before more can be done. The items of a partition that is in use change all the time."""
    return answer if answer.shutting != "open" else Shutted("open", moving=answer.moving, busy=answer.busy, due=answer.due)


# ---- start and cancellation ---------------------------------------------------------------------------------------


def begin(record: QueueRecord, rebalance: Rebalance, plan: Plan, now: Millis) -> Change:
    """Start the rebalance: the queue, which has none open, gets the plan's new partitions, still unused."""
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
    """Reverse the rebalance: drain what it created and keep what it drains. Before the flip it ends at once. Raises `not_cancellable`."""
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
    # Put the queue's record as well: every instance sees the change, and no commit decided before it can succeed.
    return Change(msgspec.structs.replace(record, updated_at=now), turned)


def _check_cancellable(rebalance: Rebalance) -> None:
    why = ""
    if not rebalance.is_open:
        why = f"it has ended: {rebalance.state}"
    elif rebalance.state == "cancelling":
        why = "it is already being cancelled"
    elif any(each.partition is not None for each in rebalance.done):
        why = "a partition was already removed"
    elif rebalance.plan.in_order and rebalance.step not in ("create", "flip"):
        why = "the queue is ordered, and its new partition is already in use"
    elif rebalance.plan.by_key and rebalance.step not in ("create", "flip"):
        why = "the queue keeps the items of a key together, and keys have already begun to move"
    if why:
        raise SluicewayError("not_cancellable", f"rebalance {rebalance.id}: {why}")


def failed(rebalance: Rebalance, problem: str, now: Millis) -> Change:
    """End the rebalance as failed: it can never continue."""
    return Change(None, msgspec.structs.replace(_ended(rebalance, "failed", now), problem=problem))


def nothing_to_do(rebalance: Rebalance, now: Millis) -> Change:
    """End the rebalance as done: its turn has come, and the partitions are already as requested."""
    return Change(None, _ended(rebalance, "done", now))


def _ended(rebalance: Rebalance, state: RebalanceState, now: Millis) -> Rebalance:
    return msgspec.structs.replace(rebalance, state=state, step="finish", ended_at=now, updated_at=now, problem="")


# ---- commits ------------------------------------------------------------------------------------------------------


def change(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, now: Millis, by: str) -> Change | None:
    """Return the commit to make now; None until more answers have come."""
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
    """The change that completes the current step, or a part of it, and notes that."""
    noted: list[StepDone] = [StepDone(rebalance.step, now, by, each.partition) for each in removed]
    if rebalance.step != after.step or not after.is_open:
        noted.append(StepDone(rebalance.step, now, by))
    after = msgspec.structs.replace(after, done=(*rebalance.done, *noted), updated_at=now, problem="", retries=0)
    record = None if record is None else msgspec.structs.replace(record, updated_at=now)
    return Change(record, after, removed=tuple(removed), step=rebalance.step)


def _created(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, now: Millis, by: str) -> Change | None:
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
        # Restore the former homes: they all still exist.
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
    """The partition that remembers the keys of each slot, also for slots that are MOVING."""
    if not rebalance.homes:
        return record.slots
    return tuple(before if home == MOVING else home for home, before in zip(record.slots, rebalance.homes, strict=True))


def _shut(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, now: Millis, by: str) -> Change | None:
    plan = rebalance.plan
    if not (all(_is_shut(heard, number) for number in plan.drains) and all(_is_open(heard, number) for number in plan.reopens)):
        return None
    # From now on only items already scheduled or leased can still appear.
    items = sum(heard.shut[number].left for number in plan.drains)
    return _step(rebalance, msgspec.structs.replace(rebalance, step="keys", items=items), record, now, by)


def _is_shut(heard: StepReplies, number: int) -> bool:
    return number in heard.shut and heard.shut[number].shutting != "open"


def _is_open(heard: StepReplies, number: int) -> bool:
    """Whether the partition takes items again and nothing of it is, or will be, in transit to a partition about to be removed."""
    return number in heard.shut and heard.shut[number].shutting == "open" and not heard.shut[number].moving


def _keys(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, now: Millis, by: str) -> Change | None:
    slots = _slots_now(rebalance, record)
    if len(slots) > 1 and (heard.too_many or _are_too_many(rebalance, slots, heard)):
        fewer = msgspec.structs.replace(rebalance, slots_at_once=-(-len(slots) // 2), updated_at=now)
        # Under a new cursor: a home whose answer to the full set was lost must not take the half for a repetition.
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
    """Put a new partition of an ordered queue into use: it takes items, and gives out none while its parents exist."""
    if each.partition in plan.drains:
        return each
    return msgspec.structs.replace(each, state="available", after=each.parents)


def _slots_now(rebalance: Rebalance, record: QueueRecord) -> tuple[int, ...]:
    """The slots to hand over next. Slots that stay with their homes go first and alone: they carry no keys."""
    moving = [place for place, home in enumerate(record.slots) if home == MOVING]
    stay = tuple(place for place in moving if rebalance.homes[place] == rebalance.slots[place])
    return stay or tuple(moving[: rebalance.slots_at_once or None])


def _are_too_many(rebalance: Rebalance, slots: Sequence[int], heard: StepReplies) -> bool:
    if sum(_size(given.keys) for given in heard.given.values()) <= MAX_KEYS_BYTES:
        return False
    return any(_size(keys) > MAX_KEYS_BYTES for keys in keys_by_taker(rebalance, slots, heard).values())


def _size(keys: Mapping[str, bytes]) -> int:
    return sum(map(len, keys)) + sum(map(len, keys.values()))


def keys_by_taker(rebalance: Rebalance, slots: Sequence[int], heard: StepReplies) -> dict[int, dict[str, bytes]]:
    """The keys given for these slots, by the home to which each slot moves."""
    takers = {place: rebalance.slots[place] for place in slots}
    found: dict[int, dict[str, bytes]] = {taker: {} for taker in takers.values()}
    for given in heard.given.values():
        for name, data in given.keys.items():
            taker = takers.get(slot_of_given(name, len(rebalance.slots)))
            if taker is not None:
                found[taker][name] = data
    return found


def _drained(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, now: Millis, by: str) -> Change | None:
    left = [each for each in record.partitions if each.partition in rebalance.plan.drains]
    if not left and not _is_served(rebalance, heard):
        return None
    sealed = [each for each in left if each.partition in heard.shut and heard.shut[each.partition].shutting == "sealed"]
    if left and not sealed:
        return None
    # While the meta store does not answer, all of them may be sealed.
    sealed = sealed[:MAX_REMOVED]
    after = progress(rebalance, heard)
    if len(sealed) == len(left) and _is_served(rebalance, heard):
        after = msgspec.structs.replace(after, step="finish")
    if not sealed:
        return _step(rebalance, after, record, now, by)
    stay = tuple(each for each in record.partitions if each not in sealed)
    return _step(rebalance, after, msgspec.structs.replace(record, partitions=stay), now, by, removed=sealed)


def _is_served(rebalance: Rebalance, heard: StepReplies) -> bool:
    """Whether the new homes of all slots serve them."""
    return all({*slots} == heard.served.get(taker, set()) for taker, slots in _by_home(rebalance.slots, _moved(rebalance)).items())


def _moved(rebalance: Rebalance) -> list[int]:
    """The slots of which items are held back, at first."""
    if not rebalance.plan.by_key:
        return []
    return [place for place, (home, final) in enumerate(zip(rebalance.homes, rebalance.slots, strict=True)) if home != final]


def progress(rebalance: Rebalance, heard: StepReplies) -> Rebalance:
    """The rebalance with the arrived items counted in; once that is committed, the caller subtracts them from `heard.moved`."""
    return msgspec.structs.replace(rebalance, moved=rebalance.moved + heard.moved)


# ---- requests to partitions ---------------------------------------------------------------------------------------


def asks(rebalance: Rebalance, record: QueueRecord, heard: StepReplies) -> list[AskFor]:
    """Return the requests to send now, at most one per partition; all may be sent concurrently."""
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
        drains = [_ask_drain(rebalance, record, heard, each.partition) for each in record.partitions if each.partition in plan.drains]
        return drains + _ask_slots(rebalance, record, heard)
    return []


def _shutting(number: int, shutting: Shutting, cursor: int, delay: Millis = 0) -> AskFor:
    return AskFor(number, Shut(number, shutting, cursor, ASK_TIMEOUT), delay)


def _ask_keys(rebalance: Rebalance, record: QueueRecord, heard: StepReplies) -> list[AskFor]:
    slots, of = _slots_now(rebalance, record), len(rebalance.slots)
    if all(rebalance.homes[place] == rebalance.slots[place] for place in slots):
        return [
            AskFor(taker, TakeKeys(taker, places, of, record.cursor, None, ASK_TIMEOUT))
            for taker, places in _by_home(rebalance.slots, slots).items()
            if taker not in heard.taken
        ]
    if len(slots) == 1 and heard.pieces > 1:
        return _ask_pieces(rebalance, record, heard, slots)
    give = [
        AskFor(giver, GiveKeys(giver, places, of, record.cursor, ASK_TIMEOUT))
        for giver, places in _by_home(rebalance.homes, slots).items()
        if giver not in heard.given
    ]
    if give:
        return give
    keys = keys_by_taker(rebalance, slots, heard)
    return [
        AskFor(taker, TakeKeys(taker, places, of, record.cursor, keys[taker], ASK_TIMEOUT, waits=rebalance.plan.by_key))
        for taker, places in _by_home(rebalance.slots, slots).items()
        if taker not in heard.taken
    ]


def _ask_pieces(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, slots: tuple[int, ...]) -> list[AskFor]:
    """Hand over the keys of a single slot piece by piece, then the slot. Who begins again replaces what is there already."""
    of, cursor, piece = len(rebalance.slots), record.cursor, (heard.piece, heard.pieces)
    giver, taker = rebalance.homes[slots[0]], rebalance.slots[slots[0]]
    if heard.piece == heard.pieces:
        last = TakeKeys(taker, slots, of, cursor, None, ASK_TIMEOUT, waits=rebalance.plan.by_key)
        return [] if taker in heard.taken else [AskFor(taker, last)]
    if giver not in heard.given:
        return [AskFor(giver, GiveKeys(giver, slots, of, cursor, ASK_TIMEOUT, piece))]
    return [AskFor(taker, TakeKeys(taker, slots, of, cursor, heard.given[giver].keys, ASK_TIMEOUT, piece=piece))]


def _by_home(homes: Sequence[int], slots: Sequence[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for place in slots:
        found[homes[place]] = (*found.get(homes[place], ()), place)
    return found


def _ask_slots(rebalance: Rebalance, record: QueueRecord, heard: StepReplies) -> list[AskFor]:
    """Have the new homes of slots serve them once the former ones have none of their items, and ask those that stay whether they have."""
    there = {each.partition for each in record.partitions}
    drained = {
        place
        for place in _moved(rebalance)
        if rebalance.homes[place] not in there
        or (rebalance.homes[place] in heard.shut and place not in heard.shut[rebalance.homes[place]].busy)
    }
    serve = [
        AskFor(taker, ServeSlots(taker, tuple(free), record.cursor, ASK_TIMEOUT))
        for taker, places in _by_home(rebalance.slots, sorted(drained)).items()
        if (free := [place for place in places if place not in heard.served.get(taker, ())])
    ]
    busy = {rebalance.homes[place] for place in _moved(rebalance) if place not in drained} - {*rebalance.plan.drains}
    asked = {each.partition for each in serve}
    return serve + [_ask_drain(rebalance, record, heard, number) for number in sorted(busy - asked)]


def _ask_drain(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, number: int) -> AskFor:
    """Check what is left in the partition, and seal it if it is to be removed and nothing is; between two checks move items where the mode
    calls for it."""
    look, wanted = heard.looks.get(number), _wanted(rebalance, number)
    if look is None or look.counts is None:
        return _shutting(number, wanted, record.cursor)
    counts = look.counts
    if wanted == "sealed" and not counts.left and counts.keys:
        # Only these keys still keep it from being sealed.
        return AskFor(number, HandOverKeys(number, record.cursor, ASK_TIMEOUT))
    copies = rebalance.drain == "copy" and not rebalance.plan.drains_naturally
    move = _move(rebalance, record, heard, number, counts, copies) if look.move and not counts.moving else None
    if move is not None:
        return AskFor(number, move)
    many = counts.left > MAX_COUNTED and not copies and wanted == "sealed"
    return _shutting(number, wanted, record.cursor, LATE if many else look.delay)


def _wanted(rebalance: Rebalance, number: int) -> Shutting:
    """What a partition whose items are to leave is to be in the end."""
    return "sealed" if number in rebalance.plan.drains else "open"


def _move(rebalance: Rebalance, record: QueueRecord, heard: StepReplies, number: int, counts: Shutted, copies: bool) -> MoveOut | None:
    """The next move out of that partition, if there is one. What has a key that moves goes to the key's new home."""
    target, slots = _target(record, heard, number), None
    if rebalance.plan.by_key:
        if counts.due:
            target = rebalance.slots[counts.due[0]]
        pairs = enumerate(zip(rebalance.homes, rebalance.slots, strict=True))
        slots = tuple(place for place, pair in pairs if pair == (number, target))
    if target is None or not (counts.movable or (copies and counts.ready)):
        return None
    return MoveOut(number, target, MOVE_ITEMS, record.cursor, ASK_TIMEOUT, scheduled=bool(counts.movable), slots=slots)


def _target(record: QueueRecord, heard: StepReplies, number: int) -> int | None:
    """Target of moved items: the emptiest replacement of the partition, or else the emptiest partition that stays."""
    able = [each for each in record.partitions if each.state == "available"]
    heirs = [each for each in able if number in each.parents]
    return min((each.partition for each in heirs or able), key=lambda other: (heard.waiting.get(other, 0), other), default=None)
