"""Server calls from Spark's processes: blocking, retried until they succeed or their time is up.

All calls made here are idempotent (produce and lease carry a key, the others by nature), so a server restart delays a query instead of
failing it. Errors, retries, owners and connections are the client's (`client/_sync/channel.py`).

In a cluster any instance serves any call. A `direct` client goes to the instance that owns the call's partitions, and falls back to the
configured server.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.client import protocol
from sluiceway.client._sync.channel import Channel
from sluiceway.client.connections import Connections, Sent
from sluiceway.client.errors import CallError
from sluiceway.client.http_exchange import Endpoint
from sluiceway.client.http_messages import Answer, ExchangeError, NoAnswerError, NotSentError, Request
from sluiceway.client.protocol import ARROW, About, Call
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import KINDS, SluicewayError, invalid
from sluiceway.kernel.secrets import read_secret
from sluiceway.spark.options import Server

log = logging.getLogger("sluiceway.spark")
T = TypeVar("T")

SERVER_WAIT: Millis = 20_000
"""The `request_timeout` sent with a call: below the client's patience, so that the server gives up first."""

_OWNER_ATTEMPT = 10.0
"""Seconds of an owner's silence before the configured server is asked instead."""
_LEAST_ATTEMPT = 1.0
"""Minimum time limit of an attempt in seconds: a shorter last attempt would only replace the server's last error by a time-out."""

_ADVICE = {
    "unauthenticated": "the key is that of the option apiKey (env:NAME, file:PATH), else SLUICEWAY_API_KEY of driver and executors",
    "forbidden": "a query needs these scopes on its queue: consume and read for a stream, read for a table, produce for writing, consume "
    "and read for settling",
}


class Client:
    """A server, for one thread; with `direct` also the other instances of its cluster. The key is read for each call, so that it can be
    replaced while a query runs.

    A call is retried as `Channel.run` does, for `request_timeout` or a shorter `patience` (ms; the last attempt may take a second more),
    then raises the last error. All errors are `SluicewayError`s, with the server's code and detail.

    With `direct`, a call on partitions of one instance goes there first; unless that succeeds, the configured server is asked as usual. The
    key is sent to the addresses in `queues.info` that have the server's own scheme; redirects are never followed. The server's certificate
    authorities must cover all instances.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connections = _Connections(server)
        self._channel: Channel | None = None

    @property
    def server_wait(self) -> str:
        """The `request_timeout` for a call's body."""
        return format_duration(min(SERVER_WAIT, self._server.request_timeout))

    def call(self, path: str, body: Mapping[str, object], patience: Millis | None = None) -> dict[str, Any]:
        """Send JSON, return JSON."""
        return self._run(protocol.call(path, dict, body, about=about(body)), patience)

    def send_arrow(self, path: str, query: Mapping[str, object], batch: pa.RecordBatch) -> dict[str, Any]:
        """Send one Arrow stream of one batch, return JSON."""
        where = None
        if self._server.direct and "partition" in batch.schema.names:
            where = About(str(query["queue_name"]), numbers=pc.unique(batch.column("partition")).to_pylist())
        return self._run(replace(arrow_call(path, query, batch), about=where))

    def start(self, call: Call[Any]) -> None:
        """Send a call to the configured server, and do not wait for the answer: `finish`, with the same call, returns it.

        One call at a time. An error is kept for `finish`, which repeats the call, and which counts the time of all attempts.
        """
        self._connections.start(self._channel_to(self._server.request_timeout).endpoint.request(call))

    def finish(self, call: Call[T]) -> T:
        """Return the answer to a call that was started."""
        return self._run(call)

    def fetch_arrow(self, path: str, body: Mapping[str, object], patience: Millis | None = None) -> pa.RecordBatchReader:
        """Send JSON, return one Arrow stream."""
        call = protocol.call(path, dict, body, about=about(body))
        return self._run(call.as_arrow(lambda answer: pa.ipc.open_stream(pa.py_buffer(answer))), patience)

    def close(self) -> None:
        self._connections.close()

    def _run(self, call: Call[T], patience: Millis | None = None) -> T:
        server = self._server
        tried = server.request_timeout if patience is None else min(patience, server.request_timeout)
        channel = self._channel_to(tried)
        try:
            return channel.run(call, tried / 1000)
        except CallError as error:
            detail = f"{error.detail} ({call.path.partition('?')[0]})"
            if error.code in _ADVICE:
                detail += f"; {_ADVICE[error.code]}"
            if error.retryable:
                detail += f" (tried for {format_duration(tried)}; option requestTimeout)"
            elif error.code == "unavailable":
                detail += "; options url and caFile"
            raise SluicewayError(error.code if error.code in KINDS else "internal", detail, error.field) from None

    def _channel_to(self, tried: Millis) -> Channel:
        """The channel, with the present key, for a call that is tried for so long from now on."""
        server, key = self._server, _key(self._server.api_key)
        if self._channel is None or self._channel.endpoint.api_key != key:
            endpoint = Endpoint(server.url, key)
            self._channel = Channel(endpoint, server.request_timeout / 1000, direct=server.direct, transport=self._connections)
        self._connections.deadline = time.monotonic() + tried / 1000
        return self._channel


def arrow_call(path: str, query: Mapping[str, object], batch: pa.RecordBatch) -> Call[dict[str, Any]]:
    """A call whose body is one Arrow stream of one batch, answered in JSON. It must be repeatable."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    # Not copied: a batch has megabytes.
    body = cast(bytes, memoryview(sink.getvalue()))
    return Call(f"{path}?{urlencode(query)}", body, protocol.decoder(dict).decode, True, content_type=ARROW)


def about(body: Mapping[str, Any]) -> About | None:
    """The subject of a JSON call, from its body. None: it concerns no partition, so any instance may do it."""
    ids = [*(body.get("lease_ids") or ()), *(body.get("ids") or ()), *filter(None, [body.get("lease_id")])]
    numbers = [] if body.get("partition") is None else [body["partition"]]
    return About(str(body.get("queue_name")), ids, numbers) if ids or numbers else None


class _Connections(Connections):
    """The connections of one thread. No attempt outlasts `deadline` by more than a second."""

    def __init__(self, server: Server) -> None:
        self._base = Endpoint(server.url, "")
        super().__init__(_authorities(server.ca_file) if self._base.origin.tls else None)
        self._owner_attempt = min(_OWNER_ATTEMPT, server.request_timeout / 2000)
        self._started: tuple[Request, Sent | ExchangeError] | None = None
        self.deadline = 0.0

    def start(self, request: Request) -> None:
        """Send the request. The next `exchange` of it returns the answer, or raises what went wrong here."""
        self._abandon()
        try:
            self._started = request, self.send(self._patient(request))
        except ExchangeError as error:
            self._started = request, error

    def exchange(self, request: Request) -> Answer:
        is_owner = request.origin != self._base.origin
        try:
            return self._repeated(self._patient(request))
        except ExchangeError as error:
            if is_owner:
                log.warning("%s:%d: %s; asking %s instead (option direct)", *request.origin[1:], error, self._base.url)
            raise

    def _patient(self, request: Request) -> Request:
        longest = self._owner_attempt if request.origin != self._base.origin else request.patience
        return request._replace(patience=max(_LEAST_ATTEMPT, min(longest, self.deadline - time.monotonic())))

    def _repeated(self, request: Request) -> Answer:
        """Repeats the request on a new connection if the server had closed the idle one: all calls made here can be repeated."""
        try:
            return self._first(request)
        except NoAnswerError as error:
            if not error.was_idle:
                raise
        try:
            return super().exchange(request)
        except NotSentError as error:
            # The first one may have been carried out.
            raise NoAnswerError(str(error)) from error

    def _first(self, request: Request) -> Answer:
        """The first attempt, which may have been started."""
        if self._started is None:
            return super().exchange(request)
        started, sent = self._started
        if (started.origin, started.head, started.body) != (request.origin, request.head, request.body):
            # Such as with a key that was replaced.
            self._abandon()
            return super().exchange(request)
        self._started = None
        if isinstance(sent, ExchangeError):
            raise sent
        return self.receive(sent)

    def _abandon(self) -> None:
        """Close the connection on which the answer to a started request would come, if there is one."""
        started, self._started = self._started, None
        if started is not None and isinstance(started[1], Sent):
            self._drop(started[1].link)


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
