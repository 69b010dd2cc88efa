from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sluiceway.kernel.exit_codes import how_it_ended


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        # Python has no name for it: asking for one ended the supervisor, and all processes with it.
        (40, "was killed by signal 40"),
    ],
)
def test_a_signal_is_told_also_one_without_a_name(number: int, told: str) -> None:
    child = subprocess.run([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"], check=False)
    assert how_it_ended(child.returncode) == told


def test_an_exit_code_is_told() -> None:
    assert how_it_ended(0) == "ended with exit code 0"
    assert how_it_ended(3) == "ended with exit code 3"
