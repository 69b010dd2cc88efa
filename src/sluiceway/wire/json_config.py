"""The configuration and the backends in JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from sluiceway.contract.fields import TimeText
from sluiceway.wire.decoding import JsonDecoder
from sluiceway.wire.shapes import Shape


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """A call that needs none."""


class ReloadFailure(Shape):
    """Why the file as it was then was not applied."""

    at: TimeText
    detail: str


class ConfigValue(Shape):
    """`value` as a file would have it, a secret as `***`. `origin`: `default`, FILE:LINE, a variable or a flag. `restart`: whether a change
    needs one."""

    value: Any
    origin: str
    restart: bool


class ConfigTables(Shape):
    """By table and key, as in a file."""

    server: dict[str, ConfigValue]
    cluster: dict[str, ConfigValue]
    log: dict[str, ConfigValue]
    limits: dict[str, ConfigValue]
    trace: dict[str, ConfigValue]
    backends: dict[str, dict[str, ConfigValue]]


class ConfigAnswer(Shape):
    """The configuration that is in force. `last_error` is null once a reload has gone well."""

    file: str | None
    applied_at: TimeText
    last_error: ReloadFailure | None
    configuration: ConfigTables


decode_no_fields = JsonDecoder(NoFields)
encode = msgspec.json.encode
