"""Live pages: a server-sent stream with each change of a page's live part."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.limits import MAX_KEY_STREAMS, MAX_STREAMS
from sluiceway.server.events import send_part
from sluiceway.server.http import Request, Send
from sluiceway.server.ui.api import ProblemError
from sluiceway.server.ui.visit import Visit

CONTENT_TYPE: Final = b"text/event-stream"
EVERY: Final = 1.0
"""Seconds between two renders of a page."""
SELDOM: Final = 5.0
"""Maximum seconds between two renders of an expensive page."""
HEARTBEAT: Final = 15.0
"""Seconds between comments on an idle stream: keeps proxies from closing it and detects closed connections."""

Render = Callable[[Visit], Awaitable[str]]


class Feed:
    """The live part of one page, rendered once for all readers with the same view."""

    def __init__(self, visit: Visit, render: Render) -> None:
        self._visit, self._render = visit, render
        self.key_id = visit.key_id
        self.text = ""
        self.version = 0
        self.is_over = False
        """The feed has ended; its readers have to reconnect."""
        self.readers = 0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with self._visit.counts.following(self._visit.api):
                while True:
                    began = stopwatch()
                    text = await self._render(self._visit)
                    if text != self.text:
                        self.text = text
                        self.version += 1
                        self._wake()
                    # An expensive page renders less often, which bounds the CPU that open pages take.
                    await asyncio.sleep(min(SELDOM, max(EVERY, 20 * (stopwatch() - began))))
        except ProblemError:
            # The readers get the problem when they reconnect.
            pass
        finally:
            self.is_over = True
            self._wake()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next change. Read it before `version`, so that no change is missed."""
        return self._changed

    def stop(self) -> None:
        self._task.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Feeds:
    """The feeds of all open pages."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._feeds: dict[tuple[object, ...], Feed] = {}
        self._stopped = False

    def stop(self) -> None:
        """End every stream, now and from now on."""
        self._stopped = True
        for feed in self._feeds.values():
            feed.stop()

    async def stream(self, visit: Visit, was: str, request: Request, send: Send) -> None:
        """Send changes until the reader disconnects, the feed ends or the server stops. `was` is the mark of the reader's content.

        Raises ProblemError.
        """
        if self._stopped:
            raise ProblemError(503, "unavailable", "the server is stopping")
        # By key, not by reader: one key may come as many, by names of this server that it makes up.
        readers = [(feed.key_id, feed.readers) for feed in self._feeds.values()]
        if sum(count for _, count in readers) >= MAX_STREAMS:
            raise ProblemError(429, "too_many_requests", f"the limit of {MAX_STREAMS:,} open pages is reached; try again later")
        if visit.asks_keys and sum(count for key_id, count in readers if key_id == visit.key_id) >= MAX_KEY_STREAMS:
            raise ProblemError(
                429, "too_many_requests", f"this API key has reached its limit of {MAX_KEY_STREAMS:,} open pages; close some"
            )
        gone = asyncio.ensure_future(request.disconnected())
        headers = [(b"content-type", CONTENT_TYPE), (b"cache-control", b"no-store"), (b"x-request-id", request.request_id)]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with self._reading(visit) as feed:
                await _follow(feed, was, send, gone)
            await send_part(send, b"", more=False)
        finally:
            gone.cancel()

    @contextlib.asynccontextmanager
    async def _reading(self, visit: Visit) -> AsyncIterator[Feed]:
        key = (visit.api.reader, visit.path, tuple(sorted(visit.query.items())))
        feed = self._feeds.get(key)
        if feed is None or feed.is_over:
            feed = self._feeds[key] = Feed(visit, self._render)
        feed.readers += 1
        try:
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                feed.stop()
                if self._feeds.get(key) is feed:
                    del self._feeds[key]


async def _follow(feed: Feed, was: str, send: Send, gone: asyncio.Future[None]) -> None:
    seen, heard = 0, stopwatch()
    while not (feed.is_over or gone.done()):
        changed = feed.changed
        if feed.version != seen:
            # The page that was just loaded usually has this content already.
            known, seen, heard = not seen and mark(feed.text) == was, feed.version, stopwatch()
            if not known:
                await send_part(send, _event(feed.text))
        elif stopwatch() - heard >= HEARTBEAT:
            heard = stopwatch()
            await send_part(send, b":\n\n")
        waiting = asyncio.ensure_future(changed.wait())
        try:
            await asyncio.wait((waiting, gone), timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()


def mark(text: str) -> str:
    """A short hash that identifies a rendered text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _event(text: str) -> bytes:
    """A server-sent event with the text, and its mark as the event id. Each line is prefixed, so none can pose as another field."""
    return b"id: %s\n" % mark(text).encode() + b"".join(b"data: %s\n" % line.encode() for line in text.splitlines()) + b"\n"
