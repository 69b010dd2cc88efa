"""Processes that stand still."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path


def freeze(send: Callable[[int], None], store: Path) -> None:
    """The process to which `send` sends signals stands still, between two transactions on that SQLite file.

    In the middle of one it would keep everybody else out of the file, which docs/tasks.md says, and is not what is tested.
    """
    while True:
        send(signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(store, timeout=2, isolation_level=None)) as look:
            try:
                look.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                send(signal.SIGCONT)
            else:
                look.execute("ROLLBACK")
                return
