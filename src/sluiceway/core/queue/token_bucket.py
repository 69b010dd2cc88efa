"""Rate limits: a token bucket with an external clock."""

from __future__ import annotations

from typing import Final, NamedTuple

from sluiceway.kernel.clock import Millis

_BURST: Final = 1_000
"""Milliseconds of tokens that a bucket holds; the excess is lost."""


class Rates(NamedTuple):
    """Limits of one API key per second, unless the key sets its own. 0: no limit."""

    requests_per_second: int = 0
    bytes_per_second: int = 0


class Bucket:
    """Tokens accrue at a rate, up to one second's worth. It starts full.

    It may be overdrawn: a request passes while any token is left, since the size of a body is known only once it is read. The debt is paid
    before the next one, so the rate holds over time: in any span of t seconds at most rate · (t + 1) tokens go out, plus what the last
    request before each refusal overdrew.
    """

    __slots__ = ("_at", "_level")

    def __init__(self, rate: int, now: Millis) -> None:
        # In thousandths of a token, so that any rate accrues a whole number per millisecond.
        self._level = rate * _BURST
        self._at = now

    def wait(self, rate: int, now: Millis) -> Millis:
        """Milliseconds until a token is available, 0 if one is now. The rate may differ from the previous call's."""
        elapsed = max(0, now - self._at)
        self._level = min(rate * _BURST, self._level + rate * elapsed)
        self._at = max(now, self._at)
        return 0 if self._level > 0 else -self._level // rate + 1

    def take(self, tokens: int) -> None:
        self._level -= tokens * 1_000
