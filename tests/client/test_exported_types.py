"""What the client's methods take and return can be imported from `sluiceway.client`, and what is deprecated says so."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator

import httpx
import pytest

import sluiceway.client
from sluiceway.client import AsyncClient, Client, Settings, arrow
from sluiceway.client._sync.consumer import Consumer
from sluiceway.client._sync.producer import Producer

# They name modules that only some programs import.
_NAMES = {"Consumer": Consumer, "Producer": Producer, "BrowsedTable": arrow.BrowsedTable, "LeasedTable": arrow.LeasedTable}
_ELSEWHERE = {"sluiceway.client.arrow"}
"""Public modules of their own."""


def _classes(hint: object) -> Iterator[type]:
    """The classes that an annotation names."""
    if isinstance(hint, type):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes(part)


def _hints() -> Iterator[tuple[str, object]]:
    for name, member in inspect.getmembers(Client):
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            yield from ((f"Client.{name}: {each}", hint) for each, hint in typing.get_type_hints(function, localns=_NAMES).items())
    yield from ((f"Settings.{name}", hint) for name, hint in typing.get_type_hints(Settings).items())


def test_every_type_of_a_call_is_exported() -> None:
    named = {
        (each.__name__, where)
        for where, hint in _hints()
        for each in _classes(hint)
        if each.__module__.startswith("sluiceway.") and each.__module__ not in _ELSEWHERE
    }
    assert len(named) > 50
    assert [(name, where) for name, where in sorted(named) if name not in sluiceway.client.__all__] == []


@pytest.mark.parametrize("face", [Client, AsyncClient])
def test_a_transport_of_httpx_is_deprecated(face: type[Client | AsyncClient]) -> None:
    with pytest.warns(DeprecationWarning, match=r"sluiceway\.client\.transports") as warned:
        face(transport=httpx.MockTransport(lambda _: httpx.Response(200)))
    assert [warning.filename for warning in warned] == [__file__]
