"""`sluiceway spark`: run a program on Spark, capture a change stream by tasks that never end, and the jobs of other modules."""

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

from sluiceway.cli.common import EXIT_INTERRUPTED, Output, counted, duration_option, printing
from sluiceway.cli.session import Session, connected
from sluiceway.cli.spark_jobs import archive, copy, ingest, missing, pairs, process, redrive
from sluiceway.cli.stop_signal import Asked
from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sluiceway.capture import CaptureConfig
    from sluiceway.contract.capture_answers import TaskGroup
    from sluiceway.spark.capture_resident import Resident

T = TypeVar("T")

_GLANCE = 0.2
"""Seconds between two looks at whether it is to end."""
_ALARMS = 3
"""So many are in a line; `sluiceway tasks show` has all."""


@click.group()
def spark() -> None:
    """Run Spark programs that read from queues and write to them, and captures of change streams."""


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
    """Run the Python program SCRIPT with the names `spark`, a session on this machine, `settle`, and `url`, the server's.

    It finds a Java. What comes after SCRIPT is the program's.
    """
    import runpy

    try:
        from sluiceway.spark import session as spark_session
        from sluiceway.spark import settle

        running = spark_session(script.stem)
    except ModuleNotFoundError as error:
        raise missing(error) from error
    # For the clients that the program makes.
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
    """What a capture is: where from, where to, and how its tasks agree."""
    for option in reversed(
        (
            click.argument("name"),
            click.option("--stream", metavar="KIND", required=True, help="What is read: kinesis, postgres, queue, or a package's."),
            click.option("--option", "options", multiple=True, callback=pairs, help="NAME=VALUE, of the stream; may be repeated."),
            click.option("--to", "url", metavar="URL", required=True, help="The server of the queue to which the records go."),
            click.option("--queue", metavar="NAME", required=True, help="The queue to which the records go."),
            click.option("--to-key", "api_key", default="", metavar="WHERE", help="Where its API key is: env:NAME or file:PATH."),
            click.option("--ca-file", default="", metavar="PATH", help="Certificates of the authority that made the server's."),
            click.option("--meta", metavar="URL", required=True, help="The meta store; also env:NAME or file:PATH that holds the URL."),
            click.option("--log", default="meta", show_default=True, help="The members' log: meta, or kafka:HOST:PORT."),
            click.option("--limit", type=click.IntRange(1, 10_000), default=10_000, show_default=True, help="Records of a batch."),
            click.option("--preset", type=click.Choice(["log-leader", "finisher-hint"]), default="log-leader", show_default=True,
                         help="Who says where new partitions go."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@spark.command()
@_capture_options
@click.option("--resident", is_flag=True, help="By tasks that never end. There is no other way from here: micro-batches are a program's.")
@click.option("--tasks", type=click.IntRange(1), default=2, show_default=True, help="How many tasks.")
@click.option("--until-done", is_flag=True, help="End when every partition has ended and is handed on.")
@duration_option("--every", default="5s", help="How often it says how far it is.")
@click.option("--master", metavar="URL", help="Of Spark. [default: this machine, with a slot for each task]")
@click.option("--conf", metavar="NAME=VALUE", multiple=True, callback=pairs, help="A setting of Spark. May be repeated.")
@printing
def capture(
    output: Output, resident: bool, tasks: int, until_done: bool, every: str, master: str | None, conf: dict[str, str], **what: Any
) -> int:
    """Hand the records of a change stream on to a queue, by Spark tasks that divide its partitions.

    It ends at Ctrl-C or SIGTERM, when the tasks have left in order, and goes on from there when it is started again. Said twice, it
    ends without waiting for them.
    """
    if not resident:
        raise click.UsageError(
            "add --resident: tasks that never end, which hand on to a queue. Micro-batches, as rows of Spark, are a program's: "
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
    """A resident capture, from the checks before it to its last line."""

    def __init__(self, output: Output, config: CaptureConfig, tasks: int, until_done: bool, every: float) -> None:
        self._output, self._config, self._tasks, self._until_done, self._every = output, config, tasks, until_done, every
        self._trouble = ""

    def run(self, conf: dict[str, object]) -> int:
        """The exit code."""
        from sluiceway.spark.capture_resident import Resident, check_before

        # What is wrong is told now, and not when Spark has begun.
        check_before(self._config, conf, self._tasks)
        with Asked() as asked:
            self._say(f"{self._config.name}: starting Spark")
            running = _started(f"capture {self._config.name}", conf, asked)
            if running is None:
                return EXIT_INTERRUPTED
            try:
                with Resident(running, self._config, self._tasks) as job:
                    self._follow(job, asked)
                    self._say(f"{self._config.name}: stopping; the tasks give back what they have")
                last = _look(self._config)
                if last is not None:
                    # What the tasks have committed as they left is in it.
                    self._output.print(_progress(last, job, stopped=True), _line(last, job, stopped=True))
            finally:
                running.stop()
        # To be stopped is how it ends that otherwise goes on for ever.
        return EXIT_INTERRUPTED if asked.to_end and self._until_done else 0

    def _follow(self, job: Resident, asked: Asked) -> None:
        """Say how far it is, until it is to end."""
        due = time.monotonic()
        while not asked.to_end and not job.wait(_GLANCE):
            if job.trouble != self._trouble:
                self._trouble = job.trouble
                click.echo(f"{self._trouble}; it is tried again", err=True)
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
        """For people alone."""
        if not self._output.as_json:
            click.echo(text)


def _started(name: str, conf: dict[str, object], asked: Asked) -> SparkSession | None:
    """None: it was asked to end before Spark was there.

    Spark begins in another thread, because in the main one it would take Ctrl-C for itself, and is not to be interrupted.
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
    """None: it has not begun, or cannot be seen now, which need not trouble the tasks."""
    import asyncio

    from sluiceway.adapters.system import now
    from sluiceway.capture import look, there_is
    from sluiceway.capture.presenter import group_of

    try:
        if not there_is(config.meta):
            # The first task makes the file.
            return None
        found = asyncio.run(look(config.name, config.meta, config.log))
    except SluicewayError as error:
        click.echo(f"cannot see how far it is: {error.detail}", err=True)
        return None
    return group_of(found, now()) if found.begun is not None else None


def _progress(group: TaskGroup, job: Resident, *, stopped: bool = False) -> dict[str, Any]:
    """What `tasks list` has of it, with the job's tasks."""
    import msgspec

    from sluiceway.wire.json_tasks import summary

    tasks = [each._asdict() for each in job.present]
    return {**msgspec.to_builtins(summary(group)), "wanted": job.tasks, "tasks": tasks, "stopped": stopped}


def _presence(there: int, wanted: int) -> str:
    return counted(wanted, "task") if there == wanted else f"{there} of {counted(wanted, 'task')} are there"


def _line(group: TaskGroup, job: Resident, *, stopped: bool = False) -> str:
    from sluiceway.cli.task_tables import alarm_text

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
        parts.append("waits for parents that do not come: " + ", ".join(group.stuck))
    parts += [f"ALARM: {alarm_text(each)}" for each in group.alarms[:_ALARMS]]
    if len(group.alarms) > _ALARMS:
        parts.append(f"and {len(group.alarms) - _ALARMS} more")
    return "; ".join(parts)
