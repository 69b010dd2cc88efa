"""Asks other instances over HTTP: a connection for each call that is under way, kept open for the next."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.kernel.limits import MAX_ANSWERS_BYTES
from sluiceway.model.peers import PeerRequest
from sluiceway.ports.transport import PeerRefusedError, PeerUnknownError
from sluiceway.wire import peer

_CONNECT_TIMEOUT: Final = 3.0
"""Seconds, or half of the call's time if that is less. Instances of one cluster are near to one another."""

_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0)
"""No cap, as what waits holds one. Idle ones are closed before the peer does it: a call into a closing one ends unknown."""

_NOT_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""Anything else may have come after the last byte of the request, also what is called a failed write."""

_TYPE: Final = peer.CONTENT_TYPE.encode()
_PASSED_ON: Final = frozenset({"body_too_large", "too_many_requests", "unavailable", "outcome_unknown", "internal"})
"""Codes of an instance that did not get as far as asking its share. Any other says that it does not take us for a peer of its."""


class _Peer(NamedTuple):
    url: httpx.URL
    transport: httpx.AsyncHTTPTransport


class _Problem(msgspec.Struct):
    code: str
    detail: str = ""


class HttpTransport:
    """The port `Transport` over HTTP/1.1, for one event loop.

    `secret` is the cluster's. `ca_file`: certificates (PEM) of the authorities by which peers under https are known, in place of the
    system's. Proxies that the environment names are not used. Raises OSError for a `ca_file` that cannot be read.
    """

    def __init__(self, secret: str, ca_file: Path | None = None) -> None:
        self._authorization = f"Bearer {secret}".encode()
        self._trusted = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
        self._peers: dict[str, _Peer] = {}

    async def ask(self, address: str, request: PeerRequest, timeout: Millis, request_id: str = "") -> Any:
        body = peer.encode_request(request)
        seconds = timeout / 1_000
        try:
            async with asyncio.timeout(seconds):
                status, headers, said = await self._exchange(address, body, seconds, request_id)
        except TimeoutError:
            raise PeerUnknownError(f"{address} did not answer within {format_duration(timeout)}") from None
        except httpx.InvalidURL as error:
            raise PeerRefusedError(f"{address[:200]!r} is not a URL: {error}") from None
        except httpx.RequestError as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, _NOT_SENT):
                raise PeerRefusedError(f"cannot reach {address}: {reason}") from None
            raise PeerUnknownError(f"no answer from {address}: {reason}") from None
        if headers.get("content-type") != peer.CONTENT_TYPE:
            raise _refusal(address, status, said)
        try:
            if status == 200:
                return peer.decode_answer(request, said)
            error_there = peer.decode_error(said)
        except SluicewayError as unreadable:
            raise PeerUnknownError(f"{address}: {unreadable.detail}") from None
        raise error_there

    async def close(self) -> None:
        peers, self._peers = self._peers, {}
        for each in peers.values():
            await each.transport.aclose()

    async def _exchange(self, address: str, body: bytes, seconds: float, request_id: str) -> tuple[int, httpx.Headers, bytes]:
        found = self._peers.get(address) or self._meet(address)
        headers = [
            (b"Host", found.url.netloc),
            (b"Authorization", self._authorization),
            (b"Content-Type", _TYPE),
            (b"Content-Length", b"%d" % len(body)),
        ]
        if request_id:
            headers.append((b"X-Request-Id", request_id.encode()))
        timeouts = {"connect": min(_CONNECT_TIMEOUT, seconds / 2), "read": None, "write": None, "pool": None}
        # By hand, since the checks of `httpx.AsyncClient` cost as much again as the call.
        asked = httpx.Request("POST", found.url, headers=headers, stream=httpx.ByteStream(body), extensions={"timeout": timeouts})
        response = await found.transport.handle_async_request(asked)
        try:
            return response.status_code, response.headers, await _read(response)
        finally:
            await response.aclose()

    def _meet(self, address: str) -> _Peer:
        url = httpx.URL(address.rstrip("/") + peer.PATH)
        if url.scheme == "https" and self._trusted is None:
            # To read the system's takes longer than many calls, so only where they are needed.
            self._trusted = ssl.create_default_context()
        # A pool of its own, as each call looks through all connections of its pool.
        transport = httpx.AsyncHTTPTransport(verify=self._trusted or False, limits=_LIMITS)
        self._peers[address] = _Peer(url, transport)
        return self._peers[address]


async def _read(response: httpx.Response) -> bytes:
    parts, size = [], 0
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for part in response.stream:
        size += len(part)
        if size > MAX_ANSWERS_BYTES:
            raise httpx.ReadError(f"the answer is larger than {MAX_ANSWERS_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _refusal(address: str, status: int, said: bytes) -> Exception:
    """What an answer means that does not come from the peer's endpoint."""
    problem = _Problem("")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        problem = msgspec.json.decode(said, type=_Problem)
    if problem.code not in KINDS or status != KINDS[problem.code].status:
        return PeerUnknownError(f"{address} answered HTTP {status}, and not as an instance of Sluiceway does")
    if problem.code in _PASSED_ON:
        return SluicewayError(problem.code, problem.detail)
    return PeerRefusedError(f"{address} did not take the request: {problem.detail}")
