"""Commands on queues."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import click

from sluiceway.cli.common import Rows, WholeNumber, all_items, duration_option, printable, table
from sluiceway.cli.history import history
from sluiceway.cli.session import Session, connected, queue_argument
from sluiceway.kernel.clock import format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_SHOWN_KEYS

if TYPE_CHECKING:
    from sluiceway.client import QueueInfo, Settings, Verb
    from sluiceway.client.answers import Partition, QueueKeys, WaitingKey
    from sluiceway.contract.queue_settings import Setting

T = TypeVar("T")
MAX_COUNTED = 50
"""Maximum queues whose items `queue list` counts: each costs a call."""


_FIELD_WORDS = {
    **dict.fromkeys(("purge", "empty", "flush"), "clear"),
    **dict.fromkeys(("new", "add", "declare"), "create"),
    "ls": "list",
    **dict.fromkeys(("show", "get", "describe", "inspect", "status"), "info"),
    **dict.fromkeys(("set", "edit", "alter", "configure"), "update"),
    **dict.fromkeys(("rm", "remove", "drop"), "delete"),
    **dict.fromkeys(("stop", "suspend", "disable"), "pause"),
    **dict.fromkeys(("start", "continue", "enable", "unpause"), "resume"),
}
"""What users of other queues call the commands on queues."""


class _QueueCommands(click.Group):
    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _FIELD_WORDS and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {args[0]!r}. Use sluiceway queue {_FIELD_WORDS[args[0]]}.", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_QueueCommands)
def queue() -> None:
    """Create, change, show, pause, clear and delete queues."""


queue.add_command(history)


def _logical_queues(context: click.Context, option: click.Parameter, value: str | None) -> str | int | None:
    if value is None or value == "auto":
        return value
    if not value.isascii() or not value.isdigit() or not int(value):
        raise click.BadParameter(f"{value!r} is neither a number of at least 1 nor auto")
    return int(value)


def _read_by(name: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """A callback that reads the option's text by that function of the settings, which are imported only then."""

    def read(context: click.Context, option: click.Parameter, value: str | None) -> Any:
        from sluiceway.contract import queue_settings

        try:
            return None if value is None else getattr(queue_settings, name)(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return read


def _option(setting: Setting, is_new: bool) -> Callable[[Callable[..., T]], Callable[..., T]]:
    flag, kind = f"--{setting.name.replace('_', '-')}", setting.form.kind
    help = f"{setting.about} [server's default: {setting.new_text}]" if is_new else setting.about
    if kind == "duration":
        return duration_option(flag, help=help)
    if kind == "backoff":
        return duration_option(flag, metavar="FIRST MOST", help=help)
    if kind == "count":
        return click.option(flag, type=WholeNumber(0), help=help)
    if kind == "breaker":
        return click.option(flag, metavar="RATE[:FAILURES]", callback=_read_by("read_circuit_breaker"), help=help)
    if kind in ("key rate", "rate"):
        return click.option(flag, metavar="RATE[:BURST]", callback=_read_by(f"read_{kind.replace(' ', '_')}"), help=help)
    if kind == "key weights":
        return click.option(flag, metavar="KEY=WEIGHT…", callback=_read_by("read_key_weights"), help=help)
    if kind == "word":
        return click.option(flag, type=click.Choice(get_args(setting.form.wire)), help=help)
    if kind == "logical queues":
        return click.option(flag, metavar="NUMBER|auto", callback=_logical_queues, help=help)
    return click.option(flag, metavar="QUEUE" if kind == "queue" else "TEXT", help=help)


class _WithSettings(click.Command):
    """A command with an option for each setting of a queue. They are made when they are asked for: the settings load msgspec."""

    at = 2
    """Parameters before them."""
    is_new = True
    """Whether the queue is created."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if not hasattr(self, "_settings"):
            self._settings = _parameters(self.is_new)
            self.params[self.at : self.at] = self._settings
        return super().get_params(ctx)


class _WithSettingsToChange(_WithSettings):
    at = 1
    is_new = False


def _parameters(is_new: bool) -> list[click.Parameter]:
    """An option for each setting, and a `--no-…` flag to go without it: where it is changed, or is given to new queues."""
    from sluiceway.contract.queue_settings import QUEUE_SETTINGS

    def holder() -> None: ...

    for setting in QUEUE_SETTINGS.values():
        _option(setting, is_new)(holder)
    for setting in QUEUE_SETTINGS.values():
        if setting.new is not None or (setting.can_be_off and not is_new):
            help = f"{setting.label}: {setting.unset}."
            click.option(f"--no-{setting.name.replace('_', '-')}", is_flag=True, help=help)(holder)
    return list(holder.__click_params__)  # type: ignore[attr-defined]


def _settings(typed: dict[str, Any]) -> Settings:
    """The settings that were passed as options; None for those that were switched off."""
    from sluiceway.client import Backoff

    off = {option.removeprefix("no_") for option in [*typed] if option.startswith("no_") and typed.pop(option)}
    settings = {name: value for name, value in typed.items() if value is not None and not name.startswith("no_")}
    for option in (name.replace("_", "-") for name in off if name in settings):
        raise click.UsageError(f"--{option} and --no-{option} exclude each other")
    if "retry_backoff" in settings:
        settings["retry_backoff"] = Backoff(*settings["retry_backoff"])
    return cast("Settings", {**settings, **dict.fromkeys(off)})


@queue.command(cls=_WithSettings)
@click.argument("name")
@click.option("--partitions", type=WholeNumber(1), help="Number of partitions. [server's default: 1]")
@connected
def create(session: Session, name: str, partitions: int | None, **typed: Any) -> None:
    """Create the queue NAME."""
    info = session.client.create_queue(name, requested_partitions=partitions, **_settings(typed))
    session.print(info, _created(info))


def _created(info: QueueInfo) -> str:
    """`Created q with 1 partition. At most 20 attempts; retries after 1s to 10m; dead items go to q-dead.`"""
    count = len(info.partitions)
    attempts = f"At most {info.max_attempts:,} attempts" if info.max_attempts else "No limit of attempts"
    backoff = info.retry_backoff
    retries = f"retries after {backoff.first} to {backoff.most}" if backoff else "retries at once"
    dead = f"dead items go to {info.dead_queue}" if info.dead_queue else "dead items are dropped"
    return f"Created {info.queue_name} with {count} {'partition' if count == 1 else 'partitions'}. {attempts}; {retries}; {dead}."


@queue.command(cls=_WithSettingsToChange)
@queue_argument("name")
@click.option("--if-version", metavar="VERSION", type=WholeNumber(0), help="Fail unless the queue still has this version.")
@connected
def update(session: Session, name: str, if_version: int | None, **typed: Any) -> None:
    """Change settings of the queue NAME. They take effect at once; omitted settings stay unchanged."""
    settings = _settings(typed)
    if not settings:
        raise click.UsageError("pass at least one setting to change")
    answer = session.client.update_queue(name, version=if_version, **settings)
    session.print(answer, f"Updated {name} to version {answer.version}")


@queue.command("list")
@connected
def list_(session: Session) -> None:
    """List all queues by name."""
    infos = list(all_items(lambda pivot: session.client.list_queues(pivot=pivot)))
    numbers = ("partitions", "ready", "leased", "scheduled", "max attempts")
    columns = ("queue", *numbers, "dead queue", "paused")
    rows = [
        (
            *(i.queue_name, len(i.partitions)),
            *_counts(session, i.queue_name if at < MAX_COUNTED else None),
            *(i.max_attempts or "-", i.dead_queue or "-", " and ".join(i.paused) or "-"),
        )
        for at, i in enumerate([] if session.as_json else infos)
    ]
    # A key without read scopes also gets an empty list.
    none = "No queues that this key may read" if session.target.api_key else "No queues yet"
    session.print_all(infos, table(columns, rows, right=numbers), f"{none}. Create one: sluiceway queue create NAME")


def _counts(session: Session, name: str | None) -> tuple[int | str, int | str, int | str]:
    """Ready, leased and scheduled items of a queue; dashes if its stats cannot be read."""
    if name is not None:
        with contextlib.suppress(SluicewayError):
            parts = session.client.stats(name).partitions
            return sum(part.ready for part in parts), sum(part.total_leased for part in parts), sum(part.scheduled for part in parts)
    return "-", "-", "-"


@queue.command()
@queue_argument("name")
@connected
def info(session: Session, name: str) -> None:
    """Show the queue NAME."""
    from sluiceway.contract.queue_settings import QUEUE_SETTINGS

    answer = session.client.queue_info(name)
    rows = [
        ("queue", answer.queue_name),
        ("incarnation", answer.incarnation),
        ("created", f"{answer.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("version", answer.version),
        *((setting.label.lower(), _shown(setting, getattr(answer, name))) for name, setting in QUEUE_SETTINGS.items()),
        ("paused", " and ".join(answer.paused) or "no"),
        ("rebalance", _rebalance(answer)),
        *((f"partition {part.partition}", _partition(part)) for part in answer.partitions),
    ]
    session.print(answer, table(("", ""), rows))


def _shown(setting: Setting, value: Any) -> object:
    text = setting.shown(value)
    if setting.form.kind == "backoff" and not isinstance(text, str):
        return f"{text.first} to {text.most}"
    return printable(str(text).encode())


def _partition(part: Partition) -> str:
    parents = f", replaces {', '.join(map(str, part.parents))}" if part.parents else ""
    return f"{part.state}, on {part.backend}{parents}"


def _rebalance(info: QueueInfo) -> str:
    found = info.rebalance
    if found is None:
        return "none"
    left = "" if found.items_left is None else f", {found.items_left:,} items left to drain"
    return f"{found.id}: {found.state or 'unknown'}, step {found.step or 'unknown'}{left}"


@queue.command()
@queue_argument("name")
@click.option("--limit", type=WholeNumber(1, MAX_SHOWN_KEYS), help="Keys in each table.  [default: 20]")
@connected
def keys(session: Session, name: str, limit: int | None) -> None:
    """Show the busiest keys of the queue NAME, those that wait longest, and what blocks them.

    For queues with --order, --fair or --key-concurrency. API keys: `sluiceway key`.
    """
    answer = session.client.queue_keys(name, limit=limit)
    session.print(answer, _keys(answer))
    for number in () if session.as_json else answer.skipped:
        click.echo(f"warning: partition {number} was not counted: it is not available", err=True)


def _keys(answer: QueueKeys) -> str:
    if not answer.busiest and not answer.limited:
        return "No keys with waiting items"
    totals = f"{answer.waiting:,} waiting, {answer.blocked:,} of them blocked, {answer.limited:,} at the limit of their leased items"
    tables = (f"{title}:\n{_key_table(those).text()}" for title, those in (("Busiest", answer.busiest), ("Oldest", answer.oldest)) if those)
    return "\n\n".join((f"Keys: {totals}", *tables))


def _key_table(keys: Sequence[WaitingKey]) -> Rows:
    numbers = ("ready", "leased", "in retry", "oldest")
    now = datetime.now(UTC)
    rows = [
        (
            "(no key)" if each.key is None else printable(each.key.encode()),
            *(each.waiting, each.leased, each.returned, format_duration(max(0, int((now - each.oldest_at).total_seconds())) * 1_000)),
            _OBSTACLES.get(each.blocked_by, each.blocked_by) if each.blocked_by else "",
        )
        for each in keys
    ]
    return table(("key", *numbers, "blocked by"), rows, right=numbers)


_OBSTACLES = {
    "lease": "an earlier item that is leased",
    "retry": "an earlier item's retry",
    "limit": "its limit of leased items",
    "rate": "its rate",
    "rebalance": "a rebalance",
}


@queue.command()
@queue_argument("name")
@click.option("--force", is_flag=True, help="Delete the queue's items too. Asks for confirmation at a terminal.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@connected
def delete(session: Session, name: str, force: bool, yes: bool) -> None:
    """Permanently delete the queue NAME."""
    if force and not yes and sys.stdin.isatty() and not click.confirm(f"Permanently delete {name} with all its items?", err=True):
        click.echo("Nothing deleted", err=True)
        return
    session.client.delete_queue(name, force=force)
    session.print({}, f"Deleted {name}")


@queue.command()
@queue_argument("name")
@click.option("--produce", is_flag=True, help="Producing only.")
@click.option("--lease", is_flag=True, help="Leasing only.")
@connected
def pause(session: Session, name: str, produce: bool, lease: bool) -> None:
    """Stop producing to and leasing from the queue NAME until `queue resume`. Leased items can still be settled."""
    answer = session.client.pause(name, _verbs(produce, lease))
    session.print(answer, _paused(answer))


@queue.command()
@queue_argument("name")
@click.option("--produce", is_flag=True, help="Producing only.")
@click.option("--lease", is_flag=True, help="Leasing only.")
@connected
def resume(session: Session, name: str, produce: bool, lease: bool) -> None:
    """Resume the queue NAME after `queue pause`."""
    answer = session.client.resume(name, _verbs(produce, lease))
    session.print(answer, _resumed(answer))


def _verbs(produce: bool, lease: bool) -> list[Verb] | None:
    chosen: dict[Verb, bool] = {"produce": produce, "lease": lease}
    return [verb for verb, wanted in chosen.items() if wanted] or None


def _paused(info: QueueInfo) -> str:
    return f"Paused {info.queue_name}: {' and '.join(info.paused)}"


def _resumed(info: QueueInfo) -> str:
    still = f"; still paused: {' and '.join(info.paused)}" if info.paused else ""
    return f"Resumed {info.queue_name}{still}"


@queue.command()
@queue_argument("name")
@click.option("--scheduled", is_flag=True, help="Also drop scheduled items.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@connected
def clear(session: Session, name: str, scheduled: bool, yes: bool) -> None:
    """Permanently drop the ready items of the queue NAME. Leased items stay."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("this permanently drops items; pass --yes to confirm")
        if not click.confirm(f"Permanently drop all waiting items of {name}?", err=True):
            click.echo("Nothing dropped", err=True)
            return
    answer = session.client.clear(name, scheduled=scheduled)
    also = f" and {answer.scheduled:,} scheduled" if scheduled else ""
    session.print(answer, f"Dropped {answer.ready:,} ready{also}")
