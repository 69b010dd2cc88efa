"""Components of a capture member, opened as configured: meta store, stream, log, election, positions, sink."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.capture.capture_sink import QueueSink
from sluiceway.capture.config import KAFKA, STREAMS, CaptureConfig, check_kind, check_log, check_shared, entry_of
from sluiceway.capture.group_election import MetaElection
from sluiceway.capture.logs.meta_log import MetaSyncLog
from sluiceway.capture.logs.meta_positions import MetaPositions
from sluiceway.client import AsyncClient
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.secrets import read_secret
from sluiceway.ports.change_stream import ChangeSink, ChangeStream
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import PositionStore
from sluiceway.ports.sync_log import Election, SyncLog

RETRY_FOR = "10s"
"""Retry period of a call to the target queue before the partition is reopened."""


def open_meta(meta: str) -> MetaStore:
    """Open a meta store by URL, or by reference to one. Raises `invalid_request`, StoreUnavailableError."""
    url = read_secret(meta, "meta", os.environ) or meta
    check_shared(url)
    if url.startswith("sqlite:") and not (folder := Path(url.removeprefix("sqlite:")).absolute().parent).is_dir():
        raise invalid("meta", f"there is no folder {folder}")
    return open_meta_store(url)


@contextlib.asynccontextmanager
async def opened(meta: str) -> AsyncIterator[MetaStore]:
    """A meta store for the length of a block. Raises SluicewayError, also in place of the block's StoreUnavailableError."""
    try:
        store = open_meta(meta)
        try:
            yield store
        finally:
            await store.close()
    except StoreUnavailableError as error:
        raise SluicewayError("unavailable", str(error)) from error


def open_stream(kind: str, name: str, options: Mapping[str, str]) -> ChangeStream:
    """Open a stream of that kind. Raises `invalid_request` that names the option at fault, or the package to install."""
    check_kind(kind)
    if kind in STREAMS:
        try:
            stream: ChangeStream = import_module(STREAMS[kind]).from_options(name, options)
        except ModuleNotFoundError as error:
            raise invalid("stream", f"{kind} needs {error.name}; install it with: pip install 'sluiceway[{kind}]'") from None
        return stream
    entry = entry_of(kind)
    assert entry is not None
    try:
        from_options = entry.load()
    except (ImportError, AttributeError) as error:
        package = entry.dist.name if entry.dist is not None else entry.value
        raise invalid("stream", f"{kind} of the package {package} cannot be loaded from {entry.value}: {error}") from error
    made: ChangeStream = from_options(name, options)
    return made


def open_log(name: str, log: str, store: MetaStore, *, create: bool = True) -> SyncLog:
    """Open the sync log; it does not own the store. Without `create` nothing is created; a missing log is empty."""
    check_log(log)
    if log == "meta":
        return MetaSyncLog(store, name)
    return _kafka().KafkaSyncLog(log.removeprefix(KAFKA), name, create=create)  # type: ignore[no-any-return]


def open_election(name: str, log: str, store: MetaStore) -> Election:
    """Open the election for one member: each needs its own."""
    check_log(log)
    if log == "meta":
        return MetaElection(store, name)
    return _kafka().KafkaElection(log.removeprefix(KAFKA), name)  # type: ignore[no-any-return]


def open_positions(name: str, store: MetaStore) -> PositionStore:
    """Open the position store, in the meta store wherever the log is; it does not own the store."""
    return MetaPositions(store, name)


@contextlib.asynccontextmanager
async def open_sink(config: CaptureConfig) -> AsyncIterator[ChangeSink]:
    """The target queue for the length of a block. Raises `invalid_request`."""
    if not config.queue:
        raise invalid("queue", "required: the queue that receives the records, and its server's url")
    async with client_of(config, RETRY_FOR) as client:
        yield QueueSink(client, config.name, config.queue)


def client_of(config: CaptureConfig, retry_for: str) -> AsyncClient:
    api_key = read_secret(config.api_key, "api_key", os.environ) if config.api_key else None
    ca_file = config.ca_file or os.environ.get("SLUICEWAY_CA_FILE") or None
    return AsyncClient(config.url, api_key=api_key, ca_file=ca_file, retry_for=retry_for)


def _kafka() -> Any:
    try:
        return import_module("sluiceway.capture.logs.kafka_log")
    except ModuleNotFoundError as error:
        raise invalid("log", f"Kafka needs {error.name}; install it with: pip install 'sluiceway[kafka]'") from None
