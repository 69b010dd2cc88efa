"""The partition owners that a client knows of, for calls that go directly to an instance. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sluiceway.client.answers import QueueInfo
from sluiceway.client.errors import CallError
from sluiceway.client.http_exchange import Endpoint
from sluiceway.client.protocol import Call
from sluiceway.kernel.errors import SluicewayError

AGAIN = 1.0
"""Minimum seconds between two lookups of a queue's owners, and how long an unreachable instance is avoided."""
REFUSED = 60.0
"""Seconds until the next lookup of a queue's owners after the server refused one, because the API key may not read the queue."""
IN_A_ROW = 3
"""After this many consecutive leases served by the same other instance, leases go directly to it."""
_SAME_EVERYWHERE = ("stale_ids", "rate_limited", "too_many_requests")
"""Errors that a second attempt at another instance would not change."""


@dataclass
class _Known:
    """The known owners of a queue. `look_at`: earliest time of the next lookup. `addresses`: the owners' addresses by partition."""

    look_at: float = 0.0
    outdated: bool = True
    addresses: dict[int, str] = field(default_factory=dict)
    leases_at: str | None = None
    hint: str | None = None
    hints: int = 0


class Direct:
    """Routing of one client's calls. `base`: its server. Outdated knowledge costs a hop or a second attempt, never more.

    The API key is sent to the addresses that the server names, if they have the same URL scheme as `base`.
    """

    def __init__(self, base: Endpoint) -> None:
        self._base = base
        self._queues: dict[str, _Known] = {}
        self._endpoints: dict[str, Endpoint | None] = {}
        self._shunned: dict[Endpoint, float] = {}

    def to_look_up(self, call: Call[Any], now: float) -> str | None:
        """The queue whose owners to look up before the call; None: no lookup is needed."""
        if call.about is None or call.about.takes:
            return None
        known = self._queues.setdefault(call.about.queue_name, _Known())
        if not known.outdated or now < known.look_at:
            return None
        known.look_at = now + AGAIN
        return call.about.queue_name

    def learn(self, queue_name: str, info: QueueInfo) -> None:
        """Record the owners of a queue's partitions."""
        known = self._queues.setdefault(queue_name, _Known())
        known.outdated = False
        known.addresses = {part.partition: part.address for part in info.partitions if part.address is not None}

    def not_told(self, queue_name: str, error: CallError, now: float) -> None:
        """A lookup failed with `error`. If that is permanent, the next one waits for REFUSED seconds."""
        if not error.retryable:
            self._queues.setdefault(queue_name, _Known()).look_at = now + REFUSED

    def endpoint(self, call: Call[Any], now: float) -> Endpoint | None:
        """The instance to send the call to; None: the base, because the call has several owners or an unknown one."""
        if call.about is None or call.about.queue_name not in self._queues:
            return None
        known = self._queues[call.about.queue_name]
        if call.about.takes:
            address = known.leases_at
        else:
            wanted = call.about.partitions()
            addresses = {known.addresses.get(number) if number is not None else None for number in wanted}
            address = addresses.pop() if len(addresses) == 1 else None
        found = None if address is None else self._endpoint_at(address)
        return None if found is None or now < self._shunned.get(found, 0.0) else found

    def _endpoint_at(self, address: str) -> Endpoint | None:
        if address not in self._endpoints:
            try:
                found: Endpoint | None = Endpoint(address, self._base.api_key)
            except SluicewayError:
                found = None
            # Another scheme would mean another way to verify the server, or an API key sent unencrypted.
            self._endpoints[address] = found if found is not None and found.origin.tls == self._base.origin.tls else None
        return self._endpoints[address]

    def heard(self, call: Call[Any], served_by: str | None) -> None:
        """The call was answered. `served_by`: the address of the instance that did the work; None: the one that was called."""
        if call.about is None:
            return
        known = self._queues.setdefault(call.about.queue_name, _Known())
        if not call.about.takes:
            known.outdated = known.outdated or served_by is not None
            return
        known.hints = known.hints + 1 if served_by == known.hint else 1
        known.hint = served_by
        if served_by is not None and known.hints >= IN_A_ROW:
            known.leases_at, known.hints = served_by, 0

    def failed(self, call: Call[Any], at: Endpoint, error: CallError, now: float) -> None:
        """The call to instance `at` failed. Raises the error if the base would fail the same way, or if the outcome is unknown."""
        if error.code in _SAME_EVERYWHERE:
            raise error
        assert call.about is not None, "only such calls go straight to an instance"
        known = self._queues[call.about.queue_name]
        known.outdated, known.leases_at = True, None
        if error.retryable:
            self._shunned[at] = now + AGAIN
        if error.outcome_unknown:
            # The usual rules decide whether the call is repeated. The repeat goes to the base.
            raise error
