"""Progress of a rebalance: live bars at a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import EXIT_REFUSED, counted, print_json, printable
from sluiceway.cli.session import Session
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from rich.console import Group

    from sluiceway.client import Rebalance

PATIENCE = 60.0
"""Seconds without an answer before giving up. A dead instance is replaced sooner."""
_BARS = 20
"""Maximum partitions with their own bar."""
_BAR_WIDTH = 40


def watch(session: Session, id: str, interval: str, good: str = "done") -> int:
    """Show the rebalance until it ends. Returns exit code 0 if it ended in the state `good`."""
    looks = _looks(session, id, parse_duration(interval, "interval") / 1_000)
    live = sys.stdout.isatty() and not session.as_json
    last = _in_a_picture(looks) if live else _in_lines(session, looks)
    return 0 if last.state == good else EXIT_REFUSED


def _looks(session: Session, id: str, pause: float) -> Iterator[tuple[Rebalance | None, str]]:
    """Poll until the rebalance has ended: its state, or None with the error of a failed poll.

    Raises permanent errors at once, others after PATIENCE.
    """
    heard = time.monotonic()
    while True:
        try:
            found = session.client.get_rebalance(id)
        except SluicewayError as error:
            if not error.retryable or time.monotonic() - heard >= PATIENCE:
                raise
            yield None, error.detail
        else:
            heard = time.monotonic()
            yield found, ""
            if not found.is_open:
                return
        time.sleep(pause)


def _in_lines(session: Session, looks: Iterator[tuple[Rebalance | None, str]]) -> Rebalance:
    last: Rebalance | None = None
    line = ""
    for found, note in looks:
        if found is None:
            click.echo(f"No answer: {printable(note.encode(), 1_000)}", err=True)
            continue
        last = found
        if session.as_json:
            print_json(found)
        elif line != (line := said(found)):
            click.echo(line)
    assert last is not None, "polling ends with an ended rebalance"
    return last


def said(found: Rebalance) -> str:
    """The progress in one line."""
    if not found.is_open:
        why = f": {printable(found.problem.encode(), 1_000)}" if found.problem else ""
        return f"{found.queue_name}: {found.state}{why}"
    parts = [f"{found.queue_name}: {found.state}, step {found.step}" if found.state != "waiting" else f"{found.queue_name}: waiting"]
    progress = found.progress
    if progress is not None and found.drain_at is not None:
        parts.append(f"{counted(progress.items_left, 'item')} left")
        if progress.leased_left:
            parts.append(f"{progress.leased_left:,} leased")
        if progress.rate_per_s is not None:
            parts.append(f"{progress.rate_per_s:,.0f}/s")
        if progress.time_left is not None:
            parts.append(f"{progress.time_left} to go")
    if found.problem:
        parts.append(f"PROBLEM: {printable(found.problem.encode(), 1_000)}")
    return ", ".join(parts)


def _in_a_picture(looks: Iterator[tuple[Rebalance | None, str]]) -> Rebalance:
    from rich.live import Live

    picture = Picture()
    last: Rebalance | None = None
    # The final state stays on the screen.
    with Live(auto_refresh=False) as live:
        for found, note in looks:
            last = found or last
            if last is not None:
                live.update(picture.drawn(last, note), refresh=True)
    assert last is not None, "polling ends with an ended rebalance"
    return last


class Picture:
    """A progress bar for each draining partition, relative to the most items seen in it."""

    def __init__(self) -> None:
        self._most: dict[int, int] = {}
        """Maximum items seen, by partition."""

    def drawn(self, found: Rebalance, note: str = "") -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        left = {each.partition: each.items_left for each in found.progress.partitions} if found.progress else {}
        for partition, items in left.items():
            self._most[partition] = max(self._most.get(partition, 0), items)
        gone = {each.partition for each in found.steps if each.step == "drain"}
        bars = Table(box=None, pad_edge=False, show_header=False)
        drained = found.plan.drains
        shown = sorted(drained, key=lambda partition: (partition in gone, partition))[:_BARS]
        for partition in sorted(shown):
            most = self._most.get(partition, 0)
            items = 0 if partition in gone else left.get(partition, most)
            done = found.state == "done" or partition in gone
            bar = ProgressBar(total=1, completed=1 if done else (most - items) / most if most else 0, width=_BAR_WIDTH)
            bars.add_row(Text(f"partition {partition}"), bar, Text("removed" if done else f"{items:,} left"))
        parts: list[Text | Table] = [Text(said(found), style="bold")]
        if shown:
            parts.append(bars)
        if len(drained) > len(shown):
            parts.append(Text(f"… and {len(drained) - len(shown)} more, {len(gone)} of {len(drained)} removed"))
        if note:
            parts.append(Text(f"NOT UP TO DATE: {printable(note.encode(), 1_000)}"))
        return Group(*parts)
