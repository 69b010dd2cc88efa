"""What a consumer asks of the server and when: it keeps the leases of what it holds, and tells what became of it.

A pure machine: it is told the time and what happened, and says what to do. Times are milliseconds of a clock that only runs forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sluiceway.client.answers import Ignored, Leased, LeasedItem
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Retry
from sluiceway.client.protocol import backoff
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON


class Ask(NamedTuple):
    """Lease up to so many items, and wait for them. Answered by `leased` or `ask_failed`."""

    batch_size: int


class HangUp(NamedTuple):
    """Give up waiting for items. The call is answered all the same."""


class Extend(NamedTuple):
    """Answered by `extended` or `extend_failed`."""

    lease_ids: list[str]


class Settle(NamedTuple):
    """State what became of items. Answered by `settled` or `settle_failed`."""

    done: list[str]
    retries: list[Retry]
    released: list[str]


class Lost(NamedTuple):
    """These are being handled, and their leases have run out: somebody else is given them."""

    ids: list[str]


Effect = Ask | HangUp | Extend | Settle | Lost
DONE, RELEASED = "done", "released"

QUIET_TIME: Millis = 500
"""After items were put back: so long the call that waits for items is left alone, as it may be given them. An answer takes a few."""
HANG_UP_TIME: Millis = 100
"""In which the server has noticed that nobody waits any more, and gives nothing to that call. It takes a few, too."""

Outcome = str | Retry
"""DONE, RELEASED, or how to put the item back."""


@dataclass(slots=True)
class _Lease:
    renew_at: Millis
    lease_deadline: Millis
    ids: set[str]
    """Of the items whose end the server does not know yet."""


@dataclass(slots=True)
class _Line:
    """One kind of call, of which at most one is under way."""

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


@dataclass
class LeaseManager:
    """One consumer's items: waiting to be handled, being handled, or handled and not yet told to the server.

    At most `concurrency` are handled at once, by whoever uses it, and about `prefetch` wait for that. A lease is extended once a third
    of `lease_timeout` has passed. An outcome waits for others for `linger`, unless nothing else is held. When it stops, what waits is
    released, and outcomes that cannot be told within `patience` are given up: their leases run out.
    """

    concurrency: int
    prefetch: int
    lease_timeout: Millis
    linger: Millis
    patience: Millis
    error: CallError | None = None
    """Why it stopped by itself."""
    stopping: bool = False
    lost: set[str] = field(default_factory=set)
    """Of those that are being handled."""
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _lease_of: dict[str, str] = field(default_factory=dict)
    _waiting: deque[str] = field(default_factory=deque)
    _items: dict[str, LeasedItem] = field(default_factory=dict)
    """Those that wait."""
    _running: set[str] = field(default_factory=set)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _sent: Settle | None = None
    _settle_at: Millis = 0
    _asking: _Line = field(default_factory=_Line)
    _extending: _Line = field(default_factory=_Line)
    _settling: _Line = field(default_factory=_Line)
    _hung_up: bool = False
    _quiet_at: Millis = 0
    _newly_lost: list[str] = field(default_factory=list)

    # -- what is asked of it ----------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """It was stopped, and nothing is left to do."""
        return self.stopping and not (self._running or self._outcomes or self._asking.busy or self._settling.busy)

    @property
    def waiting(self) -> int:
        return len(self._items)

    @property
    def running(self) -> frozenset[str]:
        return frozenset(self._running)

    def decide(self, now: Millis) -> list[Effect]:
        """What to do now. Every call that it asks for must be answered."""
        effects: list[Effect] = []
        self._run_out(now)
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
            self._asking.busy = True
            effects.append(Ask(min(room, MAX_ITEMS_ARROW)))
        return effects

    def wake_at(self) -> Millis | None:
        """When to decide again though nothing happens."""
        times = [lease.lease_deadline for lease in self._leases.values()]
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
        """How many items to ask for: none until there is room for many, so that few calls are made."""
        if self.stopping or len(self._outcomes) > self.concurrency + self.prefetch:
            return 0
        room = self.prefetch - self.waiting + max(0, self.concurrency - len(self._running))
        return room if room > 0 and (not self._items or room * 2 >= self.concurrency + self.prefetch) else 0

    def _hang_up_at(self) -> Millis | None:
        """When to give up waiting for items: not while what was put back may be on its way here, since it would be lost with the answer."""
        if not self.stopping or not self._asking.busy or self._hung_up or self._outcomes or self._settling.busy:
            return None
        return self._quiet_at

    def _renew_at(self) -> Millis | None:
        return min((lease.renew_at for lease in self._leases.values()), default=None)

    def _settle_time(self) -> Millis:
        enough = len(self._outcomes) >= min(MAX_ITEMS_JSON, max(1, (self.concurrency + self.prefetch) // 2))
        return 0 if enough or not (self._running or self._items) else self._settle_at

    # -- what happens -------------------------------------------------------------------------------------------------------

    def leased(self, answer: Leased, now: Millis) -> None:
        self._asking.succeeded()
        for lease in answer.leases:
            self._leases[lease.lease_id] = _Lease(now + self.lease_timeout // 3, now + self.lease_timeout, set())
        for item in answer.items:
            lease_id = item.lease_id or ""
            if lease_id in self._leases:
                self._leases[lease_id].ids.add(item.id)
                self._lease_of[item.id] = lease_id
                self._items[item.id] = item
                self._waiting.append(item.id)
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if not lease.ids]:
            del self._leases[lease_id]
        if self.stopping:
            self._release_waiting()

    def ask_failed(self, error: CallError, now: Millis, roll: float) -> None:
        self._asking.failed(error, now, roll)
        self._may_stop(error)

    def take(self) -> LeasedItem | None:
        """The next item to handle, which begins now; None if there is none, or as many as may be are being handled."""
        if self.stopping or len(self._running) >= self.concurrency:
            return None
        while self._waiting:
            item = self._items.pop(self._waiting.popleft(), None)
            if item is not None:
                self._running.add(item.id)
                return item
        return None

    def finish(self, item_id: str, outcome: Outcome, now: Millis) -> None:
        """It was handled. If its lease is lost, or it was finished before, this says nothing to the server."""
        if item_id not in self._running:
            return
        self._running.remove(item_id)
        if item_id in self.lost:
            self.lost.remove(item_id)
            return
        if not self._outcomes:
            self._settle_at = now + self.linger
        self._outcomes[item_id] = outcome

    def extended(self, asked: Sequence[str], lease_ids: Iterable[str], now: Millis, sent_at: Millis) -> None:
        """The call that was sent at `sent_at` has extended these leases; the others that were asked for are over."""
        self._extending.succeeded()
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
        self._extending.failed(error, now, roll)
        self._may_stop(error)

    def settled(self, ignored: Iterable[Ignored], now: Millis) -> list[Ignored]:
        """The server knows. Those of the ignored whose outcome was not taken, as their lease had run out."""
        self._settling.succeeded()
        self._quiet_at = now + QUIET_TIME
        self._forget_sent()
        return [each for each in ignored if each.reason not in ("completed", "retried", "released", "dead", "settled")]

    def settle_failed(self, error: CallError, now: Millis, roll: float) -> list[str]:
        """Repeating a settle is safe, so what was sent is sent again. The ids whose outcomes are given up."""
        self._settling.failed(error, now, roll)
        self._quiet_at = now + QUIET_TIME
        self._may_stop(error)
        sent = self._sent
        assert sent is not None
        ids = [*sent.done, *(each.id for each in sent.retries), *sent.released]
        too_late = self.stopping and now - self._settling.failing_since >= self.patience
        if too_late or _is_final(error):
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
        self._outcomes = again | self._outcomes
        return given_up

    def stop(self) -> None:
        """Begin nothing more. What waits is released, what is being handled goes on, and is to be finished as ever."""
        self.stopping = True
        self._release_waiting()

    # -- inside ---------------------------------------------------------------------------------------------------------------

    def _may_stop(self, error: CallError) -> None:
        if _is_final(error) and self.error is None:
            self.error = error
        if self.error is not None:
            self.stop()

    def _release_waiting(self) -> None:
        self._outcomes |= dict.fromkeys(self._items, RELEASED)
        self._items.clear()
        self._waiting.clear()

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
        for item_id in (*sent.done, *(each.id for each in sent.retries), *sent.released):
            self._forget(item_id)

    def _forget(self, item_id: str) -> None:
        """The server needs to hear no more of it."""
        lease_id = self._lease_of.pop(item_id, None)
        lease = self._leases.get(lease_id or "")
        if lease is not None and lease_id is not None:
            lease.ids.discard(item_id)
            if not lease.ids:
                del self._leases[lease_id]

    def _run_out(self, now: Millis) -> None:
        """Lose the leases whose time is over as far as can be known here, because no extension came through."""
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.lease_deadline <= now]:
            self._lose(lease_id)

    def _lose(self, lease_id: str) -> None:
        """The lease is over. What waits is dropped; what was handled is told all the same, as the server knows best."""
        ids = self._leases.pop(lease_id).ids
        for item_id in ids:
            del self._lease_of[item_id]
            self._items.pop(item_id, None)
        running = sorted(ids & self._running)
        self.lost.update(running)
        self._newly_lost += running


def _is_final(error: CallError) -> bool:
    """Repeating will not help, and neither will anything else that this consumer can do."""
    return not error.retryable and (error.kind.status < 500 or error.code == "unavailable")
