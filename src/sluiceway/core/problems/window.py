"""The last samples of one queue, and what changed between them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from sluiceway.core.problems.observations import QueueSample, Repeat
from sluiceway.core.problems.thresholds import FIRST_GAP, INTERVAL, MAX_GAP, MEMORY
from sluiceway.kernel.clock import Millis

_GAPS = 5
"""Pauses between lease calls that are remembered: as many as tell a habit."""


class Window:
    """The samples of the last minute. Deltas are never negative: a share that begins anew counts from zero again."""

    def __init__(self) -> None:
        self._samples: deque[QueueSample] = deque()
        self.active_at: Millis | None = None
        """Last sign of a consumer: a lease call, or items leased."""
        self.waiting_since: Millis | None = None
        """Since when there have been ready items that consumers can get; None: there are none."""
        self.paused_since: dict[str, Millis] = {}
        self._gaps: deque[Millis] = deque(maxlen=_GAPS)

    def add(self, sample: QueueSample) -> None:
        before = self._samples[-1] if self._samples else None
        if len(self._samples) > 1 and _is_same(self._samples[-1], sample) and _is_same(self._samples[-2], sample):
            # Nothing happens: an idle queue keeps two samples, not thirty.
            self._samples.pop()
        self._samples.append(sample)
        while len(self._samples) > 1 and self._samples[1].at <= sample.at - MEMORY:
            self._samples.popleft()
        if not sample.servable:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = sample.at
        self._note_activity(sample, before)

    def _note_activity(self, sample: QueueSample, before: QueueSample | None) -> None:
        seen = sample.seen_at if before is None or sample.taken <= before.taken else sample.at
        if sample.waiting:
            seen = sample.at
        if seen is None or (self.active_at is not None and seen <= self.active_at):
            return
        if self.active_at is not None and seen - self.active_at <= MAX_GAP:
            self._gaps.append(seen - self.active_at)
        self.active_at = seen

    @property
    def habit(self) -> Millis:
        """The longest of the last pauses between lease calls; 0: there was no call."""
        return max(self._gaps, default=0 if self.active_at is None else FIRST_GAP)

    @property
    def now(self) -> QueueSample:
        return self._samples[-1]

    @property
    def is_idle(self) -> bool:
        """Whether nothing has happened for as long as is known, and there is nothing that could be wrong: most queues, most of the time."""
        now = self.now
        quiet = not (now.ready or now.leased or now.unserved or now.failed_queries or now.repeats or self.paused_since)
        return quiet and len(self._samples) == 2 and _is_same(*self._samples)

    def covers(self, span: Millis) -> bool:
        """Whether there are samples over that span. Samples come a little early or late."""
        return self.now.at - self._samples[0].at >= span - INTERVAL // 2

    def over(self, span: Millis) -> list[QueueSample]:
        """The samples of that span, the first of which is its beginning; all of them if they cover less."""
        since = self.now.at - span - INTERVAL // 2
        return [sample for sample in self._samples if sample.at >= since]

    def grown(self, name: str, span: Millis) -> int:
        """By how much that count has grown over the span."""
        return sum(max(0, int(getattr(now, name)) - int(getattr(then, name))) for then, now in pairwise(self.over(span)))

    def changes(self, name: str, span: Millis) -> int:
        """In how many samples of the span that count grew."""
        return sum(getattr(now, name) > getattr(then, name) for then, now in pairwise(self.over(span)))

    def refused(self, span: Millis) -> dict[str, int]:
        """Refused produces over the span, by error code."""
        samples = self.over(span)
        first, last = samples[0].refused, samples[-1].refused
        return {code: count - first.get(code, 0) for code, count in last.items() if count > first.get(code, 0)}

    def held(self, span: Millis) -> dict[str, int]:
        """Items by client that it held at the beginning of the span, and has held since in the same leases."""
        samples = self.over(span)
        first, last = samples[0].held, samples[-1].held
        found = {
            client: sum(min(count, first.get(client, {}).get(lease, 0)) for lease, count in leases.items())
            for client, leases in last.items()
        }
        return {client: count for client, count in found.items() if count}

    def repeats_since(self, span: Millis) -> int:
        """Failures over the span of the items that fail again and again."""
        samples = self.over(span)
        before = {(each.partition, each.offset): each.attempts for each in samples[0].repeats}
        return sum(max(0, each.attempts - before.get((each.partition, each.offset), 0)) for each in self.now.repeats)

    def repeats_alone(self) -> list[Repeat]:
        """The items that fail again and again, and hold up no others."""
        holders = {(each.partition, each.holder.origin) for each in self.now.held_up}
        return [each for each in self.now.repeats if (each.partition, each.offset) not in holders]


def _is_same(one: QueueSample, other: QueueSample) -> bool:
    """Whether the samples differ in nothing but their times."""
    return one[1:] == other[1:]
