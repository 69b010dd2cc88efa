"""Exit codes of processes in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """How a process ended, for a sentence about it: `was killed by SIGKILL`, `ended with exit code 3`. `code`: as `subprocess` has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        # Real-time signals have names at both ends of their range only.
        name = f"signal {-code}"
    return f"was killed by {name}"
