"""Reader of a sync log: decodes its records, and folds all of it."""

from __future__ import annotations

import msgspec

from sluiceway.core.group.task_fold import restore
from sluiceway.core.group.task_state import Entry, State, decode
from sluiceway.kernel.errors import SluicewayError
from sluiceway.ports.sync_log import LogPage, SyncLog

PAGE = 1_000
"""Records per read."""


def decoded(page: LogPage) -> tuple[Entry, ...]:
    """Decode a page's records. Raises SluicewayError: if one member skipped what another folded, they would hold two truths."""
    try:
        return tuple((number, decode(data)) for number, data in page.entries)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SluicewayError(
            "internal", f"the log has records that this version does not know: {error}; check whether a newer version is running"
        ) from error


async def whole(log: SyncLog, page: LogPage | None = None) -> tuple[State, int]:
    """The state from all that is left of a log, and the last number read. `page`: its beginning, if already read.

    Raises LogUnavailableError, SluicewayError.
    """
    entries, last = await left(log, page)
    return restore(entries), last


async def left(log: SyncLog, page: LogPage | None = None) -> tuple[list[Entry], int]:
    """The entries left in a log, to be restored from; otherwise as `whole`."""
    page = page or await log.read(0, PAGE)
    entries: list[Entry] = []
    last = page.first - 1
    while True:
        if page.first - 1 > last:
            # Trimmed meanwhile, perhaps with the needed snapshot: the rest contains a newer one.
            entries = []
        entries += decoded(page)
        last = max(last, page.first - 1, entries[-1][0] if entries else 0)
        if not page.entries or last >= page.end:
            return entries, last
        page = await log.read(last, PAGE)
