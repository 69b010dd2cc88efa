"""Calls to a server from Spark's processes: blocking, repeated until they succeed or their time is up.

Every call made here is safe to repeat (produce and lease carry a key, the rest is so by its nature), so a server that is
killed and started again delays a query instead of failing it. The standard library's client is used because it reads a
large body in one piece.
"""

from __future__ import annotations

import json
import os
import random
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

from sluiceway.adapters.secrets import read_secret
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, SluicewayError, invalid
from sluiceway.spark.options import Server

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"

SERVER_WAIT: Millis = 20_000
"""The `request_timeout` sent with a call: below `_ATTEMPT`, so that the server gives up before this side does."""

_ATTEMPT = 30.0
_LEAST_ATTEMPT = 1.0
"""Seconds. A call that begins just before the time is up would only replace the server's last word by a time-out of its own."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_AGAIN = (429, 503, 504)

_ADVICE = {
    "unauthenticated": "which key is sent says the option apiKey (env:NAME, file:PATH), else SLUICEWAY_API_KEY of driver and executors",
    "forbidden": "a query needs scopes on its queue: to read a stream consume and read, to read a table read, to write produce, to settle "
    "consume and read",
}


class Client:
    """One connection to one server, for one thread. The key is read anew for each call, so that it can be replaced while a query runs.

    A call is repeated after connection errors, time-outs, 429, 503 and 504, no sooner than the server asks, for `request_timeout` (ms;
    the last try may take a second more), then raises the last error. Any other refusal raises `SluicewayError` at once, with the server's
    code and detail; so does a certificate that is not trusted, as `unavailable`.
    """

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        self._url = server.url
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path.rstrip("/")
        self._request_timeout = server.request_timeout
        self._api_key = server.api_key
        self._tls = _authorities(server.ca_file) if parts.scheme == "https" else None
        self._connection: HTTPConnection | None = None

    @property
    def server_wait(self) -> str:
        """The `request_timeout` for a call's body."""
        return format_duration(min(SERVER_WAIT, self._request_timeout))

    def call(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """JSON in, JSON out."""
        return _object(self._repeat(path, json.dumps(body).encode(), JSON, JSON))

    def send_arrow(self, path: str, query: Mapping[str, object], batch: pa.RecordBatch) -> dict[str, Any]:
        """One Arrow stream of one batch in, JSON out."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        return _object(self._repeat(f"{path}?{urlencode(query)}", memoryview(sink.getvalue()), ARROW, JSON))

    def fetch_arrow(self, path: str, body: Mapping[str, object]) -> pa.RecordBatchReader:
        """JSON in, one Arrow stream out."""
        answer = self._repeat(path, json.dumps(body).encode(), JSON, ARROW)
        return pa.ipc.open_stream(pa.py_buffer(answer))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _repeat(self, target: str, body: bytes | memoryview, sent: str, wanted: str) -> bytes:
        key = _key(self._api_key)
        headers = {"content-type": sent, "accept": wanted, "content-length": str(len(body))}
        if key:
            headers["authorization"] = f"Bearer {key}"
        deadline = time.monotonic() + self._request_timeout / 1000
        pause = _FIRST_PAUSE
        while True:
            asked = 0
            try:
                answer = self._once(target, body, headers, deadline)
                text = answer.read()
                if 200 <= answer.status < 300:
                    return text
                error = _problem(answer.status, text, target)
                if answer.status not in _AGAIN or not error.retryable:
                    raise error
                asked = _retry_after(answer)
            except ssl.SSLCertVerificationError as untrusted:
                self.close()
                raise SluicewayError("unavailable", _untrusted(self._url, untrusted)) from None
            except (OSError, HTTPException) as broken:
                self.close()
                reason = str(broken) or type(broken).__name__
                error = SluicewayError("outcome_unknown", f"{self._url}{_path(target)}: {reason}")
            pause, next_pause = asked + pause * random.uniform(0.5, 1.0), min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() + pause >= deadline:
                tried = format_duration(self._request_timeout)
                raise SluicewayError(error.code, f"{error.detail} (tried for {tried}; option requestTimeout)", error.field)
            time.sleep(pause)
            pause = next_pause

    def _once(self, target: str, body: bytes | memoryview, headers: dict[str, str], deadline: float) -> HTTPResponse:
        timeout = max(_LEAST_ATTEMPT, min(_ATTEMPT, deadline - time.monotonic()))
        if self._connection is None:
            self._connection = self._connect(timeout)
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(timeout)
        try:
            self._connection.request("POST", self._base + target, body, headers)
        except (ConnectionError, ssl.SSLError) as broken:
            # A server that refuses a caller answers before it has the whole body, and closes.
            try:
                return self._connection.getresponse()
            except (OSError, HTTPException):
                raise broken from None
        return self._connection.getresponse()

    def _connect(self, timeout: float) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=timeout)
        return HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls)


def _key(where: str) -> str:
    """The API key that this machine has; empty: none. Raises `invalid_request`, which tells nothing of it."""
    note = f" on {socket.gethostname()}; the driver and every executor need it"
    key = (read_secret(where, "apiKey", os.environ, note=note) if where else os.environ.get("SLUICEWAY_API_KEY")) or ""
    if not all("!" <= char <= "~" for char in key):
        raise invalid("apiKey", f"{where or 'SLUICEWAY_API_KEY'} has characters that no API key has; expected a text such as slw_ID_SECRET")
    return key


def _authorities(ca_file: str) -> ssl.SSLContext:
    """How to know the server: by the certificates of the file, else by those of the machine. Raises `invalid_request`."""
    ca_file = ca_file or os.environ.get("SLUICEWAY_CA_FILE", "")
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        where = f"{ca_file} cannot be read as PEM certificates on {socket.gethostname()}"
        raise invalid("caFile", f"{where}: {error}; the driver and every executor need it") from None


def _untrusted(url: str, error: ssl.SSLCertVerificationError) -> str:
    who = "name the authority that made it in the option caFile, or in SLUICEWAY_CA_FILE on the driver and every executor"
    return f"the certificate of {url} is not trusted: {error.verify_message}; {who}"


def _retry_after(answer: HTTPResponse) -> int:
    """The seconds that the server asks to wait. A date is not understood: the clocks may differ."""
    text = answer.getheader("retry-after", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 0


def _path(target: str) -> str:
    return target.partition("?")[0]


def _object(answer: bytes) -> dict[str, Any]:
    value = json.loads(answer)
    if not isinstance(value, dict):
        raise SluicewayError("internal", "the server's answer is not a JSON object")
    return value


def _problem(status: int, answer: bytes, target: str) -> SluicewayError:
    """The server's problem, or, where something between answered instead, one that carries its status."""
    try:
        problem = json.loads(answer)
        code = _known(problem["code"])
        advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
        return SluicewayError(code, f"{problem['detail']} ({_path(target)}){advice}", problem.get("field"))
    except (ValueError, KeyError, TypeError):
        code = {429: "too_many_requests", 503: "unavailable", 504: "outcome_unknown"}.get(status, "internal")
        return SluicewayError(code, f"status {status}: {answer[:200].decode('utf-8', 'replace')} ({_path(target)})")


def _known(code: str) -> str:
    return code if code in KINDS else "internal"
