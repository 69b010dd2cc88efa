"""The log of a worker: lines on stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time

from sluiceway.kernel.terminal_text import escaped


class TextLines(logging.Formatter):
    """One line for each message. Those of an exception's trace, which may quote an item, are set in: none can pass for a message."""

    def format(self, record: logging.LogRecord) -> str:
        first, *others = super().format(record).split("\n")
        return "\n".join([escaped(first), *(f"  | {escaped(line)}" for line in others)])


class JsonLines(logging.Formatter):
    """One JSON object for each message: time, level, message, and the trace of an exception."""

    def __init__(self, process: int | None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        fields: dict[str, object] = {"time": at, "level": record.levelname.lower(), "message": record.getMessage()}
        if self._process is not None:
            fields["process"] = self._process
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logs(level: str, as_json: bool, process: int | None = None) -> None:
    """Log to stderr from `level` on, with the number of the process, unless the handler's module has set up logging by itself."""
    handler = logging.StreamHandler()
    number = "" if process is None else f"[{process}] "
    handler.setFormatter(JsonLines(process) if as_json else TextLines(f"%(asctime)s %(levelname)s {number}%(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # One line for each call is too much.
    logging.getLogger("httpx").setLevel(logging.WARNING)
