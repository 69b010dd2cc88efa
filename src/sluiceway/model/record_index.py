"""The index of records in the meta store that every instance holds, such as schedules."""

from __future__ import annotations

import msgspec

MAX_RECENT = 100


class RecordIndex(msgspec.Struct, frozen=True):
    """Which records changed last. `version` counts the changes; `recent` names the latest, oldest first, so that a process that has seen
    all but a few of them need not read all records."""

    version: int = 0
    count: int = 0
    recent: tuple[str, ...] = ()

    def changed(self, name: str, count: int) -> RecordIndex:
        """The index after a change of that record, by which their number rose by `count`."""
        return RecordIndex(self.version + 1, self.count + count, (*self.recent, name)[-MAX_RECENT:])
