"""Where the owners of partitions are, as far as a client has heard: which call goes straight to which instance. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sluiceway.client.answers import QueueInfo
from sluiceway.client.errors import CallError
from sluiceway.client.http_exchange import Endpoint
from sluiceway.client.protocol import Call
from sluiceway.kernel.errors import SluicewayError

AGAIN = 1.0
"""Seconds between two looks at the owners of one queue, and for which an instance that could not be reached is left alone."""
REFUSED = 60.0
"""Seconds until a queue is looked at again whose owners the server does not tell this client, as its key may not read it."""
IN_A_ROW = 3
"""So many leases that one other instance has served move the next ones there."""
_SAME_EVERYWHERE = ("stale_ids", "rate_limited", "too_many_requests")
"""What another instance would say too, or has been done."""


@dataclass
class _Known:
    """What is known of a queue. `look_at`: not looked at again before. `addresses` by partition."""

    look_at: float = 0.0
    outdated: bool = True
    addresses: dict[int, str] = field(default_factory=dict)
    leases_at: str | None = None
    hint: str | None = None
    hints: int = 0


class Direct:
    """For one client of `base`. Whatever it says may be out of date, and then costs a hop or a second attempt, never more.

    The API key goes to the addresses that the server of `base` tells, if they have the same scheme.
    """

    def __init__(self, base: Endpoint) -> None:
        self._base = base
        self._queues: dict[str, _Known] = {}
        self._endpoints: dict[str, Endpoint | None] = {}
        self._shunned: dict[str, float] = {}

    def to_look_up(self, call: Call[Any], now: float) -> str | None:
        """The queue whose owners should be learnt before that call; None: there is no need."""
        if call.about is None or call.about.takes:
            return None
        known = self._queues.setdefault(call.about.queue_name, _Known())
        if not known.outdated or now < known.look_at:
            return None
        known.look_at = now + AGAIN
        return call.about.queue_name

    def learn(self, queue_name: str, info: QueueInfo) -> None:
        known = self._queues.setdefault(queue_name, _Known())
        known.outdated = False
        known.addresses = {part.partition: part.address for part in info.partitions if part.address is not None}

    def not_told(self, queue_name: str, error: CallError, now: float) -> None:
        """The owners could not be learnt."""
        if not error.retryable:
            self._queues.setdefault(queue_name, _Known()).look_at = now + REFUSED

    def endpoint(self, call: Call[Any], now: float) -> Endpoint | None:
        """The one instance that the call is for; None: the base, because there are several, or nobody knows."""
        if call.about is None or call.about.queue_name not in self._queues:
            return None
        known = self._queues[call.about.queue_name]
        if call.about.takes:
            address = known.leases_at
        else:
            wanted = call.about.partitions()
            addresses = {known.addresses.get(number) if number is not None else None for number in wanted}
            address = addresses.pop() if len(addresses) == 1 else None
        if address is None or now < self._shunned.get(address, 0.0):
            return None
        return self._endpoint_at(address)

    def _endpoint_at(self, address: str) -> Endpoint | None:
        if address not in self._endpoints:
            try:
                found: Endpoint | None = Endpoint(address, self._base.api_key)
            except SluicewayError:
                found = None
            # How this client knows a server goes with the scheme, and so does whether others can read the key.
            self._endpoints[address] = found if found is not None and found.url.scheme == self._base.url.scheme else None
        return self._endpoints[address]

    def heard(self, call: Call[Any], served_by: str | None) -> None:
        """The answer to the call came; another instance may have done the work."""
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
        """That instance did not do it. Raises the error if the base would have to be asked in vain, or may not be asked now."""
        if error.code in _SAME_EVERYWHERE:
            raise error
        assert call.about is not None, "only such calls go straight to an instance"
        known = self._queues[call.about.queue_name]
        known.outdated, known.leases_at = True, None
        if error.retryable:
            self._shunned[next(address for address, each in self._endpoints.items() if each is at)] = now + AGAIN
        if error.outcome_unknown:
            # Whether it may be repeated is decided as for any call; then the base is asked.
            raise error
