"""Wiring: the application with all parts of a server beside its service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluiceway.core.queue.token_bucket import Rates
from sluiceway.instance.api_keys import ApiKeys
from sluiceway.instance.configuration import Loaded
from sluiceway.instance.event_feed import Watch
from sluiceway.instance.history_recorder import QueueHistory
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import invalid
from sluiceway.model.configuration import Configuration
from sluiceway.server import logs
from sluiceway.server.app import App, Fittings, Guard, Meter, create_app
from sluiceway.server.audit_calls import AuditCalls
from sluiceway.server.config_calls import ConfigCalls
from sluiceway.server.consumer_calls import ConsumerCalls
from sluiceway.server.events import EventStreams
from sluiceway.server.guard import KeyGuard, OpenDoor
from sluiceway.server.history_calls import HistoryCalls
from sluiceway.server.key_calls import KeyCalls
from sluiceway.server.metrics import Metrics
from sluiceway.server.peer_calls import PeerCalls
from sluiceway.server.problem_calls import ProblemCalls
from sluiceway.server.reload import ON_SIGNAL, Reloader
from sluiceway.server.task_calls import TaskCalls
from sluiceway.server.tls import TlsFiles

if TYPE_CHECKING:
    from sluiceway.server.tracing import Tracer

log = logging.getLogger("sluiceway.server")


@dataclass(frozen=True)
class Door:
    """Access to the server. `keys`: whether callers need API keys; if not, `hosts` are the names by which they may call it (None: any).
    `admin_port`: port of the administrators' listener, if there is one."""

    keys: bool
    hosts: frozenset[str] | None = None
    admin_port: int | None = None
    tls: TlsFiles | None = None


class Assembly:
    """The application over a prepared service, with keys, audit, events, metrics, and live reload.

    Call `start` before it serves, once the service has joined; `stop` after, before the service is stopped.
    """

    def __init__(self, service: Service, loaded: Loaded, door: Door) -> None:
        self._keys = ApiKeys(service.meta, service.audit)
        configuration = loaded.configuration
        self._key_guard = KeyGuard(self._keys, _rates(configuration), configuration.server.admin_key) if door.keys else None
        self._has_admin_key = bool(configuration.server.admin_key)
        self._shares_keys = bool(configuration.cluster.meta)
        guard: Guard = self._key_guard or OpenDoor(door.hosts)
        self._metrics = Metrics(service)
        self._tracer = _tracer(configuration.trace.endpoint) if configuration.trace.endpoint else None
        meters: list[Meter] = [self._metrics, logs.RequestLog()]
        if self._tracer is not None:
            meters.append(self._tracer)
        self._audit = service.audit
        self._audit.keep = configuration.server.audit_entries
        self.reloader = Reloader(loaded, service, self._apply, door.tls)
        events = EventStreams(Watch(service), guard.recheck)
        self._captures = TaskCalls(lambda: service.meta)
        self._history = QueueHistory(service)
        self._watch = service.watch
        rooms = (
            HistoryCalls(self._history),
            KeyCalls(lambda: self._keys),
            AuditCalls(lambda: service.audit),
            ConfigCalls(service, self.reloader),
            ConsumerCalls(service),
            ProblemCalls(service),
            self._captures,
        )
        self.app: App = create_app(
            service,
            Fittings(
                guard,
                meters=meters,
                endpoints=[endpoint for room in rooms for endpoint in room.endpoints()],
                pages=[*self._metrics.pages(), *events.pages()],
                on_stop=[events.stop, self._captures.break_off],
                admin_port=door.admin_port,
                peers=PeerCalls(service, service.secret) if service.secret else None,
                safe_queues=configuration.server.new_queues == "safe",
                dashboard=True,
            ),
        )
        self._tasks: set[asyncio.Task[Any]] = set()

    def _apply(self, configuration: Configuration) -> None:
        logs.configure(configuration.log.format, configuration.log.level)
        self._audit.keep = configuration.server.audit_entries
        if self._key_guard is not None:
            self._key_guard.configure(_rates(configuration))

    async def start(self) -> None:
        """Start the parts. Raises StoreUnavailableError."""
        await self._keys.start()
        self._metrics.start()
        self._history.start()
        self._watch.start()
        self._tasks.add(asyncio.get_running_loop().create_task(self.reloader.watch()))
        if self._key_guard is not None and not self._has_admin_key and not await self._keys.list():
            where = " and the --config or --cluster-meta of this server" if self._shares_keys else ""
            log.warning(
                "no client can call this server yet: there is no API key. Create one: sluiceway key create NAME --scope admin --data DIR%s",
                where,
            )

    def reload_soon(self) -> None:
        """Reload the configuration, as on a signal."""
        task = asyncio.get_running_loop().create_task(self.reloader.reload_or_log(ON_SIGNAL))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Stop all parts, also if one of them fails; then its error is raised."""
        parts = (self._stop_tasks, self._captures.stop, self._watch.stop, self._history.stop, self._metrics.stop)
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self._keys.stop)
            if self._tracer is not None:
                steps.push_async_callback(self._tracer.stop)
            for stop in reversed(parts):
                steps.push_async_callback(stop)

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def _tracer(endpoint: str) -> Tracer:
    try:
        # Imported here, so that OpenTelemetry is loaded, and must be installed, only if it is configured.
        from sluiceway.server.tracing import Tracer
    except ImportError:
        raise invalid("trace.endpoint", "traces need OpenTelemetry; install it with: pip install 'sluiceway[otel]'") from None
    return Tracer(endpoint)


def _rates(configuration: Configuration) -> Rates:
    return Rates(configuration.limits.requests_per_second, configuration.limits.bytes_per_second)
