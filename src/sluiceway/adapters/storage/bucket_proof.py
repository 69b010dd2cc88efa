"""Proof that a bucket honours the conditions of writes. Some emulators and gateways ignore them, and what is stored there would be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

FOLDER = "probe/"
_UNFIT = "what is stored there would be lost"


class Proof:
    """Given once for each store, before its first use: an object of a random name is created, replaced and deleted."""

    def __init__(self, objects: ObjectStore, nonce: Callable[[], bytes]) -> None:
        self._objects = objects
        self._nonce = nonce
        self._giving = asyncio.Lock()
        self._is_given = False

    async def give(self) -> None:
        """Raise StoreUnavailableError unless the bucket is fit."""
        if self._is_given:
            return
        async with self._giving:
            if not self._is_given:
                try:
                    await self._give(f"{FOLDER}{self._nonce().hex()}")
                except UnknownWriteError as error:
                    raise StoreUnavailableError(str(error)) from error
                self._is_given = True

    async def _give(self, name: str) -> None:
        objects = self._objects
        if not await objects.create(name, b"first"):
            raise StoreUnavailableError("an object of a random name is there already")
        if await objects.create(name, b"second"):
            raise StoreUnavailableError(f"it replaces an existing object on `If-None-Match: *`: {_UNFIT}")
        found = await objects.get(name)
        if found is None or found.data != b"first":
            raise StoreUnavailableError("an object that was created cannot be read")
        if await objects.replace(name, b"third", found.tag) is None:
            raise StoreUnavailableError(f"it does not replace an unchanged object on `If-Match`: {_UNFIT}")
        if await objects.replace(name, b"fourth", found.tag) is not None:
            raise StoreUnavailableError(f"it replaces a changed object on `If-Match`: {_UNFIT}")
        await objects.delete([name])
