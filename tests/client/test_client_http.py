"""Both clients over HTTP: the same calls, errors and repetitions, on a scripted transport and on real sockets."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pyarrow as pa
import pytest

from sluiceway.client import AsyncClient, CallError, Client, SluicewayError, http_exchange
from sluiceway.kernel.limits import BURST_KEY
from tests.server.server_process import PATIENCE, closed_port

PRODUCED = b'{"queue_name":"q","partition":0,"first_id":"k7f3q2ma.0.0","count":1,"deduplicated":false}'
Handler = Callable[[httpx.Request], httpx.Response]


class Face:
    """Makes the same call on the blocking and on the asyncio client."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def call(self, use: Callable[[Any], Any], handler: Handler | None = None, url: str = "http://127.0.0.1:1", **options: Any) -> Any:
        transport = httpx.MockTransport(handler) if handler else None
        if self.kind == "sync":
            with Client(url, transport=transport, **options) as client:
                return use(client)

        async def run() -> Any:
            async with AsyncClient(url, transport=transport, **options) as client:
                return await use(client)

        return asyncio.run(run())


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Face:
    return Face(request.param)


def scripted(*steps: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    """A handler that takes one step per request, and the requests that it saw."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        step = steps[len(seen)]
        seen.append(request)
        if isinstance(step, Exception):
            raise step
        return step

    return handler, seen


def problem(status: int, code: str, retryable: bool) -> httpx.Response:
    return httpx.Response(
        status, json={"status": status, "code": code, "detail": f"it is {code}", "retryable": retryable, "request_id": "r1"}
    )


def test_the_two_clients_have_the_same_calls() -> None:
    def calls(kind: type) -> dict[str, list[inspect.Parameter]]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters.values()) for name, method in methods if not name.startswith("_")}

    assert calls(Client) == calls(AsyncClient)
    assert all(method.__doc__ for kind in (Client, AsyncClient) for name, method in inspect.getmembers(kind) if not name.startswith("_"))


def test_a_request_is_complete_and_waits_longer_than_the_server(face: Face) -> None:
    handler, seen = scripted(httpx.Response(200, content=PRODUCED))
    face.call(lambda c: c.produce("q", ["x"], request_timeout="7s"), handler, url="http://127.0.0.1:2319/base/")
    (request,) = seen
    assert (request.method, str(request.url)) == ("POST", "http://127.0.0.1:2319/base/v1/queue.produce")
    assert request.headers["host"] == "127.0.0.1:2319"
    assert request.headers["content-type"] == request.headers["accept"] == "application/json"
    assert int(request.headers["content-length"]) == len(request.content)
    assert request.extensions["timeout"]["read"] == 7 + http_exchange.SLACK


def test_a_produce_gets_a_key_of_its_own_that_its_repetition_keeps(face: Face) -> None:
    handler, seen = scripted(
        httpx.ConnectError("refused"),
        httpx.ReadError("cut"),
        problem(503, "unavailable", True),
        problem(504, "outcome_unknown", True),
        httpx.Response(200, content=PRODUCED),
        httpx.Response(200, content=PRODUCED),
    )

    async def twice(client: AsyncClient) -> None:
        await client.produce("q", ["x"])
        await client.produce("q", ["x"])

    def both(client: Client) -> None:
        client.produce("q", ["x"])
        client.produce("q", ["x"])

    face.call(both if face.kind == "sync" else twice, handler)
    keys = [msgspec.json.decode(request.content)["idempotency_key"] for request in seen]
    assert len(keys) == 6
    assert all(msgspec.json.decode(request.content)["idempotency_window"] == "10m" for request in seen)
    assert keys[0] != keys[1], "the first attempt surely did nothing: another key may have a home that is there"
    assert len(set(keys[1:5])) == 1, "what became of the second is unknown"
    assert keys[5] != keys[4]


@pytest.mark.parametrize(
    ("retry_for", "request_timeout", "window"), [("30s", None, "10m"), ("5m", "15m", "21m"), ("30s", "15m", "16m30s"), ("2d", None, "1d")]
)
def test_a_key_of_its_own_outlives_the_last_attempt(retry_for: str, request_timeout: str | None, window: str) -> None:
    assert http_exchange.generated_key(http_exchange.seconds(retry_for, "retry_for"), request_timeout).window == window


def test_calls_made_together_have_keys_of_one_burst() -> None:
    now = 7.0
    bursts = http_exchange.Bursts(lambda: now)

    def burst(name: str) -> str:
        assert name.startswith(BURST_KEY)
        return name.rpartition("/")[0]

    names = [bursts.name() for _ in range(3 * http_exchange.BURST_CALLS)]
    assert len(set(names)) == len(names)
    assert list(Counter(map(burst, names)).values()) == [http_exchange.BURST_CALLS] * 3
    one = burst(bursts.name())
    assert burst(bursts.name()) == one
    now += http_exchange.BURST_TIME
    assert burst(bursts.name()) != one
    one = burst(bursts.name())
    other = burst(bursts.next())
    assert other != one, "the home of the last burst could not be reached"
    assert burst(bursts.name()) == other


def test_without_generated_keys_an_unknown_outcome_is_raised_at_once(face: Face) -> None:
    handler, seen = scripted(problem(503, "unavailable", True), httpx.ReadError("cut"))
    with pytest.raises(CallError, match=r"no answer from http://127\.0\.0\.1:1: cut") as raised:
        face.call(lambda c: c.produce("q", ["x"]), handler, generate_keys=False)
    assert raised.value.code == "outcome_unknown"
    assert len(seen) == 2
    assert "idempotency_key" not in msgspec.json.decode(seen[0].content)


def test_a_lease_is_repeated_only_with_a_key(face: Face) -> None:
    empty = httpx.Response(200, json={"queue_name": "q", "partition": None, "leases": [], "items": []})
    handler, seen = scripted(httpx.ReadTimeout("late"))
    with pytest.raises(CallError) as raised:
        face.call(lambda c: c.lease("q"), handler)
    assert raised.value.code == "outcome_unknown"
    handler, seen = scripted(httpx.ReadTimeout("late"), empty)
    assert face.call(lambda c: c.lease("q", lease_key="1"), handler, client_id="me").items == []
    assert [msgspec.json.decode(request.content)["client_id"] for request in seen] == ["me", "me"]


def test_a_refusal_is_raised_with_what_the_server_said(face: Face) -> None:
    handler, seen = scripted(problem(404, "queue_not_found", False))
    with pytest.raises(SluicewayError, match="it is queue_not_found") as raised:
        face.call(lambda c: c.stats("q"), handler)
    assert isinstance(raised.value, CallError)
    assert (raised.value.code, raised.value.request_id, raised.value.retryable, len(seen)) == ("queue_not_found", "r1", False, 1)


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"queue_name": 3}', b""])
def test_a_success_that_cannot_be_read_is_unknown_and_not_repeated(face: Face, body: bytes) -> None:
    handler, seen = scripted(httpx.Response(200, content=body))
    with pytest.raises(CallError, match="cannot be read") as raised:
        face.call(lambda c: c.produce("q", ["x"]), handler)
    assert (raised.value.code, len(seen)) == ("outcome_unknown", 1)


@pytest.mark.parametrize("url", ["", "127.0.0.1", "ftp://host", "http://", "http://host:port"])
def test_a_wrong_url_is_refused_by_name(face: Face, url: str) -> None:
    with pytest.raises(SluicewayError) as raised:
        face.call(lambda c: c.stats("q"), url=url)
    assert (raised.value.code, raised.value.field) == ("invalid_request", "url")


def test_rows_go_out_and_come_in_as_arrow(face: Face) -> None:
    rows = pa.RecordBatch.from_pydict({"payload": [b"a", b"b"]}, schema=pa.schema([pa.field("payload", pa.binary(), nullable=False)]))
    handler, seen = scripted(httpx.Response(200, content=PRODUCED))
    face.call(lambda c: c.produce_arrow("q", rows, idempotency_key="k"), handler)
    assert pa.ipc.open_stream(seen[0].content).read_all().equals(pa.Table.from_batches([rows]))
    assert dict(seen[0].url.params) == {"queue_name": "q", "idempotency_key": "k"}

    head = (
        b'{"queue_name":"q","incarnation":"k7f3q2ma","partition":1,'
        b'"leases":[{"lease_id":"k7f3q2ma.1.L4","partition":1,"count":2,"lease_deadline":"2026-01-31T08:00:00Z"}]}'
    )
    columns = {
        "partition": pa.array([1, 1], pa.int32()),
        "lease": pa.array([4, 4], pa.int64()),
        "offset": pa.array([98, 100], pa.int64()),
        "payload": pa.array([b"a", b"b"]),
    }
    answer = pa.table(columns).replace_schema_metadata({"sluiceway": head})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, answer.schema) as stream:
        stream.write(answer)
    handler, seen = scripted(httpx.Response(200, content=sink.getvalue().to_pybytes()))
    leased = face.call(lambda c: c.lease_arrow("q", batch_size=2), handler)
    assert seen[0].headers["accept"] == "application/vnd.apache.arrow.stream"
    assert leased.ids().to_pylist() == ["k7f3q2ma.1.98", "k7f3q2ma.1.100"]
    assert (leased.lease_ids, len(leased), leased.lease_deadline.hour) == (["k7f3q2ma.1.L4"], 2, 8)
    assert leased.table["payload"].to_pylist() == [b"a", b"b"]
    assert pa.table(leased).column("offset").to_pylist() == [98, 100]

    for body in (b"not arrow", sink.getvalue().to_pybytes()[:-200]):
        handler, _ = scripted(httpx.Response(200, content=body))
        with pytest.raises(CallError, match="cannot be read"):
            face.call(lambda c: c.lease_arrow("q"), handler)


# -- real sockets -------------------------------------------------------------------------------------------------------


def read_request(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        head = b"".join(iter(stream.readline, b"\r\n"))
        length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
        return stream.read(int(length.split(b":")[1]))


@contextmanager
def server(*replies: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads one request per connection and replies, or closes (None). Yields its URL and the requests' bodies."""
    listener = socket.create_server(("127.0.0.1", 0))
    requests: list[bytes] = []
    finished: Future[None] = Future()

    def serve() -> None:
        try:
            for reply in replies:
                connection, _ = listener.accept()
                with connection:
                    requests.append(read_request(connection))
                    if reply is not None:
                        connection.sendall(reply)
            finished.set_result(None)
        except OSError as error:
            finished.set_exception(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        finished.result(PATIENCE)
    finally:
        listener.close()
        thread.join(PATIENCE)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(PRODUCED), PRODUCED)


def test_no_server_is_a_refusal(face: Face) -> None:
    with closed_port() as port, pytest.raises(CallError, match="cannot reach") as raised:
        face.call(lambda c: c.produce("q", ["x"]), url=f"http://127.0.0.1:{port}", retry_for="0s")
    assert (raised.value.code, raised.value.retryable, raised.value.outcome_unknown) == ("unavailable", True, False)


def test_a_connection_that_breaks_after_sending_is_unknown(face: Face) -> None:
    for broken in (None, OK[:-10]):
        with server(broken) as (url, _), pytest.raises(CallError, match="no answer") as raised:
            face.call(lambda c: c.produce("q", ["x"]), url=url, retry_for="0s")
        assert (raised.value.code, raised.value.outcome_unknown) == ("outcome_unknown", True)


def test_a_keyed_produce_goes_on_over_broken_connections(face: Face) -> None:
    with server(None, OK[:-10], OK) as (url, requests):
        produced = face.call(lambda c: c.produce("q", ["x"], idempotency_key="fixed"), url=url)
    assert produced.first_id == "k7f3q2ma.0.0"
    assert len(requests) == 3
    assert all(b'"idempotency_key":"fixed"' in request for request in requests)


def test_a_server_that_does_not_answer_is_unknown_after_the_slack(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_exchange, "SLACK", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(CallError) as raised:
        face.call(
            lambda c: c.complete("q", ["a.0.1"], request_timeout="50ms"),
            url=f"http://127.0.0.1:{silent.getsockname()[1]}",
            retry_for="0s",
        )
    assert raised.value.code == "outcome_unknown"
