"""Backups in a bucket: the files of a directory of backups, as objects.

Any number of commands may use them at once, from any machines, and any may be killed. Each that writes a backup has a draft of it there
(`backup_draft.py`), and none removes a pack while there is a draft of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Final

from sluiceway.adapters import system
from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.adapters.storage.bucket_urls import open_bucket
from sluiceway.adapters.storage.hedged_reads import HedgedReads
from sluiceway.cli.backup_format import MANIFESTS, PACKS, SUFFIX, Manifest, Piece, checksum, moment_text, pack_name, seal
from sluiceway.cli.backup_store import Contents
from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.secrets import read_secret
from sluiceway.ports.object_store import ObjectStore
from sluiceway.server_cli.backup_draft import ABANDONED, HEAD, Draft, create, delete, end_abandoned, is_draft
from sluiceway.server_cli.bucket_calls import BucketCalls

PACK_BYTES: Final = 4 << 20
"""Maximum size of a pack of several pieces: UPLOADS of them have to be sent within a request's time limit over a slow line, too."""
UPLOADS: Final = 3
"""Packs that are sent at once."""
READS: Final = 16
"""Manifests that are looked at at once."""


@contextlib.contextmanager
def opened_bucket(text: str) -> Iterator[BackupBucket]:
    """The backups at that URL, or at the one that `env:NAME` or `file:PATH` has, for the length of a block. Raises `invalid_request`."""
    bucket = open_bucket(read_secret(text, "dir", os.environ) or text, "dir")
    with BucketCalls(bucket.name) as calls:
        try:
            yield BackupBucket(HedgedReads(bucket.objects), calls)
        finally:
            calls.run(bucket.objects.close())


class BackupBucket:
    """BackupStore in a bucket. `now` is the wall clock, `nonce` returns 8 random bytes."""

    def __init__(
        self,
        objects: ObjectStore,
        calls: BucketCalls,
        *,
        now: Callable[[], Millis] = system.now,
        nonce: Callable[[], bytes] = lambda: os.urandom(8),
    ) -> None:
        self._objects, self._calls, self._now, self._nonce = objects, calls, now, nonce
        self._proof = Proof(objects, nonce)
        self._own = ""
        """The backup that this process writes."""

    @property
    def name(self) -> str:
        return self._calls.name

    def ids(self) -> list[str]:
        return _complete(self._calls.run(self._heads()))

    def manifest(self, backup_id: str) -> bytes | None:
        found = self._calls.run(self._objects.get(_object_of(backup_id)))
        return None if found is None or is_draft(found.data) else found.data

    def contents(self) -> Contents:
        return self._calls.run(self._contents())

    async def _contents(self) -> Contents:
        # In this order: whatever backup a listed pack is for, its draft or its manifest is there by then.
        packs = await self._objects.sizes(f"{PACKS}/")
        heads = await self._heads()
        # A backup that has gone since it was listed may be the one that another command bases its own on.
        is_changing = any(head is None or (is_draft(head) and each != self._own) for each, head in heads.items())
        return Contents({name.removeprefix(f"{PACKS}/"): size for name, size in packs.items()}, _complete(heads), is_changing)

    async def _heads(self) -> dict[str, bytes | None]:
        """How the object of each manifest begins; None: it has gone since it was listed."""
        limit = asyncio.Semaphore(READS)

        async def head(name: str) -> bytes | None:
            async with limit:
                return await self._objects.get_range(name, 0, len(HEAD))

        names = [name for name in await self._objects.list(f"{MANIFESTS}/", "") if name.endswith(SUFFIX)]
        found = await asyncio.gather(*map(head, names))
        return {name.removeprefix(f"{MANIFESTS}/").removesuffix(SUFFIX): each for name, each in zip(names, found, strict=True)}

    def read(self, pack: str, at: int, size: int) -> bytes:
        found = self._calls.run(self._objects.get_range(_pack_object(pack), at, size))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", pack)
        return found

    @contextlib.contextmanager
    def begin(self, taken_at: datetime) -> Iterator[BucketWriter]:
        # No id is given twice, so a late request of a dead command meets no other backup.
        backup_id = f"{moment_text(taken_at)}-{taken_at.microsecond // 1_000:03}{self._nonce()[:3].hex()}"
        draft = Draft(self._objects, _object_of(backup_id), self._nonce().hex(), self._now)
        self._calls.run(self._open(draft))
        self._own = backup_id
        writer = BucketWriter(backup_id, draft, self._objects, self._calls)
        try:
            yield writer
        finally:
            self._own = ""
            writer.close()

    async def _open(self, draft: Draft) -> None:
        await self._proof.give()
        await self._end_abandoned()
        await draft.begin()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        if not self._calls.run(self._end_abandoned()):
            when = f"or was interrupted less than {format_duration(ABANDONED)} ago"
            raise SluicewayError("unavailable", f"a backup is being written to {self.name}, {when}; try again later", "dir")
        yield

    async def _end_abandoned(self) -> bool:
        """End the drafts of dead commands. Returns whether no others are left."""
        drafts = [each for each, head in (await self._heads()).items() if head is not None and is_draft(head)]
        return all([await end_abandoned(self._objects, _object_of(each), self._now()) for each in drafts])

    def remove_backups(self, ids: Sequence[str]) -> None:
        if ids:
            self._calls.run(delete(self._objects, [_object_of(each) for each in ids]))

    def remove_packs(self, packs: Sequence[str]) -> None:
        if packs:
            self._calls.run(delete(self._objects, [_pack_object(each) for each in packs]))


class BucketWriter:
    """BackupWriter in a bucket. It holds up to UPLOADS packs in memory while they are sent, and the one that is being filled."""

    def __init__(self, backup_id: str, draft: Draft, objects: ObjectStore, calls: BucketCalls) -> None:
        self.backup_id = backup_id
        self._draft, self._objects, self._calls = draft, objects, calls
        self._packs: list[str] = []
        self._uploads: deque[Future[None]] = deque()
        self._pieces: list[bytes] = []
        """Of the pack that is being filled."""
        self._at = 0

    def add(self, data: bytes) -> Piece:
        if self._at and self._at + len(data) > PACK_BYTES:
            self._send()
        piece = Piece(pack_name(self.backup_id, len(self._packs)), self._at, len(data), checksum(data))
        self._pieces.append(data)
        self._at += len(data)
        return piece

    def _send(self) -> None:
        """Send the pack that is being filled, while the next one is."""
        self._draft.check()
        pack, data = pack_name(self.backup_id, len(self._packs)), b"".join(self._pieces)
        self._packs.append(pack)
        self._pieces, self._at = [], 0
        if len(self._uploads) == UPLOADS:
            self._calls.result(self._uploads.popleft())
        self._uploads.append(self._calls.begin(create(self._objects, _pack_object(pack), data)))

    def finish(self, manifest: Manifest) -> None:
        if self._at:
            self._send()
        while self._uploads:
            self._calls.result(self._uploads.popleft())
        self._calls.run(self._draft.complete(seal(manifest)))

    def close(self) -> None:
        """End the draft. Unless the backup is complete, remove what was written of it."""
        for each in self._uploads:
            each.cancel()
        # What stays without an answer is removed by a later command.
        with contextlib.suppress(SluicewayError):
            if self._calls.run(self._draft.withdraw()) and self._packs:
                self._calls.run(delete(self._objects, [_pack_object(each) for each in self._packs]))


def _complete(heads: dict[str, bytes | None]) -> list[str]:
    return sorted(each for each, head in heads.items() if head is not None and not is_draft(head))


def _object_of(backup_id: str) -> str:
    return f"{MANIFESTS}/{backup_id}{SUFFIX}"


def _pack_object(pack: str) -> str:
    return f"{PACKS}/{pack}"
