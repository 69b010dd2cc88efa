"""`sluiceway rebalance`: add, remove and move partitions of queues that are in use."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from sluiceway.cli.common import Rows, counted, duration_option, per_second, print_json, print_table, printable, table
from sluiceway.cli.session import Session, connected, queue_argument, queue_names
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from datetime import datetime

    from sluiceway.client import Rebalance, RebalanceBatch, RebalancePlan

T = TypeVar("T")
_ID = re.compile(r"[0-9]{15}-\S+")


@click.group()
def rebalance() -> None:
    """Add, remove and move partitions, while they are in use."""


def which_queues(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command the argument QUEUE, which may be left out with one of the options `--match` and `--all`."""
    every = click.option("--all", "everything", is_flag=True, help="All queues.")
    match = click.option("--match", metavar="PATTERN", help="All queues whose name matches, such as 'orders-*'.")
    return click.argument("queue", required=False, shell_complete=queue_names)(match(every(command)))


def _pattern(queue: str | None, match: str | None, everything: bool) -> str | None:
    """The pattern that was asked for; None: one queue was named."""
    if (queue is not None) + (match is not None) + everything != 1:
        raise click.UsageError("say which: QUEUE, or --match PATTERN, or --all")
    return "*" if everything else match


_partitions = click.option(
    "--partitions", type=click.IntRange(1), help="How many there are to be. [default: as many as now, placed by the affinities of now]"
)


# -- what it would do -------------------------------------------------------------------------------------------------


@rebalance.command()
@which_queues
@_partitions
@connected
def plan(session: Session, queue: str | None, match: str | None, everything: bool, partitions: int | None) -> None:
    """Show what a rebalance would do now, and change nothing."""
    pattern = _pattern(queue, match, everything)
    if pattern is None:
        assert queue is not None, "one of the three was given"
        found = session.client.plan_rebalance(queue, requested_partitions=partitions)
        if session.as_json:
            print_json(found)
        else:
            print_table(_plan_table(found))
            click.echo(_summary(found))
        return
    several = list(_plans(session, pattern, partitions))
    plans = [each for _, each in several if not isinstance(each, SluicewayError)]
    if session.as_json:
        for found in plans:
            print_json(found)
    elif several:
        print_table(_plans_table(several))
    else:
        click.echo("no queue matches", err=True)


def _plans(session: Session, pattern: str, partitions: int | None) -> Iterator[tuple[str, RebalancePlan | SluicewayError]]:
    """The plan of each queue that matches, or why there is none."""
    pivot: str | None = None
    while True:
        page = session.client.list_queues(pivot=pivot, limit=1_000)
        for name in (info.queue_name for info in page.items if fnmatchcase(info.queue_name, pattern)):
            try:
                yield name, session.client.plan_rebalance(name, requested_partitions=partitions)
            except SluicewayError as error:
                if error.code not in ("rebalance_open", "queue_not_found", "invalid_request"):
                    raise
                yield name, error
        pivot = page.next
        if pivot is None:
            return


def _plan_table(found: RebalancePlan) -> Rows:
    drains, reopens = set(found.plan.drains), set(found.plan.reopens)
    rows: list[tuple[object, ...]] = []
    for each in found.partitions:
        what = "drain" if each.partition in drains else "reopen" if each.partition in reopens else "keep"
        state = "" if each.state == "available" else each.state
        items: object = "unknown" if each.items is None else each.items
        rows.append((each.partition, each.backend, what, "", items, state))
    rows += [(made.partition, made.backend, "make", _numbers(made.parents), "", "") for made in found.plan.creates]
    return table(("partition", "backend", "what", "in the stead of", "items now", ""), rows, right=("partition", "items now"))


def _summary(found: RebalancePlan) -> str:
    plan, now = found.plan, len(found.partitions)
    if plan.is_empty:
        return f"{found.queue_name}: nothing to do, {counted(now, 'partition')} as wanted and where they should be"
    backends = Counter(each.backend for each in found.partitions if each.partition in plan.keeps)
    backends.update(each.backend for each in plan.creates)
    where = ", ".join(f"{count} on {name}" for name, count in sorted(backends.items()))
    items = sum(each.items or 0 for each in found.partitions if each.partition in plan.drains)
    text = (
        f"{found.queue_name}: from {counted(now, 'partition')} to {found.requested_partitions} ({where}): {len(plan.keeps)} stay, "
        f"{len(plan.creates)} made, {len(plan.drains)} drained with {counted(items, 'item')}"
    )
    return text + ("; in order: nothing is given out of the new one before the old one is gone" if plan.in_order else "")


def _plans_table(several: list[tuple[str, RebalancePlan | SluicewayError]]) -> Rows:
    rows: list[tuple[object, ...]] = []
    for name, found in several:
        if isinstance(found, SluicewayError):
            rows.append((name, "", "", "", "", printable(found.detail.encode(), 1_000)))
            continue
        plan = found.plan
        items = sum(each.items or 0 for each in found.partitions if each.partition in plan.drains)
        note = "nothing to do" if plan.is_empty else "in order" if plan.in_order else ""
        rows.append((name, f"{len(found.partitions)} to {found.requested_partitions}", len(plan.creates), len(plan.drains), items, note))
    return table(("queue", "partitions", "made", "drained", "items to drain", ""), rows, right=("made", "drained", "items to drain"))


# -- doing it ---------------------------------------------------------------------------------------------------------


@rebalance.command()
@which_queues
@_partitions
@click.option(
    "--drain",
    type=click.Choice(["natural", "copy"]),
    default="natural",
    show_default=True,
    help="How the backlog of partitions that go leaves them: consumers take it, or it is moved to the others.",
)
@click.option("--rate", metavar="N/s", callback=per_second, help="With --drain copy: move at most this many items a second.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--wait", is_flag=True, help="Then watch it to its end, as `rebalance watch` does.")
@duration_option("--interval", default="1s", help="With --wait: the time between two looks.")
@connected
def start(
    session: Session,
    queue: str | None,
    match: str | None,
    everything: bool,
    partitions: int | None,
    drain: Literal["natural", "copy"],
    rate: int | None,
    yes: bool,
    wait: bool,
    interval: str,
) -> int:
    """Begin a rebalance of QUEUE, or of several queues one after the other. It goes on whoever ends, also this program.

    Shows what it is going to do and asks, on a terminal; what was shown is what is done.
    """
    pattern = _pattern(queue, match, everything)
    if rate is not None and drain != "copy":
        raise click.UsageError("--rate goes with --drain copy: a natural drain is as fast as the consumers are")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("this moves partitions; give --yes if that is meant, and see `sluiceway rebalance plan` before")
    if pattern is not None:
        return _start_many(session, pattern, partitions, drain, rate, yes, wait, interval)
    assert queue is not None, "one of the three was given"
    plan_id: str | None = None
    if not yes:
        found = session.client.plan_rebalance(queue, requested_partitions=partitions)
        if not found.plan.is_empty:
            if not _agreed(_plan_table(found), f"{_summary(found)}.\ndo this{_how(found.plan.drains, drain, rate)}?"):
                return 0
            # Of an empty one the server says so, and what to do.
            plan_id = found.plan_id
    begun = session.client.rebalance(queue, requested_partitions=partitions, drain=drain, rate=rate, plan_id=plan_id)
    text = f"began {begun.id}"
    session.print(begun, text if wait else f"{text}; follow it with: sluiceway rebalance watch {begun.id}")
    return _watch(session, begun.id, interval) if wait else 0


def _how(drains: list[int], drain: str, rate: int | None) -> str:
    if not drains:
        return ""
    return (
        ", and let consumers take what is drained"
        if drain == "natural"
        else ", and copy what is drained" + (f", {rate:,}/s" if rate else "")
    )


def _agreed(rows: Rows, question: str) -> bool:
    from rich.console import Console

    Console(stderr=True, width=1_000_000).print(rows)
    if click.confirm(question, err=True):
        return True
    click.echo("nothing was changed", err=True)
    return False


def _start_many(
    session: Session,
    pattern: str,
    partitions: int | None,
    drain: Literal["natural", "copy"],
    rate: int | None,
    yes: bool,
    wait: bool,
    interval: str,
) -> int:
    if not yes and not _agreed(_plans_table(list(_plans(session, pattern, partitions))), "do this, one after the other?"):
        return 0
    batch = session.client.rebalance_many(pattern, requested_partitions=partitions, drain=drain, rate=rate)
    session.print(batch, _batch_table(batch))
    if not batch.rebalances and not session.as_json:
        click.echo("nothing was begun", err=True)
    if not wait:
        return 0
    return max((_watch(session, each.id, interval) for each in batch.rebalances), default=0)


def _batch_table(batch: RebalanceBatch) -> Rows:
    rows = [(each.queue_name, each.id, each.state) for each in batch.rebalances]
    left_out = [(each.queue_name, "", f"left out: {printable(each.reason.encode(), 1_000)}") for each in batch.left_out]
    return table(("queue", "rebalance", ""), rows + left_out)


@rebalance.command()
@queue_argument("which")
@duration_option("--interval", default="1s", help="The time between two looks.")
@connected
def watch(session: Session, which: str, interval: str) -> int:
    """Watch the rebalance WHICH (an id, or a queue) to its end: a picture in a terminal, elsewhere a line for each change.

    Ends with 0 if it is done, with 3 if it was cancelled or has failed. With --json: one object a look.
    """
    return _watch(session, _id_of(session, which), interval)


def _watch(session: Session, id: str, interval: str) -> int:
    from sluiceway.cli.rebalance_progress import watch

    return watch(session, id, interval)


def _id_of(session: Session, which: str) -> str:
    """The id that was given, or that of the queue's open rebalance, or of its last one."""
    if _ID.fullmatch(which):
        return which
    for only_open in (True, False):
        if found := session.client.list_rebalances(queue_name=which, only_open=only_open, limit=1).items:
            return found[0].id
    raise SluicewayError("rebalance_not_found", f"there was no rebalance of the queue {which!r}")


@rebalance.command()
@queue_argument("which")
@click.option("--wait", is_flag=True, help="Then watch it go back, as `rebalance watch` does.")
@connected
def cancel(session: Session, which: str, wait: bool) -> int:
    """Have the rebalance WHICH (an id, or a queue) go back to how it was. Refused once a partition was removed.

    With --wait: ends with 0 if it was cancelled.
    """
    answer = session.client.cancel_rebalance(_id_of(session, which))
    session.print(answer, f"{answer.id} is {answer.state}")
    if not wait:
        return 0
    from sluiceway.cli.rebalance_progress import watch as watched

    return watched(session, answer.id, "1s", good="cancelled")


# -- looking ----------------------------------------------------------------------------------------------------------


@rebalance.command("list")
@click.option("--queue", help="Only those of this queue.", shell_complete=queue_names)
@click.option("--open", "only_open", is_flag=True, help="Only those that have not ended.")
@click.option("-n", "--count", type=click.IntRange(1, 100), default=20, show_default=True, help="At most this many, the newest.")
@connected
def list_(session: Session, queue: str | None, only_open: bool, count: int) -> None:
    """List the rebalances, newest first."""
    found = session.client.list_rebalances(queue_name=queue, only_open=only_open, limit=count).items
    rows = [
        (
            *(each.id, each.queue_name, each.state, each.step if each.is_open else "-", each.requested_partitions),
            *(len(each.plan.creates), len(each.plan.drains), _moment(each.created_at), printable((each.problem or "").encode())),
        )
        for each in found
    ]
    numbers = ("partitions", "made", "drained")
    session.print_all(found, table(("rebalance", "queue", "state", "step", *numbers, "begun", "problem"), rows, right=numbers), "none")


@rebalance.command()
@queue_argument("which")
@connected
def show(session: Session, which: str) -> None:
    """Show the rebalance WHICH (an id, or a queue): what it does, how far it is, what is done."""
    found = session.client.get_rebalance(_id_of(session, which))
    rows: list[tuple[str, object]] = [(name, value) for name, value in _facts(found) if value not in (None, "")]
    for each in found.steps:
        which_one = "" if each.partition is None else f", partition {each.partition}"
        rows.append((f"{each.step} done", f"{_moment(each.at)} by {each.instance}{which_one}"))
    session.print(found, table(("", ""), rows))


def _facts(found: Rebalance) -> Iterator[tuple[str, object]]:
    plan, progress = found.plan, found.progress
    made = [f"{each.partition} on {each.backend}" for each in plan.creates]
    yield from (("rebalance", found.id), ("queue", found.queue_name), ("state", found.state))
    if found.is_open:
        yield "step", found.step
    yield "problem", printable((found.problem or "").encode(), 1_000)
    yield "retries", found.retries or None
    yield "asked for by", f"{printable(found.actor.encode())} {found.request_id}".strip()
    yield from (
        ("begun", _moment(found.created_at)),
        ("ended", _moment(found.ended_at)),
        ("waits for", found.after if found.is_open else None),
    )
    yield "makes", ", ".join(made)
    yield from (("drains", _numbers(plan.drains)), ("keeps", _numbers(plan.keeps)), ("reopens", _numbers(plan.reopens)))
    yield "drain", found.drain + (f", {found.rate:,}/s at most" if found.rate else "") + (", in order" if plan.in_order else "")
    yield from (("to drain", found.items or None), ("moved", found.moved or None))
    if progress is not None and found.drain_at is not None:
        yield "left", f"{progress.items_left:,}, of which {progress.leased_left:,} leased, {progress.scheduled_left:,} scheduled"
        yield "time left", progress.time_left


def _numbers(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))


def _moment(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"
