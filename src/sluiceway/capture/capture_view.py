"""Capture view: the state of captures, from their members' records; and deletion of captures."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from sluiceway.capture.alarms import AlarmBoard, AlarmsOf
from sluiceway.capture.config import STREAMS
from sluiceway.capture.log_reader import left
from sluiceway.capture.member_parts import open_log, open_positions, opened
from sluiceway.capture.registration import Begun, all_begun, find_begun, key_of
from sluiceway.capture.removal import alive, drop
from sluiceway.core.group.task_fold import restore, stuck, watermark
from sluiceway.core.group.task_state import State
from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.secrets import read_secret
from sluiceway.ports.meta_store import MetaStore, MetaUnknownError
from sluiceway.ports.position_store import PositionUnknownError, Stored
from sluiceway.ports.sync_log import LogUnavailableError


class Look(NamedTuple):
    """A capture's current state. `begun` None: no member has ever begun it. `alarms`: those of members that have joined."""

    name: str
    begun: Begun | None
    state: State
    positions: Mapping[str, Stored]
    watermark: Millis | None
    """Time before which no further record can come; None: no record is to come, or nothing is known yet."""
    stuck: dict[str, tuple[str, ...]]
    """If nothing can proceed although partitions are unfinished: the waiting ones, each with its missing parents."""
    alarms: AlarmsOf


async def captures(meta: str) -> dict[str, Begun]:
    """All captures registered in that meta store, by name. Raises SluicewayError."""
    async with opened(_existing(meta)) as store:
        return await all_begun(store)


async def look(name: str, meta: str, log: str | None = None) -> Look:
    """View a capture by its members' records: none need be alive, and nothing is created. `log` None: the registered log.

    Raises SluicewayError.
    """
    async with opened(_existing(meta)) as store:
        begun, _ = await find_begun(store, name)
        return await look_in(store, name, begun, log)


async def look_in(store: MetaStore, name: str, begun: Begun | None, log: str | None = None) -> Look:
    """As `look`, in an open store, and without blocking its event loop for long. Raises SluicewayError."""
    # In threads: loading Kafka's client, and folding a long log of thousands of partitions, takes a moment.
    opened_log = await asyncio.to_thread(open_log, name, log or (begun.log if begun is not None else "meta"), store, create=False)
    try:
        entries, _ = await left(opened_log)
        state = await asyncio.to_thread(restore, entries)
        positions = await open_positions(name, store).read()
        alarms = await AlarmBoard(store, name).read(state.joined)
    except (LogUnavailableError, PositionUnknownError) as error:
        raise SluicewayError("unavailable", str(error)) from error
    finally:
        await opened_log.close()
    committed = {token: each.kept.at for token, each in positions.items() if each.kept.at is not None}
    # For a partition of which nothing is known yet the core returns 0.
    return Look(name, begun, state, positions, watermark(state, committed) or None, stuck(state), alarms)


def there_is(meta: str) -> bool:
    """Whether captures can exist: a SQLite file that does not exist yet has none. Raises `invalid_request`."""
    url = read_secret(meta, "meta", os.environ) or meta
    return not url.startswith("sqlite:") or Path(url.removeprefix("sqlite:")).exists()


def _existing(meta: str) -> str:
    """The URL, unless opening it would create a file."""
    if not there_is(meta):
        raise invalid("meta", f"there is no file {(read_secret(meta, 'meta', os.environ) or meta).removeprefix('sqlite:')}")
    return meta


# ---- deletion ----------------------------------------------------------------------------------------------------------


class Forgotten(NamedTuple):
    """Result of `forget`. `keys`: number of keys dropped. `left`: what remains elsewhere, each with the action needed."""

    keys: int
    left: tuple[str, ...]


async def forget(name: str, meta: str, *, gone: bool = False) -> Forgotten:
    """Delete a capture for good: drop its log, positions and election from the meta store.

    Refused while members are at work: restarted they would read the stream from its beginning. With a log in the meta store, liveness is
    observed; with one in Kafka, or an unreadable one, every member that has not left counts, unless the caller knows that they are `gone`.
    Repeat it after an interruption. Raises SluicewayError.
    """
    key = key_of(name)
    async with opened(_existing(meta)) as store:
        try:
            begun, _ = await find_begun(store, name)
            if begun is None:
                raise invalid("name", f"there is no capture {name} in this meta store")
            # Also with `gone`: it takes a few seconds, and a live member would begin anew.
            members = await alive(store, name)
            if not gone and not members and begun.log != "meta":
                members = sorted((await look(name, meta)).state.joined)
            if members:
                raise invalid("name", f"members of {name} are running, or did not leave: {', '.join(members)[:500]}; stop them first")
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
        yield f"the queue {begun.queue} remembers the batches of {name} for 30 days: until then, use another capture name for that queue"


def _slots(name: str, publications: Sequence[str]) -> list[str]:
    try:
        module = import_module(STREAMS["postgres"])
    except ModuleNotFoundError:
        return [f"sluiceway_{name}_{publication}" for publication in publications]
    return [module.slot_name(name, publication) for publication in publications]
