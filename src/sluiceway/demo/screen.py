"""Progress display: bars in a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LINE_AFTER = 5.0
"""Seconds between lines without a terminal."""
_RATE_OVER = 5.0
"""Seconds over which rates are taken."""


class Screen:
    """Display of the items in and out, and of their rates."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:>9}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._in = self._bars.add_task("ingested ", total=None, start=False, rate="")
        self._out = self._bars.add_task("processed", total=None, start=False, rate="")
        self._shown = (0, 0)
        self._shown_at = 0.0
        self._begun: set[int] = set()
        self._looks: deque[tuple[float, int, int]] = deque()
        """Time, items in and items out of each look of the last seconds."""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, produced: int, settled: int, rows: int) -> None:
        now = time.monotonic()
        self._looks.append((now, produced, settled))
        while len(self._looks) > 2 and self._looks[1][0] <= now - _RATE_OVER:
            self._looks.popleft()
        began, produced_then, settled_then = self._looks[0]
        into, out = (_rate(after - before, now - began) for before, after in ((produced_then, produced), (settled_then, settled)))
        for task, done, rate in ((self._in, produced, into), (self._out, settled, out)):
            if done and task not in self._begun:
                self._begun.add(task)
                self._bars.start_task(task)
            self._bars.update(task, completed=done, total=rows, rate=rate)
        if not self._console.is_terminal and (produced, settled) != self._shown and now - self._shown_at >= _LINE_AFTER:
            self.say(f"  ingested {produced:,}{into and f' ({into})'}, processed {settled:,}{out and f' ({out})'} of {rows:,}")
            self._shown, self._shown_at = (produced, settled), now


def _rate(items: int, seconds: float) -> str:
    """As text; empty at a standstill."""
    return f"{items / seconds:,.0f}/s" if items and seconds > 0 else ""
