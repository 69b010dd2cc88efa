"""A server process: binds, starts the service, serves until told to stop, and stops in good order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import uvicorn
import uvloop

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.model.backends import DEFAULT_BACKENDS
from sluiceway.node.configuration import read_configuration
from sluiceway.node.service import Service
from sluiceway.server.app import App, create_app
from sluiceway.server.service import QueueService

log = logging.getLogger("sluiceway.server")

_BACKLOG = 2_048
_KEEP_ALIVE = 75
"""Seconds: longer than the minute after which proxies and pools commonly close idle connections, so that the server is not the first."""
_GRACE = 10
"""Seconds that requests in flight have to end once the server stops."""


def announce(url: str) -> None:
    """Tell whoever started the process where it listens."""
    print(f"sluiceway listening on {url}", flush=True)


class Server(uvicorn.Server):
    """Ends long polls before it waits for requests in flight, and takes a signal as a wish to stop, not as a crash."""

    def __init__(self, app: App, started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACE,
        )
        super().__init__(config)
        self._app = app
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_waiting()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


def bind(host: str, port: int, insecure: bool = False) -> socket.socket:
    """A bound socket; port 0 takes a free one.

    Raises `invalid_request` for an address that other machines can reach, unless `insecure`; OSError for one that is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise invalid("listen", f"{host!r} is not an address of this machine: {error.strerror}") from None
    family, _, _, _, address = found[0]
    if not insecure and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise invalid(
            "listen",
            f"{host!r} can be reached from other machines, and the server does not ask callers who they are yet; "
            "listen on 127.0.0.1, or say that it is wanted (insecure)",
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run(service: QueueService, sock: socket.socket, ready: Callable[[str], None]) -> None:
    """Start the service, serve it on the bound socket until a signal, then stop it. `ready` is given the URL once requests are taken."""
    url = url_of(sock)
    # Where pandas is installed, pyarrow imports it at its first conversion: a second of silence that belongs before the first request.
    pa.array([b""])
    await service.start()
    try:
        await Server(create_app(service), lambda: ready(url)).serve([sock])
    finally:
        log.info("stopping")
        await service.stop()
    log.info("stopped")


def serve(
    data: Path,
    host: str,
    port: int,
    ready: Callable[[str], None] = announce,
    *,
    insecure: bool = False,
    url_file: Path | None = None,
    config: Path | None = None,
) -> None:
    """Serve the data directory until SIGTERM or SIGINT, then finish what is in flight (10 s at most) and return.

    `ready` is called with the URL once requests are taken; `url_file` gets it too, as one line. Raises as `bind` and `read_configuration`
    do, and `unavailable` if another process serves that directory.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    backends = DEFAULT_BACKENDS if config is None else read_configuration(config)

    def tell(url: str) -> None:
        if url_file is not None:
            write_whole(url_file, url + "\n")
        ready(url)

    with bind(host, port, insecure) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run(Service(data, backends), sock, tell))
        except DirectoryInUseError as error:
            raise SluicewayError("unavailable", str(error), "data") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody who waits for it reads half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sluiceway.server.run", description="Serve a data directory.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--url-file", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--insecure", action="store_true")
    given = parser.parse_args()
    try:
        serve(given.data, given.host, given.port, insecure=given.insecure, url_file=given.url_file, config=given.config)
    except (SluicewayError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
