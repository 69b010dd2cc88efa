"""Requests from other instances of the cluster. Not part of the API: it changes with compatibility levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_PEER_BYTES
from sluiceway.model.access import Caller
from sluiceway.model.inspection import ItemsPage
from sluiceway.model.peers import Ask, LeaseAnywhere, PeerRequest, Poll
from sluiceway.model.requests import Lease, Leased
from sluiceway.server.guard import PeerDoor
from sluiceway.server.http import Request, Send, respond
from sluiceway.server.long_poll import Waiting
from sluiceway.server.response_buffer import AnswerMemory
from sluiceway.wire import peer

_PEER: Final = Caller("peer", ())
_TYPE: Final = peer.CONTENT_TYPE.encode()


class PeerService(Protocol):
    """An instance, as its peers see it."""

    async def answer(self, request: PeerRequest) -> Any:
        """Answer a request with the type that `model.peers` defines. Raises SluicewayError. Cancelled when the peer stops waiting."""
        ...


class PeerCalls:
    """`POST` to `wire.peer.PATH`, authenticated by the cluster's secret. API keys and their rates do not apply."""

    def __init__(self, service: PeerService, secret: str) -> None:
        self._service = service
        self._door = PeerDoor(secret)
        self._waiting = Waiting()

    def stop_waiting(self) -> None:
        """End leases and polls with `unavailable`, now and from now on. All other requests continue."""
        self._waiting.stop()

    async def serve(self, request: Request, send: Send, memory: AnswerMemory) -> None:
        """Answer one request. Raises `unauthenticated` before its body is read, `body_too_large`, `invalid_body`, DisconnectedError."""
        self._door.admit(request)
        request.caller = _PEER
        await request.read_body(MAX_PEER_BYTES)
        asked = peer.decode_request(request.body)
        level = peer.level_of(request.body)
        try:
            answer = await self._waiting.run(request, self._service.answer(asked), long=_may_wait(asked))
        except SluicewayError as error:
            await respond(send, error.kind.status, _TYPE, peer.encode_error(error, level), request.request_id)
            return
        async with memory.building(sum(batch.nbytes for batch in _batches(answer))):
            body = peer.encode_answer(asked, answer, level)
        await respond(send, 200, _TYPE, body, request.request_id)


def _may_wait(asked: PeerRequest) -> bool:
    return isinstance(asked, Poll) or (isinstance(asked, Ask) and isinstance(asked.request, Lease | LeaseAnywhere))


def _batches(answer: object) -> Sequence[pa.RecordBatch]:
    if isinstance(answer, Leased):
        return answer.batches
    if isinstance(answer, ItemsPage):
        return [batch for batch, _ in answer.rows]
    return answer if isinstance(answer, list) else ()
