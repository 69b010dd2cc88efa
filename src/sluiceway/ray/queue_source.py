"""A source for Ray Data: the driver leases items and keeps them leased, and the read tasks read them.

A lease always reads the same. So a read task that Ray runs again, because its worker died or a block was lost, has the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata

from sluiceway.client import DEFAULT_URL
from sluiceway.client.arrow import ROWS
from sluiceway.client.errors import CallError
from sluiceway.client.job_leases import PARTITIONS, lease_again
from sluiceway.client.lease_extender import LeaseExtender
from sluiceway.client.lease_manager import refused
from sluiceway.client.protocol import Duration
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.limits import MAX_ITEMS_ARROW, MAX_ITEMS_JSON
from sluiceway.ray.address import Address

log = logging.getLogger("sluiceway.ray")

_SNAPSHOTS = 5
"""Snapshots of a partition that may be gone, one after the other, before settling fails."""


class Slice(NamedTuple):
    """Some items of a lease, by their positions in it."""

    lease_id: str
    start: int
    length: int


class QueueSource(Datasource):  # type: ignore[misc]
    """Up to `max_items` items of a queue that are ready now, for `ray.data.read_datasource`. They are leased at once, in the driver.

    The columns are `sluiceway.client.arrow.ROWS`, or those of them that `columns` names; `id` is always among them.

    Reading completes nothing: a `SettleSink` does. The driver extends the leases once a third of `lease_timeout` has passed, until `close`.
    Use it as a `with` block. At the end of the block, the items that were not settled are released, and offered again at once. After an
    exception they are offered again when their leases run out, after `lease_timeout`, and the attempt counts, as when the driver dies: so
    an item that breaks its job does not break jobs forever.

    `count` is the number of items. Without any, the dataset is empty. `url`, `api_key` (`env:NAME` or `file:PATH`; by default the
    environment variable SLUICEWAY_API_KEY) and `ca_file` must hold on the driver and on every worker.
    """

    def __init__(
        self,
        queue_name: str,
        *,
        url: str = DEFAULT_URL,
        max_items: int = 100_000,
        columns: Sequence[str] | None = None,
        lease_timeout: Duration = "5m",
        client_id: str | None = None,
        api_key: str = "",
        ca_file: str = "",
    ) -> None:
        super().__init__()
        if max_items < 1:
            raise invalid("max_items", "expected at least 1")
        self.address = Address(url, queue_name, api_key, ca_file)
        self._columns = _checked(columns)
        self._client = self.address.client(client_id)
        self._extender = LeaseExtender(self._client, queue_name, lease_timeout)
        self._leases: dict[str, int] = {}
        self._ended = False
        try:
            self._lease(max_items, lease_timeout)
        except BaseException as error:
            # Nobody gets this source, so nobody could end what extends the leases taken so far.
            self.__exit__(type(error), error, None)
            raise

    def _lease(self, max_items: int, lease_timeout: Duration) -> None:
        left = max_items
        while left > 0:
            lease = partial(
                self._client.lease,
                self.address.queue_name,
                batch_size=min(MAX_ITEMS_ARROW, left),
                lease_timeout=lease_timeout,
                max_partitions=PARTITIONS,
                payload=False,
            )
            answer = lease_again(self.address.queue_name, lease)
            if not answer.leases:
                return
            taken = {lease.lease_id: lease.count for lease in answer.leases}
            self._leases |= taken
            self._extender.add(taken)
            left -= sum(taken.values())

    @property
    def count(self) -> int:
        """The number of items that are leased and not settled."""
        return sum(self._leases.values())

    # -- Ray's side -------------------------------------------------------------------------------------------------------------

    def get_name(self) -> str:
        return f"Queue({self.address.queue_name})"

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown: leases do not tell the size of their items."""
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[ReadTask]:
        """About `parallelism` tasks, each with 10,000 items at most. They take nothing, so they may be made and run again.

        Raises `invalid_request` once the items are settled or released.
        """
        if self._ended:
            raise invalid("source", "its items are settled or released: make another one")
        return [
            ReadTask(
                partial(_read, self.address, slices, self._columns),
                BlockMetadata(sum(each.length for each in slices), None, None, None),
                _schema(self._columns),
                per_task_row_limit,
            )
            for slices in tasks(self._leases, parallelism)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Copies, such as those that Ray makes, read. They keep and settle nothing."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_client", "_extender")}

    # -- the end ----------------------------------------------------------------------------------------------------------------

    def settle(self, ids: Sequence[pa.Array]) -> None:
        """Close the leases: the outcomes that were staged for these items take effect. Items that are not among them are released.

        Repeating it is safe. Raises CallError if the server could not be reached: then repeat it, or all items are offered again later.
        """
        named = pc.unique(pa.chunked_array(ids, pa.utf8()))
        self._ended = True
        # Always: their number says nothing, since items of another source may be among them in place of as many of this one's.
        self._release_others(named)
        lost = 0
        for some in _portions(list(self._leases)):
            lost += len(refused(self._client.complete(self.address.queue_name, lease_ids=some).ignored))
            self._extender.drop(some)
            for lease_id in some:
                del self._leases[lease_id]
        if lost:
            log.warning("queue %s: %d leases had run out: their items are served again", self.address.queue_name, lost)

    def _release_others(self, named: pa.Array) -> None:
        released = sum(
            self._release_others_in(partition, named) for partition in sorted({_parts(lease_id)[0] for lease_id in self._leases})
        )
        if released:
            log.warning("queue %s: %d items have no outcome: they are released", self.address.queue_name, released)

    def _release_others_in(self, partition: int, named: pa.Array) -> int:
        """Release the items of this partition without an outcome. Returns their number."""
        released = gone = 0
        while True:
            try:
                for open_ids in self._open_ids(partition):
                    others = open_ids.filter(pc.invert(pc.is_in(open_ids, named))).to_pylist()
                    for some in _portions(others):
                        released += self._client.release(self.address.queue_name, some).released
                return released
            except CallError as error:
                # The partition has another owner. What was released before is no longer leased.
                gone += 1
                if error.code != "snapshot_gone" or gone == _SNAPSHOTS:
                    raise

    def _open_ids(self, partition: int) -> Iterator[pa.ChunkedArray]:
        """The ids of the items that are still in the leases. A browse tells them without the payloads."""
        numbers = pa.array([number for each, number in map(_parts, self._leases) if each == partition], pa.int64())
        cursor, more = None, True
        while more:
            page = self._client.browse_arrow(
                self.address.queue_name,
                partition,
                states=None if cursor else ["leased"],
                cursor=cursor,
                limit=MAX_ITEMS_ARROW,
                payload=False,
            )
            yield page.ids().filter(pc.is_in(page.table["lease"], numbers))
            cursor, more = page.cursor, page.cursor is not None

    def close(self) -> None:
        """Release what was not settled. Repeating it is harmless."""
        self._ended = True
        self._extender.close()
        try:
            for some in _portions(list(self._leases)):
                self._client.release(self.address.queue_name, lease_ids=some)
            self._leases.clear()
        finally:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, Exception):
            self.close()
            return
        self._ended = True
        self._extender.close()
        self._client.close()


def tasks(leases: dict[str, int], parallelism: int) -> list[tuple[Slice, ...]]:
    """Divide the leased items among about `parallelism` tasks, in order, up to 10,000 in each, and as many in each as in another."""
    total = sum(leases.values())
    number = min(max(1, parallelism, -(-total // MAX_ITEMS_ARROW)), total)
    made: list[tuple[Slice, ...]] = []
    rest = [Slice(lease_id, 0, count) for lease_id, count in leases.items()]
    for task in range(number):
        room = total * (task + 1) // number - total * task // number
        slices = []
        while room:
            lease_id, start, count = rest[0]
            taken = min(room, count)
            slices.append(Slice(lease_id, start, taken))
            room -= taken
            rest[:1] = [Slice(lease_id, start + taken, count - taken)] if taken < count else []
        made.append(tuple(slices))
    return made


def _read(address: Address, slices: Sequence[Slice], columns: list[str]) -> Iterator[pa.Table]:
    """The items of these slices. Raises `lease_not_found` if a lease has ended, and if items of it were settled meanwhile."""
    with address.client() as client:
        for lease_id, start, count in slices:
            found = client.peek_arrow(address.queue_name, lease_id, start=start, limit=count)
            if len(found) < count:
                what = f"{count - len(found)} items of lease {lease_id} were settled by another client before they were read"
                raise SluicewayError("lease_not_found", f"{what}; lease the rest again")
            yield found.rows().select(columns)


def _parts(lease_id: str) -> tuple[int, int]:
    """The partition and the number that a lease's id names."""
    _, partition, number = lease_id.split(".")
    return int(partition), int(number.removeprefix("L"))


def _checked(columns: Sequence[str] | None) -> list[str]:
    chosen = ROWS.names if columns is None else ["id", *(name for name in columns if name != "id")]
    for name in chosen:
        if name not in ROWS.names:
            raise invalid("columns", f"{name!r} is not one of {', '.join(ROWS.names)}")
    return list(chosen)


def _schema(columns: list[str]) -> pa.Schema:
    return pa.schema([ROWS.field(name) for name in columns])


def _portions(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), MAX_ITEMS_JSON):
        yield ids[start : start + MAX_ITEMS_JSON]
