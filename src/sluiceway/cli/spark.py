"""`sluiceway spark`: run a program on Spark, or capture a change stream by tasks that never end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sluiceway.cli.common import Output, counted, duration_option, printing
from sluiceway.cli.session import Session, connected
from sluiceway.kernel.clock import format_time, parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    from sluiceway.capture import CaptureConfig, Look
    from sluiceway.spark.capture_resident import Resident

T = TypeVar("T")

_GLANCE = 0.2
"""Seconds between two looks at whether it is to end."""
_PHASES = ("owned", "ready", "created", "finished")


@click.group()
def spark() -> None:
    """Run Spark programs that read from queues and write to them, and captures of change streams."""


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
        raise _missing(error) from error
    # For the clients that the program makes.
    os.environ["SLUICEWAY_URL"] = session.target.url
    if session.target.api_key:
        os.environ["SLUICEWAY_API_KEY"] = session.target.api_key
    sys.argv = [str(script), *arguments]
    try:
        runpy.run_path(str(script), {"spark": running, "settle": settle, "url": session.target.url}, run_name="__main__")
    finally:
        running.stop()


def _missing(error: ModuleNotFoundError) -> click.ClickException:
    return click.ClickException(f"Spark needs {error.name}; install it with: pip install 'sluiceway[spark]'")


# -- capture ----------------------------------------------------------------------------------------------------------


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name or name in found:
            raise click.BadParameter(f"{text[:80]!r} is not NAME=VALUE with a name of its own", ctx, param)
        found[name] = value
    return found


def _capture_options(command: Callable[..., T]) -> Callable[..., T]:
    """What a capture is: where from, where to, and how its tasks agree."""
    for option in reversed(
        (
            click.argument("name"),
            click.option("--stream", metavar="KIND", required=True, help="What is read: kinesis, postgres or queue."),
            click.option("--option", "options", multiple=True, callback=_pairs, help="NAME=VALUE, of the stream; may be repeated."),
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
@click.option("--conf", metavar="NAME=VALUE", multiple=True, callback=_pairs, help="A setting of Spark. May be repeated.")
@printing
def capture(
    output: Output, resident: bool, tasks: int, until_done: bool, every: str, master: str | None, conf: dict[str, str], **what: Any
) -> None:
    """Hand the records of a change stream on to a queue, by Spark tasks that divide its partitions.

    It ends at Ctrl-C or SIGTERM, when the tasks have left in order, and goes on from there when it is started again.
    """
    if not resident:
        raise click.UsageError("say --resident; for micro-batches, spark.readStream.format('sluiceway-capture') in a program")
    try:
        from sluiceway.capture import CaptureConfig

        config = CaptureConfig(**what)
        from sluiceway.spark import session as spark_session
        from sluiceway.spark.capture_resident import Resident, settings

        given = {"spark.master": master} if master is not None else {}
        with _Asked() as asked:
            running = spark_session(f"capture {config.name}", **{**settings(tasks), **given, **conf})
            try:
                # Spark has taken Ctrl-C for itself.
                asked.listen()
                with Resident(running, config, tasks) as job:
                    _follow(output, config, job, asked, parse_duration(every, "every") / 1000, until_done)
            finally:
                running.stop()
    except ModuleNotFoundError as error:
        raise _missing(error) from error


class _Asked:
    """Whether somebody wants it to end, by Ctrl-C or SIGTERM."""

    def __init__(self) -> None:
        self.to_end = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Asked:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        return self

    def listen(self) -> None:
        for number in self._before:
            signal.signal(number, self._ask)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self.to_end = True


def _follow(output: Output, config: CaptureConfig, job: Resident, asked: _Asked, every: float, until_done: bool) -> None:
    """Say how far it is, until it is to end."""
    due = time.monotonic()
    while not asked.to_end and not job.wait(_GLANCE):
        if time.monotonic() < due:
            continue
        due = time.monotonic() + every
        look = _look(config)
        if look is None:
            continue
        progress = _progress(look, job)
        output.print(progress, _line(progress))
        if until_done and look.state.sown and not look.state.partitions:
            return


def _look(config: CaptureConfig) -> Look | None:
    """None: it has not begun, or cannot be seen now, which need not trouble the tasks."""
    import asyncio

    from sluiceway.capture import look

    try:
        found = asyncio.run(look(config.name, config.meta, config.log))
    except SluicewayError as error:
        # Before the first task has begun, there may be no file.
        if error.code != "invalid_request":
            click.echo(f"cannot see how far it is: {error.detail}", err=True)
        return None
    return found if found.begun is not None else None


def _progress(look: Look, job: Resident) -> dict[str, Any]:
    """The same for people and programs. Times in milliseconds."""
    phases: Counter[str] = Counter(each.phase for each in look.state.partitions.values())
    behind = [look.positions[token].kept.behind for token in look.state.active() if token in look.positions]
    return {
        "name": look.name,
        "wanted": job.tasks,
        "tasks": [each._asdict() for each in job.present],
        "partitions": {phase: phases[phase] for phase in _PHASES},
        "records": sum(each.kept.records for each in look.positions.values()),
        "lag_ms": max((each for each in behind if each is not None), default=None),
        "watermark": None if look.watermark is None else format_time(look.watermark),
        "stuck": {token: list(parents) for token, parents in look.stuck.items()},
    }


def _line(progress: dict[str, Any]) -> str:
    missing = progress["wanted"] - len(progress["tasks"])
    parts = [
        f"{progress['name']}: {counted(len(progress['tasks']), 'task')}" + (f" ({missing} missing)" if missing else ""),
        "partitions: " + ", ".join(f"{count} {phase}" for phase, count in progress["partitions"].items()),
        counted(progress["records"], "record"),
    ]
    if progress["lag_ms"] is not None:
        parts.append(f"{progress['lag_ms'] / 1000:.1f} s behind")
    if progress["watermark"] is not None:
        parts.append(f"watermark {progress['watermark']}")
    if progress["stuck"]:
        parts.append("waits for parents that do not come: " + ", ".join(progress["stuck"]))
    return "; ".join(parts)
