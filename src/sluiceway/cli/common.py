"""What the commands share: options, how errors end a command, how answers are printed."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError

if TYPE_CHECKING:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from sluiceway.client import Ignored

T = TypeVar("T")
PROGRAM = "sluiceway"
DEFAULT_PORT = 2319
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"

EXIT_INTERNAL = 1
EXIT_REFUSED = 3
EXIT_UNAVAILABLE = 4
EXIT_UNKNOWN = 5
EXIT_INTERRUPTED = 130

_NEXT = {
    "queue_not_found": "`sluiceway queue list` shows the queues, `sluiceway queue create NAME` makes one",
    "queue_exists": "`sluiceway queue info NAME` shows it",
    "queue_not_empty": "complete what is in it, or delete it all the same with --force",
    "storage_full": "`sluiceway doctor --data DIR` shows what is left on the disk; consume or clear items, or delete queues",
    "queue_paused": "`sluiceway queue resume NAME` lets it go on",
    "version_conflict": "`sluiceway queue info NAME` shows the settings and the version that it has now",
    "unauthenticated": "give a key: SLUICEWAY_API_KEY, or a context (sluiceway context add --help); an administrator makes one with "
    "`sluiceway key create`, also without a server: `sluiceway key create NAME --scope admin --data DIR` (and the --config of `serve`)",
    "forbidden": "use a key with that scope; an administrator makes one with `sluiceway key create NAME --scope SCOPE`",
    "key_not_found": "`sluiceway key list` shows the keys and their ids",
    "not_found": "is this server an older version, or one with admin_listen? Then the calls for administrators are at that address: --url",
    "restart_required": "undo these changes; all but the removal of a backend that holds partitions can also wait for a restart",
    "stale_ids": "what was not ignored is done; leave out these ids, or leave out --strict",
    "rebalance_open": "`sluiceway rebalance watch QUEUE` shows how far it is, `sluiceway rebalance cancel QUEUE` has it go back",
    "plan_changed": "look at what it would do now: `sluiceway rebalance plan QUEUE`",
    "nothing_to_rebalance": "name another number of --partitions, or change a partition_affinity in the configuration and reload it "
    "(`sluiceway config reload`)",
    "rebalance_not_found": "`sluiceway rebalance list` shows those that there are",
    "not_cancellable": "let it end; another rebalance can then bring back what is wanted",
    "key_conflict": "the key was used for other items; take a new one",
    "outcome_unknown": "it may or may not have happened; look with `sluiceway stats QUEUE` before you repeat it",
}


class Failure(click.ClickException):
    """A command that ended with an error of Sluiceway's: one line on stderr (one JSON object with --json) and an exit code."""

    def __init__(self, error: SluicewayError, url: str = "", as_json: bool = False, done: str = "") -> None:
        super().__init__(error.detail)
        self.error, self.url, self.as_json, self.done = error, url, as_json, done

    @property
    def ignored(self) -> Sequence[Ignored]:
        """With `stale_ids`, what was ignored."""
        return cast("Sequence[Ignored]", getattr(self.error, "ignored", ()))

    def show(self, file: object = None) -> None:
        error = self.error
        if self.as_json:
            names = ("code", "detail", "retryable", "field", "request_id")
            problem = {name: getattr(error, name, None) for name in names}
            if ignored := [{"id": each.id, "reason": each.reason} for each in self.ignored]:
                problem["ignored"] = ignored
            click.echo(json.dumps(problem | ({"done": self.done} if self.done else {})), err=True)
            return
        click.echo(f"error: {error.detail} ({error.code})", err=True)
        if self.done:
            click.echo(self.done, err=True)
        for each in self.ignored:
            click.echo(f"ignored {each.id}: {each.reason.replace('_', ' ')}", err=True)
        hint = _NEXT.get(error.code)
        if error.code == "unavailable" and error.detail.startswith("cannot reach"):
            hint = f"is a server running at {self.url}? Start one with: sluiceway dev"
        if hint:
            click.echo(f"hint: {hint}", err=True)


def exit_code(error: SluicewayError) -> int:
    if error.code == "outcome_unknown":
        return EXIT_UNKNOWN
    if error.code == "internal":
        return EXIT_INTERNAL
    return EXIT_UNAVAILABLE if error.retryable else EXIT_REFUSED


def duration_option(
    name: str, *, help: str, default: str | None = None, metavar: str = "DURATION"
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """An option that takes a duration, or one for each word of `metavar`; checked where it is typed and passed on as text."""
    count = len(metavar.split())

    def check(ctx: click.Context, param: click.Parameter, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for text in (value,) if isinstance(value, str) else value or ():
            try:
                parse_duration(text, "duration")
            except SluicewayError:
                raise click.BadParameter(f"{text!r} is not a duration such as 500ms, 30s or 1h30m", ctx, param) from None
        return value

    return click.option(name, nargs=count, metavar=metavar, default=default, show_default=default is not None, callback=check, help=help)


_RATE = re.compile(r"([1-9][0-9]{0,8})(?:/s)?")


def per_second(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Checks an option that takes items per second."""
    found = _RATE.fullmatch(value) if value is not None else None
    if value is not None and found is None:
        raise click.BadParameter(f"{value!r} is not a number of items per second such as 100/s", ctx, param)
    return int(found[1]) if found else None


def json_option(command: Callable[..., T]) -> Callable[..., T]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line; errors too.")(command)


class Output:
    """How a command prints: for people, or as JSON for programs."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def progress(self) -> bool:
        """Whether someone looks at stderr who wants to see how far it is."""
        return sys.stderr.isatty() and not self.as_json

    def print(self, answer: msgspec.Struct | dict[str, Any], text: str | Rows) -> None:
        """The answer as one line of JSON, or the text for people."""
        if self.as_json:
            print_json(answer)
        elif isinstance(text, str):
            click.echo(text)
        else:
            print_table(text)

    def print_all(self, answers: Sequence[msgspec.Struct | Mapping[str, Any]], rows: Rows, none: str) -> None:
        """One line of JSON each, or the table for people; `none` is what they are told if there is nothing to show."""
        if self.as_json:
            for answer in answers:
                print_json(answer)
        elif answers:
            print_table(rows)
        else:
            click.echo(none, err=True)


def printing(command: Callable[..., T]) -> Callable[..., T]:
    """Gives a command that talks to no server the option `--json`, and an `Output` as its first argument."""

    @json_option
    @functools.wraps(command)
    def run(as_json: bool, **options: object) -> T:
        try:
            return command(Output(as_json), **options)
        except SluicewayError as error:
            raise Failure(error, as_json=as_json) from error

    return run


# -- printing ---------------------------------------------------------------------------------------------------------


def print_json(answer: msgspec.Struct | Mapping[str, Any]) -> None:
    import msgspec

    click.echo(msgspec.json.encode(answer))


@dataclass(frozen=True, slots=True)
class Rows:
    """A plain table, laid out when it is shown: a program that asked for JSON does not wait for what does that."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    right: Iterable[str]

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        numbers = set(self.right)
        result = Table(box=None, pad_edge=False, header_style="bold", show_header=any(self.columns))
        for name in self.columns:
            result.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
        for row in self.rows:
            result.add_row(*(Text(f"{value:,}" if isinstance(value, int) else str(value)) for value in row))
        return result


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> Rows:
    """A plain table; the columns named in `right` hold numbers. Columns without names make no heading."""
    return Rows(columns, list(rows), right)


def wide_console() -> Console:
    """A console that cuts no column short: a number without its end is a wrong number."""
    from rich.console import Console

    return Console(width=1_000_000)


def print_table(rows: Rows) -> None:
    wide_console().print(rows)


def counted(number: int, what: str) -> str:
    """`1 item`, `2 items`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(payload: bytes, longest: int = 200) -> str:
    """Bytes of unknown origin for a terminal: what could steer it is escaped."""
    text = payload[: longest * 4].decode("utf-8", "backslashreplace")
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= longest and len(payload) <= longest * 4 else text[:longest] + "…"


# -- reading ----------------------------------------------------------------------------------------------------------


def arguments_or_stdin(values: Sequence[str], what: str) -> Iterator[str]:
    """The values, or for a single `-` the lines of stdin."""
    if tuple(values) != ("-",):
        yield from values
        return
    if sys.stdin.isatty():
        click.echo(f"reading {what} from the terminal, one a line; end with Ctrl-D", err=True)
    for line in sys.stdin.buffer:
        if value := line.decode("utf-8", "replace").strip():
            yield value


def chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    chunk: list[T] = []
    for value in values:
        chunk.append(value)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
