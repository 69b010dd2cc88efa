"""The call that finalizes an upgrade."""

from __future__ import annotations

from sluiceway.contract.instance_answers import InstanceList
from sluiceway.instance.service import Service
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_instances
from sluiceway.wire.json_config import NoFields, decode_no_fields


class UpgradeCalls:
    """Raise the compatibility level. `instances.list` has it, and the releases of the instances."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/upgrades.finalize",
                "admin",
                self._finalize,
                NoFields,
                InstanceList,
                "Raise the compatibility level to the highest that all instances understand; earlier releases cannot join any more",
            )
        ]

    async def _finalize(self, request: Request) -> Body:
        decode_no_fields(request.body)
        await self._service.upgrades.finalize(request.actor)
        return json_instances.instance_list(self._service.instances.cluster())
