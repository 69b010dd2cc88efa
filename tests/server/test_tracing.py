"""Traces: a span for each call, the producer's place kept on the item, and the consumer's span linked to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from sluiceway.client import Client, Item
from sluiceway.client.tracing import processing, trace_headers
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.items import batch_from_rows, digest, with_traceparent
from sluiceway.server.app import Fittings
from sluiceway.server.tracing import Tracer
from tests.server.server_process import ServerProcess
from tests.server.server_running import ARROW, Running, eventually, running

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{TRACE}-{'1' * 16}-01"
NOT_SAMPLED = f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def traced(spans: InMemorySpanExporter) -> Tracer:
    return Tracer("http://127.0.0.1:4318", SimpleSpanProcessor(spans))


@pytest.fixture
def server(tmp_path: Path, spans: InMemorySpanExporter) -> Iterator[Running]:
    with running(tmp_path, lambda _: Fittings(meters=[traced(spans)])) as server:
        yield server


def produce(server: Running, queue_name: str, *items: object, traceparent: str | None = None, **fields: object) -> Any:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"queue_name": queue_name, "items": items, **fields}
    answer = server.http.post("/v1/queue.produce", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def calls(spans: InMemorySpanExporter, name: str, count: int = 1) -> list[ReadableSpan]:
    """The spans of that call: made after the answer."""

    def found() -> list[ReadableSpan]:
        return [span for span in spans.get_finished_spans() if span.name == f"POST /v1/{name}"]

    eventually(lambda: len(found()) == count)
    return found()


# Spans


def test_a_call_is_a_span_in_the_senders_trace(server: Running, spans: InMemorySpanExporter) -> None:
    name = server.queue()
    produce(server, name, {"utf8": "a"}, traceparent=TRACEPARENT)
    (span,) = calls(spans, "queue.produce")
    assert span.kind is SpanKind.SERVER
    assert span.parent is not None
    assert (format(span.parent.trace_id, "032x"), format(span.parent.span_id, "016x"), span.parent.is_remote) == (TRACE, SPAN, True)
    assert span.context is not None
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.attributes is not None
    attributes = dict(span.attributes)
    assert attributes.pop("http.request.body.size")
    assert attributes.pop("http.response.body.size")
    assert attributes.pop("sluiceway.request_id")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/queue.produce",
        "url.path": "/v1/queue.produce",
        "http.response.status_code": 200,
        "messaging.system": "sluiceway",
        "messaging.operation.type": "send",
        "messaging.operation.name": "produce",
        "messaging.destination.name": name,
    }
    assert span.resource.attributes["service.name"] == "sluiceway"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time > span.start_time


def test_without_a_place_a_call_begins_a_trace(server: Running, spans: InMemorySpanExporter) -> None:
    server.queue()
    (span,) = calls(spans, "queues.create")
    assert span.parent is None
    assert span.attributes is not None
    assert "messaging.system" not in span.attributes


def test_what_the_sender_does_not_sample_is_no_span(server: Running, spans: InMemorySpanExporter) -> None:
    name = server.queue()
    produce(server, name, {"utf8": "a"}, traceparent=NOT_SAMPLED)
    produce(server, name, {"utf8": "a"}, traceparent=TRACEPARENT)
    assert len(calls(spans, "queue.produce")) == 1


def test_only_what_the_server_did_wrong_is_an_error(server: Running, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.post("queue.stats", queue_name="none").status_code == 404
    monkeypatch.setattr(server.service, "queues", lambda: 1 / 0)
    assert server.post("queues.list").status_code == 500
    (theirs,) = calls(spans, "queue.stats")
    (ours,) = calls(spans, "queues.list")
    assert (theirs.status.status_code, ours.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert ours.attributes is not None
    assert ours.attributes["error.type"] == "500"


def test_health_and_unknown_paths_are_no_spans(server: Running, spans: InMemorySpanExporter) -> None:
    server.http.get("/readyz")
    server.http.post("/v1/made-up")
    server.queue()
    assert len(calls(spans, "queues.create")) == len(spans.get_finished_spans()) == 1


# Items


def test_an_item_keeps_its_producers_place(server: Running) -> None:
    name = server.queue()
    produce(server, name, {"utf8": "a"}, {"utf8": "b", "headers": {"x": "y"}}, {"utf8": "c", "headers": {"traceparent": OTHER}})
    produce(server, name, {"utf8": "d"}, {"utf8": "e"}, traceparent=TRACEPARENT)
    own = [{"utf8": "f", "headers": {"x": "y"}}, {"utf8": "g", "headers": {"traceparent": OTHER}}, {"utf8": "h", "kind": "k"}]
    produce(server, name, *own, traceparent=TRACEPARENT)
    kept = {"traceparent": TRACEPARENT}
    expected = [None, {"x": "y"}, {"traceparent": OTHER}, kept, kept, kept | {"x": "y"}, {"traceparent": OTHER}, kept]
    assert [item["headers"] for item in server.lease(name)["items"]] == expected


@pytest.mark.parametrize(
    "bad",
    ["", "x", TRACEPARENT.upper(), f"{TRACEPARENT}-x", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", "ff" + TRACEPARENT[2:]],
)
def test_what_is_no_place_is_passed_over(server: Running, bad: str) -> None:
    name = server.queue()
    produce(server, name, {"utf8": "a"}, traceparent=bad)
    assert server.lease(name)["items"][0]["headers"] is None


def test_a_bulk_load_is_not_made_larger(server: Running) -> None:
    name = server.queue()
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"payload": pa.array([b"a"])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    headers = {"content-type": ARROW, "traceparent": TRACEPARENT}
    answer = server.http.post(f"/v1/queue.produce?queue_name={name}", content=sink.getvalue().to_pybytes(), headers=headers)
    assert answer.status_code == 200, answer.text
    assert server.lease(name)["items"][0]["headers"] is None


def test_a_repeated_call_is_another_span_and_the_same_items(server: Running) -> None:
    name = server.queue()
    items = [{"utf8": "a"}, {"utf8": "b", "headers": {"x": "y"}}]
    first = produce(server, name, *items, traceparent=TRACEPARENT, idempotency_key="k")
    for other in (OTHER, None):
        assert produce(server, name, *items, traceparent=other, idempotency_key="k") == {**first, "deduplicated": True}
    changed = {"queue_name": name, "items": [items[0], {"utf8": "b", "headers": {"x": "z"}}], "idempotency_key": "k"}
    assert server.post("queue.produce", **changed).json()["code"] == "key_conflict"


HEADERS = st.none() | st.lists(st.tuples(st.sampled_from(["a", "b", "traceparent"]), st.text(max_size=3)), min_size=1, max_size=3)


@given(st.lists(HEADERS, min_size=1, max_size=4), st.booleans())
def test_the_rows_are_the_same_but_for_the_header(headers: list[list[tuple[str, str]] | None], scheduled: bool) -> None:
    unique = [None if pairs is None else list(dict(pairs).items()) for pairs in headers]
    rows = [{"payload": b"p", "kind": "k", "headers": pairs} | ({"enqueue_at": 5} if scheduled else {}) for pairs in unique]
    batch = batch_from_rows(rows)
    found = with_traceparent(batch, TRACEPARENT)
    found.validate(full=True)
    assert found.drop_columns(["headers"]).equals(batch.drop_columns(["headers"]))
    assert [dict(pairs) for pairs in found.column("headers").to_pylist()] == [{"traceparent": TRACEPARENT} | dict(p or ()) for p in unique]
    assert digest(found) == digest(batch) == digest(with_traceparent(batch, OTHER))


def test_rows_without_headers_get_a_column_in_its_place() -> None:
    for rows in (
        [{"payload": b"p"}],
        [{"payload": b"p", "reference": "r", "key": "k", "unique_key": "u", "enqueue_at": 5}],
        [{"payload": b"p", "priority": 7}],
        [{"payload": b"p", "kind": "k"}] * 3,
    ):
        batch = batch_from_rows(rows)
        found = with_traceparent(batch, TRACEPARENT)
        found.validate(full=True)
        assert found.drop_columns(["headers"]).equals(batch)
        assert found.schema == batch_from_rows([{**row, "headers": []} for row in rows]).schema
        assert digest(found) == digest(batch)


# The client


def test_a_consumers_span_is_linked_to_the_producers(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    name = server.queue()
    with Client(server.url) as client:
        with provider.get_tracer("test").start_as_current_span("order") as order:
            client.produce(name, [Item("a", headers=trace_headers()), Item("b", headers=trace_headers({"x": "y"}))])
        client.produce(name, ["c"])
        leased = client.lease(name, batch_size=3)
        assert [item.headers and "traceparent" in item.headers for item in leased] == [True, True, None]
        with pytest.raises(ZeroDivisionError), processing(leased, name):
            raise ZeroDivisionError
    span = spans.get_finished_spans()[-1]
    assert (span.name, span.kind, span.status.status_code) == (f"process {name}", SpanKind.CONSUMER, StatusCode.ERROR)
    assert [link.context.span_id for link in span.links] == [order.get_span_context().span_id]
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 3


def test_outside_a_span_nothing_is_added() -> None:
    assert trace_headers({"x": "y"}) == {"x": "y"}
    assert trace_headers({"traceparent": OTHER}) == {"traceparent": OTHER}


# Where they go


class Collector(HTTPServer):
    """Takes what is sent to it, and says no more than that it has."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_server_sends_its_spans_to_the_collector(tmp_path: Path) -> None:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        # The second is the SDK's own: milliseconds after which what there is goes out.
        variables = {"SLUICEWAY_TRACE__ENDPOINT": f"http://127.0.0.1:{collector.server_port}", "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with mock.patch.dict(os.environ, variables), ServerProcess(tmp_path / "data") as server:
            with Client(server.url) as client:
                client.create_queue("orders")
            eventually(lambda: collector.taken)
            assert server.interrupt() == 0
        collector.shutdown()
        thread.join()
    assert {path for path, _ in collector.taken} == {"/v1/traces"}
    assert any(b"POST /v1/queues.create" in body and b"orders" in body for _, body in collector.taken)


def test_a_collector_that_does_not_answer_holds_up_nobody(tmp_path: Path) -> None:
    held = threading.Event()

    class Stuck(SimpleSpanProcessor):
        def shutdown(self) -> None:
            held.wait()

    asyncio.run(Tracer("http://127.0.0.1:4318", Stuck(InMemorySpanExporter())).stop())
    held.set()


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://collector", "x"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(SluicewayError, match="expected the URL") as caught:
        Tracer(endpoint)
    assert caught.value.field == "trace.endpoint"


def test_what_a_server_seldom_needs_is_not_loaded() -> None:
    """Traces, which are off; rich, which structlog would load; the runtime of protobuf: a third of what a start computes."""
    program = "import sys, sluiceway.client, sluiceway.server.run; print(*(name.partition('.')[0] for name in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"opentelemetry", "rich", "google"} & set(loaded)


def test_traces_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluiceway.server import wiring

    monkeypatch.setitem(sys.modules, "sluiceway.server.tracing", None)
    with pytest.raises(SluicewayError, match=r"pip install 'sluiceway\[otel\]'"):
        wiring._tracer("http://127.0.0.1:4318")
    assert Service(tmp_path).backends() == []
