"""The HTTP code that both clients share: requests, timeouts, and errors of broken connections. It neither waits nor retries."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from sluiceway import __version__
from sluiceway.client.errors import CallError
from sluiceway.client.http_messages import Answer, ExchangeError, NotSentError, Origin, Request
from sluiceway.client.item_calls import Key
from sluiceway.client.protocol import DEFAULT_REQUEST_TIMEOUT, Call, Duration, millis, read_problem, unreadable
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, invalid
from sluiceway.kernel.limits import BURST_KEY, KEY_WINDOW

T = TypeVar("T")
DEFAULT_URL = "http://127.0.0.1:2319"
SLACK = 5.0
"""Seconds that the client waits beyond `request_timeout`, so that the server's answer to a timeout arrives: it alone knows the outcome."""

EVENTS_TIMEOUT = 45.0
"""Seconds without a byte after which an event stream counts as broken. The server sends data every 15 seconds."""


_PAGES = ("/ui", "/v1", "/docs", "/livez", "/readyz", "/metrics", "/openapi.json")
"""Paths that users sometimes copy together with a server's address."""


_ERRNO = re.compile(r"^\[Errno -?[0-9]+\] ")
"""How Python begins the message of an operating system's error. The number means nothing to a user."""


_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5}/?")


class Endpoint:
    """One server's address and the client's API key, and the requests to it.

    Raises `invalid_request` for a malformed `url` or `api_key`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if _HOST_AND_PORT.fullmatch(url):
            url = f"http://{url}"
        self.origin, host, path = _parsed(url)
        page = next((page for page in _PAGES if path.endswith(page)), None)
        if page is not None:
            raise invalid("url", f"{url!r} is the address of a page or call of the server; leave out {page}")
        self.url = f"{'https' if self.origin.tls else 'http'}://{host}{path}"
        self._path = path
        headers = f"Host: {host}\r\nUser-Agent: sluiceway-python/{__version__}\r\n"
        self.api_key = os.environ.get("SLUICEWAY_API_KEY", "") if api_key is None else api_key
        if not all("!" <= char <= "~" for char in self.api_key):
            raise invalid("api_key", "it has invalid characters; expected a text such as slw_ID_SECRET")
        if self.api_key:
            headers += f"Authorization: Bearer {self.api_key}\r\n"
        self._headers = headers
        self._heads: dict[tuple[str, str, str], bytes] = {}
        """The beginnings of requests, by path and types."""

    def context(self, ca_file: str | Path | None) -> ssl.SSLContext | None:
        """What the server is verified by: the certificates in `ca_file`, or the system's; None: it does not use TLS.

        Raises `invalid_request` for a bad `ca_file`.
        """
        if not self.origin.tls:
            return None
        paths = ssl.get_default_verify_paths()
        if ca_file is None and not (paths.cafile or paths.capath):
            # Such as on macOS before its certificates are installed.
            with contextlib.suppress(ModuleNotFoundError):
                ca_file = import_module("certifi").where()
        try:
            return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise invalid("ca_file", f"{ca_file} cannot be read as PEM certificates: {error}") from None

    def request(self, call: Call[T]) -> Request:
        name = (call.path, call.accept, call.content_type)
        head = self._heads.get(name)
        if head is None:
            head = (
                f"POST {self._path}{call.path} HTTP/1.1\r\n{self._headers}"
                f"Accept: {call.accept}\r\nContent-Type: {call.content_type}\r\nContent-Length: "
            ).encode("ascii")
            if "?" not in call.path:
                self._heads[name] = head
        return Request(self.origin, b"%b%d\r\n\r\n" % (head, len(call.body)), call.body, call.request_timeout / 1000 + SLACK)

    def get(self, path: str, patience: float, **headers: str) -> Request:
        """A GET request; an underscore in a header's name stands for a hyphen."""
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return Request(self.origin, f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}{lines}\r\n".encode("ascii"), b"", patience)

    def events(self, query: str, last_id: str | None) -> Request:
        last = {} if last_id is None else {"Last_Event_ID": last_id}
        return self.get(f"/v1/events{query}", EVENTS_TIMEOUT, Accept="text/event-stream", **last)

    def broken(self, error: ExchangeError) -> CallError:
        """The error of an attempt without an answer: `unavailable` if nothing was sent, otherwise `outcome_unknown`."""
        reason = str(error)
        if (untrusted := _untrusted(error)) is not None:
            hint = "name a private CA with ca_file (command line: --ca-file, SLUICEWAY_CA_FILE)"
            detail = f"the certificate of {self.url} is not trusted: {untrusted.verify_message}; {hint}"
            return CallError("unavailable", detail, kind=replace(KINDS["unavailable"], retryable=False))
        if "WRONG_VERSION_NUMBER" in reason:
            detail = f"{self.url} does not use TLS; use http:// in place of https://"
            return CallError("unavailable", detail, kind=replace(KINDS["unavailable"], retryable=False))
        if isinstance(error, NotSentError):
            return CallError("unavailable", f"cannot reach {self.url}: {_ERRNO.sub('', reason)}")
        return CallError("outcome_unknown", f"no answer from {self.url}: {reason}")


def _parsed(url: str) -> tuple[Origin, str, str]:
    """The server of a URL, its name and port for the header `Host`, and the path before those of the calls."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode("ascii"), parts.port
    except (ValueError, UnicodeError) as error:
        raise invalid("url", f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or any(char.isspace() for char in url):
        raise invalid("url", f"{url!r} is not a URL such as {DEFAULT_URL}")
    usual = 443 if parts.scheme == "https" else 80
    shown = f"[{host}]" if ":" in host else host
    if port not in (None, usual):
        shown += f":{port}"
    return Origin(parts.scheme == "https", host, port or usual), shown, quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")


def _untrusted(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


def read_answer(call: Call[T], answer: Answer) -> T:
    """Decode the answer to `call`. Raises CallError for a problem, and `outcome_unknown` for an unreadable answer."""
    if answer.status != 200:
        raise read_problem(answer.status, answer.body, answer.header(b"retry-after"))
    try:
        return call.read(answer.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise unreadable(error) from error


def seconds(duration: Duration, field: str) -> float:
    return millis(duration, field) / 1000


GENERATED_WINDOW: Millis = 10 * 60_000
"""Minimum window of a generated key. The key is needed only while its call is repeated."""


BURST_CALLS = 64
BURST_TIME = 0.01
"""A burst ends after so many calls, or so many seconds, so that a client's items are spread over the partitions."""


def new_key() -> str:
    return secrets.token_hex(16)


class Bursts:
    """Names generated keys. Calls that are made at about the same time have keys with the same home partition, and share its commit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._burst = ""
        self._left = 0
        self._ends = 0.0

    def name(self) -> str:
        """The name of a new key."""
        now = self._clock()
        if self._left <= 0 or now >= self._ends:
            return self.next()
        # Two threads may both count down from the same number: a burst is then longer by a call.
        self._left -= 1
        return f"{self._burst}{new_key()}"

    def next(self) -> str:
        """The name of a new key in a new burst: its home is probably another one than that of the last key."""
        self._burst, self._left, self._ends = f"{BURST_KEY}{secrets.token_hex(4)}/", BURST_CALLS - 1, self._clock() + BURST_TIME
        return f"{self._burst}{new_key()}"


_bursts = Bursts()


def another_name() -> str:
    """The name of a key in place of a generated one whose home could not be reached."""
    return _bursts.next()


def generated_key(retry_for: float, request_timeout: Duration | None) -> Key:
    """A generated key that outlives its call, whose last attempt starts within `retry_for` seconds and takes up to `request_timeout`."""
    wait = DEFAULT_REQUEST_TIMEOUT if request_timeout is None else millis(request_timeout, "request_timeout")
    window = max(GENERATED_WINDOW, round(retry_for * 1000) + wait + 60_000)
    return Key(_bursts.name(), window=format_duration(min(window, KEY_WINDOW)))
