"""Decoding of untrusted JSON and query parameters into typed structs. Errors name the invalid field."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Annotated, Final, Generic, TypeVar, cast

import msgspec
from msgspec import Meta

from sluiceway.contract.fields import QueueName
from sluiceway.kernel.clock import Millis, check_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_REQUEST_TIMEOUT
from sluiceway.kernel.names import check_queue_name, check_text
from sluiceway.kernel.plain_errors import plain_error
from sluiceway.model.queue import QueueRecord

T = TypeVar("T")
LAST: Final = (1 << 63) - 1
Natural = Annotated[int, Meta(ge=0, le=LAST)]
PartitionNumber = Annotated[int, Meta(ge=0, lt=1_000_000_000)]

_PATH = re.compile(r" - at .*?`\$\.?([^`]*)`$", re.DOTALL)
_MEMBER = re.compile(r"Object (?:contains|missing required) (?:unknown )?field `(.*)`$", re.DOTALL)
_SHOWN: Final = 80
_LONGEST: Final = 1_000


class Call(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A request on one queue."""

    queue_name: QueueName


class JsonDecoder(Generic[T]):
    """A decoder of one type of request.

    Calling it with a body returns the struct. It raises `invalid_body` for a body that is not a JSON object, and `invalid_request`, with
    the field's name, for an invalid, unknown or missing field.
    """

    def __init__(self, kind: type[T]) -> None:
        self._decode = msgspec.json.Decoder(kind).decode

    def __call__(self, body: bytes) -> T:
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise _refusal(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            what = f"the body is not JSON: {error}" if body else "the body is empty; send a JSON object"
            raise SluicewayError("invalid_body", what) from None


def from_query(parameters: Mapping[str, str], kind: type[T]) -> T:
    """Decode the parameters of a query string into a struct of type `kind`. Numbers must be decimal digits.

    Raises `invalid_request` for an invalid, unknown or missing parameter.
    """
    for name in _numbers(cast(Hashable, kind)).intersection(parameters):
        text = parameters[name]
        # msgspec's lax conversion would also accept `null`, `1e1` and `5.0`.
        if not (text.isascii() and text.isdigit()):
            raise invalid(name, f"{text[:_SHOWN]!r} is not a number in decimal digits")
    try:
        return msgspec.convert(dict(parameters), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


@cache
def _numbers(kind: object) -> frozenset[str]:
    """The names of a struct's integer fields, nullable ones included."""
    about = msgspec.inspect.type_info(kind)
    assert isinstance(about, msgspec.inspect.StructType)
    return frozenset(
        field.encode_name
        for field in about.fields
        if any(isinstance(each, msgspec.inspect.IntType) for each in (field.type, *getattr(field.type, "types", ())))
    )


def _refusal(message: str) -> SluicewayError:
    if len(message) > _LONGEST:
        # The message quotes the request, so it can be long, and the searches below take quadratic time. They need only its two ends.
        message = message[: _LONGEST // 2] + message[-_LONGEST // 2 :]
    found = _PATH.search(message)
    path = found[1] if found else ""
    what = message[: found.start()] if found else message
    member = _MEMBER.match(what)
    if member is None:
        if not path:
            return SluicewayError("invalid_body", f"the body is not a JSON object with this call's fields: {plain_error(what)}")
        return invalid(path[:_SHOWN], plain_error(what))
    field = f"{path}.{member[1][:_SHOWN]}" if path else member[1][:_SHOWN]
    return invalid(field, "unknown field" if "unknown" in what[: member.start(1)] else "required")


def request_timeout(text: str) -> Millis:
    """Parse `request_timeout` into milliseconds, 0 to `MAX_REQUEST_TIMEOUT`. Raises `invalid_request`."""
    return check_duration(text, "request_timeout", 0, MAX_REQUEST_TIMEOUT)


def lease_timeout(text: str | None, record: QueueRecord) -> Millis | None:
    """Parse `lease_timeout` into milliseconds, 1 to the queue's `max_lease_timeout`. None stays None. Raises `invalid_request`."""
    return None if text is None else check_duration(text, "lease_timeout", 1, record.max_lease_timeout)


def given_text(text: str | None, field: str) -> str | None:
    """Check an optional short text and return it. Raises `invalid_request` for an empty text or one that `check_text` refuses."""
    if text is None:
        return None
    if not text:
        raise invalid(field, "must not be empty")
    return check_text(text, field)


def given_queue(name: str | None, field: str) -> str | None:
    """Check an optional queue name and return it. Raises `invalid_request`."""
    return None if name is None else check_queue_name(name, field)
