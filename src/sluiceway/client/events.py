"""The server's events, as they come: the stream is read on over broken connections, from where it broke."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable
from urllib.parse import urlencode

import httpx
import msgspec

from sluiceway.client.answers import Event
from sluiceway.client.errors import CallError
from sluiceway.client.protocol import Call, Repeats, given, listed, read_problem, unreadable

CONTENT_TYPE = "text/event-stream"
MAX_EVENT = 1 << 20
"""Bytes without the end of an event. The server's are far smaller, so this is no stream of events."""


class EventParser:
    """Cuts a `text/event-stream` into events. `last_id` is where to go on after the stream broke."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.restart()

    def restart(self) -> None:
        """Another connection: what was there of an event comes again, whole."""
        self._rest = b""
        self._type, self._data, self._id = "message", list[bytes](), self.last_id

    def feed(self, part: bytes) -> list[Event]:
        """The events that end in this part. Raises `outcome_unknown` if it is no stream of events."""
        *lines, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n")
        found = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT:
            raise unreadable(ValueError(f"an event of more than {MAX_EVENT} bytes"))
        return found

    def _line(self, line: bytes) -> Event | None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if line == b"":
            return self._end()
        if name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"data":
            self._data.append(value)
        elif name == b"id":
            self._id = value.decode("ascii", "replace")
        return None

    def _end(self) -> Event | None:
        kind, data = self._type, b"\n".join(self._data)
        self._type, self._data = "message", []
        # Only now: who goes on after an event must have seen the whole of it.
        self.last_id = self._id
        if not data:
            return None
        try:
            return Event(id=self.last_id, type=kind, data=msgspec.json.decode(data))
        except msgspec.DecodeError as error:
            raise unreadable(error) from error


class Following:
    """One reading of the stream: what to ask for, what came, and whether and when to connect again."""

    def __init__(self, queue_name: str | None, types: Iterable[str] | None, retry_for: float, now: float) -> None:
        fields = given(queue_name=queue_name, types=None if types is None else ",".join(listed(types, "types")))
        self.query = f"?{urlencode(fields)}" if fields else ""
        self.parser = EventParser()
        self._retry_for = retry_for
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._repeats = Repeats(Call("/v1/events", b"", bytes, True), self._retry_for, now)

    def heard(self, part: bytes, now: float) -> list[Event]:
        self._begin(now)
        return self.parser.feed(part)

    def pause(self, error: CallError, now: float, roll: float) -> float:
        """Seconds until the next connection. Raises the error when there is to be none."""
        self.parser.restart()
        return self._repeats.pause(error, now, roll)


def ended() -> CallError:
    """The stream came to an end, which it does when the server stops."""
    return CallError("unavailable", "the server has ended the stream of events")


async def read_async(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The parts of the stream. Raises the problem that was answered instead."""
    try:
        if response.status_code != 200:
            raise read_problem(response.status_code, await response.aread(), response.headers.get("retry-after"))
        _check_type(response)
        async for part in response.aiter_raw():
            yield part
    finally:
        await response.aclose()


def read_blocking(response: httpx.Response) -> Generator[bytes]:
    """As `read_async`."""
    try:
        if response.status_code != 200:
            raise read_problem(response.status_code, response.read(), response.headers.get("retry-after"))
        _check_type(response)
        yield from response.iter_raw()
    finally:
        response.close()


def _check_type(response: httpx.Response) -> None:
    kind = response.headers.get("content-type", "")
    if not kind.startswith(CONTENT_TYPE):
        raise unreadable(ValueError(f"the content type is {kind!r}, not {CONTENT_TYPE}"))
