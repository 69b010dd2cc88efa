"""Encoders of the calls that read a backup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from sluiceway.client.protocol import Call, call, decoder, given
from sluiceway.contract.backup_answers import BackupBegun, BlobsPart, RecordsPart
from sluiceway.kernel.clock import Millis

T = TypeVar("T")
BEGIN_TIMEOUT: Millis = 10 * 60_000
"""The server reads all records first, which takes some seconds per million."""


def begin_backup() -> Call[BackupBegun]:
    # A repeat finds that there is another one.
    return Call("/v1/backups.begin", b"{}", decoder(BackupBegun).decode, repeatable=False, request_timeout=BEGIN_TIMEOUT)


def backup_records(backup_id: str, incarnation: str | None, partition: int | None, start: int) -> Call[RecordsPart]:
    fields = given(backup_id=backup_id, incarnation=incarnation, partition=partition, start=start)
    return _packed("/v1/backups.records", RecordsPart, fields)


def backup_blobs(backup_id: str, incarnation: str, partition: int, blobs: Sequence[int]) -> Call[BlobsPart]:
    fields = {"backup_id": backup_id, "incarnation": incarnation, "partition": partition, "blobs": list(blobs)}
    return _packed("/v1/backups.blobs", BlobsPart, fields)


def end_backup(backup_id: str) -> Call[dict[str, object]]:
    return call("/v1/backups.end", dict[str, object], {"backup_id": backup_id})


def _packed(path: str, answer: type[T], fields: dict[str, object]) -> Call[T]:
    return Call(path, msgspec.json.encode(fields), msgspec.msgpack.Decoder(answer).decode, repeatable=True)
