"""Produce by key: divides a call by its items' keys, where a queue keeps all items of a key, or unique key, in one partition.

docs/adr/0053-order-and-fairness-by-key.md and 0055-unique-items.md have what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sluiceway.core.partition.key_slots import slots_of, slots_of_hashes
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import KEY, Division, divided, divided_again, divided_by
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import CallPart, Offsets, Produce, Produced, ProducedByKey
from sluiceway.model.small_batch import digest
from sluiceway.model.unique_keys import UNIQUE_KEY, has_unique_keys

Outcome = Produced | BaseException


class DividedError(Exception):
    """The keys of a part are no longer at home in its partition: divide it again. `unknown`: the outcome of an earlier attempt, if that may
    have stored it."""

    unknown: SluicewayError | None = None


def parts_of(record: QueueRecord, request: Produce) -> list[tuple[Division, Produce]]:
    """The parts of the call, each for one partition, or for none at the moment (MOVING). Within it, the rows of a key follow each other,
    where keys matter, and so do those of them of one priority, where that matters."""
    whole = b"" if request.key is None else digest(request.batch)
    return [
        (each, replace(request, batch=each.rows, partition=each.place, part=CallPart(whole, each.slots)))
        for each in _divided(record, request)
    ]


def _divided(record: QueueRecord, request: Produce) -> list[Division]:
    homes, by_priority = slots_of(record), record.priority is not None
    if record.unique is None or not has_unique_keys(request.batch):
        return divided(request.batch, lambda keys: slots_of_hashes(keys, len(homes)), homes, by_priority)
    by: tuple[str, ...] = (KEY, UNIQUE_KEY)
    slots = np.arange(len(homes))
    if not record.keeps_keys_together:
        # The rows of a partition keep the order of the call, as if all were of the first slot there. Such a queue has no rebalances.
        by, slots = (UNIQUE_KEY,), np.array([homes.index(home) for home in homes])
    return divided_by(by, request.batch, lambda keys: slots[slots_of_hashes(keys, len(homes))], homes, record.goes_by_keys, by_priority)


def parts_again(record: QueueRecord, division: Division, part: Produce) -> list[tuple[Division, Produce]]:
    """The parts into which that one is divided now."""
    assert part.part is not None
    return [
        (each, replace(part, batch=each.rows, partition=each.place, part=CallPart(part.part.digest, each.slots)))
        for each in divided_again(division, slots_of(record))
    ]


def home_of_part(record: QueueRecord, part: Produce) -> int:
    """The partition that takes the part; MOVING: some of its keys have no home at the moment. Raises DividedError."""
    assert part.part is not None
    slots = slots_of(record)
    homes = {slots[slot] for slot, _ in part.part.slots}
    if MOVING in homes:
        return MOVING
    if homes != {part.partition}:
        raise DividedError
    return homes.pop()


def together(parts: Sequence[Division], outcomes: Sequence[Outcome], request: Produce) -> Produced:
    """The answer of the whole call. Raises the error of a part; `outcome_unknown` if others may be stored nevertheless."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise _error(errors, len(outcomes), request)
    done = [each for each in outcomes if isinstance(each, Produced)]
    count = request.batch.num_rows
    offsets, partitions = np.empty(count, np.int64), np.empty(count, np.int64)
    duplicates: list[tuple[int, int]] = []
    for part, stored in zip(parts, done, strict=True):
        offsets[part.numbers], partitions[part.numbers] = _places_of(stored)
        duplicates += [(int(part.numbers[row]), offset) for row, offset in stored.duplicates]
    deduplicated = all(each.deduplicated for each in done)
    answer = Produced(int(partitions[0]), int(offsets[0]), count, deduplicated, duplicates=tuple(sorted(duplicates)))
    together = bool((partitions == answer.partition).all())
    if together and not duplicates and (np.diff(offsets) == 1).all():
        return answer
    divided = ProducedByKey(*answer)
    divided.offsets = offsets.tolist()
    if not together:
        divided.partitions = partitions.tolist()
    return divided


def _places_of(stored: Produced) -> tuple[Offsets, Offsets | int]:
    """The offset and the partition of each row of a part, where all but its duplicates lie together in runs."""
    if not stored.runs and not stored.duplicates:
        return np.arange(stored.first_offset, stored.first_offset + stored.items), stored.partition
    runs = stored.runs or (stored[:3],)
    rows = [rows for *_, rows in runs]
    is_stored = np.ones(stored.items, np.int64)
    left_out = [row for row, _ in stored.duplicates]
    is_stored[left_out] = 0
    before = np.cumsum(is_stored) - is_stored
    begins = np.cumsum([0, *rows[:-1]])
    offsets = before + np.repeat([first - before[begin] for (_, first, _), begin in zip(runs, begins, strict=True)], rows)
    offsets[left_out] = [offset for _, offset in stored.duplicates]
    return offsets, np.repeat([partition for partition, _, _ in runs], rows)


def _error(errors: Sequence[BaseException], parts: int, request: Produce) -> BaseException:
    """The error of the whole call. A refusal says that nothing is stored, so it is one only if every part was refused."""
    refused = [each for each in errors if isinstance(each, SluicewayError) and each.code != "outcome_unknown"]
    if len(refused) == parts:
        return next((each for each in refused if each.code != "unavailable"), refused[0])
    for error in errors:
        if not isinstance(error, SluicewayError) or error.code in ("key_conflict", "stale_sequence"):
            return error  # to repeat the call would not help
    # Any other code says that nothing was stored: a client may repeat the call under another idempotency key.
    what = "repeat the call: the idempotency key stores what is missing" if request.key is not None else "the others may be stored"
    return SluicewayError(
        "outcome_unknown", f"{len(errors)} of the {parts} parts into which the keys divide the call failed; {what}. The first: {errors[0]}"
    )
