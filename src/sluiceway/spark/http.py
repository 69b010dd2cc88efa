"""Calls to a server from Spark's processes: blocking, repeated until they succeed or their time is up.

Every call made here is safe to repeat (produce and lease carry a key, the rest is so by its nature), so a server that is
killed and started again delays a query instead of failing it. The standard library's client is used because it reads a
large body in one piece.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, SluicewayError

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"

SERVER_WAIT: Millis = 20_000
"""The `request_timeout` sent with a call: below `_ATTEMPT`, so that the server gives up before this side does."""

_ATTEMPT = 30.0
_LEAST_ATTEMPT = 1.0
"""Seconds. A call that begins just before the time is up would only replace the server's last word by a time-out of its own."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_AGAIN = (429, 503, 504)


class Client:
    """One connection to one server, for one thread.

    A call is repeated after connection errors, time-outs, 429, 503 and 504 for `request_timeout` (ms; the last try may take a
    second more), then raises the last error. Any other refusal raises `SluicewayError` at once, with the server's code and detail.
    """

    def __init__(self, url: str, request_timeout: Millis) -> None:
        parts = urlsplit(url)
        self._url = url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path.rstrip("/")
        self._request_timeout = request_timeout
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
        headers = {"content-type": sent, "accept": wanted, "content-length": str(len(body))}
        deadline = time.monotonic() + self._request_timeout / 1000
        pause = _FIRST_PAUSE
        while True:
            try:
                status, answer = self._once(target, body, headers, deadline)
                if 200 <= status < 300:
                    return answer
                error = _problem(status, answer, target)
                if status not in _AGAIN or not error.retryable:
                    raise error
            except (OSError, HTTPException) as broken:
                self.close()
                reason = str(broken) or type(broken).__name__
                error = SluicewayError("outcome_unknown", f"{self._url}{_path(target)}: {reason}")
            pause, next_pause = pause * random.uniform(0.5, 1.0), min(pause * 2, _LONGEST_PAUSE)
            if time.monotonic() + pause >= deadline:
                tried = format_duration(self._request_timeout)
                raise SluicewayError(error.code, f"{error.detail} (tried for {tried}; option requestTimeout)", error.field)
            time.sleep(pause)
            pause = next_pause

    def _once(self, target: str, body: bytes | memoryview, headers: dict[str, str], deadline: float) -> tuple[int, bytes]:
        timeout = max(_LEAST_ATTEMPT, min(_ATTEMPT, deadline - time.monotonic()))
        if self._connection is None:
            kind = HTTPSConnection if self._secure else HTTPConnection
            self._connection = kind(self._host, self._port, timeout=timeout)
        elif self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        self._connection.request("POST", self._base + target, body, headers)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


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
        return SluicewayError(_known(problem["code"]), f"{problem['detail']} ({_path(target)})", problem.get("field"))
    except (ValueError, KeyError, TypeError):
        code = {429: "too_many_requests", 503: "unavailable", 504: "outcome_unknown"}.get(status, "internal")
        return SluicewayError(code, f"status {status}: {answer[:200].decode('utf-8', 'replace')} ({_path(target)})")


def _known(code: str) -> str:
    return code if code in KINDS else "internal"
