"""Health checks."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.clock import Millis


class Check(NamedTuple):
    """Result of one check. `detail`: the finding, as text; `took`: duration in milliseconds."""

    name: str
    ok: bool
    detail: str
    took: Millis
