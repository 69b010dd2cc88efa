"""How fast a caller may go: a token bucket, told the time."""

from __future__ import annotations

from typing import Final, NamedTuple

from sluiceway.kernel.clock import Millis

_BURST: Final = 1_000
"""Milliseconds whose tokens a bucket holds: what was not used for longer is lost."""


class Rates(NamedTuple):
    """What one API key may do in a second, unless the key says otherwise. 0: no limit."""

    requests_per_second: int = 0
    bytes_per_second: int = 0


class Bucket:
    """Tokens come in at a rate, up to a second's worth. It starts full.

    It may be overdrawn: a request is let through while any token is left, because the size of a body is known only when it was read. The
    debt is paid before the next one, so over time the rate holds: in any span of t seconds at most rate · (t + 1) tokens go out, and what
    the last one before each refusal overdrew by.
    """

    __slots__ = ("_at", "_level")

    def __init__(self, rate: int, now: Millis) -> None:
        # In thousandths of a token, so that a millisecond's share of any rate is a whole number.
        self._level = rate * _BURST
        self._at = now

    def wait(self, rate: int, now: Millis) -> Millis:
        """How long until there is a token: 0 if there is one now. The rate may be another one than before."""
        elapsed = max(0, now - self._at)
        self._level = min(rate * _BURST, self._level + rate * elapsed)
        self._at = max(now, self._at)
        return 0 if self._level > 0 else -self._level // rate + 1

    def take(self, tokens: int) -> None:
        self._level -= tokens * 1_000
