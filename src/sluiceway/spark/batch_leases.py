"""Batch leases: what a micro-batch takes from its queues, also while partitions of them are away (ADR 61).

The server refuses a lease of a whole queue while a closed partition may hold leases of its key (ADR 35). The batch is then leased partition
by partition, since each knows exactly what it holds under a key.

A key is *unanswered* at a part if leases may be there under it that no batch has: an attempt failed, or an earlier driver died after one.
Unanswered keys are in the batch's offset. Before such a part is asked for more, these leases are looked up and join the batch. So no lease
is left behind until it runs out, and none is in two batches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from sluiceway.kernel.clock import Millis
from sluiceway.kernel.errors import KINDS, SluicewayError
from sluiceway.kernel.limits import MAX_ITEMS_JSON
from sluiceway.spark.admission import Admission
from sluiceway.spark.offsets import HeldLease, Offset, Part
from sluiceway.spark.options import SourceOptions
from sluiceway.spark.server_calls import Client

log = logging.getLogger("sluiceway.spark")

PATIENCE: Millis = 10_000
"""How long a call is repeated before its part counts as away. A takeover or a restart takes less."""
NO_PATIENCE: Millis = 1_000
"""The same for a part that was away a moment ago."""
IDLE_WAIT: Millis = 500
"""How long a trigger waits for a first item. Spark asks again 10 ms after an empty answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of what is taken from each part: items, and approximate payload bytes (None: unlimited). `lease_timeout` in ms. `waits`: a batch may
    wait up to IDLE_WAIT for its first item. `tails`: the offsets before which items are taken, by queue and partition; a queue without
    an entry has no such limit."""

    items: int
    nbytes: int | None
    lease_timeout: Millis
    waits: bool
    tails: Mapping[str, Mapping[str, int]]

    def divided(self, parts: int) -> Limits:
        """The limits of each of so many parts, whatever the other parts have: so a restarted driver finds all leases again."""
        nbytes = None if self.nbytes is None else max(1, self.nbytes // parts)
        return Limits(max(1, self.items // parts), nbytes, self.lease_timeout, self.waits, self.tails)


def is_away(error: SluicewayError) -> bool:
    """Whether the error says that partitions of a call do not answer, or not now."""
    return error.code in ("unavailable", "outcome_unknown", "partition_damaged")


def closed_partitions(client: Client, queue: str) -> dict[int, bool]:
    """The queue's partitions, and whether each is closed."""
    answer = client.call("/v1/queue.stats", {"queue_name": queue})
    return {each["partition"]: each["next_offset"] is None for logical in answer["logical_queues"] for each in logical["partitions"]}


class BatchLeases:
    """Takes the batches of one driver, whose new checkpoint would have this `nonce`. Remembers what it has asked for in the current batch,
    since Spark asks again for one that was empty."""

    def __init__(self, client: Client, options: SourceOptions, nonce: str) -> None:
        self._client = client
        self._options = options
        self._own_nonce = nonce
        self._at: tuple[str, int] | None = None
        """Nonce and number of the batch before the current one."""
        self._is_first = False
        """Whether an earlier driver may have made calls for this batch."""
        self._unanswered: dict[Part, list[int]] = {}
        """The numbers of the batches whose keys are unanswered, by part."""
        self._asked: set[Part] = set()
        """The parts from which this driver has tried to lease the current batch."""
        self._divided: set[str] = set()
        """Queues from which it may have been leased partition by partition."""
        self._refused: set[str] = set()
        """Queues whose last lease as a whole was refused."""
        self._told: frozenset[str] = frozenset()
        # Of the attempt under way:
        self._taken: dict[Part, list[HeldLease]] = {}
        """The leases of the parts that have answered."""
        self._away: set[str] = set()
        """The parts that are not available."""
        self._failure: SluicewayError | None = None
        self._closed: dict[str, dict[int, bool]] = {}
        """Whether partitions are closed, by queue."""
        self._wait: Millis = 0
        """How long a call may wait for a first item."""
        self._closes: Sequence[str] = ()
        """Leases that the next call for a whole queue completes."""
        # Of the last batch taken:
        self.closed: dict[str, str] | None = None
        """Those of the leases to be closed that were gone, with the server's reasons; None: it is not confirmed that the others are."""
        self.is_fresh = False
        """Whether all of its leases were taken for it by this driver, during that `take`."""

    @property
    def unanswered(self) -> tuple[tuple[Part, tuple[int, ...]], ...]:
        """The keys that are unanswered after the last batch taken, for its offset."""
        return tuple((part, tuple(numbers)) for part, numbers in sorted(self._unanswered.items(), key=lambda each: each[0].text))

    def take(self, at: Offset, parts: Sequence[Part], limits: Limits, closes: Sequence[str] = ()) -> dict[Part, list[HeldLease]]:
        """Lease the batch after `at`, up to `limits` from each part that answers, and whatever was unanswered there.

        `closes`: leases of an earlier batch, of the one queue that is read, which the first call for all of it completes; `closed` says
        what became of that.
        Raises the last error if no part answers within `request_timeout`.
        """
        if (at.nonce, at.sequence) != self._at:
            self._begin(at)
        self._closes, self.closed = closes, None
        self.is_fresh = not self._is_first and not self._unanswered
        self._wait = IDLE_WAIT // len(parts) if limits.waits else 0
        deadline = time.monotonic() + self._options.server.request_timeout / 1000
        while True:
            before = self._copied(self._unanswered.items())
            try:
                self._attempt(parts, limits)
                break
            except SluicewayError as error:
                # What it has found is in no batch yet.
                self._unanswered, self.is_fresh = before, False
                if not KINDS[error.code].retryable or time.monotonic() >= deadline:
                    raise
            time.sleep(IDLE_WAIT / 1000)
        if self._divided and limits.waits and not any(self._taken.values()):
            # The partitions were asked in turn, and none of them waited.
            time.sleep(IDLE_WAIT / 1000)
        self.is_fresh = self.is_fresh and not self._unanswered
        self._report()
        return self._taken

    def _begin(self, at: Offset) -> None:
        """Begin the batch after `at`."""
        self._is_first = self._at is None and at.nonce != self._own_nonce
        self._at, self._unanswered = (at.nonce, at.sequence), self._copied(at.unanswered)
        self._asked = set()
        self._divided = {*self._options.queues} if self._is_first and self._options.partitions is None else set()

    @staticmethod
    def _copied(unanswered: Iterable[tuple[Part, Sequence[int]]]) -> dict[Part, list[int]]:
        return {part: [*numbers] for part, numbers in unanswered}

    def _attempt(self, parts: Sequence[Part], limits: Limits) -> None:
        """Ask all parts. Raises the last error if none answers."""
        self._taken, self._away, self._failure, self._closed = {}, set(), None, {}
        for part in list(self._unanswered):
            if part.queue in self._options.queues:
                self._find_unanswered(part, limits)
        for part in parts:
            if part.partition is None:
                self._take_queue(part, limits)
            else:
                self._take_partition(part, limits)
        if not self._taken:
            raise self._last_failure()

    def _last_failure(self) -> SluicewayError:
        return self._failure or SluicewayError("unavailable", f"not available: {', '.join(sorted(self._away))}")

    def _report(self) -> None:
        away = frozenset(self._away)
        if away - self._told:
            log.warning("not available: %s; batches go on without, and take what is there once it is back", ", ".join(sorted(away)))
        elif self._told and not away:
            log.info("available again: %s", ", ".join(sorted(self._told)))
        self._told = away

    # ---- unanswered keys --------------------------------------------------------------------------------------

    @property
    def _number(self) -> int:
        """The number of the current batch."""
        assert self._at is not None
        return self._at[1] + 1

    def _key(self, part: Part, number: int) -> str:
        """The key, but for the number of the call. A part of a divided queue has keys of its own: the calls of one key are looked up in
        order until one has no leases, and those of the whole queue may have left none in this partition."""
        assert self._at is not None
        return f"{self._at[0]}/{number}" + ("/alone" if part.alone else "")

    def _note(self, part: Part) -> None:
        """Note that the part does not answer, so leases may be there under the batch's key if it has been asked for them."""
        if part in self._asked or self._is_first:
            numbers = self._unanswered.setdefault(part, [])
            if self._number not in numbers:
                numbers.append(self._number)

    def _forget(self, part: Part, number: int) -> None:
        """Note that the part has answered under the key of that batch."""
        numbers = self._unanswered.get(part, [])
        if number in numbers:
            numbers.remove(number)
        if part in self._unanswered and not numbers:
            del self._unanswered[part]

    def _is_behind(self, part: Part) -> bool:
        """Whether a key of an earlier batch is unanswered there. Until it is answered, the part is asked for no other."""
        return any(number != self._number for number in self._unanswered.get(part, ()))

    def _find_unanswered(self, part: Part, limits: Limits) -> None:
        """Look up the leases of earlier batches' keys, if the part answers now."""
        find = self._admission(limits, NO_PATIENCE).find
        for number in [number for number in self._unanswered[part] if number != self._number]:
            if self._is_closed(part):
                return
            found = self._try(part, partial(find, part.queue, self._key(part, number), limits.lease_timeout, part.partition))
            if found is None:
                return
            self._forget(part, number)
            self._answer(part, found)

    # ---- leases -----------------------------------------------------------------------------------------------

    def _take_queue(self, part: Part, limits: Limits) -> None:
        """Lease from the queue as a whole, or else from each of its partitions."""
        refused = part.queue in self._refused
        if not self._is_behind(part) and not (refused and self._is_closed(part)):
            found = self._try(part, partial(self._take_whole, part, limits, NO_PATIENCE if refused else PATIENCE))
            if found is not None:
                self._refused.discard(part.queue)
                self._divided.discard(part.queue)
                for each in [each for each in self._unanswered if each.queue == part.queue]:
                    self._forget(each, self._number)
                self._answer(part, found)
                return
        self._refused.add(part.queue)
        self._divided.add(part.queue)
        self._note(part)
        partitions = sorted(self._partitions(part.queue))
        for number in partitions:
            self._take_partition(Part(part.queue, number, True), limits.divided(len(partitions)))

    def _take_whole(self, part: Part, limits: Limits, patience: Millis) -> list[HeldLease]:
        admission = self._admission(limits, patience, self._closes)
        # An attempt that fails may have closed them, or not.
        self._closes = ()
        found: list[HeldLease] = []
        if part.queue in self._divided:
            found = admission.find(part.queue, self._key(part._replace(alone=True), self._number), limits.lease_timeout)
        found += self._admit(admission, part, limits)
        self.closed = admission.completed
        return found

    def _take_partition(self, part: Part, limits: Limits) -> None:
        """Lease from the partition, unless it is known to be away."""
        was_away = part in self._unanswered
        own = None
        if not self._is_behind(part) and not ((was_away or part.alone) and self._is_closed(part)):
            admission = self._admission(limits, NO_PATIENCE if was_away else PATIENCE)
            own = self._try(part, partial(self._admit, admission, part, limits))
        if own is None:
            self._note(part)
            self._away.add(part.shown)
            return
        self._forget(part, self._number)
        self._answer(part, own)

    def _try(self, part: Part, call: Callable[[], list[HeldLease]]) -> list[HeldLease] | None:
        """The leases that the call gets; None: the part is away."""
        try:
            return call()
        except SluicewayError as error:
            if part.partition is not None and error.field == "partition":
                # A rebalance has removed the partition. It holds no lease, or it would still exist.
                return []
            if not is_away(error):
                raise
            self._failure = error
            return None

    def _admission(self, limits: Limits, patience: Millis, closes: Sequence[str] = ()) -> Admission:
        runs = self._options.min_partitions if self._options.runs else 0
        return Admission(self._client, self._options.consumer, limits.nbytes, runs, patience, closes)

    def _admit(self, admission: Admission, part: Part, limits: Limits) -> list[HeldLease]:
        # The partitions of a divided queue are asked in turn: one that waits would delay the others.
        wait = 0 if part.alone or any(self._taken.values()) else self._wait
        self._asked.add(part)
        tails, key = limits.tails.get(part.queue), self._key(part, self._number)
        return admission.take(part.queue, key, limits.items, limits.lease_timeout, wait, part.partition, tails, is_first=self._is_first)

    def _answer(self, part: Part, leases: Sequence[HeldLease]) -> None:
        self._taken.setdefault(part, []).extend(leases)

    # ---- partitions -------------------------------------------------------------------------------------------

    def _partitions(self, queue: str) -> dict[int, bool]:
        if queue not in self._closed:
            self._closed[queue] = closed_partitions(self._client, queue)
        return self._closed[queue]

    def _is_closed(self, part: Part) -> bool:
        """Whether the partition is closed, or one of the queue's is."""
        closed = self._partitions(part.queue)
        return any(closed.values()) if part.partition is None else closed.get(part.partition, False)


def close(
    client: Client, leases: Sequence[HeldLease], options: SourceOptions, *, were_away: bool
) -> tuple[dict[str, str], tuple[HeldLease, ...]]:
    """Complete the leases. Returns those that were gone, with the server's reasons, and those left because their partition is away.

    `were_away`: some of them were left before, so look first which partitions are open.
    """
    gone: dict[str, str] = {}
    left: list[HeldLease] = []
    for queue, some in portions(leases, options):
        found = None if were_away else _complete(client, queue, some)
        here = some
        if found is None:
            closed = closed_partitions(client, queue)
            here = [lease for lease in some if not closed.get(lease.partition, False)]
            found = _complete(client, queue, here) if here else {}
        gone |= found or {}
        left += some if found is None else [lease for lease in some if lease not in here]
    return gone, tuple(left)


def _complete(client: Client, queue: str, leases: Sequence[HeldLease]) -> dict[str, str] | None:
    """Complete leases of one queue. Returns those that were gone, with the server's reasons; None: some of their partitions are away."""
    body = {"queue_name": queue, "lease_ids": [lease.lease_id for lease in leases]}
    try:
        return {entry["id"]: entry["reason"] for entry in client.call("/v1/queue.complete", body, PATIENCE)["ignored"]}
    except SluicewayError as error:
        if not is_away(error):
            raise
        return None


def portions(leases: Collection[HeldLease], options: SourceOptions) -> Iterator[tuple[str, list[HeldLease]]]:
    """The leases by queue, in portions that fit into a call."""
    by_queue: dict[str, list[HeldLease]] = {}
    for lease in leases:
        by_queue.setdefault(lease.queue or options.server.queue, []).append(lease)
    for queue, some in by_queue.items():
        for start in range(0, len(some), MAX_ITEMS_JSON):
            yield queue, some[start : start + MAX_ITEMS_JSON]
