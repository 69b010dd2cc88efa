"""Commands that run a server: `serve` and `dev`."""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from sluiceway.cli.common import DEFAULT_PORT, DEFAULT_URL, FILE, Output, WholeNumber, printing
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
    from sluiceway.kernel.address import parse_address

    if value:
        try:
            parse_address(value, "address")
        except SluicewayError:
            raise click.BadParameter(f"{value!r} is not HOST:PORT, such as {LOOPBACK}:{DEFAULT_PORT}", ctx, param) from None
    return value


@click.command()
@click.option("--data", required=True, type=DATA, help="Data folder. Created if missing.")
@click.option("--config", type=FILE, help="Configuration file (TOML). Options and the environment override it.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    callback=_address,
    help=f"Listen address. Port 0 picks a free port. [default: {LOOPBACK}:{DEFAULT_PORT}]",
)
@click.option("--admin-listen", metavar="HOST:PORT", callback=_address, help="Separate address for administration calls and /metrics.")
@click.option(
    "--auth",
    type=click.Choice(["auto", "keys", "none"]),
    help="Whether clients need an API key. auto: they do, unless every address is loopback. [default: auto]",
)
@click.option("--tls-certificate", type=FILE, help="PEM file with the server's certificate.")
@click.option("--tls-key", type=FILE, help="PEM file with the private key of the certificate.")
@click.option("--workers", type=int, metavar="N", help="Number of server processes. Each uses one core. [default: 1]")
@click.option("--cluster-meta", metavar="URL", help="The meta store of the cluster to join: sqlite:PATH, postgresql://…, etcd://…")
@click.option("--advertise", metavar="URL", help="URL at which other instances reach this one. [default: from --listen]")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Log as text, or as one JSON object per line. [default: text]")
@click.option("--insecure", is_flag=True, help="Turn authentication off although other machines can connect.")
@click.option("--url-file", type=_WRITTEN, help="Write the server's URL to this file once it listens.")
@printing
def serve(output: Output, data: Path, config: Path | None, insecure: bool, url_file: Path | None, **typed: Any) -> None:
    """Run a server until Ctrl-C or SIGTERM. SIGHUP reloads its configuration.

    Every configuration key can also be set in the environment, for example SLUICEWAY_SERVER__LISTEN.
    """
    from sluiceway.server.run import announce

    def tell(url: str) -> None:
        output.print({"url": url}, "") if output.as_json else announce(url)

    section = {"log_format": "log.format", "cluster_meta": "cluster.meta", "advertise": "cluster.advertise"}
    flags = {section.get(name, f"server.{name}"): str(value) for name, value in typed.items() if value is not None}
    try:
        _run(data, config, flags, tell, insecure=insecure, url_file=url_file)
    except OSError as error:
        raise click.ClickException(_why(error)) from error


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{error.strerror}; stop the process that listens there, or choose another port"
    return str(error)


@click.command()
@click.option("--data", type=DATA, default=Path(".sluiceway-data"), show_default=True, help="Data folder.")
@click.option(
    "--demo/--no-demo",
    default=None,
    help="Run a demo with live queues and moving partitions. [default: only in a new folder or a demo's]",
)
@click.option("--no-open", is_flag=True, help="Do not open the dashboard in a browser.")
@click.option(
    "--port",
    type=WholeNumber(0, 65_535),
    metavar="PORT",
    help=f"Listen port on {LOOPBACK}. Port 0 picks a free port. [default: {DEFAULT_PORT}, or a free port if that is taken]",
)
@printing
def dev(output: Output, data: Path, demo: bool | None, no_open: bool, port: int | None) -> None:
    """Run a development server and print first commands to try.

    Only this machine can connect to it. The data is kept for the next run.

    In a new folder a demo runs beside the server: it produces to and consumes from its own queues (demo-…), whose partitions are in the
    two backends of the folder's demo.toml. In a folder with other queues it runs only with --demo.
    """
    from sluiceway.demo import live_move

    has_one = (data / live_move.FILE).exists()
    is_new = not data.exists() or not any(data.iterdir())
    wanted = demo if demo is not None else has_one or is_new
    # The demo's second backend is served even without the demo.
    config = live_move.prepare(data) if wanted or has_one else None
    runner = live_move.Runner(config, functools.partial(click.echo, err=True), beside_others=demo is True) if wanted and config else None
    opens = not (no_open or output.as_json) and has_display(os.environ, sys.platform, sys.stdout.isatty())

    def tell(url: str) -> None:
        option = "" if url == DEFAULT_URL else f" --url {url}"
        lines = [
            f"sluiceway listening on {url}",
            f"dashboard at {url}/ui",
            f"data in {data.absolute()}. Ctrl-C stops the server. In another terminal, try:\n",
            *(f"    {line}{option}" for line in _TRY),
            "",
        ]
        output.print({"url": url, "dashboard": f"{url}/ui"}, "\n".join(lines))
        if runner is not None:
            runner.start(url)
        if opens:
            threading.Thread(target=webbrowser.open, args=(f"{url}/ui",), daemon=True).start()

    try:
        try:
            _run(data, config, {"server.listen": f"{LOOPBACK}:{DEFAULT_PORT if port is None else port}"}, tell)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port is not None:
                raise
            _run(data, config, {"server.listen": f"{LOOPBACK}:0"}, tell)
    except OSError as error:
        raise click.ClickException(_why(error)) from error
    finally:
        if runner is not None:
            runner.stop()


def has_display(environment: Mapping[str, str], platform: str, terminal: bool) -> bool:
    """Whether a browser opened from here would be visible to the user."""
    if not terminal or "SSH_CONNECTION" in environment:
        return False
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def _run(data: Path, config: Path | None, flags: dict[str, str], tell: Callable[[str], None], **more: Any) -> None:
    from sluiceway.instance.configuration import load
    from sluiceway.server.run import serve

    serve(data, load(config, flags=flags), tell, **more)
