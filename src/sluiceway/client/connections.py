"""The connection pool of the blocking client. A connection carries one call at a time; the most recently used idle one goes first.

Own connections over httptools, and no HTTP library, because one cost more than all the rest of a call: 250 µs of processor time with httpx
(575 with asyncio), 190 with urllib3, 140 with aiohttp, 13 (45) with these.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from sluiceway.client.http_messages import Answer, AnswerParser, NoAnswerError, NotSentError, Origin, Request

CONNECT_TIMEOUT: Final = 5.0
KEPT: Final = 100
"""Maximum number of idle connections to one server. Those in use are not limited, because each waiting lease call holds one."""
IDLE: Final = 30.0
"""Idle connections are closed after this many seconds, before the server does so. A call on a closing connection has an unknown outcome."""
CHUNK: Final = 1 << 16

L = TypeVar("L")


class Links(Generic[L]):
    """The connections, and which of them are idle. Thread-safe. A child process that was forked off has none of them."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._all: set[L] = set()
        self._idle: dict[Origin, deque[tuple[L, float]]] = {}

    def _part(self) -> None:
        """Forget the connections of a parent process: who shares one reads the other's answers, and ends its calls by closing it."""
        if self._process != os.getpid():
            self._reset()

    def take(self, origin: Origin) -> tuple[L | None, list[L]]:
        """An idle connection, or None; and the connections to close, which were idle for too long."""
        self._part()
        with self._lock:
            idle = self._idle.get(origin)
            if not idle:
                return None, []
            link, since = idle.pop()
            if since >= time.monotonic() - IDLE:
                return link, []
            old = [link, *(each for each, _ in idle)]
            del self._idle[origin]
            self._all.difference_update(old)
            return None, old

    def add(self, link: L) -> None:
        self._part()
        with self._lock:
            self._all.add(link)

    def give_back(self, origin: Origin, link: L) -> list[L]:
        """Return a connection that is idle now. Returns the connections to close: idle for too long, or too many."""
        now = time.monotonic()
        old = []
        with self._lock:
            if link not in self._all:
                return [link]
            self._idle.setdefault(origin, deque()).append((link, now))
            # This includes connections to servers that are no longer called. There are few servers.
            for server, idle in list(self._idle.items()):
                while idle and (len(idle) > KEPT or idle[0][1] < now - IDLE):
                    old.append(idle.popleft()[0])
                if not idle:
                    del self._idle[server]
            self._all.difference_update(old)
        return old

    def forget(self, link: L) -> None:
        with self._lock:
            self._all.discard(link)

    def forget_all(self) -> list[L]:
        """Remove and return all connections, idle or in use."""
        self._part()
        with self._lock:
            links = list(self._all)
            self._all.clear()
            self._idle.clear()
        return links


def why(error: BaseException) -> str:
    """The error in words, for the end of a sentence."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.strerror) or str(error) or type(error).__name__


def watch(connection: socket.socket) -> Callable[[], bool]:
    """Returns what tells whether nothing has arrived on a connection, not even its end."""
    if not hasattr(select, "poll"):
        return lambda: not select.select([connection], [], [], 0)[0]
    system = select.poll()
    system.register(connection, select.POLLIN)
    return lambda: not system.poll(0)


class Connection:
    """A connection of a thread. Raises NotSentError if there is none to be had."""

    def __init__(self, origin: Origin, context: ssl.SSLContext | None, patience: float = CONNECT_TIMEOUT) -> None:
        try:
            self._socket = socket.create_connection((origin.host, origin.port), patience)
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if context is not None:
                    self._socket = context.wrap_socket(self._socket, server_hostname=origin.host)
            except BaseException:
                self._socket.close()
                raise
        except (OSError, ValueError) as error:
            # A ValueError: no host can have such a name.
            raise NotSentError(why(error)) from error
        self._patience = patience
        self._parser = AnswerParser()
        self._is_quiet = watch(self._socket)

    def is_usable(self) -> bool:
        """Whether the connection, which is idle, is open."""
        return self._is_quiet()

    def is_reusable(self) -> bool:
        """Whether the last answer has left the connection in a state for another request."""
        return self._parser.is_reusable

    @property
    def has_answered(self) -> bool:
        """Whether any of the answer to the last request has arrived."""
        return self._parser.has_head

    def receive(self) -> Answer:
        """Return the answer to the request that was sent. Raises NoAnswerError."""
        parser = self._parser
        while not parser.is_complete:
            if parser.missing() > CHUNK:
                self._receive_rest()
            else:
                self._receive()
        return parser.answer()

    def send(self, request: Request) -> None:
        """Raises NoAnswerError."""
        self._parser.begin()
        if request.patience != self._patience:
            self._socket.settimeout(request.patience)
            self._patience = request.patience
        try:
            if len(request.body) < CHUNK:
                self._socket.sendall(request.head + request.body)
            else:
                self._socket.sendall(request.head)
                self._socket.sendall(request.body)
        except TimeoutError as error:
            raise NoAnswerError(why(error)) from error
        except OSError as error:
            # A server that refuses a request may answer before it has read all of it, and close.
            with contextlib.suppress(NoAnswerError):
                while not self._parser.is_complete:
                    self._receive()
                self._parser.is_reusable = False
                return
            raise NoAnswerError(why(error)) from error

    def _receive(self) -> None:
        try:
            data = self._socket.recv(CHUNK)
        except OSError as error:
            raise NoAnswerError(why(error)) from error
        if data:
            self._parser.feed(data)
        else:
            self._parser.end()
            self._parser.is_reusable = False

    def _receive_rest(self) -> None:
        """Read a large body in one piece."""
        body, at = self._parser.take_over()
        room = memoryview(body)
        while at < len(body):
            try:
                count = self._socket.recv_into(room[at:])
            except OSError as error:
                raise NoAnswerError(why(error)) from error
            if not count:
                self._parser.end()
            at += count
        self._parser.complete(body)

    def parts(self, request: Request) -> Iterator[Answer]:
        """Send the request; yield the answer's head, without a body, then each part of its body as it arrives."""
        parser = self._parser
        self.send(request)
        while not parser.has_head:
            self._receive()
        yield Answer(parser.status, parser.headers, b"")
        while parser.parts or not parser.is_complete:
            parts, parser.parts = parser.parts, []
            for part in parts:
                yield Answer(parser.status, parser.headers, part)
            if not parts:
                self._receive()

    def close(self) -> None:
        """Close it; a call that waits for an answer in another thread fails."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Sent(NamedTuple):
    """A request that was sent on `link`. `was_idle`: the connection had been idle."""

    request: Request
    link: Connection
    was_idle: bool


class Connections:
    """The pool for threads. It takes any number of concurrent calls, to one or several servers.

    `context` verifies the servers of `https` addresses.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._links: Links[Connection] = Links()

    def exchange(self, request: Request) -> Answer:
        """Send the request and return its answer. Raises NotSentError, NoAnswerError."""
        return self.receive(self.send(request))

    def send(self, request: Request) -> Sent:
        """Send the request. `receive` returns its answer. Raises NotSentError, NoAnswerError."""
        link = self._take(request)
        sent = Sent(request, link, link.is_reusable())
        try:
            link.send(request)
        except BaseException as error:
            self._failed(sent, error)
            raise
        return sent

    def receive(self, sent: Sent) -> Answer:
        """Return the answer to what `send` has sent. Raises NoAnswerError."""
        link = sent.link
        try:
            answer = link.receive()
        except BaseException as error:
            self._failed(sent, error)
            raise
        if link.is_reusable():
            for each in self._links.give_back(sent.request.origin, link):
                each.close()
        else:
            self._drop(link)
        return answer

    def _failed(self, sent: Sent, error: BaseException) -> None:
        if isinstance(error, NoAnswerError):
            error.was_idle = sent.was_idle and not sent.link.has_answered and not isinstance(error.__cause__, TimeoutError)
        self._drop(sent.link)

    @contextlib.contextmanager
    def stream(self, request: Request) -> Iterator[Iterator[Answer]]:
        """Send the request and yield its answer: first its head, then each part of the body as it arrives. Raises as `exchange`."""
        link = Connection(request.origin, self._context if request.origin.tls else None)
        self._links.add(link)
        try:
            yield link.parts(request)
        finally:
            self._drop(link)

    def _take(self, request: Request) -> Connection:
        while True:
            link, old = self._links.take(request.origin)
            for each in old:
                each.close()
            if link is None:
                context = self._context if request.origin.tls else None
                link = Connection(request.origin, context, min(CONNECT_TIMEOUT, request.patience))
                self._links.add(link)
                return link
            if link.is_usable():
                return link
            self._drop(link)

    def _drop(self, link: Connection) -> None:
        self._links.forget(link)
        link.close()

    def close(self) -> None:
        """Close all, also those in use."""
        for link in self._links.forget_all():
            link.close()
