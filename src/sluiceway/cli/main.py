"""The command `sluiceway`."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import cast

import click

from sluiceway import __version__
from sluiceway.cli.common import EXIT_INTERRUPTED, PROGRAM, Failure, exit_code
from sluiceway.kernel.errors import SluicewayError

_ROOMS = {
    **dict.fromkeys(("dev", "serve"), "servers"),
    "doctor": "doctor",
    "config": "config",
    "queue": "queues",
    "work": "work",
    **dict.fromkeys(("produce", "lease", "peek"), "items"),
    **dict.fromkeys(("complete", "retry", "release", "extend"), "item_outcomes"),
    **dict.fromkeys(("stats", "explain"), "stats"),
    "drop": "item_outcomes",
    "redrive": "redrive",
    "partition": "stats",
    "rebalance": "rebalance",
    **dict.fromkeys(("backend", "key", "audit", "events"), "admin"),
    "instance": "instances",
    "consumer": "consumers",
    "tasks": "tasks",
    "top": "top",
    "context": "contexts",
    "completion": "completion",
    **dict.fromkeys(("demo", "bench"), "demonstration"),
    "spark": "spark",
}
"""The commands in the order of the help text, with their modules."""


class Commands(click.Group):
    """Imports only the module of the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_ROOMS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ROOMS:
            return None
        return cast(click.Command, getattr(import_module(f"sluiceway.cli.{_ROOMS[cmd_name]}"), cmd_name))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            if ctx.resilient_parsing or not args[0][:1].isalpha():
                raise
            # click suggests only loaded commands, and none is loaded here.
            near = get_close_matches(args[0], _ROOMS, 3, 0.5)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
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
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
