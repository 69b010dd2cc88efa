"""`sluiceway` with a promise taken out, for control groups: a check that finds nothing wrong with these finds nothing.

`python sabotaged_server.py FLAW serve …`, where FLAW is one of `SABOTAGES`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import obstore

from sluiceway.adapters.storage import postgres
from sluiceway.adapters.storage.bucket_objects import BucketObjects
from sluiceway.adapters.storage.bucket_proof import Proof
from sluiceway.adapters.storage.partition_file import PartitionFile
from sluiceway.adapters.storage.sqlite import SqlitePartitionStore
from sluiceway.cli.main import main
from sluiceway.cluster.group_member import GroupMember
from sluiceway.core.group.group_records import Token
from sluiceway.core.partition.admission import Admission
from sluiceway.kernel.clock import Millis
from sluiceway.model.outcomes import Outcome
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.ports.partition_store import Changes, Fence, PartitionRef

FENCED = "fence_era = %b AND fence_grant = %b AND fence_opening = %b AND txn = %b"
UNFENCED = "(%b::int8 + %b::int8 + %b::int8 + %b::int8) IS NOT NULL"
LONG: Millis = 3_600_000


def command(flaw: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), flaw]


# ---- storage ------------------------------------------------------------------------------------------------------------


def answer_early() -> None:
    """DONE is said before the commit has begun; the commit follows a little later, in order."""
    honest = SqlitePartitionStore.apply
    last: dict[PartitionRef, asyncio.Task[None]] = {}

    async def apply(self: SqlitePartitionStore, ref: PartitionRef, changes: Changes, fence: Fence) -> Outcome:
        before = last.get(ref)

        async def later() -> None:
            if before is not None:
                await before
            await asyncio.sleep(0.02)
            await honest(self, ref, changes, fence)

        last[ref] = asyncio.get_running_loop().create_task(later())
        return Outcome.DONE

    SqlitePartitionStore.apply = apply  # type: ignore[method-assign]


def sync_less(synchronous: str) -> None:
    honest = PartitionFile._set_up

    def set_up(self: PartitionFile) -> None:
        honest(self)
        self._db.pragma("synchronous", synchronous)

    PartitionFile._set_up = set_up  # type: ignore[method-assign]


# ---- ownership ----------------------------------------------------------------------------------------------------------


def hold_on() -> None:
    """An instance never lets go of what it owns."""
    honest = GroupMember._serve

    async def serve(self: GroupMember, owned: Mapping[str, Token], lease_deadline: Millis) -> None:
        await honest(self, {**self._held, **owned}, lease_deadline + LONG)

    GroupMember._serve = serve  # type: ignore[method-assign]


def unfence() -> None:
    """Nor does storage ask for its fence: PostgreSQL not for the number, a bucket not whether the name of a log entry is free."""
    hold_on()
    assert FENCED in postgres._CYCLE
    postgres._CYCLE = postgres._CYCLE.replace(FENCED, UNFENCED)

    async def create(self: BucketObjects, name: str, data: bytes) -> bool:
        await obstore.put_async(self._store, name, data)
        return True

    async def give(self: Proof) -> None:
        """It would find that out."""

    BucketObjects.create = create  # type: ignore[method-assign]
    Proof.give = give  # type: ignore[method-assign]


# ---- rebalances ---------------------------------------------------------------------------------------------------------


def seal_what_is_not_empty() -> None:
    Admission.is_empty = property(lambda _: True)  # type: ignore[method-assign, assignment]


def forget_keys() -> None:
    honest = Admission.give_keys

    def give_keys(self: Admission, *given: Any) -> dict[str, bytes]:
        honest(self, *given)
        return {}

    Admission.give_keys = give_keys  # type: ignore[method-assign, assignment]


def overtake() -> None:
    def holds_back(self: QueueRecord, each: PartitionRecord) -> bool:
        return False

    QueueRecord.holds_back = holds_back  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "answers-early": answer_early,
    "sync-off": partial(sync_less, "off"),
    "sync-normal": partial(sync_less, "normal"),
    "holds-on": hold_on,
    "unfenced": unfence,
    "seals": seal_what_is_not_empty,
    "keys": forget_keys,
    "order": overtake,
}


if __name__ == "__main__":
    SABOTAGES[sys.argv.pop(1)]()
    main()
