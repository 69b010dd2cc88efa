"""Records of queues and rebalances in a simulated cluster, checked at each commit of its meta store.

S8  A rebalance records facts. A partition is removed when it is sealed and empty, and nothing is on its way there; numbers are not
    given again; a slot's home exists; a queue has one rebalance at a time.
S9  The coordinator alone records steps. A rebalance ends with the partitions of its plan, or with those from before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from simulation.cluster_store import Kept
from simulation.promises import check
from sluiceway.cluster.queue_changes import DROPPING
from sluiceway.cluster.rebalance_records import COORDINATOR, ENDED, OPEN, Elected
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.model.meta import View
from sluiceway.model.queue import MOVING, QueueRecord, decode_queue
from sluiceway.model.rebalance import Rebalance, decode_rebalance
from sluiceway.ports.partition_store import PartitionRef

Step = Callable[[Rebalance, str], None]


class RecordWatch:
    """Follows the commits. `stored`: what partitions store. `on_step` is called with each commit of an open rebalance, and its author."""

    def __init__(self, stored: Mapping[PartitionRef, Kept], on_step: Step) -> None:
        self.stored = stored
        self.on_step = on_step
        self.given: dict[str, set[int]] = {}
        """Partition numbers that each queue has ever had."""
        self.before: dict[str, set[int]] = {}
        """Partitions before each rebalance, by its id."""
        self.cancels: set[str] = set()
        """Rebalances whose cancellation was requested."""
        self.tally: Counter[str] = Counter()

    def follow(self, old: View, new: View) -> None:
        """Check one commit."""
        for key, entry in new.prefix(QUEUE).items():
            was = old.entries.get(key)
            if was is None or was.stamp != entry.stamp:
                self._queue(None if was is None else decode_queue(was.value), decode_queue(entry.value))
        holder = old.entries.get(COORDINATOR)
        elected = "" if holder is None else msgspec.json.decode(holder.value, type=Elected).name
        if holder is not None and new.entries[COORDINATOR].stamp != holder.stamp:
            self.tally["coordinators"] += 1
        for key, entry in new.prefix(OPEN).items():
            was = old.entries.get(key)
            if was is None or was.stamp != entry.stamp:
                self._open(None if was is None else decode_rebalance(was.value), decode_rebalance(entry.value), new, elected)
        for key, entry in new.prefix(ENDED).items():
            if key not in old.entries:
                was = old.entries.get(OPEN + key.removeprefix(ENDED))
                check(was is not None, "a rebalance ends that was not open")
                assert was is not None
                check(OPEN + key.removeprefix(ENDED) not in new.entries, "a rebalance has ended and is open")
                self._ended(decode_rebalance(was.value), decode_rebalance(entry.value), new, elected)
        for key in old.prefix(OPEN):
            check(key in new.entries or ENDED + key.removeprefix(OPEN) in new.entries, "the record of an open rebalance is gone")

    # ---- queues -----------------------------------------------------------------------------------------------

    def _queue(self, old: QueueRecord | None, new: QueueRecord) -> None:
        numbers = {each.partition for each in new.partitions}
        known = self.given.setdefault(new.incarnation, set())
        had = set() if old is None else {each.partition for each in old.partitions}
        check(len(numbers) == len(new.partitions) > 0, f"{new.queue_name} has partitions {new.partitions}")
        check(not (numbers - had) & known, f"partition numbers {sorted((numbers - had) & known)} of {new.queue_name} are given again")
        known |= numbers
        check(new.given > max(known), f"{new.queue_name} forgets which partition numbers it has given")
        check(set(new.slots) <= numbers | {MOVING}, f"keys of {new.queue_name} have homes that are not there")
        if new.rebalance is None:
            states = {each.state for each in new.partitions}
            check(states <= {"available", "paused"} and MOVING not in new.slots, f"{new.queue_name} is left half-way: {new}")
        for each in () if old is None else old.partitions:
            if each.partition not in numbers:
                self._removed(new, each.partition)
        if old is not None:
            check(new.cursor >= old.cursor, f"the cursor of {new.queue_name} goes back")

    def _removed(self, record: QueueRecord, number: int) -> None:
        """Check a removal: the partition holds nothing, is sealed or unused, and is no transfer's target."""
        self.tally["removed"] += 1
        kept = self.stored.get(PartitionRef(record.incarnation, number))
        name = f"partition {number} of {record.queue_name}"
        if kept is not None:
            scene = kept.store.scene()
            check(not scene.alive and not scene.leaving, f"{name} is removed with {[*scene.alive, *scene.leaving]}")
            unused = not scene.header.produced and not scene.header.moved_in
            check(scene.header.shut == 2 or unused, f"{name} is removed and was not sealed")
        for ref, other in self.stored.items():
            if ref.incarnation == record.incarnation:
                for transfer in other.store.scene().transfers.values():
                    check(transfer.moves_to != number, f"{name} is removed while items of {ref.partition} are moved to it")

    # ---- rebalances -------------------------------------------------------------------------------------------

    def _record_of(self, rebalance: Rebalance, view: View) -> QueueRecord:
        return decode_queue(view.entries[QUEUE + rebalance.queue_name].value)

    def _open(self, old: Rebalance | None, new: Rebalance, view: View, elected: str) -> None:
        record = self._record_of(new, view)
        check(new.is_open, "a rebalance has ended and is recorded as open")
        if new.state == "waiting":
            return
        check(record.rebalance == new.id, f"{record.queue_name} does not know its rebalance {new.id}")
        if new.id not in self.before:
            made = {each.partition for each in new.plan.creates}
            self.before[new.id] = {each.partition for each in record.partitions} - made
        check(
            old is None or new.state == old.state or old.state == "waiting" or new.id in self.cancels,
            f"{new.id} is {new.state} for nothing",
        )
        self._by_coordinator(old, new, elected)
        self.on_step(new, elected)

    def _by_coordinator(self, old: Rebalance | None, new: Rebalance, elected: str) -> None:
        done = () if old is None else old.done
        check(new.done[: len(done)] == done, "a rebalance forgets what is done")
        for each in new.done[len(done) :]:
            self.tally[each.kind] += 1
            check(each.by == elected, f"{each.by} has done {each.kind}, and {elected} is the coordinator")

    def _ended(self, old: Rebalance, new: Rebalance, view: View, elected: str) -> None:
        record = self._record_of(new, view)
        check(not new.is_open, "a rebalance is recorded as ended and has not")
        if new.state != "cancelled" or old.state == "cancelling":
            self._by_coordinator(old, new, elected)
        self.tally[new.state] += 1
        there = {each.partition for each in record.partitions}
        if old.state == "waiting":
            check(new.state in ("done", "failed") or new.id in self.cancels, f"{new.id} is {new.state} for nothing")
            return
        check(record.rebalance is None, f"{record.queue_name} has a rebalance that has ended")
        if new.state == "done":
            wanted = {*new.plan.keeps, *(each.partition for each in new.plan.creates)}
        else:
            check(new.state == "cancelled" and new.id in self.cancels, f"rebalance {new.id} is {new.state}: {new.problem}")
            wanted = self.before[new.id]
        check(there == wanted, f"{record.queue_name} has partitions {sorted(there)} after its rebalance, and was to have {sorted(wanted)}")
        placed = {each.partition: each.backend for each in record.partitions}
        for each in new.plan.creates if new.state == "done" else ():
            check(placed[each.partition] == each.backend, f"partition {each.partition} lies in another backend than was planned")

    # ---- final checks -----------------------------------------------------------------------------------------

    def half_way(self, view: View) -> str | None:
        """After all rebalances: return a partition whose stored state contradicts its record, None without one."""
        for record in (decode_queue(entry.value) for entry in view.prefix(QUEUE).values()):
            for each in record.partitions:
                kept = self.stored.get(PartitionRef(record.incarnation, each.partition))
                gate = None if kept is None else kept.store.look()
                if gate is not None and gate.log.header.shut:
                    return f"partition {each.partition} of {record.queue_name} is {each.state}, and shut"
                if gate is not None and gate.log.header.held_slots:
                    return f"partition {each.partition} of {record.queue_name} holds slots back"
                own = [place for place, home in enumerate(record.slots) if home == each.partition]
                bits = int.from_bytes(gate.log.header.closed_slots, "little") if gate is not None else 0
                if any(bits >> place & 1 for place in own):
                    return f"partition {each.partition} of {record.queue_name} is the home of keys that it does not take"
        return None

    def left_over(self, view: View) -> str | None:
        """After all rebalances: return leftover data or notes, None without any."""
        there = {
            PartitionRef(record.incarnation, each.partition)
            for record in (decode_queue(entry.value) for entry in view.prefix(QUEUE).values())
            for each in record.partitions
        }
        # A late opening leaves nothing but a fence.
        surplus = sorted(ref for ref in set(self.stored) - there if self.stored[ref].store.header is not None)
        if surplus:
            return f"the data of {surplus} is still there"
        notes = sorted(view.prefix(DROPPING))
        return f"data is still to be dropped: {notes}" if notes else None
