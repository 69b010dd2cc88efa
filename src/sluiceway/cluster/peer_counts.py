"""Counters of the requests from this instance to its peers."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.peers import Ask, PeerRequest
from sluiceway.model.requests import Leased
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError, Transport


class CountedTransport:
    """Transport that counts its calls by request and outcome.

    Outcomes: `done`; `not_here` (the peer does not own the partition); `refused` (any other error of the peer); `unreachable`;
    `unknown` (no answer came); `cancelled` (the caller stopped waiting).
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.calls: Counter[tuple[str, str]] = Counter()
        """Number of calls, by request, such as `produce`, and outcome."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Total duration of all calls, by request."""
        self.leases = 0
        """Number of leases that peers gave to consumers of this instance."""

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        kind = type(request.request if isinstance(request, Ask) else request).__name__.lower()
        began, outcome = stopwatch(), "cancelled"
        try:
            answer = await self._transport.ask(address, request, timeout, request_id)
            outcome = "done"
        except SluicewayError as error:
            outcome = "not_here" if error.code == "not_here" else "refused"
            raise
        except PeerRefusedError:
            outcome = "unreachable"
            raise
        except PeerUnknownError:
            outcome = "unknown"
            raise
        finally:
            self.calls[kind, outcome] += 1
            self.seconds[kind] += stopwatch() - began
        if isinstance(answer, Leased):
            self.leases += len(answer.leases)
        return answer

    async def close(self) -> None:
        await self._transport.close()
