"""The HTTP code that both clients share: requests, timeouts, and errors of broken connections. It neither waits nor retries."""

from __future__ import annotations

import os
import re
import secrets
import ssl
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from sluiceway import __version__
from sluiceway.client.errors import CallError
from sluiceway.client.item_calls import Key
from sluiceway.client.protocol import DEFAULT_REQUEST_TIMEOUT, Call, Duration, millis, read_problem, unreadable
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, invalid
from sluiceway.kernel.limits import GENERATED_KEY, KEY_WINDOW

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:2319"
CONNECT_TIMEOUT = 5.0
SLACK = 5.0
"""Seconds that the client waits beyond `request_timeout`, so that the server's answer to a timeout arrives: it alone knows the outcome."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


EVENTS_TIMEOUT = 45.0
"""Seconds without a byte after which an event stream counts as broken. The server sends data every 15 seconds."""


_PAGES = ("/ui", "/v1", "/docs", "/livez", "/readyz", "/metrics", "/openapi.json")
"""Paths that users sometimes copy together with a server's address."""


_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}/?")


class Endpoint:
    """One server's address and the client's API key. It builds `httpx.Request`s itself, because `httpx.Client` would double a call's cost.

    Raises `invalid_request` for a malformed `url` or `api_key`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if _HOST_AND_PORT.fullmatch(url):
            url = f"http://{url}"
        try:
            self.url = httpx.URL(url.rstrip("/"))
        except httpx.InvalidURL as error:
            raise invalid("url", f"{url!r} is not a URL: {error}") from None
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise invalid("url", f"{url!r} is not a URL such as {DEFAULT_URL}")
        page = next((page for page in _PAGES if self.url.path.rstrip("/").endswith(page)), None)
        if page is not None:
            raise invalid("url", f"{url!r} is the address of a page or call of the server; leave out {page}")
        self._base = str(self.url)
        self._urls: dict[str, httpx.URL] = {}
        self._headers = [(b"Host", self.url.netloc), (b"User-Agent", f"sluiceway-python/{__version__}".encode())]
        self.api_key = os.environ.get("SLUICEWAY_API_KEY", "") if api_key is None else api_key
        if not all("!" <= char <= "~" for char in self.api_key):
            raise invalid("api_key", "it has invalid characters; expected a text such as slw_ID_SECRET")
        if self.api_key:
            self._headers.append((b"Authorization", f"Bearer {self.api_key}".encode()))

    def verify(self, ca_file: str | Path | None) -> ssl.SSLContext | bool:
        """The certificates to verify the server with: those in `ca_file`, or httpx's own. Raises `invalid_request` for a bad `ca_file`."""
        # Reading certificates takes longer than many calls, so they are read only if they are needed.
        if self.url.scheme != "https" or ca_file is None:
            return self.url.scheme == "https"
        try:
            return ssl.create_default_context(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise invalid("ca_file", f"{ca_file} cannot be read as PEM certificates: {error}") from None

    def events(self, query: str, last_id: str | None) -> httpx.Request:
        headers = [*self._headers, (b"Accept", b"text/event-stream")]
        if last_id is not None:
            headers.append((b"Last-Event-ID", last_id.encode()))
        timeout = {"connect": CONNECT_TIMEOUT, "read": EVENTS_TIMEOUT, "write": SLACK, "pool": SLACK}
        return httpx.Request("GET", httpx.URL(f"{self._base}/v1/events{query}"), headers=headers, extensions={"timeout": timeout})

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
        """The error of an attempt without an answer: `unavailable` if nothing was sent, otherwise `outcome_unknown`."""
        reason = str(error) or type(error).__name__
        if (untrusted := _untrusted(error)) is not None:
            hint = "name a private CA with ca_file (command line: --ca-file, SLUICEWAY_CA_FILE)"
            detail = f"the certificate of {self._base} is not trusted: {untrusted.verify_message}; {hint}"
            return CallError("unavailable", detail, kind=replace(KINDS["unavailable"], retryable=False))
        if "WRONG_VERSION_NUMBER" in reason:
            detail = f"{self._base} does not use TLS; use http:// in place of https://"
            return CallError("unavailable", detail, kind=replace(KINDS["unavailable"], retryable=False))
        if isinstance(error, _NOT_SENT):
            return CallError("unavailable", f"cannot reach {self._base}: {reason}")
        return CallError("outcome_unknown", f"no answer from {self._base}: {reason}")


def _untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    # Some of the layers in between set only the context of an error, not its cause.
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def read_answer(call: Call[T], response: httpx.Response, body: bytes) -> T:
    """Decode the answer to `call`. Raises CallError for a problem, and `outcome_unknown` for an unreadable answer."""
    if response.status_code != 200:
        raise read_problem(response.status_code, body, response.headers.get("retry-after"))
    try:
        return call.read(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(error) from error


def seconds(duration: Duration, field: str) -> float:
    return millis(duration, field) / 1000


GENERATED_WINDOW: Millis = 10 * 60_000
"""Minimum window of a generated key. The key is needed only while its call is repeated."""


def new_key() -> str:
    return secrets.token_hex(16)


def generated_name() -> str:
    """The name of a generated key, which its call may replace."""
    return GENERATED_KEY + new_key()


def generated_key(retry_for: float, request_timeout: Duration | None) -> Key:
    """A generated key that outlives its call, whose last attempt starts within `retry_for` seconds and takes up to `request_timeout`."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    window = max(GENERATED_WINDOW, round(retry_for * 1000) + wait + 60_000)
    return Key(generated_name(), window=format_duration(min(window, KEY_WINDOW)))
