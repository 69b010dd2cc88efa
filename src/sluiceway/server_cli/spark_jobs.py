"""Spark jobs: `sluiceway spark ingest`, `process`, `archive`, `redrive` and `copy`."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import (
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    Output,
    WholeNumber,
    counted,
    duration_option,
    from_root,
    json_option,
    per_second,
    printable,
)
from sluiceway.cli.session import Session, flags, queue_argument, queue_names, server_options
from sluiceway.cli.stop_signal import Asked
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError, invalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.progress import Progress as Bars

    from sluiceway.spark.jobs import Place, Progress
    from sluiceway.spark.jobs.archive_files import Verified
    from sluiceway.spark.jobs.common import Followed
    from sluiceway.spark.jobs.copy import Copied
    from sluiceway.spark.jobs.redrive_job import Look, Redriven

T = TypeVar("T")


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Parses repeated NAME=VALUE options with unique names."""
    found: dict[str, str] = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name or name in found:
            raise click.BadParameter(f"{text[:80]!r} is not NAME=VALUE with a unique name", ctx, param)
        found[name] = value
    return found


def missing(error: ModuleNotFoundError) -> click.ClickException:
    return click.ClickException(f"Spark needs {error.name}; install it with: pip install 'sluiceway[spark]'")


# -- shared by all jobs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Spark settings of a job, and its progress interval in seconds."""

    master: str | None
    conf: dict[str, str]
    every: float
    request_timeout: str


@dataclass(frozen=True, slots=True)
class Job:
    """A running job: its Spark session, server and queue, progress callback, and stop signal."""

    spark: SparkSession
    place: Place
    tell: Callable[[Progress], None]
    asked: Asked

    def stop(self) -> bool:
        return self.asked.to_end


def a_job(command: Callable[..., T]) -> Callable[..., T]:
    """Decorates a job: adds the common options, and passes a `Session` and `JobOptions` as the first arguments."""

    @server_options
    @json_option
    @duration_option("--request-timeout", default="2m", help="Retry calls for this long while the server is unreachable.")
    @duration_option("--every", default="5s", help="Progress interval.")
    @click.option("--conf", metavar="NAME=VALUE", multiple=True, callback=pairs, help="Spark setting. May be repeated.")
    @click.option("--master", metavar="URL", help="Spark master. [default: this machine]")
    @functools.wraps(command)
    def run(
        url: str | None,
        context_name: str | None,
        ca_file: str | None,
        as_json: bool,
        master: str | None,
        conf: dict[str, str],
        every: str,
        request_timeout: str,
        **options: object,
    ) -> T:
        session = Session(flags(url, context_name, ca_file), as_json or bool(from_root("as_json")))
        try:
            return command(session, JobOptions(master, conf, parse_duration(every, "every") / 1000, request_timeout), **options)
        except SluicewayError as error:
            raise session.failed(error) from error

    return run


@contextmanager
def job(session: Session, options: JobOptions, name: str, queue: str, *, watched: bool = False) -> Iterator[Job]:
    """A job whose Spark session lives as long as this context. Raises if Spark or Java is missing.

    With `watched` the queries report their progress to the server, which shows it in `top`.
    """
    target = session.target
    # Passed in the environment, because Spark displays its options; set before Spark starts, so that its processes inherit it.
    os.environ["SLUICEWAY_API_KEY"] = target.api_key or ""
    os.environ["SLUICEWAY_CA_FILE"] = target.ca_file or ""
    try:
        from sluiceway.spark import session as spark_session
        from sluiceway.spark import watch
        from sluiceway.spark.jobs import Place

        place = Place(target.url, queue, request_timeout=options.request_timeout)
        place.server()
        with Asked() as asked, Telling(session, options.every) as telling:
            settings = {"spark.master": options.master} if options.master is not None else {}
            running = spark_session(f"{name} {queue}", **{**settings, **options.conf})
            try:
                # Spark has replaced the handler of Ctrl-C.
                asked.listen()
                with closing(watch(running, target.url)) if watched else nullcontext():
                    yield Job(running, place, telling, asked)
            finally:
                running.stop()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("pyspark", "py4j", "pandas"):
            raise missing(error) from error
        raise


class Telling:
    """Shows a job's progress: a bar at a terminal, otherwise a line per interval; on stdout with `--json`, else on stderr."""

    def __init__(self, output: Output, every: float) -> None:
        self._output, self._every = output, every
        self._due = time.monotonic() + every
        self._bars: Bars | None = None
        self._task: Any = None

    def __enter__(self) -> Telling:
        if self._output.progress:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bars.add_task("Starting Spark", total=None)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if self._bars is not None:
            done = progress.tasks_done or 0
            self._bars.update(self._task, description=_line(progress), total=progress.tasks, completed=done, refresh=True)
            return
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._every
        if self._output.as_json:
            self._output.print(progress, "")
        else:
            click.echo(_line(progress), err=True)


def _line(progress: Progress) -> str:
    if progress.tasks is not None:
        return f"{progress.job}: {progress.tasks_done or 0:,} of {counted(progress.tasks, 'task')}"
    return f"{progress.job}: {counted(progress.items, 'item')} to batch {progress.batch}"


def ended(session: Session, asked: bool, followed: Followed, done: str, once: bool) -> int:
    """Print the result of a query. Returns the exit code."""
    text = f"{done} {counted(followed.items, 'item')} in " + ("1 batch" if followed.batches == 1 else f"{followed.batches:,} batches")
    session.print(followed, text + ("; stopped" if followed.stopped else ""))
    # A stop is the regular end of an endless query, and an interruption with --once.
    return EXIT_INTERRUPTED if once and asked and followed.stopped else 0


# -- ingest -----------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.argument("inputs", nargs=-1, metavar="[INPUT...]", type=click.Path())
@click.option("--format", "format_", type=click.Choice(["csv", "json", "parquet", "text"]), help="[default: by the extension]")
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, callback=pairs, help="Option of Spark's reader. May be repeated.")
@click.option("--payload-column", "payload", metavar="NAME", help="Payload column. [default: the whole row as JSON, or the line]")
@click.option("--kind-column", "kind", metavar="NAME", help="Column with the kind.")
@click.option("--reference-column", "reference", metavar="NAME", help="Column with the reference.")
@click.option("--key-column", "key", metavar="NAME", help="Column with the item's key.")
@click.option("--kind", "every_kind", metavar="TEXT", help="Kind of all items.")
@click.option("--items", is_flag=True, help="Rows are items: payload, kind, encoding, reference, key, priority, headers, enqueue_at.")
@click.option("--create", is_flag=True, help="Create the queue if it does not exist.")
@click.option("--partitions", type=WholeNumber(1), help="With --create: number of partitions.")
@click.option(
    "--write-id", metavar="TEXT", help="Id of the load. [default: derived from the files' paths, sizes and times, and the options]"
)
@click.option("--watch", metavar="FOLDER", type=click.Path(), help="Ingest files that appear in this folder, until Ctrl-C.")
@click.option("--checkpoint", metavar="DIR", type=click.Path(file_okay=False), help="With --watch: folder of the checkpoint.")
@click.option("--schema", metavar="DDL", help="With --watch: column schema. [default: from the present files]")
@click.option("--once", is_flag=True, help="With --watch: stop when all present files are stored.")
@a_job
def ingest(
    session: Session,
    job_options: JobOptions,
    queue: str,
    inputs: tuple[str, ...],
    format_: str | None,
    options: dict[str, str],
    create: bool,
    partitions: int | None,
    write_id: str | None,
    watch: str | None,
    checkpoint: str | None,
    schema: str | None,
    once: bool,
    **shape: Any,
) -> int:
    """Store each row or line of files (CSV, JSON lines, Parquet, text) in QUEUE as an item.

    Repeating the command adds nothing within the queue's key window (a day, unless set lower).
    """
    _check_ingest(inputs, watch, checkpoint, schema, once, write_id, create, partitions)
    with job(session, job_options, "ingest", queue) as running:
        from sluiceway.spark import jobs

        what: dict[str, Any] = {"format": format_, "options": options, "create": create, "partitions": partitions, "tell": running.tell}
        what["shape"] = jobs.Shape(**shape)
        if watch is not None:
            assert checkpoint is not None
            more: dict[str, Any] = {"checkpoint": checkpoint, "schema": schema, "once": once, "stop": running.stop}
            followed = jobs.watch(running.spark, watch, running.place, **more, **what)
            return ended(session, running.asked.to_end, followed, "Stored", once)

        def announce(write_id: str, files: int) -> None:
            if not session.as_json:
                click.echo(f"ingest: {counted(files, 'file')}, write id {write_id}", err=True)

        with _interruptible(running):
            found = jobs.ingest(running.spark, inputs, running.place, write_id=write_id, announce=announce, **what)
    text = f"Stored {counted(found.items, 'item')} of {counted(found.files, 'file')} in {counted(found.chunks, 'chunk')}"
    session.print(found, text + (f", {found.repeated:,} of them by an earlier run" if found.repeated else ""))
    return 0


def _check_ingest(
    inputs: tuple[str, ...],
    watch: str | None,
    checkpoint: str | None,
    schema: str | None,
    once: bool,
    write_id: str | None,
    create: bool,
    partitions: int | None,
) -> None:
    if bool(inputs) == (watch is not None):
        raise click.UsageError("pass the files to store, or a folder to --watch")
    if watch is not None and checkpoint is None:
        raise click.UsageError("--watch needs --checkpoint")
    if watch is not None and write_id is not None:
        raise click.UsageError("--write-id is for files; --watch uses its checkpoint instead")
    if watch is None and (checkpoint or schema or once):
        raise click.UsageError("--checkpoint, --schema and --once need --watch")
    if partitions is not None and not create:
        raise click.UsageError("--partitions needs --create")


@contextmanager
def _interruptible(running: Job) -> Iterator[None]:
    """Makes Ctrl-C cancel Spark's jobs instead of waiting for them."""
    import threading

    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if running.stop():
                running.spark.sparkContext.cancelAllJobs()
                return

    watcher = threading.Thread(target=watch, name="sluiceway-interrupt", daemon=True)
    watcher.start()
    try:
        yield
    except SluicewayError:
        if running.stop():
            raise KeyboardInterrupt from None
        raise
    finally:
        over.set()
        watcher.join()


# -- process ----------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option("--checkpoint", metavar="DIR", required=True, type=click.Path(file_okay=False), help="Folder of the checkpoint.")
@click.option("--consumer", metavar="NAME", default="process", show_default=True, help="Consumer name of the leases.")
@click.option("--once", is_flag=True, help="Stop when the items that are ready now are processed.")
@click.option("--max-items", type=WholeNumber(1), help="Maximum items per batch. [default: 50,000]")
@duration_option("--hold-for", help="Lease duration while the job is stopped. [default: 7d, or the queue's maximum]")
@click.option("--strict", is_flag=True, help="Fail on items without an outcome instead of completing them.")
@a_job
def process(session: Session, job_options: JobOptions, queue: str, function: str, once: bool, **options: Any) -> int:
    """Process the items of QUEUE with a Python function, batch by batch, and settle them by its result, until Ctrl-C.

    The function takes a DataFrame of items and returns one with the columns id and outcome (done, retry or dead).
    """
    _find_modules_here()
    module, attribute = split_name(function)
    with job(session, job_options, "process", queue, watched=True) as running:
        from sluiceway.spark import jobs

        # Imported with a session: decorators such as `udf` need one.
        work = find_function(module, attribute)
        try:
            followed = jobs.process(running.spark, work, running.place, once=once, tell=running.tell, stop=running.stop, **options)
        except SluicewayError:
            raise
        except Exception as error:
            # An error of the function: a traceback as text, one object with --json.
            if not session.as_json:
                raise
            raise SluicewayError("internal", "".join(traceback.format_exception(error))) from None
        return ended(session, running.asked.to_end, followed, "Processed", once)


def _find_modules_here() -> None:
    """Put the current folder first on the module path, as `python -m` does, here and in Spark's processes."""
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))


def split_name(name: str) -> tuple[str, str]:
    """Module and function of MODULE:FUNCTION. Raises `invalid_request` for another form or an unknown module."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise invalid("function", f"{name[:80]!r} is not MODULE:FUNCTION, such as shop.orders:judge")
    if find_spec(module.partition(".")[0]) is None:
        raise _no_module(module)
    return module, attribute


def find_function(module: str, attribute: str) -> Callable[..., Any]:
    """Import the function. Raises `invalid_request` if it does not exist; errors of the user's module pass through."""
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            # A missing dependency of the user's module.
            raise
        raise _no_module(module) from error
    if not callable(found):
        raise invalid("function", f"the module {module} has no function {attribute}")
    return found  # type: ignore[no-any-return]


def _no_module(module: str) -> SluicewayError:
    return invalid("function", f"there is no module {module} in {os.getcwd()} or among the installed ones")


# -- archive, redrive, copy -------------------------------------------------------------------------------------------


@click.command()
@click.argument("queue", required=False, shell_complete=queue_names)
@click.option("--to", metavar="DIR", type=click.Path(file_okay=False), help="Archive folder, new or existing.")
@click.option("--checkpoint", metavar="DIR", type=click.Path(file_okay=False), help="Folder of the checkpoint.")
@click.option(
    "--by", type=click.Choice(["day", "hour"]), default="day", show_default=True, help="Folder granularity by enqueue time, in UTC."
)
@click.option("--consumer", metavar="NAME", default="archive", show_default=True, help="Consumer name of the leases.")
@click.option("--once", is_flag=True, help="Stop when the items that are ready now are archived.")
@duration_option("--interval", default="10s", help="Batch interval, without --once.")
@click.option("--max-items", type=WholeNumber(1), default=50_000, show_default=True, help="Maximum items per batch.")
@duration_option("--hold-for", help="Lease duration while the job is stopped. [default: 7d, or the queue's maximum]")
@click.option("--verify", "verified", metavar="DIR", type=click.Path(), help="Only verify this archive, file by file.")
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
    """Move the items of QUEUE into Parquet files, each exactly once, until Ctrl-C. Archived items leave the queue.

    With --verify: check every file of an archive. Exits with 3 if files are missing or damaged.
    """
    if verified is not None:
        if queue or to or checkpoint or once:
            raise click.UsageError("--verify excludes all other options")
        return _verify(session, verified)
    if queue is None or to is None or checkpoint is None:
        raise click.UsageError("pass QUEUE, --to DIR and --checkpoint DIR, or an archive to --verify")
    with job(session, job_options, "archive", queue, watched=True) as running:
        from sluiceway.spark import jobs

        what: dict[str, Any] = {"to": to, "checkpoint": checkpoint, "once": once, "tell": running.tell, "stop": running.stop}
        followed = jobs.archive(running.spark, running.place, **what, **options)
        return ended(session, running.asked.to_end, followed, "Archived", once)


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
    end = counted(len(found.problems), "problem") if found.problems else "no problems"
    return "\n".join([*(f"{problem.path} {problem.what}" for problem in found.problems), f"{text}: {end}"])


# -- redrive ----------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.option("--where", metavar="SQL", default="true", help="Condition, such as \"reason like 'timeout%'\". [default: all]")
@click.option("--target", metavar="QUEUE", help="Target queue. [default: each item's source queue]")
@click.option("--dry-run", is_flag=True, help="Count and show examples from the next 10,000 items of each partition without moving any.")
@click.option("--checkpoint", metavar="DIR", type=click.Path(file_okay=False), help="Folder of the checkpoint.")
@click.option("--rate", metavar="N/s", callback=per_second, help="Maximum items per second.")
@click.option("--consumer", metavar="NAME", default="redrive", show_default=True, help="Consumer name of the leases.")
@duration_option("--hold-for", default="1d", help="Lease duration while the job is stopped.")
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
    """Move the items of the dead queue QUEUE that match a condition back to their source queues.

    The condition may use id, origin, source, reason, attempts, enqueued_at, kind, encoding, reference, key, priority, unique_key, headers
    and payload.
    """
    if not dry_run and checkpoint is None:
        raise click.UsageError("pass --checkpoint DIR, or --dry-run")
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
    """The result with payloads as text, non-printable characters escaped."""
    examples = [{name: getattr(each, name) for name in each.__struct_fields__} for each in seen.examples]
    for each in examples:
        each["payload"] = printable(each["payload"])
    return {name: getattr(seen, name) for name in seen.__struct_fields__} | {"examples": examples}


def _seen(seen: Look) -> str:
    lines = [f"Would send back {seen.matched:,} of {counted(seen.looked, 'item')}", *_by_target(seen.targets)]
    if seen.homeless:
        lines.append(f"{seen.homeless:,} more match but have no source queue; pass a --target for them")
    for each in seen.examples:
        reason = printable((each.reason or "").encode())
        lines.append(f"Example: {each.id}, attempts {each.attempts}, {reason}: {printable(each.payload)}")
    return "\n".join(lines)


def _sent(done: Redriven) -> str:
    text = f"Sent back {done.redriven:,} of {counted(done.looked, 'item')}"
    return "\n".join([text + ("; stopped" if done.stopped else ""), *_by_target(done.targets)])


def _by_target(targets: dict[str, int]) -> list[str]:
    return [f"{count:,} to {printable(name.encode())}" for name, count in sorted(targets.items())]


# -- copy -------------------------------------------------------------------------------------------------------------


@click.command()
@queue_argument()
@click.option("--checkpoint", metavar="DIR", required=True, type=click.Path(file_okay=False), help="Folder of the checkpoint.")
@click.option(
    "--to-queue", metavar="NAME", help="Move all ready items to this queue. [default: only draining partitions, to the open ones]"
)
@click.option("--to-url", metavar="URL", help="Server of that queue. [default: the same]")
@click.option("--to-key", default="", metavar="WHERE", help="API key for --to-url: env:NAME or file:PATH.")
@click.option("--to-ca-file", default="", metavar="PATH", help="Certificate authorities for --to-url.")
@click.option("--follow", is_flag=True, help="With --to-queue: continue with new items until Ctrl-C.")
@click.option("--max-items", type=WholeNumber(1), default=50_000, show_default=True, help="Maximum items per batch.")
@click.option("--consumer", metavar="NAME", default="copy", show_default=True, help="Consumer name of the leases.")
@duration_option("--hold-for", default="1d", help="Lease duration while the job is stopped.")
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
    """Move ready items from the draining partitions of QUEUE to its open ones, or all ready items to another queue of any server.

    Each item is moved exactly once. It becomes a new item with the headers sluiceway-origin, -attempts and -enqueued-at.
    """
    if to_queue is None and (to_url or follow):
        raise click.UsageError("--to-url and --follow need --to-queue")
    if to_url is None and (to_key or to_ca_file):
        raise click.UsageError("--to-key and --to-ca-file need --to-url")
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
    return f"Copied {counted(done.items, 'item')} in {batches}; {done.left:,} left" + ("; stopped" if done.stopped else "")
