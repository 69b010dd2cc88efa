"""Durable history of every item of one partition: each step must be a legal one and have a cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable
from typing import NamedTuple

from simulation.causes import Asks
from simulation.known_items import Item, Way
from simulation.promises import check
from simulation.scene import DUE, LEASED, READY, Place, Scene
from sluiceway.contract.item_answers import IgnoredReason
from sluiceway.core.partition.partition_states import allows
from sluiceway.core.partition.records import REDRIVEN, Header, LeaseState, partition_target
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.ids import ItemId
from sluiceway.kernel.limits import MAX_CLOCK_STEP
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Disposition

FOR_EVER: Millis = 10**15
_TIMED = ("produced", "leased", "completed", "retried", "expired", "released", "cleared")
"""Header counters of steps whose time is noted."""


class Cycle(NamedTuple):
    """The cycle that made a change set: its time, its settings, and whether the circuit breaker let nothing through."""

    now: Millis
    record: QueueRecord
    blocked: bool = False


class ItemHistory:
    """Follows the durable steps of one partition.

    `items`: all items ever sent to its queue. `heard`: leases known to a client. `queue`: the queue's name, if it differs from the
    incarnation. `grace`: a lease may outlive its deadline after a change of owner.
    """

    def __init__(
        self,
        incarnation: str,
        partition: int,
        items: dict[str, Item],
        asks: Asks,
        heard: Container[tuple[int, int]],
        *,
        queue: str = "",
        grace: bool = False,
    ) -> None:
        self.incarnation = incarnation
        self.queue = queue or incarnation
        self.grace = grace
        self.partition = partition
        self.name = f"{incarnation}.{partition}"
        self.items = items
        self.asks = asks
        self.heard = heard
        self.ways: dict[int, Way] = {}
        self.dispositions: dict[int, set[IgnoredReason]] = {}
        """Reasons that a settle of an offset may be told once its item has left."""
        self.clients: dict[int, str] = {}
        """Client of each lease."""
        self.newest: set[int] = set()
        """Leases taken in the last cycle."""
        self._limits: dict[str, int] = {}
        """Maximum size of the next lease of an item whose last lease ran out."""
        self._furthest = -1
        self.tally: Counter[str] = Counter()
        """Count of all steps so far, by kind."""
        self._steps: Counter[str] = Counter()
        self._unsure = False
        """Whether several causes may have had the same effect in this cycle."""
        self.old = self.new = Scene(Header(), {}, {}, {}, {})

    def follow(self, old: Scene, new: Scene, cycle: Cycle) -> None:
        """Check one change set that has become durable. Raises BrokenPromiseError."""
        self.old, self.new, self.cycle, self.record = old, new, cycle, cycle.record
        self._check_time(old.header, new.header, cycle.now)
        self._steps.clear()
        self._unsure = False
        left = {payload: number for number, payload in new.leaving if (number, payload) not in old.leaving}
        for number in sorted({*left.values()}):
            lease = new.transfers[number]
            target = self.record.dead_queue if lease.target is None else lease.target
            self.ways[number] = Way(self.name, target, lease.target_incarnation)
        for payload, was in old.alive.items():
            if payload not in new.alive:
                self._leaves(self.items[payload], was, left.pop(payload, None))
        before = {payload: number for number, payload in old.leaving if number not in new.transfers}
        for payload, number in left.items():
            if payload in before:
                self._goes_elsewhere(payload, before[payload], number)
                continue
            check(payload not in new.alive and new.transfers[number].moves_to is not None, "an item goes to another queue and stays")
            # The item has come in the same cycle.
            place = _place_beyond(new, number, payload)
            self._moves(payload, None, place)
            self._goes_over(self.items[payload], place, number)
        for payload, place in new.alive.items():
            was_at = old.alive.get(payload)
            if was_at != place:
                self._moves(payload, was_at, place)
        for number, payload in old.leaving:
            if (number, payload) not in new.leaving and payload not in left:
                self._is_let_go(number, payload)
        self._check_leases()
        self._check_counters()
        self.tally.update(self._steps)

    def before(self, offset: int) -> str | None:
        """Return the client that held the item when the last cycle began."""
        lease = next((each.lease for each in self.old.alive.values() if each.offset == offset and each.lease), 0)
        return self.clients.get(lease)

    def _check_time(self, old: Header, new: Header, now: Millis) -> None:
        """Check the partition's noted time, which may be slightly ahead of its owner's. All decisions follow the owner's."""
        if any(getattr(old, name) != getattr(new, name) for name in _TIMED):
            check(now <= new.now <= now + MAX_CLOCK_STEP, "a partition's time is not that of its owner")
        check(new.now >= old.now or old.now > now + MAX_CLOCK_STEP, "a partition's time has gone back")

    # ---- within the partition ---------------------------------------------------------------------------------

    def _moves(self, payload: str, was: Place | None, place: Place) -> None:
        item = self.items.get(payload)
        check(item is not None, f"a payload that nobody sent: {payload!r}")
        assert item is not None
        if was is None:
            self._comes(item, place)
        elif was.kind == LEASED:
            check(was.lease != place.lease, f"{payload} has changed within its lease")
            self._comes_back(item, was, place)
        else:
            check(place.kind != DUE and (was.kind == DUE or place.kind == LEASED), f"{payload} has moved in the line")
            check(was.due_at <= self.cycle.now, f"{payload} was served before it was due")
            check(was.kind == DUE or place.offset == was.offset, f"{payload} has moved in the line")
            check(place.attempts == was.attempts, f"{payload} has other attempts")
        if was is not None:
            check(place.expires_at == was.expires_at, f"{payload} expires at another time")
            check(place.first == was.first, f"{payload} has changed its row")
        if place.kind == LEASED:
            self._is_leased(item, place)

    def _comes(self, item: Item, place: Place) -> None:
        """Check an item that was not here before."""
        way = item.way
        if way is not None and way.places:
            self._comes_over(item, way, place)
        elif way is not None and way.source == self.name and way.nowhere:
            before = next(self.old.leaving[number, item.payload] for number, each in self.ways.items() if each is way)
            check(place.attempts == before.attempts and place.expires_at == before.expires_at, f"{item.payload} was called back changed")
            self._steps["called back"] += 1
        else:
            if way is not None:
                check(way.target == self.queue, f"{item.payload} arrives in another queue")
                way.arrived.add(item.payload)
                self._steps["arrived"] += 1
            else:
                self._is_born(item, place)
            timeout, due = self.record.expire_timeout, place.due_at or self.cycle.now
            check(place.expires_at == (due + timeout if timeout else 0), f"{item.payload} is to expire at another time")
            check(place.attempts == 0, f"{item.payload} begins with attempts")
            self._steps["produced"] += 1
        item.way, item.home = None, self.name

    def _is_born(self, item: Item, place: Place) -> None:
        check(not item.ended, f"{item.payload} comes back after its end")
        check(item.origin is None, f"{item.payload} is duplicated")
        check(item.queue == self.queue, f"{item.payload} turns up in another queue")
        own = self.record.partition(self.partition)
        check(own is not None and allows(self.record, own).produce, f"a partition takes items that must not: {own}")
        check(not self.old.header.shut, f"{item.payload} was taken by a partition that is shut")
        check(item.batch.may_exist, f"{item.payload} exists although its produce was refused")
        check(place.due_at == item.due_at or (not place.due_at and item.due_at <= self.cycle.now), f"{item.payload} is due at another time")
        item.origin = str(ItemId(self.incarnation, self.partition, place.first))

    def _ran_out(self, lease: int) -> bool:
        deadline = self.old.leases[lease].deadline
        return deadline is not None and deadline <= self.cycle.now

    def _comes_back(self, item: Item, was: Place, place: Place) -> None:
        """Check an item that has left a lease and is offered again. Each lease counts as an attempt unless released."""
        counted = place.attempts - was.attempts
        asked = self.asks.of(self.partition, was.lease, was.offset)
        ran_out = self._ran_out(was.lease)
        retries = [each for each in asked if each.verdict == "retry"]
        if ran_out and not (self.grace and (not counted or (place.kind == DUE and retries))):
            check(counted == 1, f"{item.payload}: its lease ran out and does not count")
            self._check_wait(item, was, place, [Disposition("retry")], "its lease ran out, and it is served")
            disposition: IgnoredReason = "expired"
            if not (self.grace and asked):
                self._limits[item.payload] = max(1, self.old.leases[was.lease].open // 2)
        else:
            if counted:
                check(counted == 1, f"{item.payload} has other attempts")
                check(bool(retries), f"{item.payload} is offered again without a cause")
                self._check_wait(item, was, place, [*retries, *([Disposition("retry")] if ran_out else [])], "it is retried")
            elif self._may_be_spared(asked):
                self._steps["spared"] += 1
            elif not any(each.verdict == "release" for each in asked) and not self._is_behind(item, was):
                check(self._may_be_given_back(was.lease), f"{item.payload} is offered again without a cause")
                self._steps["given back"] += 1
            check(not counted or not self._is_spent(place.attempts), f"{item.payload} is offered beyond max_attempts")
            disposition = "retried" if counted or self._may_be_spared(asked) else "released"
            if disposition == "retried":
                self._limits.pop(item.payload, None)
        if disposition == "expired":
            check(not self._is_spent(place.attempts), f"{item.payload} is offered beyond max_attempts")
        self._steps[disposition] += 1
        self.dispositions[was.offset] = {disposition}
        if disposition == "retried" and not counted and any(each.verdict == "release" for each in asked):
            # A retry that was spared, or a release: of the lease that it was only staged in, or of the item before it.
            self.dispositions[was.offset].add("released")
            self._unsure = True
        if ran_out and counted and self.grace and retries:
            self.dispositions[was.offset] |= {"expired", "retried"}
            self._unsure = True

    def _is_behind(self, item: Item, was: Place) -> bool:
        """Whether the item had to leave its lease because another one did."""
        return False

    def _may_be_spared(self, asked: Iterable[Disposition]) -> bool:
        """Whether a retry need not count. What else was asked in the same cycle would count, or would let it go."""
        return self.record.circuit_breaker is not None and any(each.verdict == "retry" for each in asked)

    def _is_spent(self, attempts: int) -> bool:
        return bool(self.record.max_attempts) and attempts >= self.record.max_attempts

    def _check_wait(self, item: Item, was: Place, place: Place, retries: list[Disposition], what: str) -> None:
        # A retry due after the item's expiry is due at its expiry.
        dues = {min(self._due_at(each, was.attempts + 1), place.expires_at or FOR_EVER) for each in retries}
        if place.kind == DUE:
            check(place.due_at in dues, f"{item.payload}: {what} at another time than was asked")
        else:
            check(min(dues) <= self.cycle.now, f"{item.payload}: {what} too early")

    def _due_at(self, disposition: Disposition, attempts: int) -> Millis:
        if disposition.retry_at is not None:
            return disposition.retry_at
        if disposition.retry_after is not None:
            return self.cycle.now + disposition.retry_after
        return self.cycle.now + (0 if self.record.retry_backoff is None else self.record.retry_backoff.after(attempts, self.cycle.now))

    def _is_leased(self, item: Item, place: Place) -> None:
        lease = self.new.leases[place.lease]
        check("lease" not in self.record.paused, "a paused queue serves")
        check(not self.cycle.blocked, "a queue serves while its circuit breaker is open")
        own = self.record.partition(self.partition)
        check(own is not None and allows(self.record, own).lease, f"a partition serves that must not: {own}")
        check(not place.expires_at or place.expires_at > self.cycle.now, f"{item.payload} was served although it has expired")
        limit = self._limits.get(item.payload, lease.count)
        check(lease.count <= limit, f"{item.payload}: its lease ran out, and the next is not half as large")
        self._steps["leased"] += 1

    def _check_leases(self) -> None:
        """Check that new leases take items in order."""
        self.newest = self.new.leases.keys() - self.old.leases.keys()
        for number in sorted(self.newest):
            lease = self.new.leases[number]
            check(number not in self.clients, "a lease's number is given twice")
            self.clients[number] = lease.client_id
            self._check_turn(lease)
            timeout = self.asks.lease_timeouts[lease.client_id]
            deadline = self.cycle.now + (self.record.lease_timeout if timeout is None else timeout)
            check(lease.deadline == deadline, "a lease has another deadline than was asked for")

    def _check_turn(self, lease: LeaseState) -> None:
        """Check that the lease takes the oldest items."""
        for part in lease.parts:
            check(part.first > self._furthest, "an item was served before one that came earlier")
            self._furthest = part.end - 1

    # ---- moves between partitions -----------------------------------------------------------------------------

    def _comes_over(self, item: Item, way: Way, place: Place) -> None:
        """Check an item moved in from another partition: its attempts, times and lease limit carry over."""
        was = way.places[item.payload]
        check(way.target == partition_target(self.partition), f"{item.payload} arrives in another partition")
        check(way.source.rpartition(".")[0] == self.incarnation, f"{item.payload} arrives in another queue")
        check(place.attempts == was.attempts, f"{item.payload} has lost attempts on its way, or has more")
        check(place.expires_at == was.expires_at, f"{item.payload} expires at another time than before it was moved")
        check(place.enqueued_at == was.enqueued_at, f"{item.payload} was enqueued at another time than before it was moved")
        due = place.due_at == was.due_at or (not place.due_at and was.due_at <= self.cycle.now)
        check(due, f"{item.payload} is due at {place.due_at} and was at {was.due_at}, before it was moved")
        if item.payload in way.limits:
            self._limits[item.payload] = way.limits[item.payload]
        way.arrived.add(item.payload)
        self._steps["moved in"] += 1

    def _goes_over(self, item: Item, was: Place, number: int) -> None:
        """Check an item that leaves for another partition, perhaps in the cycle in which it left a lease or came."""
        there, way = _place_beyond(self.new, number, item.payload), self.ways[number]
        check(self._may_go_over(item), f"{item.payload} is moved out of a partition that takes items")
        check(there.expires_at == was.expires_at and there.first == was.first, f"{item.payload} has changed as it went")
        if was.kind == LEASED:
            self._comes_back(item, was, there)
        else:
            due = there.due_at == was.due_at or (not there.due_at and was.due_at <= self.cycle.now)
            check(due and there.attempts == was.attempts, f"{item.payload} has changed as it went")
        # Its new id was never leased, so no outcome is remembered for it.
        self.dispositions[there.offset] = {"settled", "not_leased"}
        if item.payload in self._limits:
            way.limits[item.payload] = self._limits.pop(item.payload)
        way.places[item.payload] = there
        item.home, item.way = None, way
        self._steps["goes over"] += 1

    def _may_go_over(self, item: Item) -> bool:
        """Whether the item may be moved to another partition."""
        return bool(self.old.header.shut or self.new.header.shut)

    # ---- departures -------------------------------------------------------------------------------------------

    def _leaves(self, item: Item, was: Place, number: int | None) -> None:
        """Check an item that is no longer alive here: it has ended, or is in the transfer of that number."""
        if number is not None and self.new.transfers[number].moves_to is not None:
            self._goes_over(item, was, number)
            return
        way = None if number is None else self.ways[number]
        if was.kind == LEASED:
            self._leaves_lease(item, was, number)
        else:
            offset = was.offset if number is None else self.new.leaving[number, item.payload].offset
            expired = was.due_at <= self.cycle.now and 0 < was.expires_at <= self.cycle.now
            if number is not None and self.new.transfers[number].transfer == REDRIVEN:
                asked = self.asks.targets.get((self.partition, offset), ())
                check(way is not None and way.target in asked, f"{item.payload} goes to another queue without a cause")
            elif expired:
                self._steps["expired in the line"] += 1
                check((number is None) == (self.record.dead_queue is None), f"{item.payload} expired, to the wrong place")
            else:
                cleared = self.asks.clears(scheduled=was.kind == DUE) or (
                    was.due_at <= self.cycle.now and self.asks.clears(scheduled=False)
                )
                check(number is None and cleared, f"{item.payload} is lost")
                self._steps["cleared"] += 1
            # Outcomes of ids that were never leased are not remembered one by one.
            self.dispositions[offset] = {"settled", "not_leased"}
        self._limits.pop(item.payload, None)
        item.home, item.way, item.ended = None, way, way is None

    def _leaves_lease(self, item: Item, was: Place, number: int | None) -> None:
        ran_out = self._ran_out(was.lease)
        asked = {each.verdict for each in self.asks.of(self.partition, was.lease, was.offset)} if self.grace or not ran_out else set()
        counted = ran_out or "retry" in asked
        spent = counted and self._is_spent(was.attempts + 1)
        stale = (counted or "release" in asked or self._may_be_given_back(was.lease)) and 0 < was.expires_at <= self.cycle.now
        dies = spent or stale or "dead" in asked
        if number is not None:
            transfer = self.new.transfers[number]
            to_dead = transfer.transfer != REDRIVEN and transfer.target == self.record.dead_queue is not None
            check(to_dead, f"{item.payload} goes elsewhere than to the dead queue")
            check(dies, f"{item.payload} dies without a cause")
            self._check_reason(item, transfer.transfer or "", spent, stale)
            self.dispositions[was.offset] = {"expired"} if ran_out and not asked else {"expired", "dead"} if ran_out else {"dead"}
            return
        dispositions: set[IgnoredReason] = {"completed", "settled"} if "done" in asked else set()
        if dies and self.record.dead_queue is None:
            dispositions.add("dead")
        elif self.asks.clears(scheduled=False) or (counted and self.asks.clears(scheduled=True)):
            # Offered again, or delayed by the back-off, and cleared in the same cycle. A released item is never delayed.
            again: set[IgnoredReason] = {"expired"} if ran_out else set()
            again |= {"retried"} if "retry" in asked else set()
            if self.asks.clears(scheduled=False) and ("release" in asked or (not ran_out and self._may_be_given_back(was.lease))):
                again.add("released")
            check(bool(dispositions | again), f"{item.payload} is lost")
            self._steps[min(again) if again else ""] += 1
            self._unsure |= len(again) + bool(dispositions) > 1
            dispositions |= again
        else:
            check(bool(dispositions), f"{item.payload} is lost")
        self.dispositions[was.offset] = {"expired"} if ran_out and not asked else dispositions | {"expired"} if ran_out else dispositions

    def _may_be_given_back(self, lease: int) -> bool:
        return (self.partition, lease) not in self.heard and self.old.leases[lease].lease_key is None

    def _goes_elsewhere(self, payload: str, before: int, number: int) -> None:
        """Check an item bound for a dead queue that never takes it, and now bound for another one."""
        old, new = self.old.transfers[before], self.new.transfers[number]
        check(payload not in self.ways[before].arrived, f"{payload} is sent elsewhere although it has arrived")
        dies = old.transfer != REDRIVEN and old.moves_to is None
        check(dies and new.transfer == old.transfer, f"{payload} goes elsewhere without a cause")
        self.items[payload].way = self.ways[number]
        self._steps["goes elsewhere"] += 1

    def _check_reason(self, item: Item, reason: str, spent: bool, stale: bool) -> None:
        if reason.startswith("max_attempts"):
            check(spent, f"{item.payload} is said to have used its attempts up")
        elif reason.startswith("expired"):
            check(stale, f"{item.payload} is said to have expired")
        else:
            check(reason == "bad", f"{item.payload} died of something else")

    def _is_let_go(self, number: int, payload: str) -> None:
        """Check an item that has left its transfer: it must have arrived, or be back here."""
        way, item = self.ways[number], self.items[payload]
        if payload in way.arrived:
            transfer = self.old.transfers[number]
            moved = transfer.moves_to is not None
            self._steps["moved" if moved else "redriven" if transfer.transfer == REDRIVEN else "dead"] += 1
        else:
            check(way.nowhere and item.way is None and payload in self.new.alive, f"{payload} was lost on its way to another queue")

    # ---- counters ---------------------------------------------------------------------------------------------

    def _check_counters(self) -> None:
        old, header = self.old.header, self.new.header
        told = {
            "produced": header.produced - old.produced,
            "leased": header.leased - old.leased,
            "retried": header.retried - old.retried,
            "expired": header.expired - old.expired,
            "released": header.released - old.released,
            "redriven": header.redriven - old.redriven,
            "moved": header.moved - old.moved,
            "moved in": header.moved_in - old.moved_in,
        }
        seen = {name: self._steps[name] for name in told}
        check(self._unsure or told == seen, f"the counters say {told}, and {seen} happened")
        there = len(self.new.alive) + len(self.new.leaving)
        balance = header.completed + header.dead + header.cleared + header.redriven + header.moved + there
        check(header.produced + header.moved_in == balance, "the counters do not balance")


def _place_beyond(scene: Scene, number: int, payload: str) -> Place:
    """Return the place of a transferred item once it has arrived: ready or scheduled."""
    place = scene.leaving[number, payload]
    return place._replace(kind=DUE if place.due_at else READY, lease=0)
