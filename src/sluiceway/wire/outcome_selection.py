"""Grouping of item and lease ids into selections: a partition's offsets and their disposition. It avoids Python work per item."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.ids import ItemId, LeaseId, parse_item_id, parse_lease_id
from sluiceway.model.queue import QueueRecord
from sluiceway.model.requests import Disposition, Offsets, Selection

_OFFSET_DIGITS = 18


class Grouped(NamedTuple):
    """Selections by partition. `foreign`: ids of other queues or incarnations."""

    selections: dict[int, list[Selection]]
    foreign: list[str]

    def add(self, partition: int, selection: Selection) -> None:
        """Append a selection to its partition's list."""
        self.selections.setdefault(partition, []).append(selection)


def has_partition(record: QueueRecord, partition: int) -> bool:
    """Whether the record lists the partition."""
    return any(known.partition == partition for known in record.partitions)


def belongs(identifier: ItemId | LeaseId, record: QueueRecord) -> bool:
    """Whether the id has the queue's incarnation. Its partition is not checked here, because the record may be outdated."""
    return identifier.incarnation == record.incarnation


def check_partition(partition: int | None, record: QueueRecord, *, removed: bool = False) -> None:
    """Raises `invalid_request` for a partition that the queue does not have. `removed`: accept one that it had in the past."""
    if partition is None or has_partition(record, partition):
        return
    if partition >= record.given:
        raise invalid("partition", f"the queue {record.queue_name!r} has no partition {partition}")
    if not removed:
        raise invalid("partition", f"partition {partition} of the queue {record.queue_name!r} was removed by a rebalance")


def group_items(
    ids: Sequence[str],
    dispositions: Iterable[Disposition],
    record: QueueRecord,
    path: Callable[[int], str],
    only_partition: int | None = None,
) -> Grouped:
    """Group item ids by partition and disposition. `path` names the field of the n-th id in an error.

    Raises `invalid_request` for a malformed id, for an id outside `only_partition`, and for an item with two dispositions.
    """
    groups = _by_place(ids, dispositions)
    grouped = Grouped({}, [])
    for (place, disposition), texts in groups.items():
        incarnation, partition = _place(place, texts, ids, path)
        if only_partition is not None and partition != only_partition:
            at = next(n for n, text in enumerate(ids) if text.startswith(f"{place}."))
            raise invalid(path(at), f"{ids[at]!r} is not of partition {only_partition}")
        if incarnation != record.incarnation:
            grouped.foreign.extend(f"{place}.{text}" for text in texts)
        else:
            grouped.add(partition, Selection(disposition, offsets=np.unique(np.array(list(map(int, texts)), np.int64))))
    check_one_disposition(grouped.selections, "items")
    return grouped


def _by_place(ids: Sequence[str], dispositions: Iterable[Disposition]) -> dict[tuple[str, Disposition], list[str]]:
    """The part of each id after its last dot (the offset), grouped by the part before it and by disposition."""
    groups: dict[tuple[str, Disposition], list[str]] = {}
    if isinstance(dispositions, repeat) and ids:
        # Ids usually come from one lease. This finds out without a loop over them.
        place = ids[0].rpartition(".")[0]
        together = ",".join(ids)
        if together.startswith(f"{place}.") and together.count(f",{place}.") == together.count(",") == len(ids) - 1:
            offsets = together[len(place) + 1 :].split(f",{place}.")
            if "." not in "".join(offsets):
                return {(place, next(dispositions)): offsets}
    for text, disposition in zip(ids, dispositions, strict=False):
        place, _, offset = text.rpartition(".")
        group = groups.get((place, disposition))
        if group is None:
            groups[place, disposition] = [offset]
        else:
            group.append(offset)
    return groups


def _place(place: str, texts: list[str], ids: Sequence[str], path: Callable[[int], str]) -> tuple[str, int]:
    digits = "".join(texts)
    if digits.isascii() and digits.isdigit() and "" not in texts and max(map(len, texts)) <= _OFFSET_DIGITS:
        try:
            return parse_item_id(f"{place}.0")[:2]
        except SluicewayError:
            pass
    for at, text in enumerate(ids):
        parse_item_id(text, path(at))
    raise AssertionError(f"a group of item ids was refused, but each of them is sound: {place!r}")


def group_rows(
    partitions: Offsets,
    offsets: Offsets,
    dispositions: Sequence[Disposition],
    disposition_of: Offsets,
    incarnation: str,
    record: QueueRecord,
) -> Grouped:
    """Group rows by partition and disposition.

    `partitions`, `offsets` and `disposition_of` are arrays with one entry per row. `disposition_of` indexes `dispositions`.

    Raises `invalid_request` for an item with two dispositions.
    """
    grouped = Grouped({}, [])
    keys, index = np.unique(partitions.astype(np.int64) * len(dispositions) + disposition_of, return_inverse=True)
    by_key = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index, minlength=len(keys)))
    for key, rows in zip(keys.tolist(), np.split(by_key, ends[:-1]), strict=True):
        partition, disposition = divmod(key, len(dispositions))
        chosen = offsets[rows]
        if incarnation != record.incarnation or partition < 0:
            grouped.foreign.extend(str(ItemId(incarnation, partition, offset)) for offset in chosen.tolist())
        else:
            grouped.add(partition, Selection(dispositions[disposition], offsets=np.unique(chosen)))
    check_one_disposition(grouped.selections, "items")
    return grouped


def check_one_disposition(selections: dict[int, list[Selection]], field: str) -> None:
    """Raises `invalid_request` for an item with two dispositions in one call. The caller has to choose one."""
    for partition, chosen in selections.items():
        parts = [selection.offsets for selection in chosen if selection.offsets is not None]
        if len(parts) < 2:
            continue
        found, counts = np.unique(np.concatenate(parts), return_counts=True)
        if len(found) < sum(map(len, parts)):
            offset = int(found[np.argmax(counts > 1)])
            raise invalid(field, f"the item of partition {partition} at offset {offset} has two different outcomes")


def group_leases(
    lease_ids: Sequence[str], record: QueueRecord, only_partition: int | None = None
) -> tuple[list[tuple[int, int]], list[str]]:
    """The leases as (partition, number) and the ids of leases of other queues, each once.

    Raises `invalid_request` for a malformed id and for a lease outside `only_partition`.
    """
    leases: dict[tuple[int, int], None] = {}
    foreign: dict[str, None] = {}
    for at, text in enumerate(lease_ids):
        lease = parse_lease_id(text, f"lease_ids[{at}]")
        if only_partition is not None and lease.partition != only_partition:
            raise invalid(f"lease_ids[{at}]", f"{text!r} is not of partition {only_partition}")
        if belongs(lease, record):
            leases[lease.partition, lease.number] = None
        else:
            foreign[text] = None
    return list(leases), list(foreign)


def select_leases(grouped: Grouped, leases: Iterable[tuple[int, int]], disposition: Disposition) -> None:
    """Add a selection for all open items of each lease to `grouped`."""
    for partition, number in leases:
        grouped.add(partition, Selection(disposition, lease=number))
