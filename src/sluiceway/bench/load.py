"""Cheap client, so that the server is what is measured: one keep-alive connection, one request at a time."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"


class Connection(asyncio.Protocol):
    """HTTP/1.1 over one socket: the subset that a benchmark against our own server needs."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._answer: asyncio.Future[bytes] | None = None
        self._parts: list[bytes] = []
        self._missing = 0
        """Bytes of the answer's body still missing."""
        self._refused = b""
        """Head of an answer whose status is not 200."""

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport, _ = await self._loop.create_connection(lambda: self, self._host, self._port)

    async def close(self) -> None:
        self._transport.close()

    def call(self, *request: bytes) -> asyncio.Future[bytes]:
        """Send a request, given in one or more pieces. The future has the answer's body, or RuntimeError for a status other than 200."""
        self._answer = self._loop.create_future()
        if len(request) == 1:
            self._transport.write(request[0])
        else:
            self._transport.writelines(request)
        return self._answer

    async def post(self, path: str, body: bytes, content: str = JSON, accept: str = JSON) -> bytes:
        return await self.call(head(path, len(body), content, accept), body)

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            data = b"".join([*self._parts, data])
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._parts = [data]
                return
            fields = data[:end].lower()
            at = fields.index(b"content-length:") + 15
            length = int(fields[at:].split(b"\r", 1)[0])
            self._refused = b"" if b" 200 " in fields[:16] else data[:end]
            self._parts, self._missing = [], length
            data = data[end + 4 :]
        self._parts.append(data)
        self._missing -= len(data)
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        answer, self._parts = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts), []
        if self._answer is None or self._answer.done():
            return
        if self._refused:
            self._answer.set_exception(RuntimeError(f"{self._refused[:64]!r} {answer[:300]!r}"))
        else:
            self._answer.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionError("the server closed the connection"))


def head(path: str, length: int, content: str = JSON, accept: str = JSON) -> bytes:
    """Head of a request with a body of `length` bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content}\r\naccept: {accept}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def request(path: str, body: bytes, content: str = JSON, accept: str = JSON) -> bytes:
    """A whole request in one piece."""
    return head(path, len(body), content, accept) + body


def arrow_body(items: int, payload: int) -> bytes:
    """Arrow stream with `items` payloads of `payload` bytes."""
    column = pa.array([bytes([65 + n % 26]) * payload for n in range(items)], pa.binary())
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([column], schema=pa.schema([pa.field("payload", pa.binary(), nullable=False)]))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body
