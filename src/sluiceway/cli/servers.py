"""Commands that are a server: `serve` and `dev`."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sluiceway.cli.common import DEFAULT_PORT, DEFAULT_URL, Output, printing
from sluiceway.cli.config import FILE
from sluiceway.kernel.errors import SluicewayError

LOOPBACK = "127.0.0.1"
_TRY = (
    "sluiceway queue create tasks --partitions 4",
    "sluiceway produce tasks hello world",
    "sluiceway lease tasks -n 2",
    "sluiceway stats tasks --watch",
)
DATA = click.Path(file_okay=False, path_type=Path)
_WRITTEN = click.Path(dir_okay=False, path_type=Path)


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """`HOST:PORT`, `[::1]:PORT` or `:PORT`."""
    from sluiceway.model.configuration import parse_address

    if value:
        try:
            parse_address(value, "address")
        except SluicewayError:
            raise click.BadParameter(f"{value!r} is not HOST:PORT, such as {LOOPBACK}:{DEFAULT_PORT}", ctx, param) from None
    return value


@click.command()
@click.option("--data", required=True, type=DATA, help="The folder that holds everything. Made if it is not there.")
@click.option("--config", type=FILE, help="A configuration file (TOML). Flags and the environment win over it.")
@click.option("--listen", metavar="HOST:PORT", callback=_address, help=f"Port 0 takes a free one. [default: {LOOPBACK}:{DEFAULT_PORT}]")
@click.option("--admin-listen", metavar="HOST:PORT", callback=_address, help="Serve what is for administrators, and /metrics, only there.")
@click.option(
    "--auth",
    type=click.Choice(["auto", "keys", "none"]),
    help="Whether callers need an API key. [default: auto: unless all is on loopback]",
)
@click.option("--tls-certificate", type=FILE, help="PEM file with the server's certificate.")
@click.option("--tls-key", type=FILE, help="PEM file with the certificate's private key.")
@click.option("--workers", type=int, metavar="N", help="Serve with so many processes, to use as many cores. [default: 1]")
@click.option("--cluster-meta", metavar="URL", help="The meta store of the cluster to join: sqlite:PATH, postgresql://…, etcd://…")
@click.option("--advertise", metavar="URL", help="How other instances of the cluster reach this one. [default: by --listen]")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="For people, or one JSON object a line. [default: text]")
@click.option("--insecure", is_flag=True, help="Ask for no keys although other machines can call: everybody may do everything.")
@click.option("--url-file", type=_WRITTEN, help="Write the server's URL there once it listens.")
@printing
def serve(output: Output, data: Path, config: Path | None, insecure: bool, url_file: Path | None, **typed: Any) -> None:
    """Run a server until it is told to stop (Ctrl-C or SIGTERM). SIGHUP has it read its configuration again.

    Every key of the configuration can also be given in the environment: SLUICEWAY_SERVER__LISTEN and so on.
    """
    from sluiceway.server.run import announce

    def tell(url: str) -> None:
        output.print({"url": url}, "") if output.as_json else announce(url)

    section = {"log_format": "log.format", "cluster_meta": "cluster.meta", "advertise": "cluster.advertise"}
    flags = {section.get(name, f"server.{name}"): str(value) for name, value in typed.items() if value is not None}
    try:
        _run(data, config, flags, tell, insecure=insecure, url_file=url_file)
    except OSError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@click.option("--data", type=DATA, default=Path(".sluiceway-data"), show_default=True, help="The folder that holds everything.")
@printing
def dev(output: Output, data: Path) -> None:
    """Run a server to try things with, and say what to try.

    It listens on port 2319 of this machine, or on a free one if that is taken. The data stays for the next time.
    """

    def tell(url: str) -> None:
        option = "" if url == DEFAULT_URL else f" --url {url}"
        lines = [
            f"sluiceway listening on {url}",
            f"data in {data.absolute()}; Ctrl-C stops the server. In another terminal, try:\n",
            *(f"    {line}{option}" for line in _TRY),
            "",
        ]
        output.print({"url": url}, "\n".join(lines))

    try:
        try:
            _run(data, None, {"server.listen": f"{LOOPBACK}:{DEFAULT_PORT}"}, tell)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _run(data, None, {"server.listen": f"{LOOPBACK}:0"}, tell)
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _run(data: Path, config: Path | None, flags: dict[str, str], tell: Callable[[str], None], **more: Any) -> None:
    from sluiceway.node.configuration import load
    from sluiceway.server.run import serve

    serve(data, load(config, flags=flags), tell, **more)
