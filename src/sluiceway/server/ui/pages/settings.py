"""The server's configuration, backends and API keys."""

from __future__ import annotations

import asyncio
from typing import Final

from sluiceway.server.ui.api import Facts
from sluiceway.server.ui.pages.refusal import refusing
from sluiceway.server.ui.view import Command, Field, View
from sluiceway.server.ui.visit import Visit

_BACKENDS: Final = "backends"
_PAGE: Final = 100


@refusing
async def _gather(visit: Visit) -> Facts:
    found, backends = await asyncio.gather(visit.api.call("config.show"), visit.api.call("backends.list"))
    tables = dict(found["configuration"])
    named = tables.pop(_BACKENDS)
    sections = [{"name": name, "rows": _rows(values)} for name, values in tables.items()]
    sections += [{"name": f"{_BACKENDS}.{name}", "rows": _rows(values)} for name, values in named.items()]
    return {
        "file": found["file"],
        "applied_at": found["applied_at"],
        "last_error": found["last_error"],
        "sections": sections,
        "backends": backends["items"],
    }


def _rows(values: Facts) -> list[Facts]:
    return [{"key": key, **value, "shown": _shown(value["value"])} for key, value in values.items()]


def _shown(value: object) -> str:
    """A value as in the configuration file, without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


@refusing
async def _gather_keys(visit: Visit) -> Facts:
    page = await visit.api.call("keys.list", limit=_PAGE, pivot=visit.query.get("pivot") or None)
    return {"keys": page["items"], "next": page["next"], "begins_after": visit.query.get("pivot", "")}


VIEWS: Final = (
    View("/ui/settings", "Settings", "settings.html", _gather, "Settings"),
    View("/ui/settings/keys", "API keys", "settings_keys.html", _gather_keys, "Settings"),
)

COMMANDS: Final = (
    Command(
        "config.reload",
        "Reload the configuration",
        "Reload",
        "The server reads its configuration file again, and applies all changes or none.",
        "config.reload",
        "admin",
        "config reload",
        on="",
        tells=True,
    ),
    Command(
        "keys.create",
        "Create an API key",
        "Create key",
        "The scopes decide what the holder of the key may do, and on which queues.",
        "keys.create",
        "admin",
        "key create",
        (
            Field("name", "Name", hint="Owner or purpose. Appears in the audit trail.", required=True),
            Field(
                "scopes",
                "Scopes",
                "list",
                "--scope",
                hint="One per line: ACTION:PATTERN such as produce:orders-* (produce, consume, read, manage), or admin.",
                required=True,
            ),
            Field("expires_after", "Expires after", flag="--expires-after", hint="Such as 30d. Blank = never."),
            Field(
                "requests_per_second",
                "Requests per second",
                "number",
                "--requests-per-second",
                hint="Blank = server default, 0 = unlimited.",
            ),
            Field("bytes_per_second", "Bytes per second", "number", "--bytes-per-second", hint="Blank = server default, 0 = unlimited."),
        ),
        on="",
        note="Copy the key now. It is not shown again.",
        tells=True,
    ),
    Command(
        "keys.revoke",
        "Revoke an API key",
        "Revoke",
        "Every server refuses the key within a second, permanently.",
        "keys.revoke",
        "admin",
        "key revoke",
        (Field("key_id", "Key", "known", required=True),),
        on="key_id",
        destroys=True,
    ),
)
