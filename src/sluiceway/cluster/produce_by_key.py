"""Produce by key: divides a call by its items' keys, where a queue keeps all items of a key in one partition.

docs/adr/0053-order-and-fairness-by-key.md has what holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sluiceway.core.partition.key_slots import home_of_key
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.item_keys import Division, divided
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Produce, Produced, ProducedByKey

Outcome = Produced | BaseException


def parts_of(record: QueueRecord, request: Produce) -> list[tuple[Division, Produce]]:
    """The parts of the call, each for one partition. Within it, the rows of a key follow each other."""
    return [
        (each, replace(request, batch=each.rows, partition=each.place, is_part=True))
        for each in divided(request.batch, lambda key: home_of_key(record, key))
    ]


def together(parts: Sequence[Division], outcomes: Sequence[Outcome], request: Produce) -> Produced:
    """The answer of the whole call. Raises the error of a part; `outcome_unknown` if others may be stored nevertheless."""
    errors = [each for each in outcomes if isinstance(each, BaseException)]
    if errors:
        raise _error(errors, len(outcomes), request)
    done = [each for each in outcomes if isinstance(each, Produced)]
    places = [(0, 0)] * request.batch.num_rows
    for part, stored in zip(parts, done, strict=True):
        for at, row in enumerate(part.numbers):
            places[row] = stored.partition, stored.first_offset + at
    partition, first = places[0]
    deduplicated = all(each.deduplicated for each in done)
    if all(place == (partition, first + at) for at, place in enumerate(places)):
        return Produced(partition, first, len(places), deduplicated)
    divided = ProducedByKey(partition, first, len(places), deduplicated)
    divided.places = tuple(places)
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
