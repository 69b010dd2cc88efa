"""Calls to a server from Spark's processes: blocking, repeated until they succeed or their time is up.

Every call made here is safe to repeat (produce and lease carry a key, the rest is so by its nature), so a server that is
killed and started again delays a query instead of failing it. The standard library's client is used because it reads a
large body in one piece.

In a cluster any instance does whatever it is asked. A client that is `direct` goes to the one that has what a call is about, and asks
the server it was given wherever that fails.
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
"""The `request_timeout` sent with a call: below `_ATTEMPT`, so that the server gives up before this side does."""

_ATTEMPT = 30.0
_OWNER_ATTEMPT = 10.0
"""Seconds that an owner may say nothing before the server is asked instead."""
_CONNECT = 5.0
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
    """A server, for one thread; with `direct` also the other instances of its cluster. The key is read anew for each call, so that it can
    be replaced while a query runs.

    A call is repeated after connection errors, time-outs, 429, 503 and 504, no sooner than the server asks, for `request_timeout` (ms;
    the last try may take a second more), then raises the last error. Any other refusal raises `SluicewayError` at once, with the server's
    code and detail; so does a certificate that is not trusted, or a server without TLS, as `unavailable`.

    With `direct` a call on partitions that one instance has goes there first, once; whatever comes of that but a success, the server is
    asked as without (after a 429 no sooner than the instance asks), so that such a call may take half a minute longer. The key goes to the
    addresses that the server names in `queues.info`, if they have the scheme of its own; nothing is followed that an answer redirects to.
    The server's certificates must do for all of them.
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
        """JSON in, JSON out."""
        return _object(self._do(path, json.dumps(body).encode(), JSON, JSON, about(body)))

    def send_arrow(self, path: str, query: Mapping[str, object], batch: pa.RecordBatch) -> dict[str, Any]:
        """One Arrow stream of one batch in, JSON out."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        where = None
        if self._owners is not None and "partition" in batch.schema.names:
            where = About(str(query["queue_name"]), frozenset(pc.unique(batch.column("partition")).to_pylist()))
        return _object(self._do(f"{path}?{urlencode(query)}", memoryview(sink.getvalue()), ARROW, JSON, where))

    def fetch_arrow(self, path: str, body: Mapping[str, object]) -> pa.RecordBatchReader:
        """JSON in, one Arrow stream out."""
        answer = self._do(path, json.dumps(body).encode(), JSON, ARROW, about(body))
        return pa.ipc.open_stream(pa.py_buffer(answer))

    def close(self) -> None:
        for door in self._doors.values():
            door.close()

    def _do(self, target: str, body: bytes | memoryview, sent: str, wanted: str, where: About | None) -> bytes:
        """The answer of whoever can be brought to give it."""
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
            # Whoever was asked had to pass it on.
            self._owners.forget(where.queue)
        return answer.text

    def _look(self, queue: str, headers: Mapping[str, str]) -> None:
        """Learn who has the queue's partitions, if it is time to. A server that does not tell is asked for everything."""
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
        """The answer of the instance that has all of it, if it is good or asks to wait; None: the server is to be asked."""
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
            # A ValueError: the address has a name that no host can have.
            door.close()
            reason = str(broken) or type(broken).__name__
            log.warning("%s%s: %s; asking %s instead (option direct)", address, _path(target), reason, self._url)
        self._owners.forget(where.queue)
        return None

    def _repeat(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], first: _Answer | None = None) -> _Answer:
        """The server's good answer, however often it takes to ask. `first`: what was answered to this call already."""
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
                    raise SluicewayError("unavailable", f"{self._url} does not speak TLS; is it to be http, not https?") from None
                reason = str(broken) or type(broken).__name__
                error = SluicewayError("outcome_unknown", f"{self._url}{_path(target)}: {reason}")
            pause, next_pause = asked + pause * random.uniform(0.5, 1.0), min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() + pause >= deadline:
                tried = format_duration(self._request_timeout)
                raise SluicewayError(error.code, f"{error.detail} (tried for {tried}; option requestTimeout)", error.field)
            time.sleep(pause)
            pause = next_pause


class _Answer(NamedTuple):
    """`retry_after`: the seconds that the server asks to wait. `served_by`: the other instance that has done the work, or nothing."""

    status: int
    text: bytes
    retry_after: int
    served_by: str


class _Door:
    """One connection to one address, made when it is needed."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._base = parts.path.rstrip("/")
        self._tls = tls
        self._connection: HTTPConnection | None = None

    def ask(self, target: str, body: bytes | memoryview, headers: Mapping[str, str], timeout: float) -> _Answer:
        """One attempt, in which the other side may be silent for `timeout` seconds. After an error `close` it.

        The other side may have closed a connection that was kept, as servers do with idle ones: then there is one more, on a new one.
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
