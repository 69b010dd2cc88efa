"""Shared by all commands: options, errors and exit codes, output."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from unicodedata import combining, east_asian_width

import click

from sluiceway.kernel.clock import parse_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.terminal_text import escaped, plain

if TYPE_CHECKING:
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from sluiceway.client import Ignored

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
PROGRAM = "sluiceway"
DEFAULT_PORT = 2319
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

EXIT_INTERNAL = 1
EXIT_REFUSED = 3
EXIT_UNAVAILABLE = 4
EXIT_UNKNOWN = 5
EXIT_INTERRUPTED = 130

_NEXT = {
    "queue_not_found": "list the queues with `sluiceway queue list`, or create one with `sluiceway queue create NAME`",
    "queue_exists": "see `sluiceway queue info NAME`",
    "queue_not_empty": "complete its items first, or delete them too with --force",
    "storage_full": "free disk space: consume or clear items, or delete queues; `sluiceway doctor --data DIR` shows the space left",
    "queue_paused": "resume it with `sluiceway queue resume NAME`",
    "version_conflict": "read the current settings and version with `sluiceway queue info NAME`",
    "unauthenticated": "set SLUICEWAY_API_KEY or use a context (sluiceway context add --help); an administrator creates keys with "
    "`sluiceway key create`, without a server: `sluiceway key create NAME --scope admin --data DIR` (plus the --config of `serve`)",
    "forbidden": "use a key with that scope; an administrator creates one with `sluiceway key create NAME --scope SCOPE`",
    "key_not_found": "list the keys and their ids with `sluiceway key list`",
    "not_found": "the server may be older, or serve administration calls only at its admin_listen address: pass that as --url",
    "restart_required": "undo these changes, or restart the server; a backend that holds partitions cannot be removed either way",
    "stale_ids": "the other items are done; leave out these ids, or omit --strict",
    "rebalance_open": "watch it with `sluiceway rebalance watch QUEUE`, or roll it back with `sluiceway rebalance cancel QUEUE`",
    "plan_changed": "review the new plan: `sluiceway rebalance plan QUEUE`",
    "nothing_to_rebalance": "pass another number of --partitions, or change a partition_affinity in the configuration and reload it "
    "(`sluiceway config reload`)",
    "rebalance_not_found": "list the rebalances with `sluiceway rebalance list`",
    "not_cancellable": "wait until it ends, then start another rebalance",
    "key_conflict": "the idempotency key was used for other items; choose a new one",
    "outcome_unknown": "it may or may not have happened; check with `sluiceway stats QUEUE` before you repeat it",
}


class Failure(click.ClickException):
    """An error that ends a command: one line on stderr (one JSON object with --json) and an exit code."""

    def __init__(self, error: SluicewayError, url: str = "", as_json: bool = False, done: str = "") -> None:
        super().__init__(error.detail)
        self.error, self.url, self.as_json, self.done = error, url, as_json, done

    @property
    def ignored(self) -> Sequence[Ignored]:
        """The ignored ids of a `stale_ids` error."""
        return cast("Sequence[Ignored]", getattr(self.error, "ignored", ()))

    def show(self, file: object = None) -> None:
        error = self.error
        if self.as_json:
            names = ("code", "detail", "retryable", "field", "request_id")
            problem = {name: getattr(error, name, None) for name in names}
            if hint := self._hint():
                problem["hint"] = hint
            if ignored := [{"id": each.id, "reason": each.reason} for each in self.ignored]:
                problem["ignored"] = ignored
            click.echo(json.dumps(problem | ({"done": self.done} if self.done else {})), err=True)
            return
        click.echo(f"error: {plain(error.detail)} ({plain(error.code)})", err=True)
        if self.done:
            click.echo(self.done, err=True)
        for each in self.ignored:
            click.echo(f"ignored {plain(each.id)}: {plain(each.reason.replace('_', ' '))}", err=True)
        if hint := self._hint():
            click.echo(f"hint: {hint}", err=True)

    def _hint(self) -> str | None:
        """What to do next."""
        if self.error.code == "unavailable" and self.error.detail.startswith("cannot reach"):
            return f"is a server running at {self.url}? Start one: sluiceway dev"
        return _NEXT.get(self.error.code)


def exit_code(error: SluicewayError) -> int:
    if error.code == "outcome_unknown":
        return EXIT_UNKNOWN
    if error.code == "internal":
        return EXIT_INTERNAL
    return EXIT_UNAVAILABLE if error.retryable else EXIT_REFUSED


class WholeNumber(click.IntRange):
    """A whole number within bounds. A refusal names the bounds, which click leaves out if the text is not a number."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            bounds = f"of at least {self.min}" if self.max is None else f"from {self.min} to {self.max:,}"
            self.fail(f"{str(value)!r} is not a whole number {bounds}", param, ctx)


def duration_option(
    name: str, *, help: str, default: str | None = None, metavar: str = "DURATION"
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """An option with one duration per word of `metavar`, validated and passed on as text."""
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
    """Validates an option in items per second."""
    found = _RATE.fullmatch(value) if value is not None else None
    if value is not None and found is None:
        raise click.BadParameter(f"{value!r} is not a number of items per second such as 100/s", ctx, param)
    return int(found[1]) if found else None


def from_root(name: str) -> object:
    """The value of an option that was given before the command: `sluiceway --json queue list`. None if there is no such option."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.find_root().params.get(name)


def json_option(command: Callable[..., T]) -> Callable[..., T]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line, errors too.")(command)


class Output:
    """A command's output: text, or JSON."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def progress(self) -> bool:
        """Whether to show progress: stderr is a terminal, and the output is text."""
        return sys.stderr.isatty() and not self.as_json

    def print(self, answer: msgspec.Struct | dict[str, Any], text: str | Rows) -> None:
        """Print the answer as one line of JSON, or the text."""
        if self.as_json:
            print_json(answer)
        elif isinstance(text, str):
            click.echo(text)
        else:
            print_table(text)

    def print_all(self, answers: Sequence[msgspec.Struct | Mapping[str, Any]], rows: Rows, none: str) -> None:
        """Print each answer as a line of JSON, or the table; without answers, the text `none` on stderr."""
        if self.as_json:
            for answer in answers:
                print_json(answer)
        elif answers:
            print_table(rows)
        else:
            click.echo(none, err=True)


def printing(command: Callable[..., T]) -> Callable[..., T]:
    """Decorates a command without a server: adds `--json`, and passes an `Output` as the first argument."""

    @json_option
    @functools.wraps(command)
    def run(as_json: bool, **options: object) -> T:
        as_json = as_json or bool(from_root("as_json"))
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
    """A plain table. Columns named in `right` are aligned right."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]
    right: Iterable[str]

    def text(self) -> str:
        """The table as lines, with a bold heading."""
        cells = [[f"{value:,}" if isinstance(value, int) else escaped(str(value)) for value in row] for row in self.rows]
        widths = [max(map(_width, column)) for column in zip(self.columns, *cells, strict=True)]
        is_right = [name in set(self.right) for name in self.columns]

        def line(row: Sequence[str]) -> str:
            gaps = [" " * (width - _width(cell)) for cell, width in zip(row, widths, strict=True)]
            return "  ".join(gap + cell if right else cell + gap for cell, gap, right in zip(row, gaps, is_right, strict=True)).rstrip()

        heading = [click.style(line(self.columns), bold=True)] if any(self.columns) else []
        return "\n".join([*heading, *map(line, cells)])

    def __rich__(self) -> Text:
        """For displays that change."""
        from rich.text import Text

        return Text.from_ansi(self.text(), no_wrap=True)


def _width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> Rows:
    """A plain table. Columns named in `right` are aligned right. Without column names there is no heading."""
    return Rows(columns, list(rows), right)


def wide_console() -> Console:
    """A console wide enough to truncate no column."""
    from rich.console import Console

    return Console(width=1_000_000)


def print_table(rows: Rows, err: bool = False) -> None:
    click.echo(rows.text(), err=err)


def counted(number: int, what: str) -> str:
    """`1 item`, `2 items`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def printable(payload: bytes, longest: int = 200) -> str:
    """Untrusted bytes for a terminal: control characters are escaped."""
    text = escaped(payload[: longest * 4].decode("utf-8", "backslashreplace"))
    return text if len(text) <= longest and len(payload) <= longest * 4 else text[:longest] + "…"


# -- reading ----------------------------------------------------------------------------------------------------------


def arguments_or_stdin(values: Sequence[str], what: str) -> Iterator[str]:
    """The values, or the lines of stdin for a single `-`."""
    if tuple(values) != ("-",):
        yield from values
        return
    if sys.stdin.isatty():
        click.echo(f"reading {what} from the terminal, one per line; end with Ctrl-D", err=True)
    for line in sys.stdin.buffer:
        if value := line.decode("utf-8", "replace").strip():
            yield value


def all_items(read_page: Callable[[str | None], _Page[T]]) -> Iterator[T]:
    """The items of all pages; `read_page` reads the one that begins at a pivot."""
    pivot: str | None = None
    while True:
        page = read_page(pivot)
        yield from page.items
        pivot = page.next
        if pivot is None:
            return


class _Page(Protocol[T_co]):
    @property
    def items(self) -> Sequence[T_co]: ...

    @property
    def next(self) -> str | None: ...


def chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    chunk: list[T] = []
    for value in values:
        chunk.append(value)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
