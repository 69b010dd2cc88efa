"""What ends a connection whose client does not get on. The limits are made short; that they are kept at all is what is tested."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sluiceway.kernel.limits import MAX_CONNECTIONS, MAX_HEAD_BYTES, MAX_HEADERS
from sluiceway.server import connections, run
from tests.server.server_process import PATIENCE
from tests.server.server_running import Running, eventually, running

GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/queues.list HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LONG = int(PATIENCE * 10_000)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Nothing is late there, unless a test says so."""
    for name in ("HEAD_TIMEOUT", "LEFTOVER_TIMEOUT", "SEND_TIMEOUT"):
        monkeypatch.setattr(connections, name, LONG)
    with running(tmp_path) as served:
        yield served


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection, in whichever way."""
    found = b""
    with connection:
        while True:
            try:
                part = connection.recv(65_536)
            except ConnectionError:
                return found
            if not part:
                return found
            found += part


def answered(connection: socket.socket, end: bytes = b'{"alive":true}') -> bytes:
    """One answer, which ends so: of /livez."""
    found = b""
    while not found.endswith(end):
        part = connection.recv(65_536)
        assert part, found
        found += part
    return found


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET", GET, GET + b"x-more: 1\r\n"])
def test_a_head_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 20)
    assert rest(server.raw(begun)) == b""


@pytest.mark.parametrize("begun", [b"\r\n", b"GET"])
def test_a_second_head_that_does_not_come(server: Running, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    connection = server.raw(GET + b"\r\n")
    answered(connection)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 20)
    connection.sendall(begun)
    assert rest(connection) == b""


def test_an_idle_connection_is_not_late(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = server.raw(GET + b"\r\n")
    answered(connection)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 0)
    connection.sendall(GET + b"\r\n")
    answered(connection)
    # They give the server time to find it late.
    for _ in range(20):
        monkeypatch.setattr(connections, "HEAD_TIMEOUT", LONG)
        assert httpx.get(f"{server.url}/livez").status_code == 200
    connection.sendall(GET + b"\r\n")
    assert answered(connection).startswith(b"HTTP/1.1 200 ")
    connection.close()


def test_a_long_poll_is_not_late_whatever_follows_it(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    name = server.queue()
    connection = server.raw_post("queue.lease", queue_name=name, client_id="c", request_timeout="10m")
    eventually(lambda: server.waiting(name) == 1)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", 10)
    connection.sendall(b"\r\n")
    assert all(server.http.get("/livez").status_code == 200 for _ in range(50))
    server.produce(name, "x")
    assert b'"bytes":"eA=="' in answered(connection, b'"completed":null}')
    connection.close()


def test_a_body_that_goes_on_after_its_answer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LEFTOVER_TIMEOUT", 20)
    missing = b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    assert rest(server.raw(missing + b"more")).startswith(b"HTTP/1.1 404 ")


def test_a_body_that_ends_after_its_answer(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # However long this process is not scheduled in between.
    monkeypatch.setattr(connections, "LEFTOVER_TIMEOUT", 120_000)
    connection = server.raw(b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
    assert connection.recv(65_536).startswith(b"HTTP/1.1 404 ")
    connection.sendall(b"more" + GET + b"\r\n")
    assert answered(connection).startswith(b"HTTP/1.1 200 ")
    connection.close()


def test_an_answer_that_is_not_taken(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    name = server.queue()
    large = "x" * (7 << 20)
    for _ in range(4):
        server.produce(name, large)
    monkeypatch.setattr(connections, "SEND_TIMEOUT", 50)
    open_now = server._server.server_state.connections
    before = set(open_now)
    connection = server.raw_post("queue.peek", queue_name=name, limit=4)
    eventually(lambda: open_now - before)
    eventually(lambda: not open_now - before)
    # A part of it was in the buffers of both ends.
    assert len(rest(connection)) < 4 * len(large)


@pytest.mark.parametrize(
    "head",
    [
        GET + b"".join(b"x-%d: 1\r\n" % number for number in range(MAX_HEADERS)) + b"\r\n",
        GET + b"x-long: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_headers_beyond_their_limits(server: Running, head: bytes) -> None:
    connection = server.raw(head)
    assert answered(connection, b" bytes before its body").startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    connection.close()


@pytest.mark.parametrize("begin", [GET + b"x-endless: ", b"GET /endless", b""])
def test_a_head_without_an_end(server: Running, begin: bytes) -> None:
    flood(server, begin, b"x" * 65_536 if begin else b"\r\n" * 32_768)


@pytest.mark.parametrize("part", [b"x-trailer: " + b"x" * 1_000 + b"\r\n", b"x" * 65_536])
def test_what_follows_a_chunked_body_without_an_end(server: Running, part: bytes) -> None:
    flood(server, POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + (b"" if part.startswith(b"x-") else b"x-endless: "), part)


def flood(server: Running, begin: bytes, part: bytes) -> None:
    """The server ends it, long before 64 MiB."""
    connection = server.raw(begin)
    try:
        for _ in range((64 << 20) // len(part)):
            connection.sendall(part)
    except ConnectionError:
        return
    finally:
        connection.close()
    pytest.fail("it took all of it")


def test_strangers_who_send_no_http_do_not_fill_the_log(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "_complaints", connections._Complaints())
    monkeypatch.setattr(connections, "_LOG_INTERVAL", 3_600.0)
    for _ in range(5):
        assert rest(server.raw(b"no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    lines = [record.getMessage() for record in caplog.records if "no valid HTTP" in record.getMessage()]
    assert [line.partition(" ")[0] for line in lines] == ["1"]


def test_as_many_as_were_not_logged_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    complaints = connections._Complaints()
    for now in (0.0, 0.5, 0.9, 1.0, 1.5, 2.0):
        complaints.note(f"at {now}", now)
    assert [record.getMessage() for record in caplog.records] == [
        "1 requests were no valid HTTP; the last one: at 0.0",
        "3 requests were no valid HTTP; the last one: at 1.0",
        "2 requests were no valid HTTP; the last one: at 2.0",
    ]


def test_a_body_in_the_smallest_chunks_is_taken(server: Running) -> None:
    body = b'{"limit":1' + b" " * 100_000 + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    connection = server.raw(POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert rest(connection).startswith(b"HTTP/1.1 200 ")


def test_one_connection_too_many(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.http.get("/livez")
    monkeypatch.setattr(connections, "most_connections", lambda: 1)
    refused = rest(server.raw(b""))
    assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b'"code":"unavailable"' in refused
    assert b"connections is reached; try again later" in refused
    assert server.http.get("/livez").status_code == 200


def test_half_of_the_files_are_left_to_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_000, 4_000))
    assert connections.most_connections.__wrapped__() == 500
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert connections.most_connections.__wrapped__() == MAX_CONNECTIONS


@pytest.mark.parametrize("error", [None, ValueError("not allowed"), OSError(errno.EPERM, "not permitted")])
def test_a_server_opens_as_many_files_as_it_may(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    wanted: list[tuple[int, int]] = []

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        wanted.append(limits)
        if error is not None:
            raise error

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1_024, 4_096))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    run._open_more_files()
    assert wanted == [(4_096, 4_096)]
