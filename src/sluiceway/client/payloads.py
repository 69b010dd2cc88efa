"""Payloads as a program has them: bytes and text as they are, anything else as JSON."""

from __future__ import annotations

from typing import Final

import msgspec

from sluiceway.kernel.errors import invalid

JSON: Final = "application/json"
"""The `encoding` of a payload that was encoded here, unless another was given."""


def encoded(payload: object, encoding: str | None, field: str = "payload") -> tuple[bytes | str, str | None]:
    """The payload's bytes or text, and its encoding. Raises `invalid_request` for what JSON cannot hold, and for None.

    JSON holds what msgspec encodes (dicts, lists, numbers, dataclasses, attrs classes, msgspec structs, times, UUIDs), and Pydantic models.
    """
    if isinstance(payload, bytes | str):
        return payload, encoding
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload), encoding
    if payload is None:
        raise invalid(field, "expected bytes, text, or a value that JSON can hold, not None")
    try:
        return msgspec.json.encode(payload, enc_hook=_model), encoding or JSON
    except (TypeError, NotImplementedError, msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise invalid(field, f"expected bytes, text, or a value that JSON can hold: {error}") from None


def _model(value: object) -> object:
    dump = getattr(value, "model_dump_json", None)
    if dump is None:
        raise NotImplementedError(f"{type(value).__name__} is not such a value")
    return msgspec.Raw(dump().encode())
