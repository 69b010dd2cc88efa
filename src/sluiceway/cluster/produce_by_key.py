"""Produce by key: divides a call by its items' keys, where a queue keeps all items of a key in one partition.

docs/adr/0053-order-and-fairness-by-key.md has what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sluiceway.core.partition.key_slots import homes_of_keys
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division, divided
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Produce, Produced, ProducedByKey

Outcome = Produced | BaseException


def parts_of(record: QueueRecord, request: Produce) -> list[tuple[Division, Produce]]:
    """The parts of the call, each for one partition. Within it, the rows of a key follow each other."""
    return [
        (each, replace(request, batch=each.rows, partition=each.place, is_part=True))
        for each in divided(request.batch, homes_of_keys(record))
    ]


def together(parts: Sequence[Division], outcomes: Sequence[Outcome], request: Produce) -> Produced:
    """The answer of the whole call. Raises the error of a part; `outcome_unknown` if others may be stored nevertheless."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise _error(errors, len(outcomes), request)
    done = [each for each in outcomes if isinstance(each, Produced)]
    count = request.batch.num_rows
    offsets, partitions = np.empty(count, np.int64), np.empty(count, np.int64)
    for part, stored in zip(parts, done, strict=True):
        offsets[part.numbers] = np.arange(stored.first_offset, stored.first_offset + len(part.numbers))
        partitions[part.numbers] = stored.partition
    answer = Produced(int(partitions[0]), int(offsets[0]), count, all(each.deduplicated for each in done))
    if len(done) == 1 and (np.diff(offsets) == 1).all():
        return answer
    divided = ProducedByKey(*answer)
    divided.offsets = offsets.tolist()
    if len(done) > 1:
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
