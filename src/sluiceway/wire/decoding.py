"""Untrusted JSON (or query parameters) into typed structs, with errors that name the field at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

import msgspec

from sluiceway.kernel.clock import Millis, parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_LEASE_TIMEOUT, MAX_REQUEST_TIMEOUT
from sluiceway.kernel.names import check_text

T = TypeVar("T")

_PATH = re.compile(r" - at .*?`\$\.?([^`]*)`$", re.DOTALL)
_MEMBER = re.compile(r"Object (?:contains|missing required) (?:unknown )?field `(.*)`$", re.DOTALL)
_SHOWN: Final = 80
_LONGEST: Final = 1_000


class JsonDecoder(Generic[T]):
    """Decodes one kind of request. Raises `invalid_body` for what is no JSON object, `invalid_request` for a field that is wrong."""

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
    """The parameters of a query string as that struct; a number is written in decimal digits."""
    try:
        return msgspec.convert(dict(parameters), kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None


def _refusal(message: str) -> SluicewayError:
    if len(message) > _LONGEST:
        # It quotes what was sent, however long, and the search takes quadratic time. What is looked for stands at its ends.
        message = message[: _LONGEST // 2] + message[-_LONGEST // 2 :]
    found = _PATH.search(message)
    path = found[1] if found else ""
    what = message[: found.start()] if found else message
    member = _MEMBER.match(what)
    if member is None:
        if not path:
            return SluicewayError("invalid_body", f"the body is not a JSON object of this call's fields: {what}")
        return invalid(path[:_SHOWN], what)
    field = f"{path}.{member[1][:_SHOWN]}" if path else member[1][:_SHOWN]
    return invalid(field, "unknown field" if "unknown" in what[: member.start(1)] else "required")


def request_timeout(text: str) -> Millis:
    """`request_timeout` in milliseconds, 0 to `MAX_REQUEST_TIMEOUT`."""
    return _duration(text, "request_timeout", 0, MAX_REQUEST_TIMEOUT)


def lease_timeout(text: str) -> Millis:
    """`lease_timeout` in milliseconds, 1 to `MAX_LEASE_TIMEOUT`."""
    return _duration(text, "lease_timeout", 1, MAX_LEASE_TIMEOUT)


def retry_after(text: str, field: str, most: Millis) -> Millis:
    """A delay in milliseconds, 0 to `most`."""
    return _duration(text, field, 0, most)


def _duration(text: str, field: str, least: Millis, most: Millis) -> Millis:
    millis = parse_duration(text, field)
    if millis < least:
        raise invalid(field, f"must be at least {least}ms")
    if millis > most:
        raise invalid(field, f"{text!r} is longer than the limit of {most // 1000}s")
    return millis


def given_text(text: str | None, field: str) -> str | None:
    """A short text that may be absent but not empty."""
    if text is None:
        return None
    if not text:
        raise invalid(field, "must not be empty")
    return check_text(text, field)
