"""How PySpark reports our errors."""

from __future__ import annotations

import io
import os

import pytest
from pyspark.util import handle_worker_exception

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.spark.worker_errors import plain_errors


def reported(error: Exception) -> str:
    """What PySpark's worker sends to Java for an error that leaves the block."""
    out = io.BytesIO()
    try:
        with plain_errors():
            raise error
    except Exception as raised:
        handle_worker_exception(raised, out)
    out.seek(0)
    # A mark of four bytes, the length, and the text.
    return out.read()[8:].decode()


@pytest.fixture
def in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PYTHON_RUNTIME", "PYTHON_WORKER")
    # Restored afterwards.
    monkeypatch.setenv("SPARK_HIDE_TRACEBACK", "")


@pytest.mark.usefixtures("in_a_worker")
def test_an_error_of_ours_is_one_line() -> None:
    told = reported(invalid("subscribe", "see queue"))
    assert told.splitlines() == ["sluiceway.kernel.errors.SluicewayError: subscribe: see queue"]


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize("error", [ValueError("boom"), SluicewayError("internal", "boom")], ids=["other", "internal"])
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    told = reported(error)
    assert "Traceback" in told
    assert "boom" in told


def test_outside_of_sparks_processes_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_PYTHON_RUNTIME", raising=False)
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    assert "Traceback" in reported(invalid("subscribe", "see queue"))
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
