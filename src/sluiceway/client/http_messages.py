"""HTTP/1.1 as both halves of the client speak it: requests as bytes, and a parser of answers. No I/O."""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import httptools


class Origin(NamedTuple):
    """The server that a connection goes to."""

    tls: bool
    host: str
    port: int


class Request(NamedTuple):
    """A request to send. `head`: its first line and headers, with the empty line after them. `patience`: seconds without a byte of the
    answer after which it is given up."""

    origin: Origin
    head: bytes
    body: bytes
    patience: float


class Answer(NamedTuple):
    """A complete answer. The headers' names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def header(self, name: bytes) -> str | None:
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")


class ExchangeError(Exception):
    """There is no answer."""


class NotSentError(ExchangeError):
    """There is no connection, so nothing was sent."""


class NoAnswerError(ExchangeError):
    """The request was sent, perhaps in part, and no complete answer came.

    `was_idle`: the connection had been idle, and its server closed it without an answer, as servers do with idle connections.
    """

    was_idle = False


_WITHOUT_BODY: Final = (204, 304)


class AnswerParser:
    """Parses the answers on one connection, one after the other: `begin`, then `feed` until `is_complete`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Expect the next answer."""
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []
        self.has_head = self.is_complete = self.is_reusable = False

    def feed(self, data: bytes) -> None:
        """Raises NoAnswerError for what is not HTTP."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.is_reusable = False
            if not self.is_complete:
                raise NoAnswerError(f"the answer is not HTTP: {error}") from error

    def end(self) -> None:
        """The server has closed the connection. Raises NoAnswerError unless that is the end of the answer."""
        if self.has_head and not self.is_complete and not self._is_framed():
            self.is_complete = True
        if not self.is_complete:
            when = "in the middle of its answer" if self.has_head else "without an answer"
            raise NoAnswerError(f"the server closed the connection {when}")

    def missing(self) -> int:
        """The bytes of the body that are still to come, 0 if their number is not known."""
        length = self.headers.get(b"content-length")
        if not self.has_head or self.is_complete or length is None or b"transfer-encoding" in self.headers:
            return 0
        return int(length) - sum(map(len, self.parts))

    def take_over(self) -> tuple[bytearray, int]:
        """Room for the whole body, and how much of it is there: the caller reads the rest without this parser, and calls `complete`."""
        room, at = bytearray(int(self.headers[b"content-length"])), 0
        for part in self.parts:
            room[at : at + len(part)] = part
            at += len(part)
        return room, at

    def complete(self, body: bytearray) -> None:
        """Take the body that was read without this parser. It is given away as it is, not copied."""
        self.parts = [cast(bytes, body)]
        self.is_complete, self.is_reusable = True, self._parser.should_keep_alive()
        # Another parser for the next answer: this one still waits for the rest.
        self._parser = httptools.HttpResponseParser(self)

    def answer(self) -> Answer:
        parts = self.parts
        return Answer(self.status, self.headers, parts[0] if len(parts) == 1 else b"".join(parts))

    def _is_framed(self) -> bool:
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers or self.status in _WITHOUT_BODY

    # ---- called by httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:
            # The server speaks without having been asked.
            self.is_reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_complete:
            self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            # Such as 100 Continue; the answer follows.
            self.headers = {}
            return
        self.has_head = True

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self.parts.append(data)

    def on_message_complete(self) -> None:
        if self.has_head and not self.is_complete:
            self.is_complete, self.is_reusable = True, self._parser.should_keep_alive()
