"""Commands that share a bucket of backups, each as a process of its own: they can be held or killed at any request."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, Self, cast

from simulation.bucket_objects import Bucket
from sluiceway.cli.backup_copy import copy_backup
from sluiceway.cli.backup_format import Manifest
from sluiceway.cli.backup_store import Backups
from sluiceway.contract.backup_answers import BackupBegun, BackupPartition, BlobsPart, RecordsPart
from sluiceway.kernel.clock import Millis
from sluiceway.ports.object_store import Object
from sluiceway.server_cli.backup_bucket import BackupBucket
from sluiceway.server_cli.bucket_calls import BucketCalls

PATIENCE = 30.0
BEGIN = datetime(2026, 1, 31, 8, tzinfo=UTC)


class KilledError(Exception):
    """The process is dead: no request of it leaves any more."""


class Objects:
    """ObjectStore of a process. `before` and `after` are called at each request, with its number and kind, and may raise."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._numbers = itertools.count()
        self.before: Callable[[int, str], None] = lambda number, call: None
        self.after: Callable[[int, str], None] = lambda number, call: None
        self.requests = 0

    def _through(self, call: str, carry_out: Callable[[], Any]) -> Any:
        number = next(self._numbers)
        self.requests = number + 1
        self.before(number, call)
        found = carry_out()
        self.after(number, call)
        return found

    async def get(self, name: str) -> Object | None:
        return cast("Object | None", self._through("get", lambda: self._bucket.get(name)))

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        found: Object | None = self._through("get_range", lambda: self._bucket.get(name))
        return None if found is None else found.data[start : start + length]

    async def create(self, name: str, data: bytes) -> bool:
        return bool(self._through("create", lambda: self._bucket.create(name, data)))

    async def replace(self, name: str, data: bytes, tag: str) -> str | None:
        return cast("str | None", self._through("replace", lambda: self._bucket.replace(name, data, tag)))

    async def list(self, prefix: str, after: str) -> Sequence[str]:
        return cast("Sequence[str]", self._through("list", lambda: self._bucket.list(prefix, after)))

    async def sizes(self, prefix: str) -> Mapping[str, int]:
        return cast("Mapping[str, int]", self._through("sizes", lambda: self._bucket.sizes(prefix)))

    async def delete(self, names: Sequence[str]) -> None:
        self._through("delete", lambda: self._bucket.delete(names))

    async def close(self) -> None:
        """No-op: nothing to release."""


class Server:
    """What a backup reads of a server with one partition, whose blobs are `blobs`. Every backup is a second after the one before."""

    def __init__(self) -> None:
        self.blobs: dict[int, bytes] = {}
        self._moments, self._numbers = itertools.count(), itertools.count()

    def put(self, *texts: str) -> None:
        """Add blobs of 100 bytes."""
        for text in texts:
            self.blobs[next(self._numbers)] = text.encode() * 100

    def begin_backup(self) -> BackupBegun:
        partition = BackupPartition(queue_name="q", incarnation="k7f3q2ma", partition=0, backend="default")
        at = BEGIN + timedelta(seconds=next(self._moments))
        return BackupBegun(backup_id="b", taken_at=at, version="1", meta_layout=1, partition_layout=1, partitions=[partition])

    def backup_records(self, backup_id: str, incarnation: str | None, partition: int | None, start: int) -> RecordsPart:
        if incarnation is None:
            return RecordsPart(b"meta", [], None)
        return RecordsPart(b"records", [(number, "state") for number in self.blobs], None)

    def backup_blobs(self, backup_id: str, incarnation: str, partition: int, blobs: Sequence[int]) -> BlobsPart:
        return BlobsPart({number: self.blobs[number] for number in blobs})

    def end_backup(self, backup_id: str) -> None:
        """No-op: it keeps nothing."""


class World:
    """The bucket, the server and the time that all processes see."""

    def __init__(self) -> None:
        self.bucket, self.server = Bucket(), Server()
        self.now: Millis = 1_000_000
        self._nonces = itertools.count()
        self._closing = ExitStack()

    def process(self) -> Process:
        """A new process."""
        return Process(self, self._closing.enter_context(BucketCalls("s3://tests/backups")))

    def nonce(self) -> bytes:
        """Bytes that are given once."""
        return f"{next(self._nonces):08d}".encode()[::-1]

    def check(self) -> list[str]:
        """The backups that can be seen, each of which has to be whole."""
        backups = self.process().backups
        for each in backups.ids():
            assert backups.damage(backups.manifest(each), set()) == []
        return backups.ids()

    def leftovers(self) -> list[str]:
        """The objects that belong to no backup, apart from those of a proof that was interrupted."""
        backups = self.process().backups
        ids = backups.ids()
        needed = {f"packs/{piece.pack}" for each in ids for piece in backups.manifest(each).pieces()}
        found = self.bucket.objects.keys() - needed - {f"backups/{each}.json" for each in ids}
        return sorted(name for name in found if not name.startswith("probe/"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


class Process:
    """One command, and its requests."""

    def __init__(self, world: World, calls: BucketCalls) -> None:
        self._world = world
        self.objects = Objects(world.bucket)
        self.backups = Backups(BackupBucket(self.objects, calls, now=lambda: world.now, nonce=world.nonce))

    def create(self) -> Manifest:
        """`sluiceway backup create`."""
        return copy_backup(cast("Any", SimpleNamespace(client=self._world.server, progress=False)), self.backups)

    def prune(self) -> None:
        """`sluiceway backup prune --keep 1`."""
        self.backups.prune(1)

    def die_at(self, number: int) -> None:
        """Let no request leave from that one on."""

        def before(current: int, call: str) -> None:
            if current >= number:
                raise KilledError

        self.objects.before = before


class Held:
    """A command on a thread, held before its request of that number, if it has so many. `result` and `error`: how it ended."""

    def __init__(self, process: Process, command: Callable[[Process], object], number: int) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._stopped, self._may_go = threading.Event(), threading.Event()

        def before(current: int, call: str) -> None:
            if current == number:
                self._stopped.set()
                assert self._may_go.wait(PATIENCE)

        def run() -> None:
            try:
                self.result = command(process)
            except BaseException as error:
                self.error = error
            self._stopped.set()

        process.objects.before = before
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert self._stopped.wait(PATIENCE)

    def finish(self) -> None:
        """Let it run to its end."""
        self._may_go.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
