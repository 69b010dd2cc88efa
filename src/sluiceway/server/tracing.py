"""Request spans for OpenTelemetry. Imported only if traces are configured, since it needs the extra `otel`."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.util.types import AttributeValue

from sluiceway import __version__
from sluiceway.adapters.system import now
from sluiceway.kernel.errors import invalid
from sluiceway.server.http import Request

_OPERATIONS: Final = {
    "/v1/queue.produce": "send",
    "/v1/queue.lease": "receive",
    "/v1/queue.complete": "settle",
    "/v1/queue.retry": "settle",
    "/v1/queue.release": "settle",
    "/v1/queue.extend": "settle",
    "/v1/queue.settle": "settle",
}
"""Operation types of these endpoints in the semantic conventions for messaging."""
_STREAM: Final = "/v1/events"
_SEND_TIMEOUT: Final = 2
"""Seconds in which a batch of spans must be accepted; then it is dropped."""
_LAST_WORDS: Final = 1.0
"""Seconds to send the last spans when the server stops."""


class Tracer:
    """Meter that makes a span of each answered call, as a child of the span in the call's `traceparent`, if any.

    Spans go in the background to `endpoint`, the URL of a collector for OTLP over HTTP, without its path `/v1/traces`. Spans not accepted
    in time are dropped, and no request waits for them. The environment variables of OpenTelemetry's SDK (sampling, resource) apply. Raises
    `invalid_request`.
    """

    def __init__(self, endpoint: str, processor: SpanProcessor | None = None) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise invalid("trace.endpoint", "expected the URL of an OTLP collector, such as http://127.0.0.1:4318")
        resource = Resource.create({"service.name": "sluiceway", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=_SEND_TIMEOUT)
        self._provider.add_span_processor(processor or BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sluiceway.server", __version__)

    async def stop(self) -> None:
        """Send the remaining spans, for at most a second."""
        # The exporter may wait longer than the caller of `stop` does, so it is left in a daemon thread, which delays no exit.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _LAST_WORDS)

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        if not path.startswith("/v1/") or path == _STREAM:
            return
        end = now() * 1_000_000
        parent = set_span_in_context(NonRecordingSpan(_place(request.traceparent))) if request.traceparent else None
        span = self._tracer.start_span(
            f"POST {path}",
            parent,
            SpanKind.SERVER,
            _attributes(request, path, status, received, sent),
            start_time=end - round(seconds * 1e9),
        )
        if status >= 500 or not status:
            span.set_attribute("error.type", str(status) if status else "client_gone")
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end)


def _attributes(request: Request, path: str, status: int, received: int, sent: int) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "http.request.method": "POST",
        "http.route": path,
        "url.path": path,
        "http.request.body.size": received,
        "http.response.body.size": sent,
        "sluiceway.request_id": request.request_id.decode(),
    }
    if status:
        found["http.response.status_code"] = status
    operation = _OPERATIONS.get(path)
    if operation is not None:
        found |= {
            "messaging.system": "sluiceway",
            "messaging.operation.type": operation,
            "messaging.operation.name": path.rpartition(".")[2],
        }
    if request.queue_name:
        found["messaging.destination.name"] = request.queue_name
    return found


def _place(traceparent: str) -> SpanContext:
    _, trace, span, flags = traceparent.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
