"""Whether a backend's storage is still the one in which the partitions were: an empty one, as of a disk that is not mounted, is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sluiceway.adapters import system
from sluiceway.adapters.storage.sqlite import identity_of
from sluiceway.local.partition_openings import Openings
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import PartitionStore, StoreUnavailableError

_KEY = "backend/"


class OtherStorageError(StoreUnavailableError):
    """What the backend reaches is not the storage that held its partitions."""


class Identity(NamedTuple):
    """What was found out about a directory."""

    problem: str | None
    """Why it must not be used, in words."""
    record: dict[str, bytes]
    """What the meta store has yet to be told, before the directory is used; it has none of these keys."""


def record_of(name: str) -> str:
    """The meta store's key for that backend's identity."""
    return _KEY + name


async def identify(name: str, directory: Path, meta: MetaStore) -> Identity:
    """Whether it is the directory that the backend had before. The first time, gives it an identity. Raises OSError, StoreUnavailableError.

    It is asked before there is a store, which would make a directory that is missing. To serve an empty one in the place of a full one
    would lose what is in it, and give its ids to other items.
    """
    key = record_of(name)
    entry = (await meta.read([key])).entries.get(key)
    if entry is None:
        found = identity_of(directory, system.new_incarnation())
        assert found is not None, "it was given one"
        return Identity(None, {key: found.encode()})
    found = identity_of(directory, None)
    if found == entry.value.decode():
        return Identity(None, {})
    problem = (
        f"{directory} is not the directory that held its partitions: the file identity is {'missing' if found is None else 'another'}. "
        f"Is its disk mounted? If what was there is lost for good, or was restored on purpose: sluiceway backend accept {name}"
    )
    return Identity(problem, {})


async def verify(name: str, store: PartitionStore, openings: Openings, known: str | None, *, first: bool) -> str | None:
    """The identity of the backend's storage, if the store has that: `known`, or else the recorded one. With `first` the store's own
    becomes it if there was none; without, the answer is then None. Raises OtherStorageError, OpeningsError, StoreUnavailableError.
    """
    key = record_of(name)
    recorded = known or await openings.look_up(key)
    if recorded is None:
        if not first:
            return None
        found = await store.identify(system.new_incarnation())
        assert found is not None, "it was given one"
        recorded = await openings.record(key, found)
    else:
        found = await store.identify(None)
    if found != recorded:
        raise OtherStorageError(
            f"this is not the storage that held its partitions: its name is {found or 'missing'}, and was {recorded}. Does the "
            "configuration name another database or folder? If what was there is lost for good, or was restored on purpose: "
            f"sluiceway backend accept {name}"
        )
    return found
