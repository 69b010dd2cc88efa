"""The server process: bind, start the service in one process or several, serve until stopped, and shut down gracefully."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
import pyarrow as pa
import uvicorn
import uvloop

from sluiceway.adapters.lock import DirectoryInUseError
from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.adapters.storage.bucket_requests import BucketRequests
from sluiceway.cluster.peer_http import HttpTransport
from sluiceway.instance.configuration import Loaded, load
from sluiceway.instance.service import Membership, Service
from sluiceway.kernel.address import Address, parse_address
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local.stores import MAX_OPEN, most_open
from sluiceway.model.configuration import SHUTDOWN_TIMEOUT, SQLITE_META, ClusterSettings, Configuration, ServerSettings
from sluiceway.ports.meta_store import MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.server import logs
from sluiceway.server.app import App
from sluiceway.server.connection_balance import Counted, Seats
from sluiceway.server.connections import Connection, most_connections
from sluiceway.server.listeners import Listener, address_of, asks_for_keys, bind, bind_all, is_loopback, url_at, url_of
from sluiceway.server.tls import TlsFiles
from sluiceway.server.wiring import Assembly, Door
from sluiceway.server.workers import Supervisor, WorkerOrder

log = logging.getLogger("sluiceway.server")

_KEEP_ALIVE = 75
"""Seconds: longer than the minute after which proxies and pools commonly close idle connections, so that they close first."""

_PATIENT = 0.8
"""Fraction of `shutdown_timeout` after which unfinished requests are answered, so that the rest is left to deliver the answers."""
_HANDING_OVER = 0.5
"""Fraction of it in which the other instances take over the partitions, while this one still takes requests."""
_LINGER = 250
"""Milliseconds until idle connections are closed at shutdown: a busy client has sent its next request by then."""
_LOOK = 10
MIN_FILES = 128
"""File handles: some 40 for the process, and the minimum for partitions and connections beside them."""
_GARBAGE = 10_000
"""Net new objects that trigger a collection of the youngest generation: some megabytes, if all of them are garbage."""
_LOOPBACK = "127.0.0.1"


def announce(url: str) -> None:
    """Print the URL for the parent process."""
    print(f"sluiceway listening on {url}", flush=True)


class Own(NamedTuple):
    """Resources of one of several processes that share an address: its own socket, without TLS if `plain`, and its place in the connection
    counts."""

    sock: socket.socket
    plain: bool
    seats: Seats


class Server(uvicorn.Server):
    """Server that ends long polls before it waits for requests in flight, and treats a signal as a request to stop, not as a crash.

    `before_listen` is awaited before it takes requests; then `before_ready`, before `started` is called. At a stop, `before_close` is
    awaited first, while the server still takes requests; all requests in flight must end within `shutdown_timeout`. `on_hangup` is called
    at each SIGHUP. `own`: set in one of several processes.
    """

    def __init__(
        self,
        app: App,
        started: Callable[[], None],
        *,
        before_listen: Callable[[], Awaitable[None]] | None = None,
        before_ready: Callable[[], Awaitable[None]] | None = None,
        tls: TlsFiles | None = None,
        shutdown_timeout: Millis = SHUTDOWN_TIMEOUT,
        on_hangup: Callable[[], None] | None = None,
        own: Own | None = None,
        before_close: Callable[[], Awaitable[None]] | None = None,
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
        # Uvicorn would make a context that cannot load other files later.
        config.ssl = None if tls is None else tls.context
        super().__init__(config)
        self._app = app
        self._started = started
        self._before_listen, self._before_ready = before_listen, before_ready
        self._beginning: asyncio.Future[None] | None = None
        self._on_hangup = on_hangup
        self._own = own
        self._before_close = before_close

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.servers = []
        if self._own is not None:
            self.server_state.connections = Counted(self._own.seats.note)
        self._beginning = asyncio.ensure_future(self._begin(sockets or ()))
        try:
            await self._beginning
        except asyncio.CancelledError:
            if not self.should_exit:
                raise
        self._beginning = None

    async def _begin(self, sockets: Sequence[socket.socket]) -> None:
        if self._before_listen is not None:
            await self._before_listen()
        self._listeners = [self._listen(sock) for sock in sockets]
        # From here on it must be shut down in order.
        self.started = True
        if self._before_ready is not None:
            await self._before_ready()
        self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._beginning is not None:
            self._beginning.cancel()

    def stop_soon(self) -> None:
        """Stop as at SIGTERM."""
        self.handle_exit(signal.SIGTERM, None)

    def _listen(self, sock: socket.socket) -> Listener:
        own, tls = self._own, self.config.ssl
        if own is None:
            return Listener(sock, self._connection, tls, self._has_room)
        if sock is own.sock:
            return Listener(sock, self._connection, None if own.plain else tls, self._has_room)
        return Listener(sock, self._connection, tls, self._has_room, own.seats.has_more_than_others)

    def _has_room(self) -> bool:
        return len(self.server_state.connections) + sum(each.opening for each in self._listeners) < most_connections()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_waiting()
        loop = asyncio.get_running_loop()
        loop.call_later((self.config.timeout_graceful_shutdown or 0) * _PATIENT, self._app.give_up)
        await self._hand_over((self.config.timeout_graceful_shutdown or 0) * _HANDING_OVER)
        await asyncio.gather(*(listener.close(_LINGER / 1_000) for listener in self._listeners))
        # A client between two requests learns from its next answer that the connection closes.
        for _ in range(_LINGER // _LOOK):
            if self.server_state.connections:
                await asyncio.sleep(_LOOK / 1_000)
        await super().shutdown(sockets)

    async def _hand_over(self, seconds: float) -> None:
        """Run `before_close` for up to `seconds`. The other instances take over the rest by themselves."""
        if self._before_close is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._before_close()
        except TimeoutError:
            log.warning("the other instances did not take over in time")
        except Exception:
            log.exception("handover to the other instances failed")

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
    """Ignore SIGHUP, which means a reload, whenever no handler is installed: its default would end the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _open_more_files() -> None:
    """Raise the soft limit of open files to the hard limit. The usual 1,024 is meant for programs that use `select`; here connections and
    stores together would have to share it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # If the system has another limit that it does not report, keep the present one.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _check_files() -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_it = "raise it: ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit"
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        raise SluicewayError("unavailable", f"the limit of open files is {files}, and a server needs at least {MIN_FILES}; {raise_it}")
    if most_open(shared=False) < MAX_OPEN:
        log.warning(
            "the limit of open files is %d, which allows %d open partitions of a SQLite backend and %d connections; %s",
            files,
            most_open(shared=False),
            most_connections(),
            raise_it,
        )


def spare_the_collector() -> None:
    """Tune the garbage collector. Nearly all garbage here is acyclic and is freed at once. With Python's defaults, up to a third of a small
    call's time went into collections, mostly over modules, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE, 10, 10)


async def run(
    service: Service,
    loaded: Loaded,
    door: Door,
    socks: Sequence[socket.socket],
    ready: Callable[[], None],
    own: Own | None = None,
) -> None:
    """Start the service, serve it on the bound sockets until a signal, then stop it. `ready` is called once requests are taken."""
    # If pandas is installed, pyarrow imports it at the first conversion: a second of delay that belongs before the first request.
    pa.array([b""])
    await service.prepare()
    try:
        assembly = Assembly(service, loaded, door)
        spare_the_collector()

        async def join() -> None:
            await service.join()
            await assembly.start()

        try:
            server = Server(
                assembly.app,
                ready,
                # The partitions that it gets wait until it takes requests.
                before_listen=join,
                before_ready=service.wait_until_open,
                tls=door.tls,
                shutdown_timeout=loaded.configuration.server.shutdown_timeout,
                on_hangup=assembly.reload_soon,
                own=own,
                before_close=service.hand_over,
            )
            service.on_outdated = server.stop_soon
            await server.serve(list(socks))
            if service.outdated is not None:
                raise service.outdated
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
    """Serve the data directory until SIGTERM or SIGINT, then finish requests in flight (within `shutdown_timeout`) and return.

    `ready` is called with the URL once requests are taken; `url_file` gets it, too, as one line. `insecure`: allow callers from other
    machines without keys. With several `workers`, starts that many processes, which serve together. Raises `invalid_request` for an
    unusable configuration, `unavailable` if another process serves that directory, and OSError for a port in use.
    """
    settings = loaded.configuration.server
    _prepare(loaded.configuration)
    tls = _tls(settings)
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

        if settings.workers > 1:
            seats = stack.enter_context(tempfile.TemporaryFile()).fileno()
            order = WorkerOrder(data, loaded, replace(door, tls=None), tuple(sock.fileno() for sock in socks), seats)
            supervisor = Supervisor(settings.workers, pickle.dumps(order), socks, settings.shutdown_timeout, files=[seats])
            asyncio.run(supervisor.run(tell))
        else:
            cluster = cluster_of(data, loaded.configuration, address_of(socks[0]), tls is not None)
            _run(data, loaded, cluster, door, socks, tell)


def serve_worker(order: WorkerOrder, ready: Callable[[str], None]) -> None:
    """Serve as one of several processes started by `serve`. `ready` is called with the URL at which the others reach this one."""
    configuration, loaded = order.loaded.configuration, order.loaded
    _prepare(configuration)
    tls = _tls(configuration.server)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(fileno=number)) for number in order.listeners]
        # A connection to the common address may reach any of the processes, so each also has its own address.
        near = not (configuration.cluster.advertise or configuration.cluster.spans_machines)
        own = stack.enter_context(bind(_LOOPBACK if near else parse_address(configuration.server.listen, "server.listen").host, 0))
        cluster = cluster_of(order.data, configuration, address_of(own), tls is not None and not near)
        assert cluster is not None, "one of several processes is in a cluster"
        door = replace(order.door, tls=tls)
        seats = Seats(stack.enter_context(os.fdopen(order.seats, "r+b")), configuration.server.workers)
        _run(order.data, loaded, cluster, door, [*socks, own], lambda: ready(cluster.advertise), Own(own, near, seats))


def cluster_of(data: Path, configuration: Configuration, at: Address, tls: bool) -> ClusterSettings | None:
    """Return the instance's cluster settings, completed; None: no cluster. `at`: address at which it listens for other instances."""
    if not configuration.is_clustered:
        return None
    cluster, (host, port) = configuration.cluster, at
    advertise = cluster.advertise.rstrip("/")
    if advertise and configuration.server.workers > 1:
        advertise = f"{advertise}:{port}"
    # The other instances, on this machine, reach a listener on all addresses over loopback.
    here = Address({"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host), port)
    meta = cluster.meta or f"{SQLITE_META}{data.absolute() / 'meta.sqlite'}"
    return msgspec.structs.replace(cluster, meta=meta, advertise=advertise or url_at(here, tls))


def _run(
    data: Path,
    loaded: Loaded,
    cluster: ClusterSettings | None,
    door: Door,
    socks: Sequence[socket.socket],
    ready: Callable[[], None],
    own: Own | None = None,
) -> None:
    requests = BucketRequests()
    service = Service(
        data,
        loaded.configuration.backends,
        membership=None if cluster is None else _membership(cluster, requests),
        disk_reserve=loaded.configuration.server.disk_reserve,
        bucket_requests=requests,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(run(service, loaded, door, socks, ready, own))
        except (DirectoryInUseError, StoreUnavailableError, MetaUnknownError) as error:
            raise SluicewayError("unavailable", str(error), "data") from error


def _membership(cluster: ClusterSettings, requests: BucketRequests) -> Membership:
    def transport(secret: str, level: Callable[[], int]) -> HttpTransport:
        try:
            return HttpTransport(secret, Path(cluster.ca) if cluster.ca else None, level)
        except OSError as error:
            raise invalid("cluster.ca", f"{cluster.ca} cannot be used: {error}; expected a PEM file with certificates") from error

    strategy = cluster.strategy or None
    return Membership(
        lambda: open_meta_store(cluster.meta, requests),
        transport,
        cluster.advertise,
        cluster.name,
        strategy=strategy,
        times=cluster.times,
        zone=cluster.zone,
    )


def _prepare(configuration: Configuration) -> None:
    _ignore_hangups()
    _open_more_files()
    logs.configure(configuration.log.format, configuration.log.level)
    _check_files()


def _tls(settings: ServerSettings) -> TlsFiles | None:
    return TlsFiles(Path(settings.tls_certificate), Path(settings.tls_key)) if settings.tls_certificate else None


def _door(settings: ServerSettings, socks: Sequence[socket.socket], insecure: bool, tls: TlsFiles | None) -> Door:
    """Decide how the server is reached, and log a warning about anything dangerous."""
    addresses = [address_of(sock) for sock in socks]
    keys = asks_for_keys(settings, addresses, insecure)
    public = not all(map(is_loopback, addresses))
    if public and not keys:
        log.warning("authentication is off (--insecure): every client that can reach this server has all rights")
    elif not keys and settings.admin_key:
        log.warning("server.admin_key has no effect: authentication is off (server.auth)")
    elif public and tls is None:
        log.warning("API keys and items are sent unencrypted: set server.tls_certificate and server.tls_key")
    names = frozenset(parse_address(text, "server.listen").host for text in (settings.listen, settings.admin_listen) if text)
    return Door(keys, None if public else names, addresses[1].port if len(addresses) > 1 else None, tls)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that its readers never see half of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def main() -> None:
    """Serve a data directory, as tests and benchmarks start it."""
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
