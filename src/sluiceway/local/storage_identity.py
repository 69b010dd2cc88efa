"""Storage identity: verifies that a backend's storage is the one that held its partitions, not, say, the empty directory of an unmounted
disk."""

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
    """The backend's storage is not the one that held its partitions."""


class Identity(NamedTuple):
    """Result of identifying a directory."""

    problem: str | None
    """Why the directory must not be used, in words; None: it may be."""
    record: dict[str, bytes]
    """Records to commit to the meta store, which has none of these keys, before the directory is used."""


def record_of(name: str) -> str:
    """The meta-store key of that backend's identity."""
    return _KEY + name


async def identify(name: str, directory: Path, meta: MetaStore) -> Identity:
    """Check whether the directory is the one the backend had before; the first time, give it an identity. Raises OSError,
    StoreUnavailableError.

    Called before there is a store, which would create a missing directory. Serving an empty directory in place of a full one would lose its
    contents, and give its ids to other items.
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
        f"Is its disk mounted? If the original is lost for good, or was restored on purpose, run: sluiceway backend accept {name}"
    )
    return Identity(problem, {})


async def verify(name: str, store: PartitionStore, openings: Openings, known: str | None, *, first: bool) -> str | None:
    """Return the identity of the backend's storage after comparing it with `known`, or else with the recorded one. Without a record,
    `first` records the store's own; otherwise the result is None. Raises OtherStorageError, OpeningsError, StoreUnavailableError."""
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
            f"this is not the storage that held the partitions: its identity is {found or 'missing'}, expected {recorded}. Check that the "
            "configuration names the right database or folder. If the original is lost for good, or was restored on purpose, run: "
            f"sluiceway backend accept {name}"
        )
    return found
