"""The books of a run: input and output counts, and whether they balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sluiceway.client import PartitionStats
from sluiceway.demo.check import Check


@dataclass(frozen=True, slots=True)
class Ledger:
    """Ledger of a run. `partitions`, `dead_partitions`: the server's counts; `check`: Spark's comparison of the rows themselves.

    `events`: the processes that died or were killed. Times are in seconds, interruptions included.
    """

    queue: str
    dead_queue: str
    partitions: Sequence[PartitionStats]
    dead_partitions: Sequence[PartitionStats]
    check: Check
    batches: int
    replayed: int
    redelivered: int
    seconds_in: float
    seconds_out: float
    rate_later: float = 0.0
    """Items a second out, after the first batch."""
    events: Sequence[str] = ()

    def total(self, name: str) -> int:
        return sum(int(getattr(partition, name)) for partition in self.partitions)

    def problems(self) -> list[str]:
        """List the reasons why the books do not balance; empty if they do."""
        return [*self._counts(), *self._rows()]

    def _counts(self) -> Iterator[str]:
        for part in self.partitions:
            if part.produced != part.completed + part.dead:
                yield f"partition {part.partition}: produced {part.produced:,} is not completed {part.completed:,} + dead {part.dead:,}"
        if left := self.total("total") + self.total("transferring"):
            yield f"{left:,} items are still in {self.queue}"
        if self.total("produced") != self.check.rows:
            yield f"{self.total('produced'):,} items were produced of {self.check.rows:,} rows"
        if self.total("completed") != self.check.table:
            yield f"{self.total('completed'):,} items were completed, and the table has {self.check.table:,} rows"
        arrived = sum(part.produced for part in self.dead_partitions)
        if not self.total("dead") == arrived == self.check.dead:
            yield (
                f"{self.total('dead'):,} items left {self.queue} as dead, {arrived:,} arrived in {self.dead_queue}, "
                f"and {self.check.dead:,} were found there"
            )

    def _rows(self) -> Iterator[str]:
        check = self.check
        wrong = {
            "rows lost": check.lost,
            "rows duplicated": check.duplicated,
            "rows that were never in the input": check.unknown,
            "rows missing from the table, or different there": check.missing,
            "rows in the table that should not be there, or are different": check.unexpected,
            "items missing from the dead queue, or there with another reason": check.dead_missing,
            "items in the dead queue that should not be there, or have another reason": check.dead_unexpected,
        }
        for what, count in wrong.items():
            if count:
                yield f"{count:,} {what}"

    def lines(self) -> Iterator[str]:
        """Yield the ledger as lines of text."""
        yield from _rule("Ledger")
        yield from self._partition_table()
        yield ""
        rows, produced = self.check.rows, self.total("produced")
        sign = "=" if produced == self.total("completed") + self.total("dead") else "≠"
        yield f"produced {produced:,} {sign} completed {self.total('completed'):,} + dead {self.total('dead'):,}"
        yield f"in  {rows / self.seconds_in:>9,.0f} items/s ({self.seconds_in:.1f} s)   Spark batch write → queue, each chunk durable"
        later = f"; {self.rate_later:,.0f}/s after the first batch" if self.rate_later else ""
        yield f"out {rows / self.seconds_out:>9,.0f} items/s ({self.seconds_out:.1f} s{later})   queue → Spark streaming query → Parquet"
        yield ""
        yield f"{self.dead_queue}: {self.check.dead:,} items"
        yield from (f"  {count:>9,}  {reason}" for reason, count in self.check.reasons.items())
        yield ""
        yield from self._troubles()
        yield ""
        yield f"compared row by row with the input: {rows:,} rows in, {self.check.table:,} in the table + {self.check.dead:,} dead"
        yield f"lost {self.check.lost:,}, duplicated {self.check.duplicated:,}"
        if problems := self.problems():
            yield "THE LEDGER DOES NOT BALANCE:"
            yield from (f"  - {problem}" for problem in problems)
        else:
            yield "the ledger balances"

    def _partition_table(self) -> Iterator[str]:
        names = ("produced", "completed", "dead", "retried", "expired", "deduplicated")
        yield "partition" + "".join(f"{name:>14}" for name in names)
        for part in self.partitions:
            yield f"{part.partition:>9}" + "".join(f"{getattr(part, name):>14,}" for name in names)
        yield f"{'all':>9}" + "".join(f"{self.total(name):>14,}" for name in names)

    def _troubles(self) -> Iterator[str]:
        again = self.total("leased") - self.total("produced")
        yield from self.events
        retried, expired = self.total("retried"), self.total("expired")
        yield f"served again: {again:,} items; put back for a retry: {retried:,}, by an expired lease: {expired:,}"
        yield f"sent twice and stored once: {self.total('deduplicated'):,} items"
        yield f"micro-batches: {self.batches:,}, run again after an interruption: {self.replayed:,} ({self.redelivered:,} items read again)"


def _rule(title: str) -> Iterator[str]:
    yield ""
    yield f"── {title} " + "─" * (92 - len(title))
