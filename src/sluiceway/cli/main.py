"""The command `sluiceway`."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import cast

import click

from sluiceway import __version__
from sluiceway.cli.common import DEFAULT_URL, EXIT_INTERRUPTED, PROGRAM, Failure, exit_code, json_option
from sluiceway.cli.session import server_options
from sluiceway.kernel.errors import SluicewayError

_MODULES = {
    **dict.fromkeys(("dev", "serve"), "server_cli.servers"),
    "doctor": "server_cli.doctor",
    "config": "server_cli.config",
    "queue": "cli.queues",
    "work": "cli.work_command",
    **dict.fromkeys(("produce", "lease", "peek"), "cli.items"),
    **dict.fromkeys(("complete", "retry", "release", "extend"), "cli.item_outcomes"),
    **dict.fromkeys(("stats", "explain"), "cli.stats"),
    **dict.fromkeys(("search", "show", "run-now", "move"), "cli.item_search"),
    "drop": "cli.item_outcomes",
    "redrive": "cli.redrive",
    "schedule": "cli.schedules",
    "bundle": "cli.bundles",
    "partition": "cli.stats",
    "rebalance": "cli.rebalance",
    **dict.fromkeys(("backend", "key", "audit", "events"), "cli.admin"),
    "backup": "cli.backup",
    "restore": "server_cli.restore",
    "instance": "cli.instances",
    "upgrade": "cli.upgrades",
    "cluster": "server_cli.clusters",
    "consumer": "cli.consumers",
    "tasks": "server_cli.tasks",
    "top": "cli.top",
    "context": "cli.contexts",
    "completion": "cli.completion",
    **dict.fromkeys(("demo", "bench"), "server_cli.demonstration"),
    "spark": "server_cli.spark",
}
"""The commands in the order of the help text, with their modules."""


_FIELD_WORDS = {
    **dict.fromkeys(("send", "publish", "enqueue", "push", "put", "add"), "sluiceway produce QUEUE"),
    **dict.fromkeys(
        ("consume", "receive", "subscribe", "poll", "get", "pop"), "sluiceway lease QUEUE, or a worker: sluiceway work MODULE:FUNCTION"
    ),
    **dict.fromkeys(("worker", "run", "listen"), "sluiceway work MODULE:FUNCTION"),
    **dict.fromkeys(("ack", "acknowledge", "done", "commit"), "sluiceway complete QUEUE"),
    **dict.fromkeys(("nack", "reject", "requeue"), "sluiceway retry QUEUE, or sluiceway release QUEUE without counting the attempt"),
    **dict.fromkeys(("purge", "clear", "flush"), "sluiceway queue clear NAME"),
    **dict.fromkeys(("status", "info", "health", "check"), "sluiceway top, sluiceway stats QUEUE, or sluiceway doctor"),
    **dict.fromkeys(("problems", "alerts"), "sluiceway doctor, or sluiceway top"),
    **dict.fromkeys(("create", "new", "declare"), "sluiceway queue create NAME"),
    **dict.fromkeys(("ls", "list", "queues"), "sluiceway queue list"),
    **{name: f"sluiceway queue {name} NAME" for name in ("history", "pause", "resume", "update")},
    **dict.fromkeys(("find", "grep", "filter", "browse"), "sluiceway search QUEUE"),
    **dict.fromkeys(("promote", "run_now", "kick"), "sluiceway run-now QUEUE ID"),
    **dict.fromkeys(("transfer", "mv"), "sluiceway move QUEUE ID --to QUEUE"),
    **dict.fromkeys(("delete", "rm", "remove"), "sluiceway queue delete NAME; for single items: sluiceway drop QUEUE ID"),
    **dict.fromkeys(("start", "server", "up"), "sluiceway dev to try it out, sluiceway serve --data DIR for a permanent server"),
    **dict.fromkeys(
        ("dlq", "dead", "dead-letters"), "sluiceway stats DEAD_QUEUE --reasons, sluiceway peek DEAD_QUEUE, sluiceway redrive DEAD_QUEUE"
    ),
    **dict.fromkeys(("ui", "dashboard", "web"), f"a browser: the dashboard is the page /ui of the server, such as {DEFAULT_URL}/ui"),
    **dict.fromkeys(("batch", "batches", "bundles", "chord", "flow"), "sluiceway bundle create QUEUE, sluiceway bundle list"),
    **dict.fromkeys(("cron", "schedules", "timer"), "sluiceway schedule create NAME, sluiceway schedule list"),
    **dict.fromkeys(("dump", "export", "save"), "sluiceway backup DIR"),
    **dict.fromkeys(("load", "import", "recover"), "sluiceway restore DIR --data NEW"),
    **dict.fromkeys(("stop", "down"), "Ctrl-C, or SIGTERM to the server's or worker's process"),
    **dict.fromkeys(("tail", "watch", "logs", "monitor"), "sluiceway events, or sluiceway top"),
    "version": "sluiceway --version",
    "help": "sluiceway --help",
}
"""What users of other queues call things, and what they are called here."""


_INSTALL = "Install it: pip install sluiceway"


def _is_ours(error: ModuleNotFoundError) -> bool:
    """Whether what is missing belongs to the server, because only the client is installed."""
    return error.name is not None and error.name.startswith("sluiceway.")


class Commands(click.Group):
    """Imports only the module of the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        try:
            module = import_module(f"sluiceway.{_MODULES[cmd_name]}")
        except ModuleNotFoundError as error:
            if not _is_ours(error):
                raise
            return None
        return cast(click.Command, getattr(module, cmd_name.replace("-", "_")))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if ctx.resilient_parsing or not args[0][:1].isalpha():
                raise
            if args[0] in _MODULES:
                raise click.UsageError(f"{args[0]!r} is a command of the server, which is not installed here. {_INSTALL}", ctx) from None
            if args[0] in _FIELD_WORDS:
                raise click.UsageError(f"No such command {args[0]!r}. Use {_FIELD_WORDS[args[0]]}.", ctx) from None
            # click suggests only loaded commands, and none is loaded here.
            near = get_close_matches(args[0], _MODULES, 3, 0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(__version__, prog_name=PROGRAM)
@server_options
@json_option
def cli(**given: object) -> None:
    """A partitioned, lease-based work queue that feeds Spark.

    Start with `sluiceway dev`. `sluiceway demo` runs a complete Spark pipeline.

    Exit codes: 0 done, 1 internal error, 2 usage error, 3 refused, 4 server unreachable or busy (try again),
    5 outcome unknown, 130 interrupted.
    """


def main() -> None:
    """Run the command line and exit with its code. An unexpected error shows its traceback and exits with 1."""
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False)
    except (Failure, SluicewayError) as error:
        failure = error if isinstance(error, Failure) else Failure(error)
        failure.show()
        sys.exit(exit_code(failure.error))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if not _is_ours(error) and error.name != "rich":
            raise
        missing = f"the server, which is not installed here. {_INSTALL}"
        if error.name == "rich":
            missing = "the package rich. Install it: pip install 'sluiceway-client[cli]'"
        usage = click.UsageError(f"this needs {missing}")
        usage.show()
        sys.exit(usage.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
