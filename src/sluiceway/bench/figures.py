"""Measured figures with their aims, and their table and document."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Figure(NamedTuple):
    """A measured figure. `aim`: upper bound; None: for information only."""

    about: str
    name: str
    value: float
    unit: str
    aim: float | None = None

    @property
    def missed(self) -> bool:
        return self.aim is not None and self.value > self.aim

    def document(self) -> dict[str, object]:
        return self._asdict() | {"value": float(f"{self.value:.4g}"), "missed": self.missed}


def table(figures: Iterable[Figure]) -> str:
    """Render the figures as text, grouped by subject."""
    lines = []
    about = ""
    for figure in figures:
        if figure.about != about:
            about = figure.about
            lines.append(about)
        aim = "" if figure.aim is None else f"   (aim: {figure.aim:g}{', MISSED' if figure.missed else ''})"
        lines.append(f"  {figure.name:62} {shown(figure.value):>10} {figure.unit:6}{aim}".rstrip())
    return "\n".join(lines)


def shown(value: float) -> str:
    """Format a value with three significant digits, and all digits before the decimal point."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def write_page(page: Path, mark: str, text: str) -> None:
    """Replace the text between the page's two comments of that mark. Raises ValueError if it has none."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, begins, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    if not (begins and ends):
        raise ValueError(f"{page} has no {begin} with a {end}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")


def progress(text: str) -> None:
    """Print a progress line on standard error."""
    print(f"… {text}", file=sys.stderr, flush=True)
