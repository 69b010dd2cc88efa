"""Acceptance of a changed storage: an operator confirms that a restored or emptied storage is to be served."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.local.audit_trail import AuditTrail
from sluiceway.local.partition_openings import AT_ONCE, Opening, decode, key_of
from sluiceway.local.queue_catalog import QUEUE
from sluiceway.local.storage_identity import record_of
from sluiceway.model.access import Actor
from sluiceway.model.queue import QueueRecord, decode_queue
from sluiceway.ports.meta_store import MetaStore
from sluiceway.ports.partition_store import PartitionRef


async def accept(
    meta: MetaStore, audit: AuditTrail, backend: str, queue_name: str | None, numbers: Sequence[int], by: Actor
) -> list[tuple[str, int]]:
    """From the next opening on, accept the backend's content as the acknowledged one, and create missing partitions.

    Covers the whole backend with its identity, or only these partitions of a queue (all of them without `numbers`). Returns the partitions,
    as (queue, number). Raises `queue_not_found`, `invalid_request` if no partition lies in the backend, ConflictError if an instance is
    just opening one of them, MetaUnknownError, StoreUnavailableError.
    """
    queues = [decode_queue(entry.value) for entry in (await meta.read(prefixes=[QUEUE])).prefix(QUEUE).values()]
    found = _chosen(queues, backend, queue_name, numbers)
    for first in range(0, len(found), AT_ONCE):
        keys = [key_of(ref) for ref, _ in found[first : first + AT_ONCE]]
        entries = (await meta.read(keys)).entries
        openings = {key: opening for key in keys if (opening := decode(entries.get(key))) is not None}
        puts = {key: msgspec.json.encode(Opening(opening.claimed)) for key, opening in openings.items()}
        await meta.commit({key: entries[key].stamp for key in puts}, puts=puts)
    detail = {"backend": backend, "partitions": len(found), **({"partition": list(numbers)} if numbers else {})}
    key, entry = audit.entry("backend.accept", by, queue_name or "", detail)
    # The identity is removed last, in the audited commit: until then the backend is not served.
    await meta.commit(puts={key: entry}, deletes=[] if queue_name else [record_of(backend)])
    return [(name, ref.partition) for ref, name in found]


def _chosen(queues: Sequence[QueueRecord], backend: str, queue_name: str | None, numbers: Sequence[int]) -> list[tuple[PartitionRef, str]]:
    named = [queue for queue in queues if queue_name in (None, queue.queue_name)]
    if not named and queue_name is not None:
        raise SluicewayError("queue_not_found", f"there is no queue {queue_name[:64]!r}", "queue_name")
    found = [
        (PartitionRef(queue.incarnation, each.partition), queue.queue_name)
        for queue in named
        for each in queue.partitions
        if each.backend == backend and (not numbers or each.partition in numbers)
    ]
    missing = set(numbers) - {ref.partition for ref, _ in found}
    if missing or not found:
        which = f"partition {min(missing)}" if missing else "no partition"
        raise invalid("partition" if missing else "backend", f"{which} {'does not lie' if missing else 'lies'} in backend {backend!r}")
    return found
