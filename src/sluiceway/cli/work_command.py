"""`sluiceway work`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket

import click

from sluiceway.cli.common import WholeNumber, duration_option, from_root
from sluiceway.cli.session import Session, flags, queue_names, server_options
from sluiceway.kernel.errors import SluicewayError


def _one_queue(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> str | None:
    if len(values) > 1:
        raise click.BadParameter("a worker serves one queue; run `sluiceway work` once for each queue", ctx, param)
    return values[0] if values else None


@click.command()
@click.argument("handler", metavar="MODULE:FUNCTION")
@click.option(
    "--queue",
    "-q",
    "queue_name",
    multiple=True,
    callback=_one_queue,
    shell_complete=queue_names,
    help="Queue to work on. [default: the function's name]",
)
@click.option("--concurrency", "-c", type=WholeNumber(1), default=8, show_default=True, help="Handlers at once in each process.")
@click.option("--processes", "-p", type=WholeNumber(1), default=1, show_default=True, help="Processes, each with its own handlers.")
@click.option("--batch-size", type=WholeNumber(1), help="Call the function with lists of up to this many items.")
@click.option("--tables", is_flag=True, help="Call the function with Arrow tables of up to --batch-size items (10,000).")
@click.option("--prefetch", type=WholeNumber(0), default=100, show_default=True, help="Items that may wait in each process.")
@click.option("--ordered", is_flag=True, help="Lease several items of a key at once, and handle them in order.")
@duration_option("--lease-timeout", default="1m", help="Lease of an item, renewed while its handler runs.")
@duration_option("--shutdown-timeout", default="25s", help="Time for handlers to finish after SIGTERM or Ctrl-C.")
@click.option("--error-messages/--no-error-messages", default=True, help="Record the message of an exception, not only its type.")
@click.option("--listen", metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics here.")
@click.option("--reload", is_flag=True, help="Start again when a Python file below this folder changes.")
@click.option("--client-id", help="Name of this worker in leases. [default: host name and process id]")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe messages to log.",
)
@click.option("--json", "as_json", is_flag=True, help="Log JSON, one object per line, errors too.")
@server_options
def work(
    handler: str,
    queue_name: str | None,
    listen: str | None,
    url: str | None,
    context_name: str | None,
    ca_file: str | None,
    client_id: str | None,
    as_json: bool,
    **options: object,
) -> None:
    """Run a Python function on each item of a queue.

    The function may be sync or async. It gets an item (`item.payload`, `item.kind`, `item.headers`, …), which is completed when it
    returns. If it raises an exception, the item is put back as the queue's settings say.

    SIGTERM and Ctrl-C stop fetching. Handlers finish, and items that are not handled by then are released.

    Example: sluiceway work tasks:resize --queue images --processes 4
    """
    from sluiceway.kernel.address import parse_address
    from sluiceway.worker import Options, work
    from sluiceway.worker.log_setup import configure_logs

    as_json = as_json or bool(from_root("as_json"))
    session = Session(flags(url, context_name, ca_file), as_json)
    try:
        target = session.target
        queue_name = queue_name or handler.rpartition(":")[2].rpartition(".")[2]
        configure_logs(str(options["log_level"]), as_json)
        given = Options(
            queue_name=queue_name,
            listen=None if listen is None else parse_address(listen, "listen"),
            url=target.url,
            api_key=target.api_key or "",
            ca_file=target.ca_file,
            client_id=client_id or f"{socket.gethostname()}-{os.getpid()}",
            log_json=as_json,
            **options,  # type: ignore[arg-type]
        )
        each = f"{given.processes} × {given.concurrency}" if given.processes > 1 else str(given.concurrency)
        logging.getLogger("sluiceway.worker").info("%s works on queue %s of %s, %s handlers at once", handler, queue_name, target.url, each)
        # After Ctrl-C: all is finished or released.
        with contextlib.suppress(KeyboardInterrupt):
            work(handler, given)
    except SluicewayError as error:
        raise session.failed(error) from error
