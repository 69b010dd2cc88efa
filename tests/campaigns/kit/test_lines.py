"""A line does to who talks over it what it is told to do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.campaigns.kit.lines import HOST, Direction, Line, Switchboard
from tests.server.server_process import PATIENCE, wait_until


class Echo:
    """Sends back what it gets, and notes it."""

    def __init__(self) -> None:
        self.got = b""
        self.changed = threading.Condition()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    with self.changed:
                        self.got += data
                        self.changed.notify_all()
                    connection.sendall(data)
            except OSError:
                return

    def wait_for(self, data: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.got == data, PATIENCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def line(echo: Echo) -> Iterator[Line]:
    with Switchboard() as switchboard:
        yield switchboard.line(echo.port)


def connect(line: Line) -> socket.socket:
    return socket.create_connection((HOST, line.port), timeout=PATIENCE)


def assert_reset(line: Line) -> None:
    """A new connection is ended at once; that may already show while it is made."""
    with pytest.raises(ConnectionResetError), connect(line) as caller:
        caller.recv(1)


def test_a_whole_line_carries_everything_both_ways_and_the_end_of_it(line: Line) -> None:
    data = bytes(range(256)) * 4_000
    with connect(line) as caller:

        def send() -> None:
            caller.sendall(data)
            caller.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        heard = b""
        while part := caller.recv(1 << 16):
            heard += part
        sender.join()
    assert heard == data


def test_a_cut_line_resets_those_that_talk_and_those_that_come_until_it_is_mended(line: Line) -> None:
    with connect(line) as caller:
        caller.sendall(b"a")
        assert caller.recv(1) == b"a"
        line.cut()
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
    assert_reset(line)
    line.mend()
    with connect(line) as caller:
        caller.sendall(b"b")
        assert caller.recv(1) == b"b"


@pytest.mark.parametrize("directions", [("up",), ("down",), ("up", "down")])
def test_a_silent_line_keeps_what_was_sent_until_it_is_mended(line: Line, echo: Echo, directions: tuple[Direction, ...]) -> None:
    with connect(line) as caller:
        caller.sendall(b"a")
        assert caller.recv(1) == b"a"
        line.silence(*directions)
        caller.sendall(b"b")
        wait_until(lambda: line.held == 1, "something that is held")
        assert echo.got == (b"ab" if directions == ("down",) else b"a")
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(1)
        line.mend()
        caller.settimeout(PATIENCE)
        assert caller.recv(1) == b"b"
    assert line.held == 0


def test_a_slow_line_delivers_all_the_same(line: Line) -> None:
    line.delay(0.01)
    with connect(line) as caller:
        caller.sendall(b"slow")
        heard = b""
        while len(heard) < 4:
            heard += caller.recv(4)
    assert heard == b"slow"


def test_a_line_to_nobody_resets_its_caller(line: Line, echo: Echo) -> None:
    echo.close()
    assert_reset(line)


def test_a_line_may_lead_elsewhere_from_the_next_connection_on(line: Line, echo: Echo) -> None:
    other = Echo()
    line.target = other.port
    with connect(line) as caller:
        caller.sendall(b"x")
        assert caller.recv(1) == b"x"
    assert (echo.got, other.got) == (b"", b"x")
    other.close()
