"""Planted bugs of order, fairness and limits by key: each removes one rule of ADR 53."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pyroaring import BitMap

from simulation.planting import Bug, shelf
from sluiceway.cluster import produce_by_key
from sluiceway.core.partition import partition, slot_contents
from sluiceway.core.partition.idempotency_keys import KeyMemory
from sluiceway.core.partition.key_flows import KeyFlows
from sluiceway.core.partition.partition import Partition
from sluiceway.core.partition.segment_log import SegmentLog

BUGS: list[Bug] = []
bug = shelf(BUGS)


# ---- order ----------------------------------------------------------------------------------------------------


@contextmanager
def at_the_end(flows: KeyFlows | None) -> Iterator[None]:
    """For the length of the block, what enters the line goes behind all of its key."""
    if flows is None:
        yield
        return

    def insert(number: int, segment: int) -> None:
        last = flows._last[number]
        flows._next[segment] = -1
        flows._last[number] = segment
        if last == -1:
            flows._first[number] = segment
        else:
            flows._next[last] = segment

    vars(flows)["_insert"] = insert
    try:
        yield
    finally:
        del vars(flows)["_insert"]


def puts_at_the_end(verdict: str, original: Any) -> Any:
    def put_back(self: Any, lease: Any, positions: Any, disposition: Any, now: Any) -> Any:
        with at_the_end(self.log.flows if disposition.verdict == verdict else None):
            return original(self, lease, positions, disposition, now)

    return put_back


@bug(Partition, "_put_back")
def a_retry_goes_to_the_end(original: Any) -> Any:
    """A retried item comes after the others of its key."""
    return puts_at_the_end("retry", original)


@bug(Partition, "_put_back")
def a_release_goes_to_the_end(original: Any) -> Any:
    """A released item comes after the others of its key."""
    return puts_at_the_end("release", original)


@bug(Partition, "tick")
def an_expiry_goes_to_the_end(original: Any) -> Any:
    """An item whose lease runs out comes after the others of its key."""

    def tick(self: Any, *args: Any) -> Any:
        with at_the_end(self.log.flows):
            return original(self, *args)

    return tick


@bug(SegmentLog, "schedule")
def a_delay_lets_others_pass(original: Any) -> Any:
    """An item that is retried with a delay does not hold up its key."""

    def schedule(self: Any, *args: Any, max_lease_size: int = 0, is_back: bool = False) -> None:
        original(self, *args[:5], *(args[5:6] or [max_lease_size]))

    return schedule


@bug(partition, "behind_in_flows")
def leaves_the_rest_of_a_run(_original: Any) -> Any:
    """What is behind a failed item in its run stays leased."""
    return lambda _lease, _positions: BitMap()


@bug(Partition, "lease")
def gives_runs_to_all(original: Any) -> Any:
    """A lease gets several items of a key, although its client did not ask for runs."""

    def lease(self: Any, want: Any, client_id: Any, deadline: Any, now: Any, *args: Any, runs: bool = False) -> Any:
        return original(self, want, client_id, deadline, now, *args[:4], runs=True)

    return lease


@bug(produce_by_key, "parts_of")
def sorts_the_other_way(original: Any) -> Any:
    """Items of a key are stored in the reverse of the order in which their batch has them."""

    def parts(record: Any, request: Any) -> Any:
        turned = request.batch.take(list(range(request.batch.num_rows))[::-1])
        last = request.batch.num_rows - 1
        return [
            (each._replace(numbers=[last - number for number in each.numbers]), part)
            for each, part in original(record, replace(request, batch=turned))
        ]

    return parts


# ---- after a takeover -----------------------------------------------------------------------------------------


def follow_without_leases(original: Any, holds: Any) -> Any:
    """Of rules that `holds`, the leases that are there when a partition begins to follow them go for nothing, then and when they end."""

    def follow(self: Any, rules: Any, leases: Any) -> None:
        leases = list(leases)
        original(self, rules, () if holds(rules) else leases)
        if holds(rules):
            forgotten, settled = {lease.number for lease in leases}, self.flows.settled
            self.flows.settled = lambda lease, positions: None if lease.number in forgotten else settled(lease, positions)

    return follow


@bug(SegmentLog, "follow_keys")
def takes_leased_keys_for_free(original: Any) -> Any:
    """After a takeover, or a change of the rules, keys with live leases are served."""
    return follow_without_leases(original, lambda rules: rules.order)


@bug(SegmentLog, "follow_keys")
def counts_anew_after_a_takeover(original: Any) -> Any:
    """After a takeover, or a change of the rules, what is leased does not count towards its key's limit."""
    return follow_without_leases(original, lambda rules: rules.concurrency and not rules.order)


@bug(SegmentLog, "follow_keys")
def delays_end_with_a_takeover(original: Any) -> Any:
    """After a takeover, returned items do not hold up their keys through their delay."""

    def follow(self: Any, rules: Any, leases: Any) -> None:
        for due in self.dues.values():
            due.is_back = False
        original(self, rules, leases)

    return follow


# ---- limits ---------------------------------------------------------------------------------------------------


@bug(KeyFlows, "settled")
def never_gives_a_limit_back(original: Any) -> Any:
    """What was leased counts towards its key's limit for good."""

    def settled(self: Any, lease: Any, positions: Any) -> None:
        if not self.rules.concurrency:
            original(self, lease, positions)

    return settled


@bug(KeyFlows, "_recount")
def looks_at_the_limit_alone(original: Any) -> Any:
    """A key may always have as many items leased as its limit says, whatever is leased already."""

    def recount(self: Any, number: int) -> None:
        flight = self._flight[number]
        self._flight[number] = flight if self.rules.order else 0
        original(self, number)
        self._flight[number] = flight

    return recount


# ---- homes ----------------------------------------------------------------------------------------------------


@bug(produce_by_key, "slots_of")
def each_instance_has_its_own_homes(original: Any) -> Any:
    """Two instances send the items of a key to different partitions."""

    def homes(record: Any) -> Any:
        slots = original(record)
        instance: Any = asyncio.get_running_loop()
        first = zlib.crc32(instance.process.name.encode()) % len(slots)
        return slots[first:] + slots[:first]

    return homes


@bug(produce_by_key, "parts_of")
def only_the_first_part_has_its_key(original: Any) -> Any:
    """The parts of a divided produce but the first are stored without its idempotency key, and again when it is repeated."""

    def parts(record: Any, request: Any) -> Any:
        first, *others = original(record, request)
        return [first, *((each, replace(part, key=None)) for each, part in others)]

    return parts


@bug(produce_by_key, "_error")
def takes_a_part_for_the_whole(_original: Any) -> Any:
    """A produce of which one part was refused is said to be refused, although others are stored."""
    return lambda errors, _parts, _request: errors[0]


# ---- rebalances -----------------------------------------------------------------------------------------------


@bug(KeyFlows, "hold_back")
def serves_before_the_former_home_is_drained(_original: Any) -> Any:
    """The new home of a key serves it at once."""
    return lambda _self, _slots, _of, _now: None


@bug(SegmentLog, "follow_keys")
def forgets_what_it_holds_back(original: Any) -> Any:
    """After a takeover, the new home of a key serves it at once."""

    def follow(self: Any, rules: Any, leases: Any) -> None:
        held, self.header.held_slots = self.header.held_slots, b""
        original(self, rules, leases)
        self.header.held_slots = held

    return follow


@bug(slot_contents, "stays")
def moves_what_holds_up_its_key(_original: Any) -> Any:
    """A retry that waits for its delay is moved, behind what its key has at its new home."""
    return lambda _log, _due: False


@bug(KeyMemory, "_add_part")
def hands_over_no_parts(_original: Any) -> Any:
    """A key's new home does not know which calls its former one has stored."""
    return lambda _self, _name, _given: None


# ---- fairness -------------------------------------------------------------------------------------------------


@bug(KeyFlows, "_next_line")
def serves_fresh_keys_first(_original: Any) -> Any:
    """While new keys come, those that wait get no turn."""
    return lambda self: self._fresh or self._turn


@bug(KeyFlows, "take")
def finishes_a_key_first(original: Any) -> Any:
    """A key is served until nothing of it waits."""

    def take(self: Any, taking: Any) -> Any:
        order = sorted(self._turn, key=lambda number: -self._waiting[number])
        self._turn.clear()
        self._turn.extend(order)
        return original(self, taking)

    return take
