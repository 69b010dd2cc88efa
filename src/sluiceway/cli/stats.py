"""Commands on counts, items and partitions: stats, explain, partition."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from sluiceway.cli.common import Rows, WholeNumber, all_items, print_json, printable, table, wide_console
from sluiceway.cli.session import Session, connected, paused_verbs, queue_argument, queue_names

if TYPE_CHECKING:
    from sluiceway.client import FailedAttempt, PartitionStats, QueueStats
    from sluiceway.client.answers import PartitionPin, Reasons

WATCH_PAUSE = 1.0
_COUNTS = ("ready", "total_leased", "scheduled", "produced", "completed", "retried", "expired", "dead")
_TITLES = ("ready", "leased", "scheduled", "produced", "completed", "retried", "expired", "dead")


@click.command()
@queue_argument()
@click.argument("item_id", metavar="ID")
@connected
def explain(session: Session, queue: str, item_id: str) -> None:
    """Explain the state of the item ID of QUEUE, and why it is not served."""
    answer = session.client.explain(queue, item_id)
    facts = (
        ("item", answer.id),
        ("key", answer.key and printable(answer.key.encode())),
        ("unique key", answer.unique_key and printable(answer.unique_key.encode())),
        ("state", answer.state),
        ("why", printable(answer.reason.encode(), 1_000)),
        ("ready items ahead", answer.ahead),
        ("attempts", answer.attempts),
        ("due", _moment(answer.due_at)),
        ("expires", _moment(answer.expires_at)),
        ("lease", answer.lease_id),
        ("leased by", answer.client_id and printable(answer.client_id.encode())),
        ("leased until", _moment(answer.lease_deadline)),
    )
    session.print(answer, table(("", ""), [(name, value) for name, value in facts if value is not None]))
    if not session.as_json:
        for failure in answer.failures:
            click.echo(_failure(failure))


def _failure(failure: FailedAttempt) -> str:
    """`Attempt 3, 2026-01-31 08:00:00 UTC, worker-1 on node-7, 1.5s: ValueError: no such customer`, and the trace below it."""
    who = " on ".join(printable(each.encode()) for each in (failure.client_id, failure.host) if each)
    parts = (f"Attempt {failure.attempt}", _moment(failure.at), who, failure.handler_time)
    lines = [", ".join(str(part) for part in parts if part) + f": {printable(failure.reason.encode(), 1_000) or 'no reason given'}"]
    lines += [f"    {printable(line.encode(), 300)}" for line in failure.trace.splitlines()]
    return "\n".join(lines)


def _moment(at: datetime | None) -> str | None:
    return None if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


@click.command()
@click.argument("queue", required=False, shell_complete=queue_names)
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl-C.")
@click.option("--reasons", is_flag=True, help="Count the items of a dead queue by reason.")
@connected
def stats(session: Session, queue: str | None, watch: bool, reasons: bool) -> None:
    """Count the items of QUEUE by partition, or those of every queue."""
    if watch and reasons:
        raise click.UsageError("--watch and --reasons exclude each other")
    if queue is None:
        if watch:
            raise click.UsageError("--watch needs a queue; `sluiceway top` watches all of them")
        if reasons:
            raise click.UsageError("--reasons needs a queue: a dead queue, such as orders-dead")
        _print_all_stats(session)
        return
    if reasons:
        _print_reasons(session, session.client.reasons(queue))
        return
    answer = session.client.stats(queue)
    if not watch:
        session.print(answer, _stats_table(answer))
        if not session.as_json and (paused := paused_verbs(session, queue)):
            click.echo(f"Paused: {' and '.join(paused)}", err=True)
        for line in () if session.as_json else (*open_circuits(answer), *binding_limits(answer)):
            click.echo(line, err=True)
    elif session.as_json:
        while True:
            print_json(answer)
            time.sleep(WATCH_PAUSE)
            answer = session.client.stats(queue)
    else:
        from rich.live import Live

        with Live(_stats_table(answer), console=wide_console(), auto_refresh=False) as live:
            while True:
                time.sleep(WATCH_PAUSE)
                live.update(_stats_table(session.client.stats(queue)), refresh=True)


def _print_reasons(session: Session, answer: Reasons) -> None:
    rows = [(each.items, printable(each.reason.encode(), 200) or "no reason given", each.source or "") for each in answer]
    other = answer.items - sum(each.items for each in answer)
    if other > 0:
        rows.append((other, "no known reason", ""))
    session.print(answer, table(("items", "reason", "died in"), rows, right=("items",)) if rows else "No items")
    for number in () if session.as_json else answer.skipped:
        click.echo(f"warning: partition {number} was not counted: it is not available", err=True)


def binding_limits(stats: QueueStats) -> list[str]:
    """What each instance says of a limit of the queue for which consumers wait."""
    shares = [each for each in stats.logical_queues if each.limited_by is not None]
    name = {each.instance: f" on {each.instance}" if len(stats.logical_queues) > 1 else "" for each in shares}
    return [f"At the queue's {each.limited_by}{name[each.instance]}: {each.lease_waiting} waiting consumers" for each in shares]


def open_circuits(stats: QueueStats) -> list[str]:
    """What each instance's circuit breaker says, unless it is closed."""
    found = []
    for share in stats.logical_queues:
        circuit = share.circuit
        if circuit is not None and circuit.state != "closed":
            where = f" on {share.instance}" if len(stats.logical_queues) > 1 else ""
            probes = f"next probes at {_moment(circuit.until)}" if circuit.until is not None else "probes are under way"
            found.append(f"Circuit open{where} since {_moment(circuit.since)}: too many items fail; {probes}")
    return found


def _print_all_stats(session: Session) -> None:
    names = [info.queue_name for info in all_items(lambda pivot: session.client.list_queues(pivot=pivot))]
    answers = [session.client.stats(name) for name in names]
    counts, titles = _counted(part for each in answers for part in each.partitions)
    rows = [(each.queue_name, *(sum(getattr(part, name) for part in each.partitions) for name in counts)) for each in answers]
    session.print_all(answers, table(("queue", *titles), rows, right=titles), "No queues yet")


def _counted(parts: Iterable[PartitionStats]) -> tuple[Sequence[str], Sequence[str]]:
    """The counts to show, and their titles. What is servable is shown where keys hold some of what is ready back."""
    if any(part.servable < part.ready for part in parts):
        return ("ready", "servable", *_COUNTS[1:]), ("ready", "servable", *_TITLES[1:])
    return _COUNTS, _TITLES


def _stats_table(stats: QueueStats) -> Rows:
    rows: list[tuple[object, ...]] = []
    counts, titles = _counted(stats.partitions)
    for part in stats.partitions:
        state = "" if part.state == "available" else f" {part.state}"
        state += " degraded" if part.degraded else ""
        rows.append((f"{part.partition}{state}", *(getattr(part, name) for name in counts)))
    rows.append(("all", *(sum(getattr(part, name) for part in stats.partitions) for name in counts)))
    return table(("part", *titles), rows, right=titles)


def state_of(part: PartitionStats) -> str:
    return part.state + (", degraded" if part.degraded else "")


@click.group()
def partition() -> None:
    """List, explain, pause, resume and pin partitions."""


@partition.command("list")
@queue_argument()
@connected
def list_(session: Session, queue: str) -> None:
    """List the partitions of QUEUE with backend, state, owner and counts."""
    found = session.client.stats(queue)
    owned = [(each.instance, part) for each in found.logical_queues for part in each.partitions]
    owned.sort(key=lambda pair: pair[1].partition)
    numbers = ("ready", "leased", "scheduled", "leases", "failures", "commit ms")
    rows = [
        (
            *(each.partition, each.backend, state_of(each), owner or "-"),
            *(each.ready, each.total_leased, each.scheduled, each.leases, each.failures, f"{each.commit_time_ms:.1f}"),
        )
        for owner, each in owned
    ]
    columns = ("partition", "backend", "state", "owner", *numbers)
    shown = [fields_of(each) | {"owner": owner} for owner, each in owned] if session.as_json else found.partitions
    session.print_all(shown, table(columns, rows, right=numbers), "No partitions")


def fields_of(part: PartitionStats) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(part)


@partition.command()
@queue_argument()
@click.argument("number", type=WholeNumber(0))
@connected
def pause(session: Session, queue: str, number: int) -> None:
    """Stop producing to and leasing from partition NUMBER of QUEUE until `partition resume`. Leased items can still be settled."""
    answer = session.client.pause_partition(queue, number)
    session.print(answer, f"Paused partition {number} of {queue}")


@partition.command()
@queue_argument()
@click.argument("number", type=WholeNumber(0))
@connected
def resume(session: Session, queue: str, number: int) -> None:
    """Resume partition NUMBER of QUEUE after `partition pause`."""
    answer = session.client.resume_partition(queue, number)
    session.print(answer, f"Resumed partition {number} of {queue}")


@partition.command()
@queue_argument()
@click.argument("number", type=WholeNumber(0))
@click.option("--instance", metavar="NAME", help="Name of an instance (`cluster.name`).")
@click.option("--zone", metavar="ZONE", help="Zone: to any instance in it.")
@connected
def pin(session: Session, queue: str, number: int, instance: str | None, zone: str | None) -> None:
    """Pin partition NUMBER of QUEUE to an instance or a zone. While none is there, it is served elsewhere."""
    if (instance is None) == (zone is None):
        raise click.UsageError("give either --instance or --zone")
    answer = session.client.pin_partition(queue, number, instance=instance, zone=zone)
    session.print(answer, f"Pinned partition {number} of {queue} to {_pinned_to(answer)}")


@partition.command()
@queue_argument()
@click.argument("number", type=WholeNumber(0))
@connected
def unpin(session: Session, queue: str, number: int) -> None:
    """Let the cluster choose the instance of partition NUMBER of QUEUE again."""
    answer = session.client.unpin_partition(queue, number)
    session.print(answer, f"Unpinned partition {number} of {queue}")


@partition.command()
@click.argument("queue", required=False, shell_complete=queue_names)
@connected
def pins(session: Session, queue: str | None) -> None:
    """List the pinned partitions of QUEUE, or of every queue. Needs the scope `read:*` or `admin`."""
    found = [each for each in session.client.list_instances().pins if queue in (None, each.queue_name)]
    rows = [(each.queue_name, each.partition, _pinned_to(each)) for each in found]
    session.print_all(found, table(("queue", "partition", "pinned to"), rows, right=("partition",)), "No pinned partitions")


def _pinned_to(pin: PartitionPin) -> str:
    return f"instance {pin.instance}" if pin.instance is not None else f"zone {pin.zone}"


@partition.command("explain")
@queue_argument()
@click.argument("number", type=WholeNumber(0))
@connected
def explain_partition(session: Session, queue: str, number: int) -> None:
    """Explain which instance owns partition NUMBER of QUEUE, and why."""
    answer = session.client.explain_partition(queue, number)
    facts = (
        ("partition", answer.partition),
        ("owner", answer.owner or "none"),
        ("address", answer.address),
        ("state", answer.state),
        ("why", printable(answer.reason.encode(), 1_000)),
        ("waits for", ", ".join(answer.waits_for) or None),
        ("backend", answer.backend),
        ("era", answer.era),
        ("grant", answer.grant),
    )
    session.print(answer, table(("", ""), [(name, value) for name, value in facts if value is not None]))
