"""A queue as a dataset of PyTorch. PyTorch is imported only with this module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

try:
    from torch.utils.data import IterableDataset
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("a dataset of PyTorch needs torch: pip install torch", name=error.name) from None

from sluiceway.client._sync.client import Client
from sluiceway.client.arrow import ROWS
from sluiceway.client.consumer_common import check_batch_size, put_back
from sluiceway.client.http_exchange import DEFAULT_URL
from sluiceway.client.item_calls import Retry
from sluiceway.client.job_leases import PARTITIONS, lease_again
from sluiceway.client.lease_extender import LeaseExtender
from sluiceway.client.outcome_rows import outcome_table
from sluiceway.client.protocol import Duration
from sluiceway.kernel.errors import invalid
from sluiceway.kernel.limits import MAX_ITEMS_JSON


class QueueDataset(IterableDataset):  # type: ignore[misc]
    """The items of a queue, for a `DataLoader`: each is a dict of `columns`, which are some of `sluiceway.client.arrow.ROWS`.

    Iterating leases items, `batch_size` in a call, and ends after `max_items` (None: no limit), or when a call gets none within
    `request_timeout`. Each process of a loader leases items of its own: there is nothing to divide, and `max_items` is for each.

    `transform` makes a sample of an item, in the process of the loader: a dict with its `id`. Its exceptions are outcomes, as those of a
    handler are: `RetryItem` and any other exception put the item back, `DeadItem` sends it to the dead queue. The loader goes on.

    Reading completes nothing. `settle` does, from any process: call it once the result of a sample is stored. The process that leased an
    item extends its lease, once a third of `lease_timeout` has passed, until the item is settled or the process ends. So give a
    `DataLoader` with `num_workers` also `persistent_workers=True`: its processes then live as long as it does. What is not settled is
    offered again.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        url: str = DEFAULT_URL,
        columns: Sequence[str] = ("id", "payload"),
        transform: Callable[[dict[str, Any]], Any] | None = None,
        batch_size: int = 1_000,
        max_items: int | None = None,
        lease_timeout: Duration = "1m",
        request_timeout: Duration = "0s",
        api_key: str | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        check_batch_size(batch_size)
        for name in columns:
            if name not in ROWS.names:
                raise invalid("columns", f"{name!r} is not one of {', '.join(ROWS.names)}")
        self._queue_name, self._columns, self._transform = queue_name, list(columns), transform
        self._batch_size, self._max_items = batch_size, max_items
        self._lease_timeout, self._wait = lease_timeout, request_timeout
        self._client_options: dict[str, Any] = {"url": url, "api_key": api_key, "ca_file": ca_file}
        self._opened: tuple[int, Client, LeaseExtender] | None = None

    def __iter__(self) -> Iterator[Any]:
        client, extender = self._open()
        left = self._max_items
        while left is None or left > 0:
            lease = partial(
                client.lease_arrow,
                self._queue_name,
                batch_size=self._batch_size if left is None else min(self._batch_size, left),
                request_timeout=self._wait,
                lease_timeout=self._lease_timeout,
                max_partitions=PARTITIONS,
            )
            leased = lease_again(self._queue_name, lease)
            if not len(leased):
                return
            extender.add(leased.lease_ids)
            left = None if left is None else left - len(leased)
            rows = leased.rows()
            yield from self._samples(rows["id"].to_pylist(), rows.select(self._columns).to_pylist())

    def _samples(self, ids: list[str], rows: list[dict[str, Any]]) -> Iterator[Any]:
        if self._transform is None:
            yield from rows
            return
        failed = []
        for item_id, row in zip(ids, rows, strict=True):
            try:
                sample = self._transform(row)
            except Exception as error:
                failed.append(put_back(item_id, error))
            else:
                yield sample
        self._retry(failed)

    def settle(self, rows: object) -> None:
        """Settle items, at once and for good: `done` completes them, `retry` puts them back, `dead` sends them to the dead queue.

        `rows` is what `Client.settle_arrow` takes, with the column `id`, such as `{"id": ids, "outcome": ["done"] * len(ids)}`. Repeating
        it is safe. Raises `invalid_request`, and CallError if the server could not be reached; the items may be settled nevertheless.
        """
        table = outcome_table(rows)
        if "id" not in table.schema.names:
            raise invalid("id", "this column is required")
        given = table.to_pylist()
        client, _ = self._open()
        done = [row["id"] for row in given if row["outcome"] == "done"]
        for start in range(0, len(done), MAX_ITEMS_JSON):
            client.complete(self._queue_name, done[start : start + MAX_ITEMS_JSON])
        self._retry([_retry_of(row) for row in given if row["outcome"] != "done"])

    def close(self) -> None:
        """Extend leases no longer: what is not settled is offered again when they run out."""
        if self._opened is not None:
            _, client, extender = self._opened
            self._opened = None
            extender.close()
            client.close()

    def _retry(self, items: list[Retry]) -> None:
        for start in range(0, len(items), MAX_ITEMS_JSON):
            self._open()[0].retry(self._queue_name, items[start : start + MAX_ITEMS_JSON])

    def _open(self) -> tuple[Client, LeaseExtender]:
        """This process's client. A process of a loader is a copy of the one that made the dataset."""
        if self._opened is None or self._opened[0] != os.getpid():
            client = Client(**self._client_options)
            self._opened = os.getpid(), client, LeaseExtender(client, self._queue_name, self._lease_timeout)
        return self._opened[1], self._opened[2]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


def _retry_of(row: dict[str, Any]) -> Retry:
    after = row.get("retry_after_ms")
    return Retry(row["id"], retry_after=None if after is None else f"{after}ms", dead=row["outcome"] == "dead", reason=row.get("reason"))
