"""The calls that read a backup of the running server."""

from __future__ import annotations

import msgspec

from sluiceway import __version__
from sluiceway.adapters.meta import sqlite
from sluiceway.adapters.storage import partition_file
from sluiceway.contract.backup_answers import BackupBegun, BackupPartition, BlobsPart, RecordsPart
from sluiceway.contract.fields import time_field
from sluiceway.instance.service import Service
from sluiceway.kernel.errors import invalid
from sluiceway.model.changes import PartitionRef
from sluiceway.server.endpoints import Endpoint
from sluiceway.server.http import Body, Request
from sluiceway.wire import json_backups
from sluiceway.wire.json_config import NoFields, decode_no_fields
from sluiceway.wire.shapes import Done


class BackupCalls:
    """Begin a backup, read it part by part, and end it."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/backups.begin",
                "admin",
                self._begin,
                NoFields,
                BackupBegun,
                "Begin a backup: everything that is stored as of one moment, to be read part by part",
                ("partition_damaged",),
            ),
            Endpoint(
                "/v1/backups.records",
                "admin",
                self._records,
                json_backups.RecordsCall,
                RecordsPart,
                "Read a part of the records of a backup",
                ("snapshot_gone",),
                gives_packed=True,
            ),
            Endpoint(
                "/v1/backups.blobs",
                "admin",
                self._blobs,
                json_backups.BlobsCall,
                BlobsPart,
                "Read some blobs of a backup",
                ("snapshot_gone", "partition_damaged"),
                gives_packed=True,
            ),
            Endpoint("/v1/backups.end", "admin", self._end, json_backups.BackupCall, Done, "End a backup that is not read any more"),
        ]

    async def _begin(self, request: Request) -> Body:
        decode_no_fields(request.body)
        backup = await self._service.backups.begin(request.actor)
        partitions = [
            BackupPartition(queue_name=placed.queue_name, incarnation=ref.incarnation, partition=ref.partition, backend=placed.backend)
            for ref, placed in backup.partitions.items()
        ]
        return msgspec.json.encode(
            BackupBegun(
                backup_id=backup.id,
                taken_at=time_field(backup.taken_at),
                version=__version__,
                meta_layout=len(sqlite.MIGRATIONS),
                partition_layout=len(partition_file.MIGRATIONS),
                partitions=partitions,
            )
        )

    async def _records(self, request: Request) -> Body:
        call = json_backups.decode_records(request.body)
        if (call.incarnation is None) != (call.partition is None):
            raise invalid("partition", "pass incarnation and partition, or neither for the meta store")
        ref = None if call.incarnation is None or call.partition is None else PartitionRef(call.incarnation, call.partition)
        return await self._service.backups.records(call.backup_id, ref, call.start)

    async def _blobs(self, request: Request) -> Body:
        call = json_backups.decode_blobs(request.body)
        ref = PartitionRef(call.incarnation, call.partition)
        return await self._service.backups.blobs(call.backup_id, ref, call.blobs)

    async def _end(self, request: Request) -> Body:
        await self._service.backups.end_anywhere(json_backups.decode_backup(request.body).backup_id)
        return b"{}"
