"""ObjectStore: a bucket, or a part of one. Objects are created once, or replaced if they are unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

__all__ = ["Object", "ObjectStore", "UnknownWriteError"]


class Object(NamedTuple):
    """An object's bytes, and the tag that changes when they do."""

    data: bytes
    tag: str


class UnknownWriteError(Exception):
    """A write may have landed, or may land later."""


class ObjectStore(Protocol):
    """Objects by name. A name is of printable ASCII, with slashes.

    Every method makes one attempt, and raises StoreUnavailableError if it failed; a write raises that only if it surely did not happen,
    and UnknownWriteError otherwise. What a call sees includes every write that ended before it began. Names are listed in order.
    """

    async def get(self, name: str) -> Object | None:
        """The object; None: there is none."""
        ...

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        """Those bytes of the object, fewer at its end; None: there is no such object."""
        ...

    async def create(self, name: str, data: bytes) -> bool:
        """Create the object. False: there is one of that name, and it was not changed."""
        ...

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        """Replace the object that has this tag. Returns the new tag. None: it has another, or is gone, and nothing was changed."""
        ...

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        """All names that begin with `prefix` and come after `after`."""
        ...

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        """All names that begin with `prefix`, and the bytes of each object."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete the objects. Missing ones are no error. If it fails, some may be gone, and others go later."""
        ...

    async def close(self) -> None:
        """Release every handle. The store is not used afterwards."""
        ...
