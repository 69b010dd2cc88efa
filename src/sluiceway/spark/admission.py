"""Admission: how much a micro-batch takes from a queue, as leases limited by items, and approximately by payload bytes.

The decision to make a further call depends only on the leases of the earlier calls, and on the limits. So a restarted driver, which finds
those again under their keys, continues where it stopped. With lower limits it stops earlier, and looks for those of the calls that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sluiceway.kernel.clock import Millis, format_duration
from sluiceway.kernel.errors import SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_UNREAD, MAX_PARTITIONS
from sluiceway.spark.offsets import HeldLease
from sluiceway.spark.server_calls import Client

_SAMPLE = 32
"""Sample of items from a lease, or of the next items, whose sizes represent all."""

_LOOKS = 8
"""Samples taken from the leases of one call."""

_ENOUGH = 0.9
"""Fraction of the byte limit beyond which no further call is made."""


class Admission:
    """Takes leases for `consumer`. `most_bytes`: approximate payload bytes of one `take`; None: unlimited. `runs`: number of leases, at
    least, for which several items of a key are asked for; 0: they are not. `patience`: how long a call is repeated, in ms; None: as long
    as the client does. `completes`: leases of the queue that the first call completes."""

    def __init__(
        self,
        client: Client,
        consumer: str,
        most_bytes: int | None,
        runs: int = 0,
        patience: Millis | None = None,
        completes: Sequence[str] = (),
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._most_bytes = most_bytes
        self._runs = runs
        self._patience = patience
        self._completes = completes
        self.completed: dict[str, str] | None = None
        """Those of `completes` that were gone, with the server's reasons; None: it is not confirmed that the others were completed."""

    def take(
        self,
        queue: str,
        key: str,
        most: int,
        lease_timeout: Millis,
        wait: Millis,
        partition: int | None = None,
        tails: Mapping[str, int] | None = None,
        *,
        is_first: bool = False,
    ) -> list[HeldLease]:
        """Lease up to `most` items, by repeated keyed calls until one is empty; the first waits up to `wait` ms for an item.

        Call k always has the same key, so a restarted driver finds the first calls' leases again and continues. With `partition`, only from
        that one; with `tails`, only items before these offsets of the queue. `is_first`: an earlier driver may have made calls under this
        key with higher limits, and all of their leases are taken.
        """
        leases: list[HeldLease] = []
        items = calls = 0
        nbytes = 0.0
        where: dict[str, object] = {"max_partitions": MAX_PARTITIONS} if partition is None else {"partition": partition}
        if tails is not None:
            where["before_offsets"] = tails
        if self._runs:
            where["runs"] = True
        # A lease with runs is not divided among tasks.
        largest = max(1, most // self._runs) if self._runs else most
        average = self._average_next(queue, partition) if self._most_bytes is not None and most > 0 else 0.0
        completes = self._completes
        while items < most:
            answer = self._client.call(
                "/v1/queue.lease",
                {
                    "queue_name": queue,
                    "client_id": self._consumer,
                    "lease_key": f"{key}/{calls}",
                    "batch_size": min(MAX_ITEMS_UNREAD, most - items, largest, self._fitting(nbytes, average)),
                    **where,
                    "lease_timeout": format_duration(lease_timeout),
                    "request_timeout": format_duration(0 if calls else wait),
                    "payload": False,
                    **({"complete": {"lease_ids": [*completes]}} if completes else {}),
                },
                self._patience,
            )
            if completes and answer["completed"] is not None:
                self.completed = {entry["id"]: entry["reason"] for entry in answer["completed"]["ignored"]}
            has_completed, completes = bool(completes), ()
            if not answer["leases"]:
                if has_completed and not wait:
                    # What was completed may make way for others: the next items of its keys, or those beyond a limit.
                    continue
                return leases
            taken = _held(answer)
            leases += taken
            calls += 1
            count = sum(lease.count for lease in taken)
            items += count
            if self._most_bytes is not None:
                nbytes += self._average_of(queue, taken) * count
                average = nbytes / max(1, items)
                if nbytes >= _ENOUGH * self._most_bytes or nbytes + average > self._most_bytes:
                    break
        return leases + self.find(queue, key, lease_timeout, partition, calls) if is_first else leases

    def find(self, queue: str, key: str, lease_timeout: Millis, partition: int | None = None, calls: int = 0) -> list[HeldLease]:
        """The leases that earlier calls of `take` have taken under that key, after the first `calls`. Leases nothing."""
        leases: list[HeldLease] = []
        while True:
            body = {
                "queue_name": queue,
                "client_id": self._consumer,
                "lease_key": f"{key}/{calls}",
                # No item is before these offsets.
                "before_offsets": {},
                "lease_timeout": format_duration(lease_timeout),
                "payload": False,
            }
            answer = self._client.call("/v1/queue.lease", body if partition is None else {**body, "partition": partition}, self._patience)
            if not answer["leases"]:
                return leases
            leases += _held(answer)
            calls += 1

    def _fitting(self, nbytes: float, average: float) -> int:
        """The number of items of that size that fit; at least one, and few if their size is unknown."""
        if self._most_bytes is None:
            return MAX_ITEMS_UNREAD
        return max(1, int((self._most_bytes - nbytes) / average)) if average else _SAMPLE

    def _average_next(self, queue: str, partition: int | None) -> float:
        """Average bytes of the next items; 0: there are none."""
        where = {} if partition is None else {"partition": partition}
        return _average([self._sizes({"queue_name": queue, "limit": _SAMPLE, **where})])

    def _average_of(self, queue: str, leases: list[HeldLease]) -> float:
        """Average bytes of these leases' items. Deterministic for the same leases."""
        looked_at = leases[:: -(-len(leases) // _LOOKS)]
        each = _LOOKS // len(looked_at)
        samples = []
        for lease in looked_at:
            # Small leases whole, larger ones at several places: sizes may vary along the line.
            looks = each if lease.count > _SAMPLE else 1
            for look in range(looks):
                where = {"lease_id": lease.lease_id, "start": lease.count * look // looks, "limit": _SAMPLE // looks}
                samples.append(self._sizes({"queue_name": queue, **where}))
        return _average(samples)

    def _sizes(self, body: dict[str, object]) -> pa.ChunkedArray:
        try:
            found = self._client.fetch_arrow("/v1/queue.peek", body, self._patience).read_all()
        except SluicewayError as error:
            if error.code != "lease_not_found":
                raise
            # It ran out this very moment; the read of the batch reports that.
            return pa.chunked_array([], pa.int32())
        return pc.binary_length(found.column("payload"))


def _held(answer: Mapping[str, Any]) -> list[HeldLease]:
    return [HeldLease(lease["lease_id"], lease["count"]) for lease in answer["leases"]]


def _average(samples: list[pa.ChunkedArray]) -> float:
    items = sum(len(sample) for sample in samples)
    # Avoid a zero average for empty payloads.
    return max(1.0, sum(pc.sum(sample).as_py() or 0 for sample in samples) / items) if items else 0.0
