"""Whether a backend's directory is still the one in which the partitions were: an empty one, as of a disk that is not mounted, is not."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sluiceway.adapters import system
from sluiceway.adapters.disk import make_directory, write_durably
from sluiceway.adapters.lock import one_at_a_time
from sluiceway.ports.meta_store import MetaStore

_KEY = "backend/"
_FILE = "identity"


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
    """Whether it is the directory that the backend had before. The first time, gives it an identity. Raises OSError.

    To serve an empty directory in the place of a full one would lose what is in it, and give its ids to other items.
    """
    key = record_of(name)
    entry = (await meta.read([key])).entries.get(key)
    path = directory / _FILE
    found = _read(path)
    if entry is None:
        return Identity(None, {key: (found or _new(path)).encode()})
    if found == entry.value.decode():
        return Identity(None, {})
    problem = (
        f"{directory} is not the directory that held its partitions: the file {_FILE} is {'missing' if found is None else 'another'}. "
        f"Is its disk mounted? If what was there is lost for good, write {entry.value.decode()} into that file to begin anew"
    )
    return Identity(problem, {})


def _new(path: Path) -> str:
    make_directory(path.parent)
    # The instances of a cluster may all begin at the same moment.
    with one_at_a_time(path.parent):
        if (found := _read(path)) is not None:
            return found
        identity = system.new_incarnation()
        write_durably(path, identity + "\n")
        return identity


def _read(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None
