"""What an instance stands on, and whether it bears."""

from __future__ import annotations

from typing import NamedTuple

from sluiceway.kernel.clock import Millis


class Check(NamedTuple):
    """One thing that was looked at, and how long that took. `detail`: what was found, in words."""

    name: str
    ok: bool
    detail: str
    took: Millis
