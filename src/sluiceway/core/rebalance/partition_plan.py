"""Planning of a rebalance: from the current partitions to the requested ones, with the fewest created and drained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluiceway.core.queue.backend_placement import interleave, place
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_PARTITIONS
from sluiceway.model.queue import PartitionRecord, QueueRecord
from sluiceway.model.rebalance import NewPartition, Plan


def plan(record: QueueRecord, requested: int, affinities: Mapping[str, float]) -> Plan:
    """Return the plan that gives the queue `requested` partitions (at least 1), divided among the backends by their affinities.

    Each backend keeps as many of its partitions as its share allows, lowest numbers first, so no plan with that division creates or drains
    fewer. A backend missing from `affinities` keeps none. Deterministic across processes. Raises `invalid_request`.
    """
    if not 1 <= requested <= MAX_PARTITIONS:
        raise invalid("requested_partitions", f"expected 1 to {MAX_PARTITIONS}")
    if record.unique is not None:
        detail = f"queue {record.queue_name!r} has `unique`, so all items of a unique key are in one partition; it cannot be rebalanced yet"
        raise invalid("queue_name", detail)
    there: dict[str, list[PartitionRecord]] = {}
    for each in sorted(record.partitions, key=lambda each: each.partition):
        there.setdefault(each.backend, []).append(each)
    counts = place(requested, affinities, {name: len(those) for name, those in there.items()})
    keeps = [each.partition for name, those in there.items() for each in those[: counts.get(name, 0)]]
    drains = [each.partition for name, those in there.items() for each in those[counts.get(name, 0) :]]
    missing = {name: count - len(there.get(name, ())) for name, count in counts.items()}
    new = interleave({name: count for name, count in missing.items() if count > 0})
    parents = _parents(sorted(drains), len(new))
    first = record.given
    creates = tuple(NewPartition(first + index, backend, parents[index]) for index, backend in enumerate(new))
    by_key = record.keeps_keys_together
    in_order = not by_key and len(record.partitions) == len(drains) == len(creates) == 1
    return Plan(creates, tuple(sorted(drains)), tuple(sorted(keeps)), in_order=in_order, by_key=by_key)


def _parents(drains: Sequence[int], new: int) -> list[tuple[int, ...]]:
    """Divide the drained partitions among the new ones: each gets a replacement, and each replacement at least one parent if any is
    drained."""
    if not drains or not new:
        return [()] * new
    if len(drains) >= new:
        return [tuple(drains[index::new]) for index in range(new)]
    return [(drains[index % len(drains)],) for index in range(new)]
