"""`/v1/events`: a stream of server-sent events that a reader can resume after a disconnect."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import msgspec

from sluiceway.adapters.system import stopwatch
from sluiceway.contract.fields import QueueName
from sluiceway.instance.event_feed import EVENT_TYPES, INTERVAL, Counts, Event, Watch
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_KEY_STREAMS, MAX_STREAMS, STREAM_SEND_TIMEOUT
from sluiceway.model.access import Caller
from sluiceway.server.endpoints import Page
from sluiceway.server.http import DisconnectedError, Request, Send
from sluiceway.wire.decoding import from_query, given_queue

CONTENT_TYPE: Final = "text/event-stream"
HEARTBEAT: Final = 15.0
"""Seconds: less than the minute after which proxies commonly give up a silent connection."""

_STATS: Final = "stats"
_TYPES: Final = (*EVENT_TYPES, _STATS)
_PART: Final = 64 << 10
"""Bytes sent at a time: the memory that a stalled reader costs."""


class EventsQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`types`: event types, separated by commas; all types if absent."""

    queue_name: QueueName | None = None
    types: str | None = None

    def wanted(self) -> frozenset[str]:
        """Return the requested types. Raises `invalid_request`."""
        if self.types is None:
            return frozenset(_TYPES)
        given = self.types.split(",")
        for each in given:
            if each not in _TYPES:
                raise invalid("types", f"{each[:40]!r} is not an event type; expected one of {', '.join(_TYPES)}")
        return frozenset(given)


class Reader:
    """State of one stream: the last event and counts sent. Does no I/O. Takes the caller each time, as its rights may change."""

    def __init__(self, watch: Watch, types: frozenset[str], queue_name: str | None, resume: bytes) -> None:
        self._watch = watch
        self._types = types
        self._queue_name = queue_name
        self._sent: dict[str, Counts] = {}
        process, _, number = resume.decode("latin-1").rpartition("-")
        known = process == watch.process and number.isascii() and number.isdigit() and len(number) < 19
        self._seen = int(number) if known else -1 if resume else watch.ring.last

    def parts(self, caller: Caller) -> Iterator[bytes]:
        """Yield the events that this caller has not been sent yet, in pieces of some 64 KiB."""
        part = bytearray()
        for text in self._texts(caller):
            part += text
            if len(part) >= _PART:
                yield bytes(part)
                part.clear()
        if part:
            yield bytes(part)

    def _texts(self, caller: Caller) -> Iterator[bytes]:
        ring = self._watch.ring
        events = ring.after(self._seen)
        if events is None:
            self._seen = ring.last
            # Among them may be deletions.
            self._sent.clear()
            yield self._text("reset", b'{"detail":"events were missed: read the state again"}', ring.last)
        for event in events or ():
            self._seen = event.number
            if event.type == "queue.deleted":
                # The queue may have been made anew by now, even with the same counts.
                self._sent.pop(event.queue_name, None)
            if self._shows(event, caller):
                yield self._text(event.type, event.data, event.number)
        if _STATS in self._types:
            yield from self._stats(caller)

    def place(self) -> bytes:
        """Id of the present position, without an event, so that a reader can resume before it has seen one."""
        return b"id: %s-%d\n\n" % (self._watch.process.encode(), max(self._seen, 0))

    def _text(self, type: str, data: bytes, number: int) -> bytes:
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self._watch.process.encode(), number, type.encode(), data)

    def _shows(self, event: Event, caller: Caller) -> bool:
        if event.type not in self._types or self._queue_name not in (None, event.queue_name):
            return False
        if event.type == "audit":
            return caller.may("admin")
        if event.queue_name:
            return caller.may("read", event.queue_name)
        return _sees_all(caller)

    def _stats(self, caller: Caller) -> Iterator[bytes]:
        """Yield all counts of a queue new to the reader, then those that change. They have no id: a resumed stream sends all again."""
        counts = self._watch.counts
        for name in self._sent.keys() - counts.keys():
            del self._sent[name]
        names = counts if self._queue_name is None else [self._queue_name]
        for name in names:
            now, sent = counts.get(name), self._sent.get(name)
            if now is None or now is sent or not caller.may("read", name):
                continue
            self._sent[name] = now
            changed = now if sent is None else {each: value for each, value in now.items() if sent[each] != value}
            yield b"event: stats\ndata: %s\n\n" % msgspec.json.encode({"queue_name": name, **changed})


def _sees_any(caller: Caller) -> bool:
    return caller.may("admin") or caller.scopes is None or any(scope.action == "read" for scope in caller.scopes)


def _sees_all(caller: Caller) -> bool:
    return caller.may("admin") or caller.may_all("read")


class EventStreams:
    """Event streams over one watch. `recheck` returns a request's current caller, or raises if the caller is no longer valid."""

    def __init__(self, watch: Watch, recheck: Callable[[Request], Awaitable[Caller]]) -> None:
        self._watch = watch
        self._recheck = recheck
        self._open: Counter[str] = Counter()
        """Number of open streams, by key id."""
        self._stopped = False

    def pages(self) -> list[Page]:
        summary = "Server-sent events; a reader resumes after its Last-Event-ID"
        return [
            Page(
                "/v1/events",
                "read",
                None,
                summary,
                stream=self.stream,
                content_types=(CONTENT_TYPE,),
                answer=str,
                query=EventsQuery,
                errors=("too_many_requests",),
            )
        ]

    def stop(self) -> None:
        """End every stream, now and from now on."""
        self._stopped = True
        self._watch.wake()

    async def stream(self, request: Request, send: Send) -> None:
        """Serve a stream. Raises `invalid_request`, `forbidden`, `too_many_requests`, `unavailable`, DisconnectedError to cut it off."""
        reader = self._reader(request)
        if self._stopped:
            raise SluicewayError("unavailable", "the server is stopping")
        key_id = request.caller.key_id
        if self._open.total() >= MAX_STREAMS:
            raise SluicewayError("too_many_requests", f"{MAX_STREAMS:,} event streams are open, which is the maximum; try again later")
        if key_id and self._open[key_id] >= MAX_KEY_STREAMS:
            detail = f"this API key has {MAX_KEY_STREAMS:,} readers of events, the maximum; close some of them"
            raise SluicewayError("too_many_requests", detail)
        self._open[key_id] += 1
        gone = asyncio.ensure_future(request.disconnected())
        try:
            headers = [(b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store"), (b"x-request-id", request.request_id)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with self._watch.reading():
                await self._follow(request, reader, send, gone)
            await send_part(send, b"", more=False)
        finally:
            self._open[key_id] -= 1
            self._open += Counter()
            gone.cancel()

    def _reader(self, request: Request) -> Reader:
        query = from_query(request.query(), EventsQuery)
        queue_name = given_queue(query.queue_name, "queue_name")
        if queue_name is not None:
            request.permit(queue_name)
        elif not _sees_any(request.caller):
            raise SluicewayError("forbidden", "this key may not read any queue")
        return Reader(self._watch, query.wanted(), queue_name, request.last_event_id)

    async def _follow(self, request: Request, reader: Reader, send: Send, gone: asyncio.Future[None]) -> None:
        """Send events until the reader is gone or no longer valid, or the server stops."""
        await send_part(send, reader.place())
        heard = stopwatch()
        # Present events are not held back until the next look.
        looking: Callable[[], Awaitable[None]] = self._watch.begun
        while not (self._stopped or gone.done()):
            looked = asyncio.ensure_future(looking())
            looking = self._watch.looked
            try:
                await asyncio.wait((looked, gone), timeout=INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            finally:
                looked.cancel()
            try:
                caller = await self._recheck(request)
            except SluicewayError:
                return
            for part in reader.parts(caller):
                await send_part(send, part)
                heard = stopwatch()
            if stopwatch() - heard >= HEARTBEAT:
                await send_part(send, b":\n\n")
                heard = stopwatch()


async def send_part(send: Send, part: bytes, more: bool = True) -> None:
    """Send a part of a stream. Raises DisconnectedError if the reader takes nothing for STREAM_SEND_TIMEOUT."""
    try:
        async with asyncio.timeout(STREAM_SEND_TIMEOUT / 1000):
            await send({"type": "http.response.body", "body": part, "more_body": more})
    except TimeoutError:
        raise DisconnectedError from None
