"""Capture a change stream: several processes divide its partitions, and hand their records on to a queue, each once.

Every process runs a member (`run_member`) with the same `CaptureConfig`; `look` says how far they are. docs/tasks.md has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from sluiceway.adapters import system
from sluiceway.adapters.meta.opening import open_meta_store
from sluiceway.adapters.secrets import read_secret
from sluiceway.adapters.synclog.meta import MetaSyncLog
from sluiceway.adapters.synclog.positions import MetaPositions
from sluiceway.client.aio import AsyncClient
from sluiceway.client.capture_sink import QueueSink
from sluiceway.core.assignment.task_member import Pace, Preset
from sluiceway.core.assignment.tasks import stuck, watermark
from sluiceway.core.assignment.tasks_state import State
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import check_queue_name
from sluiceway.node.task_election import MetaElection
from sluiceway.node.task_log import whole
from sluiceway.node.task_reader import Claim, Habits, Handler, PartitionReader
from sluiceway.node.tasks import TaskRunner, Timing
from sluiceway.ports.change_stream import ChangeSink, ChangeStream
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError
from sluiceway.ports.position_store import PositionStore, PositionUnknownError, Stored
from sluiceway.ports.sync_log import Election, LogUnavailableError, SyncLog

__all__ = [
    "Begun",
    "CaptureConfig",
    "Claim",
    "Handler",
    "Look",
    "TaskRunner",
    "Timing",
    "captures",
    "look",
    "open_election",
    "open_log",
    "open_meta",
    "open_positions",
    "open_sink",
    "open_stream",
    "run_member",
]

STREAMS = {
    "kinesis": "sluiceway.adapters.streams.kinesis",
    "postgres": "sluiceway.adapters.streams.postgres",
    "queue": "sluiceway.client.lineage",
}
"""Kinds of streams, and the modules that have them: each has a `from_options(name, options)`."""
KAFKA = "kafka:"
MAX_LIMIT = 100_000
RETRY_FOR = "10s"
"""For how long a call to the target queue is repeated before the partition is opened anew."""
_REGISTER = "captures/"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """What every member of a capture is told, the same to all. Texts and numbers only, so that it can be sent anywhere.

    `meta`: a URL as for `open_meta_store`, or `env:NAME` or `file:PATH` that holds it. `log`: `meta`, or `kafka:HOST:PORT,…`. `stream` and
    `options`: what is read. `url`, `queue`, `api_key` (`env:NAME` or `file:PATH`), `ca_file`: where to; both of the first empty: nowhere,
    the member has a handler of its own. `limit`: records a batch. Raises `invalid_request` that names the field.
    """

    name: str
    meta: str
    stream: str
    options: Mapping[str, str] = field(default_factory=dict)
    log: str = "meta"
    url: str = ""
    queue: str = ""
    api_key: str = ""
    ca_file: str = ""
    preset: Preset = "log-leader"
    limit: int = 10_000

    def __post_init__(self) -> None:
        check_queue_name(self.name, "name")
        if not self.meta:
            raise invalid("meta", "required: sqlite:PATH, postgresql://… or etcd://…, or env:NAME or file:PATH that holds it")
        if self.stream not in STREAMS:
            raise invalid("stream", f"{self.stream[:40]!r} is not a kind of stream; expected one of {', '.join(STREAMS)}")
        _check_log(self.log)
        if bool(self.url) != bool(self.queue):
            raise invalid("queue" if self.url else "url", "url and queue go together: the queue to which the records go")
        if self.queue:
            check_queue_name(self.queue, "queue")
        if self.api_key and not self.api_key.startswith(("env:", "file:")):
            raise invalid("api_key", "a key does not stand here itself; say where it is: env:NAME or file:PATH")
        if self.preset not in get_args(Preset):
            raise invalid("preset", f"expected one of {', '.join(get_args(Preset))}")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise invalid("limit", f"expected 1 to {MAX_LIMIT:,} records a batch")


def _check_log(log: str) -> None:
    if log != "meta" and not (log.startswith(KAFKA) and log != KAFKA):
        raise invalid("log", f"{log[:80]!r} is not a log; expected meta, or kafka:HOST:PORT[,HOST:PORT]")


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture was begun with, which cannot change: two logs would be two truths, and positions are of one stream."""

    stream: str
    log: str
    queue: str = ""
    """The first target. Another one may follow it."""


class Look(NamedTuple):
    """A capture as it is now. `begun` None: no member has ever begun it. `end`: the number of the log's last record."""

    name: str
    begun: Begun | None
    state: State
    positions: Mapping[str, Stored]
    watermark: Millis | None
    """No record older than this is still to come; None: no record is to come, or nothing is known yet."""
    stuck: dict[str, tuple[str, ...]]
    """If nothing can go on though not all is finished: what waits, and for which parents."""
    end: int


# ---- the parts ---------------------------------------------------------------------------------------------------------


def open_meta(meta: str) -> MetaStore:
    """From a URL, or from where one is held. Raises `invalid_request`, StoreUnavailableError."""
    return open_meta_store(read_secret(meta, "meta", os.environ) or meta)


def open_stream(kind: str, name: str, options: Mapping[str, str]) -> ChangeStream:
    """Raises `invalid_request` that names the option at fault, or says what is to be installed."""
    if kind not in STREAMS:
        raise invalid("stream", f"{kind[:40]!r} is not a kind of stream; expected one of {', '.join(STREAMS)}")
    try:
        stream: ChangeStream = import_module(STREAMS[kind]).from_options(name, options)
    except ModuleNotFoundError as error:
        raise invalid("stream", f"Kafka needs {error.name}; install it with: pip install 'sluiceway[{kind}]'") from None
    return stream


def open_log(name: str, log: str, store: MetaStore, *, create: bool = True) -> SyncLog:
    """The store is not closed with it. Without `create` nothing is made; a log that is not there is empty."""
    _check_log(log)
    if log == "meta":
        return MetaSyncLog(store, name)
    return _kafka().KafkaSyncLog(log.removeprefix(KAFKA), name, create=create)  # type: ignore[no-any-return]


def open_election(name: str, log: str, store: MetaStore) -> Election:
    """Of one member alone: each opens its own."""
    _check_log(log)
    if log == "meta":
        return MetaElection(store, name)
    return _kafka().KafkaElection(log.removeprefix(KAFKA), name)  # type: ignore[no-any-return]


def open_positions(name: str, store: MetaStore) -> PositionStore:
    """Also when the log is elsewhere. The store is not closed with it."""
    return MetaPositions(store, name)


@contextlib.asynccontextmanager
async def open_sink(config: CaptureConfig) -> AsyncIterator[ChangeSink]:
    """The target queue, as long as the block lasts. Raises `invalid_request`."""
    if not config.queue:
        raise invalid("queue", "required: the queue to which the records go, and its server's url")
    api_key = read_secret(config.api_key, "api_key", os.environ) if config.api_key else None
    ca_file = config.ca_file or os.environ.get("SLUICEWAY_CA_FILE") or None
    async with AsyncClient(config.url, api_key=api_key, ca_file=ca_file, retry_for=RETRY_FOR) as client:
        yield QueueSink(client, config.name, config.queue)


def _kafka() -> Any:
    try:
        return import_module("sluiceway.adapters.synclog.kafka")
    except ModuleNotFoundError as error:
        raise invalid("log", f"Kafka needs {error.name}; install it with: pip install 'sluiceway[kafka]'") from None


# ---- a member ----------------------------------------------------------------------------------------------------------


async def run_member(
    config: CaptureConfig,
    *,
    stop: asyncio.Event,
    name_hint: str = "member",
    handler: Callable[[ChangeStream, PositionStore], Handler] | None = None,
    watch: Callable[[TaskRunner], None] | None = None,
    pace: Pace | None = None,
    timing: Timing | None = None,
) -> None:
    """Take part in the capture until `stop` is set, and leave in order. Any number may, in any number of processes.

    `handler` makes, of the member's own stream and position store, what reads partitions instead of handing their records on to the queue.
    `watch` is given the runner before it begins. Cancelled, it goes without leaving: others take over once it is taken for dead. Raises
    SluicewayError for what is wrong with the configuration, and if the meta store cannot be reached at the beginning; later it waits for
    whatever is away.
    """
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(_opened(config.meta))
        stream = open_stream(config.stream, config.name, config.options)
        stack.push_async_callback(stream.close)
        positions = open_positions(config.name, store)
        if handler is None:
            sink = await stack.enter_async_context(open_sink(config))
            reads: Handler = PartitionReader(stream, positions, sink, Habits(limit=config.limit)).read
        else:
            reads = handler(stream, positions)
        await _begin(config, store)
        log = open_log(config.name, config.log, store)
        stack.push_async_callback(log.close)
        runner = TaskRunner(
            # A name is never used again, so every start has a part of its own.
            f"{check_queue_name(name_hint, 'name_hint')}-{system.new_incarnation()}",
            log=log,
            election=open_election(config.name, config.log, store),
            positions=positions,
            stream=stream,
            handler=reads,
            preset=config.preset,
            pace=pace,
            timing=timing,
        )
        if watch is not None:
            watch(runner)
        await _run_until(runner, stop)


async def _run_until(runner: TaskRunner, stop: asyncio.Event) -> None:
    running, asked = asyncio.ensure_future(runner.run()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            runner.stop()
        await running
    finally:
        asked.cancel()
        running.cancel()
        await asyncio.wait((running,))


@contextlib.asynccontextmanager
async def _opened(meta: str) -> AsyncIterator[MetaStore]:
    try:
        store = open_meta(meta)
        try:
            yield store
        finally:
            await store.close()
    except StoreUnavailableError as error:
        raise SluicewayError("unavailable", str(error)) from error


async def _begin(config: CaptureConfig, store: MetaStore) -> None:
    """Note what the capture is begun with, or refuse what does not go with that."""
    key = f"{_REGISTER}{config.name}"
    while True:
        entry = (await store.read([key])).entries.get(key)
        begun = None if entry is None else msgspec.json.decode(entry.value, type=Begun)
        if begun is not None:
            if begun.stream != config.stream:
                raise invalid("stream", f"capture {config.name} was begun with {begun.stream}, not {config.stream}; take another name")
            if _is_kafka(begun.log) != _is_kafka(config.log):
                raise invalid("log", f"capture {config.name} was begun with the log {begun.log}, not {config.log}; take another name")
        wanted = Begun(stream=config.stream, log=config.log, queue=begun.queue if begun is not None else config.queue)
        if begun == wanted:
            return
        try:
            await store.commit({key: None if entry is None else entry.stamp}, puts={key: msgspec.json.encode(wanted)})
        except ConflictError:
            continue
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", str(error)) from error


def _is_kafka(log: str) -> bool:
    return log.startswith(KAFKA)


# ---- looking -----------------------------------------------------------------------------------------------------------


async def captures(meta: str) -> dict[str, Begun]:
    """Those that were ever begun there, by name. Raises SluicewayError."""
    async with _opened(_existing(meta)) as store:
        entries = (await store.read(prefixes=[_REGISTER])).prefix(_REGISTER)
    return {key.removeprefix(_REGISTER): msgspec.json.decode(entry.value, type=Begun) for key, entry in entries.items()}


async def look(name: str, meta: str, log: str | None = None) -> Look:
    """By the log and the positions alone: no member need live, and nothing is created. `log` None: that which it was begun with.

    Raises SluicewayError.
    """
    key = f"{_REGISTER}{check_queue_name(name, 'name')}"
    async with _opened(_existing(meta)) as store:
        entry = (await store.read([key])).entries.get(key)
        begun = None if entry is None else msgspec.json.decode(entry.value, type=Begun)
        opened = open_log(name, log or (begun.log if begun is not None else "meta"), store, create=False)
        try:
            state, end = await whole(opened)
            positions = await open_positions(name, store).read()
        except (LogUnavailableError, PositionUnknownError) as error:
            raise SluicewayError("unavailable", str(error)) from error
        finally:
            await opened.close()
    committed = {token: each.kept.at for token, each in positions.items() if each.kept.at is not None}
    return Look(name, begun, state, positions, watermark(state, committed), stuck(state), end)


def _existing(meta: str) -> str:
    """The URL, unless opening it would make a file."""
    url = read_secret(meta, "meta", os.environ) or meta
    if url.startswith("sqlite:") and not Path(url.removeprefix("sqlite:")).exists():
        raise invalid("meta", f"there is no file {url.removeprefix('sqlite:')}")
    return url
