"""Planted bugs of rebalances: each removes one safeguard against loss, duplication or disorder."""

from __future__ import annotations

from typing import Any

import msgspec

from simulation.planting import Bug, shelf
from sluiceway.cluster import coordinator, transfer_sender
from sluiceway.cluster.coordinator import Coordinator
from sluiceway.cluster.rebalance_records import RebalanceRecords
from sluiceway.core.partition.admission import Admission
from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.transfers import TransferTable
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.core.rebalance import steps
from sluiceway.core.rebalance.steps import StepReplies
from sluiceway.model.peers import GiveKeys, Shut
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import MOVE_GROUP, ProduceKey

BUGS: list[Bug] = []
bug = shelf(BUGS)
HARD: list[Bug] = []
hard = shelf(HARD)
"""Bugs outside the bank, which dozens of histories do not show: they need coincidences too rare for random histories."""


@bug(KeyMemory, "note_answers")
def notes_no_answer_that_it_knows(original: Any) -> Any:
    """A home does not record a closing target's answers for keys that it already has in memory."""

    def note(self: Any, given: Any) -> None:
        known = {name for name in given if name in self.records and not any(seen.is_intent for seen in self.records[name].seen.values())}
        original(self, {name: data for name, data in given.items() if name not in known})

    return note


# ---- shutting and sealing -------------------------------------------------------------------------------------


@bug(PartitionExecutor, "_rebalance")
def goes_by_the_record_alone(original: Any) -> Any:
    """Partitions only claim to be shut, as if the state `draining` in their record were enough."""

    def do(self: Any, work: Any, now: Any) -> Any:
        if isinstance(work, Shut) and work.shutting == "read_only":
            return self._shutted()._replace(shutting="read_only")
        return original(self, work, now)

    return do


@bug(StepReplies, "_hear_shut")
def removes_what_was_not_sealed(original: Any) -> Any:
    """A partition is removed once it has no ready or leased items, sealed or not."""

    def hear(self: Any, request: Any, answer: Any) -> None:
        if request.shutting == "sealed" and not answer.ready and not answer.leased:
            answer = answer._replace(shutting="sealed")
        original(self, request, answer)

    return hear


@bug(Admission, "is_empty")
def seals_what_has_scheduled_items(_original: Any) -> Any:
    """A partition is sealed although it has scheduled items."""
    return property(lambda self: not self._log.extents)


@bug(PartitionExecutor, "_rebalance")
def seals_what_has_transfers(original: Any) -> Any:
    """A partition is sealed although items of it are in transfers."""

    def rebalance(self: Any, work: Any, now: int) -> Any:
        log = self.partition.log
        extents = log.extents
        if isinstance(work, Shut) and not log.ready_count and not self.partition.leased_count:
            log.extents = {}
        try:
            return original(self, work, now)
        finally:
            log.extents = extents

    return rebalance


@bug(Admission, "follow_cursor")
def obeys_who_is_coordinator_no_more(_original: Any) -> Any:
    """A late request under an earlier cursor is still carried out."""
    return lambda _self, _cursor: None


# ---- keys -----------------------------------------------------------------------------------------------------


@bug(steps, "keys_by_taker")
def hands_over_no_keys(original: Any) -> Any:
    """A slot's new home is told of no keys."""
    return lambda *given: {taker: {} for taker in original(*given)}


@bug(Admission, "_is_closed")
def goes_on_as_the_home(_original: Any) -> Any:
    """A former home accepts keys of slots that it has given away."""
    return lambda _self, _key: False


@bug(StepReplies, "hear")
def names_a_home_that_knows_nothing(original: Any) -> Any:
    """Slots get their new homes as soon as the former homes have reported their keys."""

    def hear(self: Any, ask: Any, answer: Any) -> None:
        original(self, ask, answer)
        if isinstance(ask.request, GiveKeys):
            self.taken |= set(range(1_000))

    return hear


@bug(Admission, "take_keys")
def takes_keys_again(original: Any) -> Any:
    """Late keys that were taken long ago replace newer ones."""

    def take(self: Any, *args: Any, **options: Any) -> None:
        self._log.header.taken_cursor = self._log.header.given_cursor = -1
        original(self, *args, **options)

    return take


@hard(Admission, "note_answers")
def notes_answers_as_a_former_home(_original: Any) -> Any:
    """A former home accepts the answers of a closing target, which only the current home may."""
    return lambda self, keys: self._keys.note_answers(keys)


# ---- order ----------------------------------------------------------------------------------------------------


@bug(QueueRecord, "holds_back")
def serves_before_its_parents_are_gone(_original: Any) -> Any:
    """The new partition of an ordered queue is leased from at once."""
    return lambda _self, _each: False


@hard(steps, "_flip")
def takes_items_before_the_old_one_is_shut(original: Any) -> Any:
    """The new partition of an ordered queue accepts items from the flip on."""

    def flip(before: Any, *args: Any) -> Any:
        change = original(before, *args)
        if not before.plan.in_order:
            return change
        partitions = tuple(steps._in_use(before.plan, each) for each in change.record.partitions)
        return change._replace(record=msgspec.structs.replace(change.record, partitions=partitions))

    return flip


# ---- moves ----------------------------------------------------------------------------------------------------


def moved_with(**lost: Any) -> Any:
    """Return a plant under which moved items lose these fields."""

    def change(original: Any) -> Any:
        def arrive(self: Any, batch: Any, lives: Any, now: Any) -> None:
            original(self, batch, [life._replace(**lost) for life in lives], now)

        return arrive

    return change


@bug(TransferTable, "arrive")
def moves_without_attempts(original: Any) -> Any:
    """A moved item starts over with no attempts."""
    return moved_with(attempts=0)(original)


@bug(TransferTable, "arrive")
def moves_without_due_times(original: Any) -> Any:
    """A moved scheduled item is ready at once."""
    return moved_with(due_at=0)(original)


@bug(TransferTable, "arrive")
def moves_without_expiry(original: Any) -> Any:
    """A moved item never expires."""
    return moved_with(expires_at=0)(original)


@bug(transfer_sender, "_keyed")
def moves_under_one_key(original: Any) -> Any:
    """All moves share one key."""

    def keyed(group: str, *args: Any) -> Any:
        for key, piece in original(group, *args):
            yield (ProduceKey(group, group, 1) if group.startswith(MOVE_GROUP) else key), piece

    return keyed


@hard(steps, "_is_open")
def removes_the_target_of_a_move(_original: Any) -> Any:
    """A cancellation drains partitions while items are in transit to them."""
    return lambda heard, number: number in heard.shut and heard.shut[number].shutting == "open"


# ---- coordinators and records ---------------------------------------------------------------------------------


@bug(Coordinator, "_elected")
def takes_itself_for_the_coordinator(original: Any) -> Any:
    """Any instance that looks carries out open rebalances, beside the coordinator."""

    async def elected(self: Any, elected: Any, stamp: Any) -> Any:
        return stamp or await original(self, elected, stamp)

    return elected


@bug(QueueRecord, "given")
def gives_numbers_again(_original: Any) -> Any:
    """A new partition gets the number of a removed one."""
    return property(lambda self: 1 + max(each.partition for each in self.partitions))


@hard(coordinator, "drop_after")
def drops_data_at_once(_original: Any) -> Any:
    """A removed partition's data goes while an owner that missed the removal may still reopen it as a new one."""
    return lambda look: 0


@bug(RebalanceRecords, "look")
def leaves_data_to_who_removed_it(original: Any) -> Any:
    """Data of a removed partition stays if its remover died or never heard that the removal was recorded."""

    async def look(self: Any) -> Any:
        return (await original(self))._replace(dropping={})

    return look
