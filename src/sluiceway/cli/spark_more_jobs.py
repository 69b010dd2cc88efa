"""`sluiceway spark archive`, `redrive` and `copy`: a queue into Parquet files that can be verified; dead items back, those that SQL
chooses; what a rebalance drains, or a whole queue, to elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from sluiceway.cli.common import EXIT_INTERRUPTED, EXIT_REFUSED, counted, duration_option, per_second, printable
from sluiceway.cli.session import Session, queue_argument, queue_names
from sluiceway.cli.spark_jobs import JobOptions, a_job, ended, job, missing

if TYPE_CHECKING:
    from sluiceway.spark.jobs.archive_files import Verified
    from sluiceway.spark.jobs.copy import Copied
    from sluiceway.spark.jobs.redrive_job import Look, Redriven


@click.command()
@click.argument("queue", required=False, shell_complete=queue_names)
@click.option("--to", metavar="DIR", type=click.Path(file_okay=False), help="The archive: a folder that does not exist yet, or is one.")
@click.option("--checkpoint", metavar="DIR", type=click.Path(file_okay=False), help="Where it is noted how far it is.")
@click.option("--by", type=click.Choice(["day", "hour"]), default="day", show_default=True, help="When the items were enqueued, in UTC.")
@click.option("--consumer", metavar="NAME", default="archive", show_default=True, help="The owner of the leases.")
@click.option("--once", is_flag=True, help="End when what is ready now is archived.")
@duration_option("--interval", default="10s", help="How often a batch begins, without --once.")
@click.option("--max-items", type=click.IntRange(1), default=50_000, show_default=True, help="Items in one batch.")
@duration_option("--hold-for", help="How long items stay leased while it stands still. [default: 7d, or what the queue allows]")
@click.option("--verify", "verified", metavar="DIR", type=click.Path(), help="Check that archive, file by file, and nothing else.")
@a_job
def archive(
    session: Session,
    job_options: JobOptions,
    queue: str | None,
    to: str | None,
    checkpoint: str | None,
    once: bool,
    verified: str | None,
    **options: Any,
) -> int:
    """Move the items of QUEUE into Parquet files, each of them once, until Ctrl-C. They are gone from the queue then.

    With --verify: compare every file of an archive with what was written. Ends with 3 if something is missing or damaged.
    """
    if verified is not None:
        if queue or to or checkpoint or once:
            raise click.UsageError("--verify goes alone")
        return _verify(session, verified)
    if queue is None or to is None or checkpoint is None:
        raise click.UsageError("name the QUEUE, the archive (--to DIR) and a --checkpoint DIR; or an archive to --verify")
    with job(session, job_options, "archive", queue, watched=True) as running:
        from sluiceway.spark import jobs

        what: dict[str, Any] = {"to": to, "checkpoint": checkpoint, "once": once, "tell": running.tell, "stop": running.stop}
        followed = jobs.archive(running.spark, running.place, **what, **options)
        return ended(session, running.asked.to_end, followed, "archived", once)


def _verify(session: Session, root: str) -> int:
    try:
        from sluiceway.spark.jobs.archive_files import verify
    except ModuleNotFoundError as error:
        raise missing(error) from error
    found = verify(root)
    session.print(found, _told(found))
    return EXIT_REFUSED if found.problems else 0


def _told(found: Verified) -> str:
    batches = "1 batch" if found.batches == 1 else f"{found.batches:,} batches"
    text = f"{counted(found.items, 'item')} in {batches}, {counted(found.files, 'file')}, {found.bytes:,} bytes"
    end = counted(len(found.problems), "problem") if found.problems else "all as it was written"
    return "\n".join([*(f"{problem.path} {problem.what}" for problem in found.problems), f"{text}: {end}"])


# -- redrive ----------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.option(
    "--where", metavar="SQL", default="true", help="Only items for which this holds, such as \"reason like 'timeout%'\". [default: all]"
)
@click.option("--target", metavar="QUEUE", help="Where they go. [default: the queue that each came from]")
@click.option("--dry-run", is_flag=True, help="Count, and show some: of the next 10,000 items of each partition. Moves nothing.")
@click.option("--checkpoint", metavar="DIR", type=click.Path(file_okay=False), help="Where it is noted how far it is.")
@click.option("--rate", metavar="N/s", callback=per_second, help="At most this many items a second.")
@click.option("--consumer", metavar="NAME", default="redrive", show_default=True, help="The owner of the leases.")
@duration_option("--hold-for", default="1d", help="How long items stay leased while it stands still.")
@a_job
def redrive(
    session: Session,
    job_options: JobOptions,
    queue: str,
    where: str,
    target: str | None,
    dry_run: bool,
    checkpoint: str | None,
    **options: Any,
) -> int:
    """Send the items of the dead queue QUEUE for which a condition holds back to where they came from.

    The condition may speak of id, origin, source, reason, attempts, enqueued_at, kind, encoding, reference, headers and payload.
    """
    if not dry_run and checkpoint is None:
        raise click.UsageError("give a --checkpoint DIR, or --dry-run")
    with job(session, job_options, "redrive", queue, watched=True) as running:
        from sluiceway.spark import jobs

        if dry_run:
            seen = jobs.look(running.spark, running.place, where=where, target=target)
            session.print(_as_json(seen), _seen(seen))
            return 0
        assert checkpoint is not None
        what: dict[str, Any] = {"checkpoint": checkpoint, "where": where, "target": target, "tell": running.tell, "stop": running.stop}
        done = jobs.redrive(running.spark, running.place, **what, **options)
        session.print(done, _sent(done))
        return EXIT_INTERRUPTED if done.stopped else 0


def _as_json(seen: Look) -> dict[str, Any]:
    """A payload is shown as `lease` shows it to people: what is no text is escaped."""
    examples = [{name: getattr(each, name) for name in each.__struct_fields__} for each in seen.examples]
    for each in examples:
        each["payload"] = printable(each["payload"])
    return {name: getattr(seen, name) for name in seen.__struct_fields__} | {"examples": examples}


def _seen(seen: Look) -> str:
    lines = [f"would send back {seen.matched:,} of {counted(seen.looked, 'item')}", *_by_target(seen.targets)]
    if seen.homeless:
        lines.append(f"{seen.homeless:,} more match and came from no queue; name a --target for them")
    for each in seen.examples:
        reason = printable((each.reason or "").encode())
        lines.append(f"for example {each.id}, attempts {each.attempts}, {reason}: {printable(each.payload)}")
    return "\n".join(lines)


def _sent(done: Redriven) -> str:
    text = f"sent back {done.redriven:,} of {counted(done.looked, 'item')}"
    return "\n".join([text + ("; stopped" if done.stopped else ""), *_by_target(done.targets)])


def _by_target(targets: dict[str, int]) -> list[str]:
    return [f"{count:,} to {printable(name.encode())}" for name, count in sorted(targets.items())]


# -- copy -------------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.option("--checkpoint", metavar="DIR", required=True, type=click.Path(file_okay=False), help="Where it is noted how far it is.")
@click.option("--to-queue", metavar="NAME", help="Copy all that is ready, to this queue. [default: what drains, to the open partitions]")
@click.option("--to-url", metavar="URL", help="The server of that queue. [default: the same]")
@click.option("--to-key", default="", metavar="WHERE", help="Where the API key for --to-url is: env:NAME or file:PATH.")
@click.option("--to-ca-file", default="", metavar="PATH", help="Certificates of the authority that made the certificate of --to-url.")
@click.option("--follow", is_flag=True, help="With --to-queue: go on with what comes, until Ctrl-C.")
@click.option("--max-items", type=click.IntRange(1), default=50_000, show_default=True, help="Items in one batch.")
@click.option("--consumer", metavar="NAME", default="copy", show_default=True, help="The owner of the leases.")
@duration_option("--hold-for", default="1d", help="How long items stay leased while it stands still.")
@a_job
def copy(
    session: Session,
    job_options: JobOptions,
    queue: str,
    to_queue: str | None,
    to_url: str | None,
    to_key: str,
    to_ca_file: str,
    follow: bool,
    **options: Any,
) -> int:
    """Move what is ready in the draining partitions of QUEUE to its open ones, or all that is ready in it to another queue, of any server.

    Each item is there once. They are new items, whose headers say what they were: sluiceway-origin, -attempts and -enqueued-at.
    """
    if to_queue is None and (to_url or follow):
        raise click.UsageError("--to-url and --follow go with --to-queue")
    if to_url is None and (to_key or to_ca_file):
        raise click.UsageError("--to-key and --to-ca-file go with --to-url")
    with job(session, job_options, "copy", queue, watched=True) as running:
        from sluiceway.spark import jobs

        to = None
        if to_queue is not None and to_url is not None:
            to = jobs.Place(to_url, to_queue, api_key=to_key, ca_file=to_ca_file, request_timeout=job_options.request_timeout)
        elif to_queue is not None:
            to = replace(running.place, queue=to_queue)
        what: dict[str, Any] = {"to": to, "follow": follow, "tell": running.tell, "stop": running.stop}
        done = jobs.copy(running.spark, running.place, **what, **options)
        session.print(done, _copied(done))
        return EXIT_INTERRUPTED if done.stopped and not follow else 0


def _copied(done: Copied) -> str:
    batches = "1 batch" if done.batches == 1 else f"{done.batches:,} batches"
    return f"copied {counted(done.items, 'item')} in {batches}; {done.left:,} left" + ("; stopped" if done.stopped else "")
