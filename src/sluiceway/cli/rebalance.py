"""`sluiceway rebalance`: add, remove and move partitions of live queues."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from sluiceway.cli.common import (
    Rows,
    WholeNumber,
    all_items,
    counted,
    duration_option,
    per_second,
    print_json,
    print_table,
    printable,
    table,
)
from sluiceway.cli.session import Session, connected, queue_argument, queue_names
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from datetime import datetime

    from sluiceway.client import Rebalance, RebalanceBatch, RebalancePlan
    from sluiceway.contract.rebalances import Plan

T = TypeVar("T")
_ID = re.compile(r"[0-9]{15}-\S+")


@click.group()
def rebalance() -> None:
    """Add, remove and move partitions of live queues."""


def which_queues(command: Callable[..., T]) -> Callable[..., T]:
    """Adds the argument QUEUE and its alternatives `--match` and `--all` to a command."""
    every = click.option("--all", "everything", is_flag=True, help="All queues.")
    match = click.option("--match", metavar="PATTERN", help="All queues whose name matches, such as 'orders-*'.")
    return click.argument("queue", required=False, shell_complete=queue_names)(match(every(command)))


def _pattern(queue: str | None, match: str | None, everything: bool) -> str | None:
    """The pattern of `--match` or `--all`; None if a single queue is named."""
    if (queue is not None) + (match is not None) + everything != 1:
        raise click.UsageError("pass one of QUEUE, --match PATTERN and --all")
    return "*" if everything else match


_partitions = click.option(
    "--partitions",
    type=WholeNumber(1),
    help="Target number of partitions. [default: the current number, placed by the current affinities]",
)


# -- plan -------------------------------------------------------------------------------------------------------------


@rebalance.command()
@which_queues
@_partitions
@connected
def plan(session: Session, queue: str | None, match: str | None, everything: bool, partitions: int | None) -> None:
    """Show the plan of a rebalance without changing anything."""
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
        click.echo("No queue matches", err=True)


def _plans(session: Session, pattern: str, partitions: int | None) -> Iterator[tuple[str, RebalancePlan | SluicewayError]]:
    """The plan of each matching queue, or the error that prevents one."""
    for info in all_items(lambda pivot: session.client.list_queues(pivot=pivot, limit=1_000)):
        if fnmatchcase(info.queue_name, pattern):
            try:
                yield info.queue_name, session.client.plan_rebalance(info.queue_name, requested_partitions=partitions)
            except SluicewayError as error:
                if error.code not in ("rebalance_open", "queue_not_found", "invalid_request"):
                    raise
                yield info.queue_name, error


def _plan_table(found: RebalancePlan) -> Rows:
    drains, reopens = set(found.plan.drains), set(found.plan.reopens)
    rows: list[tuple[object, ...]] = []
    for each in found.partitions:
        what = "drain" if each.partition in drains else "reopen" if each.partition in reopens else "keep"
        state = "" if each.state == "available" else each.state
        items: object = "unknown" if each.items is None else each.items
        rows.append((each.partition, each.backend, what, "", items, state))
    rows += [(made.partition, made.backend, "create", _numbers(made.parents), "", "") for made in found.plan.creates]
    return table(("partition", "backend", "change", "replaces", "items now", ""), rows, right=("partition", "items now"))


def _summary(found: RebalancePlan) -> str:
    plan, now = found.plan, len(found.partitions)
    if plan.is_empty:
        return f"{found.queue_name}: no changes needed, {counted(now, 'partition')} already as requested"
    backends = Counter(each.backend for each in found.partitions if each.partition in plan.keeps)
    backends.update(each.backend for each in plan.creates)
    where = ", ".join(f"{count} on {name}" for name, count in sorted(backends.items()))
    items = sum(each.items or 0 for each in found.partitions if each.partition in plan.drains)
    text = (
        f"{found.queue_name}: from {counted(now, 'partition')} to {found.requested_partitions} ({where}): keep {len(plan.keeps)}, "
        f"create {len(plan.creates)}, drain {len(plan.drains)} with {counted(items, 'item')}"
    )
    if plan.by_key:
        return text + "; by key: a key that moves is served from its new partition once its old one has nothing left"
    return text + ("; in order: the new partition serves nothing until the old one is gone" if plan.in_order else "")


def _order(plan: Plan) -> str:
    """What a plan keeps in order, in a word."""
    return "in order" if plan.in_order else "by key" if plan.by_key else ""


def _plans_table(several: list[tuple[str, RebalancePlan | SluicewayError]]) -> Rows:
    rows: list[tuple[object, ...]] = []
    for name, found in several:
        if isinstance(found, SluicewayError):
            rows.append((name, "", "", "", "", printable(found.detail.encode(), 1_000)))
            continue
        plan = found.plan
        items = sum(each.items or 0 for each in found.partitions if each.partition in plan.drains)
        note = "no changes" if plan.is_empty else _order(plan)
        rows.append((name, f"{len(found.partitions)} to {found.requested_partitions}", len(plan.creates), len(plan.drains), items, note))
    return table(("queue", "partitions", "created", "drained", "items to drain", ""), rows, right=("created", "drained", "items to drain"))


# -- start ------------------------------------------------------------------------------------------------------------


@rebalance.command()
@which_queues
@_partitions
@click.option(
    "--drain",
    type=click.Choice(["natural", "copy"]),
    default="natural",
    show_default=True,
    help="Drain mode of removed partitions: consumers take the backlog, or it is moved to the other partitions.",
)
@click.option("--rate", metavar="N/s", callback=per_second, help="With --drain copy: maximum items per second.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@click.option("--wait", is_flag=True, help="Then watch the rebalance to its end, as `rebalance watch` does.")
@duration_option("--interval", default="1s", help="With --wait: refresh interval.")
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
    """Start a rebalance of QUEUE, or of several queues one after the other. It runs on the server, independently of this program.

    At a terminal it shows the plan and asks for confirmation. Exactly the plan that was shown is applied.
    """
    pattern = _pattern(queue, match, everything)
    if rate is not None and drain != "copy":
        raise click.UsageError("--rate needs --drain copy: a natural drain proceeds at the consumers' pace")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("this moves partitions; review `sluiceway rebalance plan`, then pass --yes")
    if pattern is not None:
        return _start_many(session, pattern, partitions, drain, rate, yes, wait, interval)
    assert queue is not None, "one of the three was given"
    plan_id: str | None = None
    if not yes:
        found = session.client.plan_rebalance(queue, requested_partitions=partitions)
        if not found.plan.is_empty:
            if not _agreed(_plan_table(found), f"{_summary(found)}.\nStart this rebalance{_how(found.plan.drains, drain, rate)}?"):
                return 0
            # The server refuses an empty plan with an error that says what to do.
            plan_id = found.plan_id
    begun = session.client.rebalance(queue, requested_partitions=partitions, drain=drain, rate=rate, plan_id=plan_id)
    text = f"Started {begun.id}"
    session.print(begun, text if wait else f"{text}. Watch it: sluiceway rebalance watch {begun.id}")
    return _watch(session, begun.id, interval) if wait else 0


def _how(drains: list[int], drain: str, rate: int | None) -> str:
    if not drains:
        return ""
    return " with a natural drain" if drain == "natural" else " with a copy drain" + (f" at {rate:,}/s" if rate else "")


def _agreed(rows: Rows, question: str) -> bool:
    print_table(rows, err=True)
    if click.confirm(question, err=True):
        return True
    click.echo("Nothing changed", err=True)
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
    if not yes and not _agreed(_plans_table(list(_plans(session, pattern, partitions))), "Start these rebalances, one after the other?"):
        return 0
    batch = session.client.rebalance_many(pattern, requested_partitions=partitions, drain=drain, rate=rate)
    session.print(batch, _batch_table(batch))
    if not batch.rebalances and not session.as_json:
        click.echo("Nothing started", err=True)
    if not wait:
        return 0
    return max((_watch(session, each.id, interval) for each in batch.rebalances), default=0)


def _batch_table(batch: RebalanceBatch) -> Rows:
    rows = [(each.queue_name, each.id, each.state) for each in batch.rebalances]
    left_out = [(each.queue_name, "", f"skipped: {printable(each.reason.encode(), 1_000)}") for each in batch.left_out]
    return table(("queue", "rebalance", ""), rows + left_out)


@rebalance.command()
@queue_argument("which")
@duration_option("--interval", default="1s", help="Refresh interval.")
@connected
def watch(session: Session, which: str, interval: str) -> int:
    """Watch the rebalance WHICH (an id, or a queue) to its end: live bars at a terminal, otherwise a line per change.

    Exits with 0 if the rebalance is done, with 3 if it was cancelled or failed. With --json: one object per refresh.
    """
    return _watch(session, _id_of(session, which), interval)


def _watch(session: Session, id: str, interval: str) -> int:
    from sluiceway.cli.rebalance_progress import watch

    return watch(session, id, interval)


def _id_of(session: Session, which: str) -> str:
    """The id itself, or the id of the queue's open or last rebalance."""
    if _ID.fullmatch(which):
        return which
    for only_open in (True, False):
        if found := session.client.list_rebalances(queue_name=which, only_open=only_open, limit=1).items:
            return found[0].id
    raise SluicewayError("rebalance_not_found", f"queue {which!r} has no rebalance")


@rebalance.command()
@queue_argument("which")
@click.option("--wait", is_flag=True, help="Then watch the rollback, as `rebalance watch` does.")
@connected
def cancel(session: Session, which: str, wait: bool) -> int:
    """Cancel the rebalance WHICH (an id, or a queue) and roll it back. Refused once a partition has been removed.

    With --wait: exits with 0 if it was cancelled.
    """
    answer = session.client.cancel_rebalance(_id_of(session, which))
    session.print(answer, f"Rebalance {answer.id}: {answer.state}")
    if not wait:
        return 0
    from sluiceway.cli.rebalance_progress import watch as watched

    return watched(session, answer.id, "1s", good="cancelled")


# -- list and show ----------------------------------------------------------------------------------------------------


@rebalance.command("list")
@click.option("--queue", help="Only rebalances of this queue.", shell_complete=queue_names)
@click.option("--open", "only_open", is_flag=True, help="Only open rebalances.")
@click.option("-n", "--count", type=WholeNumber(1, 100), default=20, show_default=True, help="Number of newest rebalances.")
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
    numbers = ("partitions", "created", "drained")
    session.print_all(
        found, table(("rebalance", "queue", "state", "step", *numbers, "started", "problem"), rows, right=numbers), "No rebalances"
    )


@rebalance.command()
@queue_argument("which")
@connected
def show(session: Session, which: str) -> None:
    """Show the rebalance WHICH (an id, or a queue): plan, progress and completed steps."""
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
    yield "requested by", f"{printable(found.actor.encode())} {found.request_id}".strip()
    yield from (
        ("started", _moment(found.created_at)),
        ("ended", _moment(found.ended_at)),
        ("waits for", found.after if found.is_open else None),
    )
    yield "creates", ", ".join(made)
    yield from (("drains", _numbers(plan.drains)), ("keeps", _numbers(plan.keeps)), ("reopens", _numbers(plan.reopens)))
    yield "drain", found.drain + (f", up to {found.rate:,}/s" if found.rate else "") + (", " + _order(plan) if _order(plan) else "")
    yield from (("to drain", found.items or None), ("moved", found.moved or None))
    if progress is not None and found.drain_at is not None:
        yield "left", f"{progress.items_left:,}, of which {progress.leased_left:,} leased, {progress.scheduled_left:,} scheduled"
        yield "time left", progress.time_left


def _numbers(partitions: list[int]) -> str:
    return ", ".join(map(str, partitions))


def _moment(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"
