"""Outcomes of an operation. There is no fourth one, and a time-out is UNKNOWN."""

from __future__ import annotations

from enum import Enum


class Outcome(Enum):
    """Result of an operation, as far as its caller can know it."""

    DONE = "done"
    """It happened, durably."""
    REFUSED = "refused"
    """It surely did not happen."""
    UNKNOWN = "unknown"
    """It may have happened, or may happen yet."""
