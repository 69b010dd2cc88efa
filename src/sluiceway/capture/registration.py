"""What a capture was begun with, as its name says in the meta store: whoever names it again must go with that."""

from __future__ import annotations

import contextlib

import msgspec

from sluiceway.capture.config import KAFKA, CaptureConfig
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.names import check_queue_name
from sluiceway.ports.meta_store import ConflictError, MetaStore, Stamp

IDENTITY = {"kinesis": ("region", "stream"), "queue": ("url", "queue")}
"""Options that say which stream of its kind it is: another one is no stream for the same positions. Publications may come and go."""
REGISTER = "captures/"


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture was begun with, which cannot change: two logs would be two truths, positions are of one stream, and each batch goes
    to one target. `queue`: that target; "": another program's own. Servers of a Kafka may change, if one stays.
    """

    stream: str
    log: str
    queue: str = ""
    identity: dict[str, str] | None = None
    """Which stream of its kind: those of the options in IDENTITY that were said. None: nobody knows, an older version has begun it."""


def key_of(name: str) -> str:
    """Raises `invalid_request` for a bad name."""
    return f"{REGISTER}{check_queue_name(name, 'name')}"


async def all_begun(store: MetaStore) -> dict[str, Begun]:
    """Raises StoreUnavailableError."""
    entries = (await store.read(prefixes=[REGISTER])).prefix(REGISTER)
    return {key.removeprefix(REGISTER): msgspec.json.decode(entry.value, type=Begun) for key, entry in entries.items()}


async def find_begun(store: MetaStore, name: str) -> tuple[Begun | None, Stamp | None]:
    """With the stamp of its record. Raises `invalid_request`, StoreUnavailableError."""
    key = key_of(name)
    entry = (await store.read([key])).entries.get(key)
    return (None, None) if entry is None else (msgspec.json.decode(entry.value, type=Begun), entry.stamp)


async def note(config: CaptureConfig, store: MetaStore) -> None:
    """Note what the capture is begun with, or refuse what does not go with what was.

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
