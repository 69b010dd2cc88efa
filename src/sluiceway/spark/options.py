"""Options of the data source, parsed and checked once, with errors that name the option.

Spark passes all options in lower case, together with a few of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from sluiceway.contract.item_answers import BrowseState
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_LEASE_TIMEOUT, MAX_PARTITIONS
from sluiceway.kernel.names import check_queue_name, check_text
from sluiceway.kernel.options import count, duration, get, required, unknown

COMMON = ("url", "queue", "requestTimeout", "apiKey", "caFile", "direct")
_LEASING = ("consumer", "maxItemsPerTrigger", "maxBytesPerTrigger", "minPartitions", "holdFor", "failOnLeaseLoss", "partitions", "runs")
SOURCE = (*COMMON, *_LEASING, "payloadFormat")
SINK = (*COMMON, "mode", "chunkItems", "writeId", "atomic", "badRows", "close")
BROWSE = (*COMMON, "state", "payloadFormat")
CONSUME = (*COMMON, "mode", "consumer", "maxItems", "minPartitions", "holdFor", "runs", "payloadFormat")
CHUNK_ITEMS = MAX_ITEMS_ARROW
"""Default of `chunkItems`: a row of 100 B in a chunk of 4,000 costs the server 1.4 times as much (docs/adr/0079-chunks-made-ahead.md)."""
CHUNK_BYTES = 4 << 20
"""Bytes at which a chunk is cut: a larger one saves a few percent at most, and holds up the others in its partition."""
_EVERY = tuple(dict.fromkeys((*SOURCE, *SINK, *BROWSE, *CONSUME)))
_STATES: tuple[BrowseState, ...] = ("ready", "leased", "scheduled")

_LARGEST = 2**31 - 1

HOLD_FOR = "7d"
"""Covers the day between two runs of a nightly job, and a weekend: a query that pauses for longer loses its leases."""

_OF_A_TABLE = "option."
"""Prefix of duplicates: Spark passes the options of `CREATE TABLE … OPTIONS (…)` both with and without it."""

_OF_A_CATALOG = (
    "Spark does not pass the OPTIONS of a catalog's table to SELECT, INSERT or CREATE TABLE … AS SELECT of this source: use a DataFrame, "
    "as in "
    'df.write.format("sluiceway").mode("append").options(url=…, queue=…).save() and spark.read.format("sluiceway").options(url=…, queue=…)'
)

_KAFKAS = {
    **dict.fromkeys(("subscribe", "subscribepattern", "topic"), "queue"),
    **dict.fromkeys(("startingoffsets", "startingoffsetsbytimestamp", "startingtimestamp"), ""),
    **dict.fromkeys(("endingoffsets", "endingoffsetsbytimestamp", "endingtimestamp", "includeheaders", "minoffsetspertrigger"), ""),
    **dict.fromkeys(("maxrecordsperpartition", "maxtriggerdelay"), ""),
    **dict.fromkeys(("fetchoffset.numretries", "kafkaconsumer.polltimeoutms"), "requestTimeout"),
    **dict.fromkeys(("kafka.group.id", "groupidprefix"), "consumer"),
    "kafka.bootstrap.servers": "url",
    "assign": "partitions",
    "maxoffsetspertrigger": "maxItemsPerTrigger",
    "failondataloss": "failOnLeaseLoss",
}
"""Options of Spark's Kafka connector, with the nearest of ours: if ignored, they would promise something that is not done."""

_KAFKAS_KEYS = ("kafka.security.", "kafka.ssl.", "kafka.sasl.")
_OF_KEYS = "an https url, caFile and apiKey"
_NO_COUNTERPART = "leave it out"

_BYTES = re.compile(r"([0-9]{1,18})([kmgt]?)b?", re.IGNORECASE)
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, slots=True)
class Server:
    """A queue of a server, and how long (ms) idempotent calls are retried.

    `api_key` locates the key (`env:NAME`, `file:PATH`) and never contains it: this object travels to tasks, and Spark shows options in its
    plans. Like `ca_file` it is resolved on the machine that makes the calls; empty: SLUICEWAY_API_KEY and SLUICEWAY_CA_FILE there.
    `direct`: calls on partitions of one instance of a cluster go straight to that instance.
    """

    url: str
    queue: str
    request_timeout: Millis
    api_key: str = ""
    ca_file: str = ""
    direct: bool = False


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of `readStream`. `consumer` owns the leases; `hold_for` (ms) is how long they outlive a stopped query. If it
    `hold_for_is_default`, it is reduced to the queues' maximum.

    `queues` are all queues read, `server` names the first of them. `max_bytes_per_trigger`: None is unlimited. `partitions`: those to lease
    from; None: all. `json`: payloads are parsed as JSON. `runs`: several items of a key in one batch, in order and in one task.
    """

    server: Server
    consumer: str
    max_items_per_trigger: int
    min_partitions: int
    hold_for: Millis
    queues: tuple[str, ...]
    max_bytes_per_trigger: int | None = None
    fail_on_lease_loss: bool = True
    partitions: tuple[int, ...] | Literal["draining"] | None = None
    json: bool = False
    hold_for_is_default: bool = False
    runs: bool = False


@dataclass(frozen=True, slots=True)
class BrowseOptions:
    """Options of `read`: the states of items to browse. `json`: payloads are parsed as JSON."""

    server: Server
    states: tuple[BrowseState, ...]
    json: bool = False


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of `write` and `writeStream`. `mode` is `produce` or `settle`; `write_id` makes a batch write repeatable.

    With `atomic` a task writes all of its rows or none; `bad_rows` is the queue for rows that `server.queue` cannot take. With `close` the
    leases named by rows are closed once all outcomes are staged.
    """

    server: Server
    mode: str
    chunk_items: int
    write_id: str | None
    atomic: bool = False
    bad_rows: str | None = None
    close: bool = False


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of `readStream`. Raises `invalid_request` that names the option at fault."""
    _check_names(options, SOURCE, "reading")
    server, queues = _server(options)
    if len(set(queues)) < len(queues):
        raise invalid("queue", "the same queue is named twice")
    read = SourceOptions(
        server=server,
        consumer=check_text(required(options, "consumer", "the name that owns this query's leases"), "consumer"),
        max_items_per_trigger=count(options, "maxItemsPerTrigger", 50_000, _LARGEST),
        min_partitions=count(options, "minPartitions", 1, 100_000),
        hold_for=duration(options, "holdFor", HOLD_FOR, 1_000, MAX_LEASE_TIMEOUT),
        queues=queues,
        max_bytes_per_trigger=_size(options, "maxBytesPerTrigger"),
        fail_on_lease_loss=_yes(options, "failOnLeaseLoss", default=True),
        partitions=_partitions(options),
        json=_json(options),
        hold_for_is_default=get(options, "holdFor") is None,
        runs=_yes(options, "runs", default=False),
    )
    if read.partitions is not None and len(queues) > 1:
        raise invalid("partitions", "partition numbers are those of one queue; read each queue with its own query")
    for name, most in (("maxItemsPerTrigger", read.max_items_per_trigger), ("maxBytesPerTrigger", read.max_bytes_per_trigger)):
        if most is not None and most < len(queues):
            raise invalid(name, f"{most} cannot be divided among {len(queues)} queues")
    return read


def consumes(options: Mapping[str, str]) -> bool:
    """Whether `spark.read` is to lease what it reads. Raises `invalid_request` for an unknown mode."""
    mode = get(options, "mode")
    if mode is not None and mode not in ("consume", "produce", "settle"):
        raise invalid("mode", f"{mode[:40]!r} is not a mode; expected consume for reading, produce (the default) or settle for writing")
    return mode == "consume"


def consume_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of `spark.read` with `mode=consume`. Raises `invalid_request` that names the option at fault."""
    _check_names(options, CONSUME, "consuming")
    server, queues = _server(options)
    if len(queues) > 1:
        raise invalid("queue", "a read consumes one queue; only readStream takes several")
    return SourceOptions(
        server=server,
        consumer=check_text(required(options, "consumer", "the name that owns the leases"), "consumer"),
        max_items_per_trigger=count(options, "maxItems", _LARGEST, _LARGEST),
        min_partitions=count(options, "minPartitions", 1, 100_000),
        hold_for=duration(options, "holdFor", "1h", 1_000, MAX_LEASE_TIMEOUT),
        queues=queues,
        json=_json(options),
        runs=_yes(options, "runs", default=False),
    )


def leases(options: Mapping[str, str]) -> bool:
    """Whether these are options of `readStream`: Spark does not tell which of the two asks for the columns."""
    return any(get(options, name) is not None for name in _LEASING)


def browse_options(options: Mapping[str, str]) -> BrowseOptions:
    """Parse the options of `spark.read` without a mode. Raises `invalid_request` that names the option at fault."""
    if leases(options):
        given = next(name for name in _LEASING if get(options, name) is not None)
        others = "to take what is ready, use spark.readStream, or mode=consume"
        raise invalid(given, f"spark.read only browses the queue, so it has no such option; {others}")
    _check_names(options, BROWSE, "browsing")
    wanted = [text.strip() for text in (get(options, "state") or "ready").split(",")]
    states = tuple(state for state in _STATES if state in wanted)
    if len(states) < len(wanted):
        raise invalid("state", "expected one or more of ready, leased and scheduled, each once, separated by commas")
    server, queues = _server(options)
    if len(queues) > 1:
        raise invalid("queue", "spark.read reads one queue; only readStream takes several")
    return BrowseOptions(server, states, _json(options))


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse the options of `write` and `writeStream`. Raises `invalid_request` that names the option at fault."""
    _check_names(options, SINK, "writing")
    mode = get(options, "mode") or "produce"
    if mode not in ("produce", "settle"):
        raise invalid("mode", f"{mode[:40]!r} is not a mode; expected produce (the default) or settle")
    server, queues = _server(options)
    if len(queues) > 1:
        raise invalid("queue", "one queue is written to; only reading takes several")
    atomic, close = _yes(options, "atomic", default=False), _yes(options, "close", default=False)
    if atomic and get(options, "chunkItems") is not None:
        raise invalid("chunkItems", "with atomic=true a task has one chunk, whatever its size")
    bad_rows = get(options, "badRows")
    if bad_rows is not None and check_queue_name(bad_rows, "badRows") == server.queue:
        raise invalid("badRows", "bad rows go to another queue than the good ones")
    write_id = get(options, "writeId")
    # The rest of the key takes some of its 1,024 bytes; keys of bad rows also begin with the target queue's name.
    most = 900 if bad_rows is None else 900 - len(server.queue)
    if write_id is not None and not 1 <= len(check_text(write_id, "writeId").encode()) <= most:
        raise invalid("writeId", f"expected 1 to {most} bytes")
    for name, given, of in (("atomic", atomic, "produce"), ("badRows", bad_rows is not None, "produce"), ("close", close, "settle")):
        if given and mode != of:
            raise invalid(name, f"this is an option of mode={of}")
    chunk_items = MAX_ITEMS_ARROW if atomic else count(options, "chunkItems", CHUNK_ITEMS, MAX_ITEMS_ARROW)
    return SinkOptions(server, mode, chunk_items, write_id, atomic, bad_rows, close)


def server_options(options: Mapping[str, str]) -> Server:
    """Parse the options common to reading and writing. Raises `invalid_request` that names the option at fault."""
    _check_names(options, _EVERY, "using")
    return _server(options)[0]


def _server(options: Mapping[str, str]) -> tuple[Server, tuple[str, ...]]:
    """The server with the first named queue, and all named queues."""
    if not any(get(options, name) for name in ("url", "queue")):
        raise invalid("url", f"neither url nor queue is given, and both are required. {_OF_A_CATALOG}")
    url = required(options, "url", "the server, such as http://127.0.0.1:2319").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise invalid("url", f"{url[:100]!r} is not the address of a server, such as http://127.0.0.1:2319")
    named = required(options, "queue", "the name of a queue").split(",")
    queues = tuple(check_queue_name(name.strip(), "queue") for name in named)
    api_key = get(options, "apiKey") or ""
    if api_key and not api_key.startswith(("env:", "file:")):
        shown = "a key must not be in an option, because Spark shows options in plans and logs"
        raise invalid("apiKey", f"{shown}; name the place of the key on the driver and on every executor: env:NAME or file:PATH")
    request_timeout = duration(options, "requestTimeout", "2m", 1_000, 86_400_000)
    direct = _yes(options, "direct", default=False)
    return Server(url, queues[0], request_timeout, api_key, get(options, "caFile") or "", direct), queues


def _partitions(options: Mapping[str, str]) -> tuple[int, ...] | Literal["draining"] | None:
    text = get(options, "partitions")
    if text is None:
        return None
    if text.strip().lower() == "draining":
        return "draining"
    named = [each.strip() for each in text.split(",")]
    numbers = {int(each) for each in named if each.isascii() and each.isdigit() and len(each) < 10}
    if len(numbers) < len(named) or len(numbers) > MAX_PARTITIONS:
        raise invalid("partitions", f"{text[:40]!r} is neither draining nor numbers of partitions, each once, such as 3,4")
    return tuple(sorted(numbers))


def _json(options: Mapping[str, str]) -> bool:
    text = get(options, "payloadFormat") or "binary"
    if text.lower() not in ("binary", "json"):
        raise invalid("payloadFormat", f"{text[:40]!r} is not a payload format; use binary (the default) or json")
    return text.lower() == "json"


def _size(options: Mapping[str, str], name: str) -> int | None:
    text = get(options, name)
    if text is None:
        return None
    found = _BYTES.fullmatch(text.strip())
    size = int(found[1]) << _SHIFT[found[2].lower()] if found else 0
    if size < 1:
        raise invalid(name, f"{text[:40]!r} is not a number of bytes such as 67108864, 64m or 1g")
    return size


def _yes(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = get(options, name)
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise invalid(name, f"{text[:40]!r} is neither true nor false")
    return text.strip().lower() == "true"


def _check_names(options: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
    """Reject names that resemble ours, belong to the other direction, or are Kafka's; Spark's own options pass."""
    every = {name.lower(): name for name in _EVERY}
    _check_kafkas(options)
    for key in options:
        if key.lower().startswith(_OF_A_TABLE):
            continue
        name = every.get(key.lower())
        if name is None:
            if error := unknown(key, _EVERY, 0.75):
                raise error
        elif name not in known:
            raise invalid(name, f"not an option for {doing} a queue; expected one of {', '.join(known)}")


def _check_kafkas(options: Mapping[str, str]) -> None:
    """Reject options of Kafka's connector, all of them at once, so that a query that is ported needs one look."""
    left = {}
    for key in options:
        if key.lower() in _KAFKAS or key.lower().startswith("kafka."):
            ours = _OF_KEYS if key.lower().startswith(_KAFKAS_KEYS) else _KAFKAS.get(key.lower())
            left[key] = f"see {ours}" if ours else _NO_COUNTERPART
    if not left:
        return
    # Spark passes options in any order.
    (first, instead), *others = sorted(left.items(), key=lambda each: (each[1] == _NO_COUNTERPART, each[0]))
    also = "".join(f"; {key}: {what}" for key, what in others)
    what = f"this is an option of Kafka's connector, and has no effect here; {instead}{also}"
    raise invalid(first, f"{what} (docs/guides/from-kafka.md)")
