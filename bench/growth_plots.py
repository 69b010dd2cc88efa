"""Plots of cost against size, with the expected shape of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Shape = Literal["flat", "linear"]


class Panel(NamedTuple):
    """One plot. `flat`: expected to stay as at the smallest size. `linear`: expected on the line from the smallest size to the largest."""

    column: str
    title: str
    shape: Shape


class Part(NamedTuple):
    of: str
    panels: tuple[Panel, ...]


PARTS = {
    "backlog": Part(
        "waiting items in one partition",
        (
            Panel("lease_ms", "lease of 1,000, ms", "flat"),
            Panel("complete_ms", "complete of 1,000, ms", "flat"),
            Panel("restart_s", "restart, s", "flat"),
            Panel("memory_mb", "memory after it, MB", "linear"),
        ),
    ),
    "partitions": Part(
        "partitions of one queue",
        (
            Panel("cycle_cpu_ms", "a cycle of one item, ms of processor", "flat"),
            Panel("idle_cpu_percent", "idle, % of a core", "flat"),
            Panel("restart_s", "restart, s", "linear"),
            Panel("memory_mb", "memory, MB", "linear"),
        ),
    ),
    "waiters": Part(
        "consumers that wait",
        (
            Panel("idle_cpu_percent", "idle, % of a core", "flat"),
            Panel("produce_cpu_ms", "a produce to another queue, ms of processor", "flat"),
            Panel("memory_mb", "memory, MB", "linear"),
        ),
    ),
}


def expected(shape: Shape, sizes: Sequence[float], values: Sequence[float]) -> list[float]:
    """Expected values at these sizes."""
    rise = 0.0 if shape == "flat" or len(sizes) < 2 else (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return [values[0] + rise * (size - sizes[0]) for size in sizes]


def draw(parts: Mapping[str, Sequence[Mapping[str, float]]], folder: Path) -> None:
    """Draw growth-PART.svg for each part with several sizes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    # Equal figures must make equal files.
    with mpl.rc_context({"svg.hashsalt": "sluiceway", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for name, part in PARTS.items():
            rows = parts.get(name, ())
            if len(rows) < 2:
                continue
            sizes = [row["size"] for row in rows]
            figure = Figure(figsize=(2.9 * len(part.panels), 2.7), layout="constrained")
            for axes, panel in zip(figure.subplots(1, len(part.panels)), part.panels, strict=True):
                values = [row[panel.column] for row in rows]
                axes.plot(sizes, expected(panel.shape, sizes, values), "--", color="#9aa5b1", label=panel.shape)
                axes.plot(sizes, values, "o-", color="#1f6feb", label="measured")
                axes.set_xscale("log")
                axes.set_ylim(0, max(*values, 1e-9) * 1.25)
                axes.set_title(panel.title, fontsize=9)
                axes.legend(frameon=False, fontsize=8)
            figure.supxlabel(part.of, fontsize=9)
            figure.savefig(folder / f"growth-{name}.svg", metadata={"Date": None})
