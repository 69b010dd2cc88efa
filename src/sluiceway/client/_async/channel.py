"""The channel to a server: it sends calls, repeats failed attempts, and reads the event stream. Both halves of the client have one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from sluiceway.client import queue_calls
from sluiceway.client.answers import Event
from sluiceway.client.async_connections import AsyncConnections
from sluiceway.client.direct import Direct
from sluiceway.client.errors import CallError
from sluiceway.client.events import EventReader, check_content_type, stream_ended
from sluiceway.client.http_exchange import Endpoint, another_name, read_answer
from sluiceway.client.http_messages import Answer, ExchangeError
from sluiceway.client.protocol import Call, Repeats, read_problem
from sluiceway.client.transports import AsyncTransport, as_async_transport

T = TypeVar("T")


class AsyncChannel:
    """Calls on the server at `endpoint`, over `transport` or else over connections of its own. Both are closed by `close`.

    `retry_for` is how many seconds a call is repeated. With `direct`, a call on one partition goes straight to the partition's owner.
    Raises `invalid_request` if `ca_file` cannot be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        retry_for: float,
        *,
        ca_file: str | Path | None = None,
        direct: bool = False,
        transport: Any = None,
    ) -> None:
        self.endpoint = endpoint
        self.retry_for = retry_for
        self.ca_file = ca_file
        self.direct = Direct(endpoint) if direct else None
        self._closed = False
        self.transport: AsyncTransport = AsyncConnections(endpoint.context(ca_file)) if transport is None else as_async_transport(transport)

    async def close(self) -> None:
        """Close the connections, including those in use. Calls that fail by it are not repeated."""
        self._closed = True
        await self.transport.aclose()

    async def run(self, call: Call[T], retry_for: float | None = None) -> T:
        """Return the answer to `call`. A failed attempt is repeated if that is safe, for `retry_for` seconds (the channel's by default).

        Raises the CallError of the last attempt, or `outcome_unknown` if an earlier attempt may have taken effect.
        """
        repeats = Repeats(call, self.retry_for if retry_for is None else retry_for, time.monotonic())
        while True:
            try:
                return await self.attempt(call)
            except CallError as error:
                if self._closed:
                    # A repetition would have a new connection, which nobody closes.
                    raise
                await asyncio.sleep(repeats.pause(error, time.monotonic(), random.random()))
                call = repeats.next(call, another_name)

    async def attempt(self, call: Call[T]) -> T:
        """Return the answer to `call`, or raise CallError, without repeating it. A direct call that did nothing goes to `endpoint` next."""
        direct = self.direct
        if direct is None or call.about is None:
            return await self._exchange(self.endpoint, call)
        queue_name = direct.to_look_up(call, time.monotonic())
        if queue_name is not None:
            try:
                direct.learn(queue_name, await self._exchange(self.endpoint, queue_calls.queue_info(queue_name)))
            except CallError as error:
                direct.not_told(queue_name, error, time.monotonic())
        owner = direct.endpoint(call, time.monotonic())
        if owner is not None:
            try:
                return await self._exchange(owner, call)
            except CallError as error:
                direct.failed(call, owner, error, time.monotonic())
        return await self._exchange(self.endpoint, call)

    async def _exchange(self, endpoint: Endpoint, call: Call[T]) -> T:
        try:
            answer = await self.transport.exchange(endpoint.request(call))
        except ExchangeError as error:
            raise endpoint.broken(error) from error
        if self.direct is not None and answer.status == 200:
            self.direct.heard(call, answer.header(b"x-sluiceway-served-by"))
        return read_answer(call, answer)

    async def events(self, queue_name: str | None, types: Iterable[str] | None) -> AsyncGenerator[Event, None]:
        """Yield the server's events without end, over broken connections. Raises CallError if `retry_for` after a break nothing came."""
        reader = EventReader(queue_name, types, self.retry_for, time.monotonic())
        while True:
            try:
                try:
                    request = self.endpoint.events(reader.query, reader.parser.last_id)
                    async with self.transport.stream(request) as parts, contextlib.aclosing(_events(parts, reader)) as events:
                        async for event in events:
                            yield event
                except ExchangeError as error:
                    raise self.endpoint.broken(error) from error
                raise stream_ended()
            except CallError as error:
                if self._closed:
                    raise
                await asyncio.sleep(reader.pause(error, time.monotonic(), random.random()))


async def _events(parts: AsyncIterator[Answer], reader: EventReader) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream as they arrive. Raises the problem if the server answered with one."""
    body = b""
    async for part in parts:
        if part.status != 200:
            body += part.body
            continue
        check_content_type(part)
        for event in reader.heard(part.body) if part.body else ():
            yield event
    if body or part.status != 200:
        raise read_problem(part.status, body, part.header(b"retry-after"))
