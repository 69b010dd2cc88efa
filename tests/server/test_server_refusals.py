"""What the server does with requests that it cannot take: a 4xx problem that names what is wrong, and it goes on."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Iterator, MutableMapping
from typing import Any

import pyarrow as pa
import pytest

from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.kernel.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_CALL_BYTES, MAX_ITEMS_JSON
from sluiceway.server.http import BodyMemory, Request
from tests.server.server_running import ARROW, Running, eventually, running

JSON = "application/json"
CALLS = [
    *("queue.produce", "queue.lease", "queue.complete", "queue.retry", "queue.release", "queue.settle", "queue.extend", "queue.peek"),
    *("queue.browse", "queue.explain", "queue.stats", "queue.clear", "queue.redrive", "queue.pause", "queue.resume"),
    *("queues.create", "queues.update", "queues.list", "queues.info", "queues.delete"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as served:
        yield served


@pytest.fixture(autouse=True)
def _goes_on(server: Running) -> Iterator[None]:
    """After each of these requests the server does its work as before, and nothing was stored."""
    name = server.queue()
    yield
    assert server.totals(name)["produced"] == 0
    server.produce(name, "x")
    assert len(server.lease(name)["items"]) == 1


def problem(answer: Any, status: int, code: str, field: str | None = None) -> dict[str, Any]:
    """Check that the answer is that problem, in full."""
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert (answer.status_code, found["status"], found["code"], found.get("field")) == (status, status, code, field), found
    assert (found["title"], found["retryable"]) == (KINDS[code].title, KINDS[code].retryable)
    assert found["detail"] == found["message"]
    assert found["request_id"] == answer.headers["x-request-id"]
    return found


def post(server: Running, call: str, body: bytes, kind: str = JSON, **query: str) -> Any:
    return server.http.post(f"/v1/{call}", content=body, params=query, headers={"content-type": kind})


def stream(compression: str | None = None, **columns: pa.Array) -> bytes:
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_1001_items(server: Running) -> None:
    name = server.queue()
    answer = server.post("queue.produce", queue_name=name, items=[{"utf8": "x"}] * (MAX_ITEMS_JSON + 1))
    found = problem(answer, 400, "too_many_items", "items")
    assert "1,001" in found["detail"]
    assert "1,000" in found["detail"]
    assert server.totals(name)["produced"] == 0


def test_unknown_field(server: Running) -> None:
    answer = server.post("queue.produce", queue_name=server.queue(), items=[{"utf8": "x", "colour": 1}])
    problem(answer, 400, "invalid_request", "items[0].colour")


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        ("queue.produce", {"items": [{"utf8": "x"}]}),
        ("queue.lease", {"client_id": "c"}),
        ("queue.lease", {"client_id": "c", "request_timeout": "1s"}),
        ("queue.complete", {"ids": ["a.0.1"]}),
        ("queue.retry", {"items": [{"id": "a.0.1"}]}),
        ("queue.release", {"ids": ["a.0.1"]}),
        ("queue.settle", {"items": [{"id": "a.0.1", "outcome": "done"}]}),
        ("queue.extend", {"lease_ids": ["a.0.L1"]}),
        ("queue.peek", {}),
        ("queue.browse", {"partition": 0}),
        ("queue.explain", {"id": "a.0.1"}),
        ("queue.stats", {}),
        ("queues.update", {"reference": "r"}),
        ("queues.info", {}),
        ("queues.delete", {}),
    ],
)
def test_unknown_queue(server: Running, call: str, fields: dict[str, object]) -> None:
    found = problem(server.post(call, queue_name="nowhere", **fields), 404, "queue_not_found", "queue_name")
    assert "nowhere" in found["detail"]
    problem(server.post(call, queue_name="no/where", **fields), 400, "invalid_request", "queue_name")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff\xfe\x00", b"[" * 50_000])
def test_not_json(server: Running, call: str, body: bytes) -> None:
    problem(post(server, call, body), 400, "invalid_body")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (stream(payload=pa.array([1, 2])), "invalid_request", "payload"),
        (stream(load=pa.array([b"x"])), "invalid_request", "load"),
        (stream(payload=pa.array([b"x", None])), "invalid_request", "items[1].payload"),
        (stream(payload=pa.array([b"x"]).dictionary_encode()), "invalid_request", "payload"),
        (stream(payload=pa.array([b"x"] * 100))[:-20], "invalid_body", None),
        (stream(payload=pa.array([b"x"] * 100))[:-8], "invalid_body", None),
        (stream("zstd", payload=pa.array([b"x" * 1_000])), "invalid_body", None),
        (stream(payload=pa.array([b"x"] * 10_001)), "too_many_items", "items"),
        (b"", "invalid_body", None),
        (b'{"queue_name":"q"}', "invalid_body", None),
    ],
    ids=["type", "column", "null", "dictionary", "cut", "no-end", "compressed", "rows", "empty", "json"],
)
def test_bad_arrow(server: Running, body: bytes, code: str, field: str | None) -> None:
    name = server.queue()
    problem(post(server, "queue.produce", body, ARROW, queue_name=name), 400, code, field)
    assert server.totals(name)["produced"] == 0


def test_bad_query_strings(server: Running) -> None:
    name, body = server.queue(), stream(payload=pa.array([b"x"]))
    problem(post(server, "queue.produce", body, ARROW), 400, "invalid_request", "queue_name")
    problem(post(server, "queue.produce", body, ARROW, queue_name=name, colour="red"), 400, "invalid_request", "colour")
    problem(post(server, "queue.produce", body, ARROW, queue_name=name, request_timeout="soon"), 400, "invalid_request", "request_timeout")
    problem(post(server, f"queue.produce?queue_name={name}&queue_name={name}", body, ARROW), 400, "invalid_request", "queue_name")
    problem(post(server, "queue.settle", body, ARROW, queue_name=name), 400, "invalid_request", "incarnation")
    problem(post(server, "queues.info", b"{}", JSON, queue_name=name), 400, "invalid_request")


def test_random_bytes(server: Running) -> None:
    chance = random.Random(7)
    name = server.queue()
    for call in CALLS:
        for kind in (JSON, ARROW):
            for _ in range(10):
                answer = post(server, call, chance.randbytes(chance.randrange(300)), kind, queue_name=name)
                assert 400 <= answer.status_code < 500
                assert answer.json()["code"] in ("invalid_body", "invalid_request", "unsupported_media_type")


def test_bytes_that_are_not_http(server: Running) -> None:
    chance = random.Random(8)
    for data in (b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", *(chance.randbytes(200) + b"\r\n\r\n" for _ in range(20))):
        with server.raw(data) as connection:
            connection.shutdown(1)
            while connection.recv(65_536):
                pass


def test_content_types(server: Running) -> None:
    body = json.dumps({"queue_name": server.queue()}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ARROW):
        found = problem(post(server, "queue.stats", body, kind), 415, "unsupported_media_type")
        assert kind in found["detail"]
        assert JSON in found["detail"]
    bare = server.http.build_request("POST", "/v1/queue.stats", content=body)
    problem(server.http.send(bare), 415, "unsupported_media_type")
    assert post(server, "queue.stats", body, "application/json; charset=utf-8").status_code == 200
    packed = server.http.post("/v1/queue.stats", content=body, headers={"content-type": JSON, "content-encoding": "gzip"})
    problem(packed, 415, "unsupported_media_type")


def test_paths_and_methods(server: Running) -> None:
    for path in ("/", "/v1/queue.explode", "/v1/queue.lease/", "/V1/queue.lease", "/v1/%ff", "/livez/x"):
        problem(server.http.post(path, json={}), 404, "not_found")
    answer = server.http.get("/v1/queue.lease")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = server.http.post("/livez", json={})
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD"


def test_a_body_that_says_it_is_too_large_is_refused_unread(server: Running) -> None:
    head = f"POST /v1/queue.produce HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {MAX_BODY_BYTES + 1}\r\n\r\n"
    with server.raw(head.encode()) as connection:
        answer = b""
        while part := connection.recv(65_536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "body_too_large"


def test_a_body_that_turns_out_too_large_is_refused(server: Running) -> None:
    head = b"POST /v1/queue.produce HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    with server.raw(head) as connection:
        for _ in range(MAX_BODY_BYTES >> 20):
            connection.sendall(chunk)
        connection.sendall(b"1\r\nx\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_exactly_the_limit_is_read(server: Running) -> None:
    problem(post(server, "queue.produce", b" " * MAX_BODY_BYTES), 400, "invalid_body")
    problem(post(server, "queue.lease", b" " * MAX_CALL_BYTES), 400, "invalid_body")


def test_a_call_without_items_takes_a_smaller_body(server: Running) -> None:
    """Four million ids of one letter took half a gigabyte."""
    problem(post(server, "queue.complete", b" " * (MAX_CALL_BYTES + 1)), 413, "body_too_large")


def test_bodies_share_a_memory() -> None:
    memory = BodyMemory(10)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"123456"}

    async def life() -> None:
        first, second = (Request({"headers": [], "query_string": b""}, receive, memory) for _ in range(2))
        await first.read_body()
        with pytest.raises(SluicewayError) as caught:
            await second.read_body()
        assert caught.value.code == "too_many_requests"
        second.let_go()
        assert memory.left == 4
        first.let_go()
        assert memory.left == 10
        await second.read_body()
        assert second.body == b"123456"

    asyncio.run(life())


def test_one_key_has_no_more_than_its_share_of_the_memory_for_bodies() -> None:
    memory = BodyMemory(100)
    memory.take(25, "one")
    with pytest.raises(SluicewayError, match="this API key") as caught:
        memory.take(1, "one")
    assert caught.value.code == "too_many_requests"
    memory.take(25, "two")
    memory.take(50)
    memory.give_back(25, "one")
    memory.take(25, "one")
    assert memory.left == 0


def test_a_body_s_memory_is_free_after_every_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = server._server.config.app
    post(server, "queue.stats", b'{"queue_name": "none"}')
    post(server, "queue.stats", b"no JSON")
    post(server, "queue.produce", b"x", "text/plain")
    server.http.post("/v1/queues.list", json={})
    # A refusal is sent before its body is let go.
    eventually(lambda: app._bodies.left == MAX_BODIES_BYTES)
    monkeypatch.setattr(app._bodies, "left", 1)
    problem(post(server, "queues.list", b"{}"), 429, "too_many_requests")


def test_a_body_that_does_not_arrive_is_refused_in_time() -> None:
    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    request = Request({"headers": [], "query_string": b""}, receive, BodyMemory())
    with pytest.raises(SluicewayError, match="did not arrive within 10ms") as caught:
        asyncio.run(request.read_body(body_timeout=10))
    assert caught.value.code == "invalid_body"


def test_request_ids(server: Running) -> None:
    named = server.http.post("/v1/queue.stats", json={}, headers={"x-request-id": "mine-1.2:3"})
    assert problem(named, 400, "invalid_request", "queue_name")["request_id"] == "mine-1.2:3"
    for silly in ("x" * 65, "a b", "'", "é"):
        answer = server.http.post("/v1/queue.stats", json={}, headers=[(b"x-request-id", silly.encode())])
        made = problem(answer, 400, "invalid_request", "queue_name")["request_id"]
        assert made not in (silly, "mine-1.2:3")
    first, second = (server.http.get("/livez").headers["x-request-id"] for _ in range(2))
    assert first != second


def test_an_unexpected_error_is_logged_and_not_shown(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: str) -> None:
        raise ZeroDivisionError("the secret reason")

    name = server.queue()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "sluiceway.server"):
        patch.setattr(server.service, "count", broken)
        answer = server.post("queue.stats", queue_name=name)
    found = problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert vars(caplog.records[-1])["request_id"] == found["request_id"]
    assert "the secret reason" in caplog.text


def test_health(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.http.get("/livez").status_code == 200
    assert server.http.head("/livez").status_code == 200
    assert server.http.get("/readyz").json() == {"ready": True, "problems": []}
    monkeypatch.setattr(server.service, "problems", lambda: ["partition 3 is damaged"])
    answer = server.http.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "problems": ["partition 3 is damaged"]})
    assert server.http.get("/livez").status_code == 200
