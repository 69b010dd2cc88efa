"""Metadata of configuration keys, beside their types and defaults."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

Form = Literal["plain", "duration", "path", "secret", "credential"]
"""Notation of a value. `duration`: `30s`, held as milliseconds. `path`: relative to the file that has it. `secret`: a reference,
`env:NAME` or `file:PATH`, never the value itself. `credential`: such a reference, or the value itself. Both are never shown."""

MASK = "***"


def key(meaning: str, form: Form = "plain", *, restart: bool = False) -> msgspec.Meta:
    """Describe a key. `restart`: a change takes effect only at a restart of the server; all other keys change live."""
    return msgspec.Meta(description=meaning, extra={"form": form, "restart": restart})


class Key(NamedTuple):
    """One key of a configuration table."""

    name: str
    form: Form
    restart: bool
    default: Any
    """None also for a required key."""
    type: Any
    required: bool = False
    meaning: str = ""

    @property
    def hidden(self) -> bool:
        return self.form in ("secret", "credential")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configuration table. Its `repr` shows no secret."""

    def shown(self) -> dict[str, Any]:
        """Return the values by name, in the order of the keys, with secrets masked."""
        values = {each.name: (each, getattr(self, each.name)) for each in keys(type(self))}
        return {name: MASK if each.hidden and value else value for name, (each, value) in values.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.shown().items())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return list(self.shown().items())


def keys(table: type[Settings]) -> list[Key]:
    """List the keys of a table, in order."""
    found = []
    for each in msgspec.structs.fields(table):
        about: dict[str, Any] = {}
        meaning = ""
        for meta in getattr(each.type, "__metadata__", ()):
            about |= meta.extra or {}
            meaning = meta.description or meaning
        default = None if each.default is msgspec.NODEFAULT else each.default
        found.append(Key(each.name, about.get("form", "plain"), about.get("restart", False), default, each.type, each.required, meaning))
    return found
