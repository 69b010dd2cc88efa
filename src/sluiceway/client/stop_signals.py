"""SIGTERM and SIGINT as requests to stop a consumer, for as long as it runs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_SAME = 1.0
"""Seconds in which a second signal counts as the same request: a wrapper program may forward the terminal's signal."""


class StopSignals:
    """Calls `stop` at the first SIGTERM or SIGINT within the block, and `end` at a second one.

    Python runs both in the main thread, between any two instructions. The signals are left alone outside the main thread, and where the
    program handles SIGTERM itself. After the block, a SIGINT has the effect that it has without it: usually KeyboardInterrupt.
    """

    def __init__(self, stop: Callable[[], object], end: Callable[[], object]) -> None:
        self._stop, self._end = stop, end
        self._before: dict[int, Any] = {}
        self._asked_at: float | None = None
        self._interrupted = False

    def __enter__(self) -> Self:
        is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        for number in (signal.SIGINT, signal.SIGTERM) if is_ours else ():
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._interrupted and error is None:
            signal.raise_signal(signal.SIGINT)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._interrupted |= number == signal.SIGINT
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._stop()
        elif now - self._asked_at > _SAME:
            self._end()
