"""The log of a worker: nothing that a handler's error quotes passes for another line."""

from __future__ import annotations

import json
import logging
import sys

from sluiceway.worker.log_setup import JsonLines, TextLines


def failed(text: str) -> logging.LogRecord:
    try:
        raise ValueError(text)
    except ValueError:
        return logging.LogRecord("sluiceway", logging.WARNING, "x.py", 1, "handling %s failed", ("k\x1b[2J",), sys.exc_info())


def test_a_text_line_is_one_line() -> None:
    first, *trace = TextLines("%(levelname)s %(message)s").format(failed("\x1b[1mx\n12:00:00 INFO all is well")).split("\n")
    assert first == "WARNING handling k\\x1b[2J failed"
    assert all(line.startswith("  | ") for line in trace)
    assert trace[-2:] == ["  | ValueError: \\x1b[1mx", "  | 12:00:00 INFO all is well"]


def test_a_json_line_is_one_line() -> None:
    line = JsonLines(None).format(failed("x\ny"))
    assert "\n" not in line
    assert json.loads(line)["message"] == "handling k\x1b[2J failed"
