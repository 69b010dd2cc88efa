"""A server process: binds, starts the service, serves until told to stop, and stops in good order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import uvicorn
import uvloop

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.configuration import SHUTDOWN_TIMEOUT, ServerSettings, parse_address
from sluiceway.node.configuration import Loaded, load
from sluiceway.node.service import Service
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server import logs
from sluiceway.server.app import App
from sluiceway.server.assembly import Assembly, Door
from sluiceway.server.connections import Connection, most_connections
from sluiceway.server.listeners import Listener, address_of, asks_for_keys, bind_all, is_loopback, url_of
from sluiceway.server.tls import TlsFiles

log = logging.getLogger("sluiceway.server")

_KEEP_ALIVE = 75
"""Seconds: longer than the minute after which proxies and pools commonly close idle connections, so that the server is not the first."""

_PATIENT = 0.8
"""The part of `shutdown_timeout` after which requests are answered as they are, so that the rest is left for the answers to get through."""
_LINGER = 250
"""Milliseconds after which an idle connection is closed once the server stops: a client that is busy has sent its next request by then."""
_LOOK = 10


def announce(url: str) -> None:
    """Tell whoever started the process where it listens."""
    print(f"sluiceway listening on {url}", flush=True)


class Server(uvicorn.Server):
    """Ends long polls before it waits for requests in flight, and takes a signal as a wish to stop, not as a crash.

    Requests in flight have `shutdown_timeout` to end once it stops. `on_hangup` is called at each SIGHUP.
    """

    def __init__(
        self,
        app: App,
        started: Callable[[], None],
        *,
        tls: TlsFiles | None = None,
        shutdown_timeout: Millis = SHUTDOWN_TIMEOUT,
        on_hangup: Callable[[], None] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=-(-shutdown_timeout // 1_000),
        )
        config.load()
        # Of its own accord it makes a context that cannot be given other files later.
        config.ssl = None if tls is None else tls.context
        super().__init__(config)
        self._app = app
        self._started = started
        self._on_hangup = on_hangup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        self._listeners = [Listener(sock, self._connection, self.config.ssl, self._has_room) for sock in sockets or ()]
        self.started = True
        self._started()

    def _has_room(self) -> bool:
        return len(self.server_state.connections) + sum(each.opening for each in self._listeners) < most_connections()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_waiting()
        loop = asyncio.get_running_loop()
        loop.call_later((self.config.timeout_graceful_shutdown or 0) * _PATIENT, self._app.give_up)
        await asyncio.gather(*(listener.close(_LINGER / 1_000) for listener in self._listeners))
        # Who is between two requests learns from the next answer that the connection closes.
        for _ in range(_LINGER // _LOOK):
            if self.server_state.connections:
                await asyncio.sleep(_LOOK / 1_000)
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        taken = [signal.SIGINT, signal.SIGTERM]
        for number in taken:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        if self._on_hangup is not None:
            taken.append(signal.SIGHUP)
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)
            _ignore_hangups()


def _ignore_hangups() -> None:
    """SIGHUP asks to read the configuration again. Before and after there is something that can, its default would end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _open_more_files() -> None:
    """As many files at once as the process is allowed to. The usual soft limit, 1,024, is meant for programs that wait with `select`; here
    it would be that of the connections and the stores together."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Where the system has another limit that it does not tell, what there is has to do.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def run(service: Service, loaded: Loaded, door: Door, socks: Sequence[socket.socket], ready: Callable[[], None]) -> None:
    """Start the service, serve it on the bound sockets until a signal, then stop it. `ready` is called once requests are taken."""
    # Where pandas is installed, pyarrow imports it at its first conversion: a second of silence that belongs before the first request.
    pa.array([b""])
    await service.start()
    try:
        assembly = Assembly(service, loaded, door)
        await assembly.start()
        try:
            server = Server(
                assembly.app,
                ready,
                tls=door.tls,
                shutdown_timeout=loaded.configuration.server.shutdown_timeout,
                on_hangup=assembly.reload_soon,
            )
            await server.serve(list(socks))
        finally:
            log.info("stopping")
            await assembly.stop()
    finally:
        await service.stop()
    log.info("stopped")


def serve(
    data: Path,
    loaded: Loaded,
    ready: Callable[[str], None] = announce,
    *,
    insecure: bool = False,
    url_file: Path | None = None,
) -> None:
    """Serve the data directory until SIGTERM or SIGINT, then finish what is in flight (within `shutdown_timeout`) and return.

    `ready` is called with the URL once requests are taken; `url_file` gets it too, as one line. `insecure`: without keys also where other
    machines can call. Raises `invalid_request` for a configuration with which it cannot serve, `unavailable` if another process serves that
    directory, and OSError for a port that is taken.
    """
    settings = loaded.configuration.server
    _ignore_hangups()
    _open_more_files()
    logs.configure(loaded.configuration.log.format, loaded.configuration.log.level)
    tls = TlsFiles(Path(settings.tls_certificate), Path(settings.tls_key)) if settings.tls_certificate else None
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(sock) for sock in bind_all(settings)]
        door = _door(settings, socks, insecure, tls)
        urls = [url_of(sock, tls is not None) for sock in socks]

        def tell() -> None:
            for url in urls[1:]:
                log.info("listening for administrators on %s", url)
            if url_file is not None:
                write_whole(url_file, urls[0] + "\n")
            ready(urls[0])

        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        try:
            runner.run(run(Service(data, loaded.configuration.backends), loaded, door, socks, tell))
        except (DirectoryInUseError, StoreUnavailableError) as error:
            raise SluicewayError("unavailable", str(error), "data") from error


def _door(settings: ServerSettings, socks: Sequence[socket.socket], insecure: bool, tls: TlsFiles | None) -> Door:
    """How the server is reached; what is dangerous about it is said aloud."""
    addresses = [address_of(sock) for sock in socks]
    keys = asks_for_keys(settings, addresses, insecure)
    public = not all(map(is_loopback, addresses))
    if public and not keys:
        log.warning("anybody who can reach this server may do everything: it asks for no API key (--insecure)")
    elif not keys and settings.admin_key:
        log.warning("server.admin_key is for nothing: no API key is asked for (server.auth)")
    elif public and tls is None:
        log.warning("API keys and items cross the network in the clear: set server.tls_certificate and server.tls_key")
    names = frozenset(parse_address(text, "server.listen").host for text in (settings.listen, settings.admin_listen) if text)
    return Door(keys, None if public else names, addresses[1].port if len(addresses) > 1 else None, tls)


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
    host = f"[{given.host}]" if ":" in given.host else given.host
    try:
        loaded = load(given.config, flags={"server.listen": f"{host}:{given.port}"})
        serve(given.data, loaded, insecure=given.insecure, url_file=given.url_file)
    except (SluicewayError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
