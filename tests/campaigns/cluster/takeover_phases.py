"""The phases of a takeover, told by the cluster's rounds and by the requests to its bucket, so that a slow one can be explained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from tests.servers.faulty_bucket import Request

_LOG = re.compile(r"journals/([^/]+)/log/")


class Phase(NamedTuple):
    """What was done from `began` until `ended`."""

    began: float
    ended: float
    what: str

    def told(self, since: float) -> str:
        return f"{self.what} {self.began - since:+.2f}…{self.ended - since:+.2f}"


class SealedRound(NamedTuple):
    """A round that gave the partition to an instance. Times are as those of requests."""

    opened_at: float
    sealed_at: float
    trigger: str
    owner: str

    @property
    def phase(self) -> Phase:
        return Phase(self.opened_at, self.sealed_at, f"round ({self.trigger}) → {self.owner}")


def openings(requests: Sequence[Request], partition: str, entries: Collection[str]) -> Iterator[Phase]:
    """The openings of a partition, phase by phase. `partition`: the folder of its head; `entries`: names of the journal entries with
    cycles of it."""
    head = f"{partition}/head"
    for process in sorted({each.key_id for each in requests if each.name == head}):
        own = sorted((each for each in requests if each.key_id == process), key=lambda each: each.began)
        free_at = 0.0
        for read in own:
            if (read.method, read.name) != ("GET", head) or read.began < free_at:
                continue
            later = (each for each in own if (each.method, each.name, each.status) == ("PUT", head, 200) and each.began >= read.ended)
            written = next(later, None)
            during = [each for each in own if each.began >= read.ended and (written is None or each.ended <= written.began)]
            yield Phase(read.began, read.ended, f"{process}: head read")
            yield from _walk(during, partition)
            if written is None:
                break
            yield Phase(written.began, written.ended, f"{process}: head written")
            cycles = (each for each in own if each.name in entries and each.method == "PUT" and each.began >= written.ended)
            for which, cycle in zip(("first", "second"), cycles, strict=False):
                yield Phase(cycle.began, cycle.ended, f"{process}: {which} cycle written")
            free_at = written.ended


def _walk(during: Sequence[Request], partition: str) -> Iterator[Phase]:
    """What an opening does between reading the head and writing it."""
    listed = {found[1] for each in during if each.method == "LIST" and (found := _LOG.search(each.name))}
    theirs = [each for each in during if (found := _LOG.search(each.name)) and found[1] in listed]
    yield from _together([each for each in theirs if each.method == "LIST"], "listed")
    yield from _together([each for each in theirs if each.method == "PUT"], "journal ended")
    yield from _together([each for each in theirs if each.method == "GET"], "entries read")
    yield from _together([each for each in during if each.name.startswith(partition) and "/checkpoint/" in each.name], "checkpoint read")
    yield from _together([each for each in during if "/probe/" in each.name], "bucket proved")


def _together(requests: Sequence[Request], what: str) -> Iterator[Phase]:
    if requests:
        number = f"{len(requests)} × " if len(requests) > 1 else ""
        yield Phase(min(each.began for each in requests), max(each.ended for each in requests), number + what)
