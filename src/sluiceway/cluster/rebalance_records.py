"""Rebalance records in the meta store, read and written together with their queues' records."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from sluiceway.cluster.ownership import Ownership, item_of
from sluiceway.cluster.queue_changes import DROPPING, dropped
from sluiceway.core.group.group_records import Writes
from sluiceway.core.rebalance.steps import Change
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ENDED_REBALANCES
from sluiceway.local.queue_catalog import Catalog
from sluiceway.model.meta import Entry, Stamp, View
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import Rebalance, decode_rebalance, encode_rebalance
from sluiceway.ports.meta_store import ConflictError, MetaStore, MetaUnknownError
from sluiceway.ports.partition_store import StoreUnavailableError

log = logging.getLogger(__name__)

REBALANCE = "rebalance/"
OPEN = REBALANCE + "open/"
ENDED = REBALANCE + "ended/"
"""Separate from the open ones, which are read all the time."""
COORDINATOR = "coordinator"
TRIM_EVERY = 50
"""Ended rebalances between two trims: a trim reads all of them."""
TRIM_BATCH = 500


class Stored(NamedTuple):
    """A rebalance as read, and the stamp of the commit that wrote it."""

    rebalance: Rebalance
    stamp: Stamp


class Elected(msgspec.Struct, frozen=True):
    """The elected coordinator. `number` rises with each election."""

    name: str
    number: int


class Looked(NamedTuple):
    """The open rebalances, oldest first; the partitions whose data is to be removed, by key; the coordinator, and the stamp of its
    election."""

    open: list[Stored]
    dropping: dict[str, tuple[PartitionRecord, ...]]
    elected: Elected | None
    stamp: Stamp | None


class StaleError(Exception):
    """The rebalance has changed since it was read, or another instance is the coordinator. Nothing was written."""


class RebalanceRecords:
    """All rebalances of one meta store."""

    def __init__(self, meta: MetaStore, catalog: Catalog, ownership: Ownership) -> None:
        self._meta = meta
        self._catalog = catalog
        self._ownership = ownership
        self._until_trim = 0

    # ---- reading ----------------------------------------------------------------------------------------------

    async def _read(self, keys: Sequence[str] = (), prefixes: Sequence[str] = ()) -> View:
        try:
            return await self._meta.read(keys, prefixes)
        except StoreUnavailableError as error:
            raise SluicewayError("unavailable", f"the meta store cannot be read: {error}") from error

    async def look(self) -> Looked:
        """Read the outstanding work and the coordinator. Raises `unavailable`."""
        view = await self._read([COORDINATOR], [OPEN, DROPPING])
        entry = view.entries.get(COORDINATOR)
        elected = None if entry is None else msgspec.json.decode(entry.value, type=Elected)
        # Keys without a partition belong to deleted queues: the deleting instance removes their data.
        dropping = {key: dropped(each.value) for key, each in view.prefix(DROPPING).items() if "/" in key.removeprefix(DROPPING)}
        opened = [_stored(each) for each in view.prefix(OPEN).values()]
        return Looked(opened, dropping, elected, None if entry is None else entry.stamp)

    async def get(self, id: str) -> Stored | None:
        """Return an open or ended rebalance; None if there is none. Raises `unavailable`."""
        view = await self._read([OPEN + id, ENDED + id])
        entry = view.entries.get(OPEN + id) or view.entries.get(ENDED + id)
        return None if entry is None else _stored(entry)

    async def list(self, *, only_open: bool) -> list[Rebalance]:
        """List rebalances, newest first. Raises `unavailable`."""
        view = await self._read(prefixes=[OPEN] if only_open else [REBALANCE])
        return sorted((decode_rebalance(each.value) for each in view.entries.values()), key=lambda each: each.id, reverse=True)

    # ---- writing ----------------------------------------------------------------------------------------------

    async def elect(self, name: str, before: Elected | None, stamp: Stamp | None) -> Stamp | None:
        """Make the instance coordinator in place of `before`. Returns the election's stamp; None if it failed or its outcome is unknown."""
        elected = Elected(name, 1 if before is None else before.number + 1)
        try:
            return await self._meta.commit({COORDINATOR: stamp}, puts={COORDINATOR: msgspec.json.encode(elected)})
        except (ConflictError, MetaUnknownError) as error:
            log.info("no coordinator was elected: %s", error)
            return None

    async def write(self, before: Stored | None, change: Change, entries: Sequence[tuple[str, bytes]], held: Stamp | None) -> Stamp:
        """Commit the change of a rebalance read as `before` (None: a new one), and of its queue as the catalog has it now.

        With `held`, commits only if that is the stamp of the current coordinator's election. Raises StaleError, `outcome_unknown`,
        `invalid_request` if the cluster cannot divide so many partitions, and ConflictError if another queue has changed: follow, and
        decide anew.
        """
        rebalance = change.rebalance
        writes = self._owners(rebalance.incarnation, change)
        checks: dict[str, Stamp | None] = {OPEN + rebalance.id: None if before is None else before.stamp}
        if held is not None:
            checks[COORDINATOR] = held
        writes.checks |= checks
        puts = {(OPEN if rebalance.is_open else ENDED) + rebalance.id: encode_rebalance(rebalance), **dict(entries)}
        if change.removed:
            # One note of all: a commit takes no more keys than a queue may have partitions.
            puts[dropping_key(rebalance.incarnation, change.removed)] = msgspec.json.encode(change.removed)
        if not rebalance.is_open and before is not None:
            writes.deletes.append(OPEN + rebalance.id)
        try:
            if change.record is not None:
                return await self._catalog.put(change.record, puts, writes)
            return await self._meta.commit(writes.checks, writes.unchanged, {**writes.puts, **puts}, writes.deletes)
        except MetaUnknownError as error:
            raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error
        except ConflictError:
            if await self._has_changed(checks) or change.record is None:
                raise StaleError from None
            raise
        except ValueError as error:
            detail = f"the change is too large for one commit of the meta store ({error}); change fewer partitions at a time"
            raise SluicewayError("invalid_request", detail, "requested_partitions") from error

    def _owners(self, incarnation: str, change: Change) -> Writes:
        if change.placed:
            return self._ownership.placing([item_of(incarnation, number) for number in change.placed])
        if change.removed:
            return self._ownership.removing([item_of(incarnation, each.partition) for each in change.removed])
        return Writes()

    async def _has_changed(self, checks: dict[str, Stamp | None]) -> bool:
        view = await self._read(list(checks))
        return any((view.entries[key].stamp if key in view.entries else None) != stamp for key, stamp in checks.items())

    async def put_new(self, those: Sequence[Rebalance], entries: Sequence[tuple[str, bytes]]) -> None:
        """Record waiting rebalances, all of them new. Raises `outcome_unknown`."""
        keys = [OPEN + each.id for each in those]
        puts = {**{OPEN + each.id: encode_rebalance(each) for each in those}, **dict(entries)}
        try:
            await self._meta.commit(dict.fromkeys(keys), puts=puts)
        except (MetaUnknownError, ConflictError) as error:
            raise SluicewayError("outcome_unknown", f"the meta store did not confirm the change: {error}") from error

    async def trim_now_and_then(self) -> None:
        """Remove the oldest ended rebalances beyond MAX_ENDED_REBALANCES, every TRIM_EVERY calls. The next trim repeats a failed one."""
        if self._until_trim:
            self._until_trim -= 1
            return
        self._until_trim = TRIM_EVERY
        try:
            surplus = sorted((await self._meta.read(prefixes=[ENDED])).entries)[:-MAX_ENDED_REBALANCES]
            for start in range(0, len(surplus), TRIM_BATCH):
                await self._meta.commit(deletes=surplus[start : start + TRIM_BATCH])
        except (MetaUnknownError, StoreUnavailableError) as error:
            log.warning("old rebalances were not removed, will retry: %s", error)


def dropping_key(incarnation: str, removed: Sequence[PartitionRecord]) -> str:
    """Key of the note that the data of partitions that were removed together is to be removed."""
    return f"{DROPPING}{incarnation}/{removed[0].partition}"


def cause(rebalance: Rebalance) -> dict[str, Any]:
    """Audit detail common to all entries about a rebalance: its id, and the actor that asked for it."""
    found = {"rebalance": rebalance.id, "cause": f"rebalance asked by {rebalance.actor}"}
    return found | {"cause_request_id": rebalance.request_id} if rebalance.request_id else found


def said(change: Change, record: QueueRecord | None, rebalance: Rebalance) -> dict[str, Any]:
    """Audit detail of a rebalance's change."""
    detail = cause(rebalance) | {"state": change.rebalance.state}
    if change.step is not None:
        detail |= {"step": change.step, "next": change.rebalance.step if change.rebalance.is_open else None}
    if rebalance.retries:
        detail["retries"] = rebalance.retries
    if problem := change.rebalance.problem or rebalance.problem:
        detail["problem"] = problem
    if change.placed:
        detail["made"] = _few(list(change.placed))
    if change.removed:
        detail["partitions"] = _few([each.partition for each in change.removed])
    if change.record is not None and record is not None:
        states = _states(record, change.record)
        if states:
            detail["states"] = states
    return detail


def _states(before: QueueRecord, after: QueueRecord) -> dict[str, Any]:
    """State changes by partition number; beyond _FEW changes, the number of partitions in each state before and after."""
    old = {each.partition: each.state for each in before.partitions}
    new = {each.partition: each.state for each in after.partitions}
    changed = [number for number in sorted({*old, *new}) if old.get(number) != new.get(number)]
    if len(changed) <= _FEW:
        return {str(number): {"from": old.get(number), "to": new.get(number)} for number in changed}
    counts = [{state: [*those.values()].count(state) for state in sorted({*those.values()})} for those in (old, new)]
    return {"from": counts[0], "to": counts[1]}


_FEW = 40
"""Maximum number of partitions listed in an audit entry, which is small."""


def _few(numbers: list[int]) -> list[int] | dict[str, int]:
    return numbers if len(numbers) <= _FEW else {"count": len(numbers), "first": numbers[0], "last": numbers[-1]}


def _stored(entry: Entry) -> Stored:
    return Stored(decode_rebalance(entry.value), entry.stamp)
