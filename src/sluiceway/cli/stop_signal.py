"""Stop requests by Ctrl-C or SIGTERM for long-running commands."""

from __future__ import annotations

import signal
import time
from typing import Any

_AGAIN = 1.0
"""Seconds in which a second signal counts as the same request: a wrapper program may forward the terminal's signal."""


class Asked:
    """Records the first Ctrl-C or SIGTERM in `to_end`; a later one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.to_end = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        return self

    def listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._ask)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self.to_end and time.monotonic() - self._since > _AGAIN:
            raise KeyboardInterrupt
        if not self.to_end:
            self.to_end, self._since = True, time.monotonic()
