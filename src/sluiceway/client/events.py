"""The server's event stream: its parser, and the state that a reader keeps over broken connections. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlencode

import msgspec

from sluiceway.client.answers import Event
from sluiceway.client.errors import CallError
from sluiceway.client.http_messages import Answer
from sluiceway.client.protocol import Call, Repeats, given, listed, unreadable

CONTENT_TYPE = "text/event-stream"
MAX_EVENT = 1 << 20
"""Maximum size of an event in bytes. The server's events are far smaller, so longer data is not an event stream."""


class EventParser:
    """Parses a `text/event-stream` into events. `last_id` is the id of the last whole event, from which a new connection continues."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.restart()

    def restart(self) -> None:
        """Drop a partial event: the next connection sends it again, whole."""
        self._rest = b""
        self._type, self._data, self._id = "message", list[bytes](), self.last_id

    def feed(self, part: bytes) -> list[Event]:
        """Return the events that end in this part. Raises `outcome_unknown` if the data is not an event stream."""
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
        # Set only now: a reader that continues after an event must have received all of it.
        self.last_id = self._id
        if not data:
            return None
        try:
            return Event(id=self.last_id, type=kind, data=msgspec.json.decode(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise unreadable(error) from error


class EventReader:
    """One reading of the event stream: the query, the events that arrive, and when to reconnect. Times are seconds of a monotonic clock."""

    def __init__(self, queue_name: str | None, types: Iterable[str] | None, retry_for: float, now: float) -> None:
        fields = given(queue_name=queue_name, types=None if types is None else ",".join(listed(types, "types")))
        self.query = f"?{urlencode(fields)}" if fields else ""
        self.parser = EventParser()
        self._retry_for = retry_for
        self._repeats: Repeats | None = self._begun(now)

    def _begun(self, now: float) -> Repeats:
        return Repeats(Call("/v1/events", b"", bytes, True), self._retry_for, now)

    def heard(self, part: bytes) -> list[Event]:
        """Return the events that end in this part. This restarts the time to reconnect. Raises as `EventParser.feed`."""
        # Counted from the next failure on. A connection that breaks in silence, or while an event is handled, is found broken only
        # after a time that may be longer than `retry_for`.
        self._repeats = None
        return self.parser.feed(part)

    def pause(self, error: CallError, now: float, roll: float) -> float:
        """Return the seconds until the next connection, jittered by `roll` (0 to 1). Raises `error` if there is to be no next one."""
        self.parser.restart()
        if self._repeats is None:
            self._repeats = self._begun(now)
        return self._repeats.pause(error, now, roll)


def stream_ended() -> CallError:
    """Return the error for a stream that the server ended, as it does when it stops."""
    return CallError("unavailable", "the server ended the event stream")


def check_content_type(answer: Answer) -> None:
    """Raises `outcome_unknown` if the answer is not an event stream."""
    kind = answer.header(b"content-type") or ""
    if not kind.startswith(CONTENT_TYPE):
        raise unreadable(ValueError(f"the content type is {kind!r}, not {CONTENT_TYPE}"))
