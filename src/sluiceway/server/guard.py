"""Guards: authentication and rate limits of callers."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from sluiceway.adapters import system
from sluiceway.core.queue.token_bucket import Bucket, Rates
from sluiceway.instance.api_keys import ApiKeys
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import RateLimitedError, SluicewayError
from sluiceway.kernel.limits import MAX_API_KEYS
from sluiceway.model.access import ANYBODY, ApiKey, Caller, Scope, check_admin_key
from sluiceway.server.http import Request

log = logging.getLogger("sluiceway.server")

ADMIN: Final = Caller("admin", (Scope("admin"),))
"""Caller with the admin key of the configuration."""

_LOG_INTERVAL: Final = 1_000
_SCHEME: Final = b"bearer"


class OpenDoor:
    """Guard of a server without authentication: every caller has all rights.

    `hosts`: names under which this server may be called, besides localhost and loopback addresses; a request to another name is
    `forbidden`. This keeps a web page whose name was pointed at this machine from calling the server through the reader's browser. None:
    any name, for a server that other machines may call.
    """

    def __init__(self, hosts: Iterable[str] | None = None) -> None:
        self._hosts = None if hosts is None else frozenset(host.lower().rstrip(".") for host in hosts)

    async def admit(self, request: Request) -> Caller:
        if self._hosts is not None and not _is_here(request.host, self._hosts):
            shown = request.host.decode("latin-1")[:80]
            detail = f"authentication is off, so this server answers only to localhost, not to the name {shown!r}"
            raise SluicewayError("forbidden", f"{detail}; call it as http://127.0.0.1:PORT, or turn on API keys")
        return ANYBODY

    async def recheck(self, request: Request) -> Caller:
        return request.caller

    def charge(self, caller: Caller, size: int) -> None: ...


@lru_cache(16)
def _is_here(host: bytes, names: frozenset[str]) -> bool:
    if not host:
        # Not from a browser: every browser sends a Host.
        return True
    text = host.decode("latin-1").lower()
    name = text[1 : text.find("]")] if text.startswith("[") else text.partition(":")[0]
    name = name.rstrip(".")
    if name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class KeyGuard:
    """Guard that requires an API key and applies its rates. Use from one event loop.

    `admin_key` is valid only for the calls that need `admin`; it is not in the meta store and has no rate.
    Raises `invalid_request` for an `admin_key` that could be guessed.
    """

    def __init__(self, keys: ApiKeys, rates: Rates | None = None, admin_key: str = "") -> None:
        self._keys = keys
        self._rates = rates or Rates()
        self._admin = _digest(check_admin_key(admin_key, "server.admin_key")) if admin_key else b""
        self._requests: dict[str, Bucket] = {}
        self._bytes: dict[str, Bucket] = {}
        self._refusals = _Refusals("API key")

    def configure(self, rates: Rates) -> None:
        """Set the rates of keys without rates of their own."""
        self._rates = rates

    async def admit(self, request: Request) -> Caller:
        """Authenticate the request, and count it. Raises `unauthenticated`, `rate_limited`, `unavailable`."""
        text = _token(request.authorization)
        if not text:
            self._refusals.note(request, "none")
            raise _unauthenticated("this server requires an API key: send the header Authorization: Bearer slw_ID_SECRET")
        if hmac.compare_digest(_digest(text), self._admin):
            return ADMIN
        holder = await self._keys.find(text)
        if holder is None:
            self._refusals.note(request, _shown_id(text))
            raise _unauthenticated("the API key is unknown, has expired or was revoked; ask an administrator for another one")
        self._pace(holder.key)
        return holder.caller

    async def recheck(self, request: Request) -> Caller:
        """Check an admitted caller again during a long answer. Asks no store, and does not count as a request. Raises `unauthenticated`."""
        caller = request.caller
        if caller.key_id and self._keys.known(caller.key_id) is None:
            raise _unauthenticated("the API key has expired or was revoked")
        return caller

    def charge(self, caller: Caller, size: int) -> None:
        """Count a body. A body larger than the key's remaining allowance delays its later requests."""
        bucket = self._bytes.get(caller.key_id)
        if bucket is not None:
            bucket.take(size)

    def _pace(self, key: ApiKey) -> None:
        now, rates = system.now(), _rates_of(key, self._rates)
        requests = self._bucket(self._requests, key.key_id, rates.requests_per_second, now)
        size = self._bucket(self._bytes, key.key_id, rates.bytes_per_second, now)
        for bucket, rate, what in ((requests, rates.requests_per_second, "requests"), (size, rates.bytes_per_second, "bytes")):
            wait = bucket.wait(rate, now) if bucket is not None else 0
            if wait:
                raise RateLimitedError(f"the API key {key.key_id} may send {rate:,} {what} per second; wait {wait} ms", wait)
        if requests is not None:
            requests.take(1)

    def _bucket(self, buckets: dict[str, Bucket], key_id: str, rate: int, now: Millis) -> Bucket | None:
        if not rate:
            buckets.pop(key_id, None)
            return None
        bucket = buckets.get(key_id)
        if bucket is None:
            if len(buckets) >= MAX_API_KEYS:
                for gone in [each for each in buckets if self._keys.known(each) is None]:
                    del buckets[gone]
            bucket = buckets[key_id] = Bucket(rate, now)
        return bucket


class PeerDoor:
    """Guard for the other instances of the cluster, which know its secret."""

    def __init__(self, secret: str) -> None:
        self._secret = _digest(secret)
        self._refusals = _Refusals("cluster secret")

    def admit(self, request: Request) -> None:
        """Check the cluster secret. Raises `unauthenticated`."""
        text = _token(request.authorization)
        if not hmac.compare_digest(_digest(text), self._secret):
            self._refusals.note(request, "unreadable" if text else "none")
            raise _unauthenticated("this endpoint is only for the other instances of this cluster, those that share its meta store")


class _Refusals:
    """Log of refused requests: the first at once, then at most one line a second."""

    def __init__(self, needed: str) -> None:
        self._needed = needed
        self._count = 0
        self._next_at: Millis = 0

    def note(self, request: Request, key_id: str) -> None:
        self._count += 1
        now = system.now()
        if now >= self._next_at:
            log.warning(
                "refused without a valid %s: %d requests; the last one from %s, key id %s, request_id %s",
                self._needed,
                self._count,
                request.peer,
                key_id,
                request.request_id.decode(),
            )
            self._count, self._next_at = 0, now + _LOG_INTERVAL


def _rates_of(key: ApiKey, rates: Rates) -> Rates:
    requests, size = key.requests_per_second, key.bytes_per_second
    return Rates(rates.requests_per_second if requests is None else requests, rates.bytes_per_second if size is None else size)


def _token(authorization: bytes) -> str:
    """Return the token after `Bearer`; empty if there is none."""
    scheme, _, token = authorization.strip().partition(b" ")
    return token.strip().decode("latin-1") if scheme.lower() == _SCHEME else ""


def _shown_id(text: str) -> str:
    """Return the public part of an apparent key. Other texts are not shown: one may be a password sent by mistake."""
    prefix, _, rest = text.partition("_")
    key_id = rest.partition("_")[0]
    return key_id if prefix == "slw" and key_id.isascii() and key_id.isalnum() and len(key_id) == 8 else "unreadable"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _unauthenticated(detail: str) -> SluicewayError:
    return SluicewayError("unauthenticated", detail)
