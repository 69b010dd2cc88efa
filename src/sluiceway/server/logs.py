"""Logging: one stream for the server and its libraries, and the log of requests."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal, TextIO

from sluiceway.adapters.system import stopwatch
from sluiceway.kernel.light_imports import without
from sluiceway.server.http import Request
from sluiceway.wire import peer

with without("rich"):
    # It would be loaded for coloured tracebacks, which are not used: a tenth of what a server's start computes.
    import structlog

log = logging.getLogger("sluiceway.requests")

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]
_Event = MutableMapping[str, Any]

_SECRETS: Final = re.compile(
    r"""slw_[A-Za-z0-9]{1,64}_[A-Za-z0-9_\-]+      # an API key
    | slwc_[A-Za-z0-9]+                           # the cluster's secret
    | (?<=://)[^\s/@:]*:[^\s/@]*(?=@)             # the user and password of a URL
    | (?<=password=)(?:'[^']*'|[^\s&]+)           # of a connection string
    | (?<=bearer\ )[^\s'"]+""",
    re.VERBOSE | re.IGNORECASE,
)
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_HANDLER: Final = "sluiceway"

_SLOW: Final = 1.0
"""Seconds from which a request is logged as slow."""
_WAITS: Final = frozenset({"/v1/queue.lease", "/v1/events", "/ui/live", peer.PATH})
"""Requests that take long by design."""
_LINES: Final = 20
"""Maximum request lines per second at level info: when all requests fail, logging them must not add to the load."""


def configure(format: Format = "text", level: Level = "info", stream: TextIO | None = None) -> None:
    """Log to `stream` (default: standard error) in that format, from that level on; covers all loggers of the process.

    May be called again to change that. No logged text can imitate another line or hide what follows, and texts that look like an API key or
    a password are shown as ***.
    """
    stream = stream or sys.stderr
    # Named before it is added, so that a second call replaces only the first one's handler.
    handler = logging.StreamHandler(stream)
    handler.name = _HANDLER
    handler.setFormatter(_formatter(format, colors=stream.isatty()))
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.name == _HANDLER]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # At level info uvicorn reports each start and stop in its own words; its debug lines have raw addresses and paths.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, root.level))
    for chatty in ("httpx", "httpcore", "urllib3"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    # Errors of an unreachable Kafka are already in the answer to the caller, once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


def _formatter(format: Format, colors: bool) -> logging.Formatter:
    last: list[structlog.types.Processor] = [structlog.processors.JSONRenderer()]
    if format == "text":
        last = [_set_in, structlog.dev.ConsoleRenderer(colors=colors)]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_logger_name,
            structlog.stdlib.add_log_level,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            # The library's other exception formats show values of variables: payloads, and keys.
            structlog.processors.format_exc_info,
            _clean,
            *last,
        ],
    )


def _clean(_: Any, __: str, event: _Event) -> Mapping[str, Any]:
    for said_already in ("color_message", "message", "asctime"):
        event.pop(said_already, None)
    for name, value in event.items():
        if isinstance(value, int | float | bool | None):
            continue
        text = _SECRETS.sub("***", value if isinstance(value, str) else str(value))
        # An exception has several lines.
        event[name] = "\n".join(map(_escaped, text.split("\n"))) if name == "exception" else _escaped(text)
    return event


def _set_in(_: Any, __: str, event: _Event) -> Mapping[str, Any]:
    """Indent exceptions, so that none of their lines can pass for the beginning of an entry."""
    if "exception" in event:
        event["exception"] = "  | " + event["exception"].replace("\n", "\n  | ")
    return event


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class RequestLog:
    """Meter that logs requests: at level info those that failed on the server's side or were slow, at debug all of them.

    A line has the endpoint, status, milliseconds, bytes, caller, queue and request id; never a payload or a header. Lines beyond _LINES a
    second are counted, not written.
    """

    def __init__(self) -> None:
        self._second = 0
        self._written = 0
        self._omitted = 0

    def answered(self, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        if status >= 500 or (seconds > _SLOW and path not in _WAITS):
            if log.isEnabledFor(logging.INFO) and self._may_write():
                self._write(logging.INFO, request, path, status, seconds, received, sent)
        elif log.isEnabledFor(logging.DEBUG):
            self._write(logging.DEBUG, request, path, status, seconds, received, sent)

    def _may_write(self) -> bool:
        second = int(stopwatch())
        if second != self._second:
            self._second, self._written = second, 0
        self._written += 1
        self._omitted += self._written > _LINES
        return self._written <= _LINES

    def _write(self, level: int, request: Request, path: str, status: int, seconds: float, received: int, sent: int) -> None:
        fields: dict[str, object] = {
            "endpoint": path or "other",
            "status": status,
            "ms": round(seconds * 1000, 1),
            "received": received,
            "sent": sent,
            "caller": request.caller.name,
            "request_id": request.request_id.decode(),
        }
        if request.queue_name:
            fields["queue"] = request.queue_name
        if self._omitted:
            fields["omitted"], self._omitted = self._omitted, 0
        log.log(level, "request", extra=fields)
