"""Errors of ours in Spark's Python processes, reported in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sluiceway.kernel.errors import SluicewayError

_HIDE = "SPARK_HIDE_TRACEBACK"
"""Environment variable that PySpark reads when it reports an exception of a Python process."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Have PySpark report a SluicewayError that leaves the block by its text alone.

    The text names the option, column or lease at fault, and the remedy. PySpark would put it below thirty lines of traceback, in its own
    frames. Errors of other kinds keep theirs, and so do internal ones. A process of Spark ends with an exception, so this affects no later
    one.
    """
    try:
        yield
    except SluicewayError as error:
        if os.environ.get("SPARK_PYTHON_RUNTIME") == "PYTHON_WORKER" and error.code != "internal":
            os.environ[_HIDE] = "1"
        raise
