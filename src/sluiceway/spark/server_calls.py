"""Server calls from Spark's processes: blocking, retried until they succeed or their time is up.

All calls made here are idempotent (produce and lease carry a key, the others by nature), so a server restart delays a query instead of
failing it. Uses the standard library's client, since it reads a large body in one piece.

In a cluster any instance serves any call. A `direct` client goes to the instance that owns the call's partitions, and falls back to the
configured server.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.adapters.secrets import read_secret
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, SluicewayError, invalid
from sluiceway.spark.options import Server
from sluiceway.spark.owners import About, Owners, about

log = logging.getLogger("sluiceway.spark")

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"

SERVER_WAIT: Millis = 20_000
"""The `request_timeout` sent with a call: below `_ATTEMPT`, so that the server gives up first."""

_ATTEMPT = 30.0
_OWNER_ATTEMPT = 10.0
"""Seconds of an owner's silence before the configured server is asked instead."""
_CONNECT = 5.0
_LEAST_ATTEMPT = 1.0
"""Minimum time limit of an attempt in seconds: a shorter last attempt would only replace the server's last error by a time-out."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_AGAIN = (429, 503, 504)

_ADVICE = {
    "unauthenticated": "which key is sent says the option apiKey (env:NAME, file:PATH), else SLUICEWAY_API_KEY of driver and executors",
    "forbidden": "a query needs scopes on its queue: to read a stream consume and read, to read a table read, to write produce, to settle "
    "consume and read",
}


class Client:
    """A server, for one thread; with `direct` also the other instances of its cluster. The key is read for each call, so that it can be
    replaced while a query runs.

    A call is retried after connection errors, time-outs, 429, 503 and 504, no sooner than the server asks, for `request_timeout` (ms; the
    last attempt may take a second more), then raises the last error. Any other refusal raises `SluicewayError` at once, with the server's
    code and detail; an untrusted certificate, or a server without TLS, raises `unavailable` at once.

    With `direct`, a call on partitions of one instance goes there first, once; unless that succeeds, the configured server is asked as
    usual (after a 429 no sooner than the instance asks), so such a call may take half a minute longer. The key is sent to the addresses in
    `queues.info` that have the server's own scheme; redirects are never followed. The server's certificate authorities must cover all
    instances.
    """

    def __init__(self, server: Server) -> None:
        self._url = server.url
        self._request_timeout = server.request_timeout
        self._api_key = server.api_key
        self._tls = _authorities(server.ca_file) if urlsplit(server.url).scheme == "https" else None
        self._server = _Door(server.url, self._tls)
        self._owners = Owners(server.url) if server.direct else None
        self._doors = {server.url: self._server}

    @property
    def server_wait(self) -> str:
        """The `request_timeout` for a call's body."""
        return format_duration(min(SERVER_WAIT, self._request_timeout))

    def call(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """Send JSON, return JSON."""
        return _object(self._do(path, json.dumps(body).encode(), JSON, JSON, about(body)))

    def send_arrow(self, path: str, query: Mapping[str, object], batch: pa.RecordBatch) -> dict[str, Any]:
        """Send one Arrow stream of one batch, return JSON."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        where = None
        if self._owners is not None and "partition" in batch.schema.names:
            where = About(str(query["queue_name"]), frozenset(pc.unique(batch.column("partition")).to_pylist()))
        return _object(self._do(f"{path}?{urlencode(query)}", memoryview(sink.getvalue()), ARROW, JSON, where))

    def fetch_arrow(self, path: str, body: Mapping[str, object]) -> pa.RecordBatchReader:
        """Send JSON, return one Arrow stream."""
        answer = self._do(path, json.dumps(body).encode(), JSON, ARROW, about(body))
        return pa.ipc.open_stream(pa.py_buffer(answer))

    def close(self) -> None:
        for door in self._doors.values():
            door.close()

    def _do(self, target: str, body: bytes | memoryview, sent: str, wanted: str, where: About | None) -> bytes:
        """Make a call, to the owner or the configured server, and return the answer's body."""
        key = _key(self._api_key)
        headers = {"content-type": sent, "accept": wanted, "content-length": str(len(body))}
        if key:
            headers["authorization"] = f"Bearer {key}"
        if self._owners is None or where is None:
            return self._repeat(target, body, headers).text
        self._look(where.queue, headers)
        answer = self._of_owner(where, target, body, headers)
        if answer is None or answer.status != 200:
            answer = self._repeat(target, body, headers, answer)
        if answer.served_by:
            # The instance asked had to forward the call, so the known owners are outdated.
            self._owners.forget(where.queue)
        return answer.text

    def _look(self, queue: str, headers: Mapping[str, str]) -> None:
        """Look up the owners of the queue's partitions, if it is time to. Without an answer, all calls go to the configured server."""
        assert self._owners is not None, "only a direct client looks"
        if not self._owners.to_look(queue, time.monotonic()):
            return
        body = json.dumps({"queue_name": queue}).encode()
        asking = {**headers, "content-type": JSON, "accept": JSON, "content-length": str(len(body))}
        try:
            answer = self._server.ask("/v1/queues.info", body, asking, _OWNER_ATTEMPT)
            if answer.status == 200:
                self._owners.learn(queue, _object(answer.text)["partitions"])
        except (OSError, HTTPException, SluicewayError, ValueError, KeyError, TypeError):
            self._server.close()

    def _of_owner(self, where: About, target: str, body: bytes | memoryview, headers: Mapping[str, str]) -> _Answer | None:
        """The answer of the single owner, if it succeeds or asks to wait; None: ask the configured server."""
        assert self._owners is not None, "only a direct client asks owners"
        address = self._owners.of(where)
        if address is None:
            return None
        door = self._doors.get(address)
        if door is None:
            door = self._doors[address] = _Door(address, self._tls)
        try:
            answer = door.ask(target, body, headers, _OWNER_ATTEMPT)
            if answer.status in (200, 429):
                return answer
        except (OSError, HTTPException, ValueError) as broken:
            # A ValueError: the address has an invalid host name.
            door.close()
            reason = str(broken) or type(broken).__name__
            log.warning("%s%s: %s; asking %s instead (option direct)", address, _path(target), reason, self._url)
        self._owners.forget(where.queue)
        return None

    def _repeat(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], first: _Answer | None = None) -> _Answer:
        """Ask the configured server, with retries, until it succeeds. `first`: an answer already received to this call."""
        deadline = time.monotonic() + self._request_timeout / 1000
        pause = _FIRST_PAUSE
        while True:
            asked = 0
            try:
                left = max(_LEAST_ATTEMPT, min(_ATTEMPT, deadline - time.monotonic()))
                answer, first = first or self._server.ask(target, body, headers, left), None
                if 200 <= answer.status < 300:
                    return answer
                error = _problem(answer.status, answer.text, target)
                if answer.status not in _AGAIN or not error.retryable:
                    raise error
                asked = answer.retry_after
            except ssl.SSLCertVerificationError as untrusted:
                self._server.close()
                raise SluicewayError("unavailable", _untrusted(self._url, untrusted)) from None
            except (OSError, HTTPException) as broken:
                self._server.close()
                if isinstance(broken, ssl.SSLError) and broken.reason == "WRONG_VERSION_NUMBER":
                    raise SluicewayError("unavailable", f"{self._url} does not use TLS; use http:// in place of https://") from None
                reason = str(broken) or type(broken).__name__
                error = SluicewayError("outcome_unknown", f"{self._url}{_path(target)}: {reason}")
            pause, next_pause = asked + pause * random.uniform(0.5, 1.0), min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() + pause >= deadline:
                tried = format_duration(self._request_timeout)
                raise SluicewayError(error.code, f"{error.detail} (tried for {tried}; option requestTimeout)", error.field)
            time.sleep(pause)
            pause = next_pause


class _Answer(NamedTuple):
    """`retry_after`: seconds that the server asks to wait. `served_by`: the other instance that did the work, or empty."""

    status: int
    text: bytes
    retry_after: int
    served_by: str


class _Door:
    """One connection to one address, opened on demand."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._base = parts.path.rstrip("/")
        self._tls = tls
        self._connection: HTTPConnection | None = None

    def ask(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], timeout: float) -> _Answer:
        """Make one attempt, with a limit of `timeout` seconds of silence. After an error, `close` it.

        A reused connection may have been closed by the server as idle; the call is then repeated once, on a new one.
        """
        kept = self._connection is not None and self._connection.sock is not None
        try:
            return self._answer(target, body, headers, timeout)
        except (ConnectionError, ssl.SSLError):
            if not kept:
                raise
            self.close()
            return self._answer(target, body, headers, timeout)

    def _answer(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], timeout: float) -> _Answer:
        answer = self._exchange(target, body, headers, timeout)
        return _Answer(answer.status, answer.read(), _retry_after(answer), answer.getheader("x-sluiceway-served-by", ""))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], timeout: float) -> HTTPResponse:
        if self._connection is None:
            self._connection = self._connect(min(timeout, _CONNECT))
        if self._connection.sock is None:
            self._connection.connect()
        self._connection.sock.settimeout(timeout)
        try:
            self._connection.request("POST", self._base + target, body, dict(headers))
        except (ConnectionError, ssl.SSLError) as broken:
            # A server that refuses a request may answer before reading the whole body, and close.
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
    """The API key on this machine; empty: none. Raises `invalid_request` that reveals nothing of it."""
    note = f" on {socket.gethostname()}; the driver and every executor need it"
    key = (read_secret(where, "apiKey", os.environ, note=note) if where else os.environ.get("SLUICEWAY_API_KEY")) or ""
    if not all("!" <= char <= "~" for char in key):
        raise invalid("apiKey", f"{where or 'SLUICEWAY_API_KEY'} has invalid characters; expected a text such as slw_ID_SECRET")
    return key


def _authorities(ca_file: str) -> ssl.SSLContext:
    """The TLS context with the file's certificate authorities, or the machine's. Raises `invalid_request`."""
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
    """Seconds that the server asks to wait. Dates are ignored, since the clocks may differ."""
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
    """The server's problem document as an error; if a proxy answered instead, an error with its status."""
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
