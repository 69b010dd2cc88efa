"""Draft of a backup in a bucket: the object of its manifest, while the backup is being written.

A command that writes a backup creates the draft first, renews it now and then, and in the end replaces it by the manifest, each time under
the condition that it is as the command left it. So another command can end the draft of one that was killed: it replaces it by a void one.
From then on the first command, should it live after all, can no longer complete its backup.
docs/adr/0068-backups-in-a-bucket.md has the reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import msgspec

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.object_store import ObjectStore, UnknownWriteError
from sluiceway.ports.partition_store import StoreUnavailableError

HEAD: Final = b'{"draft":'
"""How a draft begins, and no manifest does."""
BEAT: Final = 15.0
"""Seconds between two renewals of a draft by its writer."""
ABANDONED: Final[Millis] = 5 * 60_000
"""Age of a draft from which on its writer is taken for dead. The clocks of two machines decide that. If they differ by more, a backup that
is being written fails, and no complete one is harmed."""
PAUSES: Final = (0.1, 0.5, 2.0)
"""Seconds before a write is repeated."""


class _Text(msgspec.Struct, frozen=True):
    """What a draft says: its writer, and when that last renewed it. HEAD has the name of the first field."""

    draft: str
    at: Millis


_VOID: Final = msgspec.json.encode(_Text("", 0))


def is_draft(head: bytes) -> bool:
    """Whether an object that begins so is a draft."""
    return head.startswith(HEAD)


class Draft:
    """A draft of this process, from `begin` to `complete` or `withdraw`. Use from one event loop.

    Writes whose outcome is unknown are repeated; StoreUnavailableError: it stays unknown.
    """

    def __init__(self, objects: ObjectStore, name: str, writer: str, now: Callable[[], Millis]) -> None:
        self._objects, self._name, self._writer, self._now = objects, name, writer, now
        self._tag = ""
        self._is_complete = self._is_lost = False
        self._mutex = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Create the object, whose name no other process uses, and renew it from now on. Raises `unavailable` if another process has ended
        the draft."""
        await create(self._objects, self._name, self._text())
        found = await self._objects.get(self._name)
        if found is None or not self._is_mine(found.data):
            raise self._lost()
        self._tag = found.tag
        self._beating = asyncio.create_task(self._beat())

    def check(self) -> None:
        """Raise `unavailable` if another process has ended the draft, as of the last renewal."""
        if self._is_lost:
            raise self._lost()

    async def complete(self, manifest: bytes) -> None:
        """Replace the draft by the manifest. Raises `unavailable` if another process has ended the draft."""
        async with self._mutex:
            await self._become(manifest)
            self._is_complete = True

    async def withdraw(self) -> bool:
        """End the draft, unless it is complete. Returns whether the backup surely stays incomplete."""
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        async with self._mutex:
            if self._is_complete:
                return False
            # Not deleted as it is: the manifest may land late, if its outcome is unknown.
            await self._become(_VOID)
        await delete(self._objects, [self._name])
        return True

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            async with self._mutex:
                if self._is_complete:
                    return
                # Without an answer, the next one may be luckier.
                with contextlib.suppress(StoreUnavailableError):
                    try:
                        await self._become(self._text())
                    except SluicewayError:
                        self._is_lost = True
                        return

    async def _become(self, data: bytes) -> None:
        """Replace the object as this process left it."""
        for pause in (*PAUSES, None):
            try:
                while (tag := await self._objects.replace(self._name, data, self._tag)) is None:
                    found = await self._objects.get(self._name)
                    if found is not None and found.data == data:
                        tag = found.tag
                        break
                    if found is None or not self._is_mine(found.data):
                        raise self._lost()
                    # An earlier replacement has landed whose answer was lost.
                    self._tag = found.tag
                self._tag = tag
                return
            except (StoreUnavailableError, UnknownWriteError) as error:
                if pause is None:
                    raise StoreUnavailableError(str(error)) from error
                await asyncio.sleep(pause)

    def _text(self) -> bytes:
        return msgspec.json.encode(_Text(self._writer, self._now()))

    def _is_mine(self, data: bytes) -> bool:
        return is_draft(data) and msgspec.json.decode(data, type=_Text).draft == self._writer

    def _lost(self) -> SluicewayError:
        what = f"another command has found no sign of life at {self._name} for {format_duration(ABANDONED)}, and removed it"
        return SluicewayError("unavailable", f"{what}; was this process suspended, or is a machine's clock wrong? Start again", "dir")


async def end_abandoned(objects: ObjectStore, name: str, now: Millis) -> bool:
    """End the draft of that name if its writer is taken for dead. Returns whether there is no draft any more."""
    found = await objects.get(name)
    if found is None or not is_draft(found.data):
        return True
    if now - msgspec.json.decode(found.data, type=_Text).at < ABANDONED:
        return False
    try:
        tag = await objects.replace(name, _VOID, found.tag)
    except (StoreUnavailableError, UnknownWriteError):
        tag = None
    if tag is None:
        # Its writer lives, another command was quicker, or nothing is known: a later command looks again.
        return False
    await delete(objects, [name])
    return True


async def create(objects: ObjectStore, name: str, data: bytes) -> None:
    """Create an object of a name that no other process uses. Raises StoreUnavailableError."""
    for pause in (*PAUSES, None):
        try:
            if not await objects.create(name, data):
                found = await objects.get(name)
                if found is None or found.data != data:
                    raise StoreUnavailableError(f"there is another object {name}")
            return
        except (StoreUnavailableError, UnknownWriteError) as error:
            if pause is None:
                raise StoreUnavailableError(str(error)) from error
            await asyncio.sleep(pause)


async def delete(objects: ObjectStore, names: list[str]) -> None:
    """Delete the objects, whose names are never used again. Raises StoreUnavailableError."""
    for pause in (*PAUSES, None):
        try:
            await objects.delete(names)
            return
        except StoreUnavailableError:
            if pause is None:
                raise
            await asyncio.sleep(pause)
