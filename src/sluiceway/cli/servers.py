"""Commands that are a server: `serve` and `dev`."""

from __future__ import annotations

import errno
from pathlib import Path

import click

from sluiceway.cli.common import DEFAULT_PORT, DEFAULT_URL

LOOPBACK = "127.0.0.1"
_TRY = (
    "sluiceway queue create tasks --partitions 4",
    "sluiceway produce tasks hello world",
    "sluiceway lease tasks -n 2",
    "sluiceway stats tasks --watch",
)
DATA = click.Path(file_okay=False, path_type=Path)


def _host_and_port(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT` or `:PORT`."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not (colon and port.isascii() and port.isdigit() and int(port) <= 65_535):
        raise click.BadParameter(f"{value!r} is not HOST:PORT, such as {LOOPBACK}:{DEFAULT_PORT}", ctx, param)
    return host, int(port)


@click.command()
@click.option("--data", required=True, type=DATA, help="The folder that holds everything. Made if it is not there.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=f"{LOOPBACK}:{DEFAULT_PORT}",
    show_default=True,
    callback=_host_and_port,
    help="Port 0 takes a free one.",
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A TOML file that names the storage backends.")
@click.option("--insecure", is_flag=True, help="Listen on other than loopback addresses, although there is no authentication yet.")
@click.option("--url-file", type=click.Path(dir_okay=False, path_type=Path), help="Write the server's URL there once it listens.")
def serve(data: Path, listen: tuple[str, int], config: Path | None, insecure: bool, url_file: Path | None) -> None:
    """Run a server until it is told to stop (Ctrl-C or SIGTERM)."""
    from sluiceway.server.run import serve as run

    try:
        run(data, *listen, insecure=insecure, url_file=url_file, config=config)
    except OSError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.option("--data", type=DATA, default=Path(".sluiceway-data"), show_default=True, help="The folder that holds everything.")
def dev(data: Path) -> None:
    """Run a server to try things with, and say what to try.

    It listens on port 2319 of this machine, or on a free one if that is taken. The data stays for the next time.
    """

    def ready(url: str) -> None:
        option = "" if url == DEFAULT_URL else f" --url {url}"
        click.echo(f"sluiceway listening on {url}")
        click.echo(f"data in {data.absolute()}; Ctrl-C stops the server. In another terminal, try:\n")
        for line in _TRY:
            click.echo(f"    {line}{option}")
        click.echo()

    from sluiceway.server.run import serve as run

    try:
        run(data, LOOPBACK, DEFAULT_PORT, ready)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise click.ClickException(str(error)) from error
        run(data, LOOPBACK, 0, ready)
