"""Progress display: bars in a terminal, a line now and then elsewhere. All of it on stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_LINE_AFTER = 5.0
"""Seconds between lines without a terminal."""


class Screen:
    """Display of the number of items in and out."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._in = self._bars.add_task("ingested ", total=None, start=False)
        self._out = self._bars.add_task("processed", total=None, start=False)
        self._shown = (0, 0)
        self._shown_at = 0.0
        self._begun: set[int] = set()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, produced: int, settled: int, rows: int) -> None:
        for task, done in ((self._in, produced), (self._out, settled)):
            if done and task not in self._begun:
                self._begun.add(task)
                self._bars.start_task(task)
            self._bars.update(task, completed=done, total=rows)
        now = time.monotonic()
        if not self._console.is_terminal and (produced, settled) != self._shown and now - self._shown_at >= _LINE_AFTER:
            self.say(f"  ingested {produced:,}, processed {settled:,} of {rows:,}")
            self._shown, self._shown_at = (produced, settled), now
