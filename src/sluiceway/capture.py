"""Capture a change stream: several processes divide its partitions, and hand their records on to a queue, each once.

Every process runs a member (`run_member`) with the same `CaptureConfig`; `look` says how far they are. docs/tasks.md has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
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
from sluiceway.node.task_alarms import AlarmBoard, AlarmsOf
from sluiceway.node.task_election import MetaElection
from sluiceway.node.task_forget import alive, drop
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
    "Forgotten",
    "Handler",
    "Look",
    "TaskRunner",
    "Timing",
    "captures",
    "check",
    "forget",
    "look",
    "open_election",
    "open_log",
    "open_meta",
    "open_positions",
    "open_sink",
    "open_stream",
    "run_member",
    "there_is",
]

log = logging.getLogger(__name__)

STREAMS = {
    "kinesis": "sluiceway.adapters.streams.kinesis",
    "postgres": "sluiceway.adapters.streams.postgres",
    "queue": "sluiceway.client.lineage",
}
"""Kinds of streams, and the modules that have them: each has a `from_options(name, options)`."""
IDENTITY = {"kinesis": ("region", "stream"), "queue": ("url", "queue")}
"""Options that say which stream of its kind it is: another one is no stream for the same positions. Publications may come and go."""
KAFKA = "kafka:"
MAX_LIMIT = 100_000
RETRY_FOR = "10s"
"""For how long a call to the target queue is repeated before the partition is opened anew."""
BEGIN_FOR: Millis = 60_000
"""For how long a member waits at its beginning for a meta store that cannot be reached."""
_AGAIN = 1.0
"""Seconds between two attempts."""
_REGISTER = "captures/"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """What every member of a capture is told, the same to all. Texts and numbers only, so that it can be sent anywhere.

    `meta`: a URL as for `open_meta_store`, or `env:NAME` or `file:PATH` that holds it. `log`: `meta`, or `kafka:HOST:PORT,…`. `stream` and
    `options`: what is read. `url`, `queue`, `api_key` (`env:NAME` or `file:PATH`), `ca_file`: where to; both of the first empty: nowhere,
    the member has a handler of its own. `limit`: records a batch. Raises `invalid_request` that names the field.
    """

    name: str
    meta: str = field(repr=False)
    """Not shown, since it may have a password in it."""
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
        _check_shared(self.meta)
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


def _check_shared(url: str) -> None:
    if url == "memory:":
        raise invalid(
            "meta", "memory: is of one process alone, so each task would read everything; expected sqlite:, postgresql:// or etcd://"
        )


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture was begun with, which cannot change: two logs would be two truths, positions are of one stream, and each batch goes
    to one target. `queue`: that target; "": another program's own. Servers of a Kafka may change, if one stays.
    """

    stream: str
    log: str
    queue: str = ""
    identity: dict[str, str] | None = None
    """Which stream of its kind: those of the options in IDENTITY that were said. None: nobody knows, an older version has begun it."""


class Look(NamedTuple):
    """A capture as it is now. `begun` None: no member has ever begun it. `alarms`: those of members that have joined."""

    name: str
    begun: Begun | None
    state: State
    positions: Mapping[str, Stored]
    watermark: Millis | None
    """No record older than this is still to come; None: no record is to come, or nothing is known yet."""
    stuck: dict[str, tuple[str, ...]]
    """If nothing can go on though not all is finished: what waits, and for which parents."""
    alarms: AlarmsOf


# ---- the parts ---------------------------------------------------------------------------------------------------------


def open_meta(meta: str) -> MetaStore:
    """From a URL, or from where one is held. Raises `invalid_request`, StoreUnavailableError."""
    url = read_secret(meta, "meta", os.environ) or meta
    _check_shared(url)
    if url.startswith("sqlite:") and not (folder := Path(url.removeprefix("sqlite:")).absolute().parent).is_dir():
        raise invalid("meta", f"there is no folder {folder}")
    return open_meta_store(url)


def open_stream(kind: str, name: str, options: Mapping[str, str]) -> ChangeStream:
    """Raises `invalid_request` that names the option at fault, or says what is to be installed."""
    if kind not in STREAMS:
        raise invalid("stream", f"{kind[:40]!r} is not a kind of stream; expected one of {', '.join(STREAMS)}")
    try:
        stream: ChangeStream = import_module(STREAMS[kind]).from_options(name, options)
    except ModuleNotFoundError as error:
        raise invalid("stream", f"{kind} needs {error.name}; install it with: pip install 'sluiceway[{kind}]'") from None
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
    async with _client(config, RETRY_FOR) as client:
        yield QueueSink(client, config.name, config.queue)


def _client(config: CaptureConfig, retry_for: str) -> AsyncClient:
    api_key = read_secret(config.api_key, "api_key", os.environ) if config.api_key else None
    ca_file = config.ca_file or os.environ.get("SLUICEWAY_CA_FILE") or None
    return AsyncClient(config.url, api_key=api_key, ca_file=ca_file, retry_for=retry_for)


def _kafka() -> Any:
    try:
        return import_module("sluiceway.adapters.synclog.kafka")
    except ModuleNotFoundError as error:
        raise invalid("log", f"Kafka needs {error.name}; install it with: pip install 'sluiceway[kafka]'") from None


# ---- a member ----------------------------------------------------------------------------------------------------------


async def check(config: CaptureConfig) -> None:
    """What can be known of it before a member runs: the meta store opens, what was begun there goes with it, and the queue is there.

    A server that cannot be reached, or does not say, may do so later: no fault. Raises SluicewayError.
    """
    async with _opened(config.meta) as store:
        key = f"{_REGISTER}{config.name}"
        entry = (await store.read([key])).entries.get(key)
        _agreed(None if entry is None else msgspec.json.decode(entry.value, type=Begun), config)
    if not config.queue:
        return
    async with _client(config, "1s") as client:
        try:
            await client.queue_info(config.queue)
        except SluicewayError as error:
            # A key that may produce need not be one that may look.
            if error.code in ("queue_not_found", "unauthenticated"):
                raise


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
    SluicewayError for what is wrong with the configuration, and if the meta store cannot be reached for BEGIN_FOR at the beginning; later
    it waits for whatever is away.
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
        if not await _begin(config, store, stop):
            return
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
            board=AlarmBoard(store, config.name),
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


async def _begin(config: CaptureConfig, store: MetaStore, stop: asyncio.Event) -> bool:
    """Note what the capture is begun with, or refuse what does not go with that. False: it was to stop before."""
    until = system.steady() + BEGIN_FOR
    while not stop.is_set():
        try:
            await _note(config, store)
            return True
        except (StoreUnavailableError, MetaUnknownError) as error:
            if system.steady() >= until:
                raise SluicewayError("unavailable", str(error)) from error
            log.warning("capture %s cannot begin yet: %s", config.name, error)
        # Not `wait_for`, which in Python 3.11 swallows a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN):
                await stop.wait()
    return False


async def _note(config: CaptureConfig, store: MetaStore) -> None:
    """Raises `invalid_request`, StoreUnavailableError, MetaUnknownError."""
    key = f"{_REGISTER}{config.name}"
    while True:
        entry = (await store.read([key])).entries.get(key)
        begun = None if entry is None else msgspec.json.decode(entry.value, type=Begun)
        wanted = _agreed(begun, config)
        if begun == wanted:
            return
        with contextlib.suppress(ConflictError):
            await store.commit({key: None if entry is None else entry.stamp}, puts={key: msgspec.json.encode(wanted)})
            return


def _agreed(begun: Begun | None, config: CaptureConfig) -> Begun:
    """What is to be noted. Raises `invalid_request` that names what does not go with what was noted."""
    options = {key.lower(): value for key, value in config.options.items()}
    identity = {name: options[name].rstrip("/") for name in IDENTITY.get(config.stream, ()) if options.get(name)}
    if begun is not None:
        known = begun.identity or {}
        for name, was, now in (
            ("stream", begun.stream, config.stream),
            *((name, f"{name} {known[name]}", f"{name} {identity[name]}") for name in sorted(known.keys() & identity.keys())),
            ("queue", _target(begun.queue), _target(config.queue)),
        ):
            if was != now:
                raise _refused(config, name, was, now)
        if not _is_same_log(begun.log, config.log):
            raise _refused(config, "log", f"the log {begun.log}", config.log)
        identity = known | identity
    return Begun(stream=config.stream, log=config.log, queue=config.queue, identity=identity)


def _refused(config: CaptureConfig, field: str, was: str, now: str) -> SluicewayError:
    return invalid(field, f"capture {config.name} was begun with {was}, not {now}; take another name")


def _target(queue: str) -> str:
    return f"the queue {queue}" if queue else "no queue"


def _is_same_log(was: str, now: str) -> bool:
    """Two lists of servers that have one in common are of one Kafka."""
    if was.startswith(KAFKA) and now.startswith(KAFKA):
        return not set(was.removeprefix(KAFKA).split(",")).isdisjoint(now.removeprefix(KAFKA).split(","))
    return was == now


# ---- looking -----------------------------------------------------------------------------------------------------------


async def captures(meta: str) -> dict[str, Begun]:
    """Those that were ever begun there, by name. Raises SluicewayError."""
    async with _opened(_existing(meta)) as store:
        entries = (await store.read(prefixes=[_REGISTER])).prefix(_REGISTER)
    return {key.removeprefix(_REGISTER): msgspec.json.decode(entry.value, type=Begun) for key, entry in entries.items()}


async def look(name: str, meta: str, log: str | None = None) -> Look:
    """By what its members have written: none need live, and nothing is created. `log` None: that which it was begun with.

    Raises SluicewayError.
    """
    key = f"{_REGISTER}{check_queue_name(name, 'name')}"
    async with _opened(_existing(meta)) as store:
        entry = (await store.read([key])).entries.get(key)
        begun = None if entry is None else msgspec.json.decode(entry.value, type=Begun)
        opened = open_log(name, log or (begun.log if begun is not None else "meta"), store, create=False)
        try:
            state, _ = await whole(opened)
            positions = await open_positions(name, store).read()
            alarms = await AlarmBoard(store, name).read(state.joined)
        except (LogUnavailableError, PositionUnknownError) as error:
            raise SluicewayError("unavailable", str(error)) from error
        finally:
            await opened.close()
    committed = {token: each.kept.at for token, each in positions.items() if each.kept.at is not None}
    # Of a partition of which nothing is known yet the core says 0.
    return Look(name, begun, state, positions, watermark(state, committed) or None, stuck(state), alarms)


def there_is(meta: str) -> bool:
    """Whether there can be captures: a file that is to be made first has none. Raises `invalid_request`."""
    url = read_secret(meta, "meta", os.environ) or meta
    return not url.startswith("sqlite:") or Path(url.removeprefix("sqlite:")).exists()


def _existing(meta: str) -> str:
    """The URL, unless opening it would make a file."""
    if not there_is(meta):
        raise invalid("meta", f"there is no file {(read_secret(meta, 'meta', os.environ) or meta).removeprefix('sqlite:')}")
    return meta


# ---- forgetting --------------------------------------------------------------------------------------------------------


class Forgotten(NamedTuple):
    """`keys`: how many were dropped. `left`: what is elsewhere and stays, each with what is to be done."""

    keys: int
    left: tuple[str, ...]


async def forget(name: str, meta: str, *, gone: bool = False) -> Forgotten:
    """End a capture for good: its log, positions and election are dropped from the meta store.

    Refused while members are at work: begun anew they would read the stream from its beginning. By a log in the meta store they are
    seen to live; by one in Kafka, or if it cannot be read, whoever has not left counts, unless the caller knows that they are `gone`.
    Broken off, it can be said again. Raises SluicewayError.
    """
    key = f"{_REGISTER}{check_queue_name(name, 'name')}"
    async with _opened(_existing(meta)) as store:
        try:
            entry = (await store.read([key])).entries.get(key)
            if entry is None:
                raise invalid("name", f"there is no capture {name} in this meta store")
            begun = msgspec.json.decode(entry.value, type=Begun)
            # Also when it is said that all are gone: it costs some seconds, and one that lives would begin anew.
            members = await alive(store, name)
            if not gone and not members and begun.log != "meta":
                members = sorted((await look(name, meta)).state.joined)
            if members:
                raise invalid("name", f"members of {name} are at work, or have not left: {', '.join(members)[:500]}; end them first")
            tokens = sorted(await open_positions(name, store).read())
            return Forgotten(await drop(store, name, key), tuple(_left(name, begun, tokens)))
        except PositionUnknownError as error:
            raise SluicewayError("unavailable", str(error)) from error
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", str(error)) from error


def _left(name: str, begun: Begun, tokens: Sequence[str]) -> Iterator[str]:
    if begun.stream == "postgres":
        for slot in _slots(name, tokens):
            yield f"a replication slot, which fills the database's disk: SELECT pg_drop_replication_slot('{slot}');"
    if begun.log != "meta":
        yield f"topics of Kafka: {name}_connector_sync and {name}_connector_control, and the consumer group {name}"
    if begun.queue:
        yield f"the queue {begun.queue} remembers the batches of {name} for 30 days: until then take another name for that queue"


def _slots(name: str, publications: Sequence[str]) -> list[str]:
    try:
        module = import_module(STREAMS["postgres"])
    except ModuleNotFoundError:
        return [f"sluiceway_{name}_{publication}" for publication in publications]
    return [module.slot_name(name, publication) for publication in publications]
