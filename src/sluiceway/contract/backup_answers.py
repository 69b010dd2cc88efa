"""Backups of a running server, as it answers them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sluiceway.contract.fields import Answer, Incarnation, QueueName, Time, about, schema

BackupId = Annotated[str, schema("backup id", minLength=1, maxLength=256)]


class BackupPartition(Answer, frozen=True, kw_only=True):
    """A partition in a backup."""

    queue_name: QueueName
    incarnation: Annotated[Incarnation, about("Identity of the queue.")]
    partition: Annotated[int, about("Number of the partition.")]
    backend: Annotated[str, about("The backend that holds it.")]


class BackupBegun(Answer, frozen=True, kw_only=True):
    """A backup that can be read."""

    backup_id: BackupId
    taken_at: Annotated[Time, about("The moment whose contents the backup has.")]
    version: Annotated[str, about("Version of the server.")]
    meta_layout: Annotated[int, about("Version of the records in the meta store.")]
    partition_layout: Annotated[int, about("Version of the records in partitions.")]
    partitions: Annotated[list[BackupPartition], about("The partitions that the backup has.")]


class RecordsPart(msgspec.Struct, array_like=True, frozen=True):
    """A part of the small records of a partition, or of the meta store. In MessagePack.

    `data`: the records, opaque to whoever stores them. `blobs`: the blobs that they refer to, each as its number and its state: one that
    has the same number and state as in another backup of the same partition has the same bytes. `next`: where the next part begins; None:
    this is the last.
    """

    data: bytes
    blobs: list[tuple[int, str]]
    next: int | None


class BlobsPart(msgspec.Struct, array_like=True, frozen=True):
    """Some blobs of a partition, by number: the first of those that were asked for. In MessagePack."""

    blobs: dict[int, bytes]
