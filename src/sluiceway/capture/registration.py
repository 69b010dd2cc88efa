"""Capture registration: the settings a capture was begun with, in the meta store, which every later start must match."""

from __future__ import annotations

import contextlib

import msgspec

from sluiceway.capture.config import KAFKA, CaptureConfig
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import ConflictError, MetaStore, Stamp

IDENTITY = {"kinesis": ("region", "stream"), "queue": ("url", "queue")}
"""Options that identify the stream within its kind: with others, the positions would be meaningless. Publications may come and go."""
REGISTER = "captures/"


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed settings of a capture: two logs would be two truths, positions belong to one stream, and each batch goes to one target.
    `queue`: that target; "": another program's own. The servers of a Kafka may change, if one stays."""

    stream: str
    log: str
    queue: str = ""
    identity: dict[str, str] | None = None
    """The stream within its kind: the given options of IDENTITY. None: unknown, since an older version began the capture."""


def key_of(name: str) -> str:
    """The meta-store key of that capture's registration. Raises `invalid_request` for a bad name."""
    return f"{REGISTER}{check_queue_name(name, 'name')}"


async def all_begun(store: MetaStore) -> dict[str, Begun]:
    """All registered captures by name. Raises StoreUnavailableError."""
    entries = (await store.read(prefixes=[REGISTER])).prefix(REGISTER)
    return {key.removeprefix(REGISTER): msgspec.json.decode(entry.value, type=Begun) for key, entry in entries.items()}


async def find_begun(store: MetaStore, name: str) -> tuple[Begun | None, Stamp | None]:
    """The registration and its record's stamp, or None, None. Raises `invalid_request`, StoreUnavailableError."""
    key = key_of(name)
    entry = (await store.read([key])).entries.get(key)
    return (None, None) if entry is None else (msgspec.json.decode(entry.value, type=Begun), entry.stamp)


async def note(config: CaptureConfig, store: MetaStore) -> None:
    """Register the capture's settings, or refuse them if they contradict the registered ones.

    Raises `invalid_request`, StoreUnavailableError, MetaUnknownError.
    """
    while True:
        begun, stamp = await find_begun(store, config.name)
        wanted = agreed(begun, config)
        if begun == wanted:
            return
        with contextlib.suppress(ConflictError):
            await store.commit({key_of(config.name): stamp}, puts={key_of(config.name): msgspec.json.encode(wanted)})
            return


def agreed(begun: Begun | None, config: CaptureConfig) -> Begun:
    """Return the registration to store. Raises `invalid_request` that names a setting that contradicts the registered one."""
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
    return invalid(field, f"capture {config.name} was started with {was}, not {now}; use another name")


def _target(queue: str) -> str:
    return f"the queue {queue}" if queue else "no queue"


def _is_same_log(was: str, now: str) -> bool:
    """Whether two logs are the same; lists of servers with one in common belong to one Kafka."""
    if was.startswith(KAFKA) and now.startswith(KAFKA):
        return not set(was.removeprefix(KAFKA).split(",")).isdisjoint(now.removeprefix(KAFKA).split(","))
    return was == now
