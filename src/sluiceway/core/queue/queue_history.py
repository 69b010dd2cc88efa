"""Queue history: folds each instance's view of its share into pages of minutes, and all instances' pages into series.

Pure machines. A page covers half an hour at one instance, and has only the minutes in which something changed: in the other minutes that
the instance observed, the levels are those of the minute before, and nothing happened. So an idle queue is written once a page, an empty
one never. One page for all queues records which minutes the instance observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import Final, NamedTuple

from sluiceway.core.partition.records import Header
from sluiceway.core.queue.partition_executor import PartitionExecutor
from sluiceway.kernel.clock import Millis
from sluiceway.model.queue_minutes import (
    COUNTS,
    LEVELS,
    MAX_MINUTES,
    MINUTE,
    NO_COUNTS,
    OLDEST,
    History,
    Minute,
    Page,
    Tally,
    decode_page,
    encode_page,
)

PREFIX: Final = "history/"
PER_PAGE: Final = 30
"""Minutes. Each minute its page is rewritten: longer pages mean more bytes, shorter ones more keys."""
KEPT_PAGES: Final = MAX_MINUTES // PER_PAGE + 1
LOOKS: Final = "looks"
"""Takes the place of a queue's incarnation (of another length) in a key: the minutes in which the instance observed all queues."""
_DIGITS: Final = 8

Counts = tuple[int, ...]
_of_header = attrgetter(*COUNTS[:-1])


# ---- counts -----------------------------------------------------------------------------------------------------------


def counts_of(executor: PartitionExecutor) -> Counts:
    """The partition's COUNTS since it was created; failures of commits, the last one, are the executor's."""
    return (*_of_header(executor.partition.log.header), executor.failures)


class Tallies:
    """Counts of partitions while they were in a share, however often they came and went. Excludes what happened before or elsewhere;
    nothing counts twice."""

    def __init__(self) -> None:
        self._began: dict[int, Counts] = {}
        self._past: Counts = NO_COUNTS

    def begin(self, number: int, header: Header) -> None:
        """Record the opening of a partition with this header. Reopening after a failed commit is no new beginning."""
        self._began.setdefault(number, (*_of_header(header), 0))

    def end(self, executor: PartitionExecutor) -> None:
        """Record the departure of a partition. A commit in flight, of unknown outcome, counts as done."""
        self._past = tuple(map(add, self._past, self._since(executor)))
        self._began.pop(executor.number, None)

    def _since(self, executor: PartitionExecutor) -> Counts:
        began = self._began.get(executor.number)
        # A reloaded partition may have less than it seemed to have.
        return NO_COUNTS if began is None else tuple(max(0, now - then) for now, then in zip(counts_of(executor), began, strict=True))

    def tally(self, executors: Iterable[PartitionExecutor]) -> Tally:
        """The share's tally with these partitions. One that is not open contributes its last known state."""
        ready = leased = scheduled = 0
        oldest_at: Millis | None = None
        counts = [self._past]
        for executor in executors:
            partition = executor.partition
            ready += partition.log.ready_count
            leased += partition.leased_count
            scheduled += partition.log.scheduled_count
            if partition.log.ready:
                since = partition.log.ready[0].blob.written_at
                oldest_at = since if oldest_at is None else min(oldest_at, since)
            counts.append(self._since(executor))
        return Tally((ready, leased, scheduled), oldest_at, tuple(map(sum, zip(*counts, strict=True))))


# ---- writing ----------------------------------------------------------------------------------------------------------


def key_of(page: int, about: str, writer: str) -> str:
    """The meta-store key of an instance's page about a queue (its incarnation) or LOOKS."""
    return f"{prefix_of(page, about)}{writer}"


def prefix_of(page: int, about: str) -> str:
    return f"{PREFIX}{page:0{_DIGITS}d}/{about}/"


def prefixes_before(page: int) -> list[str]:
    """The prefixes that cover all keys of earlier pages, and no others."""
    text = f"{max(0, page):0{_DIGITS}d}"
    return [f"{PREFIX}{text[:at]}{lower}" for at in range(_DIGITS) for lower in range(int(text[at]))]


def page_of(at: Millis) -> int:
    return at // MINUTE // PER_PAGE


class _Row(NamedTuple):
    place: int
    levels: Counts
    oldest_at: Millis | None
    counts: Counts


_NOTHING: Final = _Row(-1, (0,) * len(LEVELS), None, NO_COUNTS)


@dataclass(slots=True)
class Notes:
    """The pages of one instance, under the name `writer`, never used by another process: of the past half hours those that the store has
    not confirmed, and the current one."""

    writer: str
    _rows: dict[tuple[int, str], list[_Row]] = field(default_factory=dict)
    _looks: dict[int, int] = field(default_factory=dict)
    """Observed places by page, as bits."""
    _counted: dict[str, Counts] = field(default_factory=dict)
    """For each queue, how much of its share's counts is in a page."""
    _unwritten: dict[tuple[int, str], None] = field(default_factory=dict)

    def note(self, minute: Minute, incarnation: str, tally: Tally, *, last: bool = False) -> None:
        """Record a queue's share at the end of a minute. Minutes do not go back. `last`: the share ends within the minute, so only the
        counts are noted."""
        page, place = divmod(minute, PER_PAGE)
        counted = self._counted.get(incarnation, NO_COUNTS)
        more = tuple(max(0, now - then) for now, then in zip(tally.counts, counted, strict=True))
        rows = self._rows.get((page, incarnation), [])
        before = rows[-1] if rows else _NOTHING
        row = _Row(place, _NOTHING.levels, None, more) if last else _Row(place, tally.levels, tally.oldest_at, more)
        if not any(more) and (last or (row.levels, row.oldest_at) == (before.levels, before.oldest_at)):
            return
        if place == before.place:
            row = row._replace(counts=tuple(map(add, before.counts, more)))
            rows.pop()
        self._counted[incarnation] = tuple(map(max, tally.counts, counted))
        rows.append(row)
        self._rows[page, incarnation] = rows
        self._unwritten[page, incarnation] = None

    def looked(self, minute: Minute) -> None:
        """Mark the minute as observed: every queue was noted, or had nothing to note. Forgets confirmed rows of earlier pages."""
        page, place = divmod(minute, PER_PAGE)
        self._looks[page] = self._looks.get(page, 0) | 1 << place
        self._unwritten.pop((page, LOOKS), None)
        self._unwritten[page, LOOKS] = None
        for name in [name for name in self._unwritten if name[0] <= page - KEPT_PAGES]:
            del self._unwritten[name]
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] == page or name in self._unwritten}
        self._looks = {each: bits for each, bits in self._looks.items() if each == page or (each, LOOKS) in self._unwritten}

    def keep(self, incarnations: Iterable[str]) -> None:
        """Forget deleted queues: all but these."""
        there = {LOOKS, *incarnations}
        self._counted = {name: counts for name, counts in self._counted.items() if name in there}
        self._rows = {name: rows for name, rows in self._rows.items() if name[1] in there}
        self._unwritten = {name: None for name in self._unwritten if name[1] in there}

    def unwritten(self) -> Iterator[tuple[tuple[int, str], str, bytes]]:
        """Yield the pages that the store lacks: a name for `written`, the key, and the whole page as value. Looks come last."""
        for page, about in list(self._unwritten):
            found = _looks_page(self._looks[page]) if about == LOOKS else _page(self._rows[page, about])
            yield (page, about), key_of(page, about, self.writer), encode_page(found)

    def written(self, names: Iterable[tuple[int, str]]) -> None:
        """Confirm that the store has these as last yielded."""
        for name in names:
            del self._unwritten[name]


def _looks_page(bits: int) -> Page:
    return Page([place for place in range(PER_PAGE) if bits >> place & 1], {})


def _page(rows: Sequence[_Row]) -> Page:
    columns: dict[str, list[int | None]] = {}
    for names, lines in ((LEVELS, [row.levels for row in rows]), (COUNTS, [row.counts for row in rows])):
        columns |= {name: list(column) for name, column in zip(names, zip(*lines, strict=True), strict=True) if any(column)}
    if any(row.oldest_at is not None for row in rows):
        columns[OLDEST] = [None if row.oldest_at is None else row.oldest_at // 1_000 for row in rows]
    return Page([row.place for row in rows], columns)


# ---- reading ----------------------------------------------------------------------------------------------------------


def prefixes_of(incarnation: str, first: Minute, minutes: int) -> list[str]:
    """The key prefixes to read for `minutes` minutes of a queue."""
    pages = range(first // PER_PAGE, (first + minutes - 1) // PER_PAGE + 1)
    return [prefix_of(page, about) for page in pages for about in (incarnation, LOOKS)]


def history_of(entries: Mapping[str, bytes], first: Minute, minutes: int, created: Minute = 0) -> History:
    """Sum the entries over all instances into `minutes` minutes of a queue that exists since `created`.

    A level is None in a minute that no instance observed; a count if, in addition, none has counted anything in it.
    """
    pages = {_parse(key): decode_page(value) for key, value in entries.items()}
    looked = {(page, writer): found.places for (page, about, writer), found in pages.items() if about == LOOKS}
    sums = _Sums(first, minutes)
    for (page, _), places in looked.items():
        for place in places:
            if page * PER_PAGE + place >= created:
                sums.look(page * PER_PAGE + place)
    for (page, about, writer), found in pages.items():
        if about != LOOKS:
            sums.add(page * PER_PAGE, found, looked.get((page, writer), ()))
    return History(first, sums.series)


def _parse(key: str) -> tuple[int, str, str]:
    page, about, writer = key.removeprefix(PREFIX).split("/")
    return int(page), about, writer


class _Sums:
    """The series under construction."""

    def __init__(self, first: Minute, minutes: int) -> None:
        self._first, self._minutes = first, minutes
        self.series: dict[str, list[int | None]] = {name: [None] * minutes for name in (*LEVELS, OLDEST, *COUNTS)}

    def look(self, minute: Minute) -> None:
        """Note that an instance observed this minute: missing values are 0, not None."""
        at = minute - self._first
        if 0 <= at < self._minutes:
            for name in (*LEVELS, *COUNTS):
                self.series[name][at] = self.series[name][at] or 0

    def add(self, start: Minute, page: Page, looked: Sequence[int]) -> None:
        """Add an instance's page that starts with that minute; `looked` are its observed places."""
        for name in COUNTS:
            for place, count in zip(page.places, page.columns.get(name, [0] * len(page.places)), strict=True):
                self._put(name, start + place, count or 0)
        for row, place in _rows_at(page.places, looked):
            for name in LEVELS:
                column = page.columns.get(name)
                self._put(name, start + place, (column[row] or 0) if column else 0)
            since = page.columns[OLDEST][row] if OLDEST in page.columns else None
            if since is not None:
                self._age(start + place, since)

    def _put(self, name: str, minute: Minute, count: int) -> None:
        at = minute - self._first
        if 0 <= at < self._minutes:
            self.series[name][at] = (self.series[name][at] or 0) + count

    def _age(self, minute: Minute, since: int) -> None:
        at = minute - self._first
        if 0 <= at < self._minutes:
            self.series[OLDEST][at] = max(self.series[OLDEST][at] or 0, (minute + 1) * 60 - since)


def _rows_at(places: Sequence[int], looked: Iterable[int]) -> Iterator[tuple[int, int]]:
    """For each observed place, the row that applies: that of the place, or the last one before."""
    row = -1
    for place in sorted(looked):
        while row + 1 < len(places) and places[row + 1] <= place:
            row += 1
        if row >= 0:
            yield row, place
