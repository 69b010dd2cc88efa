"""JSON shapes of the effective configuration."""

from __future__ import annotations

from typing import Any

import msgspec

from sluiceway.contract.fields import TimeText
from sluiceway.wire.decoding import JsonDecoder
from sluiceway.wire.shapes import Shape


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """A call without fields."""


class ReloadFailure(Shape):
    """A configuration file that was not applied: when, and why."""

    at: TimeText
    detail: str


class ConfigValue(Shape):
    """A setting. `value`: as in a file, with secrets as `***`. `origin`: `default`, FILE:LINE, a variable or a flag. `restart`: true if a
    change takes effect only after a restart."""

    value: Any
    origin: str
    restart: bool


class ConfigTables(Shape):
    """The settings by table and key, as in a file."""

    server: dict[str, ConfigValue]
    cluster: dict[str, ConfigValue]
    log: dict[str, ConfigValue]
    limits: dict[str, ConfigValue]
    trace: dict[str, ConfigValue]
    backends: dict[str, dict[str, ConfigValue]]


class ConfigAnswer(Shape):
    """The effective configuration. `last_error`: the last failed reload; null after a successful one."""

    file: str | None
    applied_at: TimeText
    last_error: ReloadFailure | None
    configuration: ConfigTables


decode_no_fields = JsonDecoder(NoFields)
encode = msgspec.json.encode
