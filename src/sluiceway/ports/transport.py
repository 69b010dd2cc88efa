"""Transport: how the instances of a cluster reach one another."""

from __future__ import annotations

from typing import Any, Protocol

from sluiceway.kernel.clock import Millis
from sluiceway.model.peers import PeerRequest

__all__ = ["PeerRefusedError", "PeerUnknownError", "Transport"]


class PeerRefusedError(Exception):
    """The peer could not be reached: it surely did nothing."""


class PeerUnknownError(Exception):
    """The request was sent, and no answer came: the peer may have done it, or do it yet."""


class Transport(Protocol):
    """One call to one peer, which answers it from what is its own and asks nobody else: there is one hop, so there are no loops."""

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        """What the peer answered; of which type, `model.peers` says. `address` is the URL that the peer's member record has.

        Raises the `SluicewayError` that the peer raised; PeerRefusedError; PeerUnknownError, also once `timeout` is over. If the caller is
        cancelled, the peer is told, and what it has not begun is not begun.
        """
        ...

    async def close(self) -> None: ...
