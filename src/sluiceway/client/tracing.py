"""Traces that go through a queue, with OpenTelemetry. Needs the extra `otel`; nothing else in the client imports it.

client.produce("orders", [Item("…", headers=trace_headers())])

for item in client.lease("orders"):
    with processing([item], "orders"):
        ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sluiceway.client.answers import LeasedItem

_FORMAT: Final = TraceContextTextMapPropagator()


def trace_headers(headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """An item's `headers` with the current span's context added. An existing `traceparent` is kept."""
    found: dict[str, str] = {}
    _FORMAT.inject(found)
    return found | dict(headers or {})


@contextmanager
def processing(items: Iterable[LeasedItem], queue_name: str) -> Iterator[trace.Span]:
    """A span for the handling of these items, linked to the span that produced each of them.

    Linked, not below: an item may wait for days, and is worked on again after a retry.
    """
    items = list(items)
    places = {}
    for item in items:
        place = trace.get_current_span(_FORMAT.extract(item.headers or {})).get_span_context()
        if place.is_valid:
            places[place.trace_id, place.span_id] = place
    attributes: dict[str, str | int] = {
        "messaging.system": "sluiceway",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": queue_name,
        "messaging.batch.message_count": len(items),
    }
    tracer = trace.get_tracer("sluiceway.client")
    links = [trace.Link(place) for place in places.values()]
    with tracer.start_as_current_span(f"process {queue_name}", kind=trace.SpanKind.CONSUMER, attributes=attributes, links=links) as span:
        yield span
