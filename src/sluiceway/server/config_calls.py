"""The calls on the configuration and the backends."""

from __future__ import annotations

import msgspec

from sluiceway.contract.config_answers import BackendInfo, BackendPage, Reloaded
from sluiceway.instance.configuration import shown
from sluiceway.instance.service import Service
from sluiceway.kernel.clock import format_duration, format_time
from sluiceway.local import backend_pool
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.server.reload import Reloader
from sluiceway.wire import json_config
from sluiceway.wire.json_config import NoFields


class ConfigCalls:
    """Show and reload the configuration, and list the backends."""

    def __init__(self, service: Service, reloader: Reloader) -> None:
        self._service = service
        self._reloader = reloader

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/config.reload",
                "admin",
                self._reload,
                NoFields,
                Reloaded,
                "Reload the configuration: all changes are applied, or none",
                ("restart_required",),
            ),
            Endpoint(
                "/v1/config.show",
                "admin",
                self._show,
                NoFields,
                json_config.ConfigAnswer,
                "Show the effective configuration, the origin of each value, and the last failed reload",
            ),
            Endpoint("/v1/backends.list", "admin", self._backends, NoFields, BackendPage, "List the storage backends"),
        ]

    async def _reload(self, request: Request) -> Body:
        json_config.decode_no_fields(request.body)
        return json_config.encode(Reloaded(changed=await self._reloader.reload(request.actor)))

    async def _show(self, request: Request) -> Body:
        json_config.decode_no_fields(request.body)
        reloader = self._reloader
        file, failure = reloader.loaded.file, reloader.last_error
        return json_config.encode(
            json_config.ConfigAnswer(
                None if file is None else str(file),
                format_time(reloader.applied_at),
                None if failure is None else json_config.ReloadFailure(format_time(failure.at), failure.detail),
                msgspec.convert(shown(reloader.loaded, origin=True), json_config.ConfigTables),
            )
        )

    async def _backends(self, request: Request) -> Body:
        json_config.decode_no_fields(request.body)
        return json_config.encode(BackendPage(items=[_described(each) for each in self._service.backends()]))


def _described(info: backend_pool.BackendInfo) -> BackendInfo:
    configured = info.kind is not None
    return {
        "backend": info.name,
        "kind": info.kind,
        "partition_affinity": info.partition_affinity if configured else None,
        "write_timeout": format_duration(info.write_timeout) if configured else None,
        "partitions": info.partitions,
        "problem": info.problem,
    }
