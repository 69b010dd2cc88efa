"""Pipelined commands over one socket, with minimal overhead: answers arrive in the commands' order."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Pipeline(asyncio.Protocol, ABC, Generic[T]):
    """One pipeline at a time. A protocol's subclass implements `read`."""

    def __init__(self) -> None:
        self._answers: list[T] = []
        self._wanted = 0
        self._done: asyncio.Future[list[T]] | None = None

    @abstractmethod
    def read(self, data: bytes) -> list[T]:
        """Return the answers that this data completes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's, but are no subclasses.
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._answers += self.read(data)
        if len(self._answers) == self._wanted and self._done is not None and not self._done.done():
            self._done.set_result(self._answers)

    def call(self, commands: bytes, count: int = 1) -> asyncio.Future[list[T]]:
        """Send `count` commands. The future has their answers."""
        self._answers, self._wanted = [], count
        self._done = self._loop.create_future()
        self._transport.write(commands)
        return self._done
