"""The client that Spark's processes use: what it repeats, for how long, and what it says in the end."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from server_process import closed_port
from sluiceway.kernel.errors import SluicewayError
from sluiceway.spark import http
from sluiceway.spark.http import Client
from sluiceway.spark.options import Server


def client_of(url: str, request_timeout: int = 60_000, **options: str) -> Client:
    return Client(Server(url, "q", request_timeout, **options))


Answer = tuple[int, bytes] | tuple[int, bytes, str]


def problem(status: int, code: str) -> tuple[int, bytes]:
    return status, json.dumps({"code": code, "detail": f"about {code}"}).encode()


class Script:
    """A server that gives the answers of a script, one a request, and keeps what it was sent. An empty answer drops the connection.

    A third part of an answer is its Retry-After.
    """

    def __init__(self, answers: list[Answer]) -> None:
        self.seen: list[tuple[str, bytes]] = []
        script, seen = iter(answers), self.seen

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                status, body, *wait = next(script)
                if not status:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                self.send_response(status)
                if wait:
                    self.send_header("retry-after", wait[0])
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    script = Script(list(answers))
    thread = threading.Thread(target=script.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield script
    finally:
        script.server.shutdown()
        script.server.server_close()
        thread.join()


OK = (200, b'{"fine": true}')
DROPPED = (0, b"")


@pytest.mark.parametrize(
    "fault",
    [problem(503, "unavailable"), problem(504, "outcome_unknown"), problem(429, "too_many_requests"), (503, b"<html>"), DROPPED],
)
def test_a_passing_fault_is_repeated_with_the_same_body(fault: tuple[int, bytes]) -> None:
    with scripted(fault, fault, OK) as script:
        client = client_of(script.url)
        assert client.call("/v1/queue.stats", {"queue_name": "q"}) == {"fine": True}
        client.close()
        assert script.seen == [("/v1/queue.stats", b'{"queue_name": "q"}')] * 3


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (problem(404, "queue_not_found"), "queue_not_found"),
        (problem(503, "partition_damaged"), "partition_damaged"),
        (problem(500, "internal"), "internal"),
        ((400, b"what"), "internal"),
    ],
)
def test_a_lasting_refusal_is_raised_at_once(answer: tuple[int, bytes], code: str) -> None:
    with scripted(answer) as script:
        client = client_of(script.url)
        with pytest.raises(SluicewayError) as caught:
            client.call("/v1/queue.stats", {})
        client.close()
        assert caught.value.code == code
        assert len(script.seen) == 1


def test_the_last_error_is_raised_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = [0.0]
    # The module's own clock only: the server of the test needs the real one.
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    monkeypatch.setattr(http, "_LEAST_ATTEMPT", 60.0)
    with scripted(*[problem(503, "unavailable")] * 1_000) as script:
        client = client_of(script.url, 30_000)
        with pytest.raises(SluicewayError, match=r"about unavailable .*tried for 30s; option requestTimeout"):
            client.call("/v1/queue.stats", {})
        client.close()
        assert 28 < sum(slept) < 30
        assert len(script.seen) == len(slept)  # one call before each pause, one after the last, and the first entry is no pause


@pytest.mark.parametrize(("said", "least"), [("7", 7), ("0", 0), ("soon", 0), ("-1", 0)])
def test_a_server_that_asks_to_wait_is_not_asked_before(said: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    with scripted((*problem(429, "rate_limited"), said), OK) as script:
        client = client_of(script.url)
        client.call("/v1/queue.stats", {})
        client.close()
    assert len(slept) == 1
    assert least < slept[0] < least + 0.1


def test_an_answer_to_half_a_body_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(HTTPConnection):
        """Its server has answered and does not take the rest."""

        def request(self, *arguments: Any) -> None:  # type: ignore[override]
            super().request(*arguments)
            raise BrokenPipeError

    monkeypatch.setattr(http, "HTTPConnection", Cut)
    with scripted(problem(401, "unauthenticated")) as script:
        client = client_of(script.url)
        with pytest.raises(SluicewayError, match="option apiKey"):
            client.call("/v1/queue.produce", {})
        client.close()
        assert len(script.seen) == 1


def test_a_server_that_is_not_there_is_named() -> None:
    with closed_port() as port, pytest.raises(SluicewayError, match=f"http://127.0.0.1:{port}") as caught:
        client_of(f"http://127.0.0.1:{port}", 100).call("/v1/queue.stats", {})
    assert caught.value.retryable


def test_arrow_is_sent_and_fetched() -> None:
    batch = pa.record_batch({"payload": pa.array([b"x", b"y"], pa.binary())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    with scripted(OK, (200, sink.getvalue().to_pybytes())) as script:
        client = client_of(script.url)
        client.send_arrow("/v1/queue.produce", {"idempotency_key": "a/b c"}, batch)
        assert client.fetch_arrow("/v1/queue.peek", {}).read_all().to_batches() == [batch]
        client.close()
        path, body = script.seen[0]
        assert path == "/v1/queue.produce?idempotency_key=a%2Fb+c"
        assert pa.ipc.open_stream(body).read_all().to_batches() == [batch]
