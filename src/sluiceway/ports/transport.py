"""Transport: calls between the instances of a cluster."""

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
    """One call to one peer, which answers from its own partitions without asking others: a single hop, hence no loops."""

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        """Return the peer's answer, of the type given in `model.peers`. `address` is the URL in the peer's member record.

        Raises the peer's `SluicewayError`; PeerRefusedError; PeerUnknownError, also after `timeout`. If the caller is cancelled, the peer
        is told, and drops work not begun.
        """
        ...

    async def close(self) -> None: ...
