"""Produce by key: divides a call by its items' keys, where a queue keeps all items of a key in one partition.

docs/adr/0053-order-and-fairness-by-key.md has what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sluiceway.core.partition.key_slots import slots_of, slots_of_hashes
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division, divided, divided_again
from sluiceway.model.queue import MOVING, QueueRecord
from sluiceway.model.requests import CallPart, Produce, Produced, ProducedByKey
from sluiceway.model.small_batch import digest

Outcome = Produced | BaseException


class DividedError(Exception):
    """The keys of a part are no longer at home in its partition: divide it again. `unknown`: the outcome of an earlier attempt, if that may
    have stored it."""

    unknown: SluicewayError | None = None


def parts_of(record: QueueRecord, request: Produce) -> list[tuple[Division, Produce]]:
    """The parts of the call, each for one partition, or for none at the moment (MOVING). Within it, the rows of a key follow each other,
    and so do those of them of one priority, where that matters."""
    homes = slots_of(record)
    whole = b"" if request.key is None else digest(request.batch)
    parts = divided(request.batch, lambda keys: slots_of_hashes(keys, len(homes)), homes, record.priority is not None)
    return [(each, replace(request, batch=each.rows, partition=each.place, part=CallPart(whole, each.slots))) for each in parts]


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
    for part, stored in zip(parts, done, strict=True):
        runs = stored.runs or (stored[:3],)
        offsets[part.numbers] = np.concatenate([np.arange(first, first + rows) for _, first, rows in runs])
        partitions[part.numbers] = np.repeat([partition for partition, _, _ in runs], [rows for *_, rows in runs])
    answer = Produced(int(partitions[0]), int(offsets[0]), count, all(each.deduplicated for each in done))
    together = bool((partitions == answer.partition).all())
    if together and (np.diff(offsets) == 1).all():
        return answer
    divided = ProducedByKey(*answer)
    divided.offsets = offsets.tolist()
    if not together:
        divided.partitions = partitions.tolist()
    return divided


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
