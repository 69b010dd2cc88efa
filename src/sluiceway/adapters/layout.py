"""Layout versions of SQLite files, upgraded on opening."""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from sluiceway.ports.partition_store import StoreUnavailableError


def migrate(db: apsw.Connection, migrations: Sequence[str], what: str) -> None:
    """Upgrade the file's layout to the newest, in one transaction; any number of processes may do so concurrently.

    Migration number n takes the layout from version n to n + 1; 0 is an empty file. If one fails, or the process dies, the file is
    unchanged. Raises StoreUnavailableError if a newer Sluiceway wrote the file (`what` names it), apsw.Error.
    """
    if db.pragma("user_version") == len(migrations):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = db.pragma("user_version")
        if version > len(migrations):
            known = f"layout {version}; this one knows up to {len(migrations)}"
            raise StoreUnavailableError(f"{what} was written by a newer version of Sluiceway ({known})")
        for script in migrations[version:]:
            db.execute(script)
        db.pragma("user_version", len(migrations))
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")
