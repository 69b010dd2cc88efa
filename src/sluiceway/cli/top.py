"""`sluiceway top`: the queues, who consumes them, the backends and what is wrong, as they are now."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, duration_option, print_json, printable, table
from sluiceway.cli.consumers import ConsumerRow, consumer_table, rows_of
from sluiceway.cli.session import Session, connected, paused_verbs
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from rich.console import Group

    from sluiceway.client import PartitionStats, QueueStats

MAX_QUEUES = 50
"""Queues in one look: each is a call."""
_CONSUMERS_SHOWN = 12
"""In a terminal: Spark queries first, then those who have most."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue now. Rates are per second since the look before; the first look has none."""

    queue_name: str
    partitions: int
    ready: int
    leased: int
    scheduled: int
    dead: int
    produced_per_second: float | None = None
    completed_per_second: float | None = None
    paused: str = ""
    """The verbs that are paused."""


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A backend, as far as the partitions of these queues tell. `commit_time_ms` is their average."""

    backend: str
    partitions: int
    available: int
    degraded: int
    commit_time_ms: float


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a server. `more` tells whether it has queues that are not looked at. `instances` have partitions of those that are."""

    queues: list[QueueRow]
    backends: list[BackendRow]
    problems: list[str]
    more: bool
    instances: int
    consumers: list[ConsumerRow] = field(default_factory=list)


def summarise(stats: Sequence[QueueStats], before: Mapping[str, QueueStats], seconds: float, problems: Iterable[str], more: bool) -> Look:
    """What to show of the counts now, given those of `seconds` ago."""
    parts = [part for each in stats for part in each.partitions]
    by_backend: dict[str, list[PartitionStats]] = {}
    for part in parts:
        by_backend.setdefault(part.backend, []).append(part)
    rows = [_queue_row(each, before.get(each.queue_name), seconds) for each in stats]
    backends = [_backend_row(name, parts) for name, parts in sorted(by_backend.items())]
    instances = {logical.instance for each in stats for logical in each.logical_queues} - {None}
    return Look(rows, backends, list(problems), more, len(instances))


def _queue_row(stats: QueueStats, before: QueueStats | None, seconds: float) -> QueueRow:
    def total(of: QueueStats, name: str) -> int:
        return sum(int(getattr(part, name)) for part in of.partitions)

    def rate(name: str) -> float | None:
        if before is None or seconds <= 0:
            return None
        # A queue that was deleted and made again begins anew.
        return max(0, total(stats, name) - total(before, name)) / seconds

    return QueueRow(
        stats.queue_name,
        len(stats.partitions),
        ready=total(stats, "ready"),
        leased=total(stats, "total_leased"),
        scheduled=total(stats, "scheduled"),
        dead=total(stats, "dead"),
        produced_per_second=rate("produced"),
        completed_per_second=rate("completed"),
    )


def _backend_row(name: str, parts: Sequence[PartitionStats]) -> BackendRow:
    # Those that drain or are paused can be reached as well as the others.
    available = sum(part.state not in ("unavailable", "error") for part in parts)
    average = sum(part.commit_time_ms for part in parts) / len(parts)
    return BackendRow(name, len(parts), available, sum(part.degraded for part in parts), round(average, 1))


# -- showing ----------------------------------------------------------------------------------------------------------


def frame(look: Look, url: str, note: str = "") -> Group:
    from rich.console import Group
    from rich.text import Text

    numbers = ("partitions", "ready", "leased", "scheduled", "dead", "in/s", "done/s")
    rows = [
        (
            *(
                f"{each.queue_name} (paused: {each.paused})" if each.paused else each.queue_name,
                each.partitions,
                each.ready,
                each.leased,
                each.scheduled,
                each.dead,
            ),
            *(_rate(each.produced_per_second), _rate(each.completed_per_second)),
        )
        for each in look.queues
    ]
    title = f"{url}  {look.instances} instances" if look.instances > 1 else url
    parts: list[Text | Rows] = [Text(f"{title}  {note}".rstrip()), Text(), table(("queue", *numbers), rows, right=numbers)]
    if look.more:
        parts.append(Text("… and more queues; name those that you want: sluiceway top QUEUE…"))
    if not rows:
        parts.append(Text("no queues"))
    if look.consumers:
        first = sorted(look.consumers, key=lambda each: (not each.query, -each.items))[:_CONSUMERS_SHOWN]
        parts += [Text(), consumer_table(each for each in look.consumers if each in first)]
    if len(look.consumers) > _CONSUMERS_SHOWN:
        parts.append(Text(f"… and {len(look.consumers) - _CONSUMERS_SHOWN} more consumers: sluiceway consumer list"))
    figures = ("partitions", "available", "degraded", "commit ms")
    backends = [(each.backend, each.partitions, each.available, each.degraded, f"{each.commit_time_ms:.1f}") for each in look.backends]
    if backends:
        parts += [Text(), table(("backend", *figures), backends, right=figures)]
    parts += [Text(), *(Text(f"problem: {printable(each.encode())}", style="bold") for each in look.problems or ())]
    return Group(*(parts if look.problems else parts[:-1]))


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


# -- looking ----------------------------------------------------------------------------------------------------------


class Looker:
    """Looks again and again: one call for the names, one a queue, one for the consumers, one for the problems."""

    def __init__(self, session: Session, queues: Sequence[str], most: int) -> None:
        self._session, self._queues, self._most = session, queues, most
        self._before: dict[str, QueueStats] = {}
        self._at = 0.0

    def look(self) -> Look:
        """Raises what the calls raise; a queue that was deleted in between is left out."""
        names, more = list(self._queues), False
        if names:
            paused = {name: paused_verbs(self._session, name) for name in names}
        else:
            page = self._session.client.list_queues(limit=self._most)
            names, more = [info.queue_name for info in page.items], page.next is not None
            paused = {info.queue_name: info.paused for info in page.items}
        found = [each for name in names if (each := self._stats(name)) is not None]
        now = time.monotonic()
        look = summarise(found, self._before, now - self._at, self._session.problems(), more)
        look = replace(look, queues=[replace(each, paused=" and ".join(paused[each.queue_name])) for each in look.queues])
        self._before, self._at = {each.queue_name: each for each in found}, now
        return replace(look, consumers=self._consumers()) if found else look

    def _consumers(self) -> list[ConsumerRow]:
        """Those of the queues that are looked at: of more than a hundred queues, the first."""
        page = self._session.client.list_consumers(self._queues[0] if len(self._queues) == 1 else None)
        return rows_of(each for each in page.items if each.queue_name in self._before)

    def _stats(self, name: str) -> QueueStats | None:
        try:
            return self._session.client.stats(name)
        except SluicewayError as error:
            if error.code != "queue_not_found" or name in self._queues:
                raise
            return None


@click.command()
@click.argument("queues", nargs=-1, metavar="[QUEUE...]")
@click.option("--once", is_flag=True, help="Look once and end. So it does where there is no terminal, unless with --json.")
@duration_option("--interval", default="2s", help="The time between two looks.")
@click.option(
    "-n", "--most", type=click.IntRange(1, MAX_QUEUES), help=f"At most so many queues. [default: what fits, {MAX_QUEUES} at most]"
)
@connected
def top(session: Session, queues: tuple[str, ...], once: bool, interval: str, most: int | None) -> None:
    """Watch the server's queues, consumers (Spark queries among them), backends and problems, until Ctrl-C.

    With --json: one object a look.
    """
    if len(queues) > MAX_QUEUES:
        raise click.UsageError(f"at most {MAX_QUEUES} queues; each is a call at each look")
    fits = max(1, min(MAX_QUEUES, shutil.get_terminal_size().lines - 12))
    looker = Looker(session, queues, most or (MAX_QUEUES if session.as_json else fits))
    pause = parse_duration(interval, "interval") / 1_000
    if session.as_json:
        while True:
            print_json(asdict(looker.look()))
            if once:
                return
            time.sleep(pause)
    elif once or not sys.stdout.isatty():
        from sluiceway.cli.common import wide_console

        wide_console().print(frame(looker.look(), session.target.url))
    else:
        _live(session, looker, pause)


def _live(session: Session, looker: Looker, pause: float) -> None:
    from rich.live import Live

    look = looker.look()
    # Leaving the block gives the terminal back as it was, also by Ctrl-C.
    with Live(frame(look, session.target.url), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(pause)
            note = ""
            try:
                look = looker.look()
            except SluicewayError as error:
                if not error.retryable:
                    raise
                note = f"NOT UP TO DATE: {error.detail}"
            live.update(frame(look, session.target.url, note), refresh=True)
