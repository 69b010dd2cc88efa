"""`sluiceway queue history`: a queue's counts minute by minute."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, WholeNumber, print_table, table
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.clock import format_duration

if TYPE_CHECKING:
    from sluiceway.contract.history_answers import QueueHistory

Series = Sequence[int | None]

MAX_MINUTES = 1_440
WIDTH = 60
"""Maximum characters of a sparkline; with more minutes, several share one."""
ROWS = 10
"""Latest minutes that are shown as figures."""
BLOCKS = "▁▂▃▄▅▆▇█"
_LEVELS = {"ready": "ready", "total_leased": "leased", "scheduled": "scheduled", "oldest_s": "oldest"}
_COUNTS = {name: name for name in ("produced", "completed", "retried", "expired", "dead", "cleared", "redriven", "failures")}
_ALWAYS = ("ready", "produced", "completed")


@click.command()
@queue_argument("name")
@click.option("--minutes", type=WholeNumber(1, MAX_MINUTES), default=60, show_default=True, help="Number of latest minutes.")
@connected
def history(session: Session, name: str, minutes: int) -> None:
    """Show the history of the queue NAME per minute, up to a day.

    Levels are as of the end of a minute, counts are per minute. Gaps: server not running.
    """
    answer = session.client.history(name, minutes=minutes)
    if session.as_json:
        session.print(answer, "")
    elif all(each is None for each in answer.series.get("ready", ())):
        click.echo("No data for these minutes yet; each minute appears a few seconds after its end", err=True)
    else:
        print_table(lines(answer))
        click.echo()
        print_table(figures(answer))


def lines(answer: QueueHistory) -> Rows:
    """A table with a sparkline for each series."""
    rows = []
    for name, title in _shown(answer).items():
        series = answer.series[name]
        known = [each for each in series if each is not None]
        most = max(known, default=0)
        last = series[-1]
        rows.append((title, spark(series, summed=name in _COUNTS), _figure(name, last), _figure(name, most)))
    return table(("", f"{_clock(answer, 0)} to {_clock(answer, _length(answer))} UTC", "last", "most"), rows, right=("last", "most"))


def figures(answer: QueueHistory) -> Rows:
    """A table of the latest minutes, newest first."""
    shown = _shown(answer)
    length = _length(answer)
    rows = [
        (_clock(answer, minute), *(_figure(name, answer.series[name][minute]) for name in shown))
        for minute in range(length - 1, max(-1, length - 1 - ROWS), -1)
    ]
    return table(("minute", *shown.values()), rows, right=tuple(shown.values()))


def spark(series: Series, *, summed: bool) -> str:
    """A sparkline of at most WIDTH blocks, with gaps for missing minutes. Minutes that share a block are summed with `summed`, otherwise
    their maximum counts."""
    together = -(-len(series) // WIDTH)
    # Grouped from the end: a last block with fewer minutes would look too low.
    groups = list(zip_longest(*[iter(reversed(series))] * together))[::-1]
    known = [[each for each in group if each is not None] for group in groups]
    heights = [(sum(group) if summed else max(group)) if group else None for group in known]
    top = max((each for each in heights if each is not None), default=0)
    return "".join(" " if each is None else BLOCKS[each * (len(BLOCKS) - 1) // top if top else 0] for each in heights)


def _shown(answer: QueueHistory) -> dict[str, str]:
    """The series to show, with titles: those with any value, and a few that are always shown."""
    return {
        name: title
        for name, title in (_LEVELS | _COUNTS).items()
        if name in answer.series and (name in _ALWAYS or any(answer.series[name]))
    }


def _figure(name: str, value: int | None) -> str:
    if value is None:
        return "-"
    return format_duration(value * 1_000) if name == "oldest_s" else f"{value:,}"


def _length(answer: QueueHistory) -> int:
    return min(map(len, answer.series.values()), default=0)


def _clock(answer: QueueHistory, minute: int) -> str:
    return f"{answer.first_at + timedelta(minutes=minute):%H:%M}"
