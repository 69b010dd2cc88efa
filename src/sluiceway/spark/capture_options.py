"""Options of `format("sluiceway-capture")`, parsed and checked once, with errors that name the option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import parse_qs, urlsplit

from sluiceway.capture import CaptureConfig
from sluiceway.core.group.task_member import Preset
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW
from sluiceway.kernel.options import count, duration, get, required, unknown

KNOWN = ("name", "meta", "log", "stream", "preset", "maxRowsPerTrigger", "maxRowsPerPartition", "requestTimeout")
OF_STREAM = "stream."
"""Prefix of the stream's own options. Spark passes names in lower case."""

_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """`config.limit`: maximum rows of one partition per batch; `max_rows`: of all partitions; `request_timeout` (ms): retry limit of a
    task."""

    config: CaptureConfig
    max_rows: int
    request_timeout: Millis


def capture_options(options: Mapping[str, str]) -> CaptureOptions:
    """Parse the options. Raises `invalid_request` that names the option at fault."""
    _check_names(options)
    meta = required(options, "meta", "the meta store, such as sqlite:captures.sqlite")
    if has_password(meta):
        shown = "a password must not be in an option, because Spark shows options in plans and logs"
        raise invalid("meta", f"{shown}; name the place of the URL on the driver: env:NAME or file:PATH")
    config = CaptureConfig(
        name=required(options, "name", "the name of the capture"),
        meta=meta,
        stream=required(options, "stream", "the kind of the stream, such as kinesis"),
        options={key[len(OF_STREAM) :]: value for key, value in options.items() if key.lower().startswith(OF_STREAM)},
        log=get(options, "log") or "meta",
        preset=cast(Preset, get(options, "preset") or "log-leader"),
        limit=count(options, "maxRowsPerPartition", MAX_ITEMS_ARROW, MAX_ITEMS_ARROW),
    )
    if config.stream == "postgres" and get(config.options, "snapshot"):
        # Tasks read a batch again, in other processes, whatever has become of the member that planned it.
        raise invalid(f"{OF_STREAM}snapshot", "an initial copy cannot be repeated exactly, so only a resident capture can make one")
    request_timeout = duration(options, "requestTimeout", "2m", 1_000, 86_400_000)
    return CaptureOptions(config, count(options, "maxRowsPerTrigger", 100_000, _LARGEST), request_timeout)


def has_password(url: str) -> bool:
    """Whether the URL contains a password, in any of the places where a store's URL may have one."""
    parts = urlsplit(url)
    return bool(parts.password) or any("password" in key.lower() for key in parse_qs(parts.query, keep_blank_values=True))


def _check_names(options: Mapping[str, str]) -> None:
    """Reject unknown names that resemble one of ours; Spark's own options pass."""
    known = [name.lower() for name in KNOWN]
    for key in options:
        if key.lower() not in known and not key.lower().startswith(OF_STREAM) and (error := unknown(key, KNOWN, 0.75)):
            raise error
