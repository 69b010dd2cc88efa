"""Addresses of listeners."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.errors import invalid

DEFAULT_LISTEN = "127.0.0.1:2319"


class Address(NamedTuple):
    """Host and port of a listener."""

    host: str
    port: int


def parse_address(text: str, field: str) -> Address:
    """Parse `HOST:PORT`, `[::1]:PORT`, or `:PORT` of the loopback address. Raises `invalid_request`."""
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise invalid(field, f"{text[:80]!r} is not HOST:PORT, such as {DEFAULT_LISTEN}")
    return Address(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))
