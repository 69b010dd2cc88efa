"""What a user says in `.option(...)`: parsed once, checked once, and wrong ones named.

Spark hands all options over in lower case, and puts a few of its own among them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import urlsplit

from sluiceway.kernel.clock import Millis, parse_duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_LEASE_TIMEOUT
from sluiceway.kernel.names import check_queue_name, check_text
from sluiceway.model.inspection import BrowseState

COMMON = ("url", "queue", "requestTimeout", "apiKey", "caFile")
SOURCE = (*COMMON, "consumer", "maxItemsPerTrigger", "maxBytesPerTrigger", "minPartitions", "holdFor", "failOnLeaseLoss")
SINK = (*COMMON, "mode", "chunkItems", "writeId")
BROWSE = (*COMMON, "state")
_LEASING = ("consumer", "maxItemsPerTrigger", "maxBytesPerTrigger", "minPartitions", "holdFor", "failOnLeaseLoss")
_STATES: tuple[BrowseState, ...] = ("ready", "leased", "scheduled")

_LARGEST = 2**31 - 1

_OF_A_TABLE = "option."
"""What `CREATE TABLE … OPTIONS (…)` says is handed over twice: as it is, and with this before it."""

_BYTES = re.compile(r"([0-9]{1,18})([kmgt]?)b?", re.IGNORECASE)
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True, slots=True)
class Server:
    """Which queue of which server, and for how long (ms) a call that is safe to repeat is repeated.

    `api_key` says where the key is (`env:NAME`, `file:PATH`), never what it is: this travels to tasks, and Spark shows options in its
    plans. Like `ca_file` it is read on the machine that makes the calls; empty: what SLUICEWAY_API_KEY and SLUICEWAY_CA_FILE are there.
    """

    url: str
    queue: str
    request_timeout: Millis
    api_key: str = ""
    ca_file: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of `readStream`. `consumer` owns the leases; `hold_for` (ms) is how long they outlive a stopped query.

    `queues` are those that are read, `server` names the first of them. `max_bytes_per_trigger`: None is any number.
    """

    server: Server
    consumer: str
    max_items_per_trigger: int
    min_partitions: int
    hold_for: Millis
    queues: tuple[str, ...]
    max_bytes_per_trigger: int | None = None
    fail_on_lease_loss: bool = True


@dataclass(frozen=True, slots=True)
class BrowseOptions:
    """Options of `read`: which items."""

    server: Server
    states: tuple[BrowseState, ...]


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options of `write` and `writeStream`. `mode` is `produce` or `settle`; `write_id` makes a batch write repeatable."""

    server: Server
    mode: str
    chunk_items: int
    write_id: str | None


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Raises `invalid_request` that names the option at fault."""
    _check_names(options, SOURCE, "reading")
    server, queues = _server(options)
    if len(set(queues)) < len(queues):
        raise invalid("queue", "the same queue is named twice")
    read = SourceOptions(
        server=server,
        consumer=check_text(required(options, "consumer", "the name that owns this query's leases"), "consumer"),
        max_items_per_trigger=count(options, "maxItemsPerTrigger", 50_000, _LARGEST),
        min_partitions=count(options, "minPartitions", 1, 100_000),
        hold_for=duration(options, "holdFor", "1d", 1_000, MAX_LEASE_TIMEOUT),
        queues=queues,
        max_bytes_per_trigger=_size(options, "maxBytesPerTrigger"),
        fail_on_lease_loss=_yes(options, "failOnLeaseLoss", default=True),
    )
    for name, most in (("maxItemsPerTrigger", read.max_items_per_trigger), ("maxBytesPerTrigger", read.max_bytes_per_trigger)):
        if most is not None and most < len(queues):
            raise invalid(name, f"{most} cannot be divided among {len(queues)} queues")
    return read


def leases(options: Mapping[str, str]) -> bool:
    """Whether these are options of `readStream`: Spark does not say for which of the two it asks for the columns."""
    return any(get(options, name) is not None for name in _LEASING)


def browse_options(options: Mapping[str, str]) -> BrowseOptions:
    """Raises `invalid_request` that names the option at fault."""
    if leases(options):
        given = next(name for name in _LEASING if get(options, name) is not None)
        raise invalid(given, "spark.read looks and takes nothing, so it has no such option; to take what is ready, use spark.readStream")
    _check_names(options, BROWSE, "browsing")
    wanted = [text.strip() for text in (get(options, "state") or "ready").split(",")]
    states = tuple(state for state in _STATES if state in wanted)
    if len(states) < len(wanted):
        raise invalid("state", "expected one or more of ready, leased and scheduled, each once, separated by commas")
    server, queues = _server(options)
    if len(queues) > 1:
        raise invalid("queue", "one queue is looked at; only readStream takes several")
    return BrowseOptions(server, states)


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Raises `invalid_request` that names the option at fault."""
    _check_names(options, SINK, "writing")
    mode = get(options, "mode") or "produce"
    if mode not in ("produce", "settle"):
        raise invalid("mode", f"{mode[:40]!r} is not a mode; it is produce (the default) or settle")
    write_id = get(options, "writeId")
    # The rest of the key needs some of its 1,024 bytes.
    if write_id is not None and not 1 <= len(check_text(write_id, "writeId").encode()) <= 900:
        raise invalid("writeId", "expected 1 to 900 bytes")
    server, queues = _server(options)
    if len(queues) > 1:
        raise invalid("queue", "one queue is written to; only reading takes several")
    return SinkOptions(server, mode, count(options, "chunkItems", 1_000, MAX_ITEMS_ARROW), write_id)


def server_options(options: Mapping[str, str]) -> Server:
    """The options that reading and writing share. Raises `invalid_request` that names the option at fault."""
    _check_names(options, (*SOURCE, *SINK, *BROWSE), "using")
    return _server(options)[0]


def _server(options: Mapping[str, str]) -> tuple[Server, tuple[str, ...]]:
    """The server, with the first queue that is named, and all of them."""
    url = required(options, "url", "the server, such as http://127.0.0.1:2319").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise invalid("url", f"{url[:100]!r} is not the address of a server, such as http://127.0.0.1:2319")
    named = required(options, "queue", "the name of a queue").split(",")
    queues = tuple(check_queue_name(name.strip(), "queue") for name in named)
    api_key = get(options, "apiKey") or ""
    if api_key and not api_key.startswith(("env:", "file:")):
        shown = "a key does not stand here itself, because Spark shows options in plans and logs"
        raise invalid("apiKey", f"{shown}; say where it is on the driver and on every executor: env:NAME or file:PATH")
    request_timeout = duration(options, "requestTimeout", "2m", 1_000, 86_400_000)
    return Server(url, queues[0], request_timeout, api_key, get(options, "caFile") or ""), queues


def get(options: Mapping[str, str], name: str) -> str | None:
    lower = name.lower()
    return next((value for key, value in options.items() if key.lower() == lower), None)


def required(options: Mapping[str, str], name: str, meaning: str) -> str:
    value = get(options, name)
    if not value:
        raise invalid(name, f"this option is required: {meaning}")
    return value


def count(options: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = get(options, name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise invalid(name, f"{text[:40]!r} is not a whole number from 1 to {most:,}")
    return int(text)


def duration(options: Mapping[str, str], name: str, default: str, least: Millis, most: Millis) -> Millis:
    text = get(options, name) or default
    millis = parse_duration(text, name)
    if not least <= millis <= most:
        raise invalid(name, f"{text} is out of range: from {least} ms to {most // 1_000} s")
    return millis


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
    """Spark's own options pass; a name that is nearly ours, or ours for the other direction, is a mistake."""
    every = {name.lower(): name for name in (*SOURCE, *SINK, *BROWSE)}
    for key in options:
        if key.lower().startswith(_OF_A_TABLE):
            continue
        name = every.get(key.lower())
        if name is None:
            if near := get_close_matches(key.lower(), list(every), n=1, cutoff=0.75):
                raise invalid(key, f"there is no such option; did you mean {every[near[0]]}?")
        elif name not in known:
            raise invalid(name, f"this is no option of {doing} a queue; those are {', '.join(known)}")
