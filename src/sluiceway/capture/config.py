"""Configuration of a capture, common to all members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import get_args

from sluiceway.core.group.task_member import Preset
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.names import check_queue_name

STREAMS = {
    "kinesis": "sluiceway.capture.streams.kinesis",
    "postgres": "sluiceway.capture.streams.postgres_slot",
    "queue": "sluiceway.capture.lineage",
}
"""Built-in kinds of streams, and their modules: each has a `from_options(name, options)`."""
GROUP = "sluiceway.streams"
"""Entry-point group of installed packages with further kinds. Each names a `from_options`; built-in kinds take precedence."""
KAFKA = "kafka:"
MAX_LIMIT = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureConfig:
    """Configuration of a capture, identical for all members. Contains only texts and numbers, so that it can be sent anywhere.

    `meta`: a URL as for `open_meta_store`, or `env:NAME` or `file:PATH` that holds it. `log`: `meta`, or `kafka:HOST:PORT,…`. `stream` and
    `options`: the source. `url`, `queue`, `api_key` (`env:NAME` or `file:PATH`), `ca_file`: the target; without `url` and `queue` the
    member has a handler of its own. `limit`: records per batch. Raises `invalid_request` that names the field.
    """

    name: str
    meta: str = field(repr=False)
    """Hidden from the representation, since it may contain a password."""
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
        check_shared(self.meta)
        check_kind(self.stream)
        check_log(self.log)
        if bool(self.url) != bool(self.queue):
            raise invalid("queue" if self.url else "url", "url and queue go together: they name the queue that receives the records")
        if self.queue:
            check_queue_name(self.queue, "queue")
        if self.api_key and not self.api_key.startswith(("env:", "file:")):
            raise invalid("api_key", "expected env:NAME or file:PATH that holds the key, not the key itself")
        if self.preset not in get_args(Preset):
            raise invalid("preset", f"expected one of {', '.join(get_args(Preset))}")
        if not 1 <= self.limit <= MAX_LIMIT:
            raise invalid("limit", f"expected 1 to {MAX_LIMIT:,} records a batch")


def check_kind(stream: str) -> None:
    if stream not in STREAMS and entry_of(stream) is None:
        known = ", ".join([*STREAMS, *sorted({each.name for each in entry_points(group=GROUP)} - STREAMS.keys())])
        raise invalid(
            "stream",
            f"{stream[:40]!r} is not a kind of stream; expected one of {known}, or one that a package provides by the entry point {GROUP}",
        )


def entry_of(stream: str) -> EntryPoint | None:
    """The entry point of that kind, or None. Raises `invalid_request` if several packages have one."""
    found = list(entry_points(group=GROUP, name=stream))
    if len({each.value for each in found}) > 1:
        packages = ", ".join(sorted(each.dist.name if each.dist is not None else each.value for each in found))
        raise invalid("stream", f"several packages provide the stream kind {stream}: {packages}; remove all but one")
    return found[0] if found else None


def check_log(log: str) -> None:
    if log != "meta" and not (log.startswith(KAFKA) and log != KAFKA):
        raise invalid("log", f"{log[:80]!r} is not a log; expected meta, or kafka:HOST:PORT[,HOST:PORT]")


def check_shared(url: str) -> None:
    if url == "memory:":
        raise invalid(
            "meta", "a memory: store belongs to one process, so each task would read everything; use sqlite:, postgresql:// or etcd://"
        )
