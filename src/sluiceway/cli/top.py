"""`sluiceway top`: live view of queues, consumers, backends and problems."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, WholeNumber, duration_option, print_json, printable, table
from sluiceway.cli.consumers import ConsumerRow, consumer_table, rows_of
from sluiceway.cli.session import Session, connected, paused_verbs
from sluiceway.kernel.clock import format_duration, parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from rich.console import Group

    from sluiceway.client import PartitionStats, QueueStats

MAX_QUEUES = 50
"""Maximum queues per refresh: each costs a call."""
ONCE_PAUSE = 1.0
"""Seconds over which `--once` measures rates."""
_PROBLEMS_SHOWN = 8
"""Maximum problems at a terminal, the most severe first: the queues must stay in sight."""
_CONSUMERS_SHOWN = 12
"""Maximum consumers at a terminal: Spark queries first, then those with the most items."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue's current counts. Rates are per second since the previous refresh; the first one has none."""

    queue_name: str
    partitions: int
    ready: int
    leased: int
    scheduled: int
    dead: int
    produced_per_second: float | None = None
    completed_per_second: float | None = None
    paused: str = ""
    """The paused verbs."""
    handler_p50_ms: int | None = None
    handler_p99_ms: int | None = None
    """How long half of the items of the last minutes, and 99 of 100, were handled at most, as far as consumers say."""
    servable: int = field(kw_only=True)
    """Ready items that can be leased now."""


@dataclass(frozen=True, slots=True)
class BackendRow:
    """A backend, summed over the partitions of the shown queues. `commit_time_ms` is their average."""

    backend: str
    partitions: int
    available: int
    degraded: int
    commit_time_ms: float


@dataclass(frozen=True, slots=True)
class ServerSnapshot:
    """A snapshot of a server. `more`: it has further queues. `instances`: number of owners of the shown queues' partitions."""

    queues: list[QueueRow]
    backends: list[BackendRow]
    problems: list[str]
    more: bool
    instances: int
    consumers: list[ConsumerRow] = field(default_factory=list)


def summarise(
    stats: Sequence[QueueStats], before: Mapping[str, QueueStats], seconds: float, problems: Iterable[str], more: bool
) -> ServerSnapshot:
    """The rows for the current counts, with rates from those of `seconds` ago."""
    parts = [part for each in stats for part in each.partitions]
    by_backend: dict[str, list[PartitionStats]] = {}
    for part in parts:
        by_backend.setdefault(part.backend, []).append(part)
    rows = [_queue_row(each, before.get(each.queue_name), seconds) for each in stats]
    backends = [_backend_row(name, parts) for name, parts in sorted(by_backend.items())]
    instances = {logical.instance for each in stats for logical in each.logical_queues} - {None}
    return ServerSnapshot(rows, backends, list(problems), more, len(instances))


def _queue_row(stats: QueueStats, before: QueueStats | None, seconds: float) -> QueueRow:
    def total(of: QueueStats, name: str) -> int:
        return sum(int(getattr(part, name)) for part in of.partitions)

    def rate(name: str) -> float | None:
        if before is None or seconds <= 0:
            return None
        # A recreated queue restarts its counters.
        return max(0, total(stats, name) - total(before, name)) / seconds

    from sluiceway.contract.queue_stats import handler_ms

    p50, p99 = handler_ms(stats.logical_queues) or (None, None)
    return QueueRow(
        stats.queue_name,
        len(stats.partitions),
        ready=total(stats, "ready"),
        leased=total(stats, "total_leased"),
        scheduled=total(stats, "scheduled"),
        dead=total(stats, "dead"),
        produced_per_second=rate("produced"),
        completed_per_second=rate("completed"),
        handler_p50_ms=p50,
        handler_p99_ms=p99,
        servable=total(stats, "servable"),
    )


def _backend_row(name: str, parts: Sequence[PartitionStats]) -> BackendRow:
    # Draining and paused partitions are reachable.
    available = sum(part.state not in ("unavailable", "error") for part in parts)
    average = sum(part.commit_time_ms for part in parts) / len(parts)
    return BackendRow(name, len(parts), available, sum(part.degraded for part in parts), round(average, 1))


# -- layout -----------------------------------------------------------------------------------------------------------


def frame(look: ServerSnapshot, url: str, note: str = "") -> Group:
    from rich.console import Group
    from rich.text import Text

    numbers = ("partitions", "ready", "leased", "scheduled", "dead", "in/s", "done/s", "p50", "p99")
    rows = [
        (
            *(
                f"{each.queue_name} (paused: {each.paused})" if each.paused else each.queue_name,
                each.partitions,
                f"{each.ready:,} ({each.servable:,} servable)" if each.servable < each.ready else each.ready,
                each.leased,
                each.scheduled,
                each.dead,
            ),
            *(_rate(each.produced_per_second), _rate(each.completed_per_second)),
            *(_time(each.handler_p50_ms), _time(each.handler_p99_ms)),
        )
        for each in look.queues
    ]
    title = f"{url}  {look.instances} instances" if look.instances > 1 else url
    parts: list[Text | Rows] = [Text(f"{title}  {note}".rstrip()), Text()]
    if look.problems:
        parts += [*(Text(printable(each.encode(), 1_000), style="bold") for each in look.problems[:_PROBLEMS_SHOWN]), Text()]
    if len(look.problems) > _PROBLEMS_SHOWN:
        parts.insert(-1, Text(f"… and {len(look.problems) - _PROBLEMS_SHOWN} more problems: sluiceway doctor"))
    parts.append(table(("queue", *numbers), rows, right=numbers))
    if look.more:
        parts.append(Text("… and more queues; choose some: sluiceway top QUEUE…"))
    if not rows:
        parts.append(Text("No queues yet"))
    if look.consumers:
        first = sorted(look.consumers, key=lambda each: (not each.query, -each.items))[:_CONSUMERS_SHOWN]
        parts += [Text(), consumer_table(each for each in look.consumers if each in first)]
    if len(look.consumers) > _CONSUMERS_SHOWN:
        parts.append(Text(f"… and {len(look.consumers) - _CONSUMERS_SHOWN} more consumers: sluiceway consumer list"))
    figures = ("partitions", "available", "degraded", "commit ms")
    backends = [(each.backend, each.partitions, each.available, each.degraded, f"{each.commit_time_ms:.1f}") for each in look.backends]
    if backends:
        parts += [Text(), table(("backend", *figures), backends, right=figures)]
    return Group(*parts)


def _time(millis: int | None) -> str:
    return "-" if millis is None else format_duration(millis)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


# -- polling ----------------------------------------------------------------------------------------------------------


class Looker:
    """Polls the server: one call for the names, one per queue, one for the consumers, two for the problems."""

    def __init__(self, session: Session, queues: Sequence[str], most: int) -> None:
        self._session, self._queues, self._most = session, queues, most
        self._before: dict[str, QueueStats] = {}
        self._at = 0.0

    def prepare(self) -> None:
        """Read the counts that the rates of the next look refer to."""
        names = self._queues or [info.queue_name for info in self._session.client.list_queues(limit=self._most).items]
        self._before = {name: each for name in names if (each := self._stats(name)) is not None}
        self._at = time.monotonic()

    def look(self) -> ServerSnapshot:
        """A snapshot, without queues that were deleted meanwhile. Raises as the calls do."""
        names, more = list(self._queues), False
        if names:
            paused = {name: paused_verbs(self._session, name) for name in names}
        else:
            page = self._session.client.list_queues(limit=self._most)
            names, more = [info.queue_name for info in page.items], page.next is not None
            paused = {info.queue_name: info.paused for info in page.items}
        found = [each for name in names if (each := self._stats(name)) is not None]
        now = time.monotonic()
        look = summarise(found, self._before, now - self._at, self._problems(), more)
        look = replace(look, queues=[replace(each, paused=" and ".join(paused[each.queue_name])) for each in look.queues])
        self._before, self._at = {each.queue_name: each for each in found}, now
        return replace(look, consumers=self._consumers()) if found else look

    def _problems(self) -> list[str]:
        """Why the server is not ready, and what its judge finds wrong: with the shown queues, if some were chosen."""
        try:
            judged = self._session.client.list_problems().items
        except SluicewayError as error:
            if error.code not in ("forbidden", "not_found"):
                raise
            # This key may not ask, or the server is older.
            judged = []
        chosen = (each for each in judged if not (self._queues and each.queue_name) or each.queue_name in self._queues)
        told = [f"{each.severity}: {each.kind}: {each.subject}: {each.message}" for each in chosen]
        return [*(f"not ready: {each}" for each in self._session.problems()), *told]

    def _consumers(self) -> list[ConsumerRow]:
        """Consumers of the shown queues, from the first page of the call (a hundred queues)."""
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
@click.option("--once", is_flag=True, help="Print once and exit. Implied without a terminal, except with --json.")
@duration_option("--interval", default="2s", help="Refresh interval.")
@click.option(
    "-n", "--most", type=WholeNumber(1, MAX_QUEUES), help=f"Maximum number of queues. [default: as many as fit, up to {MAX_QUEUES}]"
)
@connected
def top(session: Session, queues: tuple[str, ...], once: bool, interval: str, most: int | None) -> None:
    """Watch queues, consumers (including Spark queries), backends and problems until Ctrl-C.

    With --json: one object per refresh.
    """
    if len(queues) > MAX_QUEUES:
        raise click.UsageError(f"at most {MAX_QUEUES} queues, because each costs a call per refresh")
    fits = max(1, min(MAX_QUEUES, shutil.get_terminal_size().lines - 12))
    looker = Looker(session, queues, most or (MAX_QUEUES if session.as_json else fits))
    pause = parse_duration(interval, "interval") / 1_000
    is_once = once or not (session.as_json or sys.stdout.isatty())
    if is_once:
        looker.prepare()
        time.sleep(ONCE_PAUSE)
    if session.as_json:
        while True:
            print_json(asdict(looker.look()))
            if once:
                return
            time.sleep(pause)
    elif is_once:
        from sluiceway.cli.common import wide_console

        wide_console().print(frame(looker.look(), session.target.url))
    else:
        _live(session, looker, pause)


def _live(session: Session, looker: Looker, pause: float) -> None:
    from rich.live import Live

    look = looker.look()
    # Leaving the block restores the terminal, also on Ctrl-C.
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
