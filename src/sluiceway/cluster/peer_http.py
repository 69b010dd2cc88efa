"""HTTP transport to other instances: one connection for each call in flight, kept open for the next."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from sluiceway.cluster.peer_connection import Answer, NoAnswerError, PeerConnection, PeerConnections
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.compatibility import NEWEST
from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.model.peers import PeerRequest
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer

_CONNECT_TIMEOUT: Final = 3_000
"""Milliseconds, or half of the call's timeout if that is less. Instances of one cluster are close to one another."""

_PORTS: Final = {"http": 80, "https": 443}
_HEAD: Final = b"POST %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nContent-Type: %s\r\nContent-Length: "
_TYPE: Final = peer.CONTENT_TYPE.encode()
_PASSED_ON: Final = frozenset({"body_too_large", "too_many_requests", "unavailable", "storage_full", "outcome_unknown", "internal"})
"""Error codes of a peer that failed before it asked its share. Any other means that it does not accept this instance as a peer."""


class _Problem(msgspec.Struct):
    code: str
    detail: str = ""


class HttpTransport:
    """The port `Transport` over HTTP/1.1, for one event loop.

    `secret`: the cluster's. `ca_file`: certificates (PEM) of the authorities that peers under https are verified by, in place of the
    system's. `level`: the compatibility level of its messages. Ignores proxies named in the environment. Raises OSError if `ca_file` cannot
    be read.
    """

    def __init__(self, secret: str, ca_file: Path | None = None, level: Callable[[], int] = lambda: NEWEST) -> None:
        self._secret = secret.encode()
        self._level = level
        self._trusted = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._peers: dict[str, tuple[PeerConnections, bytes]] = {}
        """By address, each with the head that its requests share."""

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        body = peer.encode_request(request, self._level())
        deadline = asyncio.get_running_loop().time() + timeout / 1_000
        connections, head = self._peers.get(address) or self._meet(address)
        connection = connections.idle() or await _open(connections, address, min(_CONNECT_TIMEOUT, timeout // 2))
        # From here on the peer may carry out the request.
        try:
            async with asyncio.timeout_at(deadline):
                answer = await connection.ask(head, _rest(body, request_id), body)
        except TimeoutError:
            raise PeerUnknownError(f"{address} did not answer within {format_duration(timeout)}") from None
        except NoAnswerError as error:
            raise PeerUnknownError(f"no answer from {address}: {error}") from None
        finally:
            connections.give_back(connection)
        return _read(address, request, answer)

    async def close(self) -> None:
        peers, self._peers = self._peers, {}
        for connections, _ in peers.values():
            connections.close()

    def _meet(self, address: str) -> tuple[PeerConnections, bytes]:
        try:
            url = urlsplit(address)
            host, port = url.netloc.encode("idna"), url.port
        except ValueError as error:
            raise PeerRefusedError(f"{address[:200]!r} is not a URL: {error}") from None
        if url.scheme not in _PORTS or not url.hostname or address.rstrip("/").lower() != f"{url.scheme}://{url.netloc}".lower():
            raise PeerRefusedError(f"{address[:200]!r} is not a URL such as http://HOST:PORT")
        secure = url.scheme == "https"
        if secure and self._trusted is None:
            # Reading the system's certificates takes longer than many calls, so they are read only when needed.
            self._trusted = ssl.create_default_context()
        connections = PeerConnections(url.hostname, port or _PORTS[url.scheme], self._trusted if secure else None)
        self._peers[address] = connections, _HEAD % (peer.PATH.encode(), host, self._secret, _TYPE)
        return self._peers[address]


async def _open(connections: PeerConnections, address: str, timeout: Millis) -> PeerConnection:
    try:
        async with asyncio.timeout(timeout / 1_000):
            return await connections.open()
    except Exception as error:
        # Also covers what event loops raise by mistake when the peer goes away at that moment: nothing was written yet.
        reason = str(error) or f"no connection within {format_duration(timeout)}"
        raise PeerRefusedError(f"cannot reach {address}: {reason}") from None


def _rest(body: bytes, request_id: str) -> bytes:
    """Rest of the request's head, after the peer's part of it."""
    return b"%d\r\nX-Request-Id: %s\r\n\r\n" % (len(body), request_id.encode()) if request_id else b"%d\r\n\r\n" % len(body)


def _read(address: str, request: PeerRequest, answer: Answer) -> Any:
    """Decode the peer's answer. Raises the peer's error, PeerRefusedError, PeerUnknownError."""
    if answer.content_type != _TYPE:
        raise _refusal(address, answer.status, answer.body)
    try:
        if answer.status == 200:
            return peer.decode_answer(request, answer.body)
        error_there = peer.decode_error(answer.body)
    except SluicewayError as unreadable:
        raise PeerUnknownError(f"{address}: {unreadable.detail}") from None
    raise error_there


def _refusal(address: str, status: int, said: bytes) -> Exception:
    """Translate an answer that does not come from the peer endpoint into an exception."""
    problem = _Problem("")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        problem = msgspec.json.decode(said, type=_Problem)
    if problem.code not in KINDS or status != KINDS[problem.code].status:
        return PeerUnknownError(f"{address} answered HTTP {status}; this is not an answer of a Sluiceway instance")
    if problem.code in _PASSED_ON:
        return SluicewayError(problem.code, problem.detail)
    return PeerRefusedError(f"{address} refused the request: {problem.detail}")
