"""The calls on the instances of a cluster."""

from __future__ import annotations

from collections.abc import Iterable

from sluiceway.contract.instance_answers import InstanceList, RoundList
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.queue import QueueRecord
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.health_probes import sees_all
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_instances
from sluiceway.wire.json_config import NoFields, decode_no_fields


class ElsewhereError(Exception):
    """The client asked for a redirect, and the instance at this address can do all of the call. Nothing was done."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


def may_stay(service: Service, request: Request, record: QueueRecord, partitions: Iterable[int]) -> None:
    """Raise ElsewhereError if the client wants redirects, and one other instance owns all of these partitions."""
    if request.redirects:
        address = service.instances.elsewhere(record, partitions)
        if address is not None:
            raise ElsewhereError(address)


class InstanceCalls:
    """List the instances and rounds, and change the cluster's parameters."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/instances.list",
                "read",
                self._list,
                NoFields,
                InstanceList,
                "List the instances of the cluster and their states",
            ),
            Endpoint(
                "/v1/instances.update",
                "admin",
                self._update,
                json_instances.InstancesUpdateCall,
                InstanceList,
                "Change the cluster's timing parameters, strategy or bound of moves for loads; a new round follows",
            ),
            Endpoint(
                "/v1/rounds.list",
                "read",
                self._rounds,
                json_instances.RoundsListCall,
                RoundList,
                "List the last assignment rounds, newest first",
            ),
        ]

    async def _list(self, request: Request) -> Body:
        _check_right(request)
        decode_no_fields(request.body)
        return json_instances.instance_list(await self._service.instances.with_loads())

    async def _update(self, request: Request) -> Body:
        call = json_instances.decode_instances_update(request.body)
        found = await self._service.instances.redefine(call.times(), call.wanted_strategy(), request.actor, call.wanted_load_moves())
        return json_instances.instance_list(found)

    async def _rounds(self, request: Request) -> Body:
        _check_right(request)
        call = json_instances.decode_rounds_list(request.body)
        rounds = await self._service.instances.rounds(call.limit)
        return json_instances.round_list(rounds, {record.incarnation: record.queue_name for record in self._service.queues()})


async def explain_partition(service: Service, record: QueueRecord, partition: int) -> Body:
    """Explain the partition's ownership, with its backend and state."""
    found = await service.instances.why(record, partition)
    backend = next(each.backend for each in record.partitions if each.partition == partition)
    counted = await service.count(record.queue_name)
    state = next((each.state for each in counted.partitions if each.partition == partition), "unavailable")
    return json_instances.partition_explained(partition, backend, state, found)


def _check_right(request: Request) -> None:
    if not sees_all(request.caller):
        raise SluicewayError("forbidden", "the state of the cluster needs a key with the scope read:* or admin")
