"""The command `sluiceway`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sluiceway import __version__
from sluiceway.cli.common import EXIT_INTERRUPTED, Failure, exit_code
from sluiceway.cli.items import complete, explain, lease, produce, release, retry, stats
from sluiceway.cli.queues import queue
from sluiceway.cli.redrive import redrive
from sluiceway.cli.servers import dev, serve
from sluiceway.kernel.errors import SluicewayError


class InOrder(click.Group):
    """Lists commands in the order in which a first hour needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=True)
@click.version_option(__version__, prog_name="sluiceway")
def cli() -> None:
    """A partitioned, lease-based work queue that feeds Spark.

    Begin with `sluiceway dev`; `sluiceway demo` shows a whole Spark pipeline.

    Exit codes: 0 done, 1 internal error, 2 wrong usage, 3 refused, 4 server not reachable or busy (try again),
    5 outcome unknown, 130 interrupted.
    """


@cli.command()
@click.option("--input", "input_", metavar="PATH", help="Your own file or folder (CSV, JSON lines, Parquet, text) instead of the flights.")
@click.option(
    "--kill",
    metavar="WHAT",
    help="Kill a part in mid-work, to see it recover: server-ingest, server-process, driver, or all.",
)
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Keep the data there instead of in a temporary folder.")
def demo(input_: str | None, kill: str | None, data: Path | None) -> int:
    """Feed a Spark pipeline from a queue, and check the books."""
    try:
        from sluiceway.demo.main import run_demo
    except ModuleNotFoundError as error:
        raise click.ClickException(f"the demo needs {error.name}; install it with: pip install 'sluiceway[demo]'") from error
    return int(run_demo(input_, kill, data))


for command in (dev, serve, queue, produce, lease, complete, retry, release, stats, explain, redrive):
    cli.add_command(command)
cli.add_command(cli.commands.pop("demo"))


def main() -> None:
    """Run the command line and exit with its code. An unforeseen error shows its traceback and exits with 1."""
    try:
        code = cli.main(prog_name="sluiceway", standalone_mode=False)
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
