"""Form of the messages between instances, by level: `peer_levels.json`; `python -m tests.wire.peer_form` notes the newest."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sluiceway.kernel.compatibility import NEWEST
from sluiceway.wire import peer

NOTED = Path(__file__).with_name("peer_levels.json")
Form = dict[str, dict[str, str]]
"""The fields of each type in their order, with their types and defaults."""


def noted() -> dict[int, Form]:
    return {int(level): form for level, form in json.loads(NOTED.read_text()).items()}


def present() -> Form:
    """The form that the code has now."""
    form: Form = {"columns": {field.name: f"{field.type} = " for field in peer.COLUMNS}, "answers": {}}
    for name, kind in peer.KINDS_OF_REQUESTS.items():
        _see(kind.request, form)
        _see(kind.answer, form)
        form["answers"][name] = f"{getattr(kind.answer, '__name__', 'None')} = "
    return dict(sorted(form.items()))


def _see(hint: Any, form: Form) -> None:
    if get_origin(hint) is Literal:
        form[str(hint)] = {}
    for inner in get_args(hint):
        _see(inner, form)
    if not isinstance(hint, type) or hint.__name__ in form:
        return
    defaults = _defaults(hint)
    if defaults is None:
        return
    written = {name: getattr(each, "__forward_arg__", each) for name, each in hint.__annotations__.items()}
    form[hint.__name__] = {name: f"{_described(str(each))}{defaults.get(name, '')}" for name, each in written.items()}
    for each in get_type_hints(hint).values():
        _see(each, form)


def _described(annotation: str) -> str:
    """Without descriptions, which are no part of a message."""
    return re.sub(r"\babout\((?:[^()]|\([^()]*\))*\)", "about", annotation)


def _defaults(kind: type) -> Mapping[str, str] | None:
    """The fields of the type that have defaults; None: it is no record."""
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {each.name: " = " for each in dataclasses.fields(kind) if (each.default, each.default_factory) != (missing, missing)}
    if issubclass(kind, msgspec.Struct):
        return {each.name: " = " for each in msgspec.structs.fields(kind) if not each.required}
    if issubclass(kind, tuple):
        return dict.fromkeys(getattr(kind, "_field_defaults", {}), " = ")
    return None


if __name__ == "__main__":
    levels = {**(noted() if NOTED.exists() else {}), NEWEST: present()}
    NOTED.write_text(json.dumps(levels, indent=1) + "\n")
