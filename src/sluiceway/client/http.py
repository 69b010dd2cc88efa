"""What the two clients share of HTTP: requests, time-outs, and what a broken connection means. No waiting, no retrying."""

from __future__ import annotations

import secrets
from typing import TypeVar

import httpx
import msgspec

from sluiceway import __version__
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Key
from sluiceway.client.protocol import DEFAULT_REQUEST_TIMEOUT, Call, Duration, millis, read_problem, unreadable
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import KEY_WINDOW

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:2319"
CONNECT_TIMEOUT = 5.0
SLACK = 5.0
"""Seconds beyond `request_timeout` in which the server's own answer to a time-out can still arrive: it knows the outcome, we do not."""

LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=30.0)
"""No cap, as a waiting lease holds one. Idle ones are closed before the server does it: a call into a closing one ends unknown."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Endpoint:
    """One server. Builds `httpx.Request`s by hand, since the checks of `httpx.Client` cost as much again as the call."""

    def __init__(self, url: str) -> None:
        try:
            self.url = httpx.URL(url.rstrip("/"))
        except httpx.InvalidURL as error:
            raise invalid("url", f"{url!r} is not a URL: {error}") from None
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise invalid("url", f"{url!r} is not a URL such as {DEFAULT_URL}")
        self._base = str(self.url)
        self._urls: dict[str, httpx.URL] = {}
        self._headers = [(b"Host", self.url.netloc), (b"User-Agent", f"sluiceway-python/{__version__}".encode())]

    def request(self, call: Call[T]) -> httpx.Request:
        url = self._urls.get(call.path)
        if url is None:
            url = httpx.URL(self._base + call.path)
            if "?" not in call.path:
                self._urls[call.path] = url
        patience = call.request_timeout / 1000 + SLACK
        return httpx.Request(
            "POST",
            url,
            headers=[
                *self._headers,
                (b"Accept", call.accept.encode()),
                (b"Content-Type", call.content_type.encode()),
                (b"Content-Length", b"%d" % len(call.body)),
            ],
            stream=httpx.ByteStream(call.body),
            extensions={"timeout": {"connect": CONNECT_TIMEOUT, "read": patience, "write": patience, "pool": patience}},
        )

    def broken(self, error: httpx.RequestError) -> CallError:
        """What an attempt without an answer means: nothing was sent, or nobody knows."""
        reason = str(error) or type(error).__name__
        if isinstance(error, _NOT_SENT):
            return CallError("unavailable", f"cannot reach {self._base}: {reason}")
        return CallError("outcome_unknown", f"no answer from {self._base}: {reason}")


def read_answer(call: Call[T], status: int, body: bytes) -> T:
    if status != 200:
        raise read_problem(status, body)
    try:
        return call.read(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(error) from error


def seconds(duration: Duration, field: str) -> float:
    return millis(duration, field) / 1000


GENERATED_WINDOW: Millis = 10 * 60_000
"""How long the server remembers a key that the client made up, at least: it is of use only while this call is repeated."""


def new_key() -> str:
    return secrets.token_hex(16)


def generated_key(retry_for: float, request_timeout: Duration | None) -> Key:
    """A key that outlives the call, whose last attempt begins within `retry_for` seconds and has `request_timeout` to be carried out."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    window = max(GENERATED_WINDOW, round(retry_for * 1000) + wait + 60_000)
    return Key(new_key(), window=format_duration(min(window, KEY_WINDOW)))
