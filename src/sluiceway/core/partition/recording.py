"""Recording: a partition's small records as stored, kept current from its commits, so that those of many partitions are of one moment."""

from __future__ import annotations

from sluiceway.model.changes import Changes, Snapshot


class Recording:
    """The stored records of one partition. Note every commit from before they are read; what is read may be of any moment since."""

    def __init__(self) -> None:
        self._early: list[Changes] = []
        """Commits noted before the records were read, which have some of them already."""
        self._records: Snapshot | None = None
        self._is_whole = True

    def begin(self, records: Snapshot) -> None:
        """Take the records as they were read. The recording changes them from now on."""
        self._records = records
        early, self._early = self._early, []
        for changes in early:
            self.note(changes)

    def note(self, changes: Changes) -> None:
        """Follow a commit that is done."""
        records = self._records
        if records is None:
            self._early.append(changes)
        elif changes.txn > records.txn:
            # One that was noted as failed may have landed: then the records are not those of any commit from here on.
            self._is_whole &= changes.txn == records.txn + 1
            records.txn, records.header = changes.txn, changes.header
            records.records.update(changes.puts)
            for key in changes.deletes:
                records.records.pop(key, None)

    def after(self, txn: int) -> Snapshot | None:
        """The records after that cycle; None: the recording has not followed the partition to there, and is to begin anew."""
        found = self._records
        return found if found is not None and self._is_whole and found.txn == txn else None
