"""Commands that are a server: `serve` and `dev`."""

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
        raise click.ClickException(_why(error)) from error


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{error.strerror}; stop what listens there, or choose another port"
    return str(error)


@click.command()
@click.option("--data", type=DATA, default=Path(".sluiceway-data"), show_default=True, help="The folder that holds everything.")
@click.option(
    "--demo/--no-demo",
    default=None,
    help="Have something to look at: queues in use, and partitions that move. [default: in a folder that is new or a demo's]",
)
@click.option("--no-open", is_flag=True, help="Do not open the dashboard in a browser, as it is done from a terminal with a display.")
@printing
def dev(output: Output, data: Path, demo: bool | None, no_open: bool) -> None:
    """Run a server to try things with, and say what to try.

    It listens on port 2319 of this machine, or on a free one if that is taken. The data stays for the next time.

    In a new folder a demo produces and consumes, in queues of its own (demo-…), as long as the server runs; its partitions lie in two
    backends, by the folder's demo.toml. In a folder with other queues it runs only with --demo.
    """
    from sluiceway.demo import live_move

    has_one = (data / live_move.FILE).exists()
    is_new = not data.exists() or not any(data.iterdir())
    wanted = demo if demo is not None else has_one or is_new
    # What lies in a demo's second backend is served without the demo, too.
    config = live_move.prepare(data) if wanted or has_one else None
    runner = live_move.Runner(config, functools.partial(click.echo, err=True), beside_others=demo is True) if wanted and config else None
    opens = not (no_open or output.as_json) and has_display(os.environ, sys.platform, sys.stdout.isatty())

    def tell(url: str) -> None:
        option = "" if url == DEFAULT_URL else f" --url {url}"
        lines = [
            f"sluiceway listening on {url}",
            f"dashboard at {url}/ui",
            f"data in {data.absolute()}; Ctrl-C stops the server. In another terminal, try:\n",
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
            _run(data, config, {"server.listen": f"{LOOPBACK}:{DEFAULT_PORT}"}, tell)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _run(data, config, {"server.listen": f"{LOOPBACK}:0"}, tell)
    except OSError as error:
        raise click.ClickException(_why(error)) from error
    finally:
        if runner is not None:
            runner.stop()


def has_display(environment: Mapping[str, str], platform: str, terminal: bool) -> bool:
    """Whether somebody who started this would see a browser that it opens."""
    if not terminal or "SSH_CONNECTION" in environment:
        return False
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def _run(data: Path, config: Path | None, flags: dict[str, str], tell: Callable[[str], None], **more: Any) -> None:
    from sluiceway.instance.configuration import load
    from sluiceway.server.run import serve

    serve(data, load(config, flags=flags), tell, **more)
