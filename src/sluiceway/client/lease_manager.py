"""The state machine of a consumer: when to lease, extend and settle, and which leases are lost.

It does no I/O. Its caller passes in the time and the events, and carries out the effects that it returns. Times are milliseconds of a
monotonic clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sluiceway.client.answers import Ignored, Leased, LeasedItem
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Retry
from sluiceway.client.protocol import backoff
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON


class Ask(NamedTuple):
    """Lease up to `batch_size` items, and wait for them. Report the result with `leased` or `ask_failed`."""

    batch_size: int


class HangUp(NamedTuple):
    """Cancel the lease call that waits for items. Its result still has to be reported."""


class Extend(NamedTuple):
    """Extend these leases. Report the result with `extended` or `extend_failed`."""

    lease_ids: list[str]


class Settle(NamedTuple):
    """Send the outcomes of these items. Report the result with `settled` or `settle_failed`."""

    done: list[str]
    retries: list[Retry]
    released: list[str]

    @property
    def ids(self) -> list[str]:
        return [*self.done, *(each.id for each in self.retries), *self.released]

    def of(self, is_one: Callable[[str], bool]) -> Settle:
        """The same outcomes, of some of the items."""
        return Settle(
            [item_id for item_id in self.done if is_one(item_id)],
            [each for each in self.retries if is_one(each.id)],
            [item_id for item_id in self.released if is_one(item_id)],
        )


class Lost(NamedTuple):
    """The leases of these items ran out while the items were being handled. Another consumer will receive them."""

    ids: list[str]


class Abandon(NamedTuple):
    """End the handlers of these items, which took longer than a stopped consumer waits. The items are released."""

    ids: list[str]


Effect = Ask | HangUp | Extend | Settle | Lost | Abandon
DONE, RELEASED = "done", "released"

QUIET_TIME: Millis = 500
"""How long a lease call is kept after it was made, or after items were put back: an answer with items may be on its way.
It takes a few milliseconds."""
HANG_UP_TIME: Millis = 100
"""Time for the server to notice that a lease call was cancelled, so that it assigns no items to it. It takes a few milliseconds."""
_LATEST = 0.2
"""Weight of the latest handler in `handler_time`."""

Outcome = str | Retry
"""DONE, RELEASED, or how to put the item back."""


@dataclass(slots=True)
class _Lease:
    renew_at: Millis
    lease_deadline: Millis
    ids: set[str]
    """The items whose outcomes the server has not confirmed."""


@dataclass(slots=True)
class _Line:
    """The state of one kind of call. At most one such call is in flight."""

    busy: bool = False
    begins_at: Millis = 0
    failures: int = 0
    failing_since: Millis = 0

    def succeeded(self) -> None:
        self.busy, self.failures = False, 0

    def failed(self, error: CallError, now: Millis, roll: float) -> None:
        if not self.failures:
            self.failing_since = now
        self.busy = False
        self.begins_at = now + (error.retry_after or 0) + round(1000 * backoff(self.failures, roll))
        self.failures += 1


class _Handling(NamedTuple):
    """An item that is being handled, and since when."""

    item: LeasedItem
    since: Millis


class _KeyOrder:
    """Which of the held items may be handled, where those of a key are handled one after the other, in the order in which they were leased.

    A key has an entry while an item of it may be handled or is being handled: the items behind that one.
    """

    def __init__(self) -> None:
        self._behind: dict[str, deque[LeasedItem]] = {}

    def is_first(self, item: LeasedItem) -> bool:
        """Whether a new item may be handled now. Otherwise `pop` returns it when its turn comes."""
        if item.key is None:
            return True
        behind = self._behind.get(item.key)
        if behind is None:
            self._behind[item.key] = deque()
            return True
        behind.append(item)
        return False

    def behind(self, item: LeasedItem) -> Iterable[LeasedItem]:
        """The items behind one that may be handled or is being handled."""
        return () if item.key is None else self._behind.get(item.key, ())

    def pop(self, item: LeasedItem) -> LeasedItem | None:
        """The item is done with. Returns the one that may be handled now, if there is one."""
        behind = None if item.key is None else self._behind.get(item.key)
        if behind:
            return behind.popleft()
        if behind is not None and item.key is not None:
            del self._behind[item.key]
        return None

    def clear(self) -> None:
        self._behind.clear()


@dataclass
class LeaseManager:
    """One consumer's items: waiting, being handled, or handled with an outcome that is not yet sent.

    The consumer handles at most `concurrency` items at once. About `prefetch` more wait, but no more than the handlers can finish within
    one `lease_timeout`, by the time that they took so far: items that wait longer could be with another consumer. A lease is extended
    once a third of `lease_timeout` has passed. An outcome waits up to `linger` for others, unless no other items are held. `stop` releases
    the waiting items. Outcomes that cannot be sent within `patience` after that are dropped, and their leases run out.

    With `ordered`, items of a key are handled one after the other. If one is put back, those behind it are released, as the server does
    itself where the queue orders its items.
    """

    concurrency: int
    prefetch: int
    lease_timeout: Millis
    linger: Millis
    patience: Millis
    wait_for_queue: bool = False
    """Whether a queue that does not exist is waited for. Not once it has existed: then it was deleted."""
    ordered: bool = False
    handler_time: float | None = None
    """Moving average of the time that an item is being handled, in milliseconds; None before the first one was."""
    error: CallError | None = None
    """The error that stopped the consumer, if one did."""
    problem: str | None = None
    """Why the last lease call failed; None if it did not."""
    stopping: bool = False
    lost: set[str] = field(default_factory=set)
    """The items being handled that are no longer this consumer's: their leases ran out, or they were abandoned."""
    _abandon_at: Millis | None = None
    _stopped_at: Millis | None = None
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _lease_of: dict[str, str] = field(default_factory=dict)
    _items: dict[str, LeasedItem] = field(default_factory=dict)
    """The waiting items by id."""
    _waiting: deque[LeasedItem] = field(default_factory=deque)
    """Those that may be handled now, in order, and some that wait no longer."""
    _order: _KeyOrder = field(default_factory=_KeyOrder)
    _running: dict[str, _Handling] = field(default_factory=dict)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _handler_times: dict[str, Millis] = field(default_factory=dict)
    """How long items were handled whose outcome is not confirmed."""
    _sent: Settle | None = None
    _settle_at: Millis = 0
    _asking: _Line = field(default_factory=_Line)
    _extending: _Line = field(default_factory=_Line)
    _settling: _Line = field(default_factory=_Line)
    _hung_up: bool = False
    _quiet_at: Millis = 0
    _asked_at: Millis = 0
    _newly_lost: list[str] = field(default_factory=list)

    # -- queries and decisions --------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the consumer was stopped and nothing is left to do."""
        return self.stopping and not (self._running or self._outcomes or self._asking.busy or self._settling.busy)

    @property
    def waiting(self) -> int:
        return len(self._items)

    @property
    def running(self) -> frozenset[str]:
        return frozenset(self._running)

    def decide(self, now: Millis) -> list[Effect]:
        """Return the effects to carry out now. The result of every call has to be reported back."""
        effects: list[Effect] = []
        if self.stopping and self._stopped_at is None:
            self._stopped_at = now
        self.run_out(now)
        if self._running and self._abandon_at is not None and self._abandon_at <= now:
            effects.append(Abandon(self._abandon()))
        if self._newly_lost:
            effects.append(Lost(self._newly_lost))
            self._newly_lost = []
        hang_up_at = self._hang_up_at()
        if hang_up_at is not None and hang_up_at <= now:
            self._hung_up = True
            self._settling.begins_at = max(self._settling.begins_at, now + HANG_UP_TIME)
            effects.append(HangUp())
        due = [lease_id for lease_id, lease in self._leases.items() if lease.renew_at <= now + self.lease_timeout // 6]
        if self._renew_at() is not None and self._due(self._extending, self._renew_at(), now):
            self._extending.busy = True
            effects.append(Extend(due[:MAX_ITEMS_JSON]))
        if self._outcomes and self._due(self._settling, self._settle_time(), now):
            effects.append(self._settle())
        room = self._room()
        if room and self._due(self._asking, 0, now):
            self._asking.busy, self._asked_at = True, now
            effects.append(Ask(min(room, MAX_ITEMS_ARROW)))
        return effects

    def run_out(self, now: Millis) -> None:
        """Lose the leases whose deadline has passed by the local clock without an extension."""
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.lease_deadline <= now]:
            self._lose(lease_id)

    def wake_at(self) -> Millis | None:
        """When to call `decide` again if no event comes first; None: never."""
        times = [lease.lease_deadline for lease in self._leases.values()]
        if self._running and self._abandon_at is not None:
            times.append(self._abandon_at)
        hang_up_at = self._hang_up_at()
        if hang_up_at is not None:
            times.append(hang_up_at)
        for line, at in (
            (self._extending, self._renew_at()),
            (self._settling, self._settle_time() if self._outcomes else None),
            (self._asking, 0 if self._room() else None),
        ):
            if at is not None and not line.busy:
                times.append(max(at, line.begins_at))
        return min(times, default=None)

    def _due(self, line: _Line, at: Millis | None, now: Millis) -> bool:
        return not line.busy and at is not None and max(at, line.begins_at) <= now

    def _room(self) -> int:
        """How many items to lease. It is 0 until there is room for many, to keep the number of calls low."""
        if self.stopping or len(self._outcomes) > self.concurrency + self.prefetch:
            return 0
        prefetch = self._affordable_prefetch()
        room = prefetch - self.waiting + max(0, self.concurrency - len(self._running))
        return room if room > 0 and (self._next() is None or room * 2 >= self.concurrency + prefetch) else 0

    def _affordable_prefetch(self) -> int:
        """How many items may wait: `prefetch`, or what the handlers can finish within a lease beside what they are at."""
        if self.handler_time is None:
            return 0
        finished = int(self.concurrency * self.lease_timeout / max(1.0, self.handler_time))
        return min(self.prefetch, max(0, finished - self.concurrency))

    def _hang_up_at(self) -> Millis | None:
        """When to cancel the waiting lease call: once no answer is on its way, whose items would stay leased."""
        if not self.stopping or not self._asking.busy or self._hung_up or self._outcomes or self._settling.busy:
            return None
        return max(self._quiet_at, self._asked_at + QUIET_TIME)

    def _renew_at(self) -> Millis | None:
        return min((lease.renew_at for lease in self._leases.values()), default=None)

    def _settle_time(self) -> Millis:
        enough = len(self._outcomes) >= min(MAX_ITEMS_JSON, max(1, (self.concurrency + self.prefetch) // 2))
        return 0 if enough or not (self._running or self._items) else self._settle_at

    # -- events -------------------------------------------------------------------------------------------------------------

    def leased(self, answer: Leased, now: Millis) -> None:
        """The lease call returned `answer`."""
        self._asking.succeeded()
        self.problem = None
        self.wait_for_queue = False
        for lease in answer.leases:
            self._leases[lease.lease_id] = _Lease(now + self.lease_timeout // 3, now + self.lease_timeout, set())
        for item in answer.items:
            lease_id = item.lease_id or ""
            if lease_id in self._leases:
                self._leases[lease_id].ids.add(item.id)
                self._lease_of[item.id] = lease_id
                self._items[item.id] = item
                if not self.ordered or self._order.is_first(item):
                    self._waiting.append(item)
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if not lease.ids]:
            del self._leases[lease_id]
        if self.stopping:
            self._release_waiting()

    def ask_failed(self, error: CallError, now: Millis, roll: float) -> None:
        """The lease call failed. `roll` (0 to 1) jitters the pause before the next one."""
        self._asking.failed(error, now, roll)
        self.problem = error.detail
        if not (self.wait_for_queue and error.code == "queue_not_found"):
            self._may_stop(error)

    def take(self, now: Millis) -> LeasedItem | None:
        """Return the next item and count it as being handled. None if no item may be handled or `concurrency` items are being handled."""
        if self.stopping or len(self._running) >= self.concurrency:
            return None
        item = self._next()
        if item is not None:
            del self._items[self._waiting.popleft().id]
            self._running[item.id] = _Handling(item, now)
        return item

    def finish(self, item_id: str, outcome: Outcome, now: Millis) -> None:
        """The item was handled. The outcome is dropped if the item is lost or was finished before."""
        handling = self._running.pop(item_id, None)
        if handling is None:
            return
        item, since = handling
        before = now - since if self.handler_time is None else self.handler_time
        self.handler_time = before + _LATEST * (now - since - before)
        if item_id in self.lost:
            self.lost.remove(item_id)
        else:
            if not self._outcomes:
                self._settle_at = now + self.linger
            self._handler_times[item_id] = now - since
            self._outcomes[item_id] = replace(outcome, handler_time=f"{now - since}ms") if isinstance(outcome, Retry) else outcome
            if isinstance(outcome, Retry) and not outcome.dead:
                self._release_behind(item)
        self._let_next(item)

    def extended(self, asked: Sequence[str], lease_ids: Iterable[str], now: Millis, sent_at: Millis) -> None:
        """The extend call sent at `sent_at` extended the leases `lease_ids`. The other leases in `asked` are lost."""
        self._extending.succeeded()
        self.extended_some(asked, lease_ids, now, sent_at)

    def extended_some(self, asked: Sequence[str], lease_ids: Iterable[str], now: Millis, sent_at: Millis) -> None:
        """As `extended`, for some of the leases of an `Extend`, whose end is still to be reported."""
        alive = set(lease_ids)
        for lease_id in asked:
            lease = self._leases.get(lease_id)
            if lease is None:
                continue
            if lease_id in alive:
                lease.renew_at, lease.lease_deadline = now + self.lease_timeout // 3, sent_at + self.lease_timeout
            else:
                self._lose(lease_id)

    def extend_failed(self, error: CallError, now: Millis, roll: float) -> None:
        """The extend call failed. `roll` (0 to 1) jitters the pause before the next one."""
        self._extending.failed(error, now, roll)
        self._may_stop(error)

    def settled(self, ignored: Iterable[Ignored], now: Millis) -> list[Ignored]:
        """The settle calls succeeded. Returns the ignored items whose outcomes were refused because their leases had run out."""
        self._settling.succeeded()
        self._quiet_at = now + QUIET_TIME
        self._forget_sent()
        return refused(ignored)

    def settled_some(self, ids: Iterable[str]) -> None:
        """The outcomes of these items were accepted. The end of their `Settle` is still to be reported, and is that of its other items."""
        assert self._sent is not None
        accepted = {*ids}
        self._sent = self._sent.of(lambda item_id: item_id not in accepted)
        for item_id in accepted:
            self._forget(item_id)

    def settle_failed(self, error: CallError, now: Millis, roll: float) -> list[str]:
        """A settle call failed. Its outcomes are sent again, which is safe. Returns the ids of the items whose outcomes are dropped."""
        self._settling.failed(error, now, roll)
        self._quiet_at = now + QUIET_TIME
        self._may_stop(error)
        sent = self._sent
        assert sent is not None
        ids = sent.ids
        # A server that was away before the stop may be back just after it.
        since = max(self._settling.failing_since, now if self._stopped_at is None else self._stopped_at)
        too_late = self.stopping and now - since >= self.patience
        if too_late or is_final(error):
            self._forget_sent()
            given_up = [*ids, *self._outcomes]
            for item_id in self._outcomes:
                self._forget(item_id)
            self._outcomes = {}
            return given_up
        self._sent = None
        again: dict[str, Outcome] = dict.fromkeys(sent.done, DONE) | {each.id: each for each in sent.retries}
        again |= dict.fromkeys(sent.released, RELEASED)
        given_up = [item_id for item_id in ids if item_id not in self._lease_of]
        for item_id in given_up:
            del again[item_id]
            self._handler_times.pop(item_id, None)
        self._outcomes = again | self._outcomes
        return given_up

    def stop(self, abandon_at: Millis | None = None) -> None:
        """Take no more items. Waiting items are released. Items being handled continue and must be finished as usual.

        Those that are still being handled at `abandon_at` (the earliest that was given, if any) are released, too.
        """
        self.stopping = True
        if abandon_at is not None:
            self._abandon_at = abandon_at if self._abandon_at is None else min(abandon_at, self._abandon_at)
        self._release_waiting()

    def handler_times(self, ids: Iterable[str]) -> list[tuple[Millis, int]]:
        """The handler times of those items, to two digits: pairs of milliseconds and number of items."""
        return sorted(Counter(_to_two_digits(self._handler_times[item_id]) for item_id in ids if item_id in self._handler_times).items())

    # -- internals ------------------------------------------------------------------------------------------------------------

    def _may_stop(self, error: CallError) -> None:
        if is_final(error) and self.error is None:
            self.error = error
        if self.error is not None:
            self.stop()

    def _next(self) -> LeasedItem | None:
        """The first item that may be handled now; None: there is none."""
        while self._waiting and self._waiting[0].id not in self._items:
            self._let_next(self._waiting.popleft())
        return self._waiting[0] if self._waiting else None

    def _let_next(self, item: LeasedItem) -> None:
        """The item is done with: the one behind it may be handled, after those of other keys that wait."""
        following = self._order.pop(item)
        if following is not None:
            self._waiting.append(following)

    def _release_behind(self, item: LeasedItem) -> None:
        """The item is put back: those behind it must not be handled before it."""
        for each in self._order.behind(item):
            if self._items.pop(each.id, None) is not None:
                self._outcomes[each.id] = RELEASED

    def _release_waiting(self) -> None:
        self._outcomes |= dict.fromkeys(self._items, RELEASED)
        self._items.clear()
        self._waiting.clear()
        self._order.clear()

    def _abandon(self) -> list[str]:
        """Release what is being handled; return its ids."""
        ids = list(self._running)
        self._outcomes |= dict.fromkeys((item_id for item_id in ids if item_id not in self.lost), RELEASED)
        self.lost.update(ids)
        self._running.clear()
        return ids

    def _settle(self) -> Settle:
        self._settling.busy = True
        chosen = [(item_id, self._outcomes.pop(item_id)) for item_id in list(self._outcomes)[:MAX_ITEMS_JSON]]
        self._sent = Settle(
            [item_id for item_id, outcome in chosen if outcome == DONE],
            [outcome for _, outcome in chosen if isinstance(outcome, Retry)],
            [item_id for item_id, outcome in chosen if outcome == RELEASED],
        )
        return self._sent

    def _forget_sent(self) -> None:
        sent, self._sent = self._sent, None
        assert sent is not None
        for item_id in sent.ids:
            self._forget(item_id)

    def _forget(self, item_id: str) -> None:
        """Drop a settled item from its lease, and the lease with its last item."""
        self._handler_times.pop(item_id, None)
        lease_id = self._lease_of.pop(item_id, None)
        lease = self._leases.get(lease_id or "")
        if lease is not None and lease_id is not None:
            lease.ids.discard(item_id)
            if not lease.ids:
                del self._leases[lease_id]

    def _lose(self, lease_id: str) -> None:
        """Drop a lease and its waiting items. Outcomes of handled items are still sent, because the server may accept them."""
        ids = self._leases.pop(lease_id).ids
        for item_id in ids:
            del self._lease_of[item_id]
            self._items.pop(item_id, None)
        running = sorted(ids & self._running.keys())
        self.lost.update(running)
        self._newly_lost += running


def partition_of(id_: str) -> str:
    """The partition of an item or a lease, as it is named in its id."""
    return id_.rpartition(".")[0]


def _to_two_digits(millis: Millis) -> Millis:
    unit: Millis = 10 ** max(0, len(str(millis)) - 2)
    return millis // unit * unit


def refused(ignored: Iterable[Ignored]) -> list[Ignored]:
    """Those whose outcomes were refused because their leases had run out. The others have had theirs before."""
    return [each for each in ignored if each.reason not in ("completed", "retried", "released", "dead", "settled")]


def is_final(error: CallError) -> bool:
    """Whether the error is permanent, so that the consumer has to stop."""
    return not error.retryable and (error.kind.status < 500 or error.code == "unavailable")
