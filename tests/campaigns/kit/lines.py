"""Lines of TCP that can be cut, silenced one way or both, and slowed, while somebody talks over them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

HOST = "127.0.0.1"
Direction = Literal["up", "down"]
"""Up: what whoever has connected sends. Down: what it is answered."""
_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)


class Line:
    """A port that leads to another one. Made by a `Switchboard`; its methods may be called from any thread, and have taken effect when they
    return.

    A silent direction keeps what was sent, as the network's retransmissions do, and delivers it when it is mended: a request
    that comes late is the worst of them. How much it keeps is bounded by the buffers of the sockets.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, target: int) -> None:
        self.target = target
        """The port that it leads to; may be changed, and then counts for what connects next."""
        self.port = 0
        self.connections = 0
        """How many were ever made."""
        self.held = 0
        """What waits in silent directions at this moment, in pieces; each connection has one at most."""
        self._loop = loop
        self._gates: dict[Direction, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._is_cut = False
        self._delay = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        for gate in self._gates.values():
            gate.set()

    def cut(self) -> None:
        """Reset every connection, and each new one, until it is mended."""

        def cut() -> None:
            self._is_cut = True
            for writer in self._writers:
                reset(writer)

        self._do(cut)

    def silence(self, *directions: Direction) -> None:
        """Let nothing through in these directions until it is mended; connections stay, and new ones are taken."""

        def silence() -> None:
            for direction in directions:
                self._gates[direction].clear()

        self._do(silence)

    def delay(self, seconds: float) -> None:
        """Hold everything up for so long, both ways."""

        def delay() -> None:
            self._delay = seconds

        self._do(delay)

    def mend(self) -> None:
        """As it was at first; what a silent line has kept arrives now."""

        def mend() -> None:
            self._is_cut, self._delay = False, 0.0
            for gate in self._gates.values():
                gate.set()

        self._do(mend)

    def _do(self, change: Callable[[], None]) -> None:
        async def work() -> None:
            change()

        asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    async def connected(self, caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter) -> None:
        self.connections += 1
        ends = {to_caller}
        self._writers.add(to_caller)
        try:
            if self._is_cut:
                reset(to_caller)
                return
            answers, to_target = await asyncio.open_connection(HOST, self.target)
            ends.add(to_target)
            self._writers.add(to_target)
            await asyncio.gather(self._pump("up", caller, to_target), self._pump("down", answers, to_caller))
        except asyncio.CancelledError:
            pass  # the switchboard ends
        except OSError:
            # The caller is to see what became of the other end.
            for writer in ends:
                reset(writer)
        finally:
            self._writers -= ends
            for writer in ends:
                writer.close()

    async def _pump(self, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate = self._gates[direction]
        while data := await reader.read(_CHUNK):
            self.held += 1
            await gate.wait()
            self.held -= 1
            if self._delay:
                await asyncio.sleep(self._delay)
            writer.write(data)
            await writer.drain()
        await gate.wait()
        with suppress(OSError):
            writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """End it so that the other side sees a reset, not an orderly end."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Switchboard:
    """Where lines are made. They work, in a thread of their own, until the block ends."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="switchboard")
        self._thread.start()
        return self

    def line(self, target: int) -> Line:
        """A line to that port of this machine; `port` of it is where to connect."""
        line = Line(self._loop, target)

        async def listen() -> int:
            listener = await asyncio.start_server(line.connected, HOST, 0)
            port: int = listener.sockets[0].getsockname()[1]
            return port

        line.port = asyncio.run_coroutine_threadsafe(listen(), self._loop).result()
        return line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
