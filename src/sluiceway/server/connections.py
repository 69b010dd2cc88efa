"""What a connection may take before and beside its requests: time, headers, and that there are not too many."""

from __future__ import annotations

import asyncio
import resource
from functools import cache
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
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
from sluiceway.wire.answers import problem

_FRAMING: Final = 16
"""Bytes around each byte of a body that comes in the smallest chunks, with room to spare."""
_LEFTOVER: Final = 1 << 20
"""Bytes that are read, and dropped, after headers were refused."""
_TOO_LARGE: Final = f"the request line and the headers are more than {MAX_HEADERS} or than {MAX_HEAD_BYTES:,} bytes".encode()


@cache
def most_connections() -> int:
    """MAX_CONNECTIONS, or fewer where the process may not open as many files: half of them stay for the stores."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, files // 2)


class _HeadError(Exception):
    """There are too many headers, or too large ones."""


class _PipelineError(Exception):
    """Too many requests wait for the answer to an earlier one."""


class Connection(HttpToolsProtocol):
    """An HTTP connection that ends when its client does not get on.

    Dropped are those whose request line and headers have not come within HEAD_TIMEOUT of the connection, or of their first byte; those
    that have had their answer and do not end their body within LEFTOVER_TIMEOUT; and those that take nothing of an answer for
    SEND_TIMEOUT, or send more than MAX_PIPELINED requests ahead. Headers beyond their limits are a 431, a connection beyond
    `most_connections` is a 503.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = self._refused = False
        self._messages = 0
        self._headers = self._head_bytes = 0
        self._around = self._body_bytes = 0

    # ---- the request ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            error = SluicewayError("unavailable", f"the server has {most_connections():,} connections, which is the most; try later")
            self._say(b"503 Service Unavailable", b"application/problem+json", problem(error, ""))
            self.transport.close()
        else:
            self._limit(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit(None)
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._around += len(data)
        if self._refused:
            if self._around > _LEFTOVER:
                self.transport.abort()
            return
        messages = self._messages
        super().data_received(data)
        # Also line ends between two requests, of which the parser says nothing.
        begun = self._in_head or (self._messages == messages and not self._in_body)
        if begun and self._deadline is None:
            self._limit(HEAD_TIMEOUT)
        # What is neither a header nor a body yet is kept by the parser, which has no limit of its own.
        if self._around > MAX_HEAD_BYTES + (_FRAMING + 1) * self._body_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._headers = self._head_bytes = 0
        self._around = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Also what follows a body in chunks comes here.
        self._headers += 1
        self._head_bytes += len(name) + len(value)
        if self._headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _PipelineError
        self._in_head, self._in_body = False, True
        self._limit(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False
        self._messages += 1
        self._around = self._body_bytes = 0
        self._limit(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:
            self._limit(LEFTOVER_TIMEOUT)

    def send_400_response(self, msg: str) -> None:
        if self._headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self.pipeline or (self._is_answering() and self.cycle.response_started):
            # It would be read as the answer, or as a part of the answer, to an earlier request.
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

    # ---- the end ----------------------------------------------------------------------------------------------

    def _limit(self, timeout: int | None) -> None:
        """Drop the connection after that many milliseconds, in place of what was said before."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if timeout is None else self.loop.call_later(timeout / 1_000, self._late)

    def _late(self) -> None:
        if self._is_answering():
            # It has sent something of its next request, which can wait until this one has its answer.
            self._limit(HEAD_TIMEOUT)
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]

    def _refuse_head(self) -> None:
        if self._is_answering():
            # A second answer would be read as a part of the first.
            self.transport.abort()
            return
        self._say(b"431 Request Header Fields Too Large", b"text/plain; charset=utf-8", _TOO_LARGE)
        # To close while the client still sends would take the answer from it.
        self._refused = True
        self._limit(LEFTOVER_TIMEOUT)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _say(self, status: bytes, content_type: bytes, body: bytes) -> None:
        head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, content_type, len(body)) + body)
