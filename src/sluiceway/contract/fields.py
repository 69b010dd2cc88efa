"""The types of fields that many calls and answers share.

A `Meta` here is for the reader of the OpenAPI document. The decoders do the checks themselves: a refusal has to say more than that a
pattern did not match.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, get_args, get_type_hints, overload

import msgspec
from msgspec import Meta

from sluiceway.kernel.clock import Millis, format_time
from sluiceway.kernel.ids import INCARNATION_ALPHABET, INCARNATION_LENGTH
from sluiceway.kernel.limits import (
    MAX_ITEMS_ARROW,
    MAX_ITEMS_JSON,
    MAX_KEY_BYTES,
    MAX_PARTITIONS,
    MAX_PRIORITY,
    MAX_TEXT_BYTES,
    MAX_TRACE_BYTES,
)
from sluiceway.kernel.names import QUEUE_NAME, QUEUE_PATTERN


@overload
def time_field(at: Millis) -> datetime: ...
@overload
def time_field(at: Millis | None) -> datetime | None: ...
def time_field(at: Millis | None) -> datetime | None:
    """The value of a server for a field of type `Time`: the text itself, which is encoded as it stands.

    A `datetime` would be encoded without a fraction when it has none, and the texts would not sort as the times do.
    """
    return None if at is None else format_time(at)  # type: ignore[return-value]


def schema(title: str | None = None, **keywords: Any) -> Meta:
    """Describes a field by JSON Schema keywords. The decoder does not check them."""
    return Meta(title=title, extra_json_schema=keywords)


def about(text: str) -> Meta:
    """What a field means, for the OpenAPI document."""
    return Meta(description=text)


def texts(kind: type) -> dict[str, str]:
    """What the fields of an answer mean, for a call that has the same ones."""
    hints = get_type_hints(kind, include_extras=True)
    metas = {name: [meta for meta in getattr(hint, "__metadata__", ()) if meta.description] for name, hint in hints.items()}
    return {name: found[-1].description for name, found in metas.items() if found}


def one_of(values: Any) -> Meta:
    """The values of a `Literal`, for an answer: a client takes others, too, which a newer server may send."""
    return schema(enum=list(get_args(values)))


_NUMBER: Final = "(0|[1-9][0-9]{0,8})"
_LONG: Final = "(0|[1-9][0-9]{0,17})"

QueueName = Annotated[str, schema("queue name", pattern=f"^{QUEUE_NAME.pattern}$", examples=["orders"])]
Duration = Annotated[str, schema("duration", pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d))+$", maxLength=32, examples=["30s"])]
Time = Annotated[datetime, schema("time", format="date-time", examples=["2026-01-31T08:00:00Z"])]
"""A time in an answer: RFC 3339 in UTC on the wire, an aware `datetime` for a client."""
TimeText = Annotated[str, schema("time", format="date-time", examples=["2026-01-31T08:00:00Z"])]
"""A time in a call, before it is checked."""
ItemIdText = Annotated[str, schema("item id", pattern=rf"^[^.]*\.{_NUMBER}\.{_LONG}$", maxLength=64, examples=["k7f3q2ma.0.1042"])]
LeaseIdText = Annotated[
    str, schema("lease id", pattern=rf"^[^.]*\.{_NUMBER}\.L(0|[1-9][0-9]{{0,16}})$", maxLength=64, examples=["k7f3q2ma.0.L17"])
]
Incarnation = Annotated[str, schema(pattern=f"^[{INCARNATION_ALPHABET}]{{{INCARNATION_LENGTH}}}$", examples=["k7f3q2ma"])]
ShortText = Annotated[str, schema(maxLength=MAX_TEXT_BYTES)]
ItemKey = Annotated[str, schema(minLength=1, maxLength=MAX_KEY_BYTES)]
Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
TraceText = Annotated[str, schema(maxLength=MAX_TRACE_BYTES)]
Label = Annotated[str, schema(minLength=1, maxLength=MAX_TEXT_BYTES)]
"""A short text that must not be empty."""

LogicalQueueCount = Annotated[int, Meta(ge=1, le=MAX_PARTITIONS)]
Pattern = Annotated[str, schema("pattern of queue names", pattern=f"^{QUEUE_PATTERN.pattern}$", examples=["orders-*"])]
Pivot = Annotated[str, schema(pattern=f"^({QUEUE_NAME.pattern})?$")]
"""Where a page begins: after that name, or (empty) at the first."""

ONE_PAYLOAD: Final = schema(
    oneOf=[
        {"required": [name], "properties": {name: {"type": "string"}, other: {"type": "null"}}}
        for name, other in (("bytes", "utf8"), ("utf8", "bytes"))
    ]
)
SOME: Final = schema(minItems=1)
UP_TO_JSON: Final = schema(maxItems=MAX_ITEMS_JSON)
SOME_JSON: Final = schema(minItems=1, maxItems=MAX_ITEMS_JSON)
SOME_ARROW: Final = schema(minItems=1, maxItems=MAX_ITEMS_ARROW)


class Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer, or a part of one.

    The server sends every field, also one that is null. A client ignores fields that it does not know, and gives those that an older server
    does not send their default.
    """
