"""`sluiceway spark`: programs, resident captures of change streams, and jobs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import EXIT_INTERRUPTED, Output, WholeNumber, counted, duration_option, printing
from sluiceway.cli.session import Session, connected
from sluiceway.cli.stop_signal import Asked
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.terminal_text import plain
from sluiceway.server_cli.spark_jobs import archive, copy, ingest, missing, pairs, process, redrive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluiceway.capture import CaptureConfig
    from sluiceway.contract.capture_answers import TaskGroup
    from sluiceway.spark.capture_resident import Resident

T = TypeVar("T")

_GLANCE = 0.2
"""Seconds between two checks for a stop request."""
_ALARMS = 3
"""Maximum alarms in a line; `sluiceway tasks show` lists all."""


@click.group()
def spark() -> None:
    """Run Spark programs and jobs on queues, and captures of change streams."""


spark.add_command(ingest)
spark.add_command(process)
spark.add_command(archive)
spark.add_command(redrive)
spark.add_command(copy)


@spark.command(context_settings={"allow_interspersed_args": False})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, metavar="[ARGUMENT...]")
@connected
def run(session: Session, script: Path, arguments: tuple[str, ...]) -> None:
    """Run the Python program SCRIPT with the globals `spark` (a local session), `settle` and `url` (the server's).

    A Java installation is found automatically. Arguments after SCRIPT are passed to the program.
    """
    import runpy

    try:
        from sluiceway.spark import session as spark_session
        from sluiceway.spark import settle

        running = spark_session(script.stem)
    except ModuleNotFoundError as error:
        raise missing(error) from error
    # Clients in the program read these.
    os.environ["SLUICEWAY_URL"] = session.target.url
    if session.target.api_key:
        os.environ["SLUICEWAY_API_KEY"] = session.target.api_key
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), {"spark": running, "settle": settle, "url": session.target.url}, run_name="__main__")
    finally:
        running.stop()


# -- capture ----------------------------------------------------------------------------------------------------------


def _capture_options(command: Callable[..., T]) -> Callable[..., T]:
    """Adds the options of a capture: source, target and coordination."""
    for option in reversed(
        (
            click.argument("name"),
            click.option("--stream", metavar="KIND", required=True, help="Kind of stream: kinesis, postgres, queue, or one of a package."),
            click.option("--option", "options", multiple=True, callback=pairs, help="Stream option NAME=VALUE. May be repeated."),
            click.option("--to", "url", metavar="URL", required=True, help="Server of the target queue."),
            click.option("--queue", metavar="NAME", required=True, help="Target queue."),
            click.option("--to-key", "api_key", default="", metavar="WHERE", help="API key of that server: env:NAME or file:PATH."),
            click.option("--ca-file", default="", metavar="PATH", help="Certificate authorities of that server."),
            click.option("--meta", metavar="URL", required=True, help="Meta store: a URL, or env:NAME or file:PATH with one."),
            click.option("--log", default="meta", show_default=True, help="Sync log: meta, or kafka:HOST:PORT."),
            click.option("--limit", type=WholeNumber(1, 10_000), default=10_000, show_default=True, help="Maximum records per batch."),
            click.option("--preset", type=click.Choice(["log-leader", "finisher-hint"]), default="log-leader", show_default=True,
                         help="Assignment of new partitions."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@spark.command()
@_capture_options
@click.option("--resident", is_flag=True, help="Run as long-lived tasks. Required: micro-batches need a program of your own.")
@click.option("--tasks", type=WholeNumber(1), default=2, show_default=True, help="Number of tasks.")
@click.option("--until-done", is_flag=True, help="Stop when every partition has ended and is delivered.")
@duration_option("--every", default="5s", help="Progress interval.")
@click.option("--master", metavar="URL", help="Spark master. [default: this machine, with a slot per task]")
@click.option("--conf", metavar="NAME=VALUE", multiple=True, callback=pairs, help="Spark setting. May be repeated.")
@printing
def capture(
    output: Output, resident: bool, tasks: int, until_done: bool, every: str, master: str | None, conf: dict[str, str], **what: Any
) -> int:
    """Deliver the records of a change stream to a queue, with Spark tasks that divide its partitions.

    Ctrl-C or SIGTERM stops it once the tasks have released their partitions; a restart resumes there. A second signal stops it at once.
    """
    if not resident:
        raise click.UsageError(
            "pass --resident, for long-lived tasks that deliver to a queue. For micro-batches of rows, write a program: "
            "spark.readStream.format('sluiceway-capture')"
        )
    try:
        from sluiceway.capture import CaptureConfig

        config = CaptureConfig(**what)
        from sluiceway.spark.capture_resident import settings

        given = {"spark.master": master} if master is not None else {}
        return _Capture(output, config, tasks, until_done, parse_duration(every, "every") / 1000).run({**settings(tasks), **given, **conf})
    except ModuleNotFoundError as error:
        raise missing(error) from error


class _Capture:
    """A run of a resident capture, from its checks to the final progress line."""

    def __init__(self, output: Output, config: CaptureConfig, tasks: int, until_done: bool, every: float) -> None:
        self._output, self._config, self._tasks, self._until_done, self._every = output, config, tasks, until_done, every
        self._trouble = ""

    def run(self, conf: dict[str, object]) -> int:
        """Run until it is done or stopped. Returns the exit code."""
        from sluiceway.spark.capture_resident import Resident, check_before

        # Report errors before Spark starts.
        check_before(self._config, conf, self._tasks)
        with Asked() as asked:
            self._say(f"{self._config.name}: starting Spark")
            running = _started(f"capture {self._config.name}", conf, asked)
            if running is None:
                return EXIT_INTERRUPTED
            try:
                with Resident(running, self._config, self._tasks) as job:
                    self._follow(job, asked)
                    self._say(f"{self._config.name}: stopping; the tasks release their partitions")
                last = _look(self._config)
                if last is not None:
                    # Includes the last commits of the tasks.
                    self._output.print(_progress(last, job, stopped=True), _line(last, job, stopped=True))
            finally:
                running.stop()
        # A stop is the regular end unless --until-done was given.
        return EXIT_INTERRUPTED if asked.to_end and self._until_done else 0

    def _follow(self, job: Resident, asked: Asked) -> None:
        """Print progress until the capture is to stop."""
        due = time.monotonic()
        while not asked.to_end and not job.wait(_GLANCE):
            if job.trouble != self._trouble:
                self._trouble = job.trouble
                click.echo(f"{self._trouble}; retrying", err=True)
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._every
            group = _look(self._config)
            if group is None:
                self._say(f"{self._config.name}: {_presence(len(job.present), self._tasks)}")
                continue
            self._output.print(_progress(group, job), _line(group, job))
            if self._until_done and group.sown and not group.partitions:
                return

    def _say(self, text: str) -> None:
        """Print a line of text, except with --json."""
        if not self._output.as_json:
            click.echo(text)


def _started(name: str, conf: dict[str, object], asked: Asked) -> SparkSession | None:
    """The Spark session, or None if a stop was requested before it was ready.

    Spark starts in another thread: in the main thread it would handle Ctrl-C itself.
    """
    from sluiceway.spark import session

    begun: Future[SparkSession] = Future()

    def begin() -> None:
        try:
            begun.set_result(session(name, **conf))
        except BaseException as error:
            begun.set_exception(error)

    threading.Thread(target=begin, name="sluiceway-spark-start", daemon=True).start()
    while not asked.to_end:
        with contextlib.suppress(TimeoutError):
            return begun.result(_GLANCE)
    return None


def _look(config: CaptureConfig) -> TaskGroup | None:
    """The capture's progress, or None if it has not begun or cannot be read now. The tasks are unaffected."""
    import asyncio

    from sluiceway.adapters.system import now
    from sluiceway.capture import look, there_is
    from sluiceway.capture.presenter import group_of

    try:
        if not there_is(config.meta):
            # The first task creates the file.
            return None
        found = asyncio.run(look(config.name, config.meta, config.log))
    except SluicewayError as error:
        click.echo(f"Progress unavailable: {plain(error.detail)}", err=True)
        return None
    return group_of(found, now()) if found.begun is not None else None


def _progress(group: TaskGroup, job: Resident, *, stopped: bool = False) -> dict[str, Any]:
    """The fields of `tasks list`, plus the job's tasks."""
    import msgspec

    from sluiceway.wire.json_tasks import summary

    tasks = [each._asdict() for each in job.present]
    return {**msgspec.to_builtins(summary(group)), "wanted": job.tasks, "tasks": tasks, "stopped": stopped}


def _presence(there: int, wanted: int) -> str:
    return counted(wanted, "task") if there == wanted else f"{there} of {counted(wanted, 'task')}"


def _line(group: TaskGroup, job: Resident, *, stopped: bool = False) -> str:
    from sluiceway.server_cli.task_tables import alarm_text

    parts = [
        f"{group.name}: {'stopped' if stopped else _presence(len(job.present), job.tasks)}",
        "partitions: " + ", ".join(f"{count} {phase}" for phase, count in group.state_of.items()),
        counted(group.records, "record"),
    ]
    if group.behind is not None:
        parts.append(f"{group.behind} behind")
    if group.watermark is not None:
        parts.append(f"watermark {group.watermark:%Y-%m-%dT%H:%M:%SZ}")
    if group.stuck:
        parts.append("waiting for missing parents: " + ", ".join(group.stuck))
    parts += [f"ALARM: {alarm_text(each)}" for each in group.alarms[:_ALARMS]]
    if len(group.alarms) > _ALARMS:
        parts.append(f"and {len(group.alarms) - _ALARMS} more")
    return "; ".join(parts)
