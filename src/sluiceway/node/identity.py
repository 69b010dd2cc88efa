"""Whether a backend's directory is still the one in which the partitions were: an empty one, as of a disk that is not mounted, is not."""

from __future__ import annotations

from pathlib import Path

from sluiceway.adapters import system
from sluiceway.adapters.disk import make_directory, write_durably
from sluiceway.ports.meta_store import MetaStore

_KEY = "backend/"
_FILE = "identity"


async def check_identity(name: str, directory: Path, meta: MetaStore) -> str | None:
    """Why the directory must not be used, in words. The first time, gives it an identity and records that durably.

    To serve an empty directory in the place of a full one would lose what is in it, and give its ids to other items. Raises OSError.
    """
    key = _KEY + name
    entry = (await meta.read([key])).entries.get(key)
    path = directory / _FILE
    found = path.read_text().strip() if path.exists() else None
    if entry is None:
        found = found or _identify(path)
        await meta.commit({key: None}, puts={key: found.encode()})
    elif found != entry.value.decode():
        return (
            f"{directory} is not the directory that held its partitions: the file {_FILE} is {'missing' if found is None else 'another'}. "
            f"Is its disk mounted? If what was there is lost for good, write {entry.value.decode()} into that file to begin anew"
        )
    return None


def _identify(path: Path) -> str:
    make_directory(path.parent)
    identity = system.new_incarnation()
    write_durably(path, identity + "\n")
    return identity
