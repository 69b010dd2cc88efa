"""Codec of the calls on backups."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluiceway.contract.backup_answers import BackupId
from sluiceway.contract.fields import Incarnation
from sluiceway.kernel.limits import MAX_BACKUP_BLOBS
from sluiceway.wire.decoding import JsonDecoder, Natural, PartitionNumber


class BackupCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call on a backup."""

    backup_id: BackupId


class RecordsCall(BackupCall):
    """A call on the records of a partition in a backup. `incarnation` and `partition` None: the meta store."""

    incarnation: Incarnation | None = None
    partition: PartitionNumber | None = None
    start: Natural = 0


class BlobsCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call on blobs of a partition in a backup."""

    backup_id: BackupId
    incarnation: Incarnation
    partition: PartitionNumber
    blobs: Annotated[list[Natural], Meta(min_length=1, max_length=MAX_BACKUP_BLOBS)]


decode_backup = JsonDecoder(BackupCall)
decode_records = JsonDecoder(RecordsCall)
decode_blobs = JsonDecoder(BlobsCall)
