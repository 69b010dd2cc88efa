"""Limits of a connection before and beside its requests: time, headers, and the number of connections."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
from functools import cache
from typing import Any, Final, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import (
    HEAD_TIMEOUT,
    LEFTOVER_TIMEOUT,
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    SEND_TIMEOUT,
)
from sluiceway.server.app import App
from sluiceway.server.fast_path import Direct
from sluiceway.server.http import CUT_OFF, Scope
from sluiceway.wire.answers import problem

log = logging.getLogger("sluiceway.server")

_FRAMING: Final = 16
"""Bytes of framing around each byte of a body sent in the smallest chunks, with a margin."""
_TOGETHER: Final = 0.005
"""Seconds after its head within which a small body sent at the same time arrives: many clients write the two separately."""
_LOG_INTERVAL: Final = 1.0
"""Seconds between two lines about requests that are no HTTP."""
_LEFTOVER: Final = 1 << 20
"""Bytes that are read and dropped after the headers were refused."""
_TOO_LARGE: Final = f"the request has more than {MAX_HEADERS} headers, or more than {MAX_HEAD_BYTES:,} bytes before its body".encode()


@cache
def most_connections() -> int:
    """Return MAX_CONNECTIONS, or fewer where the process may not open as many files: half of them are reserved for the stores."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class _HeadError(Exception):
    """The headers are too many or too large."""


class _PipelineError(Exception):
    """Too many requests wait for the answer to an earlier one."""


class _FramingError(Exception):
    """The end of the request is ambiguous. The text gives the reason."""


class _Complaints:
    """Log of requests that are no HTTP, of which anybody may send any number: the first at once, then at most a line per _LOG_INTERVAL."""

    def __init__(self) -> None:
        self._count = 0
        self._next_at = 0.0

    def note(self, reason: str, now: float) -> None:
        self._count += 1
        if now >= self._next_at:
            log.warning("%d requests were no valid HTTP; the last one: %s", self._count, reason)
            self._count, self._next_at = 0, now + _LOG_INTERVAL


_complaints = _Complaints()


class _Writer:
    """Writes uvicorn's answer to a request. It is dropped if the connection is closed, of which uvicorn may not have been told yet."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle
        self.is_closing, self.close = transport.is_closing, transport.close

    def write(self, data: bytes) -> None:
        try:
            self._transport.write(data)
        except RuntimeError:
            # uvloop's, where other event loops drop the data.
            self._cycle.disconnected = True
            self._cycle.message_event.set()


class Connection(HttpToolsProtocol):
    """An HTTP connection, dropped when its client makes no progress.

    It is dropped if the request line and headers do not arrive within HEAD_TIMEOUT of the connection, or of their first byte; if the body
    of an answered request does not end within LEFTOVER_TIMEOUT; if the client reads none of an answer for SEND_TIMEOUT; or if it sends more
    than MAX_PIPELINED requests ahead. Headers beyond their limits get a 431, a connection beyond `most_connections` a 503.

    An upgrade that a client offers (HTTP/2, WebSocket) is ignored and the request served (RFC 9110). Bytes of a body are never taken for a
    request: if the end of a request is ambiguous, the connection closes.

    An API call whose body arrives together with its head, and that waits for no other, takes the direct path (`fast_path.py`). Uvicorn
    serves all other requests.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = self._refused = False
        self._messages = 0
        self._headers = self._head_bytes = 0
        self._framing_bytes = self._body_bytes = 0
        self._app = self.app if isinstance(self.app, App) else None
        self._calls = {} if self._app is None else self._app.calls
        self._direct: Direct | None = None
        self._parts: list[bytes] | None = None
        """Body received so far, of a call that may arrive whole."""
        self._patience: asyncio.TimerHandle | None = None
        self._framed = self._keeps = False
        self._expected: RequestResponseCycle | None = None
        """Cycle of a request that asked for 100-continue, until its body has arrived."""
        self._path, self._query = "", b""
        self._idle: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None

    # ---- the request ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            error = SluicewayError("unavailable", f"the limit of {most_connections():,} connections is reached; try again later")
            self._say(b"503 Service Unavailable", b"application/problem+json", problem(error, ""))
            self.transport.close()
        else:
            self._limit(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        self._stop_watching()
        if self._idle is not None:
            self._idle.cancel()
        self._wait_no_more()
        if self._direct is not None:
            self._direct.lost()
        cycle: object = self.cycle
        if isinstance(cycle, Direct):
            # Uvicorn would wake what waits for messages, and here nothing does.
            self.cycle = None  # type: ignore[assignment]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._framing_bytes += len(data)
        if self._refused:
            if self._framing_bytes > _LEFTOVER:
                self.transport.abort()
            return
        messages = self._messages
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            reason = str(cause if isinstance(cause, _FramingError) else error)
            _complaints.note(reason, self.loop.time())
            self.send_400_response(f"the request is not valid HTTP: {reason}")
            return
        if self._parts is not None and self._patience is None:
            self._patience = self.loop.call_later(_TOGETHER, self._hand_over)
        # Includes line ends between two requests, which the parser does not report.
        begun = self._in_head or (self._messages == messages and not self._in_body)
        if begun and self._deadline is None:
            self._limit(HEAD_TIMEOUT)
        # The parser buffers bytes that are neither a header nor a body yet, without a limit of its own.
        if self._framing_bytes > MAX_HEAD_BYTES + (_FRAMING + 1) * self._body_bytes:
            self._refuse_head()

    def _parse(self, data: bytes | memoryview) -> None:
        """Feed the parser. Raises HttpParserError.

        The parser skips the body of a request that offers an upgrade, and would take it for the next request. So a new parser gets the head
        again, without the offer, and then the rest.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                data = memoryview(data)[end.args[0] :]
                head = self._head_without_offer()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
            else:
                return

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue, self._framed = b"", [], False, False
        self._in_head = True
        self._headers = self._head_bytes = 0
        self._framing_bytes = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self.url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers after a chunked body come here, too: they are counted, but are no headers of the request.
        self._headers += 1
        self._head_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadError
        if self._in_body:
            return
        name = name.lower()
        if name == b"transfer-encoding":
            if self._framed or value.strip(b" \t").lower() != b"chunked":
                raise _FramingError("the only transfer-encoding is chunked, once")
            self._framed = True
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _PipelineError
        parser = self.parser
        method, version = parser.get_method(), parser.get_http_version()
        if method == b"CONNECT":
            raise _FramingError("this server is not a proxy and does not support CONNECT")
        if version not in ("1.1", "1.0") or (self._framed and version == "1.0"):
            raise _FramingError("the version must be HTTP/1.1, or HTTP/1.0 without a transfer-encoding")
        if parser.should_upgrade():
            # The head is parsed again, without the offer.
            return
        self._in_head, self._in_body = False, True
        self._limit(None)
        target, _, self._query = self.url.partition(b"?")
        self._path = "" if b"#" in self._query else self._calls.get(target, "")
        plain = not (self._framed or self.expect_100_continue or self._is_answering())
        if self._path and plain and method == b"POST" and version == "1.1":
            self._parts, self._keeps = [], parser.should_keep_alive()
        else:
            self._begin_asgi()

    def _begin_asgi(self) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        # Makes the scope, which only this path needs.
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()
        self.cycle.transport = _Writer(self.transport, self.cycle)  # type: ignore[assignment]
        cast(Scope, self.scope)[CUT_OFF] = functools.partial(self._cut_off, self.cycle)
        if expects and self.cycle.keep_alive:
            # A client that is answered first may omit the body, so the bytes after that are ambiguous.
            self._expected, self.cycle.keep_alive = self.cycle, False

    def _cut_off(self, cycle: RequestResponseCycle) -> None:
        """End the connection in the middle of an answer that its client does not take. Uvicorn would log that as an error."""
        cycle.disconnected = True
        self.transport.abort()

    def _hand_over(self) -> None:
        """Serve a call that may have arrived whole over ASGI, like all other requests."""
        parts = self._wait_no_more()
        self._begin_asgi()
        for part in parts:
            super().on_body(part)

    def _wait_no_more(self) -> list[bytes]:
        """Stop waiting for a whole call. Returns the parts of its body received so far."""
        parts, self._parts = self._parts or [], None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        return parts

    def shutdown(self) -> None:
        if self._parts is not None:
            # Its client gets an answer, as all clients do.
            self._hand_over()
        super().shutdown()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._parts is None:
            super().on_body(body)
            return
        self._parts.append(body)
        if self._body_bytes > HIGH_WATER_LIMIT:
            # Before authentication, buffer no more than uvicorn would.
            self._hand_over()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if self._expected is not None:
            self._expected.keep_alive, self._expected = not self._expected.response_started, None
        if self._parts is None:
            super().on_message_complete()
        else:
            self._answer_directly(b"".join(self._wait_no_more()))
        self._in_body = False
        self._messages += 1
        self._framing_bytes = self._body_bytes = 0
        self._limit(None)

    def _answer_directly(self, body: bytes) -> None:
        assert self._app is not None
        scope = {
            "type": "http",
            "method": "POST",
            "path": self._path,
            "query_string": self._query,
            "headers": self.headers,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
        }
        self._direct = Direct(self, scope, body, self._keeps)
        self.cycle = self._direct  # type: ignore[assignment]
        self._direct.task = self.loop.create_task(self._run(self._app, self._direct))
        self.tasks.add(self._direct.task)

    async def _run(self, app: App, direct: Direct) -> None:
        try:
            await app.answer(direct)
        finally:
            assert direct.task is not None, "it was set before this began"
            self.tasks.discard(direct.task)
            # The answer was cut off, or cannot be completed.
            if not (direct.response_complete or direct.disconnected):
                self.transport.close()

    def on_response_complete(self) -> None:
        self._direct = None
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()
            if self._idle is None:
                self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_at_idling)
        if self._in_body and self.cycle.response_complete:
            self._limit(LEFTOVER_TIMEOUT)

    def _unset_keepalive_if_required(self) -> None:
        # Keeps the timer: setting and cancelling one for every request costs more than a timer that looks again.
        self._idle_since = None

    def _look_at_idling(self) -> None:
        self._idle = None
        if self._idle_since is None:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle = self.loop.call_later(left, self._look_at_idling)
        else:
            self.timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        if self._headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self.pipeline or (self._is_answering() and (self.cycle.response_started or not self.cycle.more_body)):
            # The client would read it as the answer to an earlier request, or as part of that answer.
            self.transport.abort()
        else:
            super().send_400_response(msg)

    # ---- the answer -------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self, left: int) -> None:
        self._stop_watching()
        self._sending = self.loop.call_later(SEND_TIMEOUT / 1_000, self._look_at_sending, left)

    def _look_at_sending(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch(left)
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    # ---- timeouts and refusals --------------------------------------------------------------------------------

    def _limit(self, timeout: int | None) -> None:
        """Drop the connection after `timeout` ms, replacing an earlier limit; None: no limit."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout is None else self.loop.call_later(timeout / 1_000, self._late)

    def _late(self) -> None:
        if self._is_answering():
            # It has sent a part of its next request, which can wait until this one is answered.
            self._limit(HEAD_TIMEOUT)
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _refuse_head(self) -> None:
        if self._is_answering():
            # The client would read a second answer as part of the first.
            self.transport.abort()
            return
        self._say(b"431 Request Header Fields Too Large", b"text/plain; charset=utf-8", _TOO_LARGE)
        # Closing while the client still sends would discard the answer.
        self._refused = True
        self._limit(LEFTOVER_TIMEOUT)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _say(self, status: bytes, content_type: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, content_type, len(body)) + body)
