"""Conversion of Spark's errors, whose texts include the tracebacks of several processes."""

from __future__ import annotations

import re
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException

from sluiceway.kernel.errors import SluicewayError

_OURS = re.compile(r"SluicewayError: ([^\n]+)")
_GIVEN_UP = "option requestTimeout)"
"""Final words of the message of `spark.server_calls` about a server that stayed unreachable for too long."""


def ours(error: Exception) -> SluicewayError | None:
    """The innermost SluicewayError in Spark's text, in one line; None: there is none."""
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    found = _OURS.findall(str(text))
    if not found:
        return None
    # The innermost comes last.
    return SluicewayError("unavailable" if found[-1].endswith(_GIVEN_UP) else "invalid_request", found[-1])


def translated(error: Exception) -> SluicewayError:
    """Convert any error of Spark to a SluicewayError."""
    if (own := ours(error)) is not None:
        return own
    text = error.java_exception.getMessage() if isinstance(error, Py4JJavaError) else str(error)
    line = str(text).strip().partition("\n")[0]
    cause = _cause(error).strip().partition("\n")[0]
    if cause and cause not in line:
        line += f" {cause}"
    return SluicewayError("invalid_request" if isinstance(error, AnalysisException) else "internal", f"Spark: {line}")


def _cause(error: Exception) -> str:
    """The message of Spark's innermost exception: the outer ones only name the file or the batch."""
    inner: Any = error.java_exception if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)
    if inner is None:
        return ""
    try:
        while (below := inner.getCause()) is not None:
            inner = below
        return str(inner.getMessage())
    except Py4JError:
        return ""
